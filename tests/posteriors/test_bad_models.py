"""Models and likelihoods that cannot be used have an error of their own class, which says what to change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nullbayes as nb
from nullbayes.errors import (
    LikelihoodError,
    ModelError,
)
from support.models import BATCHNORM, CLASSIFICATION, MLP, NoGradBody, batches, vectors
from support.posterior_fits import DATA, X, Y, attempt, each_kind


def double(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double()


class Wrapped(nn.Module):
    """A layer, and something done to its outputs."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 3).double(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


class Two(NamedTuple):
    mean: Tensor
    scale: Tensor


@dataclass
class TwoFields:
    mean: Tensor
    scale: Tensor


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
    "no values": (lambda: nn.Linear(4, 3, device="meta"), r"no values \(device meta\): build .* and load its weights"),
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
    "one number": (lambda h: h.sum(), r"one entry per example, not torch.float64, shape \(\)"),
    "integers": (lambda h: h.argmax(1), "floating-point tensor.*not torch.int64"),
    "a mapping as outputs": (
        lambda h: {"mean": h, "scale": h},
        r"a dict with 2 floating-point tensors \(mean, scale\).*output_fn",
    ),
    "a tuple as outputs": (lambda h: (h, (h, 3)), "a tuple with 2 floating-point tensors: .*output_fn"),
    "a named tuple": (
        lambda h: Two(h, h),
        r"a Two with 2 floating-point tensors \(mean, scale\).*output_fn=lambda returned: returned\.NAME",
    ),
    "a dataclass": (
        lambda h: TwoFields(h, h),
        r"a TwoFields with 2 floating-point tensors \(mean, scale\).*returned\.NAME",
    ),
    "nothing": (lambda h: None, "returns a NoneType: .*output_fn"),
}


@pytest.mark.parametrize(("make", "fragment"), MODELS_REFUSED.values(), ids=MODELS_REFUSED)
@each_kind
def test_unusable_models_are_refused(kind: type, make: Callable[[], Any], fragment: str) -> None:
    with pytest.raises(ModelError, match=fragment):
        kind(make())


@pytest.mark.parametrize(("function", "fragment"), FUNCTIONS_REFUSED.values(), ids=FUNCTIONS_REFUSED)
@each_kind
def test_models_with_unusable_outputs_are_refused(kind: type, function: Callable[[Tensor], Any], fragment: str) -> None:
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
                attempt(model, batches(x, torch.zeros(12, dtype=torch.long), (7, 5)), likelihood)


def test_parameters_without_gradients_in_the_forward_pass_are_refused() -> None:
    model = NoGradBody(3).double()
    with pytest.raises(ModelError, match=r"torch.no_grad\(\).*parameters="):
        attempt(model)
    model.body.requires_grad_(False)
    posterior = attempt(model, projector=nb.projectors.ExactDual())  # as the message says
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
@each_kind
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
    "no probabilities": ("classification", 3, 2.0 * one_hot, "not class probabilities"),
    "negative probabilities": ("classification", 3, 3.0 * one_hot - 2 / 3, "not class probabilities"),
    "one-hot integers": ("classification", 3, one_hot, r"targets of shape \(5, 3\) must have shape \(5,\).*floats"),
    "several logits": ("binary", 3, Y.clamp(max=1), '3 outputs: use "classification" or "multilabel"'),
    "binary 2": ("binary", 1, Y, "binary targets must be 0 or 1; found 0 to 2"),
    "binary -1": ("binary", 1, 2.0 * Y.clamp(max=1) - 1, "must be 0 or 1; found -1 to 1"),
    "binary too many": ("binary", 1, one_hot, r"each logit, outputs of shape \(5, 1\), not shape \(5, 3\)"),
    "multilabel half": ("multilabel", 3, 0.5 * one_hot, "multilabel targets must be 0 or 1; found 0 to 0.5"),
    "multilabel classes": ("multilabel", 3, Y.clamp(max=1), r"each logit, outputs of shape \(5, 3\), not shape \(5,\)"),
    "regression on labels": ("regression", 3, Y, r'likelihood="classification".*targets.float\(\)'),
    "regression on binary labels": ("regression", 1, Y.clamp(max=1), r'likelihood="binary", or.*targets.float\(\)'),
    "regression on whole numbers": ("regression", 1, Y, r"Targets are integers: convert them with targets.float\(\)"),
    "regression too wide": ("regression", 1, torch.zeros(5, 2), r"\(5, 2\) do not fit outputs of shape \(5, 1\)"),
    "regression broadcast": ("regression", 2, torch.zeros(5), r"\(5,\) do not fit outputs of shape \(5, 2\)"),
    "unknown": ("poisson", 3, Y, "'poisson' is not one of classification, binary, multilabel, regression"),
    "no likelihood": (3, 3, Y, "a name, a Likelihood or a callable, not int"),
    "reduced loss": (lambda f, y: f.square().mean(), 3, Y, r'shape \(5,\), not \(\): use reduction="none"'),
    "loss of torch": (nn.CrossEntropyLoss(), 3, Y, 'Pass likelihood="classification"'),
    "loss for each output": (lambda f, y: f.square(), 3, Y, r'shape \(5,\), not \(5, 3\): sum over'),
    "loss that is a number": (lambda f, y: 0.0, 3, Y, 'not float: use reduction="none"'),
    "loss that is NaN": (lambda f, y: (f.square() + 1).neg().log().sum(1), 3, Y, "loss is NaN or Inf"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "fragment"), LIKELIHOODS_REFUSED.values(), ids=LIKELIHOODS_REFUSED
)
@each_kind
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
@each_kind
def test_a_column_of_targets_never_broadcasts(kind: type, shape: tuple[int, ...], flat_outputs: bool) -> None:
    """(5,) against (5, 1) would give a 5 by 5 loss: the classic silent mistake."""
    targets = torch.linspace(-1, 1, 5, dtype=torch.float64)
    model = nn.Sequential(MLP.build(1), nn.Flatten(0)) if flat_outputs else MLP.build(1)
    posterior = kind(model, "regression")
    posterior.fit([(X, targets.view(shape))], 4, generator=torch.Generator().manual_seed(0), progress=False)
    plain = kind(MLP.build(1), "regression").fit([(X, targets[:, None])], 4, progress=False)
    assert posterior.likelihood.sigma_noise == pytest.approx(plain.likelihood.sigma_noise)
    assert posterior.predict(X).mean.shape == model(X).shape
