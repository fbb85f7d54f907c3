r"""Scores of predictions: accuracy, proper scores, calibration, detection of strange inputs.

Plain functions of tensors that return Python floats. They know nothing of models or posteriors, so every
method is scored by the same code.

========================  ==================================================================================
`accuracy`, `confidence`  share of right predictions; mean probability of the predicted class
`nll`, `brier`            proper scores of the mean predictive; lower is better
`ece`, `mce`              distance between confidence and accuracy, mean and worst over bins; lower is better
`auroc`, `fpr95`          how well a score tells out-of-distribution inputs from the others
========================  ==================================================================================

``probs`` holds the probabilities of the *mean* predictive (average the samples first), of shape (N, C); or of
shape (N,) or (N, 1) with the probability :math:`p` of class 1 for binary labels, which stands for the two
classes :math:`(1 - p, p)` and predicts class 1 where :math:`p \ge 0.5`. ``targets`` holds integer classes
(N,), booleans included; (N, 1) is accepted for binary labels. All sums are taken in float64 on the CPU,
whatever the device and the precision of the inputs. Input that cannot be scored raises `ValueError`.
"""

import torch
from torch import Tensor

__all__ = ["accuracy", "auroc", "brier", "confidence", "ece", "fpr95", "mce", "nll"]

_RANGE_TOLERANCE = 1e-4
_SUM_TOLERANCE = 1e-3


def accuracy(probs: Tensor, targets: Tensor) -> float:
    """Share of examples whose most probable class is the target.

    The first of equally probable classes is predicted; a binary probability of exactly 0.5 predicts class 1.

    Parameters
    ----------
    probs, targets : Tensor
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).

    Examples
    --------
    >>> accuracy(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0, 0]))
    0.5
    """
    _, predicted, labels = _checked(probs, targets)
    return float((predicted == labels).double().mean())


def confidence(probs: Tensor) -> float:
    r"""Mean probability of the predicted class, :math:`\frac1N \sum_i \max_c p_{ic}`.

    A binary probability :math:`p` counts as :math:`\max(p, 1 - p)`.

    Parameters
    ----------
    probs : Tensor
        Probabilities (N, C), or (N,) for binary labels.
    """
    return float(_class_probs(probs).amax(dim=1).mean())


def nll(probs: Tensor, targets: Tensor) -> float:
    r"""Negative log-likelihood of the mean predictive, :math:`-\frac1N \sum_i \log p_{i, y_i}`, in nats.

    The mean of the samples' own scores is another quantity, and never smaller (Jensen).

    Parameters
    ----------
    probs, targets : Tensor
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).

    Notes
    -----
    A probability of zero for the class that occurred would cost infinity, and one such example would hide all
    others. Probabilities are therefore raised to the smallest normal number of the dtype of ``probs``: an
    example costs at most 708.4 in float64, 87.3 in float32 and bfloat16, and 9.7 in float16.
    """
    table, _, labels = _checked(probs, targets)
    likelihood = table.gather(1, labels[:, None]).clamp(min=torch.finfo(probs.dtype).tiny)
    return float(-likelihood.log().mean())


def brier(probs: Tensor, targets: Tensor) -> float:
    r"""Brier score, :math:`\frac1N \sum_i \sum_c (p_{ic} - [c = y_i])^2`, between 0 and 2.

    The sum runs over both classes of a binary label as well, so that it is :math:`2 (p - y)^2`: twice the
    one-sided score that some libraries report.

    Parameters
    ----------
    probs, targets : Tensor
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).
    """
    table, _, labels = _checked(probs, targets)
    one_hot = labels[:, None] == torch.arange(table.shape[1], device="cpu")
    return float((table - one_hot.double()).square().sum(dim=1).mean())


