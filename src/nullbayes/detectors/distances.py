r"""Detectors by Gaussians around class means: the Mahalanobis distance, and the relative one.

The squared distance to a mean is :math:`(f - \mu)^\top \Sigma^{+} (f - \mu)`, with one covariance for all classes.
:math:`\Sigma^{+}` is the pseudo-inverse: directions in which the training features do not vary do not count, which
are many where there are fewer examples than features. It is applied as a whitening, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.detectors.features import WIDE, Detector, FeatureScore, Tensors, Training, groups, moments
from nullbayes.errors import DataError
from nullbayes.jacobian.features import Head, Seen
from nullbayes.linalg.spectral import eigh, relative_cutoff


@dataclass(frozen=True)
class _ClassDistance(FeatureScore):
    layout = {"centre": "d", "means": "kr", "whitening": "dr"}  # noqa: RUF012 - a constant
    own_score = "mahalanobis"

    def learn(self, training: Training, head: Head | None) -> dict[str, Tensor]:
        return _class_gaussians(training)

    def score(self, seen: Seen, tensors: Tensors, head: Head | None) -> Tensor:
        return _nearest(seen, tensors).to(seen.features.dtype)


@dataclass(frozen=True)
class _RelativeDistance(FeatureScore):
    layout = {"centre": "d", "means": "kr", "whitening": "dr", "background": "db"}  # noqa: RUF012 - a constant
    own_score = "relative_mahalanobis"

    def learn(self, training: Training, head: Head | None) -> dict[str, Tensor]:
        found = _class_gaussians(training)
        together = torch.zeros_like(training.classes)
        return {**found, "background": _whitening(training.features, found["centre"][None], together)}

    def score(self, seen: Seen, tensors: Tensors, head: Head | None) -> Tensor:
        background = (seen.features.double() - tensors["centre"]) @ tensors["background"]
        return (_nearest(seen, tensors) - background.square().sum(1)).to(seen.features.dtype)


def _class_gaussians(training: Training) -> dict[str, Tensor]:
    """Return the mean of all features, and the whitened means of the classes that occur, relative to it."""
    index, counts = groups(training.classes)
    means = training.features.new_zeros(len(counts), training.features.shape[1], dtype=torch.float64)
    for some, places in zip(training.features.split(WIDE), index.split(WIDE), strict=True):
        means.index_add_(0, places, some.double())
    centre = means.sum(0) / len(index)
    means /= counts[:, None]
    whitening = _whitening(training.features, means, index)
    return {"centre": centre, "means": (means - centre) @ whitening, "whitening": whitening}


def _whitening(features: Tensor, means: Tensor, index: Tensor) -> Tensor:  # (N, d), (k, d), (N,) -> (d, r)
    """Return a root of the pseudo-inverse of the covariance of features around means."""
    values, vectors = eigh(moments(features, means, index) / len(features))
    kept = values > max(float(values[-1]), 0.0) * relative_cutoff(len(values), features.dtype)
    if not bool(kept.any()):
        msg = "The training features of each class are all the same: a covariance needs several examples per class."
        raise DataError(msg)
    whitening: Tensor = vectors[:, kept] / values[kept].sqrt()
    return whitening


def _nearest(seen: Seen, tensors: Tensors) -> Tensor:  # (n,)
    """Return the squared distance to the nearest class mean."""
    white, means = (seen.features.double() - tensors["centre"]) @ tensors["whitening"], tensors["means"]
    nearest = (means.square().sum(1) - 2.0 * white @ means.T).argmin(1)
    return (white - means[nearest]).square().sum(1)


class Mahalanobis(Detector):
    r"""The squared Mahalanobis distance to the nearest class mean (Lee, Lee, Lee and Shin 2018).

    All classes have one covariance. The features are those of one layer, without the perturbation of inputs.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", with outputs (n, C).
    features : str, optional
        The name of the layer whose inputs are the features, as in ``model.named_modules()``; the last linear layer or
        convolution by default.
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Notes
    -----
    Classes that do not occur have no mean. Where targets are probabilities, an example belongs to the most probable
    class. Directions in which no training features vary around their class means do not count.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> x, y = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]), torch.tensor([0, 1, 0, 1])
    >>> detector = nb.detectors.Mahalanobis(torch.nn.Linear(2, 2)).fit(x, y)
    >>> detector.ood_score(torch.tensor([[0.0, 1.0], [3.0, 1.0]]))
    tensor([0., 9.])
    """

    _method = _ClassDistance()


class RelativeMahalanobis(Detector):
    r"""The Mahalanobis distance to the nearest class mean, minus that to the mean of all (Ren et al. 2021).

    The distance to the mean of all features, with their covariance, stands for how unusual an input is in ways that
    do not tell classes apart. Both distances are squared.

    Parameters
    ----------
    model, likelihood, features, parameters, batch_fn, output_fn, prior_precision
        As for :class:`Mahalanobis`.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> x, y = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]), torch.tensor([0, 1, 0, 1])
    >>> detector = nb.detectors.RelativeMahalanobis(torch.nn.Linear(2, 2)).fit(x, y)
    >>> detector.ood_score(torch.tensor([[0.0, 1.0], [3.0, 1.0]]))
    tensor([-1., -1.])
    """

    _method = _RelativeDistance()
