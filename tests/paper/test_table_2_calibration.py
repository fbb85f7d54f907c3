"""Table 2 (in-distribution performance): its ECE and Brier columns contradict its confidence, accuracy and NLL.

In every bin |conf - acc| ≤ (1 - conf) + (1 - acc), and so for the mean over bins, whatever the bins:
|conf - acc| ≤ ECE ≤ 2 - conf - acc. Likewise Brier ≤ 2(2 - conf - acc) and Brier ≤ 2 NLL. All of it is linear, and
survives an average over seeds.
"""

import numpy as np
import pytest
import torch

from nullbayes import metrics
from support.drawing import randperm
from support.paper.probabilities import predictions

# confidence, NLL, accuracy, Brier, ECE as printed
TABLE_2 = {
    "MNIST, MAP": (0.981, 0.080, 0.977, 1.775, 0.787),
    "MNIST, projected": (0.981, 0.080, 0.977, 1.774, 0.787),
    "MNIST, loss-projected": (0.813, 1.225, 0.949, 1.532, 0.666),
    "MNIST, SWAG": (0.982, 0.064, 0.982, 1.776, 0.788),
    "MNIST, last layer": (0.977, 0.090, 0.975, 1.768, 0.784),
    "MNIST, diagonal": (0.951, 0.129, 0.975, 1.727, 0.784),
    "FMNIST, MAP": (0.938, 0.325, 0.897, 1.713, 0.732),
    "FMNIST, projected": (0.937, 0.325, 0.897, 1.713, 0.732),
    "FMNIST, loss-projected": (0.744, 1.529, 0.871, 1.441, 0.617),
    "FMNIST, SWAG": (0.931, 0.327, 0.898, 1.703, 0.725),
    "FMNIST, last layer": (0.931, 0.339, 0.896, 1.703, 0.727),
    "FMNIST, diagonal": (0.735, 0.922, 0.855, 1.431, 0.621),
    "SVHN, MAP": (0.949, 0.188, 0.949, 1.691, 0.740),
    "SVHN, projected": (0.949, 0.188, 0.949, 1.691, 0.740),
    "SVHN, loss-projected": (0.948, 0.191, 0.949, 1.685, 0.734),
    "SVHN, SWAG": (0.897, 0.217, 0.947, 1.606, 0.745),
    "SVHN, last layer": (0.943, 0.197, 0.946, 1.681, 0.740),
    "SVHN, diagonal": (0.948, 0.187, 0.949, 1.689, 0.742),
    "CIFAR-10, MAP": (0.952, 0.422, 0.894, 1.698, 0.703),
    "CIFAR-10, projected": (0.952, 0.422, 0.894, 1.698, 0.703),
    "CIFAR-10, loss-projected": (0.701, 2.643, 0.855, 1.387, 0.559),
    "CIFAR-10, SWAG": (0.914, 0.445, 0.865, 1.670, 0.694),
    "CIFAR-10, last layer": (0.944, 0.406, 0.894, 1.712, 0.704),
    "CIFAR-10, diagonal": (0.934, 0.465, 0.872, 1.698, 0.703),
}
TABLE_4 = {
    "ImageNet, MAP": (0.626, 1.358, 0.726, 0.407, 0.136),
    "ImageNet, loss-projected": (0.618, 1.427, 0.716, 0.394, 0.107),
}
ROUNDING = 0.002  # of two printed numbers


def ece_bounds(confidence: float, accuracy: float) -> tuple[float, float]:
    return abs(confidence - accuracy), 2 - confidence - accuracy


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("confidence", "accuracy"), [(0.981, 0.977), (0.938, 0.897), (0.701, 0.855)])
def test_bounds_hold_for_predictions(confidence: float, accuracy: float, seed: int) -> None:
    probs, labels = predictions(confidence, accuracy, seed)
    conf, acc = metrics.confidence(probs), metrics.accuracy(probs, labels)
    assert conf == pytest.approx(confidence, abs=0.01)
    lower, upper = ece_bounds(conf, acc)
    for n_bins in (1, 10, 15, 100):
        assert lower - 1e-12 <= metrics.ece(probs, labels, n_bins) <= upper + 1e-12
    assert metrics.brier(probs, labels) <= 2 * upper
    assert metrics.brier(probs, labels) <= 2 * metrics.nll(probs, labels)


def test_ece_cannot_exceed_0_042_at_the_printed_confidence_and_accuracy() -> None:
    assert ece_bounds(0.981, 0.977)[1] == pytest.approx(0.042)
    probs, labels = predictions(0.981, 0.977, seed=0)
    assert metrics.ece(probs, labels) < 0.042
    assert metrics.brier(probs, labels) < 0.06


@pytest.mark.parametrize("name", TABLE_2)
def test_every_row_of_table_2_contradicts_itself(name: str) -> None:
    confidence, nll, accuracy, brier, ece = TABLE_2[name]
    upper = ece_bounds(confidence, accuracy)[1]
    assert ece > upper + ROUNDING
    assert brier > 2 * upper + 2 * ROUNDING
    if nll < 0.5:
        assert brier > 2 * nll + 2 * ROUNDING


@pytest.mark.parametrize("name", TABLE_4)
def test_imagenet_table_is_consistent(name: str) -> None:
    confidence, nll, accuracy, brier, ece = TABLE_4[name]
    lower, upper = ece_bounds(confidence, accuracy)
    assert lower - ROUNDING <= ece <= upper + ROUNDING
    assert brier <= min(2 * upper, 2 * nll)


def test_printed_brier_score_is_that_of_shuffled_labels() -> None:
    """Against labels that have nothing to do with them, predictions over 10 classes score E|p|² + 1 - 2/10."""
    probs, labels = predictions(0.981, 0.977, seed=0)
    shuffled = labels[randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    assert metrics.brier(probs, shuffled) == pytest.approx(1.775, abs=0.01)
    assert metrics.brier(probs, shuffled) == pytest.approx(float(probs.square().sum(1).mean()) + 0.8, abs=0.02)


def test_printed_ece_is_not_that_of_shuffled_labels() -> None:
    """Those would give about 0.981 - 0.1: something else is in that column."""
    probs, labels = predictions(0.981, 0.977, seed=0)
    shuffled = labels[randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    assert metrics.ece(probs, shuffled) == pytest.approx(0.881, abs=0.01)


def test_loss_projected_posterior_is_calibrated_worse_on_mnist_by_the_table_itself() -> None:
    """Its ECE is at least 0.136, that of the network at most 0.042: the text has it the other way round."""
    at_least = ece_bounds(*np.take(TABLE_2["MNIST, loss-projected"], [0, 2]))[0]
    at_most = ece_bounds(*np.take(TABLE_2["MNIST, MAP"], [0, 2]))[1]
    assert at_least == pytest.approx(0.136)
    assert at_least > at_most + 2 * ROUNDING
