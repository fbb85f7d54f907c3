"""Metrics of scores that rank inputs: detection of out-of-distribution inputs, and of wrong predictions."""

from __future__ import annotations

import torch

from nullbayes.metrics.inputs import Array, as_scores


def auroc(scores_in: Array, scores_out: Array) -> float:
    r"""Area under the receiver operating characteristic of out-of-distribution detection.

    .. math:: P(s_\mathrm{out} > s_\mathrm{in}) + \tfrac12 P(s_\mathrm{out} = s_\mathrm{in}),

    computed exactly over all pairs of the two groups, in :math:`O((N + M) \log N)`.

    Parameters
    ----------
    scores_in, scores_out : array_like
        Scores (N,) of in-distribution and (M,) of out-of-distribution inputs; high scores mean out-of-distribution.

    Returns
    -------
    float
        The area: 0.5 is chance, 1 is perfect.

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


def aupr(scores_in: Array, scores_out: Array) -> float:
    r"""Area under the precision-recall curve, with out-of-distribution inputs as the positives.

    It is the average precision :math:`\sum_k (R_k - R_{k-1}) P_k` over the distinct scores in descending order, where
    :math:`R_k` is the share of ``scores_out`` that reach the :math:`k`-th threshold and :math:`P_k` the share of
    out-of-distribution inputs among all inputs that reach it. Precision is not interpolated between thresholds.

    Parameters
    ----------
    scores_in, scores_out : array_like
        Scores (N,) of in-distribution and (M,) of out-of-distribution inputs; high scores mean out-of-distribution.

    Returns
    -------
    float
        The area. Unlike for `auroc`, chance depends on the sizes of the groups: it is about :math:`M / (N + M)`.

    Examples
    --------
    >>> aupr(scores_in=[1.0, 2.0], scores_out=[2.0, 3.0])
    0.8333333
    """
    inside, outside = as_scores(scores_in, "scores_in"), as_scores(scores_out, "scores_out")
    thresholds, hits = outside.unique(return_counts=True)  # recall changes at these scores only
    flagged_out = hits.flip(0).cumsum(0).flip(0)
    flagged_in = inside.numel() - torch.searchsorted(inside.sort().values, thresholds)
    precision = flagged_out.double() / (flagged_out + flagged_in)
    return float((hits * precision).sum() / outside.numel())


def fpr95(scores_in: Array, scores_out: Array) -> float:
    r"""False positive rate at 95 % true positive rate; lower is better.

    An input is flagged when its score reaches the threshold, which is the largest that flags 95 % of ``scores_out``.

    Parameters
    ----------
    scores_in, scores_out : array_like
        Scores (N,) of in-distribution and (M,) of out-of-distribution inputs; high scores mean out-of-distribution.

    Returns
    -------
    float
        The share of ``scores_in`` that is flagged as well.

    Examples
    --------
    >>> fpr95(scores_in=[1.0, 2.0], scores_out=[2.0, 3.0])
    0.5
    """
    inside, outside = as_scores(scores_in, "scores_in"), as_scores(scores_out, "scores_out")
    n_flagged = (95 * outside.numel() + 99) // 100  # the ceiling, in integers: 0.95 is not a binary fraction
    threshold = outside.sort(descending=True).values[n_flagged - 1]
    return float((inside >= threshold).double().mean())


def aurc(scores: Array, errors: Array) -> float:
    r"""Area under the risk-coverage curve: the mean loss as a score rejects predictions; lower is better.

    With the losses :math:`\ell_{(1)}, \dots, \ell_{(N)}` sorted from the most trusted prediction (the lowest score) to
    the least, it is the mean over all coverages :math:`k / N` of the mean loss of the :math:`k` most trusted ones:

    .. math:: \frac1N \sum_{k=1}^N \frac1k \sum_{i=1}^k \ell_{(i)}.

    Ties are averaged over all orders of the tied predictions.

    Parameters
    ----------
    scores : array_like
        Score (N,) of each prediction, such as its entropy; higher is less trusted.
    errors : array_like
        Loss (N,) of each prediction: 1 or True where it is wrong, or any other loss.

    Returns
    -------
    float
        The area. A random score gets about the mean loss. Even the best score does not get zero, so that methods can be
        compared only where their losses are similar.

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
    # Averaged over all its orders, each prediction of a tied group adds the mean loss of the group.
    mean_losses = torch.bincount(group, weights=losses) / sizes
    kept = torch.arange(1, len(losses) + 1, device="cpu")
    return float((mean_losses.repeat_interleave(sizes).cumsum(0) / kept).mean())
