"""Predictions of every network: samples of the outputs, and the mean, variance and probabilities computed from them."""

from __future__ import annotations

import math

import pytest
import torch

import nullbayes as nb
from nullbayes import predictive
from nullbayes.errors import DataError, LikelihoodError, NullBayesWarning, SettingsError
from nullbayes.jacobian.network import Network
from nullbayes.likelihoods import Bernoulli, Classification, Regression, resolve
from support.drawing import randn
from support.models import CLASSIFICATION, MLP, MODELS, REGRESSION, Model, call
from support.slow_answers import flat_parameters, jacobian, with_parameters

each_model = pytest.mark.parametrize("case", MODELS.values(), ids=lambda case: case.name)


def deviations(model: torch.nn.Module, n: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return 0.3 * randn(n, len(flat_parameters(model)), generator=generator, dtype=torch.float64)


@each_model
def test_linearized_predictions_match_slow_derivatives(case: Model) -> None:
    model, (x, _) = case.build(), CLASSIFICATION.data(case)
    steps = deviations(model)
    mean, changes = predictive.sample_outputs(Network(model), x, steps, "linearized")
    wanted = torch.einsum("nop,sp->sno", jacobian(model, x), steps)
    torch.testing.assert_close(mean, call(model, x).detach())
    torch.testing.assert_close(changes, wanted - wanted.mean(0))


@each_model
def test_sampled_predictions_match_the_network_at_each_sample(case: Model) -> None:
    model, (x, _) = case.build(), CLASSIFICATION.data(case)
    steps, theta = deviations(model), flat_parameters(model)
    mean, changes = predictive.sample_outputs(Network(model), x, steps, "sampled")
    wanted = torch.stack([call(with_parameters(model, theta + step), x).detach() for step in steps])
    torch.testing.assert_close(mean + changes, wanted)
    torch.testing.assert_close(mean, wanted.mean(0))


@each_model
@pytest.mark.parametrize("pred_type", predictive.PRED_TYPES)
def test_the_result_does_not_depend_on_the_chunk_size(
    case: Model, pred_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, _) = case.build(), CLASSIFICATION.data(case)
    network, steps = Network(model), deviations(model)
    whole = predictive.predict(network, Classification(), x, steps, pred_type=pred_type)
    monkeypatch.setattr(predictive.outputs, "_EXAMPLES_TIMES_SAMPLES", {"cpu": 8, "cuda": 8})  # two examples at a time
    assert len(list(predictive.stream(x, network, None, 4))) == 3
    pieces = predictive.predict(network, Classification(), x, steps, pred_type=pred_type)
    torch.testing.assert_close(pieces.samples, whole.samples)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_predictions_carry_no_graph_whatever_the_mode(mode: type) -> None:
    model, (x, _) = MLP.build(), CLASSIFICATION.data()
    for pred_type in predictive.PRED_TYPES:
        wanted = predictive.predict(Network(model), Classification(), x, deviations(model), pred_type=pred_type)
        with mode():
            got = predictive.predict(Network(model), Classification(), x, deviations(model), pred_type=pred_type)
        assert not got.samples.requires_grad
        torch.testing.assert_close(got.samples.clone(), wanted.samples)


def test_an_empty_loader_is_refused() -> None:
    model = MLP.build()
    for nothing in ([], [MLP.inputs(0, torch.Generator())]):
        with pytest.raises(DataError, match="nothing to predict"):
            predictive.predict(Network(model), Classification(), nothing, deviations(model))


@pytest.mark.parametrize("alpha", [1e-70, 1e-90], ids=["variances", "samples"])
@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
def test_predictions_that_overflow_cause_a_warning(alpha: float) -> None:
    x, y = CLASSIFICATION.data()
    posterior = nb.ProjectedPosterior(MLP.build().float(), prior_precision=alpha)
    posterior.fit([(x.float(), y)], 4, progress=False)
    with pytest.warns(NullBayesWarning, match=r"not finite in float32: use a larger prior_precision") as caught:
        assert not torch.isfinite(posterior.predict(x.float() + 1.0).variance).all()
    assert [warning.filename for warning in caught] == [__file__]


def test_the_nll_is_that_of_the_mean_density() -> None:
    """Not the mean of the samples' negative log-likelihoods, which is larger."""
    outputs = torch.tensor([[[0.0, 2.0]], [[3.0, 0.0]]], dtype=torch.float64)  # two samples, one example
    p = [1 / (1 + math.exp(2.0)), 1 / (1 + math.exp(-3.0))]
    mean = outputs.mean(0)
    nll = predictive.nll(Classification(), mean, outputs - mean, torch.tensor([0]), "mc")
    assert nll == pytest.approx(-math.log((p[0] + p[1]) / 2))
    assert nll < -(math.log(p[0]) + math.log(p[1])) / 2


def test_the_nll_of_unlikely_targets_stays_finite() -> None:
    outputs, targets = torch.full((2, 1), 1e4, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    still = torch.zeros(3, 2, 1, dtype=torch.float64)
    for link in ("mc", "margin"):
        nll = predictive.nll(Regression(0.1), outputs, still, targets, link)
        assert nll == pytest.approx(0.5 * 1e8 / 0.01)


def test_the_nll_of_a_regression_is_that_of_a_density() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, targets = (randn(*shape, generator=generator).double() for shape in ((4, 5, 3), (5, 3)))
    densities = torch.distributions.Normal(outputs, 0.3).log_prob(targets).sum(2).exp().mean(0)
    mean = outputs.mean(0)
    changes = outputs - mean
    nll = predictive.nll(Regression(0.3), mean, changes, targets, "mc")
    assert nll == pytest.approx(float(-densities.log().mean()) / 3)  # of a target, of which an example has three
    both = torch.distributions.Normal(mean, (0.3**2 + outputs.var(0)).sqrt()).log_prob(targets)
    assert predictive.nll(Regression(0.3), mean, changes, targets) == pytest.approx(float(-both.mean()))


def test_mutual_information_is_nonnegative_and_zero_for_equal_samples() -> None:
    outputs = randn(5, 3, generator=torch.Generator().manual_seed(0)).double()
    prediction = predictive.summarize(outputs, torch.zeros(4, 5, 3, dtype=torch.float64), Classification(), "margin")
    information = predictive.score(prediction, Classification(), "mutual_information")
    assert (information >= 0).all()
    assert information.max() < 1e-12


def test_predictions_without_classes_have_no_probabilities() -> None:
    outputs = randn(4, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    prediction = predictive.summarize(outputs[0], outputs - outputs[0], resolve(REGRESSION.likelihood), "margin")
    assert prediction.probs is None
    torch.testing.assert_close(prediction.mean, outputs[0])


@pytest.mark.parametrize("link", predictive.LINKS)
def test_every_link_gives_probabilities(link: str) -> None:
    model, (x, _) = MLP.build(), CLASSIFICATION.data()
    found = predictive.predict(Network(model), Classification(), x, deviations(model), link=link)
    assert found.probs.shape == (5, 3)
    torch.testing.assert_close(found.probs.sum(1), torch.ones(5, dtype=torch.float64))
    assert not torch.equal(found.probs, found.mean.softmax(1))


def test_links_that_do_not_fit_are_refused() -> None:
    model, (x, _) = MLP.build(), CLASSIFICATION.data()
    with pytest.raises(SettingsError, match="link_approx must be one of"):
        predictive.predict(Network(model), Classification(), x, deviations(model), link="logit")
    with pytest.raises(LikelihoodError, match='use "probit"'):
        predictive.predict(Network(model), Bernoulli("multilabel"), x, deviations(model), link="bridge")
    two = [predictive.predict(Network(model), Bernoulli("multilabel"), x, deviations(model), link=k).probs
           for k in ("margin", "probit")]  # fmt: skip
    assert torch.equal(*two)
