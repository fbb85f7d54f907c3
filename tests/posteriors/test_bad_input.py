"""Every mistake has an error of its own class, with a sentence that says what to change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from models import BATCHNORM, CLASSIFICATION, MLP, MODELS, NoGradBody, Task, batches, call, vectors
from nullbayes.errors import (
    DataError,
    InputError,
    LikelihoodError,
    ModelError,
    NotFittedError,
    NullBayesError,
    SettingsError,
)

X, Y = CLASSIFICATION.data(n=5)
DATA = [(X, Y)]
FROZEN = MODELS[12]

each_posterior = pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])


def fit(model: nn.Module | None = None, data: Any = DATA, likelihood: Any = "classification", **settings: Any) -> Any:
    posterior = nb.ProjectedPosterior(model if model is not None else MLP.build(), likelihood)
    return posterior.fit(data, 4, progress=False, **settings)


def double(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double()


class Wrapped(nn.Module):
    """A layer, and something done to its outputs."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3).double(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def holding(entry: float) -> nn.Module:
    model = MLP.build()
    with torch.no_grad():
        model[2].bias[1] = entry
    return model


def without_gradients() -> nn.Module:
    return MLP.build().requires_grad_(False)


def mixed_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3).double(), nn.Linear(3, 3, device="meta", dtype=torch.float64))


# --- models -----------------------------------------------------------------------------------------------------------

MODELS_REFUSED = {
    "no module": (lambda: F.relu, "torch.nn.Module, not"),
    "NaN parameter": (lambda: holding(torch.nan), "'2.bias' holds NaN or Inf"),
    "infinite parameter": (lambda: holding(torch.inf), "'2.bias' holds NaN or Inf"),
    "no trainable parameter": (without_gradients, r"requires_grad_\(True\)"),
    "batch statistics": (
        lambda: double(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        "'1'.*running statistics.*GroupNorm",
    ),
    "mixed precision": (lambda: nn.Sequential(nn.Linear(4, 3).double(), nn.Linear(3, 3)), "several precisions.*32"),
    "mixed devices": (mixed_devices, r"several devices \((cpu|cuda.*), meta\)"),
    "integer parameters": (
        lambda: nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)]),
        "No parameter of the model requires gradients",
    ),
}  # fmt: skip

FUNCTIONS_REFUSED = {
    "random": (lambda h: F.dropout(h, 0.5, training=True), "when asked twice.*training=True"),
    "coupled examples": (lambda h: h - h.mean(0), "depends on the other examples.*GroupNorm or LayerNorm"),
    "NaN outputs": (lambda h: h * torch.nan, "answers NaN or Inf"),
    "examples last": (lambda h: h.T, r"shape \(3, 5\): examples must come first.*output_fn"),
    "one number": (lambda h: h.sum(), r"one entry an example, not torch.float64, shape \(\)"),
    "integers": (lambda h: h.argmax(1), "floating-point tensor.*not torch.int64"),
    "a mapping as outputs": (
        lambda h: {"mean": h, "scale": h},
        r"a dict with 2 floating-point tensors \(mean, scale\).*output_fn",
    ),
    "a tuple as outputs": (lambda h: (h, (h, 3)), "a tuple with 2 floating-point tensors: .*output_fn"),
    "nothing": (lambda h: None, "returns a NoneType: .*output_fn"),
}


@pytest.mark.parametrize(("make", "fragment"), MODELS_REFUSED.values(), ids=MODELS_REFUSED)
@each_posterior
def test_unusable_models_are_refused(kind: type, make: Callable[[], Any], fragment: str) -> None:
    with pytest.raises(ModelError, match=fragment):
        kind(make())


@pytest.mark.parametrize(("function", "fragment"), FUNCTIONS_REFUSED.values(), ids=FUNCTIONS_REFUSED)
@each_posterior
def test_models_that_answer_unusably_are_refused(kind: type, function: Callable[[Tensor], Any], fragment: str) -> None:
    posterior = kind(Wrapped(function))
    with pytest.raises(ModelError, match=fragment):
        posterior.fit(DATA, 4, progress=False)


