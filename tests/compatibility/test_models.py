"""Every model of the table, through one contract, against derivatives taken one by one and checked by differences."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import nullbayes as nb
from nullbayes.posteriors.promise import NATS
from support.compatibility_case import FORWARD, Case, call, moved
from support.compatibility_table import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning"),
    pytest.mark.filterwarnings("ignore::nullbayes.errors.CollapseWarning"),
]
N, S = 4, 5
CPU = torch.device("cpu")


def missing(case: Case) -> bool:
    return case.needs is not None and importlib.util.find_spec(case.needs) is None


def marked(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=pytest.mark.skipif(missing(case), reason=f"needs {case.needs}"))


OUTPUT, LOSS = nb.ProjectedPosterior, nb.LossProjectedPosterior
each_pair = pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(*marked(case).values, kind, id=f"{case.name}-{name}", marks=marked(case).marks)
        for case in CASES
        for kind, name in ((OUTPUT, "outputs"), (LOSS, "loss"))
        if kind is LOSS or not case.only_loss
    ],
)


# --- slow answers -----------------------------------------------------------------------------------------------------


def slow_losses(case: Case, outputs: Tensor, y: Tensor) -> Tensor:  # (n,)
    """The loss of each example, by torch's own."""
    if case.loss is not None:
        return case.loss(outputs, y)
    found = F.cross_entropy(
        outputs.mT if outputs.ndim == 3 else outputs, y, reduction="none",
        ignore_index=getattr(case.likelihood, "ignore_index", -100),
    )  # fmt: skip
    return found.reshape(len(y), -1).sum(1)


def slow_counted(case: Case, outputs: Tensor, y: Tensor) -> Tensor:  # (n, ...)
    """1 for the outputs that the targets speak of, 0 for the others."""
    if case.loss is not None or outputs.ndim == 2:
        return torch.ones_like(outputs)
    speaks = (y != getattr(case.likelihood, "ignore_index", -100)).to(outputs)
    return speaks.unsqueeze(-1 if outputs.ndim == 3 else 1).expand_as(outputs)


