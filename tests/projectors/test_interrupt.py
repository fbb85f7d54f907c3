"""Ctrl-C during a projection leaves what the last finished step had, with its true residual."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.projectors import Alternating, Krylov, Outcome, Projection, Projector
from nullbayes.testing import cases
from support.models import CLASSIFICATION, MLP

MATRIX = next(case.matrix for case in cases(torch.get_default_device()) if case.name == "nearly_parallel_blocks")
NOISE = torch.randn(4, 100, dtype=torch.float64)
LONG: dict[str, Callable[..., Projector]] = {
    "Alternating": lambda sweeps: Alternating(block_rows=10, rtol=1e-9, max_sweeps=sweeps),
    "Krylov": lambda sweeps: Krylov(Alternating(block_rows=10), rtol=1e-9, max_sweeps=sweeps),
}
each_method = pytest.mark.parametrize("make", LONG.values(), ids=LONG)


class Interrupting(nb.Rows):
    """A matrix whose blocks raise KeyboardInterrupt at the given uses, counted from 1."""

    def __init__(self, matrix: Tensor) -> None:
        self.held = nb.DenseRows(matrix)
        self.n_rows, self.n_columns = matrix.shape
        self.dtype, self.device = matrix.dtype, matrix.device
        self.used, self.stops = 0, set[int]()

    def block(self, start: int, stop: int) -> object:
        self.used += 1
        if self.used in self.stops:
            raise KeyboardInterrupt
        return self.held.block(start, stop)

    def keep(self) -> nb.Rows:
        return self


def prepared(projector: Projector) -> tuple[Interrupting, object]:
    rows = Interrupting(MATRIX)
    state = projector.prepare(rows)
    rows.frobenius()
    rows.used = 0
    return rows, state


@each_method
@pytest.mark.parametrize("use", [12, 17, 41, 64, 90, 133])  # the first of them in the first step
def test_an_interrupt_keeps_the_last_finished_step(make: Callable[..., Projector], use: int) -> None:
    projector = make(1000)
    rows, state = prepared(projector)
    rows.stops = {use}
    with pytest.warns(ConvergenceWarning, match=r"4 of 4 .*residual .* sweeps\): stopped by the user.*fit again"):
        projection = projector.apply(state, NOISE)
    assert projection.info.outcome is Outcome.INTERRUPTED
    assert not projection.info.converged.any()
    sweeps = projection.info.sweeps
    assert sweeps < use / 4
    assert rows.used == use + 1  # no more than to measure
    directions = NOISE
    if sweeps:
        short = make(sweeps)
        with pytest.warns(ConvergenceWarning, match="sweeps ran out"):
            directions = short.apply(short.prepare(nb.DenseRows(MATRIX)), NOISE).directions
    torch.testing.assert_close(projection.directions, directions, rtol=0, atol=1e-12)
    residual = (projection.directions @ MATRIX.T).norm(dim=1) / (NOISE @ MATRIX.T).norm(dim=1)
    torch.testing.assert_close(projection.info.residual, residual)


def test_an_interrupt_between_steps_keeps_the_last_measurement() -> None:
    def callback(sweeps: int, _: Tensor) -> None:
        if sweeps == 3:
            raise KeyboardInterrupt

    noise = torch.cat([torch.zeros_like(NOISE[:1]), NOISE])  # the first sample is done before it begins
    projector = LONG["Alternating"](1000)
    state = projector.prepare(nb.DenseRows(MATRIX))
    with pytest.warns(ConvergenceWarning, match="4 of 5 samples did not reach"):
        projection = projector.apply(state, noise, callback=callback)
    assert projection.info.sweeps == 3
    assert projection.info.converged.tolist() == [True, False, False, False, False]
    residual = (projection.directions[1:] @ MATRIX.T).norm(dim=1) / (NOISE @ MATRIX.T).norm(dim=1)
    torch.testing.assert_close(projection.info.residual[1:], residual)


@each_method
def test_a_second_interrupt_is_raised(make: Callable[..., Projector]) -> None:
    projector = make(1000)
    rows, state = prepared(projector)
    rows.stops = {17, 18}
    with pytest.raises(KeyboardInterrupt):
        projector.apply(state, NOISE)


def fitted(make: Callable[..., Projector], stop_at: int) -> nb.ProjectedPosterior:
    """A posterior whose projector is slow, interrupted in its first sweeps."""
    model, data = MLP.build(), [CLASSIFICATION.data(n=6)]
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0)
    projector = Stopping(make(1000), stop_at)
    with pytest.warns(ConvergenceWarning, match="stopped by the user"):
        return posterior.fit(data, 4, projector=projector, progress=False)


@dataclass
class Stopping(Projector):
    """Another projector, interrupted once, when it calls back after so many sweeps."""

    inner: Projector
    sweeps: int
    rtol: float = 1e-9
    atol: float = 0.0

    def _prepare(self, rows: nb.Rows) -> object:
        return self.inner.prepare(rows)

    def _apply(self, state: object, noise: Tensor, *_: object) -> Projection:
        def stop(sweeps: int, residual: Tensor) -> None:
            if sweeps >= self.sweeps:
                raise KeyboardInterrupt

        return self.inner.apply(state, noise, callback=stop)


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
def test_interrupted_fit_is_a_posterior() -> None:
    posterior = fitted(LONG["Alternating"], 2)
    report = posterior.report
    assert (report.converged, report.sweeps, report.n_samples) == (False, 2, 4)
    assert posterior.predict(CLASSIFICATION.data(n=6)[0]).samples.shape == (4, 6, 3)


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
def test_interrupted_extension_keeps_the_earlier_samples() -> None:
    model, data = MLP.build(), [CLASSIFICATION.data(n=6)]
    projector = Stopping(Krylov(Alternating(block_rows=6), rtol=1e-3), sweeps=10**6)
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(data, 3, projector=projector, progress=False)
    earlier, projector.sweeps = posterior.directions, 1
    with pytest.warns(ConvergenceWarning, match="2 of 2 samples did not reach .*stopped by the user"):
        posterior.extend(2, progress=False)
    torch.testing.assert_close(posterior.directions[:3], earlier, rtol=0, atol=0)
    report = posterior.report
    assert (report.converged, report.n_samples, len(report.residual)) == (False, 5, 5)
    assert max(report.residual[:3]) <= 1e-3 < min(report.residual[3:])


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
def test_an_interrupted_exact_variance_raises() -> None:
    posterior = fitted(LONG["Alternating"], 2)
    with pytest.warns(ConvergenceWarning, match="stopped by the user"), pytest.raises(KeyboardInterrupt):
        posterior.functional_variance(CLASSIFICATION.data(n=6)[0], exact=True)


def test_ctrl_c_stops_a_fit_that_goes_on() -> None:
    code = """
    import signal, torch, warnings
    import nullbayes as nb
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where a job in the background ignores it
    rows = nb.DenseRows(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1e-7, 0.0]], dtype=torch.float64), block_rows=1)
    projector = nb.projectors.Alternating(rtol=1e-12, max_sweeps=10**9)
    state = projector.prepare(rows)

    def callback(sweeps, residual):
        if sweeps == 5:
            print("ready", flush=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        projection = projector.apply(state, torch.ones(2, 3, dtype=torch.float64), callback=callback)
    print(projection.info.outcome.name, projection.info.sweeps >= 5, bool(projection.directions.isfinite().all()))
    print(caught[-1].message)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out.startswith("INTERRUPTED True True\n")
    assert "stopped by the user" in out
