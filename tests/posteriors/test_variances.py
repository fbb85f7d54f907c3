"""Scores and variances of new inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.projectors import Alternating, Krylov, Sketched
from nullbayes.testing import kernel_projector
from support.drawing import randn, seeded
from support.models import BINARY, CLASSIFICATION, MLP, Task
from support.posterior_fits import EXACT, ITERATIVE, X_NEW, each_kind, each_task, fit_mlp, probabilities, rows_of
from support.slow_answers import jacobian

# the networks are not trained, so their losses leave much open: test_collapse.py has that warning
pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


def confidence(task: Task, f: Tensor, p: Tensor) -> dict[str, Tensor]:  # (n, O), (n, O)
    """The scores of the mean prediction, written out; those of several labels are sums over them."""
    own = probabilities(task, f)  # of the mean outputs
    if task is CLASSIFICATION:
        return {
            "energy": -f.exp().sum(1).log(),
            "max_logit": -f.max(1).values,
            "max_probability": 1 - p.max(1).values,
            "generalized_entropy": (own * (1 - own)).pow(0.1).sum(1),
        }
    energy, largest = (
        (((f / 2).exp() + (-f / 2).exp()).log(), f.abs() / 2) if task is BINARY else ((1 + f.exp()).log(), f.relu())
    )
    return {
        "energy": -energy.sum(1),
        "max_logit": -largest.sum(1),
        "max_probability": torch.where(p > 0.5, 1 - p, p).sum(1),
        "generalized_entropy": 2 * (own * (1 - own)).pow(0.1).sum(1),
    }


@each_task
@each_kind
def test_scores_match_their_definitions(kind: type, task: Task) -> None:
    posterior = fit_mlp(kind, task)
    samples = posterior.predict(X_NEW).samples
    variance = (samples - samples.mean(0)).square().sum(0) / 4
    torch.testing.assert_close(posterior.ood_score(X_NEW, "max_variance"), variance.max(1).values)
    torch.testing.assert_close(posterior.ood_score(X_NEW, "sum_variance"), variance.sum(1))
    probs = probabilities(task, samples)
    if probs is None:
        assert torch.equal(posterior.ood_score(X_NEW), posterior.ood_score(X_NEW, "max_variance"))
        return  # test_bad_input.py: the others are refused
    spread = (probs - probs.mean(0)).square().sum(0) / 4
    torch.testing.assert_close(posterior.ood_score(X_NEW, "max_prob_variance"), spread.max(1).values)

    def entropy(p: Tensor) -> Tensor:
        sides = [p] if task is CLASSIFICATION else [p, 1 - p]
        return -sum((side * side.log()).sum(-1) for side in sides)

    torch.testing.assert_close(posterior.ood_score(X_NEW, "entropy"), entropy(posterior.predict(X_NEW).probs))
    information = entropy(probs.mean(0)) - entropy(probs).mean(0)
    torch.testing.assert_close(posterior.ood_score(X_NEW, "mutual_information"), information)
    prediction = posterior.predict(X_NEW)
    network = nb.baselines.MAP(MLP.build(task.outputs), task.likelihood).fit([task.data()], progress=False)
    for each, p in ((posterior, prediction.probs), (network, probabilities(task, prediction.mean))):
        for name, wanted in confidence(task, prediction.mean, p).items():
            torch.testing.assert_close(each.ood_score(X_NEW, name), wanted)
    assert torch.equal(posterior.ood_score(X_NEW), posterior.ood_score(X_NEW, "entropy"))
    sampled = posterior.predict(X_NEW, pred_type="sampled").variance.max(1).values
    torch.testing.assert_close(posterior.ood_score(X_NEW, "max_variance", pred_type="sampled"), sampled)


@each_task
@each_kind
def test_the_exact_variance_has_no_monte_carlo_error(kind: type, task: Task) -> None:
    rows = jacobian(MLP.build(task.outputs), X_NEW)  # (n, O, P)
    projector = kernel_projector(rows_of(kind, task))
    for method in (EXACT, ITERATIVE):
        posterior = fit_mlp(kind, task, projector=method)
        wanted = torch.einsum("nop,pq,noq->no", rows, projector, rows) / posterior.prior_precision
        torch.testing.assert_close(posterior.functional_variance(X_NEW, exact=True), wanted, rtol=1e-6, atol=1e-9)


@each_kind
def test_sampled_variances_agree_with_exact_ones(kind: type) -> None:
    posterior = fit_mlp(kind, n_samples=2000)
    ratio = posterior.functional_variance(X_NEW) / posterior.functional_variance(X_NEW, exact=True)
    assert (ratio - 1).abs().max() < 5 * math.sqrt(2 / 1999)  # the relative error of a variance of normal samples


def test_exact_variance_on_training_data_is_zero() -> None:
    posterior, (x, _) = fit_mlp(nb.ProjectedPosterior), CLASSIFICATION.data()
    assert posterior.functional_variance(x, exact=True).max() < 1e-20


@pytest.mark.parametrize("projector", [EXACT, ITERATIVE], ids=["dual", "krylov"])
def test_exact_variance_of_inputs_orthogonal_to_the_data_causes_no_warning(projector: Any) -> None:
    axes = torch.linalg.qr(randn(8, 8, generator=seeded(), dtype=torch.float64)).Q
    model = torch.nn.Linear(8, 2, bias=False).double()
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0)
    posterior.fit([(axes[:3], torch.tensor([0, 1, 0]))], 4, projector=projector, progress=False)
    variance = posterior.functional_variance(axes[3:], exact=True)
    torch.testing.assert_close(variance, torch.ones(5, 2, dtype=torch.float64))


@pytest.mark.parametrize("rtol", [1e-2, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_exact_variances_of_many_sweeps_are_those_of_the_samples(rtol: float) -> None:
    """Small blocks in single precision take hundreds of steps, whose lengths suit the noise of one sample alone."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
    x, new = randn(40, 4, generator=seeded()), randn(8, 4, generator=seeded(1))
    posterior, labels = nb.ProjectedPosterior(model, prior_precision=1.0), model(x).argmax(1)
    projector = Krylov(Alternating(block_rows=30), rtol=rtol, max_sweeps=2000)
    posterior.fit(x, labels, 500, projector=projector, generator=seeded(), progress=False)
    ratio = posterior.functional_variance(new, exact=True) / posterior.functional_variance(new)
    assert 0.6 < ratio.min() < ratio.max() < 1.7
    assert abs(float(ratio.log().mean())) < 0.15


