r"""Scores of predictions: accuracy, proper scores, calibration, regression, detection of strange inputs.

Plain functions of tensors, NumPy arrays or lists that return Python floats. They know nothing of models or
posteriors, so every method is scored by the same code.

=====================================  =====================================================================
`accuracy`, `confidence`               share of right predictions; mean probability of the predicted class
`nll`, `brier`                         proper scores of the mean predictive; lower is better
`ece`, `mce`                           distance between confidence and accuracy, mean and worst over bins
`rmse`                                 error of predicted numbers
`gaussian_nll`, `crps`                 proper scores of Gaussian predictives; lower is better
`interval_coverage`, `interval_width`  how often intervals hold their target; how wide they are
`auroc`, `aupr`, `fpr95`               how well a score tells out-of-distribution inputs from the others
`aurc`                                 risk of the predictions that are kept as a score rejects the others
=====================================  =====================================================================

**Classes.** ``probs`` holds the probabilities of the *mean* predictive (average the samples first), of shape (N, C),
and ``targets`` integer classes (N,), booleans included. With more dimensions, such as (N, C, H, W) with targets
(N, H, W) or (N, T, C) with targets (N, T), every position counts as one example. Dimension 1 or the last holds the
classes; the shape of the targets says which. ``class_dim`` says it where both would fit, or where it is another
dimension. Positions whose target is ``ignore_index`` (-100, as in PyTorch) are left out.

**Binary labels.** ``probs`` of shape (N,) or (N, 1) holds the probability :math:`p` of class 1, which stands for the
two classes :math:`(1 - p, p)` and predicts class 1 where :math:`p \ge 0.5`. Targets may be floating point, 0 or 1.

**Several labels.** With ``multilabel=True`` every entry of ``probs``, of any shape, is such a :math:`p` with a target
of its own, 0 or 1, and scores are averages over all entries. Without it, targets of the shape of ``probs`` are
refused, because they may as well be one-hot classes.

Shapes may differ by dimensions of size one after the first, such as (N,) and (N, 1); nothing else is broadcast. All
sums are taken in float64 on the CPU, whatever the device and the precision of the inputs. Input that cannot be scored
raises `ValueError`.
"""

from nullbayes.metrics.classification import accuracy, brier, confidence, ece, mce, nll
from nullbayes.metrics.ranking import aupr, aurc, auroc, fpr95
from nullbayes.metrics.regression import crps, gaussian_nll, interval_coverage, interval_width, rmse

__all__ = [
    "accuracy",
    "aupr",
    "aurc",
    "auroc",
    "brier",
    "confidence",
    "crps",
    "ece",
    "fpr95",
    "gaussian_nll",
    "interval_coverage",
    "interval_width",
    "mce",
    "nll",
    "rmse",
]