def test_nan_outputs_are_found_on_any_example() -> None:
    x = vectors(12, torch.Generator().manual_seed(0))
    model = Wrapped(lambda h: torch.where(h.abs() > 50, torch.nan, h))
    for n, where in ((10, r"batch 1 \(its example 3, counted from 0\)"), (2, "batch 0 .*example 2,")):
        x[n] = 1e3
        for likelihood in ("classification", lambda f, y: f.square().sum(1)):
            with pytest.raises(ModelError, match=f"NaN or Inf on {where}"):
                fit(model, batches(x, torch.zeros(12, dtype=torch.long), (7, 5)), likelihood)


def test_parameters_without_gradients_in_the_forward_pass_are_refused() -> None:
    model = NoGradBody(3).double()
    with pytest.raises(ModelError, match=r"torch.no_grad\(\).*parameters="):
        fit(model)
    model.body.requires_grad_(False)
    posterior = fit(model, projector=nb.projectors.ExactDual())  # as the message says
    torch.testing.assert_close(posterior.predict(X).mean, model(X).detach())


@pytest.mark.parametrize(
    ("parameters", "fragment"),
    [
        ("body.*", "'body.*' matches none of 0.weight, 0.bias, 2.weight, 2.bias: pass"),
        ("2", r"'2' is the name of no parameter: '2\.\*' would match some"),
        ("bias", r"'bias' is the name of no parameter: '\*\.bias' would match some"),
        ("2.wieght", "'2.wieght' matches none of 2.weight, "),
        (["2.*", "3.bias"], "'3.bias' matches none"),
        ([], "takes names or globs, such as '2.bias', or a predicate, not "),
        (lambda name, parameter: False, "holds for no parameter"),
        (list(MLP.build().parameters()), "takes names or globs.*Parameter"),
    ],
    ids=["glob", "layer", "part", "typo", "one of two", "empty", "predicate", "tensors"],
)
def test_parameters_that_match_nothing_are_refused(parameters: Any, fragment: str) -> None:
    with pytest.raises(ModelError, match=fragment):
        nb.ProjectedPosterior(MLP.build(), parameters=parameters)


@pytest.mark.parametrize("training", [True, False])
@each_posterior
def test_training_mode_is_neither_used_nor_changed(kind: type, training: bool) -> None:
    data = [CLASSIFICATION.data(BATCHNORM, n=4)]
    x = BATCHNORM.inputs(3, torch.Generator().manual_seed(9))
    reference = kind(BATCHNORM.build(), prior_precision=1e4).fit(
        data, 4, generator=torch.Generator().manual_seed(1), progress=False
    )
    model = BATCHNORM.build().train(training)
    state = copy.deepcopy(model.state_dict())
    posterior = kind(model, prior_precision=1e4)
    posterior.fit(data, 4, generator=torch.Generator().manual_seed(1), progress=False)
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.samples, reference.predict(x).samples, rtol=0, atol=0)
    assert all(module.training is training for module in model.modules())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


# --- likelihoods ------------------------------------------------------------------------------------------------------