LOOSE = {
    "one block": Krylov(rtol=0.01),
    "krylov": Krylov(Alternating(block_rows=150), rtol=0.03),
    "alternating": Alternating(block_rows=150, rtol=0.1),
    "coarse": Alternating(block_rows=150, rtol=0.1, coarse=50),
    "sketched": Sketched(rtol=0.01),
}


@pytest.mark.parametrize("projector", LOOSE.values(), ids=LOOSE)
def test_exact_variances_match_the_map_that_the_samples_went_through(projector: Any) -> None:
    """The rows of inputs meet a loose tolerance long before noise does; what counts is the map that samples went by."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4)).double()
    x = randn(150, 20, generator=seeded(), dtype=torch.float64)
    posterior = nb.ProjectedPosterior(model)
    posterior.fit([(x, torch.arange(150) % 4)], 300, projector=projector, generator=seeded(), progress=False)
    for inputs in (x[:5], x[:5].flip(1)):
        ratio = posterior.functional_variance(inputs) / posterior.functional_variance(inputs, exact=True)
        assert abs(float(ratio.log().mean())) < 0.15
        assert 0.5 < ratio.min() < ratio.max() < 2.0


@pytest.mark.filterwarnings("ignore::nullbayes.errors.ConvergenceWarning")
def test_exact_variances_of_an_interrupted_fit_are_those_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(sweeps: int, residual: Tensor) -> None:
        if sweeps == 2:
            raise KeyboardInterrupt

    posterior, wanted = (nb.ProjectedPosterior(MLP.build(), prior_precision=1.0) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr("nullbayes.posteriors.progress.Progress.sweeps", lambda *_: stop)
        posterior.fit([CLASSIFICATION.data()], 4, projector=Alternating(4, 1e-9), generator=seeded(), progress=False)
    wanted.fit(
        [CLASSIFICATION.data()], 4, projector=Alternating(4, 1e-9, max_sweeps=2), generator=seeded(), progress=False
    )
    torch.testing.assert_close(posterior.directions, wanted.directions)
    exact = [p.functional_variance(X_NEW, exact=True) for p in (posterior, wanted)]
    torch.testing.assert_close(*exact)


@pytest.mark.parametrize("projector", [ITERATIVE, Alternating(4, 1e-2)], ids=["krylov", "alternating"])
def test_exact_variances_use_the_prepared_projector(projector: Any) -> None:
    """The sweeps of another one, here of a direct method, say nothing of its own."""
    model, data = MLP.build(), [CLASSIFICATION.data()]
    wanted, posterior = (
        nb.ProjectedPosterior(model, prior_precision=1.0).fit(data, 4, projector=p, generator=seeded(), progress=False)
        for p in (projector, EXACT)
    )
    posterior.prepare(data, projector=projector)
    exact = [p.functional_variance(X_NEW, exact=True) for p in (posterior, wanted)]
    torch.testing.assert_close(*exact)


def test_exact_variances_of_a_fit_that_did_not_converge_stop_where_it_stopped() -> None:
    with pytest.warns(nb.errors.ConvergenceWarning):
        posterior = fit_mlp(nb.ProjectedPosterior, projector=Alternating(4, 1e-9, max_sweeps=2))
    posterior.prepare([CLASSIFICATION.data()], projector=Alternating(4, 1e-9, max_sweeps=7))
    posterior.functional_variance(X_NEW, exact=True)  # silently: seven sweeps would not have been enough either
    assert [count for count, _ in posterior._exact.shares] == [2]


@pytest.mark.parametrize("projector", [ITERATIVE, Alternating(4, 1e-2)], ids=["krylov", "alternating"])
def test_exact_variances_do_not_project_the_samples_again(projector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = fit_mlp(nb.ProjectedPosterior, projector=projector)
    monkeypatch.setattr(type(projector), "apply", lambda *_, **__: pytest.fail("samples were projected again"))
    posterior.functional_variance(X_NEW, exact=True)


def test_exact_variances_do_not_depend_on_how_many_rows_fit_in_memory() -> None:
    posterior = fit_mlp(nb.ProjectedPosterior, n_samples=2)
    whole = posterior.functional_variance(X_NEW, exact=True)
    posterior._prepared.jacobian.working_bytes, posterior._exact = 1, None
    torch.testing.assert_close(posterior.functional_variance(X_NEW, exact=True), whole)
    assert posterior._exact.at_once == 2
