"""The prior precision is the maximum of what it is said to maximize."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import LikelihoodError, NullBayesWarning, SettingsError
from nullbayes.posteriors import best_precision
from nullbayes.posteriors.measured import closed_form
from support.models import CLASSIFICATION, MLP, REGRESSION, Task
from support.slow_answers import flat_parameters, gauss_newton

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

each_kind = pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
each_task = pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION], ids=lambda task: task.name)


def fit(kind: type, task: Task, *, n: int = 5, sureness: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(0)
    model = MLP.build(task.outputs)
    with torch.no_grad():
        model[2].weight.mul_(sureness)
    posterior = kind(model, task.likelihood, prior_precision="optimal")
    return posterior.fit([task.data(n=n)], 10, projector=nb.projectors.ExactDual(), generator=generator, progress=False)


# --- closed form ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "kernel", "squared"), [(10, 4.0, 3.0), (100, 99.5, 0.01), (7, 0.0, 500.0)])
def test_the_closed_form_maximizes_the_projected_evidence(p: int, kernel: float, squared: float) -> None:
    def evidence(alpha: float) -> float:
        return -alpha / 2 * squared + (p - kernel) / 2 * math.log(alpha)

    best = closed_form(p, kernel, squared)
    assert all(evidence(best) > evidence(best * factor) for factor in (0.5, 0.99, 1.01, 2.0))


def test_without_an_optimum_the_error_asks_for_a_number() -> None:
    with pytest.raises(SettingsError, match="all parameters are zero: pass prior_precision=<a number>"):
        closed_form(5, 2.0, 0.0)


def test_rows_that_are_zero_are_said_to_hold_nothing() -> None:
    """A number for the precision would give samples that nothing holds."""
    with pytest.raises(
        SettingsError, match=r"rank zero, so that the training data hold nothing.*use ProjectedPosterior"
    ):
        closed_form(5, 5.0, 1.0)


# --- the search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [1e-4, 0.7, 3e4])
@pytest.mark.parametrize("start", [1e-3, 1.0, 40.0])
def test_the_search_finds_a_maximum(best: float, start: float) -> None:
    found = best_precision.maximize(lambda alpha: -((math.log(alpha) - math.log(best)) ** 2), start, "hill")
    assert math.log(found) == pytest.approx(math.log(best), abs=1e-3)


def test_the_search_skips_values_that_are_not_finite() -> None:
    def hill(alpha: float) -> float:
        return math.nan if alpha < 0.1 else -((math.log(alpha)) ** 2) if alpha < 100 else -math.inf

    assert best_precision.maximize(hill, 1.0, "hill") == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(SettingsError, match="The hill is not finite for any prior precision between"):
        best_precision.maximize(lambda alpha: math.nan, 1.0, "hill")


@pytest.mark.parametrize(("sign", "edge"), [(1.0, 1e8), (-1.0, 1e-8)])
def test_a_maximum_at_the_edge_of_the_search_causes_a_warning(sign: float, edge: float) -> None:
    with pytest.warns(NullBayesWarning, match="still rising at the edge of the search.*data do not determine it"):
        found = best_precision.maximize(lambda alpha: sign * math.log(alpha), 1.0, "slope")
    assert found == pytest.approx(edge)


# --- held-out likelihood ----------------------------------------------------------------------------------------------


@each_task
@each_kind
def test_tuning_by_nll_finds_the_lowest_held_out_nll(kind: type, task: Task) -> None:
    """Sure of itself where it does not know: some variance lowers the NLL, too much raises it."""
    posterior, held_out = fit(kind, task, sureness=8.0), [task.data(n=12, seed=21)]

    def nll(alpha: float) -> float:
        posterior.prior_precision = alpha
        return posterior.check_fit(held_out).nll_posterior

    grid = torch.logspace(-4, 6, 200, dtype=torch.float64).tolist()
    values = [nll(alpha) for alpha in grid]
    lowest = min(range(200), key=values.__getitem__)
    assert 0 < lowest < 199  # inside, or the case would show nothing
    posterior.prior_precision = "optimal"
    best = posterior.optimize_prior_precision(held_out, "nll")
    assert posterior.prior_precision == best
    assert nll(best) <= values[lowest] + 1e-9
    assert grid[lowest - 1] < best < grid[lowest + 1]


def test_tuning_by_nll_warns_where_the_nll_does_not_change() -> None:
    flat = nb.ProjectedPosterior(MLP.build(), prior_precision="optimal")
    flat.fit([CLASSIFICATION.data()], 4, base=torch.zeros(4, 51), projector=nb.projectors.ExactDual(), progress=False)
    with pytest.warns(NullBayesWarning, match="edge of the search"):
        flat.optimize_prior_precision([CLASSIFICATION.data(n=12, seed=21)], "nll")


# --- marginal likelihood ----------------------------------------------------------------------------------------------


def log_evidence(alpha: float, matrix: Tensor, squared: float) -> float:
    """The Laplace evidence up to what does not depend on alpha, by determinants."""
    p = len(matrix)
    eye = torch.eye(p, dtype=torch.float64)
    return float(-alpha / 2 * squared + p / 2 * math.log(alpha) - 0.5 * torch.logdet(matrix + alpha * eye))


@each_task
@each_kind
@pytest.mark.parametrize("n", [5, 40], ids=["few rows", "many rows"])
def test_tuning_by_marginal_likelihood_finds_its_maximum(kind: type, task: Task, n: int) -> None:
    posterior = fit(kind, task, n=5)
    model, data = MLP.build(task.outputs), task.data(n=n)
    matrix, squared = gauss_newton(model, *data, task), float(flat_parameters(model).square().sum())
    best = posterior.optimize_prior_precision([data], "marglik")
    assert posterior.prior_precision == best
    top = log_evidence(best, matrix, squared)
    grid = torch.logspace(-6, 6, 500, dtype=torch.float64).tolist()
    assert top >= max(log_evidence(alpha, matrix, squared) for alpha in grid) - 1e-6
    # MacKay's fixed point: alpha = gamma / |theta|^2, with gamma the number of well-determined parameters
    eigenvalues = torch.linalg.eigvalsh(matrix).clamp_min(0)
    gamma = float((eigenvalues / (eigenvalues + best)).sum())
    assert best == pytest.approx(gamma / squared, rel=2e-3)


@pytest.mark.parametrize("n", [5, 40], ids=["few rows", "many rows"])
def test_the_spectrum_is_that_of_the_gauss_newton_matrix(n: int) -> None:
    model, data = MLP.build(), CLASSIFICATION.data(n=n)
    rows = nb.OutputJacobian(model, [data], hessian=True)
    values, weights = best_precision.spectrum(rows, torch.Generator())
    wanted = torch.linalg.eigvalsh(gauss_newton(model, *data, CLASSIFICATION)).clamp_min(0).cpu()
    found = torch.repeat_interleave(values, weights.long())
    torch.testing.assert_close(found.sort().values, wanted, rtol=1e-8, atol=1e-10)


def test_the_quadrature_agrees_with_the_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = MLP.build(), CLASSIFICATION.data(n=40)
    rows, squared = nb.OutputJacobian(model, [data], hessian=True), float(flat_parameters(model).square().sum())
    dense = best_precision.spectrum(rows, torch.Generator())
    monkeypatch.setattr(best_precision, "_DENSE_SPECTRUM", 0)
    nodes, weights = best_precision.spectrum(rows, torch.Generator().manual_seed(0))
    assert float(weights.sum()) == pytest.approx(51)
    for alpha in (1e-2, 1.0, 1e2):
        terms = torch.log1p(dense[0] / alpha)
        # a probe z estimates tr f by z'f z, with variance 2 |f|² for normal z; there are eight probes
        error = math.sqrt(2 * float(terms.square().sum()) / 8)
        got, wanted = (best_precision.evidence(alpha, *pair, squared) for pair in ((nodes, weights), dense))
        assert abs(got - wanted) < 3 * 0.5 * error
        assert got != wanted


def test_tuning_by_quadrature_comes_close(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, data = fit(nb.ProjectedPosterior, CLASSIFICATION), [CLASSIFICATION.data(n=40)]
    dense = posterior.optimize_prior_precision(data, "marglik")
    monkeypatch.setattr(best_precision, "_DENSE_SPECTRUM", 0)
    estimated = posterior.optimize_prior_precision(data, "marglik")
    assert estimated == pytest.approx(dense, rel=0.3)
    assert estimated != dense


@pytest.mark.parametrize("method", ["nll", "marglik"])
@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.baselines.DiagonalLaplace])
def test_the_best_precision_does_not_depend_on_the_current_one(kind: type, method: str) -> None:
    """A search around the precision at hand would stop at an edge of its own making."""
    model, generator = MLP.build(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        model[2].weight.mul_(8.0)  # sure of itself: some variance lowers the NLL, too much raises it
    posterior = kind(model).fit([CLASSIFICATION.data()], 10, generator=generator, progress=False)
    x, found = MLP.inputs(25, torch.Generator().manual_seed(7)), []
    data = [(x, (model(x).argmax(1) + (torch.arange(25) % 4 == 0)) % 3)]  # it is wrong about every fourth
    for alpha in (1.0, 1e15, 1e-15):
        posterior.prior_precision = alpha
        found.append(posterior.optimize_prior_precision(data, method))
    assert found[0] == found[1] == found[2]


def test_a_custom_loss_has_no_marginal_likelihood() -> None:
    posterior = nb.LossProjectedPosterior(MLP.build(), lambda f, y: f.square().sum(1))
    data = [CLASSIFICATION.data()]
    posterior.fit(data, 4, projector=nb.projectors.ExactDual(), progress=False)
    with pytest.raises(LikelihoodError, match="needs a built-in likelihood"):
        posterior.optimize_prior_precision(data, "marglik")


def test_tuning_is_silent_where_there_is_an_optimum() -> None:
    posterior = fit(nb.ProjectedPosterior, CLASSIFICATION, sureness=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.optimize_prior_precision([CLASSIFICATION.data()], "marglik")
        posterior.optimize_prior_precision([CLASSIFICATION.data(n=12, seed=21)], "nll")
