"""A saved posterior is loaded bit for bit, or refused when the model is another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import FileError, NotFittedError, SettingsError
from nullbayes.likelihoods import Classification, Likelihood, Regression
from support.drawing import randn
from support.models import BATCHNORM, CLASSIFICATION, CUSTOM, MLP, MODELS, REGRESSION, TASKS, Task
from support.posterior_fits import EXACT, X_NEW, fit_mlp

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

each_kind = pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A posterior file of the small network."""
    path = tmp_path / "posterior.safetensors"
    fit_mlp().save(path)
    return path


# --- there and back ---------------------------------------------------------------------------------------------------


@each_task
@each_kind
def test_a_posterior_is_loaded_bit_for_bit(kind: type, task: Task, tmp_path: Path) -> None:
    posterior = fit_mlp(kind, task)
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build(task.outputs), **task.loading)
    assert type(loaded) is kind
    assert torch.equal(loaded.directions, posterior.directions)
    assert loaded.prior_precision == posterior.prior_precision
    assert loaded.likelihood == posterior.likelihood
    assert loaded.report == posterior.report
    assert torch.equal(loaded.predict(X_NEW).samples, posterior.predict(X_NEW).samples)
    assert torch.equal(loaded.ood_score(X_NEW), posterior.ood_score(X_NEW))
    assert loaded.check_fit([task.data()]) == posterior.check_fit([task.data()])
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()


@each_kind
def test_fitted_noise_is_kept(kind: type, tmp_path: Path) -> None:
    x, y = REGRESSION.data()
    posterior = kind(MLP.build(2), "regression").fit([(x, 7 * y)], 4, projector=EXACT, progress=False)
    posterior.save(tmp_path / "file")
    assert min(posterior.likelihood.sigma_noise) > 1
    assert nb.load(tmp_path / "file", MLP.build(2)).likelihood.sigma_noise == posterior.likelihood.sigma_noise


@pytest.mark.parametrize("precision", [3.25, "optimal", "paper"])
def test_the_precision_in_use_is_kept(precision: float | str, saved: Path) -> None:
    posterior = fit_mlp()
    posterior.prior_precision = precision
    posterior.save(saved)
    loaded = nb.load(saved, MLP.build())
    assert loaded.prior_precision == posterior.prior_precision
    for rule in ("optimal", "paper", 2.0):
        posterior.prior_precision = loaded.prior_precision = rule
        assert loaded.prior_precision == posterior.prior_precision


@pytest.mark.parametrize("case", MODELS.values(), ids=lambda case: case.name)
def test_every_kind_of_network_can_be_saved_and_loaded(case: Any, tmp_path: Path) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case, n=3)
    posterior = nb.ProjectedPosterior(model).fit([(x, y)], 3, projector="auto", progress=False)
    posterior.save(tmp_path / "file")
    assert torch.equal(nb.load(tmp_path / "file", case.build()).predict(x).samples, posterior.predict(x).samples)


def test_chosen_parameters_are_kept(tmp_path: Path) -> None:
    posterior = nb.ProjectedPosterior(MLP.build(), parameters="2.*")
    posterior.fit([CLASSIFICATION.data(n=3)], 4, projector=EXACT, progress=False).save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build())
    assert list(loaded.sample()) == ["2.weight", "2.bias"]
    assert torch.equal(loaded.predict(X_NEW).samples, posterior.predict(X_NEW).samples)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_neither_used_nor_changed(training: bool, tmp_path: Path) -> None:
    x, y = CLASSIFICATION.data(BATCHNORM)
    posterior = nb.ProjectedPosterior(BATCHNORM.build()).fit([(x, y)], 4, projector=EXACT, progress=False)
    posterior.save(tmp_path / "file")
    model = BATCHNORM.build().train(training)
    loaded = nb.load(tmp_path / "file", model)
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    assert all(module.training is training for module in model.modules())