def ece(probs: Tensor, targets: Tensor, n_bins: int = 15) -> float:
    r"""Expected calibration error, :math:`\sum_b \frac{n_b}{N} |\mathrm{acc}_b - \mathrm{conf}_b|`.

    Bin :math:`b = 1, \dots, B` holds the examples whose confidence lies in :math:`((b - 1) / B, b / B]`, the
    first bin 0 as well. Every example is counted, those of confidence exactly 1 included.

    Parameters
    ----------
    probs, targets : Tensor
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).
    n_bins : int
        Number :math:`B` of bins of equal width.

    Examples
    --------
    >>> ece(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    0.5
    """
    gap, count = _calibration_gaps(probs, targets, n_bins)
    return float(gap.sum() / count.sum())


def mce(probs: Tensor, targets: Tensor, n_bins: int = 15) -> float:
    r"""Maximum calibration error, :math:`\max_b |\mathrm{acc}_b - \mathrm{conf}_b|` over non-empty bins.

    The bins are those of `ece`. A bin with a single example counts as much as any other, so few examples or
    many bins make it large for a calibrated model, too.

    Parameters
    ----------
    probs, targets : Tensor
        Probabilities (N, C), or (N,) for binary labels, and classes (N,).
    n_bins : int
        Number of bins of equal width.
    """
    gap, count = _calibration_gaps(probs, targets, n_bins)
    return float((gap / count.clamp(min=1)).max())


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    r"""Area under the receiver operating characteristic: how often the stranger of two inputs scores higher.

    .. math:: P(s_\mathrm{out} > s_\mathrm{in}) + \tfrac12 P(s_\mathrm{out} = s_\mathrm{in}),

    exact over all pairs of the two samples, in :math:`O((N + M) \log N)` by sorting.

    Parameters
    ----------
    scores_in, scores_out : Tensor
        Scores (N,) of in-distribution and (M,) of out-of-distribution inputs; higher is stranger.

    Examples
    --------
    >>> auroc(scores_in=torch.tensor([1.0, 2.0]), scores_out=torch.tensor([2.0, 3.0]))
    0.875
    """
    inside, outside = _scores(scores_in, "scores_in"), _scores(scores_out, "scores_out")
    inside = inside.sort().values
    # Counted in halves: an in-distribution score below adds two, an equal one adds one. Integers stay exact.
    halves = torch.searchsorted(inside, outside) + torch.searchsorted(inside, outside, right=True)
    return int(halves.sum()) / (2 * inside.numel() * outside.numel())


def fpr95(scores_in: Tensor, scores_out: Tensor) -> float:
    r"""False positive rate at 95 % true positive rate; lower is better.

    An input is flagged as out-of-distribution when its score reaches the threshold, which is the largest that
    flags 95 % or more of ``scores_out``. The result is the share of ``scores_in`` that is flagged, too.

    Parameters
    ----------
    scores_in, scores_out : Tensor
        Scores (N,) of in-distribution and (M,) of out-of-distribution inputs; higher is stranger.
    """
    inside, outside = _scores(scores_in, "scores_in"), _scores(scores_out, "scores_out")
    n_flagged = (95 * outside.numel() + 99) // 100  # the ceiling, in integers: 0.95 is not a binary fraction
    threshold = outside.sort(descending=True).values[n_flagged - 1]
    return float((inside >= threshold).double().mean())


