"""The default precision keeps the promise: a posterior predicts as well as its network, and a wrong rule would not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import CollapseWarning, UnderfitWarning
from nullbayes.likelihoods import Classification, Regression
from nullbayes.posteriors import fitting
from nullbayes.posteriors import promise as rule
from nullbayes.posteriors.promise import NATS, ScaledPredictions, least_precision
from support.drawing import randn, seeded
from support.models import CLASSIFICATION, CUSTOM, MULTILABEL, REGRESSION, Task
from support.posterior_fits import each_kind, each_task
from support.trained import N, draw, trained


def fit(kind: type, task: Task, n_samples: int = 30, precision: Any = "auto", **settings: Any) -> Any:
    posterior = kind(trained(task), task.likelihood, prior_precision=precision)
    return posterior.fit([draw(task)], n_samples, generator=seeded(), progress=False, **settings)


def worse(posterior: Any, task: Task, n: int = N, seed: int = 0) -> float:
    """How much the negative log-likelihood rises."""
    check = posterior.check_fit([draw(task, n, seed)])
    return check.nll_posterior - check.nll_model


# --- the promise ------------------------------------------------------------------------------------------------------


@each_task
@each_kind
def test_a_default_fit_predicts_its_training_data_as_the_network_does(kind: type, task: Task) -> None:
    posterior = fit(kind, task)
    check = posterior.check_fit([draw(task)])
    assert check.nll_posterior <= check.nll_model + NATS + 1e-9
    assert check.accuracy_posterior == check.accuracy_model
    assert worse(posterior, task, 500, seed=7) < 0.005  # nor does it harm on data like them
    assert posterior.predict(10 * draw(task, 20, seed=7)[0]).variance.mean() > 1e-6  # and it has not given up


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
@each_kind
def test_the_closed_form_breaks_the_promise_that_the_default_keeps(kind: type) -> None:
    """Or the tests above would show nothing."""
    closed, auto = fit(kind, MULTILABEL, precision="optimal"), fit(kind, MULTILABEL)
    assert worse(closed, MULTILABEL, 500, seed=7) > 0.01
    assert auto.prior_precision > 2 * closed.prior_precision
    assert torch.equal(auto.directions, closed.directions)


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
@each_kind
def test_a_rule_that_ignores_the_training_data_would_be_noticed(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rule, fitting):
        monkeypatch.setattr(module, "least_precision", lambda found: (0.0, "nothing"))
    assert worse(fit(kind, MULTILABEL), MULTILABEL, 500, seed=7) > 0.01


def test_a_precision_chosen_on_training_rows_alone_would_break_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A projected posterior does not move there, whatever the precision is."""
    monkeypatch.setattr(fitting, "least_precision", lambda found: (0.0, "nothing"))
    posterior = fit(nb.ProjectedPosterior, MULTILABEL)
    assert worse(posterior, MULTILABEL) < NATS
    assert worse(posterior, MULTILABEL, 500, seed=7) > 0.01


# --- the search -------------------------------------------------------------------------------------------------------


def made_up(task: str, scale: float = 1.0) -> ScaledPredictions:
    generator = seeded(3)
    outputs, changes = (randn(*shape, generator=generator, dtype=torch.float64) for shape in ((50, 3), (20, 50, 3)))
    changes = scale * (changes - changes.mean(0))
    if task == "regression":
        return ScaledPredictions(Regression(0.4), outputs, changes, outputs + 0.4 * changes[0] / scale)
    return ScaledPredictions(Classification(), 4 * outputs, changes, outputs.argmax(1))


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_least_precision_is_the_smallest_that_keeps_the_promise(task: str, scale: float) -> None:
    found = made_up(task, scale)
    alpha, by = least_precision(found)
    assert by == "nll"
    assert found.rise(alpha) <= NATS < found.rise(0.97 * alpha)
    assert all(found.rise(alpha * 2.0**j) <= NATS for j in range(30))


def test_one_moving_output_of_nine_determines_the_precision() -> None:
    generator = seeded()
    outputs, changes = randn(200, 9, generator=generator).double(), randn(30, 200, 9, generator=generator).double()
    changes[:, :, 1:] *= 1e-3  # one of nine moves
    changes -= changes.mean(0)
    found = ScaledPredictions(Regression(0.4), outputs, changes, outputs)
    alpha, _ = least_precision(found)
    alone = ScaledPredictions(Regression(0.4), outputs[:, :1], changes[:, :, :1], outputs[:, :1])
    assert alpha == pytest.approx(least_precision(alone)[0], rel=0.01)
    assert found.nll(alpha) - found.nll(math.inf) < NATS / 8