def test_batch_fn_is_passed_to_load_again(tmp_path: Path) -> None:
    x, y = CLASSIFICATION.data()
    data, apart = [{"a": x, "b": y}], lambda batch: (batch["a"], batch["b"])
    posterior = nb.ProjectedPosterior(MLP.build(), batch_fn=apart).fit(data, 4, projector=EXACT, progress=False)
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build(), batch_fn=apart)
    assert loaded.check_fit(data) == posterior.check_fit(data)
    torch.testing.assert_close(loaded.predict(data).samples, posterior.predict(x).samples)


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [(nb.ProjectedPosterior, {}), (nb.ProjectedPosterior, {"hessian": True}), (nb.LossProjectedPosterior, {})],
    ids=["projected", "scaled", "loss-projected"],
)
def test_a_loaded_posterior_can_be_prepared_and_extended(kind: type, options: dict[str, bool], tmp_path: Path) -> None:
    data, generators = [CLASSIFICATION.data()], [torch.Generator().manual_seed(0) for _ in range(2)]
    whole, part = (
        kind(MLP.build(), **options).fit(data, n, projector=EXACT, generator=generator, progress=False)
        for n, generator in zip((7, 4), generators, strict=True)
    )
    part.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build())
    for ask in (lambda: loaded.extend(3), lambda: loaded.functional_variance(X_NEW, exact=True)):
        with pytest.raises(NotFittedError, match=r"no file or copy holds.*prepare\(loader\)"):
            ask()
    assert loaded.prepare(data, projector=EXACT) is loaded
    loaded.extend(3, progress=False)
    torch.testing.assert_close(loaded.directions, whole.directions)
    torch.testing.assert_close(
        loaded.functional_variance(X_NEW, exact=True), whole.functional_variance(X_NEW, exact=True)
    )
    assert loaded.report.n_samples == 7
    assert loaded.report.kernel_dimension == whole.report.kernel_dimension


def test_a_loaded_posterior_with_a_base_refuses_to_extend_with_another(tmp_path: Path) -> None:
    base = 5 * randn(4, 51, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    posterior = fit_mlp(n_samples=4, base=lambda n, generator: base[:n])
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build())
    assert torch.equal(loaded.directions, posterior.directions)
    loaded.prior_precision = "optimal"
    assert loaded.prior_precision == posterior.prior_precision == 1.0
    loaded.prepare([CLASSIFICATION.data()], projector=EXACT)
    with pytest.raises(SettingsError, match="base distribution, which no file or copy holds"):
        loaded.extend(2, progress=False)
    with pytest.raises(SettingsError, match="exact=False"):
        loaded.functional_variance(X_NEW, exact=True)
    assert loaded.n_samples == 4


def test_a_custom_loss_must_be_passed_to_load(tmp_path: Path) -> None:
    fit_mlp(task=CUSTOM).save(tmp_path / "file")
    with pytest.raises(FileError, match=r"a file cannot hold: pass load\(..., likelihood=loss\)"):
        nb.load(tmp_path / "file", MLP.build(2))


