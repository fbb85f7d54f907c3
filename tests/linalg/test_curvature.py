"""Every curvature against the dense matrix that it stands for: covariance of its samples, variances, determinant."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning, NullBayesError
from nullbayes.linalg.curvature import (
    Curvature,
    Diagonal,
    Dual,
    Kronecker,
    LowRank,
    MatrixFree,
    Primal,
    column_squares,
    decomposed,
    lanczos_pairs,
    nystrom_pairs,
)
from support.drawing import randn, seeded

P, ALPHAS = 12, (0.05, 1.0, 30.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, generator=seeded(seed), dtype=torch.float64)


def square(size: int, seed: int) -> Tensor:
    root = normal(size, size, seed=seed)
    return root @ root.T


WIDE, TALL = normal(7, P, seed=1), normal(20, P, seed=2)
BASIS, VALUES = torch.linalg.qr(normal(P, 4, seed=3)).Q.T, torch.tensor([9.0, 2.0, 0.5, 0.0], dtype=torch.float64)
OUT, IN, BIAS = square(2, 4), square(3, 5), square(6, 6)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], Curvature]
    dense: Tensor  # (P, P)


_CASES = (
    Case("diagonal", lambda: Diagonal(WIDE[0].square()), torch.diag(WIDE[0].square())),
    Case("low rank", lambda: LowRank(BASIS, VALUES), BASIS.T @ torch.diag(VALUES) @ BASIS),
    Case(
        "kronecker",
        lambda: Kronecker([
            decomposed(6, BIAS, torch.ones(1, 1, dtype=torch.float64)), decomposed(0, OUT, IN)
        ]),
        torch.block_diag(torch.kron(OUT, IN), BIAS),
    ),
    Case("primal", lambda: Primal(TALL.T @ TALL), TALL.T @ TALL),
    Case("dual", lambda: Dual(nb.DenseRows(WIDE)), WIDE.T @ WIDE),
    Case("matrix-free", lambda: MatrixFree(nb.DenseRows(TALL), 3, seeded(), rtol=1e-12), TALL.T @ TALL),
)  # fmt: skip
CASES = {case.name: case for case in _CASES}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
each_alpha = pytest.mark.parametrize("alpha", ALPHAS)


@each_alpha
@each_case
def test_samples_have_the_inverse_as_covariance(case: Case, alpha: float) -> None:
    """A sample is linear in its noise, so the covariance is exact: that of the images of unit vectors."""
    curvature = case.make()
    images = curvature.sample(torch.eye(curvature.noise_size, dtype=torch.float64), alpha)
    wanted = torch.linalg.inv(case.dense + alpha * torch.eye(P, dtype=torch.float64))
    torch.testing.assert_close(images.T @ images, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("alpha", [1.0, 1e-3])
@pytest.mark.parametrize(
    "make",
    [lambda a: Primal(a.double().T @ a.double()), lambda a: Dual(nb.DenseRows(a))],
    ids=["primal", "dual"],
)
def test_small_variances_of_float32_rows_keep_their_digits(make: Callable[[Tensor], Curvature], alpha: float) -> None:
    """A training example of a network that fits well: its variance is a millionth of its squared length over alpha."""
    rows = 100.0 * normal(20, 300, seed=8).float()
    wide = rows.double()
    inverse = torch.linalg.inv(wide.T @ wide + alpha * torch.eye(300, dtype=torch.float64))
    wanted = ((wide @ inverse) * wide).sum(1)
    torch.testing.assert_close(make(rows).variance(rows, alpha).double(), wanted, rtol=1e-3, atol=0)


@pytest.mark.parametrize("alpha", [100.0, 1.0, 1e-2])
def test_a_spectrum_far_above_the_precision_does_not_break_float32(alpha: float) -> None:
    """Up to 1e9 times: a preconditioner that rounding makes indefinite would end in NaN, taken for an answer."""
    left, right = (torch.linalg.qr(normal(size, 60, seed=7)).Q for size in (60, 300))
    rows = (left * torch.logspace(1.5, 3.5, 60, dtype=torch.float64)) @ right.T
    inverse = torch.linalg.inv(rows.T @ rows + alpha * torch.eye(300, dtype=torch.float64))
    new = torch.cat([rows[:3] / rows[:3].norm(dim=1, keepdim=True), normal(3, 300, seed=9)])
    curvature = MatrixFree(nb.DenseRows(rows.float()), 30, seeded())
    wanted = ((new @ inverse) * new).sum(1)
    torch.testing.assert_close(curvature.variance(new.float(), alpha).double(), wanted, rtol=1e-2, atol=0)


def test_solve_stops_with_a_warning_where_products_overflow() -> None:
    curvature = MatrixFree(nb.DenseRows(TALL.float()), 3, seeded())
    curvature.rows = nb.DenseRows(1e25 * TALL.float())  # whose squares overflow
    with pytest.warns(ConvergenceWarning, match="where rounding in float32 lets it go no further"):
        assert torch.isfinite(curvature.solve(normal(2, P, seed=9).float(), 1.0)).all()


@each_alpha
@each_case
def test_variances_are_quadratic_forms_of_the_inverse(case: Case, alpha: float) -> None:
    rows = normal(5, P, seed=9)
    inverse = torch.linalg.inv(case.dense + alpha * torch.eye(P, dtype=torch.float64))
    torch.testing.assert_close(case.make().variance(rows, alpha), (rows @ inverse * rows).sum(1), rtol=1e-8, atol=1e-9)


@each_alpha
@each_case
def test_log_determinants_are_those_of_the_dense_matrix(case: Case, alpha: float) -> None:
    wanted = float(torch.logdet(case.dense + alpha * torch.eye(P, dtype=torch.float64)))
    exact = not isinstance(case.make(), MatrixFree)  # which has probes
    assert case.make().log_determinant(alpha) == pytest.approx(wanted, rel=1e-9 if exact else 0.5, abs=1e-9)
    assert float(case.make().spectrum()[1].sum()) == pytest.approx(P)


@each_case
def test_sampling_at_another_precision_leaves_no_trace(case: Case) -> None:
    curvature = case.make()
    noise = normal(3, curvature.noise_size, seed=5)
    first = curvature.sample(noise, 1.0)
    other = curvature.sample(noise, 4.0)
    assert (first - other).abs().max() > 1e-3
    torch.testing.assert_close(curvature.sample(noise, 1.0), first, rtol=1e-12, atol=1e-12)


@each_case
def test_float32_curvatures_match_float64(case: Case) -> None:
    curvature = {
        "diagonal": lambda: Diagonal(WIDE[0].square().float()),
        "low rank": lambda: LowRank(BASIS.float(), VALUES),
        "kronecker": lambda: Kronecker(
            [f._replace(**{n: getattr(f, n).float() for n in f._fields[1:]}) for f in CASES["kronecker"].make().blocks]
        ),
        "primal": lambda: Primal(TALL.T @ TALL),
        "dual": lambda: Dual(nb.DenseRows(WIDE.float())),
        "matrix-free": lambda: MatrixFree(nb.DenseRows(TALL.float()), 3, seeded()),
    }[case.name]()
    noise = normal(4, curvature.noise_size, seed=6)
    torch.testing.assert_close(
        curvature.sample(noise.float(), 0.3).double(), case.make().sample(noise, 0.3), rtol=1e-3, atol=1e-4
    )
    assert curvature.sample(noise.float(), 0.3).dtype == torch.float32
    assert curvature.variance(normal(2, P).float(), 0.3).dtype == torch.float32


def test_kronecker_factors_can_be_written_and_read() -> None:
    made = CASES["kronecker"].make()
    again = Kronecker.of(made.tensors())
    torch.testing.assert_close(again.sample(normal(3, P), 2.0), made.sample(normal(3, P), 2.0), rtol=1e-12, atol=1e-12)


def test_small_variances_are_not_lost_to_rounding() -> None:
    """Along a vector of large curvature float32 keeps the digits of what little is left."""
    basis, values = BASIS.float(), torch.tensor([1e8, 2.0, 1.0, 0.5])
    assert float(LowRank(basis, values).variance(basis[:1], 1e-2)) == pytest.approx(1e-8, rel=0.2)


def test_column_squares_are_the_diagonal() -> None:
    torch.testing.assert_close(column_squares(nb.DenseRows(TALL)), (TALL.T @ TALL).diagonal())


@pytest.mark.parametrize("find", [lanczos_pairs, nystrom_pairs])
def test_eigenpairs_come_closer_as_the_rank_grows(find: Callable[..., LowRank]) -> None:
    """A decaying spectrum; the whole matrix at full rank, and no eigenvalue too large at any."""
    size = 40
    scales = 0.7 ** torch.arange(size, dtype=torch.float64)
    matrix = torch.linalg.qr(normal(60, size)).Q * scales @ torch.linalg.qr(normal(size, size, seed=1)).Q
    wanted = matrix.T @ matrix
    errors = []
    for rank in (4, 12, 40):
        pairs = find(nb.DenseRows(matrix), rank, seeded())
        torch.testing.assert_close(pairs.basis @ pairs.basis.T, torch.eye(pairs.rank, dtype=torch.float64))
        found = pairs.basis.T @ torch.diag(pairs.values) @ pairs.basis
        errors.append(float(torch.linalg.matrix_norm(wanted - found, 2)))
        assert bool(
            (pairs.values <= scales[: pairs.rank].square() * (1 + 1e-9) + 1e-12).all()
        )  # in order, none too large
        optimal = float(scales[rank].square()) if rank < size else 0.0
        assert errors[-1] < 30 * optimal + 1e-9
    assert errors[0] > errors[1] > errors[2]


def test_too_few_steps_cause_a_warning() -> None:
    curvature = MatrixFree(nb.DenseRows(normal(50, 40)), 1, seeded(), rtol=1e-12, max_steps=2)
    with pytest.warns(ConvergenceWarning, match="larger prior_precision"):
        curvature.sample(normal(2, 90), 1e-3)


class Disturbed(nb.DenseRows):
    """Rows whose products are wrong by one percent from the second to the given one."""

    products, until = 0, 3

    def mv(self, vectors: Tensor) -> Tensor:
        self.products += 1
        return super().mv(vectors) * (1.01 if 1 < self.products <= self.until else 1.0)


def test_a_residual_that_drifted_is_computed_again() -> None:
    """The residual that the steps update knows nothing of a product that was wrong; the one that ends them does."""
    vectors, matrix = normal(2, P, seed=9), TALL.T @ TALL + 0.1 * torch.eye(P, dtype=torch.float64)
    curvature = MatrixFree(nb.DenseRows(TALL), 3, seeded(), rtol=1e-10)
    curvature.rows = Disturbed(TALL)
    torch.testing.assert_close(curvature.solve(vectors, 0.1) @ matrix, vectors, rtol=1e-8, atol=1e-8)
    assert curvature.rows.products > Disturbed.until


def test_a_residual_that_stays_large_is_said() -> None:
    curvature = MatrixFree(nb.DenseRows(TALL), 3, seeded(), rtol=1e-10, max_steps=50)
    curvature.rows = Disturbed(TALL)
    curvature.rows.rmv = lambda vectors: nb.DenseRows(TALL + 0.01 * TALL.roll(1, 1)).rmv(vectors)  # not the transpose
    curvature.rows.until = 0
    with pytest.warns(ConvergenceWarning, match="Conjugate gradients stopped"):
        curvature.solve(normal(2, P, seed=9), 1e-6)


def test_a_matrix_that_cannot_be_factored_is_refused() -> None:
    with pytest.raises(NullBayesError, match="larger prior_precision"):
        Primal(-torch.eye(3, dtype=torch.float64)).sample(normal(1, 3), 0.5)


def test_a_factor_is_let_go_before_the_next_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    solver = torch.linalg.cholesky_ex

    def factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
        assert not any(before() is not None for before in made)
        found, info = solver(matrix)
        made.append(weakref.ref(found))
        return found, info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", factor)
    curvature = Primal(TALL.T @ TALL)
    for alpha in ALPHAS:
        curvature.variance(WIDE, alpha)
    assert len(made) == len(ALPHAS)
