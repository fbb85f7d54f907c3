"""Lemma 4.1: sweeps of block projections converge to the projection, linearly; the printed rate is not theirs.

Printed is c = Π_b cos²(θ_b), with θ_b the smallest angle between combinations of rows of block b and of another block,
and an error of at most c^t after t sweeps. Here Q is one sweep, Q = Π_b (I - 𝒫_b), and P its limit.
"""

import itertools
from functools import reduce

import numpy as np
import pytest
import torch

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.projectors import Alternating
from support.paper import oracle
from support.paper.networks import classifier, gaussian
from support.paper.oracle import Matrix

# --- what is printed, what holds, what is measured ---


def sweep(blocks: list[Matrix]) -> Matrix:
    """One sweep Q as a matrix: the first block acts first."""
    return reduce(lambda done, block: oracle.kernel_projector(block) @ done, blocks, np.eye(blocks[0].shape[1]))


def error_after(blocks: list[Matrix], sweeps: int) -> float:
    """‖Qᵗ - P‖, the worst case over noise of unit length."""
    limit = oracle.kernel_projector(np.concatenate(blocks))
    return float(np.linalg.norm(np.linalg.matrix_power(sweep(blocks), sweeps) - limit, 2))


def contraction(blocks: list[Matrix]) -> float:
    """What a sweep multiplies the error by, in the end: the spectral radius of Q - P."""
    limit = oracle.kernel_projector(np.concatenate(blocks))
    return float(np.abs(np.linalg.eigvals(sweep(blocks) - limit)).max())


def printed_rate(blocks: list[Matrix]) -> float:
    """Π_b cos²(min_b' ∠(M_b, M_b')); the smallest angle has the largest cosine."""
    others = [[other for other in blocks if other is not block] for block in blocks]
    cosines = [max(oracle.minimal_cosine(b, other) for other in rest) for b, rest in zip(blocks, others, strict=True)]
    return float(np.prod(np.square(cosines)))


def smith_solmon_wagner(blocks: list[Matrix]) -> float:
    """1 - Π_j sin²(angle between kernel j and the intersection of those after it): bounds the *squared* error."""
    kernels = [oracle.kernel_projector(block) for block in blocks]
    rest = [oracle.intersection_projector(kernels[j + 1 :]) for j in range(len(kernels) - 1)]
    cosines = [oracle.friedrichs_cosine(kernel, other) for kernel, other in zip(kernels[:-1], rest, strict=True)]
    return float(1 - np.prod(1 - np.square(cosines)))


def random_blocks(n_blocks: int, seed: int) -> list[Matrix]:
    return [gaussian(3, 20, seed=100 * seed + b).cpu().numpy() for b in range(n_blocks)]


def two_lines(angle: float) -> list[Matrix]:
    return [np.array([[1.0, 0.0, 0.0]]), np.array([[np.cos(angle), np.sin(angle), 0.0]])]


def nearly_dependent_rows(n: int, delta: float) -> list[Matrix]:
    """e_1 … e_{n-1}, and (e_1 + … + e_{n-1})/√(n-1) + δ e_n, each a block; one column more, for a kernel."""
    matrix = np.eye(n, n + 1)
    matrix[-1, : n - 1] = (n - 1) ** -0.5
    matrix[-1, n - 1] = delta
    return [row[None] for row in matrix]


# --- the limit ---


@pytest.mark.parametrize("n_blocks", [2, 3, 5])
def test_limit_is_the_projection(n_blocks: int) -> None:
    blocks = random_blocks(n_blocks, seed=1)
    assert error_after(blocks, 1) > 0.1
    assert error_after(blocks, 500) < 1e-8


def test_limit_is_the_projection_for_a_network() -> None:
    rows = classifier().jacobian
    blocks = [rows[:30], rows[30:]]
    assert error_after(blocks, 2**16) < 1e-8