def fit_images(likelihood: Any) -> Any:
    """Three classes for each pixel, in the second dimension, with pixels that are ignored."""
    x = randn(20, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Conv2d(2, 3, 3, padding=1)
    y = model(x).argmax(1)
    y[:, 0, 0] = 255
    return nb.LossProjectedPosterior(model, likelihood, prior_precision=1e6).fit([(x, y)], 4, progress=False)


def test_the_likelihood_of_the_fit_may_be_passed_to_load_and_keeps_what_the_fit_found(tmp_path: Path) -> None:
    given = Classification(ignore_index=255)
    posterior = fit_images(given)
    posterior.save(tmp_path / "file")
    model = posterior._network.module
    for likelihood in (given, "classification", posterior.likelihood, Classification(class_dim=1, ignore_index=255)):
        assert nb.load(tmp_path / "file", model, likelihood=likelihood).likelihood == posterior.likelihood
    for likelihood in (Classification(class_dim=-1), Classification(ignore_index=254)):
        with pytest.raises(FileError, match=r"The posterior has .* in its likelihood, not (-1|254): leave likelihood="):
            nb.load(tmp_path / "file", model, likelihood=likelihood)


@pytest.mark.parametrize("sigma", [0.5, (0.5, 0.25)])
def test_the_noise_of_the_fit_may_be_passed_to_load_after_it_was_tuned(sigma: Any, tmp_path: Path) -> None:
    posterior = nb.ProjectedPosterior(MLP.build(2), Regression(sigma)).fit(
        [REGRESSION.data()], 4, projector=EXACT, progress=False
    )
    posterior.temperature = 3.0
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build(2), likelihood=Regression(sigma))
    assert loaded.likelihood == posterior.likelihood
    for other in (0.6, (0.5, 0.3)):
        with pytest.raises(FileError, match="The posterior has sigma_noise="):
            nb.load(tmp_path / "file", MLP.build(2), likelihood=Regression(other))


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts, with the logarithm of their mean as output."""

    offset: float = 0.0
    name: str = "poisson"
    has_probabilities = has_closed_form = False

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Take all."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.poisson_nll_loss(outputs + self.offset, targets, reduction="none").sum(1)

    def scaled(self, values: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return values * (outputs + self.offset).exp().sqrt()

    def nll_terms(self, outputs: Tensor, targets: Tensor, variance: Tensor | None = None) -> Tensor:
        return self.loss(outputs, targets).double()[:, None]

    def fitted(self, outputs: Tensor, targets: Tensor, statistics: Tensor | None = None) -> Likelihood:
        return replace(self, offset=0.25)


@dataclass(frozen=True)
class Other(Poisson):
    more: int = 3


def test_a_likelihood_of_ones_own_is_passed_to_load_and_keeps_what_the_fit_found(tmp_path: Path) -> None:
    x, y = REGRESSION.data()
    posterior = nb.ProjectedPosterior(MLP.build(2), Poisson(), prior_precision=10.0)
    posterior.fit([(x, y.abs().round())], 4, projector=EXACT, progress=False).save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build(2), likelihood=Poisson())
    assert loaded.likelihood == Poisson(0.25)
    assert torch.equal(loaded.predict(X_NEW).variance, posterior.predict(X_NEW).variance)
    with pytest.raises(FileError, match=r"a likelihood of your own, 'poisson', .*pass load\(..., likelihood=\.\.\.\)"):
        nb.load(tmp_path / "file", MLP.build(2))
    with pytest.raises(FileError, match="fitted with a poisson likelihood, not with regression: pass that one"):
        nb.load(tmp_path / "file", MLP.build(2), likelihood="regression")
    with pytest.raises(FileError, match=r"other settings of the likelihood \(offset\) than it has \(offset, more\)"):
        nb.load(tmp_path / "file", MLP.build(2), likelihood=Other())


class Louder(Regression):
    """Built on another one, under its name."""


def test_a_likelihood_of_ones_own_under_a_built_in_name_is_not_saved(tmp_path: Path) -> None:
    posterior = nb.ProjectedPosterior(MLP.build(2), Louder()).fit([REGRESSION.data()], 4, progress=False)
    with pytest.raises(SettingsError, match="Louder has the name of a built-in likelihood, 'regression'"):
        posterior.save(tmp_path / "file")


# --- another model ----------------------------------------------------------------------------------------------------


def changed(name: str) -> nn.Module:
    model = MLP.build()
    model.state_dict()[name][0] += 1e-12
    return model


OTHER_MODELS = {
    "other parameters": (lambda: MLP.build(seed=1), "same structure with other parameters.*state_dict"),
    "a bit of one parameter": (lambda: changed("2.bias"), "same structure with other parameters.*state_dict"),
    "other precision": (
        lambda: MLP.build().float(),
        r"in torch.float64, and this one is in .*model.to\(torch.float64\)",
    ),
    "more layers": (
        lambda: nn.Sequential(*MLP.build(), nn.Linear(3, 3).double()),
        "other parameters|another structure",
    ),
    "fewer layers": (lambda: MLP.build()[:1], "another structure.*'2.weight'"),
    "other names": (lambda: nn.Sequential(nn.Identity(), *MLP.build()), "another structure.*'0.weight'"),
    "other shapes": (lambda: MLP.build(4), r"another structure.*2.weight \(3, 6\)"),
}


@pytest.mark.parametrize(("make", "fragment"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_another_model_is_refused(make: Callable[[], nn.Module], fragment: str, saved: Path) -> None:
    with pytest.raises(FileError, match=fragment):
        nb.load(saved, make())


@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "8.bias"])
def test_load_refuses_a_model_with_changed_frozen_parameters_or_buffers(name: str, tmp_path: Path) -> None:
    """Parameters that do not vary and running statistics too."""
    posterior = nb.ProjectedPosterior(BATCHNORM.build(), parameters="8.*")
    posterior.fit([CLASSIFICATION.data(BATCHNORM, n=3)], 3, projector=EXACT, progress=False).save(tmp_path / "file")
    model = BATCHNORM.build()
    model.state_dict()[name][0] += 1e-12
    with pytest.raises(FileError, match="other parameters"):
        nb.load(tmp_path / "file", model)


# --- the same parameters, and another function ------------------------------------------------------------------------


class Parts(nn.Module):
    """Takes a pair, or a mapping of which one part is a mapping or a pair."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.activation, self.last = nn.Linear(4, 6), activation, nn.Linear(6, 3)

    def forward(self, a: Any, b: Any = None) -> Tensor:
        b = b["c"] if isinstance(b, dict) else b[1] if isinstance(b, tuple) else b
        return self.last(self.activation(self.first(a) + (0 if b is None else b[:, :1])))


