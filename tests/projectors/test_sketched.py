"""Conjugate gradients with a sketch as preconditioner reach the dense answer, whatever part of the rows it combines."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import SettingsError
from nullbayes.projectors import Sketched
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


def drawn(n: int, columns: int) -> Tensor:
    return randn(n, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("share", [0.2, 0.4, 1.0])
def test_every_share_of_the_rows_leads_to_the_dense_answer(share: float) -> None:
    rows, noise = grouped(), drawn(4, 90)
    projector = Sketched(share, rtol=1e-10)
    projection = projector.apply(projector.prepare(rows), noise)
    torch.testing.assert_close(projection.directions, noise @ kernel_projector(rows.dense()), atol=1e-7, rtol=0)


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
        counts.append(projector.prepare(rows).sketch.n_rows // 12)
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
    worst = int((rows.norms(start.first(noise)) / before).argmax())
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
    combined = state.sketch.dense()
    lengths = combined.norm(dim=1, keepdim=True)
    unit = torch.where(lengths > 0, combined / lengths, 0.0)
    expected = state.factor.shift * torch.linalg.inv(unit.T @ unit + state.factor.shift * units)
    torch.testing.assert_close(state.first(units), expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(state.precondition(units), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("steps", [1, 3, 22])
def test_steps_are_a_symmetric_map_and_leave_the_null_space(steps: int) -> None:
    """With the step lengths of one vector, which make a polynomial, for all of them."""
    rows, units = grouped(), torch.eye(90, dtype=torch.float64)
    state = Sketched(0.2).prepare(rows)
    normal = state.rows.dense() * state.scale[:, None]
    both, first = normal.T @ normal, state.first(units)
    polynomial = torch.linalg.matrix_power(units - 0.1 * both @ state.precondition(units), steps)
    fixed = first @ polynomial
    torch.testing.assert_close(fixed, fixed.T, atol=1e-9, rtol=0)
    kernel = kernel_projector(rows.dense())
    taken = Sketched(0.2).apply_transposed(state, units, steps)
    torch.testing.assert_close(taken @ kernel, kernel, atol=1e-9, rtol=0)


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
    matrix = drawn(*shape)
    matrix[10:] = matrix[:10].repeat(shape[0] // 10 - 1, 1)
    matrix[20:30] = drawn(10, shape[1]) * 1e-2
    rows, noise = nb.DenseRows(matrix), drawn(4, shape[1])
    rows.rows_per_example = OUTPUTS
    projector = Sketched(0.2, rtol=1e-9)
    directions = projector.apply(projector.prepare(rows), noise).directions
    torch.testing.assert_close(directions, noise @ kernel_projector(matrix), atol=1e-6, rtol=0)
