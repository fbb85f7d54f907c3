"""What every method promises, the projected posteriors among them: one line changes the method, nothing else does."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes import baselines, detectors
from nullbayes.errors import LikelihoodError, NotFittedError, SettingsError
from support.drawing import randint, randn
from support.method_table import (
    BASELINES,
    DETECTORS,
    PROJECTED,
    X_NEW,
    Method,
    each_baseline,
    each_method,
    each_sampler,
)
from support.models import BINARY, CLASSIFICATION, CUSTOM, MLP, MULTILABEL, REGRESSION, TASKS, Task, batches

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # the networks are not trained


def test_the_table_has_every_method() -> None:
    named = {value for value in vars(baselines).values() if inspect.isclass(value)}
    assert {method.kind for method in BASELINES} == {
        kind for kind in named if issubclass(kind, baselines.Baseline) and kind is not baselines.Baseline
    }
    assert all(f"``{method.name}``" in baselines.__doc__ for method in BASELINES)


def test_the_table_has_every_detector() -> None:
    assert {method.kind for method in DETECTORS} == {kind for kind in vars(detectors).values() if inspect.isclass(kind)}
    assert all(f"``{method.name}``" in detectors.__doc__ for method in DETECTORS)


@pytest.mark.parametrize("method", BASELINES, ids=lambda method: method.name)
def test_a_baseline_is_one_class_around_one_value(method: Method) -> None:
    ours = [kind for kind in method.kind.__mro__ if kind.__module__.startswith("nullbayes.baselines")]
    assert ours == [method.kind, baselines.Baseline]
    value = method.kind._method
    assert isinstance(value, baselines.Method)
    assert len([kind for kind in type(value).__mro__ if kind.__module__.startswith("nullbayes")]) <= 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.memory_budget = 3


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@each_sampler
def test_predictions_have_one_shape(method: Method, task: Task) -> None:
    if task not in method.tasks or (task is CUSTOM and not method.custom):
        return
    posterior = method.fit(task)
    assert posterior.n_samples == (1 if method.still else 4)
    for pred_type in method.pred_types:
        prediction = posterior.predict(X_NEW, pred_type=pred_type)
        assert prediction.mean.shape == prediction.variance.shape == (4, task.outputs)
        assert prediction.samples.shape == (posterior.n_samples, 4, task.outputs)
        assert bool((prediction.variance >= 0).all())
        torch.testing.assert_close(prediction.samples.mean(0), prediction.mean)
        assert (prediction.probs is not None) == posterior.likelihood.has_probabilities
        if prediction.probs is not None:
            assert 0 <= float(prediction.probs.min()) <= float(prediction.probs.max()) <= 1
    called = posterior(X_NEW)
    torch.testing.assert_close(called.samples, posterior.predict(X_NEW).samples, rtol=0, atol=0)


@pytest.mark.parametrize("task", [CLASSIFICATION, BINARY, MULTILABEL], ids=lambda task: task.name)
@each_method
def test_every_score_is_one_number_per_input(method: Method, task: Task) -> None:
    if task not in method.tasks:
        return
    posterior = method.fit(task)
    for kind in method.scores:
        score = posterior.ood_score(X_NEW, kind)
        assert score.shape == (4,)
        assert bool(torch.isfinite(score).all())
        assert float(score.std()) > 0, kind
    assert torch.equal(posterior.ood_score(X_NEW), posterior.ood_score(X_NEW, method.scores[0]))
    torch.testing.assert_close(posterior.ood_score([X_NEW[:3], X_NEW[3:]]), posterior.ood_score(X_NEW))
    with pytest.raises(SettingsError, match=r"kind must be one of .*, not 'surprise'"):
        posterior.ood_score(X_NEW, "surprise")


@each_baseline
def test_scores_do_not_depend_on_how_many_rows_are_formed_at_a_time(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    posterior = method.fit()

    def answers() -> list[Tensor]:
        exact = [posterior.functional_variance(X_NEW, exact=True)] if method.exact else []
        return [*(posterior.ood_score(X_NEW, kind) for kind in method.scores), *exact]

    at_once = answers()
    monkeypatch.setattr("nullbayes.baselines.method._ROW_BYTES", {"cpu": 1, "cuda": 1})
    for few, all_of_them in zip(answers(), at_once, strict=True):
        torch.testing.assert_close(few, all_of_them)


@each_sampler
def test_a_regression_has_no_probabilities_to_score(method: Method) -> None:
    if REGRESSION not in method.tasks:
        return
    posterior = method.fit(REGRESSION)
    with pytest.raises(LikelihoodError, match=r"regression likelihood (has not|does not have)"):
        posterior.ood_score(X_NEW, "entropy")


@each_sampler
def test_samples_are_named_parameters_around_the_network(method: Method) -> None:
    posterior = method.fit()
    named = posterior.sample(1)
    trained = {name: parameter.detach() for name, parameter in MLP.build().named_parameters()}
    assert all(value.shape == (1, *trained[name].shape) for name, value in named.items())
    moved = max(float((value - trained[name]).abs().max()) for name, value in named.items())
    assert (moved > 0) != method.still
    with posterior.sampled_parameters(0) as model:
        inside = model(X_NEW)
    if not method.still:
        torch.testing.assert_close(inside, posterior.predict(X_NEW, pred_type="sampled").samples[0])


@each_sampler
def test_a_check_compares_with_the_network(method: Method) -> None:
    posterior, (x, y) = method.fit(), CLASSIFICATION.data(n=9, seed=3)
    found = posterior.check_fit(batches(x, y, (4, 5)))
    own = posterior.likelihood.probabilities(MLP.build()(x))
    assert found.n_data == 9
    assert found.nll_model == pytest.approx(nb.metrics.nll(own, y))
    assert found.accuracy_model == pytest.approx(nb.metrics.accuracy(own, y))
    pred_type = method.pred_types[0]
    assert found.nll_posterior == pytest.approx(nb.metrics.nll(posterior.predict(x, pred_type=pred_type).probs, y))
    assert found.std >= 0
    assert "accuracy" in str(found)


@each_method
def test_the_report_counts_and_measures(method: Method) -> None:
    report = method.fit().report
    assert report.n_data == 5
    assert report.seconds["data"] >= 0
    assert report.peak_memory is None or report.peak_memory >= 0
    json.dumps(report.to_dict())
    assert "parameters" in str(report)
    if method not in PROJECTED:
        assert report.method == method.name
        assert (report.prior_precision is not None) == method.prior


@each_baseline
def test_a_report_before_a_fit_is_refused(method: Method) -> None:
    with pytest.raises(NotFittedError, match=r"call fit\(loader\) first"):
        _ = method.make().report


class Tagger(nn.Module):
    """Three classes for each of four positions, in a dictionary with something else."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # (n, 4, 2) -> (n, 4, 3)
        hidden = self.body(x).tanh()
        return {"hidden": hidden, "tags": self.head(hidden)}