one_hot = F.one_hot(Y, 3)
LIKELIHOODS_REFUSED = {
    "single logit": ("classification", 1, Y.clamp(max=1), 'a logit for each class.*"binary" or "regression"'),
    "label too large": ("classification", 2, Y, "from 0 to 2.*labels must be 0 to 1"),
    "label too small": ("classification", 3, Y - 1, "from -1 to 1.*labels must be 0 to 2"),
    "float labels": ("classification", 3, Y.double(), r'integer labels.*"regression"'),
    "no probabilities": ("classification", 3, 2.0 * one_hot, "no class probabilities"),
    "negative probabilities": ("classification", 3, 3.0 * one_hot - 2 / 3, "no class probabilities"),
    "one-hot integers": ("classification", 3, one_hot, r"targets of shape \(5, 3\) must have shape \(5,\).*floats"),
    "several logits": ("binary", 3, Y.clamp(max=1), '3 outputs: use "classification" or "multilabel"'),
    "binary 2": ("binary", 1, Y, "binary targets must be 0 or 1; found 0 to 2"),
    "binary -1": ("binary", 1, 2.0 * Y.clamp(max=1) - 1, "must be 0 or 1; found -1 to 1"),
    "binary too many": ("binary", 1, one_hot, r"each logit, outputs of shape \(5, 1\), not shape \(5, 3\)"),
    "multilabel half": ("multilabel", 3, 0.5 * one_hot, "multilabel targets must be 0 or 1; found 0 to 0.5"),
    "multilabel classes": ("multilabel", 3, Y.clamp(max=1), r"each logit, outputs of shape \(5, 3\), not shape \(5,\)"),
    "regression on labels": ("regression", 1, Y, r'likelihood="classification".*targets.float\(\)'),
    "regression too wide": ("regression", 1, torch.zeros(5, 2), r"\(5, 2\) do not fit outputs of shape \(5, 1\)"),
    "regression broadcast": ("regression", 2, torch.zeros(5), r"\(5,\) do not fit outputs of shape \(5, 2\)"),
    "unknown": ("poisson", 3, Y, "'poisson' is not one of classification, binary, multilabel, regression"),
    "no likelihood": (3, 3, Y, "a name, a Likelihood or a callable, not int"),
    "reduced loss": (nn.CrossEntropyLoss(), 3, Y, r'shape \(5,\), not \(\): use reduction="none"'),
    "loss for each output": (lambda f, y: f.square(), 3, Y, r'shape \(5,\), not \(5, 3\): use reduction="none"'),
    "loss that is a number": (lambda f, y: 0.0, 3, Y, 'not float: use reduction="none"'),
    "loss that is NaN": (lambda f, y: (f.square() + 1).neg().log().sum(1), 3, Y, "loss is NaN or Inf"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "fragment"), LIKELIHOODS_REFUSED.values(), ids=LIKELIHOODS_REFUSED
)
@each_posterior
def test_likelihoods_that_do_not_fit_are_refused(
    kind: type, likelihood: Any, outputs: int, targets: Tensor, fragment: str
) -> None:
    with pytest.raises(LikelihoodError, match=fragment):
        kind(MLP.build(outputs), likelihood).fit([(X, targets)], 4, progress=False)


@pytest.mark.parametrize("sigma", [0.0, -1.0, torch.nan, torch.inf])
def test_noise_must_be_positive(sigma: float) -> None:
    with pytest.raises(LikelihoodError, match="sigma_noise must be positive"):
        nb.likelihoods.Regression(sigma)


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
@pytest.mark.parametrize("flat_outputs", [True, False])
@each_posterior
def test_a_column_of_targets_never_broadcasts(kind: type, shape: tuple[int, ...], flat_outputs: bool) -> None:
    """(5,) against (5, 1) would give a 5 by 5 loss: the classic silent mistake."""
    targets = torch.linspace(-1, 1, 5, dtype=torch.float64)
    model = nn.Sequential(MLP.build(1), nn.Flatten(0)) if flat_outputs else MLP.build(1)
    posterior = kind(model, "regression")
    posterior.fit([(X, targets.view(shape))], 4, generator=torch.Generator().manual_seed(0), progress=False)
    residual = model(X).detach().flatten() - targets
    assert posterior.likelihood.sigma_noise == pytest.approx(float(residual.square().mean().sqrt()))
    assert posterior.predict(X).mean.shape == (5, 1)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_samples", [1, 0, -3])
def test_a_fit_needs_two_samples(n_samples: int) -> None:
    with pytest.raises(SettingsError, match=f"at least 2 to speak of a variance, not {n_samples}"):
        nb.ProjectedPosterior(MLP.build()).fit(DATA, n_samples)


SETTINGS_REFUSED = {
    "projector": ({"projector": "exact"}, r'"auto" or a projector such as nb.projectors.Krylov\(\), not \'exact\''),
    "no size": ({"memory_limit": "plenty"}, "memory_limit='plenty' is not a size.*\"8GB\""),
    "odd size": ({"memory_limit": "1.2.3GB"}, "is not a size"),
    "negative size": ({"memory_limit": "-8GB"}, "is not a size"),
    "zero": ({"memory_limit": 0}, "memory_limit must be positive and finite.* not 0"),
    "zero GB": ({"memory_limit": "0GB"}, "memory_limit must be positive"),
    "far too little": ({"memory_limit": 100}, "take fewer samples or raise memory_limit"),
    "tolerance of one": ({"tolerance": 1.0}, "tolerance needs 0 <= rtol < 1"),
    "negative tolerance": ({"tolerance": -0.1}, "tolerance needs 0 <= rtol < 1"),
    "base of another size": ({"base": torch.zeros(4, 3)}, r"shape \(4, 3\); needed is \(4, 51\)"),
    "base of too few": ({"base": torch.zeros(3, 51)}, r"shape \(3, 51\); needed is \(4, 51\)"),
}