def test_samples_that_do_not_move_need_no_minimum_precision() -> None:
    assert least_precision(made_up("classification", 0.0)) == (0.0, "nothing")


def test_accuracy_can_determine_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made_up("classification")
    monkeypatch.setattr(found, "nll", lambda alpha: 0.0)
    monkeypatch.setattr(found, "accuracy", lambda alpha: 0.9 if alpha >= 5.0 else 0.8)
    alpha, by = least_precision(found)
    assert by == "accuracy"
    assert 5.0 <= alpha < 5.05


def test_nan_likelihoods_do_not_count_as_keeping_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made_up("classification")
    real = found.nll
    monkeypatch.setattr(found, "nll", lambda alpha: real(alpha) if alpha > 100.0 else math.nan)
    assert least_precision(found)[0] > 100.0


# --- the trial --------------------------------------------------------------------------------------------------------


def rows_of(n: int, width: int = 3) -> Any:
    """As much of rows as a split looks at."""
    return SimpleNamespace(examples=SimpleNamespace(n_all=n), n_outputs=width, rows_per_example=width)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 150, 300, 5000])
def test_examples_that_a_trial_holds_out_have_no_rows_in_it(n: int) -> None:
    rows = rows_of(n)
    folds = rule.split(rows, 5)
    for inside, apart in folds:
        assert not set(inside) & set(apart)
        assert {*inside, *apart} <= set(range(n))
        assert list(inside) == sorted(inside)
        assert 1 <= len(apart) <= 1000
    assert folds == rule.split(rows, 5)
    assert n < 10 or folds[0][1] != rule.split(rows, 6)[0][1]
    inside, apart = folds[0]
    if n <= 200:  # few: every one is kept apart once
        assert sorted(i for _, apart in folds for i in apart) == list(range(n))
        assert all(len(inside) + len(apart) == n for inside, apart in folds)
        assert len(folds) == min(n, 5)
    else:
        assert len(folds) == 1
        assert len(inside) == min(1000, max(n // 5, 1600 // 3), n - len(apart))
        assert len(apart) == max(n // 10, 100)


def test_a_trial_uses_fewer_examples_where_there_are_many_outputs() -> None:
    (inside, apart), *_ = rule.split(rows_of(400, 2000), 0)
    assert len(inside) == 2  # 5,000 rows
    assert len(apart) == 100
    [(inside, apart)] = rule.split(rows_of(40, 10**6), 0)
    assert len(inside) == len(apart) == 1


def test_the_trial_overestimates_the_variance_of_the_fit() -> None:
    """Its rows are a part of those of the fit, so that its variances are no smaller."""
    posterior = fit(nb.ProjectedPosterior, CLASSIFICATION)
    report = posterior.report
    now = float(posterior.predict(draw(CLASSIFICATION)[0]).variance.mean().sqrt())
    assert now <= report.promise.apart_std / math.sqrt(report.prior_precision)
    assert report.promise.n_apart == report.n_data == N  # few: every example is kept apart once
    assert report.promise.n_trial == 0.8 * N


@pytest.mark.parametrize("n", [1, 2, 3])
@each_kind
def test_a_handful_of_examples_is_enough(kind: type, n: int) -> None:
    model, (x, y) = trained(CLASSIFICATION), draw(CLASSIFICATION)
    posterior = kind(model).fit([(x[:n], y[:n])], 5, generator=seeded(), progress=False)
    check = posterior.check_fit([(x[:n], y[:n])])
    assert check.nll_posterior <= check.nll_model + NATS


def test_a_base_distribution_keeps_its_own_scale_where_the_promise_allows() -> None:
    def base(scale: float) -> Tensor:
        return scale * randn(8, 4 * 256 + 256 + 256 * 3 + 3, generator=seeded(4), dtype=torch.float64)

    small, large = (fit(nb.ProjectedPosterior, CLASSIFICATION, 8, base=base(scale)) for scale in (1e-4, 10.0))
    assert small.prior_precision == 1.0
    assert large.prior_precision > 10.0
    assert worse(large, CLASSIFICATION, 500, seed=7) < 0.005


# --- life with it -----------------------------------------------------------------------------------------------------


@each_kind
def test_extending_gives_the_precision_of_a_larger_fit(kind: type) -> None:
    whole, parts = fit(kind, CLASSIFICATION, 12), fit(kind, CLASSIFICATION, 5).extend(7, progress=False)
    assert parts.prior_precision == pytest.approx(whole.prior_precision, rel=1e-6)
    assert parts.report.promise.needed_inside == pytest.approx(whole.report.promise.needed_inside, rel=1e-6)


@each_kind
def test_the_report_names_the_deciding_criterion_and_agrees_with_check_fit(kind: type) -> None:
    posterior = fit(kind, CLASSIFICATION)
    report, check = posterior.report, posterior.check_fit([draw(CLASSIFICATION)])
    assert report.precision_rule == "auto"
    assert report.promise.decided_by == "nll"
    assert "auto: raised to keep the NLL within 0.003 nats" in str(report)
    assert report.promise.nll_network == pytest.approx(check.nll_model)  # 60 examples: all are looked at
    assert report.promise.nll_posterior == pytest.approx(check.nll_posterior)
    assert report.promise.accuracy_posterior == check.accuracy_posterior
    assert json.loads(json.dumps(report.to_dict()))["promise"]["n_apart"] == 60
    posterior.prior_precision = 2 * report.promise.needed
    assert posterior.report.promise is None
    posterior.prior_precision = "auto"
    assert posterior.report == report


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
def test_a_closed_form_that_keeps_the_promise_stays() -> None:
    x, y = draw(CLASSIFICATION)
    calm = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        calm[2].weight.mul_(0.02)  # a small squared norm makes a large precision
    auto = nb.ProjectedPosterior(calm).fit([(x, y)], 30, generator=seeded(), progress=False)
    closed = nb.ProjectedPosterior(calm, prior_precision="optimal").fit([(x, y)], generator=seeded(), progress=False)
    assert auto.prior_precision == closed.prior_precision
    assert "auto: the closed form" in str(auto.report)


@each_kind
def test_the_automatic_precision_is_saved_and_loaded(kind: type, tmp_path: Path) -> None:
    posterior = fit(kind, CLASSIFICATION, 6)
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", trained(CLASSIFICATION))
    assert loaded.report == posterior.report
    loaded.prior_precision = 1.0
    loaded.prior_precision = "auto"
    assert loaded.prior_precision == posterior.prior_precision
    loaded.prepare([draw(CLASSIFICATION)]).extend(4, progress=False)
    assert loaded.prior_precision == pytest.approx(posterior.extend(4, progress=False).prior_precision, rel=1e-6)


def test_a_precision_that_was_given_needs_no_trial() -> None:
    for precision in ("optimal", "paper", 1e4):
        report = fit(nb.ProjectedPosterior, CLASSIFICATION, 4, precision).report
        assert report.promise is None
        assert "trial" not in report.seconds
    assert "trial" in fit(nb.ProjectedPosterior, CLASSIFICATION, 4).report.seconds


def test_a_variance_made_negligible_by_the_promise_causes_a_warning() -> None:
    x, y = draw(REGRESSION)
    model = trained(REGRESSION)
    exact = model(x).detach() + 1e-9 * y  # a network that interpolates: noise next to nothing
    posterior = nb.LossProjectedPosterior(model, Regression(1e-7))
    with pytest.warns(CollapseWarning, match="next to nothing"):
        posterior.fit([(x, exact)], 10, generator=seeded(), progress=False)


def test_a_broken_promise_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rule, fitting):
        monkeypatch.setattr(module, "least_precision", lambda found: (1e-6, "nll"))
    monkeypatch.setattr(nb.posteriors.measured, "closed_form", lambda *_: 1e-6)
    with pytest.warns(UnderfitWarning, match="does not keep its promise"):
        fit(nb.LossProjectedPosterior, CLASSIFICATION, 10)


@each_kind
def test_the_promise_of_a_custom_loss_is_in_its_own_units(kind: type) -> None:
    posterior = fit(kind, CUSTOM)
    assert worse(posterior, CUSTOM) <= NATS + 1e-9
    assert posterior.report.promise.accuracy_network is None


def test_examples_with_only_ignored_targets_do_not_affect_the_precision(tmp_path: Path) -> None:
    x, y = draw(CLASSIFICATION)
    ignored = torch.where(torch.arange(N) < 3, y, -100)
    posterior = nb.ProjectedPosterior(trained(CLASSIFICATION)).fit(
        [(x, ignored)], 5, generator=seeded(), progress=False
    )
    assert math.isfinite(posterior.report.promise.apart_std)
    posterior.save(tmp_path / "file")


def test_nothing_is_promised_where_the_likelihood_is_not_a_number() -> None:
    kept = rule.Promise(10, 10, 1.0, 1.0, "nll", 1.0, 0.5, 0.5)
    assert kept.kept
    assert not rule.Promise(10, 10, 1.0, 1.0, "nll", 1.0, 0.5, math.nan).kept