class Slow:
    """The model in float64 on a CPU, and its derivatives, one call of autograd each."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, case.build(torch.float64).to(CPU)
        for layer in self.model.modules():
            if isinstance(layer, nn.Embedding):  # neither hides a derivative
                layer.padding_idx, layer.sparse = None, False
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def outputs(self, x: Any) -> Tensor:
        with CPU, sdpa_kernel(SDPBackend.MATH):
            return self.case.outputs(call(self.model, x))

    def rows(self, values: Callable[[], Tensor]) -> Tensor:  # () -> (R,)  gives  (R, P)
        """The derivatives of some values, checked by differences along a few directions."""
        rows = torch.stack([self._gradient(value) for value in values()])
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            direction = torch.randn(rows.shape[1], generator=generator, dtype=torch.float64, device=CPU)
            torch.testing.assert_close(self.change(direction, values), rows @ direction, rtol=1e-4, atol=1e-6)
        return rows

    def change(self, direction: Tensor, values: Callable[[], Tensor]) -> Tensor:
        """How values change along a direction in the space of parameters, by differences."""
        step = 1e-5 * direction.double().to(CPU)
        return (self._moved(step, values) - self._moved(-step, values)) / 2e-5

    def _gradient(self, value: Tensor) -> Tensor:
        found = torch.autograd.grad(value, self.parameters, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(self.parameters, found, strict=True)]
        return torch.cat([part.flatten() for part in parts])

    @torch.no_grad()
    def _moved(self, step: Tensor, values: Callable[[], Tensor]) -> Tensor:
        before = [p.clone() for p in self.parameters]
        for parameter, part in zip(self.parameters, step.split([p.numel() for p in self.parameters]), strict=True):
            parameter += part.view_as(parameter)
        found = values()
        for parameter, old in zip(self.parameters, before, strict=True):
            parameter.copy_(old)
        return found

    def training_rows(self, kind: type, x: Any, y: Tensor) -> Tensor:
        """The rows that a posterior is to project on."""
        if kind is LOSS:
            return self.rows(lambda: slow_losses(self.case, self.outputs(x), y))
        return self.rows(lambda: ((out := self.outputs(x)) * slow_counted(self.case, out, y)).flatten())


def tolerance(case: Case) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-7} if case.dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-4}


def portrait(model: nn.Module) -> tuple[Any, ...]:
    """What a fit must not change."""
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [module.training for module in model.modules()],
        [(p.requires_grad, p.grad) for p in model.parameters()],
        [len(module._forward_hooks) for module in model.modules()],
        sorted(vars(model)),
    )


def fit(case: Case, kind: type, model: nn.Module) -> Any:
    posterior = kind(model, case.likelihood, prior_precision=4.0, **case.options)
    options = {"projector": nb.projectors.ExactDual(), "generator": torch.Generator().manual_seed(0)}
    return posterior.fit([case.data(N, 1)], S, progress=False, **options)


# --- the contract -----------------------------------------------------------------------------------------------------


@each_pair
def test_rows_and_predictions_are_those_of_slow_derivatives(case: Case, kind: type) -> None:
    slow = Slow(case)
    (x, y), (x_new, _) = (moved(case.data(n, seed, torch.float64), CPU) for n, seed in ((N, 1), (3, 2)))
    posterior = fit(case, kind, case.wrap(case.build()))
    rows = posterior._prepared.jacobian.dense()
    torch.testing.assert_close(rows.double().to(CPU), slow.training_rows(kind, x, y), **tolerance(case))

    own = slow.outputs(x_new).detach()
    change = torch.stack([slow.change(v, lambda: slow.outputs(x_new)) for v in posterior.directions]) / 2.0
    samples = own + change - change.mean(0)
    prediction = posterior.predict(case.data(3, 2)[0])
    if case.name == "one output (N,)":  # predictions have the shape that the model returns
        own, samples = own[:, 0], samples[..., 0]
    torch.testing.assert_close(prediction.samples.double().to(CPU), samples, **tolerance(case))
    assert prediction.mean.shape == prediction.variance.shape == own.shape

    own = slow.outputs(x).detach()
    speaks = slow_counted(case, own, y)
    found = posterior.predict(case.data(N, 1)[0]).samples.double().to(CPU)
    change = (found.view(-1, *own.shape) - own) * speaks
    if kind is OUTPUT:
        assert change.abs().max() <= (1e-6 if case.dtype == torch.float64 else 2e-2) * own.abs().max()
    assert posterior.check_fit([case.data(N, 1)]).n_data == N


@pytest.mark.cpu  # other devices have other kernels
@each_pair
def test_route_is_the_one_in_the_table(case: Case, kind: type) -> None:
    posterior = fit(case, kind, case.wrap(case.build()))
    route, *notes = posterior.report.route.split("; predictions by rows as well")
    assert route + "".join(notes) == case.rows
    assert bool(notes) == (case.predictions != FORWARD)


@each_pair
def test_scores_are_positive_files_reload_and_the_model_is_unchanged(case: Case, kind: type, tmp_path: Path) -> None:
    model = case.wrap(case.build())
    before = portrait(model)
    posterior, x = fit(case, kind, model), case.data(3, 2)[0]
    for score in ("max_variance", "sum_variance"):
        found = posterior.ood_score(x, score, mask="all")
        assert found.shape == (3,)
        assert (found > 0).all()
    posterior.save(tmp_path / "file")
    own = {"likelihood": case.likelihood} if callable(case.likelihood) else {}
    loaded = nb.load(tmp_path / "file", case.wrap(case.build()), **own, **case.options)
    torch.testing.assert_close(loaded.predict(x).samples, posterior.predict(x).samples)
    (state, *rest), (old_state, *old_rest) = portrait(model), before
    torch.testing.assert_close(state, old_state, rtol=0, atol=0)
    assert rest == old_rest


@pytest.mark.filterwarnings("ignore:The network fits its")
@each_pair
def test_a_default_fit_keeps_the_promise(case: Case, kind: type) -> None:
    """On its training data a posterior with nothing but defaults predicts as well as the network does."""
    posterior = kind(case.wrap(case.build()), case.likelihood, **case.options)
    posterior.fit([case.data(2 * N, 1)], 10, generator=torch.Generator().manual_seed(0), progress=False)
    check, promise = posterior.check_fit([case.data(2 * N, 1)]), posterior.report.promise
    assert check.nll_posterior - check.nll_model <= NATS + 1e-4
    assert check.accuracy_posterior == check.accuracy_model
    assert promise.kept
    assert promise.nll_posterior == pytest.approx(check.nll_posterior, rel=1e-3, abs=1e-5)  # eight examples: all seen
