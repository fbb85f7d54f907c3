"""Conjugate gradients with a sketch as preconditioner reach the dense answer, whatever part of the rows it combines."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning, SettingsError
from nullbayes.linalg.spectral import NormalFactor
from nullbayes.projectors import Sketched
from nullbayes.projectors.sketched import draw_examples
from nullbayes.testing import kernel_projector
from support.drawing import randn

OUTPUTS = 5


def grouped(n: int = 12, columns: int = 90) -> nb.DenseRows:
    """Rows of which five at a time belong to one example, of different lengths; two of them are zero."""
    generator = torch.Generator().manual_seed(0)
    matrix = randn(n * OUTPUTS, columns, dtype=torch.float64, generator=generator)
    matrix *= torch.logspace(0, -2, len(matrix), dtype=torch.float64)[:, None]
    matrix[7:9] = 0.0
    rows = nb.DenseRows(matrix)
    rows.rows_per_example = OUTPUTS
    return rows


def drawn(n: int, columns: int, seed: int = 1) -> Tensor:
    return randn(n, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("share", [0.2, 0.4, 1.0])
def test_every_share_of_the_rows_leads_to_the_dense_answer(share: float) -> None:
    rows, noise = grouped(), drawn(4, 90)
    projector = Sketched(share, rtol=1e-10)
    projection = projector.apply(projector.prepare(rows), noise)
    torch.testing.assert_close(projection.directions, noise @ kernel_projector(rows.dense()), atol=1e-7, rtol=0)


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("columns", [60, 100])  # without and with a null space
def test_a_part_of_the_examples_leads_to_the_dense_answer(columns: int, share: float) -> None:
    mixed = grouped(100, 60).dense() @ drawn(60, columns, seed=5)
    rows, noise = nb.DenseRows(mixed), drawn(4, columns)
    rows.rows_per_example = OUTPUTS
    projector = Sketched(share, rtol=1e-9, max_sweeps=2000)
    state = projector.prepare(rows)
    assert isinstance(state.part, NormalFactor)
    projection = projector.apply(state, noise)
    assert bool(projection.info.converged.all())
    torch.testing.assert_close(projection.directions, noise @ kernel_projector(rows.dense()), atol=1e-6, rtol=0)


def test_a_part_of_the_examples_is_drawn_at_random_and_scaled_like_the_whole() -> None:
    """Data may be in an order: every second example of pairs would be half of what there is."""
    rows = grouped(100, 60)
    scale = rows.unit_scale(0.01)
    state, units = Sketched(0.25, rtol=0.01).prepare(rows), torch.eye(60, dtype=torch.float64)
    taken = draw_examples(0.25, 100)
    assert int(taken.sum()) == 25
    assert len(set(taken.nonzero()[:, 0].diff().tolist())) > 3
    some = (rows.dense() * scale[:, None])[taken.repeat_interleave(OUTPUTS)]
    expected = 0.01 * torch.linalg.inv(some.T @ some / 0.25 + 0.01 * units)
    torch.testing.assert_close(state.precondition(units), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("share", [0.04, 0.1])
def test_rare_examples_are_kept_though_few_of_them_are_taken(share: float) -> None:
    """Eight of 800 examples have rows unlike all others. By the residual alone, half of their change would be left."""
    matrix = drawn(800 * OUTPUTS, 40, seed=6) @ drawn(40, 90, seed=7)
    examples = torch.arange(0, 800, 100)
    rare = (examples[:, None] * OUTPUTS + torch.arange(OUTPUTS)).flatten()
    matrix[rare] = drawn(len(rare), 90, seed=8)
    rows, noise = nb.DenseRows(matrix), drawn(30, 90)
    rows.rows_per_example = OUTPUTS
    assert not draw_examples(share, 800)[examples].any()
    projector = Sketched(share, rtol=1e-2)
    projection = projector.apply(projector.prepare(rows), noise)
    changed, before = (rows.mv(v)[:, rare].norm(dim=0) for v in (projection.directions, noise))
    assert (changed / before).max() < 0.1
    assert projection.info.residual.max() <= 1e-2


def test_smaller_leads_from_examples_to_combinations_where_these_are_few() -> None:
    rows = grouped(20, 60)  # 100 rows
    projector = Sketched(0.8)
    assert isinstance(projector.prepare(rows).part, NormalFactor)
    smaller = projector.smaller(rows)
    assert smaller is not None
    assert smaller.prepare(rows).part.block().n_rows == 40
    assert Sketched(0.8).smaller(grouped(100, 60)) is None  # one combination each would be more than the columns


def test_a_sketch_of_more_rows_takes_fewer_sweeps() -> None:
    rows, noise = grouped(), drawn(4, 90)
    sweeps = []
    for share in (0.2, 1.0):
        projector = Sketched(share, rtol=1e-6)
        sweeps.append(projector.apply(projector.prepare(rows), noise).info.sweeps)
    assert sweeps[1] < 0.7 * sweeps[0]


def test_smaller_ends_at_one_combination_of_each_example() -> None:
    rows, projector, counts = grouped(), Sketched(1.0), []
    while projector is not None:
        counts.append(projector.prepare(rows).part.block().n_rows // 12)
        projector = projector.smaller(rows)
    assert counts == [5, 2, 1]


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(SettingsError, match="share must lie above 0"):
        Sketched(share)


def test_a_sample_is_measured_when_it_seems_to_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, noise, measured = grouped(), drawn(6, 90), []
    projector = Sketched(0.2, rtol=1e-8)
    state = projector.prepare(rows)
    rows.frobenius()  # is measured once as well
    norms = nb.DenseRows.norms
    monkeypatch.setattr(nb.DenseRows, "norms", lambda self, v: measured.append(len(v)) or norms(self, v))
    info = projector.apply(state, noise).info
    assert int(info.sweeps_per_sample.min()) > 16
    often = len(noise) * (1 + info.sweeps // 16)  # the noise, and after multiples of 16
    assert often < sum(measured) <= often + 2 * len(noise)  # and each of them once or twice at its end
    assert float(info.residual.max()) <= 1e-8


@pytest.mark.parametrize("guess", [0.0, float("nan")])
def test_a_guess_alone_ends_nothing(guess: float) -> None:
    class Wrong(Sketched):
        def _guess(self, state: object, carry: tuple[Tensor, ...]) -> Tensor:
            return torch.full_like(carry[0][:, 0], guess)

    rows, noise, projector = grouped(), drawn(4, 90), Wrong(0.2, rtol=1e-10)
    state = projector.prepare(rows)
    projection = projector.apply(state, noise)
    assert projection.info.sweeps == Sketched(0.2, rtol=1e-10).apply(state, noise).info.sweeps
    torch.testing.assert_close(projection.directions, noise @ kernel_projector(rows.dense()), atol=1e-7, rtol=0)


def test_a_guess_that_never_tells_only_delays_the_end() -> None:
    class Late(Sketched):
        def _guess(self, state: object, carry: tuple[Tensor, ...]) -> Tensor:
            return torch.full_like(carry[0][:, 0], float("inf"))

    rows, noise, sweeps = grouped(), drawn(4, 90), []
    for kind in (Sketched, Late):
        projector = kind(0.2, rtol=1e-6)
        info = projector.apply(projector.prepare(rows), noise).info
        assert bool(info.converged.all())
        sweeps.append(info.sweeps)
    assert sweeps[0] <= sweeps[1] <= sweeps[0] + 16
    assert sweeps[1] % 16 == 0


def test_noise_that_needs_no_sweep_is_its_own_direction() -> None:
    """The step of the combinations alone may lengthen the residual, which is then not measured."""
    rows, noise = grouped(), drawn(50, 90)
    start, before = Sketched(0.2).prepare(rows), rows.norms(noise)
    worst = int((rows.norms(start.precondition(noise)) / before).argmax())
    few = noise[[worst, 0, 1]]
    projector = Sketched(0.2, atol=1.000001 * float(before[worst]))
    projection = projector.apply(projector.prepare(rows), few)
    assert projection.info.sweeps_per_sample[0] == 0
    torch.testing.assert_close(projection.directions[0], few[0], atol=0, rtol=0)
    torch.testing.assert_close(rows.norms(projection.directions), projection.info.residual * rows.norms(few))
    torch.testing.assert_close(projector.apply_transposed(start, few, 0), few, atol=0, rtol=0)


@pytest.mark.parametrize("share", [0.2, 0.4, 1.0])
def test_first_step_is_that_of_the_combinations_and_symmetric(share: float) -> None:
    rows = grouped()
    state, units = Sketched(share).prepare(rows), torch.eye(90, dtype=torch.float64)
    combined = state.part.block().dense()
    lengths = combined.norm(dim=1, keepdim=True)
    unit = torch.where(lengths > 0, combined / lengths, 0.0)
    expected = state.part.factor.shift * torch.linalg.inv(unit.T @ unit + state.part.factor.shift * units)
    torch.testing.assert_close(Sketched(share)._start(state, units)[0], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_steps_are_polynomials_that_make_the_map_symmetric(steps: int) -> None:
    """An iterate lies in the span of M⁻¹ (H M⁻¹)ʲ ε, whose maps are symmetric; its part in the null space stays."""
    rows, noise = grouped(), drawn(3, 90)
    projector = Sketched(0.2)
    state = projector.prepare(rows)
    found = projector.apply_transposed(state, noise, steps)
    for one, direction in zip(noise, found, strict=True):
        span = [state.precondition(one[None])]
        for _ in range(steps):
            following = state.precondition(state.normal(span[-1])[1])
            span.append(following / following.norm())
        basis = torch.linalg.qr(torch.cat(span).T)[0]
        torch.testing.assert_close(basis @ (basis.T @ direction), direction, atol=1e-8, rtol=0)
    kernel = kernel_projector(rows.dense())
    torch.testing.assert_close(found @ kernel, noise @ kernel, atol=1e-10, rtol=0)


def test_rounding_of_long_directions_stays_out_of_the_null_space() -> None:
    """Rows with a few directions in common; a start from the noise would leave a hundred times as much there."""
    common = 30.0 * drawn(400, 8, seed=2) @ drawn(8, 600, seed=3)
    matrix = (common + drawn(400, 600, seed=4)).float()
    rows, noise, kernel = nb.DenseRows(matrix), drawn(8, 600).float(), kernel_projector(matrix.double())
    rows.rows_per_example = OUTPUTS
    projector = Sketched(0.2)
    directions = projector.apply(projector.prepare(rows), noise).directions
    expected = noise.double() @ kernel
    assert (directions.double() @ kernel - expected).norm() < 3e-4 * expected.norm()


def test_recurred_products_are_renewed() -> None:
    rows, noise = grouped(), drawn(4, 90)
    projector = Sketched(0.2)
    state = projector.prepare(rows)
    v, search, changes, gradient, energy = projector._start(state, noise)
    drifted = (v, search, 1.01 * changes, 0.99 * gradient, energy)
    renewed, kept = (projector._step(state)(drifted, k) for k in (20, 21))
    for found, expected in zip(renewed[2:4], state.normal(renewed[0]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert (kept[2] - state.normal(kept[0])[0]).norm() > 1e-3


def test_an_iterate_that_is_all_rounding_stays() -> None:
    rows, noise = grouped(), drawn(4, 90)
    projector = Sketched(1.0)
    state = projector.prepare(rows)
    assert torch.equal(*(projector.apply_transposed(state, noise, steps) for steps in (60, 90)))


@pytest.mark.parametrize("most", [1, 5, 10])
def test_the_last_sweep_is_measured_whatever_the_guess(most: int) -> None:
    rows, noise = grouped(), drawn(4, 90)
    projector = Sketched(0.2, rtol=1e-10, max_sweeps=most)
    state = projector.prepare(rows)
    with pytest.warns(ConvergenceWarning):
        projection = projector.apply(state, noise)
    assert projection.info.sweeps_per_sample.tolist() == [most] * 4
    torch.testing.assert_close(projection.directions, projector.apply_transposed(state, noise, most))
    torch.testing.assert_close(projection.info.residual, rows.norms(projection.directions) / rows.norms(noise))


def test_progress_never_returns_to_a_residual_that_is_out_of_date() -> None:
    rows, noise, told = grouped(), drawn(6, 90), []
    noise[0] = noise[0] @ kernel_projector(rows.dense()) + 1e-3 * rows.dense()[0]  # is finished before the others
    projector = Sketched(0.2, rtol=1e-6)
    projector.apply(projector.prepare(rows), noise, callback=lambda k, residual: told.append((k, residual)))
    sweeps, residuals = zip(*told, strict=True)
    assert sweeps == tuple(range(1, len(sweeps) + 1))  # after every step, by a guess or a measurement
    worst = [float(residual.max()) for residual in residuals]
    assert all(later <= 1.5 * before for before, later in pairwise(worst))
    assert worst[-1] <= 1e-6


def test_a_sweep_reads_all_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, noise, read = grouped(), drawn(4, 90), []
    projector = Sketched(0.2)
    state = projector.prepare(rows)
    carry, step = projector._start(state, noise), projector._step(state)
    block = nb.DenseRows.block
    monkeypatch.setattr(nb.DenseRows, "block", lambda self, a, b: read.append(b - a) or block(self, a, b))
    for k in range(1, 20):
        carry = step(carry, k)
    assert sum(read) == 19 * rows.n_rows


class Memory:
    """Keeps every state, and begins with one of them."""

    def __init__(self, first: Mapping[str, Tensor] | None = None) -> None:
        self.first, self.states = first, list[dict[str, Tensor]]()

    def load(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return state if self.first is None else {name: tensor.clone() for name, tensor in self.first.items()}

    def save(self, state: Mapping[str, Tensor], *, interrupted: bool = False) -> None:
        self.states.append({name: tensor.clone() for name, tensor in state.items()})


def test_resuming_from_every_stored_state_gives_the_same_result() -> None:
    rows, noise, whole = grouped(), drawn(4, 90), Memory()
    projector = Sketched(0.2, rtol=1e-6)
    state = projector.prepare(rows)
    expected = projector.apply(state, noise, store=whole)
    assert len(whole.states) > 20  # beyond a renewal
    for stored in whole.states:
        found = projector.apply(state, noise, store=Memory(stored))
        assert torch.equal(found.directions, expected.directions)
        assert torch.equal(found.info.residual, expected.info.residual)


@pytest.mark.parametrize("shape", [(60, 40), (120, 40)])
def test_rows_may_be_more_than_columns_or_equal_to_one_another(shape: tuple[int, int]) -> None:
    matrix = drawn(*shape, seed=2)
    matrix[10:] = matrix[:10].repeat(shape[0] // 10 - 1, 1)
    matrix[20:30] = drawn(10, shape[1], seed=3) * 1e-2
    rows, noise = nb.DenseRows(matrix), drawn(4, shape[1])
    rows.rows_per_example = OUTPUTS
    projector = Sketched(0.2, rtol=1e-9)
    directions = projector.apply(projector.prepare(rows), noise).directions
    torch.testing.assert_close(directions, noise @ kernel_projector(matrix), atol=1e-6, rtol=0)
