"""The prior precision scales the posterior, at no cost."""

from __future__ import annotations

import math

import pytest
import torch

import nullbayes as nb
from support.models import CLASSIFICATION, MLP, Task
from support.posterior_fits import EXACT, X_NEW, each_kind, each_task, fit_mlp, rows_of
from support.slow_answers import flat_parameters

# the networks are not trained, so their losses leave much open: test_collapse.py has that warning
pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


@each_task
@each_kind
def test_the_optimal_precision_is_rank_over_squared_norm(kind: type, task: Task) -> None:
    posterior, rows = fit_mlp(kind, task), rows_of(kind, task)
    rank = int(torch.linalg.matrix_rank(rows))
    optimal = rank / float(flat_parameters(MLP.build(task.outputs)).square().sum())
    assert posterior.prior_precision == pytest.approx(optimal)
    posterior.prior_precision = "paper"
    assert posterior.prior_precision == pytest.approx(1 / optimal)
    posterior.prior_precision = 3
    assert posterior.prior_precision == 3.0
    posterior.prior_precision = "optimal"
    assert posterior.prior_precision == pytest.approx(optimal)
    assert posterior.optimize_prior_precision(method="closed_form") == pytest.approx(optimal)


@pytest.mark.parametrize("value", [7.5, "optimal", "paper"])
def test_a_precision_can_be_given_at_the_start(value: float | str) -> None:
    posterior = nb.ProjectedPosterior(MLP.build(), prior_precision=value)
    posterior.fit([CLASSIFICATION.data()], 4, projector=EXACT, progress=False)
    later = fit_mlp(nb.ProjectedPosterior)
    later.prior_precision = value
    assert posterior.prior_precision == later.prior_precision
    posterior.extend(2, progress=False)
    assert posterior.prior_precision == later.prior_precision


@each_kind
def test_variance_is_inverse_to_the_precision(kind: type) -> None:
    posterior = fit_mlp(kind)
    posterior.prior_precision = 1.0
    one, exact, directions = (
        posterior.predict(X_NEW),
        posterior.functional_variance(X_NEW, exact=True),
        posterior.directions,
    )
    train_std = posterior.report.train_std
    for alpha in (1e-3, 4.0, 1e6):
        posterior.prior_precision = alpha
        prediction = posterior.predict(X_NEW)
        torch.testing.assert_close(prediction.variance, one.variance / alpha, rtol=1e-7, atol=0)
        torch.testing.assert_close(posterior.functional_variance(X_NEW, exact=True), exact / alpha, rtol=1e-14, atol=0)
        assert posterior.report.train_std == pytest.approx(train_std / math.sqrt(alpha))
        assert posterior.directions is directions
