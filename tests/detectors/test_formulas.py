"""Every detector computes the formula of its paper, written out in numpy input by input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from nullbayes import detectors
from support.detector_problem import N_CLASSES, computed, data, network, new_inputs, scores

X, Y = data()
LABELS = Y.cpu().numpy()
TRAIN, TRAIN_LOGITS = computed(network(), X)
NEW, NEW_LOGITS = computed(network(), new_inputs())
HEAD, BIAS = (p.detach().cpu().numpy() for p in network()[2].parameters())


def log_sum_exp(logits: np.ndarray) -> float:
    most = max(logits)
    return most + math.log(sum(math.exp(value - most) for value in logits))


def softmax(logits: np.ndarray) -> list[float]:
    total = sum(math.exp(value) for value in logits)
    return [math.exp(value) / total for value in logits]


def test_msp_is_one_minus_the_largest_probability() -> None:
    np.testing.assert_allclose(scores(detectors.MSP), [1 - max(softmax(z)) for z in NEW_LOGITS], rtol=1e-9)


def test_max_logit_is_minus_the_largest_logit() -> None:
    np.testing.assert_allclose(scores(detectors.MaxLogit), [-max(z) for z in NEW_LOGITS], rtol=1e-12)


def test_energy_is_minus_the_log_of_the_sum_of_exponentials() -> None:
    np.testing.assert_allclose(scores(detectors.Energy), [-log_sum_exp(z) for z in NEW_LOGITS], rtol=1e-12)


@pytest.mark.parametrize(("gamma", "largest"), [(0.1, 100), (0.5, 2)])
def test_gen_sums_powers_of_the_largest_probabilities(gamma: float, largest: int) -> None:
    wanted = [sum((p * (1 - p)) ** gamma for p in sorted(softmax(z))[::-1][:largest]) for z in NEW_LOGITS]
    np.testing.assert_allclose(scores(detectors.GEN, gamma=gamma, largest=largest), wanted, rtol=1e-9)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("k", [1, 3, 40])
def test_knn_is_the_distance_to_the_kth_nearest_example(k: int) -> None:
    wanted = [sorted(float(np.linalg.norm(unit(f) - unit(g))) for g in TRAIN)[k - 1] for f in NEW]
    np.testing.assert_allclose(scores(detectors.KNN, k=k), wanted, rtol=1e-9)


def class_gaussian() -> tuple[list[np.ndarray], np.ndarray]:
    """Class means and the pseudo-inverse of the shared covariance, by a loop over examples."""
    means = [np.mean([f for f, label in zip(TRAIN, LABELS, strict=True) if label == c], axis=0) for c in range(3)]
    total = sum(np.outer(f - means[c], f - means[c]) for f, c in zip(TRAIN, LABELS, strict=True))
    return means, np.linalg.pinv(total / len(TRAIN), rcond=1e-12, hermitian=True)


def squared(f: np.ndarray, mean: np.ndarray, precision: np.ndarray) -> float:
    return float((f - mean) @ precision @ (f - mean))


def test_mahalanobis_is_the_squared_distance_to_the_nearest_class_mean() -> None:
    means, precision = class_gaussian()
    wanted = [min(squared(f, mean, precision) for mean in means) for f in NEW]
    np.testing.assert_allclose(scores(detectors.Mahalanobis), wanted, rtol=1e-8)


def test_relative_mahalanobis_subtracts_the_distance_to_the_mean_of_all() -> None:
    means, precision = class_gaussian()
    centre = TRAIN.mean(0)
    background = np.linalg.pinv(np.cov(TRAIN.T, bias=True), rcond=1e-12, hermitian=True)
    wanted = [min(squared(f, mean, precision) for mean in means) - squared(f, centre, background) for f in NEW]
    np.testing.assert_allclose(scores(detectors.RelativeMahalanobis), wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("directions", [None, 2, 6])
def test_vim_sets_the_residual_of_the_features_against_the_energy(directions: int | None) -> None:
    origin = -np.linalg.pinv(HEAD) @ BIAS
    kept = np.linalg.matrix_rank(TRAIN - origin) // 2 if directions is None else directions
    principal = np.linalg.svd(TRAIN - origin)[2][:kept]  # (kept, d)

    def residual(f: np.ndarray) -> float:
        apart = f - origin
        return float(np.linalg.norm(apart - principal.T @ (principal @ apart)))

    scale = sum(max(z) for z in TRAIN_LOGITS) / sum(residual(f) for f in TRAIN)
    wanted = [scale * residual(f) - log_sum_exp(z) for f, z in zip(NEW, NEW_LOGITS, strict=True)]
    np.testing.assert_allclose(scores(detectors.ViM, directions=directions), wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("quantile", [0.9, 0.5])
def test_react_clips_features_at_a_quantile(quantile: float) -> None:
    limit = np.quantile(TRAIN, quantile)
    wanted = [-log_sum_exp(HEAD @ np.array([min(v, limit) for v in f]) + BIAS) for f in NEW]
    np.testing.assert_allclose(scores(detectors.ReAct, quantile=quantile), wanted, rtol=1e-9)


@pytest.mark.parametrize("percentile", [0.85, 0.5, 0.0])
def test_scale_multiplies_features_by_how_concentrated_they_are(percentile: float) -> None:
    wanted = []
    for f in NEW:
        n_largest = len(f) - round(percentile * len(f))
        factor = math.exp(sum(f) / sum(sorted(f)[::-1][:n_largest]))
        wanted.append(-log_sum_exp(HEAD @ (factor * f) + BIAS))
    np.testing.assert_allclose(scores(detectors.SCALE, percentile=percentile), wanted, rtol=1e-9)


def test_fdbd_is_minus_the_mean_relative_distance_to_the_boundaries() -> None:
    wanted = []
    for f, z in zip(NEW, NEW_LOGITS, strict=True):
        top = int(np.argmax(z))
        others = [c for c in range(N_CLASSES) if c != top]
        distances = [(z[top] - z[c]) / np.linalg.norm(HEAD[top] - HEAD[c]) for c in others]
        wanted.append(-np.mean(distances) / np.linalg.norm(f - TRAIN.mean(0)))
    np.testing.assert_allclose(scores(detectors.FDBD), wanted, rtol=1e-9)


def test_fdbd_is_the_length_of_the_step_to_the_boundary() -> None:
    """The features on the boundary have equal logits: a step of that length along the difference of weights."""
    f, z = NEW[0], NEW_LOGITS[0]
    top, other = np.argsort(z)[::-1][:2]
    normal = HEAD[top] - HEAD[other]
    step = f - (z[top] - z[other]) / np.linalg.norm(normal) * unit(normal)
    at_boundary = HEAD @ step + BIAS
    assert at_boundary[top] == pytest.approx(at_boundary[other])


@pytest.mark.parametrize("k", [1, 5])
def test_nnguide_multiplies_energies_and_similarities(k: int) -> None:
    wanted = []
    for f, z in zip(NEW, NEW_LOGITS, strict=True):
        guides = [float(unit(f) @ unit(g)) * log_sum_exp(t) for g, t in zip(TRAIN, TRAIN_LOGITS, strict=True)]
        wanted.append(-log_sum_exp(z) * np.mean(sorted(guides)[::-1][:k]))
    np.testing.assert_allclose(scores(detectors.NNGuide, k=k), wanted, rtol=1e-9)


def gradient(x: Tensor, output: str) -> np.ndarray:
    """The gradient of the sum of the logits, or of the largest one, for one input, by plain differentiation."""
    model = network()
    logits = model(x[None])[0]
    (logits.sum() if output == "sum" else logits.max()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu().numpy()


@pytest.mark.parametrize(("output", "share"), [("sum", 0.99), ("max", 0.99), ("sum", 0.5)])
def test_gradpca_is_the_part_of_the_gradient_outside_of_the_class_means(output: str, share: float) -> None:
    means = [
        np.mean([gradient(x, output) for x, y in zip(X, LABELS, strict=True) if y == c], axis=0)
        for c in range(N_CLASSES)
    ]
    centre = np.mean(means, axis=0)
    _, values, directions = np.linalg.svd(np.stack(means) - centre, full_matrices=False)
    held = np.cumsum(values**2) / np.sum(values**2)
    kept = directions[: int(np.argmax(held >= share)) + 1]
    assert len(kept) == (1 if share == 0.5 else N_CLASSES - 1)
    wanted = []
    for x in new_inputs():
        apart = gradient(x, output) - centre
        wanted.append(1.0 - np.sum((kept @ apart) ** 2) / np.sum(apart**2))
    np.testing.assert_allclose(scores(detectors.GradPCA, output=output, share=share), wanted, rtol=1e-9)
