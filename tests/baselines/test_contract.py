"""What every method promises, the projected posteriors among them: one line changes the method, nothing else does."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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
    answer,
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


# --- one way to use them ----------------------------------------------------------------------------------------------


def arguments(function: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function by name, with those that a typed dictionary of options names."""
    found = dict(inspect.signature(function).parameters)
    if found.pop("options", None) is not None:
        hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
        found |= dict.fromkeys(typing.get_args(hints["options"])[0].__annotations__)
    return found


@each_method
def test_methods_take_the_same_arguments(method: Method) -> None:
    made = arguments(method.kind)
    assert list(made)[:2] == ["model", "likelihood"]
    assert {"parameters", "prior_precision", "batch_fn"} <= set(made)
    fitted = arguments(method.kind.fit)
    assert list(fitted)[:4] == ["self", "loader", "targets", "n_samples"]
    assert fitted["n_samples"].default == 30
    assert {"generator", "memory_limit", "progress"} <= set(fitted)
    assert {"pred_type", "n_samples", "mask"} <= set(inspect.signature(method.kind.predict).parameters)
    assert {"x", "kind", "per", "mask"} <= set(inspect.signature(method.kind.ood_score).parameters)
    assert {"loader", "method"} <= set(inspect.signature(method.kind.optimize_prior_precision).parameters)
    for name in ("fit", "predict", "ood_score", "save", "check_fit", "optimize_prior_precision", "report"):
        assert inspect.getdoc(getattr(method.kind, name)), name


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


# --- seeds and devices ------------------------------------------------------------------------------------------------


@each_method
def test_the_seed_determines_the_samples(method: Method) -> None:
    one, same, other = (method.fit(seed=seed) for seed in (3, 3, 4))
    assert torch.equal(answer(method, one), answer(method, same))
    if method.samples and not method.still:
        assert (answer(method, one) - answer(method, other)).abs().max() > 1e-6


@each_method
def test_a_fit_with_a_generator_leaves_the_global_one_alone(method: Method) -> None:
    before = torch.get_rng_state()
    answer(method, method.fit())
    assert torch.equal(torch.get_rng_state(), before)


@each_method
def test_predictions_are_on_the_device_of_the_model(method: Method) -> None:
    answered = answer(method, method.fit())
    assert (answered.device, answered.dtype) == (X_NEW.device, torch.float64)


@each_baseline
def test_no_tensor_is_created_on_the_default_device(method: Method, tmp_path: Path) -> None:
    """Under the default device "meta", a tensor that is made without saying where has no numbers."""
    home, model = torch.get_default_device(), MLP.build()
    data, held_out = [CLASSIFICATION.data()], [CLASSIFICATION.data(seed=3)]
    wanted = answer(method, method.fit(model=model, loader=data))
    torch.set_default_device("meta")
    try:
        posterior = method.fit(model=model, loader=data)
        assert torch.equal(answer(method, posterior), wanted)
        if method.prior:
            assert posterior.optimize_prior_precision(held_out, "marglik" if method.exact else "grid") > 0
        if method.exact:
            assert posterior.functional_variance(X_NEW, exact=True).device == wanted.device
        if method.prior:
            posterior.prior_precision = 1.0
        posterior.save(tmp_path / "posterior")
        assert torch.equal(answer(method, nb.load(tmp_path / "posterior", model)), wanted)
    finally:
        torch.set_default_device(None if home.type == "cpu" else home)


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


@each_method
def test_the_model_is_left_as_it_was(method: Method) -> None:
    model = MLP.build().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    answer(method, method.fit(model=model))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@each_method
def test_the_batch_size_does_not_matter(method: Method) -> None:
    x, y = CLASSIFICATION.data(n=9)
    loaders = [[(x, y)], batches(x, y, (2, 7)), DataLoader(TensorDataset(x, y), batch_size=4)]
    one, *others = (answer(method, method.fit(loader=loader)) for loader in loaders)
    for other in others:
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-8)


# --- the prior precision ----------------------------------------------------------------------------------------------


