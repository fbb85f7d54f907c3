"""The trace of a projection, estimated from its samples."""

import pytest
import torch

import nullbayes as nb
from nullbayes.projectors.stopping import mean_and_error, traces
from support.projector_table import gaussian


def rows_of(noise: torch.Tensor) -> nb.Rows:
    return nb.DenseRows(torch.ones(1, noise.shape[1]))


@pytest.mark.parametrize(("size", "rank"), [(5, 1), (30, 10), (30, 29), (30, 30), (30, 0)])
def test_estimate_of_the_trace_is_unbiased_and_never_above_the_size(size: int, rank: int) -> None:
    basis = torch.linalg.qr(gaussian(size, size)).Q[:, :rank]
    noise = gaussian(20_000, size, seed=1) * 10 ** gaussian(20_000, 1, seed=2)  # any length will do
    estimates = traces(rows_of(noise), noise, noise @ basis @ basis.T)
    assert estimates.dtype == torch.float64
    assert estimates.min() >= -1e-12
    assert estimates.max() <= size * (1 + 1e-12)
    spread = (2 * rank * (1 - rank / size) * size / (size + 2)) ** 0.5  # of a beta distribution
    assert float(estimates.mean()) == pytest.approx(rank, abs=4 * spread / 20_000**0.5 + 1e-9)
    assert float(estimates.std()) == pytest.approx(spread, rel=0.05, abs=1e-9)


def test_estimate_holds_for_maps_that_are_not_projections() -> None:
    values = gaussian(1, 40)[0].sigmoid()
    noise = gaussian(20_000, 40, seed=1)
    estimates = traces(rows_of(noise), noise.float(), noise.float() * values.float())
    assert float(estimates.mean()) == pytest.approx(float(values.sum()), rel=0.01)


def test_zero_noise_has_a_trace_of_zero() -> None:
    zeros = torch.zeros(2, 5)
    assert torch.equal(traces(rows_of(zeros), zeros, zeros), torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("rank", [0, 3, 10, 20])
def test_standard_error_of_one_estimate_is_that_of_a_projector(rank: int) -> None:
    mean, error = mean_and_error(torch.tensor([float(rank)], dtype=torch.float64), 20)
    assert (mean, error) == (rank, pytest.approx((2 * rank * (1 - rank / 20)) ** 0.5))
    assert mean_and_error(torch.tensor([4.0, 6.0, 8.0]), 20) == (6.0, pytest.approx(2 / 3**0.5))
    assert mean_and_error(torch.tensor([-1e-9]), 20) == (0.0, 0.0)  # rounding is no negative dimension