def test_library_reaches_the_limit() -> None:
    matrix = np.concatenate(random_blocks(5, seed=1))
    projector = Alternating(block_rows=3, rtol=1e-10, max_sweeps=2000)
    noise = torch.eye(20, dtype=torch.float64)
    projection = projector.apply(projector.prepare(nb.DenseRows(torch.as_tensor(matrix))), noise)
    np.testing.assert_allclose(projection.directions.cpu().numpy(), oracle.kernel_projector(matrix), atol=1e-8)


@pytest.mark.parametrize("n_blocks", [2, 3, 5])
def test_convergence_is_linear(n_blocks: int) -> None:
    """From some sweep on, each multiplies the error by the same factor below 1."""
    blocks = random_blocks(n_blocks, seed=2)
    rate = contraction(blocks)
    assert 0.1 < rate < 1
    errors = [error_after(blocks, t) for t in (6, 9, 12)]
    ratios = [(after / before) ** (1 / 3) for before, after in itertools.pairwise(errors)]
    np.testing.assert_allclose(ratios, rate, rtol=0.02)


# --- the rate for two blocks ---


@pytest.mark.parametrize("angle", [0.1, 0.5, 1.2])
def test_error_for_two_blocks_is_an_odd_power_of_the_cosine(angle: float) -> None:
    """Kayalar and Weinert: ‖Qᵗ - P‖ = cos^(2t-1), so a sweep contracts by cos²."""
    blocks = two_lines(angle)
    for t in range(1, 6):
        assert error_after(blocks, t) == pytest.approx(np.cos(angle) ** (2 * t - 1), rel=1e-10)
    assert contraction(blocks) == pytest.approx(np.cos(angle) ** 2)


@pytest.mark.parametrize("angle", [0.1, 0.5, 1.2])
def test_printed_rate_is_too_fast_for_two_blocks_already(angle: float) -> None:
    """θ_1 = θ_2 = θ, so the product over both blocks is cos⁴θ, the square of what a sweep does."""
    blocks = two_lines(angle)
    assert printed_rate(blocks) == pytest.approx(np.cos(angle) ** 4)
    assert printed_rate(blocks) == pytest.approx(contraction(blocks) ** 2)
    for t in range(1, 6):
        assert error_after(blocks, t) > printed_rate(blocks) ** t


def test_two_blocks_of_many_rows_contract_by_the_squared_cosine() -> None:
    blocks = random_blocks(2, seed=3)
    cosine = oracle.minimal_cosine(*blocks)
    assert contraction(blocks) == pytest.approx(cosine**2, rel=1e-8)
    assert error_after(blocks, 3) == pytest.approx(cosine**5, rel=1e-8)
    assert printed_rate(blocks) == pytest.approx(cosine**4, rel=1e-8)


def test_printed_rate_says_nothing_when_blocks_share_a_direction() -> None:
    """A row in two blocks makes the smallest angle zero, yet it costs nothing: the angle that counts leaves it out."""
    first, second = random_blocks(2, seed=4)
    second[0] = first[0]
    blocks = [first, second]
    assert printed_rate(blocks) == pytest.approx(1)
    cosine = oracle.friedrichs_cosine(*(oracle.kernel_projector(block) for block in blocks))
    assert cosine < 0.9
    assert contraction(blocks) == pytest.approx(cosine**2, rel=1e-6)


# --- the rate for more ---


def test_printed_rate_is_zero_as_soon_as_one_block_is_orthogonal_to_the_others() -> None:
    """A third block that has nothing to do with the two cannot speed them up."""
    blocks = [*two_lines(0.1), np.array([[0.0, 0.0, 1.0]])]
    assert printed_rate(blocks) < 1e-30
    assert contraction(blocks) == pytest.approx(np.cos(0.1) ** 2)
    assert error_after(blocks, 10) > 0.9


