r"""Metrics of predictions: accuracy, proper scores, calibration, regression, out-of-distribution detection.

All functions take tensors, NumPy arrays or lists and return a Python float. They do not depend on models or posteriors.

=====================================  =====================================================================
`accuracy`, `confidence`               share of correct predictions; mean probability of the predicted class
`nll`, `brier`                         proper scores of the mean predictive; lower is better
`ece`, `mce`                           gap between confidence and accuracy, mean and worst over bins
`rmse`                                 error of predicted numbers
`gaussian_nll`, `crps`                 proper scores of Gaussian predictives; lower is better
`interval_coverage`, `interval_width`  how often intervals contain their target; how wide they are
`auroc`, `aupr`, `fpr95`               how well a score separates out-of-distribution from in-distribution inputs
`aurc`                                 mean loss of the predictions that remain as a score rejects the others
=====================================  =====================================================================

**Classes.** ``probs`` holds the probabilities of the *mean* predictive (average the samples first), of shape (N, C),
and ``targets`` holds integer or boolean classes (N,). With more dimensions, such as (N, C, H, W) with targets (N, H, W)
or (N, T, C) with targets (N, T), every position counts as one example. The classes are in dimension 1 or in the last
one; the shape of the targets tells which. Pass ``class_dim`` if both would fit, or if it is another dimension.
Positions whose target is ``ignore_index`` (default -100, as in PyTorch) are left out.

**Binary labels.** ``probs`` of shape (N,) or (N, 1) holds the probability :math:`p` of class 1. It stands for the two
classes :math:`(1 - p, p)` and predicts class 1 if :math:`p \ge 0.5`. Targets may be floating point, 0 or 1.

**Several labels per example.** With ``multilabel=True`` every entry of ``probs``, of any shape, is such a :math:`p`
with its own target, 0 or 1, and the result is an average over all entries. Without it, targets with the shape of
``probs`` are refused, because they might be one-hot classes.

Shapes may differ by dimensions of size one after the first, such as (N,) and (N, 1); nothing else is broadcast. All
sums are taken in float64 on the CPU, whatever the device and the dtype of the inputs. Input that cannot be scored
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
