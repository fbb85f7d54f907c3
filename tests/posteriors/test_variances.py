"""Scores and variances of new inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from drawing import randn
from models import CLASSIFICATION, MLP, Task, jacobian
from nullbayes.testing import kernel_projector
from posteriors.fitting import EXACT, ITERATIVE, X_NEW, each_kind, each_task, fit, probabilities, rows_of, seeded

# the networks are not trained, so their losses leave much open: test_collapse.py has that warning
pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


@each_task
@each_kind
def test_scores_are_what_they_are_called(kind: type, task: Task) -> None:
    posterior = fit(kind, task)
    samples = posterior.predict(X_NEW).samples
    variance = (samples - samples.mean(0)).square().sum(0) / 4
    torch.testing.assert_close(posterior.ood_score(X_NEW), variance.max(1).values)
    torch.testing.assert_close(posterior.ood_score(X_NEW, "sum_variance"), variance.sum(1))
    probs = probabilities(task, samples)
    if probs is None:
        return  # test_bad_input.py: the others are refused
    spread = (probs - probs.mean(0)).square().sum(0) / 4
    torch.testing.assert_close(posterior.ood_score(X_NEW, "max_prob_variance"), spread.max(1).values)

    def entropy(p: Tensor) -> Tensor:
        sides = [p] if task is CLASSIFICATION else [p, 1 - p]
        return -sum((side * side.log()).sum(-1) for side in sides)

    torch.testing.assert_close(posterior.ood_score(X_NEW, "entropy"), entropy(probs.mean(0)))
    information = entropy(probs.mean(0)) - entropy(probs).mean(0)
    torch.testing.assert_close(posterior.ood_score(X_NEW, "mutual_information"), information)
    sampled = posterior.predict(X_NEW, pred_type="sampled").variance.max(1).values
    torch.testing.assert_close(posterior.ood_score(X_NEW, pred_type="sampled"), sampled)


@each_task
@each_kind
def test_the_exact_variance_has_no_monte_carlo_error(kind: type, task: Task) -> None:
    rows = jacobian(MLP.build(task.outputs), X_NEW)  # (n, O, P)
    projector = kernel_projector(rows_of(kind, task))
    for method in (EXACT, ITERATIVE):
        posterior = fit(kind, task, projector=method)
        wanted = torch.einsum("nop,pq,noq->no", rows, projector, rows) / posterior.prior_precision
        torch.testing.assert_close(posterior.functional_variance(X_NEW, exact=True), wanted, rtol=1e-6, atol=1e-9)


@each_kind
def test_sampled_variances_agree_with_exact_ones(kind: type) -> None:
    posterior = fit(kind, n_samples=2000)
    ratio = posterior.functional_variance(X_NEW) / posterior.functional_variance(X_NEW, exact=True)
    assert (ratio - 1).abs().max() < 5 * math.sqrt(2 / 1999)  # the relative error of a variance of normal samples


def test_exact_variance_on_training_data_is_nothing() -> None:
    posterior, (x, _) = fit(nb.ProjectedPosterior), CLASSIFICATION.data()
    assert posterior.functional_variance(x, exact=True).max() < 1e-20


@pytest.mark.parametrize("projector", [EXACT, ITERATIVE], ids=["dual", "krylov"])
def test_exact_variance_of_inputs_that_have_nothing_to_do_with_the_data_is_silent(projector: Any) -> None:
    axes = torch.linalg.qr(randn(8, 8, generator=seeded(), dtype=torch.float64)).Q
    model = torch.nn.Linear(8, 2, bias=False).double()
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0)
    posterior.fit([(axes[:3], torch.tensor([0, 1, 0]))], 4, projector=projector, progress=False)
    variance = posterior.functional_variance(axes[3:], exact=True)
    torch.testing.assert_close(variance, torch.ones(5, 2, dtype=torch.float64))
