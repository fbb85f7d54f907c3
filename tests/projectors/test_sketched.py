"""Conjugate gradients with a sketch as preconditioner reach the dense answer, whatever part of the rows it combines."""

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