@pytest.mark.parametrize(("settings", "fragment"), SETTINGS_REFUSED.values(), ids=SETTINGS_REFUSED)
def test_wrong_settings_of_a_fit_are_refused(settings: dict[str, Any], fragment: str) -> None:
    with pytest.raises(SettingsError, match=fragment):
        fit(**settings)


def test_a_base_without_a_parameter_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lack '0\.bias'"):
        fit(base={"0.weight": torch.zeros(4, 6, 4)})


def test_a_failed_fit_leaves_no_half_fitted_posterior() -> None:
    posterior = fit()
    with pytest.raises(SettingsError):
        posterior.fit(DATA, 4, projector="exact")
    with pytest.raises(NotFittedError, match=r"fit\(loader\)"):
        posterior.predict(X)


@pytest.mark.parametrize(
    "value", [0, 0.0, -1.0, torch.nan, torch.inf, pytest.param(10**400, id="huge"), "best", None, [1.0]]
)
def test_wrong_prior_precisions_are_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match='a positive number, "optimal" or "paper"'):
        nb.ProjectedPosterior(MLP.build(), prior_precision=value)
    posterior = fit()
    before = posterior.prior_precision
    with pytest.raises(SettingsError, match='a positive number, "optimal" or "paper"'):
        posterior.prior_precision = value
    assert posterior.prior_precision == before


@pytest.mark.parametrize("make", [np.float32, np.float64, np.int64, torch.tensor, int], ids=lambda m: m.__name__)
def test_numbers_come_from_anywhere(make: Callable[[int], Any]) -> None:
    for kind in (nb.ProjectedPosterior, nb.baselines.DiagonalLaplace):
        posterior = kind(MLP.build(), prior_precision=make(3))
        assert posterior.fit(DATA, np.int64(4), progress=False).prior_precision == 3.0
        assert posterior.predict(X, n_samples=np.int64(2)).samples.shape[0] == 2


CALLS_REFUSED = {
    "pred_type": (lambda p: p.predict(X, pred_type="glm"), SettingsError, "linearized, sampled, not 'glm'"),
    "kind": (lambda p: p.ood_score(X, "variance"), SettingsError, "max_variance, sum_variance.*not 'variance'"),
    "method": (lambda p: p.optimize_prior_precision(DATA, "grid"), SettingsError, '"nll" or "marglik", not \'grid\''),
    "too many samples": (lambda p: p.predict(X, n_samples=5), SettingsError, r"between 1 and 4, not 5; extend\(\)"),
    "no samples": (lambda p: p.predict(X, n_samples=0), SettingsError, "n_samples must be"),
    "one sample": (lambda p: p.predict(X, n_samples=1), SettingsError, "at least 2 to speak of a variance"),
    "too many drawn": (lambda p: p.sample(5), SettingsError, "between 1 and 4"),
    "half a sample": (lambda p: p.predict(X, n_samples=2.5), SettingsError, "a whole number, not 2.5"),
    "half a sample drawn": (lambda p: p.sample(2.5), SettingsError, "a whole number, not 2.5"),
    "half a sample put in": (lambda p: p.sampled_parameters(0.5).__enter__(), SettingsError, "a whole number, not 0.5"),
    "extend by half": (lambda p: p.extend(0.5), SettingsError, "a whole number, not 0.5"),
    "extend by none": (lambda p: p.extend(0), SettingsError, "at least 1, not 0"),
    "no such sample": (lambda p: p.sampled_parameters(4).__enter__(), SettingsError, "no sample 4: there are 4"),
    "NaN inputs": (lambda p: p.predict(X * torch.nan), DataError, "NaN or Inf"),
    "NaN in a loader": (lambda p: p.predict([X, X / 0]), DataError, "NaN or Inf"),
    "no inputs": (lambda p: p.predict(3.0), DataError, "a tensor, a tuple, a mapping or a loader.*not float"),
    "empty loader": (lambda p: p.predict([]), DataError, "yields no batch"),
    "no examples": (lambda p: p.predict(X[:0]), DataError, "nothing to predict"),
    "empty loader, exact": (lambda p: p.functional_variance([], exact=True), DataError, "yields no batch"),
    "shuffled check": (
        lambda p: p.check_fit(DataLoader(TensorDataset(X, Y), shuffle=True)), DataError, "shuffle=False",
    ),
    "nothing to check": (lambda p: p.check_fit([(X, Y * 0 - 100)]), DataError, "nothing to compare predictions with"),
    "nothing to tune by": (
        lambda p: p.optimize_prior_precision([(X, Y * 0 - 100)], "nll"), DataError, "nothing to compare",
    ),
    "other labels": (lambda p: p.check_fit([(X, Y + 5)]), LikelihoodError, "labels must be 0 to 2"),
    "other inputs": (lambda p: p.prepare([(X[:, :2], Y)]), InputError, r"n, 2.*in training it had .*n, 4"),
    "other data": (lambda p: p.release().prepare([(X[:3], Y[:3])]), DataError, "15 rows.*9"),
}  # fmt: skip