NESTED: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda x: x,
    "a pair": lambda x: (x, x),
    "a mapping": lambda x: {"b": x, "a": x},
    "a mapping of pairs": lambda x: {"b": (x, x), "a": x},
    "a mapping of mappings": lambda x: {"a": x, "b": {"c": x}},
}


@pytest.mark.parametrize("form", NESTED)
def test_a_network_with_the_same_parameters_and_another_activation_is_refused(form: str, tmp_path: Path) -> None:
    model, other = Parts(nn.Tanh()), Parts(nn.ReLU())
    other.load_state_dict(model.state_dict())
    x = randn(12, 4, generator=torch.Generator().manual_seed(0))
    inputs = NESTED[form](x)
    y = (model(**inputs) if isinstance(inputs, dict) else model(*inputs) if form == "a pair" else model(x)).argmax(1)
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0)
    posterior.fit([(inputs, y)], 4, projector=EXACT, progress=False).save(tmp_path / "file")
    nb.load(tmp_path / "file", model).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()
    with pytest.raises(FileError, match="and computes something else: build it with the same layers and activations"):
        nb.load(tmp_path / "file", other)


def test_another_output_fn_is_refused(tmp_path: Path) -> None:
    posterior = nb.ProjectedPosterior(MLP.build(), output_fn=lambda returned: returned)
    posterior.fit([CLASSIFICATION.data()], 4, projector=EXACT, progress=False).save(tmp_path / "file")
    nb.load(tmp_path / "file", MLP.build(), output_fn=lambda returned: returned * (1 + 1e-6))
    for other in (lambda returned: -returned, lambda returned: returned[:, :2]):
        with pytest.raises(FileError, match=r"computes something else.*pass the same output_fn"):
            nb.load(tmp_path / "file", MLP.build(), output_fn=other)


def test_large_inputs_are_not_stored(tmp_path: Path) -> None:
    x = randn(3, 1, 400, 400, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.AvgPool2d(200), nn.Flatten(), nn.Linear(4, 3))
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit([(x, model(x).argmax(1))], 2, progress=False)
    posterior.save(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size < x.numel()
    nb.load(tmp_path / "file", model)
