"""Metrics of classes and scores against scikit-learn, hand-computed cases, and input that they must refuse."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nullbayes import metrics
from support.drawing import randint, randn, randperm

oracle = pytest.importorskip("sklearn.metrics")


Metric = Callable[[Tensor, Tensor], float]
OF_CLASSES: list[Metric] = [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece, metrics.mce]
OF_SCORES: list[Metric] = [metrics.auroc, metrics.aupr, metrics.fpr95]
TIGHT = 1e-12


def draw(seed: int, n: int = 400, n_classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * randn(n, n_classes, generator=generator, dtype=torch.float64)
    targets = torch.multinomial(logits.softmax(1).cpu(), 1, generator=generator).flatten().to(logits.device)
    return (1.5 * logits).softmax(1), targets  # overconfident on purpose: a calibration error to be measured


def draw_binary(seed: int, n: int = 400) -> tuple[Tensor, Tensor]:
    probs, targets = draw(seed, n, 2)
    return probs[:, 1], targets


def draw_scores(seed: int, n_in: int, n_out: int, n_levels: int) -> tuple[Tensor, Tensor]:
    """Return scores on few levels, so that there are ties within and between the two groups."""
    generator = torch.Generator().manual_seed(seed)
    inside = randint(n_levels, (n_in,), generator=generator) / 7
    outside = randint(n_levels, (n_out,), generator=generator) / 7 + 2 / 7
    return inside.double(), outside.double()


def joined(inside: Tensor, outside: Tensor) -> tuple[list[int], list[float]]:
    return [0] * len(inside) + [1] * len(outside), torch.cat([inside, outside]).tolist()


# --- against scikit-learn ---


@pytest.mark.parametrize("seed", range(5))
def test_classification_scores_agree_with_scikit_learn(seed: int) -> None:
    probs, targets = (tensor.cpu() for tensor in draw(seed))
    labels = list(range(probs.shape[1]))
    assert metrics.accuracy(probs, targets) == oracle.accuracy_score(targets, probs.argmax(1))
    expected = oracle.log_loss(targets, probs, labels=labels)
    assert metrics.nll(probs, targets) == pytest.approx(expected, rel=TIGHT)
    expected = oracle.brier_score_loss(targets, probs, labels=labels, scale_by_half=False)
    assert metrics.brier(probs, targets) == pytest.approx(expected, rel=TIGHT)


@pytest.mark.parametrize("seed", range(5))
def test_binary_scores_agree_with_scikit_learn(seed: int) -> None:
    probs, targets = (tensor.cpu() for tensor in draw_binary(seed))
    assert metrics.accuracy(probs, targets) == oracle.accuracy_score(targets, probs >= 0.5)
    expected = oracle.log_loss(targets, probs)
    assert metrics.nll(probs, targets) == pytest.approx(expected, rel=TIGHT)
    expected = 2 * oracle.brier_score_loss(targets, probs, scale_by_half=True)
    assert metrics.brier(probs, targets) == pytest.approx(expected, rel=TIGHT)


@pytest.mark.parametrize("n_levels", [2, 9, 10_000])
@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (300, 211), (57, 400)])
def test_auroc_agrees_with_scikit_learn(n_in: int, n_out: int, n_levels: int) -> None:
    inside, outside = draw_scores(n_levels, n_in, n_out, n_levels)
    expected = oracle.roc_auc_score(*joined(inside, outside))
    assert metrics.auroc(inside, outside) == pytest.approx(expected, abs=TIGHT)


@pytest.mark.parametrize("n_levels", [2, 9, 10_000])
@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (300, 211), (57, 400)])
def test_aupr_agrees_with_scikit_learn(n_in: int, n_out: int, n_levels: int) -> None:
    inside, outside = draw_scores(n_levels, n_in, n_out, n_levels)
    expected = oracle.average_precision_score(*joined(inside, outside))
    assert metrics.aupr(inside, outside) == pytest.approx(expected, abs=TIGHT)


@pytest.mark.parametrize("n_levels", [2, 9, 10_000])
@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (300, 19), (300, 20), (300, 21), (57, 400)])
def test_fpr95_agrees_with_scikit_learn(n_in: int, n_out: int, n_levels: int) -> None:
    inside, outside = draw_scores(n_levels, n_in, n_out, n_levels)
    fpr, tpr, _ = oracle.roc_curve(*joined(inside, outside), drop_intermediate=False)
    assert metrics.fpr95(inside, outside) == pytest.approx(fpr[tpr >= 0.95].min(), abs=TIGHT)


@pytest.mark.parametrize("n_bins", [1, 4, 15, 100])
def test_ece_and_mce_agree_with_a_loop_over_bins(n_bins: int) -> None:
    probs, targets = draw(7)
    rows = [(max(p), p.index(max(p)) == y) for p, y in zip(probs.tolist(), targets.tolist(), strict=True)]
    gaps = []
    for b in range(n_bins):
        inside = [r for r in rows if b / n_bins < r[0] <= (b + 1) / n_bins]
        if inside:
            gap = abs(sum(c for c, _ in inside) - sum(right for _, right in inside))
            gaps.append((gap / len(rows), gap / len(inside)))
    assert metrics.ece(probs, targets, n_bins) == pytest.approx(sum(share for share, _ in gaps), rel=1e-10)
    assert metrics.mce(probs, targets, n_bins) == pytest.approx(max(own for _, own in gaps), rel=1e-10)


# --- by hand ---


def test_scores_of_two_examples_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
    targets = torch.tensor([1, 2])
    assert metrics.accuracy(probs, targets) == 0.5
    assert metrics.confidence(probs) == pytest.approx(0.65, rel=TIGHT)
    assert metrics.nll(probs, targets) == pytest.approx(-(math.log(0.3) + math.log(0.8)) / 2, rel=TIGHT)
    brier = ((0.25 + 0.49 + 0.04) + (0.01 + 0.01 + 0.04)) / 2
    assert metrics.brier(probs, targets) == pytest.approx(brier, rel=TIGHT)
    assert metrics.ece(probs, targets) == pytest.approx((0.5 + 0.2) / 2, rel=TIGHT)
    assert metrics.mce(probs, targets) == pytest.approx(0.5, rel=TIGHT)
    # In a single bin the two errors, of opposite sign, nearly cancel.
    assert metrics.ece(probs, targets, n_bins=1) == pytest.approx(0.15, rel=TIGHT)


def test_binary_scores_by_hand() -> None:
    probs = torch.tensor([0.9, 0.2, 0.5], dtype=torch.float64)
    targets = torch.tensor([1, 1, 1])
    assert metrics.accuracy(probs, targets) == pytest.approx(2 / 3, rel=TIGHT)  # 0.5 predicts class 1
    assert metrics.confidence(probs) == pytest.approx((0.9 + 0.8 + 0.5) / 3, rel=TIGHT)
    assert metrics.nll(probs, targets) == pytest.approx(-math.log(0.9 * 0.2 * 0.5) / 3, rel=TIGHT)
    assert metrics.brier(probs, targets) == pytest.approx(2 * (0.01 + 0.64 + 0.25) / 3, rel=TIGHT)
    assert metrics.ece(probs, targets) == pytest.approx((0.1 + 0.8 + 0.5) / 3, rel=TIGHT)
    assert metrics.mce(probs, targets) == pytest.approx(0.8, rel=TIGHT)


def test_equally_probable_classes_predict_the_first() -> None:
    probs = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]])
    assert metrics.accuracy(probs, torch.tensor([0, 1])) == 1.0
    assert metrics.accuracy(probs, torch.tensor([1, 2])) == 0.0


def test_auroc_counts_ties_half() -> None:
    same = torch.tensor([3.0, 3.0])
    assert metrics.auroc(same, same) == 0.5
    assert metrics.auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])) == 7 / 8
    assert metrics.auroc(torch.tensor([0.0, 1.0]), torch.tensor([2.0])) == 1.0
    assert metrics.auroc(torch.tensor([2.0]), torch.tensor([0.0, 1.0])) == 0.0


def test_fpr95_takes_the_largest_threshold_that_flags_95_percent() -> None:
    outside = torch.arange(1.0, 21.0)  # 19 of 20 are at least 2
    assert metrics.fpr95(torch.tensor([1.0, 1.9, 2.0, 30.0]), outside) == 0.5
    # One input fewer, and 18 of 19 are too few: all must be flagged.
    assert metrics.fpr95(torch.tensor([0.5, 1.0, 1.9, 2.0]), outside[:19]) == 0.75
    assert metrics.fpr95(torch.tensor([0.0, 0.5]), outside) == 0.0
    assert metrics.fpr95(torch.tensor([5.0]), torch.tensor([5.0])) == 1.0


def test_aupr_of_constant_scores_is_the_share_of_outliers() -> None:
    assert metrics.aupr(torch.ones(30), torch.ones(10)) == 0.25
    assert metrics.aupr(torch.zeros(30), torch.ones(10)) == 1.0


# --- selective prediction ---


def risk_coverage_area(losses: tuple[float, ...]) -> float:
    return sum(sum(losses[:k]) / k for k in range(1, len(losses) + 1)) / len(losses)


@pytest.mark.parametrize("scores", [[3, 1, 5, 2, 4, 0], [1, 0, 1, 1, 0, 2], [7, 7, 7, 7, 7, 7], [0, 1, 1, 2, 2, 2]])
def test_aurc_is_the_average_over_all_orders_that_the_scores_allow(scores: list[int]) -> None:
    losses = [0.0, 1.0, 0.25, 3.0, -0.5, 1.0]
    orders = [
        [losses[i] for i in order]
        for order in itertools.permutations(range(6))
        if all(scores[a] <= scores[b] for a, b in itertools.pairwise(order))
    ]
    expected = sum(risk_coverage_area(order) for order in orders) / len(orders)
    assert metrics.aurc(scores, losses) == pytest.approx(expected, rel=TIGHT)


def test_aurc_by_hand() -> None:
    wrong = torch.tensor([False, True, False, True])
    assert metrics.aurc(torch.arange(4.0), wrong) == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4, rel=TIGHT)
    assert metrics.aurc(-torch.arange(4.0), wrong) == pytest.approx((1 + 1 / 2 + 2 / 3 + 2 / 4) / 4, rel=TIGHT)
    assert metrics.aurc(torch.ones(4), wrong) == 0.5  # scores that say nothing: the error rate
    assert metrics.aurc(torch.arange(4.0)[:, None], wrong[:, None]) == metrics.aurc(torch.arange(4.0), wrong)


def test_aurc_does_not_depend_on_the_order_of_predictions() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, losses = randint(6, (200,), generator=generator), randn(200, generator=generator)
    shuffle = randperm(200, generator=generator)
    assert metrics.aurc(scores[shuffle], losses[shuffle]) == pytest.approx(metrics.aurc(scores, losses), rel=1e-10)


def test_aurc_refuses_losses_that_do_not_fit_the_scores() -> None:
    with pytest.raises(ValueError, match="there are 2 for 3 scores"):
        metrics.aurc(torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match=r"errors must have shape .*a loss for each input"):
        metrics.aurc(torch.ones(3), torch.ones(3, 3))
    with pytest.raises(ValueError, match="errors has NaN"):
        metrics.aurc(torch.ones(1), torch.tensor([math.nan]))


# --- calibration ---


def test_confidence_of_exactly_one_is_counted() -> None:
    probs = torch.tensor([[1.0, 0.0]] * 4)
    targets = torch.tensor([0, 1, 1, 1])
    assert metrics.ece(probs, targets) == 0.75
    assert metrics.mce(probs, targets) == 0.75
    assert metrics.ece(torch.ones(4), torch.tensor([1, 0, 0, 0])) == 0.75


@pytest.mark.parametrize("n_bins", [1, 2, 10, 15])
def test_perfectly_calibrated_predictions_have_no_calibration_error(n_bins: int) -> None:
    # 3 of 4 right at confidence 0.75, 9 of 16 right at 0.5625, all right at 1: exact in binary.
    probs = torch.tensor([0.75] * 4 + [0.5625] * 16 + [1.0] * 3)
    targets = torch.tensor([1, 1, 1, 0] + [1] * 9 + [0] * 7 + [1] * 3)
    assert metrics.ece(probs, targets, n_bins) == 0.0
    assert metrics.mce(probs, targets, n_bins) == 0.0


def test_bins_are_closed_on_the_right() -> None:
    # 0.75 is an edge of four bins. It shares a bin with 0.7, where the errors cancel in part, not with 0.8.
    targets = torch.tensor([1, 0])
    together = torch.tensor([0.75, 0.7], dtype=torch.float64)
    apart = torch.tensor([0.75, 0.8], dtype=torch.float64)
    assert metrics.ece(together, targets, n_bins=4) == pytest.approx((0.7 - 0.25) / 2, rel=TIGHT)
    assert metrics.ece(apart, targets, n_bins=4) == pytest.approx((0.8 + 0.25) / 2, rel=TIGHT)


# --- limits and invariances ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nll_of_an_impossible_target_is_large_and_finite(dtype: torch.dtype) -> None:
    limit = -math.log(torch.finfo(dtype).tiny)
    assert metrics.nll(torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([1])) == pytest.approx(limit)
    assert metrics.nll(torch.tensor([1.0], dtype=dtype), torch.tensor([0])) == pytest.approx(limit)


@pytest.mark.parametrize("metric", OF_CLASSES)
def test_all_forms_of_binary_input_agree(metric: Metric) -> None:
    probs, targets = draw_binary(3)
    expected = metric(torch.stack([1 - probs, probs], 1), targets)
    assert metric(probs, targets) == expected
    assert metric(probs[:, None], targets[:, None]) == expected
    assert metric(probs, targets[:, None].bool()) == expected
    assert metrics.confidence(probs[:, None]) == metrics.confidence(torch.stack([1 - probs, probs], 1))


@pytest.mark.parametrize("metric", OF_CLASSES)
def test_the_order_of_examples_and_the_names_of_classes_do_not_matter(metric: Metric) -> None:
    probs, targets = draw(4)
    shuffle = randperm(len(probs), generator=torch.Generator().manual_seed(0))
    rename = torch.tensor([2, 0, 4, 1, 3])  # old class of each new column
    expected = pytest.approx(metric(probs, targets), rel=1e-10)
    assert metric(probs[shuffle], targets[shuffle]) == expected
    assert metric(probs[:, rename], rename.argsort()[targets]) == expected


@pytest.mark.parametrize("metric", OF_CLASSES)
def test_float32_input_is_scored_in_float64(metric: Metric) -> None:
    probs, targets = draw(5)
    single = probs.float().requires_grad_()
    assert metric(single, targets.to(torch.int32)) == metric(single.double(), targets)


def test_metrics_of_scores_depend_on_the_order_of_scores_only() -> None:
    inside, outside = draw_scores(0, 200, 150, 12)
    for metric in OF_SCORES:
        assert metric(torch.exp(3 * inside) - 8, torch.exp(3 * outside) - 8) == metric(inside, outside)


def test_swapping_the_groups_mirrors_auroc() -> None:
    inside, outside = draw_scores(1, 200, 150, 12)
    assert metrics.auroc(outside, inside) == pytest.approx(1 - metrics.auroc(inside, outside), abs=TIGHT)
    assert metrics.auroc(-inside, -outside) == pytest.approx(1 - metrics.auroc(inside, outside), abs=TIGHT)


def test_small_rounding_errors_are_forgiven() -> None:
    probs = torch.tensor([[1.00005, -0.00005], [0.4997, 0.4998]], dtype=torch.float64)
    assert metrics.confidence(probs) == pytest.approx((1 + 0.4998) / 2, rel=TIGHT)
    assert metrics.ece(probs, torch.tensor([0, 1])) == pytest.approx(0.5002 / 2, rel=TIGHT)


# --- refusals ---


BAD_PROBS = {
    "three dimensions": (torch.full((2, 3, 3), 1 / 3), "average over the samples"),
    "a scalar": (torch.tensor(0.5), r"shape \(N, C\)"),
    "empty": (torch.ones(0, 3), "empty"),
    "no classes": (torch.ones(3, 0), "empty"),
    "integers": (torch.tensor([[1, 0], [0, 1]]), "not classes"),
    "nan": (torch.tensor([[math.nan, 0.5]]), "NaN or infinite"),
    "infinite": (torch.tensor([[math.inf, 0.5]]), "NaN or infinite"),
    "logits": (torch.tensor([[3.0, -2.0]]), "if these are logits, pass their softmax"),
    "one logit": (torch.tensor([3.0, -2.0]), "if these are logits, pass their sigmoid"),
    "slightly negative": (torch.tensor([[1.0, -2e-4]]), "between 0 and 1"),
    "slightly above one": (torch.tensor([1.0 + 2e-4]), "between 0 and 1"),
    "small logits": (torch.tensor([[0.2, 0.9]]), "sums to 1.1; if these are logits"),
    "sum just off": (torch.tensor([[0.5, 0.5], [0.5, 0.498]]), "sum to 1"),
}


@pytest.mark.parametrize(("probs", "message"), BAD_PROBS.values(), ids=BAD_PROBS)
def test_probabilities_that_cannot_be_scored_are_refused(probs: Tensor, message: str) -> None:
    targets = torch.zeros(max(1, len(probs)) if probs.ndim else 1, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        metrics.confidence(probs)
    for metric in OF_CLASSES:
        with pytest.raises(ValueError, match=message):
            metric(probs, targets)


THREE = torch.full((4, 3), 1 / 3)
BINARY = torch.full((4,), 0.5)
BAD_TARGETS = {
    "too few": (THREE, torch.tensor([0, 1, 2]), r"shape \(4,\)"),
    "one-hot": (THREE, torch.eye(3, dtype=torch.long)[[0, 1, 2, 0]], "argmax"),
    "floating point": (THREE, torch.tensor([0.0, 1.0, 2.0, 0.0]), r"\.long\(\)"),
    "too large": (THREE, torch.tensor([0, 1, 2, 3]), "between 0 and 2, but they run from 0 to 3"),
    "ignored by another number": (THREE, torch.tensor([0, 1, 2, -1]), r"pass as ignore_index .*now -100"),
    "all ignored": (THREE, torch.full((4,), -100), "nothing to score"),
    "two columns for binary": (BINARY, torch.zeros(4, 2, dtype=torch.long), r"shape \(4,\)"),
    "class 2 for binary": (BINARY, torch.tensor([0, 1, 2, 0]), "between 0 and 1"),
    "halves for binary": (BINARY, torch.tensor([0, 1, 0.5, 0]), "0, 1 or ignore_index"),
    "nan for binary": (BINARY, torch.tensor([0, 1, math.nan, 0]), "0, 1 or ignore_index"),
    "a scalar": (BINARY, torch.tensor(1), r"shape \(4,\), a label for each probability, but they have shape \(\)\.$"),
}


@pytest.mark.parametrize(("probs", "targets", "message"), BAD_TARGETS.values(), ids=BAD_TARGETS)
@pytest.mark.parametrize("metric", OF_CLASSES)
def test_targets_that_do_not_fit_are_refused(metric: Metric, probs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric(probs, targets)


@pytest.mark.parametrize("n_bins", [0, -3, 1.5])
def test_fewer_than_one_bin_is_refused(n_bins: int) -> None:
    for metric in (metrics.ece, metrics.mce):
        with pytest.raises(ValueError, match="n_bins must be at least 1"):
            metric(*draw(0), n_bins=n_bins)


BAD_SCORES = {
    "empty": (torch.ones(0), "empty"),
    "two columns": (torch.ones(3, 2), "a score for each input"),
    "a row": (torch.ones(1, 3), "a score for each input"),
    "complex": (torch.ones(3, dtype=torch.complex64), "real numbers"),
    "a scalar": (torch.tensor(1.0), "a score for each input"),
    "nan": (torch.tensor([1.0, math.nan]), "NaN or infinite"),
    "infinite": (torch.tensor([1.0, -math.inf]), "NaN or infinite"),
}


@pytest.mark.parametrize(("scores", "message"), BAD_SCORES.values(), ids=BAD_SCORES)
@pytest.mark.parametrize("metric", OF_SCORES)
def test_scores_that_cannot_be_ranked_are_refused(metric: Metric, scores: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"scores_in.*{message}"):
        metric(scores, torch.ones(2))
    with pytest.raises(ValueError, match=f"scores_out.*{message}"):
        metric(torch.ones(2), scores)
