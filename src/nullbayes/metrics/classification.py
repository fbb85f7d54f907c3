"""Scores of class probabilities: accuracy, proper scores, calibration.

The shapes that ``probs`` and ``targets`` may have, and what the keywords mean, are described in `nullbayes.metrics`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.metrics.inputs import ArrayLike
from nullbayes.metrics.labels import Labelled, read


def accuracy(
    probs: ArrayLike,
    targets: ArrayLike,
    *,
    class_dim: int | None = None,
    ignore_index: int = -100,
    multilabel: bool = False,
) -> float:
    """Share of examples whose most probable class is the target.

    The first of equally probable classes is predicted; a binary probability of exactly 0.5 predicts class 1. With
    several labels it is the share of single labels that are right, not of examples with all labels right.

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,); or with more dimensions.
    class_dim : int, optional
        Dimension of ``probs`` that holds the classes, where the shapes leave it open.
    ignore_index : int
        Target of positions that are left out.
    multilabel : bool
        Whether every entry of ``probs`` is a label of its own.

    Examples
    --------
    >>> accuracy([[0.9, 0.1], [0.3, 0.7]], [0, 0])
    0.5
    >>> accuracy([[0.9, 0.8], [0.3, 0.7]], [[1, 1], [0, 0]], multilabel=True)
    0.75
    """
    found = read(probs, targets, class_dim=class_dim, ignore_index=ignore_index, multilabel=multilabel)
    return float((found.predicted == found.labels).double().mean())


def confidence(
    probs: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    class_dim: int | None = None,
    ignore_index: int = -100,
    multilabel: bool = False,
) -> float:
    r"""Mean probability of the predicted class, :math:`\frac1N \sum_i \max_c p_{ic}`.

    A binary probability :math:`p` counts as :math:`\max(p, 1 - p)`.

    Parameters
    ----------
    probs : array_like
        Probabilities (N, C), or (N,) for binary labels; or with more dimensions.
    targets : array_like, optional
        Classes; they say which positions are left out, and which dimension holds the classes.
    class_dim : int, optional
        Dimension of ``probs`` that holds the classes, where the shapes leave it open.
    ignore_index : int
        Target of positions that are left out.
    multilabel : bool
        Whether every entry of ``probs`` is a label of its own.
    """
    found = read(probs, targets, class_dim=class_dim, ignore_index=ignore_index, multilabel=multilabel)
    return float(found.probs.amax(dim=1).mean())


def nll(
    probs: ArrayLike,
    targets: ArrayLike,
    *,
    class_dim: int | None = None,
    ignore_index: int = -100,
    multilabel: bool = False,
) -> float:
    r"""Negative log-likelihood of the mean predictive, :math:`-\frac1N \sum_i \log p_{i, y_i}`, in nats.

    The mean of the samples' own scores is another quantity, and never smaller (Jensen).

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,); or with more dimensions.
    class_dim : int, optional
        Dimension of ``probs`` that holds the classes, where the shapes leave it open.
    ignore_index : int
        Target of positions that are left out.
    multilabel : bool
        Whether every entry of ``probs`` is a label of its own.

    Notes
    -----
    A probability of zero for the class that occurred would cost infinity, and one such example would hide all
    others. Probabilities are therefore raised to the smallest normal number of the dtype of ``probs``: an
    example costs at most 708.4 in float64, 87.3 in float32 and bfloat16, and 9.7 in float16.
    """
    found = read(probs, targets, class_dim=class_dim, ignore_index=ignore_index, multilabel=multilabel)
    return float(-found.probs.gather(1, found.labels[:, None]).clamp(min=found.floor).log().mean())


def brier(
    probs: ArrayLike,
    targets: ArrayLike,
    *,
    class_dim: int | None = None,
    ignore_index: int = -100,
    multilabel: bool = False,
) -> float:
    r"""Brier score, :math:`\frac1N \sum_i \sum_c (p_{ic} - [c = y_i])^2`, between 0 and 2.

    The sum runs over both classes of a binary label as well, so that it is :math:`2 (p - y)^2`: twice the
    one-sided score that some libraries report.

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,); or with more dimensions.
    class_dim : int, optional
        Dimension of ``probs`` that holds the classes, where the shapes leave it open.
    ignore_index : int
        Target of positions that are left out.
    multilabel : bool
        Whether every entry of ``probs`` is a label of its own.
    """
    found = read(probs, targets, class_dim=class_dim, ignore_index=ignore_index, multilabel=multilabel)
    one_hot = found.labels[:, None] == torch.arange(found.probs.shape[1], device="cpu")
    return float((found.probs - one_hot.double()).square().sum(dim=1).mean())


def ece(
    probs: ArrayLike,
    targets: ArrayLike,
    n_bins: int = 15,
    *,
    class_dim: int | None = None,
    ignore_index: int = -100,
    multilabel: bool = False,
) -> float:
    r"""Expected calibration error, :math:`\sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|`.

    Bin :math:`b = 1, \dots, B` holds the examples whose confidence lies in :math:`((b - 1) / B, b / B]`, the
    first bin 0 as well. Every example is counted, those of confidence exactly 1 included.

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,); or with more dimensions.
    n_bins : int
        Number :math:`B` of bins of equal width.
    class_dim : int, optional
        Dimension of ``probs`` that holds the classes, where the shapes leave it open.
    ignore_index : int
        Target of positions that are left out.
    multilabel : bool
        Whether every entry of ``probs`` is a label of its own.

    Examples
    --------
    >>> ece([[1.0, 0.0], [1.0, 0.0]], [0, 1])
    0.5
    """
    found = read(probs, targets, class_dim=class_dim, ignore_index=ignore_index, multilabel=multilabel)
    gap, count = _calibration_gaps(found, n_bins)
    return float(gap.sum() / count.sum())


def mce(
    probs: ArrayLike,
    targets: ArrayLike,
    n_bins: int = 15,
    *,
    class_dim: int | None = None,
    ignore_index: int = -100,
    multilabel: bool = False,
) -> float:
    r"""Maximum calibration error, :math:`\max_b |\mathrm{acc}_b - \mathrm{conf}_b|` over non-empty bins.

    The bins are those of `ece`. A bin with a single example counts as much as any other, so few examples or
    many bins make it large for a calibrated model, too.

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,); or with more dimensions.
    n_bins : int
        Number of bins of equal width.
    class_dim : int, optional
        Dimension of ``probs`` that holds the classes, where the shapes leave it open.
    ignore_index : int
        Target of positions that are left out.
    multilabel : bool
        Whether every entry of ``probs`` is a label of its own.
    """
    found = read(probs, targets, class_dim=class_dim, ignore_index=ignore_index, multilabel=multilabel)
    gap, count = _calibration_gaps(found, n_bins)
    return float((gap / count.clamp(min=1)).max())


def _calibration_gaps(found: Labelled, n_bins: int) -> tuple[Tensor, Tensor]:
    """Return, for each bin, n_b |acc_b - conf_b| and n_b."""
    if not hasattr(n_bins, "__index__") or n_bins < 1:
        message = f"n_bins must be at least 1, a whole number, but it is {n_bins}."
        raise ValueError(message)
    top = found.probs.amax(dim=1)
    # Inner edges only: what lies beyond the first or the last falls into the outer bins, so both ends count.
    edges = torch.arange(1, n_bins, dtype=torch.float64, device="cpu") / n_bins
    index = torch.bucketize(top, edges)
    gap = torch.bincount(index, weights=top - (found.predicted == found.labels).double(), minlength=n_bins)
    return gap.abs(), torch.bincount(index, minlength=n_bins)
