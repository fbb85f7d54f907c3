"""Where a model returns one number per input, (N,), so do predictions: (N, 1) beside targets (N,) would broadcast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import LikelihoodError
from support.drawing import randn, seeded

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.NullBayesWarning")
X = randn(120, 3, generator=seeded())
KINDS = [
    nb.ProjectedPosterior,
    nb.LossProjectedPosterior,
    nb.baselines.MAP,
    nb.baselines.LinearizedLaplace,
    nb.baselines.TemperatureScaling,
]


class Numbers(nn.Module):
    """A network that drops the dimension of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(-1)


def fitted(kind: Any, likelihood: str = "regression") -> tuple[Any, Numbers, Tensor]:
    torch.manual_seed(0)
    model = Numbers()
    y = model(X).detach() + 0.1 * randn(120, generator=seeded(1))
    y = y if likelihood == "regression" else (y > 0).float()
    posterior = kind(model, likelihood).fit(X[:50], y[:50], generator=seeded(), progress=False)
    return posterior.calibrate(X[50:100], y[50:100]), model, y


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_and_intervals_have_the_shape_of_the_outputs(kind: Any) -> None:
    posterior, model, y = fitted(kind)
    new, targets = X[100:], y[100:]
    found = posterior.predict(new)
    torch.testing.assert_close(found.mean, model(new).detach())
    assert found.variance.shape == found.std.shape == targets.shape
    assert found.samples.shape == (posterior.n_samples, 20)
    bounds = (*posterior.predict_interval(new), *found.interval(0.9))
    assert all(bound.shape == targets.shape for bound in bounds)
    assert ((bounds[0] <= targets) & (targets <= bounds[1])).double().mean() > 0.6
    assert posterior.functional_variance(new).shape == targets.shape
    table = found.to_pandas()
    assert table["mean"].tolist() == pytest.approx(found.mean.tolist())


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.baselines.LinearizedLaplace])
def test_exact_variances_have_the_shape_of_the_outputs(kind: Any) -> None:
    posterior = fitted(kind)[0]
    exact, sampled = (posterior.functional_variance(X[100:], exact=which) for which in (True, False))
    assert exact.shape == sampled.shape == (20,)


def test_probabilities_have_the_shape_of_the_logits() -> None:
    posterior, model, _ = fitted(nb.ProjectedPosterior, "binary")
    found = posterior.predict(X[100:])
    assert torch.equal(found.probs > 0.5, model(X[100:]) > 0)
    assert posterior.predict_set(X[100:]).shape == (20, 2)
    assert found.plot().axes


@pytest.mark.parametrize("one", [False, True])
def test_a_loaded_posterior_predicts_in_the_same_shape(tmp_path: Path, one: bool) -> None:
    posterior, model, _ = fitted(nb.ProjectedPosterior)
    posterior.save(tmp_path / "posterior.safetensors")
    new = X[100:101] if one else X[100:]
    found = nb.load(tmp_path / "posterior.safetensors", model).predict(new)
    assert found.mean.shape == model(new).shape
    torch.testing.assert_close(found.variance, posterior.predict(new).variance)


def test_members_of_an_ensemble_predict_in_the_same_shape() -> None:
    model, members = Numbers(), [Numbers() for _ in range(3)]
    y, ensemble, each = model(X).detach(), nb.baselines.DeepEnsemble(model, "regression"), iter(members)
    ensemble.fit(X[:50], y[:50], n_samples=3, train=lambda seed: next(each), progress=False)
    found = ensemble.predict(X[100:])
    torch.testing.assert_close(found.mean, torch.stack([member(X[100:]) for member in members]).mean(0).detach())


def test_a_loss_that_compares_all_with_all_says_what_to_write() -> None:
    posterior = nb.LossProjectedPosterior(Numbers(), lambda f, y: (f - y) ** 2)
    with pytest.raises(LikelihoodError, match=r"every output with every target.*take outputs\[:, 0\]"):
        posterior.fit(X[:50], X[:50, 0], 5, progress=False)


def test_noise_of_each_input_keeps_the_shape_of_the_mean() -> None:
    found = nb.Prediction(*(torch.ones(5, 1) for _ in range(2)), None, torch.ones(2, 5, 1), torch.ones(5, 1))
    assert found.reshaped(lambda tensor: tensor.squeeze(-1)).interval(0.9)[0].shape == (5,)
