"""Scores of class probabilities: accuracy, proper scores, calibration.

`nullbayes.metrics` describes the shapes of ``probs`` and ``targets`` and the keywords that all functions share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.metrics.inputs import Array, Labelled, read


def accuracy(
    probs: Array, targets: Array, *, class_dim: int | None = None, ignore_index: int = -100, multilabel: bool = False
) -> float:
    """Share of examples whose most probable class is the target.

    Ties predict the first class; a binary probability of exactly 0.5 predicts class 1. With several labels per example,
    each label counts, not each example.

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).
    class_dim, ignore_index, multilabel
        How to read other shapes and labels; see `nullbayes.metrics`.

    Returns
    -------
    float
        The share, between 0 and 1.

    Examples
    --------
    >>> accuracy([[0.9, 0.1], [0.3, 0.7]], [0, 0])
    0.5
    >>> accuracy([[0.9, 0.8], [0.3, 0.7]], [[1, 1], [0, 0]], multilabel=True)
    0.75
    """
    found = read(probs, targets, class_dim, ignore_index, multilabel)
    return float((found.predicted == found.labels).double().mean())


def confidence(
    probs: Array,
    targets: Array | None = None,
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
        Probabilities (N, C), or (N,) for binary labels.
    targets : array_like, optional
        Classes (N,). They tell which positions are ignored, and which dimension holds the classes.
    class_dim, ignore_index, multilabel
        How to read other shapes and labels; see `nullbayes.metrics`.

    Returns
    -------
    float
        The mean, between 1 / C and 1.

    Examples
    --------
    >>> confidence([[0.9, 0.1], [0.3, 0.7]])
    0.8
    """
    found = read(probs, targets, class_dim, ignore_index, multilabel)
    return float(found.probs.amax(dim=1).mean())


def nll(
    probs: Array, targets: Array, *, class_dim: int | None = None, ignore_index: int = -100, multilabel: bool = False
) -> float:
    r"""Negative log-likelihood of the mean predictive, :math:`-\frac1N \sum_i \log p_{i, y_i}`, in nats.

    Average the probabilities of the samples first: the mean of the scores of single samples is never smaller (Jensen).

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).
    class_dim, ignore_index, multilabel
        How to read other shapes and labels; see `nullbayes.metrics`.

    Returns
    -------
    float
        The mean over examples; lower is better.

    Notes
    -----
    A probability of zero for the observed class would cost infinity and hide all other examples. Probabilities are
    therefore raised to the smallest normal number of the dtype of ``probs``: an example costs at most 708.4 in float64,
    87.3 in float32 and bfloat16, and 9.7 in float16.

    Examples
    --------
    >>> nll([[0.5, 0.5], [0.3, 0.7]], [0, 1])
    0.5249111
    """
    found = read(probs, targets, class_dim, ignore_index, multilabel)
    return float(-found.probs.gather(1, found.labels[:, None]).clamp(min=found.floor).log().mean())


def brier(
    probs: Array, targets: Array, *, class_dim: int | None = None, ignore_index: int = -100, multilabel: bool = False
) -> float:
    r"""Brier score, :math:`\frac1N \sum_i \sum_c (p_{ic} - [c = y_i])^2`, between 0 and 2.

    For binary labels it also sums over both classes, which gives :math:`2 (p - y)^2`: twice the one-sided score that
    some libraries report.

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).
    class_dim, ignore_index, multilabel
        How to read other shapes and labels; see `nullbayes.metrics`.

    Returns
    -------
    float
        The mean over examples; lower is better.

    Examples
    --------
    >>> brier([[0.5, 0.5], [0.0, 1.0]], [0, 1])
    0.25
    """
    found = read(probs, targets, class_dim, ignore_index, multilabel)
    one_hot = found.labels[:, None] == torch.arange(found.probs.shape[1], device="cpu")
    return float((found.probs - one_hot.double()).square().sum(dim=1).mean())


def ece(
    probs: Array,
    targets: Array,
    n_bins: int = 15,
    *,
    class_dim: int | None = None,
    ignore_index: int = -100,
    multilabel: bool = False,
) -> float:
    r"""Expected calibration error, :math:`\sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|`.

    Bin :math:`b = 1, \dots, B` holds the :math:`n_b` examples whose confidence lies in :math:`((b - 1) / B, b / B]`;
    the first bin also holds 0.

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).
    n_bins : int
        Number :math:`B` of bins of equal width.
    class_dim, ignore_index, multilabel
        How to read other shapes and labels; see `nullbayes.metrics`.

    Returns
    -------
    float
        The error, between 0 and 1.

    Examples
    --------
    >>> ece([[1.0, 0.0], [1.0, 0.0]], [0, 1])
    0.5
    """
    found = read(probs, targets, class_dim, ignore_index, multilabel)
    gap, count = _calibration_gaps(found, n_bins)
    return float(gap.sum() / count.sum())


def mce(
    probs: Array,
    targets: Array,
    n_bins: int = 15,
    *,
    class_dim: int | None = None,
    ignore_index: int = -100,
    multilabel: bool = False,
) -> float:
    r"""Maximum calibration error, :math:`\max_b |\mathrm{acc}_b - \mathrm{conf}_b|` over non-empty bins.

    The bins are those of `ece`. A bin with a single example counts as much as any other, so that with few examples or
    many bins it is large even for a calibrated model.

    Parameters
    ----------
    probs, targets : array_like
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).
    n_bins : int
        Number of bins of equal width.
    class_dim, ignore_index, multilabel
        How to read other shapes and labels; see `nullbayes.metrics`.

    Returns
    -------
    float
        The error of the worst bin, between 0 and 1.

    Examples
    --------
    >>> mce([[1.0, 0.0], [1.0, 0.0], [0.3, 0.7]], [0, 1, 1])
    0.5
    """
    found = read(probs, targets, class_dim, ignore_index, multilabel)
    gap, count = _calibration_gaps(found, n_bins)
    return float((gap / count.clamp(min=1)).max())


def _calibration_gaps(found: Labelled, n_bins: int) -> tuple[Tensor, Tensor]:
    """Return n_b |acc_b - conf_b| and n_b for each bin."""
    if not hasattr(n_bins, "__index__") or n_bins < 1:
        message = f"n_bins must be at least 1, a whole number, but it is {n_bins}."
        raise ValueError(message)
    top = found.probs.amax(dim=1)
    # Inner edges only: everything beyond them falls into the outer bins, so that both ends are counted.
    edges = torch.arange(1, n_bins, dtype=torch.float64, device="cpu") / n_bins
    index = torch.bucketize(top, edges)
    gap = torch.bincount(index, weights=top - (found.predicted == found.labels).double(), minlength=n_bins)
    return gap.abs(), torch.bincount(index, minlength=n_bins)
