"""Metrics of predicted numbers against scipy, against integrals, and against input that they must refuse."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nullbayes import metrics
from support.drawing import randn

integrate = pytest.importorskip("scipy.integrate")
stats = pytest.importorskip("scipy.stats")

OF_GAUSSIANS: list[Callable[..., float]] = [metrics.gaussian_nll, metrics.crps]


def draw(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return means, variances and targets, some of them far out."""
    generator = torch.Generator().manual_seed(0)
    mean, log_variance, noise = randn(3, *shape, generator=generator, dtype=torch.float64)
    return mean, (2 * log_variance).exp(), mean + 3 * noise


@pytest.mark.parametrize("shape", [(40,), (20, 1), (20, 3), (5, 2, 3)])
def test_gaussian_nll_agrees_with_scipy(shape: tuple[int, ...]) -> None:
    mean, variance, targets = draw(*shape)
    m, v, y = (tensor.cpu().numpy() for tensor in (mean, variance, targets))
    expected = -stats.norm(m, np.sqrt(v)).logpdf(y).mean()
    assert metrics.gaussian_nll(mean, variance, targets) == pytest.approx(expected, rel=1e-12)


def integrated_crps(mean: float, variance: float, target: float) -> float:
    """Return the integral that defines the score, of each side of the target."""
    normal = stats.norm(mean, math.sqrt(variance))
    reach = 12 * math.sqrt(variance)
    low, high = min(mean, target) - reach, max(mean, target) + reach
    # Quadrature must be told of the mean, or it may miss a narrow step.
    points = [mean - reach / 4, mean, mean + reach / 4]
    left = integrate.quad(lambda t: normal.cdf(t) ** 2, low, target, points=points, limit=200)[0]
    return left + integrate.quad(lambda t: normal.sf(t) ** 2, target, high, points=points, limit=200)[0]


@pytest.mark.parametrize("seed", range(3))
def test_crps_agrees_with_the_integral_that_defines_it(seed: int) -> None:
    mean, variance, targets = (tensor[4 * seed : 4 * seed + 4].tolist() for tensor in draw(12))
    expected = [integrated_crps(*case) for case in zip(mean, variance, targets, strict=True)]
    for i, value in enumerate(expected):
        assert metrics.crps(mean[i : i + 1], variance[i : i + 1], targets[i : i + 1]) == pytest.approx(value, rel=1e-7)
    assert metrics.crps(mean, variance, targets) == pytest.approx(np.mean(expected), rel=1e-7)


def test_crps_tends_to_the_absolute_error_as_the_variance_vanishes() -> None:
    mean, _, targets = draw(50)
    assert metrics.crps(mean, 1e-24, targets) == pytest.approx(float((mean - targets).abs().mean()), rel=1e-10)


def test_crps_of_a_mean_that_is_right_is_a_share_of_the_standard_deviation() -> None:
    assert metrics.crps([5.0], [9.0], [5.0]) == pytest.approx(3 * (math.sqrt(2) - 1) / math.sqrt(math.pi), rel=1e-12)


@pytest.mark.parametrize("metric", OF_GAUSSIANS)
def test_a_single_variance_holds_for_all_targets(metric: Callable[..., float]) -> None:
    mean, _, targets = draw(10, 2)
    expected = metric(mean, torch.full((10, 2), 0.25), targets)
    assert metric(mean, 0.25, targets) == metric(mean, torch.tensor(0.25), targets) == expected


@pytest.mark.parametrize("metric", OF_GAUSSIANS)
def test_proper_scores_are_least_at_the_true_distribution(metric: Callable[..., float]) -> None:
    targets = stats.norm(2, 3).ppf((np.arange(2000) + 0.5) / 2000)  # as Gaussian as 2000 numbers can be
    scores = {(m, s): metric(np.full(2000, m), s**2, targets) for m in (1.5, 2, 2.5) for s in (2.5, 3, 3.5)}
    assert min(scores, key=lambda case: scores[case]) == (2, 3)


def test_rmse_by_hand() -> None:
    assert metrics.rmse([1, 2, 3], [1, 4, 7]) == pytest.approx(math.sqrt(20 / 3), rel=1e-12)
    assert metrics.rmse(torch.zeros(2, 2), torch.full((2, 2), -3.0)) == 3.0


