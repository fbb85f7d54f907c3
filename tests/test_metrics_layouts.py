"""Metrics of classes take the shapes and types that people have, and refuse what could be read in two ways."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nullbayes import metrics
from support.drawing import rand, randint, randn

oracle = pytest.importorskip("sklearn.metrics")

OF_CLASSES: list[Callable[..., float]] = [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece, metrics.mce]
ALL = [*OF_CLASSES, metrics.confidence]
TIGHT = 1e-12

each = pytest.mark.parametrize("metric", ALL)


def draw(*shape: int, n_classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return probabilities (*shape, C) and labels (*shape)."""
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * randn(*shape, n_classes, generator=generator, dtype=torch.float64)).softmax(-1)
    return probs, randint(n_classes, shape, generator=generator)


# --- tensors, arrays and lists ---


def read_only(tensor: Tensor) -> np.ndarray:
    array = tensor.numpy().copy()
    array.flags.writeable = False
    return array


CONVERSIONS: dict[str, Callable[[Tensor], Any]] = {
    "array": Tensor.numpy,
    "list": Tensor.tolist,
    "tuple": lambda tensor: tuple(tensor.tolist()),
    "list of tensors": list,
    "list of arrays": lambda tensor: list(tensor.numpy()),
    "nested list of tensors": lambda tensor: [list(row) if row.ndim else row for row in tensor],
    "read-only array": read_only,
    "array in reverse": lambda tensor: tensor.flip(0).numpy()[::-1],
    "array of the other byte order": lambda t: t.numpy().astype(t.numpy().dtype.newbyteorder(">")),
    "extended precision": lambda t: t.numpy().astype(np.longdouble) if t.is_floating_point() else t.numpy(),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_arrays_and_lists_are_scored_as_tensors_are(convert: Callable[[Tensor], Any]) -> None:
    probs, targets = (tensor.cpu() for tensor in draw(30))
    numbers = probs[:, 0] + 1
    for metric in ALL:
        found = metric(convert(probs), convert(targets))
        assert type(found) is float
        assert found == metric(probs, targets)
    for metric in (metrics.auroc, metrics.aupr, metrics.fpr95, metrics.aurc, metrics.rmse, metrics.interval_width):
        assert metric(convert(probs[:, 1]), convert(numbers)) == metric(probs[:, 1], numbers)
    for metric in (metrics.gaussian_nll, metrics.crps, metrics.interval_coverage):
        expected = metric(probs[:, 1], numbers, probs[:, 2])
        assert metric(convert(probs[:, 1]), convert(numbers), convert(probs[:, 2])) == expected


def test_single_precision_arrays_are_scored_as_single_precision() -> None:
    assert metrics.nll(np.array([[1, 0]], np.float32), [1]) == pytest.approx(-math.log(np.finfo(np.float32).tiny))
    assert metrics.nll([[1.0, 0.0]], [1]) == pytest.approx(-math.log(np.finfo(np.float64).tiny))


NO_NUMBERS = {
    "ragged": ([[0.5, 0.5], [1.0]], "probs is no array of numbers"),
    "words": (["cat", "dog"], "probs must hold real numbers"),
    "nothing": (None, "probs must hold real numbers"),
    "complex": (np.array([0.5j]), "probs must hold real numbers"),
    "batches of several sizes": ([torch.ones(3), torch.ones(2)], "join batches with torch.cat"),
    "masked": (np.ma.masked_array([0.5, 0.5], [True, False]), "its mask would be lost"),
}


@pytest.mark.parametrize(("probs", "message"), NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_arguments_without_numbers_are_refused_by_name(probs: Any, message: str) -> None:
    for metric in ALL:
        with pytest.raises(ValueError, match=message):
            metric(probs, [0, 1])
    with pytest.raises(ValueError, match=message.replace("probs", "scores_out")):
        metrics.auroc([1.0], probs)


# --- positions ---


@each
@pytest.mark.parametrize("positions", [(5,), (1,), (3, 2), (2, 1, 5)])
def test_every_position_counts_as_an_example(metric: Callable[..., float], positions: tuple[int, ...]) -> None:
    probs, targets = draw(7, *positions)
    expected = metric(probs.reshape(-1, 4), targets.flatten())
    assert metric(probs, targets) == expected  # (N, T, C)
    assert metric(probs.movedim(-1, 1), targets) == expected  # (N, C, H, W)
    for class_dim in range(1, probs.ndim):
        assert metric(probs.movedim(-1, class_dim), targets, class_dim=class_dim) == expected
        assert metric(probs.movedim(-1, class_dim), targets, class_dim=class_dim - probs.ndim) == expected


@each
def test_targets_may_have_dimensions_of_size_one(metric: Callable[..., float]) -> None:
    probs, targets = draw(7)
    assert metric(probs, targets[:, None]) == metric(probs, targets)
    assert metric(probs[:, None], targets) == metric(probs, targets)
    probs, targets = draw(7, 3, 2)
    assert metric(probs.movedim(-1, 1), targets[:, None]) == metric(probs, targets)


@each
def test_an_ambiguous_class_dimension_is_refused_with_advice(metric: Callable[..., float]) -> None:
    probs, targets = draw(7, 4)  # four positions and four classes
    with pytest.raises(ValueError, match="pass class_dim=1 or class_dim=-1"):
        metric(probs, targets)
    flat = metric(probs.reshape(-1, 4), targets.flatten())
    assert metric(probs, targets, class_dim=-1) == metric(probs.mT, targets, class_dim=1) == flat
    with pytest.raises(ValueError, match="sum to 1 over dimension -2"):
        metric(probs, targets, class_dim=1)


def test_confidence_without_targets_asks_for_the_class_dimension() -> None:
    probs, _ = draw(7, 3)
    with pytest.raises(ValueError, match=r"pass class_dim=1, class_dim=-1 or the targets.*average over the samples"):
        metrics.confidence(probs)
    assert metrics.confidence(probs, class_dim=-1) == metrics.confidence(probs.reshape(-1, 4))
    assert metrics.confidence(probs.mT, class_dim=1) == metrics.confidence(probs.reshape(-1, 4))


@each
@pytest.mark.parametrize("class_dim", [0, 3, -3, -4])
def test_dimensions_that_hold_no_classes_are_refused(metric: Callable[..., float], class_dim: int) -> None:
    probs, targets = draw(7, 3)
    with pytest.raises(ValueError, match=f"class_dim={class_dim} is no dimension of classes"):
        metric(probs, targets, class_dim=class_dim)
    with pytest.raises(ValueError, match="has no dimension of classes"):
        metric(probs[0, 0], targets, class_dim=class_dim)


@pytest.mark.parametrize("metric", OF_CLASSES)
@pytest.mark.parametrize("shape", [(7,), (4,), (1,), (7, 3), (7, 2, 2)])
@pytest.mark.parametrize("n_samples", [2, 4, 7])
def test_probabilities_of_samples_are_refused_with_advice_to_average(
    metric: Callable[..., float], shape: tuple[int, ...], n_samples: int
) -> None:
    probs, targets = draw(*shape)
    samples = probs.expand(n_samples, *probs.shape)
    with pytest.raises(ValueError, match="average over the samples first"):
        metric(samples, targets)
    assert metric(samples.mean(0), targets) == pytest.approx(metric(probs, targets))


def test_single_probabilities_of_samples_are_refused_with_advice_to_average() -> None:
    for metric in OF_CLASSES:
        with pytest.raises(ValueError, match="average over the samples first"):
            metric(torch.full((5, 7), 0.5), torch.ones(7))
        with pytest.raises(ValueError, match="average over the samples first"):
            metric(torch.full((5, 7, 3), 0.5), torch.ones(7, 3), multilabel=True)


@each
def test_a_single_probability_at_each_position_is_refused(metric: Callable[..., float]) -> None:
    probs, labels = torch.full((7, 1, 3, 2), 0.5), torch.ones(7, 3, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="pass multilabel=True if it is that of label 1"):
        metric(probs, labels)
    assert metric(probs, labels, multilabel=True) == metric(probs.flatten(), labels.flatten())


# --- ignored positions ---


@each
@pytest.mark.parametrize("ignore_index", [-100, 255, 2])
def test_ignored_positions_are_left_out(metric: Callable[..., float], ignore_index: int) -> None:
    probs, targets = draw(7, 3)
    left_out = torch.zeros_like(targets, dtype=torch.bool)
    left_out[::2, 1], left_out[3] = True, True
    targets[targets == 2] = 1
    expected = metric(probs[~left_out], targets[~left_out])
    targets[left_out] = ignore_index
    probs[left_out] = math.nan  # what a network makes of padding
    assert metric(probs, targets, ignore_index=ignore_index) == expected
    assert metric(probs.mT, targets, ignore_index=ignore_index) == expected


@each
def test_ignored_labels_of_binary_and_multilabel_targets_are_left_out(metric: Callable[..., float]) -> None:
    expected = metric([0.9, 0.4], [1, 1])
    assert metric([0.9, 0.7, 0.4], [1, -100, 1]) == expected
    assert metric([0.9, 0.7, 0.4], [1.0, -1.0, 1.0], ignore_index=-1) == expected
    assert metric([[0.9, 0.7], [0.1, 0.4]], [[1, -100], [-100, 1]], multilabel=True) == expected


@each
def test_ignore_index_is_a_whole_number(metric: Callable[..., float]) -> None:
    for wrong in (None, 0.5):
        with pytest.raises(ValueError, match="ignore_index must be a whole number"):
            metric([0.5], [1], ignore_index=wrong)


# --- several labels ---


@pytest.mark.parametrize("shape", [(50, 3), (20, 2, 4), (40, 1), (60,)])
def test_multilabel_scores_agree_with_scikit_learn(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    probs = rand(*shape, generator=generator, dtype=torch.float64)
    targets = randint(2, shape, generator=generator)
    p, y = probs.cpu().flatten().numpy(), targets.cpu().flatten().numpy()
    expected = {
        metrics.accuracy: 1 - oracle.hamming_loss(y, p >= 0.5),
        metrics.nll: oracle.log_loss(y, p),
        metrics.brier: 2 * oracle.brier_score_loss(y, p, scale_by_half=True),
        metrics.confidence: np.maximum(p, 1 - p).mean(),
    }
    for metric, value in expected.items():
        assert metric(probs, targets, multilabel=True) == pytest.approx(value, rel=TIGHT)
        assert metric(probs, targets.double(), multilabel=True) == pytest.approx(value, rel=TIGHT)
        assert metric(probs, targets.bool(), multilabel=True) == pytest.approx(value, rel=TIGHT)
    for metric in (metrics.ece, metrics.mce):
        assert metric(probs, targets, multilabel=True) == metric(p, y)


@pytest.mark.parametrize("metric", OF_CLASSES)
@pytest.mark.parametrize("dtype", [torch.long, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(4, 3), (7, 3), (7, 4, 3)])
def test_targets_of_the_shape_of_probs_are_refused_without_the_keyword(
    metric: Callable[..., float], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    probs, targets = draw(*shape[:-1], n_classes=shape[-1])
    one_hot = (targets[..., None] == torch.arange(shape[-1])).to(dtype)
    with pytest.raises(ValueError, match=r"one-hot targets into classes with argmax.*multilabel=True"):
        metric(probs, one_hot)
    with pytest.raises(ValueError, match=r"multilabel=True"):
        metric(rand(*shape, generator=torch.Generator().manual_seed(0)), one_hot)


@each
def test_multilabel_refuses_what_does_not_fit(metric: Callable[..., float]) -> None:
    probs, classes = torch.full((4, 3), 0.5), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"targets must have shape \(4, 3\), a label for each probability"):
        metric(probs, classes, multilabel=True)
    with pytest.raises(ValueError, match="between 0 and 1"):
        metric(probs, torch.full((4, 3), 2), multilabel=True)
    with pytest.raises(ValueError, match=r"pass their sigmoid"):
        metric(5 * probs, torch.ones(4, 3), multilabel=True)
    with pytest.raises(ValueError, match="leave class_dim=1 out"):
        metric(probs, torch.ones(4, 3), class_dim=1, multilabel=True)


@each
def test_independent_labels_without_the_keyword_are_refused_with_advice(metric: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match="if these are independent labels, pass multilabel=True"):
        metric(torch.full((4, 3), 0.7), torch.tensor([0, 1, 2, 0]))
