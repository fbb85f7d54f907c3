r"""How unlike those of every class features are, beside how unusual they are in ways that do not tell classes apart.

The squared distance to the nearest class mean, by the covariance of features around their class means, less the squared
distance to the mean of all, by the covariance around it (Ren et al. 2021). An input may be far from all training data
because it is brighter or longer than most, and still be clearly one of the classes: the difference does not count that.
The class of a training example is the one that the network predicts, so that soft labels need no other rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nullbayes.linalg.spectral import eigh

_ROUNDING = 1e-7  # of a variance, relative to the largest: features are in float32
_FLOOR = 0.01  # of the mean variance is added to each: few examples say little about the smallest ones
_MOST = 2048  # examples from which the directions of wider features are found


@dataclass(frozen=True)
class ClassDistances:
    """Gaussians around the classes and around the mean of all, in directions in which features vary.

    Attributes
    ----------
    centre : Tensor (d,)
        The mean of all features.
    directions : Tensor (d, r)
        Orthonormal, and uncorrelated on the features; all that follows is in their coordinates.
    spread : Tensor (r,)
        The standard deviation of features along each.
    apart : Tensor (r, r)
        A root of the inverse of the covariance around the class means.
    means : Tensor (k, r)
        The class means times ``apart``.
    """

    centre: Tensor
    directions: Tensor
    spread: Tensor
    apart: Tensor
    means: Tensor

    def __call__(self, features: Tensor) -> Tensor:  # (n, d) -> (n,) float64
        """Return the squared distance to the nearest class less that to all; higher is stranger."""
        inside = (features.double() - self.centre) @ self.directions
        nearest = torch.cdist(inside @ self.apart, self.means).square().amin(1)
        return nearest - (inside / self.spread).square().sum(1)


def class_distances(features: Tensor, classes: Tensor) -> ClassDistances:  # (n, d), (n,)
    """Learn from the features of examples and their classes."""
    known = features.double()
    centre = known.mean(0)
    directions = _directions(known - centre)
    inside = (known - centre) @ directions  # (n, r)
    _, index, counts = classes.unique(return_inverse=True, return_counts=True)
    means = inside.new_zeros(len(counts), inside.shape[1]).index_add_(0, index, inside) / counts[:, None]
    around = inside - means[index]
    variances, covariance = inside.square().mean(0), around.T @ around / len(around)
    covariance.diagonal().add_(_floor(covariance.diagonal()))
    apart = torch.linalg.inv(torch.linalg.cholesky(covariance)).T
    return ClassDistances(centre, directions, (variances + _floor(variances)).sqrt(), apart, means @ apart)


def _directions(centred: Tensor) -> Tensor:  # (n, d) -> (d, r)
    """Return orthonormal directions in which features vary by more than rounding."""
    step = -(-len(centred) // _MOST) if centred.shape[1] > _MOST else 1
    some = centred[::step]
    few = len(some) < some.shape[1]  # then the matrix of the examples is the smaller one
    values, vectors = eigh(some @ some.T if few else some.T @ some)
    kept = (values > _ROUNDING * values[-1]) & (values > _ROUNDING**2 * len(some))
    return some.T @ (vectors[:, kept] / values[kept].sqrt()) if few else vectors[:, kept]


def _floor(variances: Tensor) -> Tensor:  # (r,) -> ()
    """Return what is added to each variance."""
    return _FLOOR * variances.sum() / max(1, len(variances)) + _ROUNDING**2