@each_baseline
def test_a_precision_can_be_changed_without_a_new_fit(method: Method) -> None:
    posterior, advice = method.fit(), "1, the default: optimize_prior_precision(held_out) chooses one"
    assert posterior.prior_precision == 1.0
    assert (advice in str(posterior.report)) == method.prior
    if not method.prior:
        with pytest.raises(SettingsError, match="has no prior"):
            posterior.prior_precision = 2.0
        with pytest.raises(SettingsError, match="has no prior"):
            posterior.optimize_prior_precision([CLASSIFICATION.data()])
        return
    first = posterior.predict(X_NEW)
    posterior.prior_precision = 100.0
    assert bool((posterior.predict(X_NEW).variance < first.variance).all())
    assert posterior.report.prior_precision == 100.0
    assert "the default" not in str(posterior.report)
    posterior.prior_precision = 1.0
    torch.testing.assert_close(posterior.predict(X_NEW).samples, first.samples, rtol=1e-10, atol=1e-12)
    given = method.make(prior_precision=100.0)
    assert given.prior_precision == 100.0
    given.fit([CLASSIFICATION.data()], 4, generator=torch.Generator().manual_seed(0), progress=False)
    posterior.prior_precision = 100.0
    torch.testing.assert_close(posterior.predict(X_NEW).samples, given.predict(X_NEW).samples, rtol=1e-10, atol=1e-12)
    for bad in (0.0, -1.0, float("nan"), "optimal"):
        with pytest.raises(SettingsError, match="positive number"):
            posterior.prior_precision = bad
        with pytest.raises(SettingsError, match="positive number"):
            method.make(prior_precision=bad)
    held_out = [CLASSIFICATION.data(n=9, seed=3)]
    for how in ("grid", "marglik") if method.exact else ("grid",):
        assert posterior.optimize_prior_precision(held_out, how) == posterior.prior_precision


@each_baseline
def test_the_precision_is_one_over_a_variance(method: Method) -> None:
    """Where the prior outweighs the data, four times the precision halves the deviations."""
    if not method.prior:
        return
    posterior = method.fit()
    posterior.prior_precision = 1e8
    first = posterior.predict(X_NEW).variance
    posterior.prior_precision = 4e8
    torch.testing.assert_close(4.0 * posterior.predict(X_NEW).variance, first, rtol=1e-3, atol=0)


@each_baseline
def test_only_a_method_with_a_curvature_has_evidence_and_exact_variances(method: Method) -> None:
    posterior = method.fit()
    if method.exact or not method.prior:
        return
    with pytest.raises(SettingsError, match="has no exact functional variance: use exact=False"):
        posterior.functional_variance(X_NEW, exact=True)
    with pytest.raises(SettingsError, match='has no marginal likelihood: use method="grid"'):
        posterior.optimize_prior_precision([CLASSIFICATION.data()], "marglik")


def another(value: Any) -> Any:
    """Another value that a setting may have; None where that cannot be told from the default."""
    return {int: lambda: value + 1, float: lambda: value / 2}.get(type(value), lambda: None)()


@each_baseline
def test_settings_reach_the_method_and_a_file(method: Method, tmp_path: Path) -> None:
    default, taken = method.kind._method, arguments(method.kind)
    fields, common = [field.name for field in dataclasses.fields(default)], set(arguments(baselines.Baseline))
    assert set(taken) - common <= set(fields), "an argument that is no field of the method, and not in its files"
    changed = {name: another(getattr(default, name)) for name in fields if name in taken}
    changed = {name: value for name, value in changed.items() if value is not None}
    model = MLP.build()
    posterior = method.make(model=model, **changed)
    assert {name: getattr(posterior._method, name) for name in changed} == changed
    assert method.kind._method is default
    data, generator = [CLASSIFICATION.data()], torch.Generator().manual_seed(0)
    posterior.fit(data, 4, generator=generator, progress=False, **method.extra(model)).save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", model)
    assert {name: getattr(loaded._method, name) for name in changed} == changed
    if method.prior:
        loaded.prior_precision = posterior.prior_precision = 2.0  # samples are drawn again, from what the file holds
    torch.testing.assert_close(answer(method, loaded), answer(method, posterior), rtol=1e-10, atol=1e-12)


def test_a_custom_method_without_evidence_says_how_to_choose_the_precision() -> None:
    class WithPrior(type(baselines.MAP._method)):
        has_prior = True

    class Own(baselines.MAP):
        _method = WithPrior()

    posterior = Own(MLP.build(), prior_precision=3.0).fit([CLASSIFICATION.data()], 1, progress=False)
    with pytest.raises(SettingsError, match='Own has no marginal likelihood: use method="grid" or "nll"'):
        posterior.optimize_prior_precision([CLASSIFICATION.data()], "marglik")
    assert posterior.prior_precision == 3.0


@each_baseline
def test_inference_mode_changes_nothing(method: Method) -> None:
    plain = method.fit().ood_score(X_NEW)
    with torch.inference_mode():
        posterior = method.fit()
        torch.testing.assert_close(posterior.ood_score(X_NEW), plain)