def _calibration_gaps(probs: Tensor, targets: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """Return, for each bin, n_b |acc_b - conf_b| and n_b."""
    if not hasattr(n_bins, "__index__") or n_bins < 1:
        message = f"n_bins must be at least 1, a whole number, but it is {n_bins}."
        raise ValueError(message)
    table, predicted, labels = _checked(probs, targets)
    top = table.amax(dim=1)
    # Inner edges only: what lies beyond the first or the last falls into the outer bins, so both ends count.
    edges = torch.arange(1, n_bins, dtype=torch.float64, device="cpu") / n_bins
    index = torch.bucketize(top, edges)
    gap = torch.bincount(index, weights=top - (predicted == labels).double(), minlength=n_bins)
    return gap.abs(), torch.bincount(index, minlength=n_bins)


def _checked(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return class probabilities (N, C), predicted classes (N,) and target classes (N,)."""
    table = _class_probs(probs)
    _check_tensor(targets, "targets")
    binary = _is_binary(probs)
    predicted = (table[:, 1] >= 0.5).long() if binary else table.argmax(dim=1)
    n_examples, n_classes = table.shape
    if targets.is_floating_point() or targets.is_complex():
        message = f"targets must be integer classes, but they are {targets.dtype}; convert them with .long()."
        raise ValueError(message)
    if targets.shape != (n_examples,) and not (binary and targets.shape == (n_examples, 1)):
        message = (
            f"targets must have shape ({n_examples},), one class for each row of probs, but they have shape "
            f"{tuple(targets.shape)}; turn one-hot targets into classes with .argmax(dim=1)."
        )
        raise ValueError(message)
    labels = targets.detach().cpu().long().flatten()
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= n_classes:
        message = (
            f"targets must lie between 0 and {n_classes - 1}, but they run from {low} to {high}; "
            "number the classes from 0 and drop the examples to be ignored."
        )
        raise ValueError(message)
    return table, predicted, labels


def _check_tensor(values: object, name: str) -> None:
    if not isinstance(values, Tensor):
        message = f"{name} must be a tensor, but it is {type(values).__name__}; convert it with torch.as_tensor."
        raise ValueError(message)


def _is_binary(probs: Tensor) -> bool:
    return probs.ndim == 1 or probs.shape[1] == 1


def _class_probs(probs: Tensor) -> Tensor:
    """Return the checked probabilities (N, C) in float64 on the CPU, with C = 2 for binary labels."""
    _check_tensor(probs, "probs")
    if probs.ndim not in (1, 2):
        message = (
            f"probs must have shape (N, C), or (N,) for binary labels, but it has shape "
            f"{tuple(probs.shape)}; average over the samples first."
        )
        raise ValueError(message)
    if probs.numel() == 0:
        message = f"probs is empty (shape {tuple(probs.shape)}); pass at least one example."
        raise ValueError(message)
    if not probs.is_floating_point():
        message = f"probs must be floating point, but it is {probs.dtype}; pass probabilities, not classes."
        raise ValueError(message)
    table = probs.detach().cpu().double()  # the CPU first: not every accelerator has float64
    if not table.isfinite().all():
        message = "probs has NaN or infinite entries; find out where the model produces them."
        raise ValueError(message)
    low, high = float(table.min()), float(table.max())
    if low < -_RANGE_TOLERANCE or high > 1 + _RANGE_TOLERANCE:
        message = (
            f"probs must lie between 0 and 1, but its entries run from {low:.5g} to {high:.5g}; "
            f"if these are logits, pass their {'sigmoid' if _is_binary(probs) else 'softmax'}."
        )
        raise ValueError(message)
    table = table.clamp(0, 1)
    if _is_binary(probs):
        p = table.flatten()
        return torch.stack([1 - p, p], dim=1)
    total = table.sum(dim=1)
    worst = float(total[(total - 1).abs().argmax()])
    if abs(worst - 1) > _SUM_TOLERANCE:
        message = (
            f"Rows of probs must sum to 1, but one sums to {worst:.5g}; if these are logits, pass their "
            "softmax (in float32 or better); if these are independent labels, score each column on its own."
        )
        raise ValueError(message)
    return table


def _scores(scores: Tensor, name: str) -> Tensor:
    """Return the checked scores (N,) in float64 on the CPU."""
    _check_tensor(scores, name)
    if scores.ndim != 1:
        message = f"{name} must have shape (N,), a score for each input, but it has shape {tuple(scores.shape)}."
        raise ValueError(message)
    if scores.numel() == 0:
        message = f"{name} is empty; pass at least one score."
        raise ValueError(message)
    checked = scores.detach().cpu().double()
    if not checked.isfinite().all():
        message = f"{name} has NaN or infinite entries; find out where they come from, or drop those inputs."
        raise ValueError(message)
    return checked
