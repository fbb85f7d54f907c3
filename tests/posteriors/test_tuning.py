"""Held-out data choose the precision and the temperature together, never worse than temperature scaling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nullbayes as nb
from nullbayes.errors import CollapseWarning, FileError, LikelihoodError, NullBayesWarning, SettingsError
from support.drawing import randn, seeded
from support.models import BINARY, CLASSIFICATION, MULTILABEL, REGRESSION, Task
from support.posterior_fits import each_kind, each_task
from support.trained import draw, trained

pytestmark = pytest.mark.filterwarnings("ignore:.*are training data")  # which test no one's quality here

each_class = pytest.mark.parametrize("task", [CLASSIFICATION, BINARY, MULTILABEL], ids=lambda task: task.name)


def fit(kind: type, task: Task, **settings: Any) -> Any:
    posterior = kind(trained(task), task.likelihood)
    return posterior.fit([draw(task)], 20, generator=seeded(), progress=False, **settings)


def scaled_nll(task: Task, temperature: float, n: int = 300, seed: int = 5) -> float:
    """Of temperature scaling, written out."""
    x, y = draw(task, n, seed)
    outputs = trained(task)(x).detach() / temperature
    losses = [task.loss(f, t) for f, t in zip(outputs, y, strict=True)]
    return float(torch.stack(losses).mean()) / (1 if task is CLASSIFICATION else task.outputs)


@each_class
@each_kind
def test_tuned_predictions_are_no_worse_than_temperature_scaling(kind: type, task: Task) -> None:
    held_out = [draw(task, 300, seed=5)]
    posterior = fit(kind, task).tune(held_out)
    best = min(scaled_nll(task, math.exp(t / 50)) for t in range(-150, 151))
    check = posterior.check_fit(held_out)
    assert check.nll_posterior <= best + 2e-5
    assert check.nll_posterior <= scaled_nll(task, 1.0) + 2e-5
    assert check.accuracy_posterior == posterior.check_fit(held_out).accuracy_model
    assert posterior.predict(held_out[0][0]).variance.min() > 0
    probs = posterior.predict(held_out[0][0]).probs  # and that is what is predicted
    y = held_out[0][1]
    right = probs.gather(1, y[:, None]) if task is CLASSIFICATION else (1 - y.view(probs.shape) - probs).abs()
    assert float(-right.log().mean()) == pytest.approx(check.nll_posterior)


@each_kind
def test_fit_takes_held_out_data(kind: type) -> None:
    held_out = [draw(CLASSIFICATION, 300, seed=5)]
    at_once, later = fit(kind, CLASSIFICATION, held_out=held_out), fit(kind, CLASSIFICATION).tune(held_out)
    assert (at_once.prior_precision, at_once.temperature) == (later.prior_precision, later.temperature)
    assert at_once.temperature != 1.0
    assert at_once.report.promise is None
    assert "trial" not in at_once.report.seconds
    assert at_once.report.temperature == at_once.temperature
    assert f"temperature       {at_once.temperature:.3g}" in str(at_once.report)


@each_kind
def test_a_variance_that_helps_is_used(kind: type) -> None:
    """Where the network is sure and wrong far from its data only, no temperature can say so."""
    x, y = draw(CLASSIFICATION, 400, seed=5)
    odd = 4 * x[200:]
    held_out = [(torch.cat([x[:200], odd]), torch.cat([y[:200], y[200:].roll(1)]))]
    posterior = fit(kind, CLASSIFICATION).tune(held_out)
    check = posterior.check_fit(held_out)
    posterior.prior_precision = 1e12
    posterior.tune([held_out[0]])
    again = posterior.check_fit(held_out)
    assert again.nll_posterior == pytest.approx(check.nll_posterior, abs=1e-4)  # wherever the search starts
    posterior.prior_precision = 1e12
    assert check.nll_posterior < posterior.check_fit(held_out).nll_posterior - 0.01


@each_task
@each_kind
def test_the_temperature_may_be_set(kind: type, task: Task) -> None:
    posterior, (x, y) = fit(kind, task), draw(task, 50, seed=6)
    before = posterior.predict(x)
    assert posterior.temperature == 1.0
    if not posterior.likelihood.has_closed_form:
        with pytest.raises(LikelihoodError, match="no temperature"):
            posterior.temperature = 2.0
        return
    posterior.temperature = 2.0
    after = posterior.predict(x)
    torch.testing.assert_close(after.mean, before.mean, rtol=0, atol=0)
    torch.testing.assert_close(after.variance, before.variance, rtol=0, atol=0)
    if task is REGRESSION:
        assert posterior.likelihood.sigma_noise == pytest.approx(0.5 * math.sqrt(2.0))
        return
    each = posterior.predict(x, link_approx="mc").probs
    logits = before.samples / 2.0
    wanted = logits.softmax(-1) if task is CLASSIFICATION else logits.sigmoid()
    torch.testing.assert_close(each, wanted.mean(0))
    posterior.prior_precision = 1e30  # what is left is temperature scaling
    own = trained(task)(x).detach() / 2.0
    torch.testing.assert_close(posterior.predict(x).probs, own.softmax(-1) if task is CLASSIFICATION else own.sigmoid())
    assert posterior.check_fit([(x, y)]).nll_model == pytest.approx(scaled_nll(task, 2.0, 50, 6))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "hot", None])
def test_wrong_temperatures_are_refused(value: Any) -> None:
    posterior = fit(nb.ProjectedPosterior, CLASSIFICATION)
    with pytest.raises(SettingsError, match="temperature must be a positive number"):
        posterior.temperature = value
    assert posterior.temperature == 1.0


@each_task
@each_kind
def test_a_tuned_posterior_comes_back_from_a_file(kind: type, task: Task, tmp_path: Path) -> None:
    posterior, x = fit(kind, task).tune([draw(task, 100, seed=5)]), draw(task, 9, seed=6)[0]
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", trained(task), **task.loading)
    assert (loaded.temperature, loaded.prior_precision) == (posterior.temperature, posterior.prior_precision)
    assert loaded.likelihood == posterior.likelihood
    for name in ("mean", "variance", "probs"):
        a, b = getattr(loaded.predict(x), name), getattr(posterior.predict(x), name)
        assert (a is None and b is None) or torch.equal(a, b)
    loaded.prepare([draw(task)])
    assert loaded.likelihood == posterior.likelihood  # what the data say again does not undo it


def test_a_new_fit_starts_at_temperature_one() -> None:
    posterior = fit(nb.ProjectedPosterior, CLASSIFICATION, held_out=[draw(CLASSIFICATION, 100, seed=5)])
    assert posterior.temperature != 1.0
    posterior.fit([draw(CLASSIFICATION)], 5, progress=False)
    assert posterior.temperature == 1.0


def test_the_noise_of_a_regression_is_tuned_with_the_precision() -> None:
    x, y = draw(REGRESSION, 400, seed=5)
    loud = y + randn(*y.shape, generator=seeded(1), dtype=torch.float64)
    posterior = fit(nb.ProjectedPosterior, REGRESSION, held_out=[(x, loud)])
    assert 0.8 < posterior.likelihood.sigma_noise < 1.3  # it was told 0.5, and the noise is 1
    check = posterior.check_fit([(x, loud)])
    grid = [0.5 + 0.01 * i for i in range(200)]
    residual = trained(REGRESSION)(x).detach() - loud
    best = min(float((residual.square() / (2 * s * s)).mean()) + math.log(s * math.sqrt(2 * math.pi)) for s in grid)
    assert check.nll_posterior <= best + 1e-4


@pytest.mark.parametrize("how", ["tune", "optimize_prior_precision"])
def test_a_new_fit_measures_its_precision_again(how: str) -> None:
    posterior = fit(nb.ProjectedPosterior, CLASSIFICATION)
    wanted = posterior.prior_precision
    getattr(posterior, how)([draw(CLASSIFICATION, 300, seed=5)])
    assert posterior.prior_precision != wanted
    posterior.fit([draw(CLASSIFICATION)], 20, generator=seeded(), progress=False)
    assert (posterior.prior_precision, posterior.temperature) == (wanted, 1.0)


def test_a_precision_that_was_not_measured_is_refused() -> None:
    posterior = fit(nb.ProjectedPosterior, CLASSIFICATION, held_out=[draw(CLASSIFICATION, 100, seed=5)])
    with pytest.raises(SettingsError, match="measured during a fit"):
        posterior.prior_precision = "auto"


def test_tuning_does_not_scale_rounding_up_to_a_variance() -> None:
    """Five columns and sixty examples: nothing is left of the noise but rounding."""
    x, y = draw(CLASSIFICATION)
    model = torch.nn.Linear(4, 3).double()
    posterior = nb.ProjectedPosterior(model, prior_precision=7.0)
    with pytest.warns(CollapseWarning):
        posterior.fit([(x, y)], 5, projector=nb.projectors.ExactPrimal(), progress=False)
    posterior.tune([(x, y)])
    assert posterior.predict(10 * x).variance.max() < 1e-6


def test_loading_with_a_likelihood_by_name_keeps_the_saved_temperature(tmp_path: Path) -> None:
    posterior = fit(nb.ProjectedPosterior, CLASSIFICATION)
    posterior.temperature = 2.0
    posterior.save(tmp_path / "file")
    model = trained(CLASSIFICATION)
    assert nb.load(tmp_path / "file", model, likelihood="classification").temperature == 2.0
    other = nb.likelihoods.Classification(temperature=3.0)
    with pytest.raises(FileError, match=r"has temperature=2.0 in its likelihood, not 3.0: leave likelihood=\.\.\. out"):
        nb.load(tmp_path / "file", model, likelihood=other)


def test_tuning_corrects_a_noise_that_was_far_too_small() -> None:
    x, y = draw(REGRESSION, 400, seed=5)
    posterior = nb.ProjectedPosterior(trained(REGRESSION), nb.likelihoods.Regression(1e-4), prior_precision=1e4)
    posterior.fit([draw(REGRESSION)], 10, generator=seeded(), progress=False).tune([(x, y)])
    rms = float((trained(REGRESSION)(x).detach() - y).square().mean().sqrt())
    assert 0.5 * rms < posterior.likelihood.sigma_noise < 1.1 * rms


@pytest.mark.parametrize("kind", [nb.baselines.LinearizedLaplace, nb.baselines.LocalEnsemble, nb.baselines.MAP])
def test_baselines_say_what_to_use_instead(kind: type) -> None:
    rival = kind(trained(CLASSIFICATION)).fit([draw(CLASSIFICATION)], progress=False)
    with pytest.raises(SettingsError, match="temperature may be set"):
        rival.tune([draw(CLASSIFICATION)])


def test_held_out_data_that_do_not_determine_a_temperature_are_warned_of() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 3))
        x = torch.randn(300, 4)
    labels = model(x).argmax(1)  # all of them right
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:30], labels[:30], 5, progress=False)
    with pytest.warns(NullBayesWarning, match=r"do not determine a temperature.*all of them predicted right"):
        posterior.tune(x[30:], labels[30:])


@pytest.mark.parametrize("wrong", ["labels", "scale"])
def test_a_temperature_at_the_upper_edge_is_warned_of(wrong: str) -> None:
    """Labels that do not belong to the inputs, or logits that are a hundred times too large."""
    model, y = nn.Linear(3, 3).double(), torch.arange(300) % 3
    nn.init.eye_(model.weight).data.mul_(1.0 if wrong == "labels" else 300.0)
    x = torch.eye(3, dtype=torch.float64)[y] + 0.5 * randn(300, 3, generator=seeded(3), dtype=torch.float64)
    held = (x[100:], y[100:].roll(1) if wrong == "labels" else y[100:])
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:1], y[:1], 5, progress=False)
    with pytest.warns(NullBayesWarning, match=r"The temperature is very high.*numbered in the same way"):
        posterior.tune(*held)
    assert posterior.temperature > 9.9
