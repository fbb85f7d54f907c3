"""Scores that rank inputs: how well they tell strangers from the others, and errors from right predictions."""

from __future__ import annotations

import torch

from nullbayes.metrics.inputs import ArrayLike, as_scores


def auroc(scores_in: ArrayLike, scores_out: ArrayLike) -> float:
    r"""Area under the receiver operating characteristic: how often the stranger of two inputs scores higher.

    .. math:: P(s_\mathrm{out} > s_\mathrm{in}) + \tfrac12 P(s_\mathrm{out} = s_\mathrm{in}),

    exact over all pairs of the two samples, in :math:`O((N + M) \log N)` by sorting.

    Parameters
    ----------
    scores_in, scores_out : array_like
        Scores (N,) of in-distribution and (M,) of out-of-distribution inputs; higher is stranger.

    Examples
    --------
    >>> auroc(scores_in=[1.0, 2.0], scores_out=[2.0, 3.0])
    0.875
    """
    inside, outside = as_scores(scores_in, "scores_in"), as_scores(scores_out, "scores_out")
    inside = inside.sort().values
    # Counted in halves: an in-distribution score below adds two, an equal one adds one. Integers stay exact.
    halves = torch.searchsorted(inside, outside) + torch.searchsorted(inside, outside, right=True)
    return int(halves.sum()) / (2 * inside.numel() * outside.numel())


def aupr(scores_in: ArrayLike, scores_out: ArrayLike) -> float:
    r"""Area under the precision-recall curve, with out-of-distribution inputs as the positives.

    It is the average precision :math:`\sum_k (R_k - R_{k-1}) P_k` over the distinct scores, from the highest down,
    where :math:`R_k` is the share of ``scores_out`` that reach the :math:`k`-th threshold and :math:`P_k` the share of
    out-of-distribution inputs among all that reach it. Equal scores pass the threshold together. Precision is not
    interpolated between thresholds.

    Parameters
    ----------
    scores_in, scores_out : array_like
        Scores (N,) of in-distribution and (M,) of out-of-distribution inputs; higher is stranger.

    Notes
    -----
    Unlike `auroc`, it depends on the sizes of the two groups: scores that say nothing get about :math:`M / (N + M)`.

    Examples
    --------
    >>> aupr(scores_in=[1.0, 2.0], scores_out=[2.0, 3.0])
    0.8333333
    """
    inside, outside = as_scores(scores_in, "scores_in"), as_scores(scores_out, "scores_out")
    thresholds, hits = outside.unique(return_counts=True)  # recall changes at the scores of strangers only
    flagged_out = hits.flip(0).cumsum(0).flip(0)
    flagged_in = inside.numel() - torch.searchsorted(inside.sort().values, thresholds)
    precision = flagged_out.double() / (flagged_out + flagged_in)
    return float((hits * precision).sum() / outside.numel())


def fpr95(scores_in: ArrayLike, scores_out: ArrayLike) -> float:
    r"""False positive rate at 95 % true positive rate; lower is better.

    An input is flagged as out-of-distribution when its score reaches the threshold, which is the largest that
    flags 95 % or more of ``scores_out``. The result is the share of ``scores_in`` that is flagged, too.

    Parameters
    ----------
    scores_in, scores_out : array_like
        Scores (N,) of in-distribution and (M,) of out-of-distribution inputs; higher is stranger.
    """
    inside, outside = as_scores(scores_in, "scores_in"), as_scores(scores_out, "scores_out")
    n_flagged = (95 * outside.numel() + 99) // 100  # the ceiling, in integers: 0.95 is not a binary fraction
    threshold = outside.sort(descending=True).values[n_flagged - 1]
    return float((inside >= threshold).double().mean())


def aurc(scores: ArrayLike, errors: ArrayLike) -> float:
    r"""Area under the risk-coverage curve of predictions that are kept in order of trust; lower is better.

    With the losses :math:`\ell_{(1)}, \dots, \ell_{(N)}` sorted from the most trusted prediction (the lowest score) to
    the least, it is the mean over all coverages :math:`k / N` of the risk of the :math:`k` predictions that are kept:

    .. math:: \frac1N \sum_{k=1}^N \frac1k \sum_{i=1}^k \ell_{(i)}.

    Where scores are equal, it is the average of this over all orders of the tied predictions.

    Parameters
    ----------
    scores : array_like
        Score (N,) of each prediction, such as its entropy; higher is less trusted.
    errors : array_like
        Loss (N,) of each prediction: 1 or True where it is wrong, or any other loss.

    Notes
    -----
    Scores that say nothing get the mean loss. The least possible value is not zero unless all losses are, so methods
    are comparable where their losses are.

    Examples
    --------
    >>> aurc(scores=[0.1, 0.2, 0.9], errors=[0, 0, 1])
    0.1111111
    """
    trust, losses = as_scores(scores, "scores"), as_scores(errors, "errors", "loss")
    if len(trust) != len(losses):
        message = f"errors must hold one loss for each score, but there are {len(losses)} for {len(trust)} scores."
        raise ValueError(message)
    _, group, sizes = trust.unique(return_inverse=True, return_counts=True)
    # Averaged over all its orders, a tied group adds its mean loss with each prediction that is kept.
    mean_losses = torch.bincount(group, weights=losses) / sizes
    kept = torch.arange(1, len(losses) + 1, device="cpu")
    return float((mean_losses.repeat_interleave(sizes).cumsum(0) / kept).mean())
