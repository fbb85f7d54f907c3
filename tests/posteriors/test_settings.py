"""Settings of a fit: storage of rows, memory limit, parameters that vary, precision of numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.projectors import ExactPrimal
from support.drawing import seeded
from support.models import CLASSIFICATION, CUSTOM, MLP, REGRESSION, TASKS, Task
from support.posterior_fits import EXACT, ITERATIVE, X_NEW, each_kind, fit_mlp
from support.slow_answers import gauss_newton, jacobian

# the networks are not trained, so their losses leave much open: test_collapse.py has that warning
pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


@pytest.mark.parametrize("projector", [EXACT, ITERATIVE, ExactPrimal()], ids=["dual", "krylov", "primal"])
@each_kind
def test_rows_that_are_formed_again_give_the_same_directions(
    kind: type, projector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = fit_mlp(kind, n_samples=4, projector=projector)
    rows = nb.OutputJacobian if kind is nb.ProjectedPosterior else nb.LossJacobian
    monkeypatch.setattr(rows, "keep", None)
    little = rows(MLP.build(), [CLASSIFICATION.data()]).costs().held_bytes
    again = fit_mlp(kind, n_samples=4, projector=projector, memory_limit=little)
    torch.testing.assert_close(again.directions, held.directions)


@pytest.mark.parametrize("limit", [None, 2**30, "1GB", "1.5 GiB", "900m", 1e9])
def test_memory_limits_are_parsed_as_sizes(limit: Any) -> None:
    assert fit_mlp(nb.ProjectedPosterior, memory_limit=limit).n_samples == 5


@each_kind
def test_auto_reports_its_reason(kind: type) -> None:
    posterior = fit_mlp(kind, projector="auto", tolerance=1e-3)
    plan = nb.plan(MLP.build(), [CLASSIFICATION.data()], 5, loss=kind is nb.LossProjectedPosterior, tolerance=1e-3)
    assert posterior.report.reason == plan.reason
    assert posterior.report.projector == type(plan.projector).__name__
    assert posterior.report.tolerance == 1e-3
    assert max(posterior.report.residual) < 3e-3
    assert plan.reason in str(plan)


@each_kind
def test_the_last_layer_alone_may_vary(kind: type) -> None:
    model = MLP.build()
    posterior = kind(model, parameters="2.*", prior_precision="optimal")
    posterior.fit([CLASSIFICATION.data(n=3)], 4, projector=EXACT, progress=False)
    assert posterior.report.n_parameters == 21
    assert list(posterior.sample()) == ["2.weight", "2.bias"]
    change = torch.einsum("nop,sp->sno", jacobian(model, X_NEW, ["2.weight", "2.bias"]), posterior.directions)
    change = (change - change.mean(0)) / posterior.prior_precision**0.5
    torch.testing.assert_close(posterior.predict(X_NEW).samples, model(X_NEW).detach() + change)


@pytest.mark.parametrize("task", [t for t in TASKS if t is not CUSTOM], ids=lambda task: task.name)
def test_scaled_rows_give_the_null_space_of_the_gauss_newton_matrix(task: Task) -> None:
    model, data = MLP.build(task.outputs), task.data()
    posterior = nb.ProjectedPosterior(model, task.likelihood, hessian=True)
    posterior.fit([data], 5, projector=EXACT, progress=False)
    matrix = gauss_newton(model, *data, task)
    assert (matrix @ posterior.directions.T).abs().max() < 1e-9
    assert posterior.report.kernel_dimension == len(matrix) - int(torch.linalg.matrix_rank(matrix, hermitian=True))
    change = torch.einsum("nop,sp->sno", jacobian(model, data[0]), posterior.directions)
    assert posterior.report.train_std == pytest.approx(
        float(change.square().mean().sqrt()) / posterior.prior_precision**0.5, abs=1e-9
    )


def test_a_second_fit_forgets_the_first() -> None:
    (x, y), (x2, y2) = REGRESSION.data(), REGRESSION.data(n=6, seed=9)
    twice, once = (nb.ProjectedPosterior(MLP.build(2), "regression") for _ in range(2))
    twice.fit([(x, y)], 4, progress=False)
    for posterior in (twice, once):
        posterior.fit([(x2, 100 * y2)], 4, projector=EXACT, generator=seeded(), progress=False)
    assert torch.equal(twice.directions, once.directions)
    assert twice.likelihood == once.likelihood
    assert twice.report.n_data == 6
    assert twice.prior_precision == once.prior_precision


@each_kind
def test_single_precision_stays_single_precision(kind: type) -> None:
    x, y = CLASSIFICATION.data()
    posterior = kind(MLP.build().float()).fit([(x.float(), y)], 4, projector=EXACT, progress=False)
    prediction = posterior.predict(X_NEW.float())
    assert {posterior.directions.dtype, prediction.samples.dtype, prediction.probs.dtype} == {torch.float32}
    assert max(posterior.report.residual) < 1e-4