@pytest.mark.parametrize(("ask", "error", "fragment"), CALLS_REFUSED.values(), ids=CALLS_REFUSED)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_wrong_questions_are_refused(ask: Callable[[Any], Any], error: type[NullBayesError], fragment: str) -> None:
    with pytest.raises(error, match=fragment):
        ask(fit())


def test_an_advised_projector_is_not_refused_for_the_memory_of_another() -> None:
    """The message about memory points to Lanczos: it must then be taken."""
    refused = []
    for little in range(4 * 51 * 8, 2**20, 4 * 51 * 8):  # room for samples, then for more
        try:
            fit(memory_limit=little)
        except SettingsError as error:
            refused.append((little, str(error)))
        else:
            break
    little, message = refused[-1]
    assert "projector=nb.projectors.Lanczos(rank=...)" in message
    posterior = fit(memory_limit=little, projector=nb.projectors.Lanczos(rank=15))
    assert max(posterior.report.residual) < 1e-2


@pytest.mark.parametrize("kind", ["max_prob_variance", "entropy", "mutual_information"])
def test_scores_of_probabilities_need_probabilities(kind: str) -> None:
    posterior = fit(MLP.build(1), [(X, torch.zeros(5, dtype=torch.float64))], "regression")
    with pytest.raises(LikelihoodError, match="'max_variance'"):
        posterior.ood_score(X, kind)


# --- order ------------------------------------------------------------------------------------------------------------

BEFORE_FIT = {
    "predict": lambda p: p.predict(X),
    "call": lambda p: p(X),
    "ood_score": lambda p: p.ood_score(X),
    "functional_variance": lambda p: p.functional_variance(X),
    "exact variance": lambda p: p.functional_variance(X, exact=True),
    "report": lambda p: p.report,
    "directions": lambda p: p.directions,
    "n_samples": lambda p: p.n_samples,
    "sample": lambda p: p.sample(),
    "sampled_parameters": lambda p: p.sampled_parameters(0).__enter__(),
    "extend": lambda p: p.extend(3),
    "prepare": lambda p: p.prepare(DATA),
    "check_fit": lambda p: p.check_fit(DATA),
    "prior_precision": lambda p: p.prior_precision,
    "closed form": lambda p: p.optimize_prior_precision(DATA),
    "nll": lambda p: p.optimize_prior_precision(DATA, "nll"),
    "marglik": lambda p: p.optimize_prior_precision(DATA, "marglik"),
    "save": lambda p: p.save("never written"),
}


@pytest.mark.parametrize("ask", BEFORE_FIT.values(), ids=BEFORE_FIT)
@each_posterior
def test_fit_comes_first(kind: type, ask: Callable[[Any], Any]) -> None:
    with pytest.raises(NotFittedError, match=r"call fit\(loader\) first"):
        ask(kind(MLP.build()))


def test_evaluation_in_training_mode_that_moves_running_statistics_is_noticed() -> None:
    task: Task = CLASSIFICATION
    model, (x, y) = BATCHNORM.build(), task.data(BATCHNORM, n=4)
    posterior = nb.ProjectedPosterior(model).fit([(x, y)], 4, progress=False)
    call(model.train(), x)
    with pytest.raises(ModelError, match=r"running_mean.*has changed"):
        posterior.predict(x)
