"""The weights of statistics are the minimum of a logistic loss with a ridge and a bound, whatever the units are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from nullbayes.decisions.weights import Weights, learn_weights
from support.drawing import randn

optimize = pytest.importorskip("scipy.optimize")


def drawn(*shape: int, seed: int) -> Tensor:
    return randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(seed: int, shifts: tuple[float, ...] = (1.0, 0.3, 0.0)) -> tuple[Tensor, dict[str, Tensor]]:
    """Statistics of familiar inputs and of two kinds of strangers, with units of their own."""
    k = len(shifts)
    mixing = torch.eye(k, dtype=torch.float64) + 0.3 * drawn(k, k, seed=seed + 100)
    units, shift = torch.tensor([10.0**i for i in range(k)], dtype=torch.float64), torch.tensor(shifts)
    familiar = drawn(120, k, seed=seed) @ mixing
    near = drawn(80, k, seed=seed + 1) @ mixing + shift.double()
    far = drawn(200, k, seed=seed + 2) @ mixing + 3 * shift.double()
    return familiar * units + 5, {"near": near * units + 5, "far": far * units + 5}


def high(x: Tensor, like: Tensor, most: float = 8.0) -> Tensor:
    """How far statistics are above the mean of familiar inputs; what is below counts for next to nothing."""
    z = ((x - like.mean(0)) / like.std(0)).clamp(-most, most)
    return torch.log1p(torch.exp(2 * z)) / 2


def slow_weights(familiar: Tensor, strange: dict[str, Tensor], *, measured: bool = False) -> np.ndarray:
    """The same minimum by L-BFGS-B, from the definition."""
    given = (familiar, *strange.values())
    parts = [(part if measured else high(part, familiar)).cpu().numpy() for part in given]
    shares = [0.5] + [0.5 / len(strange)] * len(strange)

    def objective(w: np.ndarray) -> float:
        total = 1e-3 * (w[:-1] ** 2).sum()
        for i, (part, share) in enumerate(zip(parts, shares, strict=True)):
            sign = -1.0 if i == 0 else 1.0
            total += share * np.logaddexp(0, -sign * (part @ w[:-1] + w[-1])).mean()
        return float(total)

    k = familiar.shape[1]
    bounds = [(0, None)] * k + [(None, None)]
    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 10_000, "maxfun": 100_000}
    found = optimize.minimize(objective, np.zeros(k + 1), method="L-BFGS-B", bounds=bounds, options=options).x[:k]
    return found / found.sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shifts", [(1.0, 0.3, 0.0), (0.5, 0.5), (2.0,), (0.2, 0.1, 0.0, 1.5, 0.4)])
def test_weights_are_those_of_another_method(seed: int, shifts: tuple[float, ...]) -> None:
    familiar, strange = case(seed, shifts)
    found = learn_weights(familiar, strange)
    assert found.weights == pytest.approx(slow_weights(familiar, strange).tolist(), abs=2e-4)
    assert sum(found.weights) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(3))
def test_weights_of_both_sides_are_those_of_another_method(seed: int) -> None:
    familiar, strange = case(seed, (1.0, -0.8, 0.0))
    mean, scale = familiar.mean(0), familiar.std(0)

    def sides(x: Tensor) -> Tensor:
        z = ((x - mean) / scale).clamp(-8, 8)
        return torch.cat([high(x, familiar), torch.clamp(-z - 1, min=0)], 1)

    found = learn_weights(familiar, strange, trained=mean[None])
    wanted = slow_weights(sides(familiar), {kind: sides(x) for kind, x in strange.items()}, measured=True)
    assert (*found.weights, *found.low) == pytest.approx(wanted.tolist(), abs=2e-4)
    torch.testing.assert_close(found(familiar), sides(familiar) @ torch.tensor(wanted).to(familiar), atol=1e-3, rtol=0)


def test_a_statistic_that_is_unusually_low_counts_on_both_sides_alone() -> None:
    familiar = drawn(300, 2, seed=0)
    strange = {"middle": 0.1 * drawn(300, 2, seed=1) + torch.tensor([2.0, -3.0], dtype=torch.float64)}
    one, both = learn_weights(familiar, strange), learn_weights(familiar, strange, trained=familiar.mean(0)[None])
    assert one.low == ()
    assert one.weights[1] == 0.0
    assert both.low[1] > 0.1
    low = torch.tensor([[0.0, -3.0]], dtype=torch.float64)
    assert float(both(low)) > float(both(familiar).quantile(0.95)) > float(one(low))
    fooled = torch.tensor([[2.0, -9.0]], dtype=torch.float64)  # a low one does not make up for a high one
    assert float(both(fooled)) > float(both(familiar).quantile(0.95))


def test_a_statistic_as_low_as_that_of_training_data_does_not_count() -> None:
    familiar = drawn(300, 2, seed=0)
    strange = {"middle": 0.1 * drawn(300, 2, seed=1) + torch.tensor([0.0, -3.0], dtype=torch.float64)}
    trained = torch.tensor([0.0, -5.0], dtype=torch.float64) + 0.1 * drawn(200, 2, seed=2)
    found = learn_weights(familiar, strange, trained)
    assert found.usual[0] == 1.0
    assert 5.0 < found.usual[1] * float(familiar[:, 1].std()) < 5.5
    assert float(found(trained).quantile(0.95)) < float(found(familiar).median())


def test_the_score_is_the_weighted_sum_of_what_is_above_the_mean() -> None:
    familiar, strange = case(0)
    found, new = learn_weights(familiar, strange), strange["near"][:7]
    torch.testing.assert_close(found(new), high(new, familiar, 100.0) @ torch.tensor(found.weights).to(new))


def test_a_low_statistic_does_not_make_up_for_a_high_one() -> None:
    """Inputs of which the network is certain may have strange features, and strange outputs may have usual features."""
    familiar = drawn(300, 2, seed=0)
    one, other = (3.0 * drawn(300, 2, seed=seed).abs() * torch.eye(2).double()[i] for i, seed in enumerate((1, 2)))
    found = learn_weights(familiar, {"one": one, "other": other})
    assert min(found.weights) > 0.3
    for column in (0, 1):
        new = torch.full((1, 2), -3.0, dtype=torch.float64)
        new[0, column] = 3.0
        assert float(found(new)) > float(found(familiar).quantile(0.95))


def test_a_statistic_that_ranks_strangers_lower_counts_for_nothing() -> None:
    found = learn_weights(*case(1, (1.0, -2.0)))
    assert found.weights == pytest.approx((1.0, 0.0))


@pytest.mark.parametrize("value", [0.0, 3.0, 1e8])
def test_a_constant_statistic_counts_for_nothing(value: float) -> None:
    familiar, strange = case(2)
    familiar[:, 1] = value
    for part in strange.values():
        part[:, 1] = value + 1.0
    found = learn_weights(familiar, strange)
    assert found.weights[1] == 0.0
    assert torch.isfinite(found(familiar)).all()


@pytest.mark.parametrize("rounding", [0.0, 1e-8])
@pytest.mark.parametrize("value", [0.0, -69.0])
def test_what_is_clearly_above_a_constant_statistic_is_beyond_everything(value: float, rounding: float) -> None:
    familiar, strange = case(2)
    familiar[:, 1] = value + rounding * drawn(len(familiar), seed=3)
    found = learn_weights(familiar, strange)
    plain = learn_weights(familiar[:, [0, 2]], {kind: part[:, [0, 2]] for kind, part in strange.items()})
    assert torch.allclose(found(familiar), plain(familiar[:, [0, 2]]), atol=1e-5)
    new = familiar.clone()
    new[:, 1] = value + 0.5  # what another size of batches may do to a logarithm of rounding errors
    assert torch.allclose(found(new), found(familiar), atol=1e-5)
    new[:, 1] = value + 3.0
    assert float(found(new).min()) > float(found(familiar).max()) + 5.0


def test_weights_are_equal_if_no_statistic_is_useful() -> None:
    familiar, _ = case(3)
    assert learn_weights(familiar, {"same": familiar.clone()}).weights == pytest.approx((1 / 3,) * 3)
    assert learn_weights(familiar, {"low": familiar - familiar.std(0)}).weights == pytest.approx((1 / 3,) * 3)
    assert learn_weights(familiar, {}).weights == pytest.approx((1 / 3,) * 3)
    familiar[:, 0] = 1.0
    assert learn_weights(familiar, {}).weights == pytest.approx((0.0, 0.5, 0.5))
    constant = torch.ones(9, 2, dtype=torch.float64)
    assert learn_weights(constant, {"other": constant + 1}).weights == (0.5, 0.5)


def test_units_do_not_matter() -> None:
    familiar, strange = case(4)
    units, shift = torch.tensor([1e-6, 1.0, 1e6]).double(), torch.tensor([1.0, -5.0, 1e7]).double()
    other = learn_weights(familiar * units + shift, {kind: part * units + shift for kind, part in strange.items()})
    found = learn_weights(familiar, strange)
    assert other.weights == pytest.approx(found.weights, abs=1e-6)
    assert torch.allclose(other(strange["near"] * units + shift), found(strange["near"]), atol=1e-5)


def test_the_number_of_strangers_of_a_kind_does_not_matter() -> None:
    familiar, strange = case(5)
    more = {"near": strange["near"].repeat(3, 1), "far": strange["far"]}
    assert learn_weights(familiar, more).weights == pytest.approx(learn_weights(familiar, strange).weights, abs=1e-6)


def test_a_kind_that_comes_twice_counts_twice() -> None:
    familiar, strange = case(6)
    twice = {"near": strange["near"], "again": strange["near"], "far": strange["far"]}
    assert learn_weights(familiar, twice).weights == pytest.approx(slow_weights(familiar, twice).tolist(), abs=2e-4)
    assert learn_weights(familiar, twice).weights != pytest.approx(learn_weights(familiar, strange).weights, abs=2e-3)


def test_a_stranger_beyond_all_bounds_decides_nothing() -> None:
    familiar, strange = case(7)
    far = {**strange, "far": strange["far"] * 1e9}
    near = {**strange, "far": (strange["far"] * 1e9).clamp(-1e6, 1e6)}
    assert learn_weights(familiar, far).weights == pytest.approx(learn_weights(familiar, near).weights, abs=1e-6)


def test_what_is_not_finite_is_very_strange_whatever_its_weight() -> None:
    found = Weights((0.0, 1.0), (0.0, 0.0), (1.0, 1.0), (9.0, 9.0))
    statistics = torch.tensor([[torch.nan, 1.0], [torch.inf, 2.0], [0.0, torch.nan], [0.0, 3.0]]).double()
    assert found(statistics).tolist() == pytest.approx([1e30, 1e30, 1e30, 3.0], rel=1e-3)