@pytest.mark.filterwarnings("ignore::nullbayes.errors.CollapseWarning")  # a small network
@pytest.mark.filterwarnings("ignore:.*are training data")
@each_method
def test_outputs_may_have_positions_and_be_taken_from_what_the_model_returns(method: Method, tmp_path: Path) -> None:
    if not method.positions:
        return
    generator = torch.Generator().manual_seed(0)
    x, y = randn(6, 4, 2, generator=generator, dtype=torch.float64), randint(3, (6, 4), generator=generator)
    y[0, :2] = -100  # which do not count
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tagger().double()
    posterior = method.kind(model, output_fn=lambda returned: returned["tags"], prior_precision=1.0)
    posterior.fit([(x, y)], 3, progress=False, **method.extra(model))
    for kind in method.scores:
        assert posterior.ood_score(x, kind, mask="all").shape == (6,)
    if not method.samples:
        return
    prediction = posterior.predict(x)
    assert prediction.mean.shape == prediction.variance.shape == prediction.probs.shape == (6, 4, 3)
    torch.testing.assert_close(prediction.probs.sum(-1), torch.ones(6, 4, dtype=torch.float64))
    assert posterior.check_fit([(x, y)]).accuracy_model is not None
    posterior.save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", model, output_fn=lambda returned: returned["tags"])
    assert torch.equal(loaded.predict(x).samples, prediction.samples)
    if method.prior and method not in PROJECTED:
        assert posterior.optimize_prior_precision([(x, y)], "grid") > 0
    if method.exact and method not in PROJECTED:
        assert posterior.functional_variance(x, exact=True).shape == (6, 4, 3)
