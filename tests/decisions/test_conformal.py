"""P-values and quantiles of held-out scores are ranks, and hold what they promise over many draws of the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from nullbayes.decisions.conformal import check_alpha, p_values, quantile
from nullbayes.errors import SettingsError
from support.drawing import randint, randn, seeded


def slow_p_values(held_out: Tensor, scores: Tensor) -> list[float]:
    return [(1 + sum(float(s) >= float(new) for s in held_out)) / (len(held_out) + 1) for new in scores]


@pytest.mark.parametrize("m", [1, 2, 19, 100])
def test_p_values_are_those_of_a_loop(m: int) -> None:
    held_out = randn(m, generator=seeded(), dtype=torch.float64)
    scores = torch.cat([randn(50, generator=seeded(1), dtype=torch.float64), held_out.amin()[None] - 1])
    assert p_values(held_out, scores).tolist() == pytest.approx(slow_p_values(held_out, scores), abs=1e-15)


def test_ties_count_as_at_least_as_strange() -> None:
    held_out = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    scores = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    assert p_values(held_out, scores).tolist() == pytest.approx([1.0, 1.0, 5 / 6, 5 / 6, 2 / 6, 1 / 6])
    whole = randint(4, (60,), generator=seeded()).double()
    assert p_values(whole, whole[:9]).tolist() == pytest.approx(slow_p_values(whole, whole[:9]))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rounding_does_not_break_a_tie(size: float) -> None:
    """The scores of an input differ by rounding in batches of different sizes; the input is not stranger for it."""
    held_out = torch.full((99,), size, dtype=torch.float64)
    assert p_values(held_out, held_out[:1] * (1 + 1e-7)).item() == 1.0
    assert p_values(held_out, held_out[:1] * (1 + 1e-4)).item() == 0.01
    spread = size * (randn(99, generator=seeded(), dtype=torch.float64) - 10.0)
    assert torch.equal(p_values(spread, spread + 1e-6 * size), p_values(spread, spread))


def test_shapes_and_scores_that_are_no_numbers() -> None:
    held_out = torch.arange(9.0, dtype=torch.float64)
    scores = torch.tensor([[torch.nan, torch.inf], [-torch.inf, 4.0]], dtype=torch.float64)
    wanted = torch.tensor([[0.1, 0.1], [1.0, 0.6]], dtype=torch.float64)
    torch.testing.assert_close(p_values(held_out, scores), wanted)


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("m", [1, 9, 10, 19, 20, 99, 100, 101])
def test_the_quantile_is_that_of_a_loop(m: int, alpha: float) -> None:
    held_out = randn(m, generator=seeded(m), dtype=torch.float64)
    least = next((k for k in range(1, m + 1) if k >= (1 - alpha) * (m + 1) - 1e-9), None)
    wanted = math.inf if least is None else sorted(held_out.tolist())[least - 1]
    assert quantile(held_out, alpha).item() == wanted
    columns = torch.stack([held_out, -held_out], 1)
    assert quantile(columns, alpha).tolist() == [wanted, quantile(-held_out, alpha).item()]


def test_a_quantile_and_a_p_value_decide_alike() -> None:
    """A score is above the quantile of a level exactly where its p-value is at most the level."""
    held_out, new = (randn(n, generator=seeded(n), dtype=torch.float64) for n in (37, 500))
    for alpha in (0.03, 0.05, 0.1, 2 / 38, 0.5):
        assert torch.equal(new > quantile(held_out, alpha), p_values(held_out, new) <= alpha + 1e-12)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 5, math.nan, "0.05", None, True])
def test_a_level_that_is_no_probability_is_refused(alpha: object) -> None:
    with pytest.raises(SettingsError, match="alpha must be a number between 0 and 1, such as"):
        check_alpha(alpha, 1000)  # type: ignore[arg-type]


def test_a_level_in_percent_is_told_as_a_rate_of_errors() -> None:
    for alpha, wanted in {
        95: "a level of 95 % pass 0.05",
        99.5: "a level of 99.5 % pass 0.005",
        5: "5 % pass 0.05",
    }.items():
        with pytest.raises(SettingsError, match=rf"not {alpha}\. It is the rate of errors: for {wanted}\.$"):
            check_alpha(alpha, 1000)
    for alpha in (1.0, -5, 100, math.inf):
        with pytest.raises(SettingsError, match=rf"not {alpha}\.$"):
            check_alpha(alpha, 1000)


def test_a_level_that_so_few_scores_cannot_reach_is_refused() -> None:
    assert check_alpha(0.05, 19) == 0.05
    assert check_alpha(np.float32(0.25), 3) == 0.25  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"alpha=0.05 needs at least 19 held-out scores .* left 18: .*more data"):
        check_alpha(0.05, 18)
    with pytest.raises(SettingsError, match="at least 999 "):
        check_alpha(0.001, 100)


# --- what is promised -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_p_values_of_exchangeable_scores_are_uniform(ties: bool) -> None:
    """Over 4,000 draws; exactly uniform on the grid without ties, and never too small with them."""
    m, repeats = 39, 4000
    drawn = randn(repeats, m + 1, generator=seeded(5), dtype=torch.float64)
    drawn = drawn.round(decimals=0) if ties else drawn
    found = torch.stack([p_values(row[:m], row[m:]) for row in drawn])[:, 0]
    for level in (0.05, 0.1, 0.25, 0.5):
        rate, error = float((found <= level + 1e-12).double().mean()), math.sqrt(level * (1 - level) / repeats)
        assert rate <= level + 4 * error
        assert ties or rate >= level - 4 * error
