"""Temperature scaling finds the temperature of the largest likelihood, and keeps it."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.baselines import MAP, TemperatureScaling
from nullbayes.errors import LikelihoodError, NullBayesWarning
from support.models import BINARY, CLASSIFICATION, CUSTOM, MLP, MULTILABEL, POISSON, REGRESSION, Task

N = 60


def fitted(task: Task) -> TemperatureScaling:
    return TemperatureScaling(MLP.build(task.outputs), task.likelihood).fit(*task.data(n=N), progress=False)


def written_out(task: Task, temperature: Tensor) -> Tensor:
    """The mean loss of the network's logits over a temperature, by the loss of one example."""
    x, y = task.data(n=N)
    outputs = MLP.build(task.outputs)(x).detach() / temperature
    return torch.stack([task.loss(f, target) for f, target in zip(outputs, y, strict=True)]).mean()


@pytest.mark.parametrize(
    "task",
    [CLASSIFICATION, *(pytest.param(task, marks=pytest.mark.slow) for task in (BINARY, MULTILABEL))],
    ids=lambda task: task.name,
)
def test_no_other_temperature_is_more_likely(task: Task) -> None:
    """A dense grid of temperatures, with the loss written out for one example."""
    grid = torch.logspace(-1.3, 1.3, 500, dtype=torch.float64)
    losses = torch.stack([written_out(task, t) for t in grid])
    best = fitted(task).temperature
    assert 0.05 <= best <= 20.0
    assert float(written_out(task, torch.tensor(best))) <= float(losses.min()) + 1e-6


def test_a_network_that_claims_too_much_is_cooled_to_the_share_of_right_answers() -> None:
    """All logits are ±3, and 8 of 10 predictions are right: 2 * 3 / T must be the log odds of 0.8."""
    model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2, dtype=torch.float64)})
    x = torch.tensor([[3.0, -3.0]], dtype=torch.float64).repeat(10, 1)
    y = torch.tensor([0] * 8 + [1] * 2)
    with pytest.warns(NullBayesWarning, match="The 10 held-out examples leave the temperature uncertain"):
        scaled = TemperatureScaling(model).fit(x, y, progress=False)
    assert scaled.temperature == pytest.approx(6.0 / 1.386294, rel=2e-3)


@pytest.mark.parametrize("n", [10, 40])
def test_a_temperature_of_few_examples_says_how_uncertain_it_is(n: int) -> None:
    """The log odds of k right answers of n have an error of (n p q)^(-1/2), and 1 / T is in proportion to them."""
    model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.ones(2, dtype=torch.float64)})
    x, y = torch.tensor([[3.0, -3.0]], dtype=torch.float64).repeat(n, 1), torch.arange(n) % 5 // 4
    error = math.sqrt(n / (n - 1)) / math.sqrt(n * 0.8 * 0.2) / math.log(4.0)
    factor = math.exp(2.0 * error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TemperatureScaling(model).fit(x, y, progress=False)
    found = [float(n) for warning in caught for n in re.findall(r"divided by (\d+\.\d+)", str(warning.message))]
    assert found == ([pytest.approx(factor, rel=0.03)] if factor > 2.0 else [])


def test_the_noise_of_a_regression_becomes_that_of_the_held_out_data() -> None:
    x, y = REGRESSION.data(n=N)
    likelihood = nb.likelihoods.Regression(sigma_noise=0.1)
    scaled = TemperatureScaling(MLP.build(REGRESSION.outputs), likelihood).fit(x, y, progress=False)
    errors = y - MLP.build(REGRESSION.outputs)(x).detach()
    assert 0.01 * scaled.temperature == pytest.approx(float(errors.square().mean()), rel=2e-3)
    assert scaled.predict(x).noise is not None
    assert float(scaled.predict(x).noise) == pytest.approx(float(errors.square().mean()), rel=2e-3)


def test_classes_stay_and_probabilities_follow() -> None:
    scaled, plain = fitted(CLASSIFICATION), MAP(MLP.build()).fit(*CLASSIFICATION.data(n=N), progress=False)
    x = CLASSIFICATION.data(n=20, seed=5)[0]
    ours, theirs = scaled.predict(x), plain.predict(x)
    assert torch.equal(ours.probs.argmax(1), theirs.probs.argmax(1))
    torch.testing.assert_close(ours.probs, (theirs.mean / scaled.temperature).softmax(1))


def test_a_file_keeps_the_temperature(tmp_path: Path) -> None:
    scaled = fitted(CLASSIFICATION)
    scaled.save(tmp_path / "scaled")
    loaded = nb.load(tmp_path / "scaled", MLP.build())
    assert loaded.temperature == scaled.temperature != 1.0
    assert "temperature of" in loaded.report.reason


def test_a_new_fit_starts_from_the_likelihood_that_was_given() -> None:
    again, other = fitted(CLASSIFICATION), CLASSIFICATION.data(n=N, seed=8)
    again.fit(*other, progress=False)
    assert again.temperature == TemperatureScaling(MLP.build()).fit(*other, progress=False).temperature


@pytest.mark.parametrize(("task", "what"), [(CUSTOM, "a loss of your own"), (POISSON, "a poisson likelihood")])
def test_a_likelihood_without_a_temperature_is_refused(task: Task, what: str) -> None:
    with pytest.raises(LikelihoodError, match=f"{what} has not: use MAP"):
        fitted(task)