@pytest.mark.parametrize(("n", "delta"), [(5, 0.3), (20, 0.05)])
def test_rows_nearly_orthogonal_in_pairs_contract_as_slowly_as_one_likes(n: int, delta: float) -> None:
    """The sweep contracts by 1/(1 + δ²); printed is ((n - 1)(1 + δ²))⁻ⁿ."""
    blocks = nearly_dependent_rows(n, delta)
    assert contraction(blocks) == pytest.approx(1 / (1 + delta**2), rel=1e-10)
    assert printed_rate(blocks) == pytest.approx(((n - 1) * (1 + delta**2)) ** -n, rel=1e-8)
    assert error_after(blocks, 10) > 0.5 * (1 + delta**2) ** -10
    assert printed_rate(blocks) < 1e-3


def test_library_contracts_as_computed_on_the_counterexample() -> None:
    n, delta = 20, 0.05
    matrix = torch.as_tensor(np.concatenate(nearly_dependent_rows(n, delta)))
    residuals: dict[int, float] = {}
    projector = Alternating(block_rows=1, rtol=1e-8, max_sweeps=60)
    state = projector.prepare(nb.DenseRows(matrix))
    noise = gaussian(1, n + 1, seed=33)
    with pytest.warns(ConvergenceWarning):
        projector.apply(state, noise, callback=lambda t, residual: residuals.update({t: float(residual.max())}))
    first, last = min(t for t in residuals if t >= 10), max(residuals)
    measured = (residuals[last] / residuals[first]) ** (1 / (last - first))
    assert measured == pytest.approx(1 / (1 + delta**2), rel=1e-6)


def test_printed_rate_falls_with_the_number_of_blocks_but_the_sweeps_are_no_faster() -> None:
    """Every block more is a factor more: cut finely enough, any data would need but one sweep."""
    rows = classifier().jacobian
    cuts = [[rows[i : i + size] for i in range(0, 60, size)] for size in (30, 12, 6)]
    printed = [printed_rate(blocks) for blocks in cuts]
    assert printed == sorted(printed, reverse=True)
    assert printed[-1] < 0.7
    assert min(contraction(blocks) for blocks in cuts) > 0.99


def every_case() -> list[list[Matrix]]:
    rows = classifier().jacobian
    return [
        two_lines(0.1),
        two_lines(1.2),
        [*two_lines(0.1), np.array([[0.0, 0.0, 1.0]])],
        nearly_dependent_rows(5, 0.3),
        nearly_dependent_rows(5, 0.3)[::-1],
        nearly_dependent_rows(20, 0.05),
        random_blocks(3, seed=5),
        random_blocks(5, seed=6),
        [rows[i : i + 15] for i in range(0, 60, 15)],
    ]


@pytest.mark.parametrize("index", range(9))
def test_smith_solmon_wagner_bound_holds(index: int) -> None:
    """‖Qᵗ - P‖² ≤ (1 - Π sin²)ᵗ: the root of it for the error itself."""
    blocks = every_case()[index]
    bound = smith_solmon_wagner(blocks)
    assert bound < 1
    for t in (1, 2, 5, 20):
        assert error_after(blocks, t) <= bound ** (t / 2) * (1 + 1e-9)


def test_smith_solmon_wagner_bound_is_of_the_squared_error() -> None:
    """For two blocks it is cos²: one sweep reaches it with the square of its norm, and exceeds it with the norm."""
    blocks = two_lines(0.5)
    bound = smith_solmon_wagner(blocks)
    assert bound == pytest.approx(np.cos(0.5) ** 2)
    assert error_after(blocks, 1) ** 2 == pytest.approx(bound)
    assert error_after(blocks, 1) > bound
    assert error_after(blocks, 5) > bound**5


def test_smith_solmon_wagner_bound_is_sharp_on_the_counterexample() -> None:
    blocks = nearly_dependent_rows(20, 0.05)
    assert smith_solmon_wagner(blocks) == pytest.approx(1 / (1 + 0.05**2), rel=1e-8)
    assert smith_solmon_wagner(blocks) == pytest.approx(contraction(blocks), rel=1e-8)