def test_intervals_include_their_ends() -> None:
    lower, upper = [0.0, 0.0, 0.0, 2.0], [1.0, 1.0, 1.0, 2.0]
    assert metrics.interval_coverage(lower, upper, [0.0, 1.0, 1.0 + 1e-9, 2.0]) == 0.75
    assert metrics.interval_coverage(lower, upper, [-1e-9, 0.5, 2.0, 0.5]) == 0.25
    assert metrics.interval_width(lower, upper) == 0.75


def test_half_precision_is_scored_in_double_precision() -> None:
    mean, variance, targets = (tensor.half() for tensor in draw(30))
    wide = mean.double(), variance.double(), targets.double()
    for metric in OF_GAUSSIANS:
        assert metric(mean, variance, targets) == metric(*wide)
    assert metrics.rmse(mean, targets) == metrics.rmse(wide[0], wide[2])


# --- shapes ---

OF_THREE = [*OF_GAUSSIANS, metrics.interval_coverage]


def arguments(metric: Callable[..., float], mean: Tensor, positive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three arguments of a metric, each made from the same numbers."""
    return (mean, mean + positive, mean) if metric is metrics.interval_coverage else (mean, positive, mean)


@pytest.mark.parametrize("metric", OF_THREE)
def test_a_column_is_taken_as_one_number_for_each_example(metric: Callable[..., float]) -> None:
    mean, positive, _ = draw(20)
    first, second, third = arguments(metric, mean, positive)
    expected = metric(first, second, third)
    assert metric(first[:, None], second, third) == expected
    assert metric(first, second[:, None], third) == expected
    assert metric(first, second, third[:, None]) == expected


@pytest.mark.parametrize("wrong", [(1,), (3,), (1, 4), (4, 4), (2, 2), ()])
@pytest.mark.parametrize("metric", OF_THREE)
def test_shapes_that_would_be_broadcast_are_refused(metric: Callable[..., float], wrong: tuple[int, ...]) -> None:
    good, bad = torch.ones(4), torch.ones(wrong)
    for position in range(3):
        if position == 1 and wrong == () and metric in OF_GAUSSIANS:
            continue  # one variance for all
        given = [good, good, good]
        given[position] = bad
        with pytest.raises(ValueError, match=r"must have the shape of|is a single number"):
            metric(*given)
    for of_two in (metrics.rmse, metrics.interval_width):
        with pytest.raises(ValueError, match=r"must have the shape of|is a single number"):
            of_two(good, bad)


# --- refusals ---


@pytest.mark.parametrize("metric", OF_GAUSSIANS)
@pytest.mark.parametrize("variance", [[1.0, 0.0], [1.0, -1e-9], 0.0])
def test_variances_that_are_not_positive_are_refused(metric: Callable[..., float], variance: object) -> None:
    with pytest.raises(ValueError, match=r"variance must be positive.*add the variance of the noise"):
        metric([0.0, 0.0], variance, [0.0, 0.0])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(wrong: float) -> None:
    names = {
        metrics.gaussian_nll: ("mean", "variance", "targets"),
        metrics.crps: ("mean", "variance", "targets"),
        metrics.interval_coverage: ("lower", "upper", "targets"),
        metrics.interval_width: ("lower", "upper"),
        metrics.rmse: ("mean", "targets"),
    }
    for metric, arguments in names.items():
        for name in arguments:
            values = {key: [1.0, wrong] if key == name else [1.0, 1.0] for key in arguments}
            with pytest.raises(ValueError, match=f"{name} has NaN or infinite entries"):
                metric(**values)


def test_empty_and_complex_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="mean is empty"):
        metrics.rmse([], [])
    with pytest.raises(ValueError, match="targets must hold real numbers"):
        metrics.rmse([1.0], torch.ones(1, dtype=torch.complex64))


def test_single_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="mean is a single number"):
        metrics.rmse(1.0, 2.0)


def test_ends_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="lower is above upper in 1 of 2"):
        metrics.interval_coverage([0.0, 2.0], [1.0, 1.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="lower is above upper in 2 of 2"):
        metrics.interval_width([1.0, 2.0], [0.0, 1.0])
