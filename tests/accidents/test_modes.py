"""What a posterior says depends on no mode of torch or of the model, and it leaves all of them as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import nullbayes as nb
from nullbayes.errors import ModelError
from support.models import ATTENTION, BATCHNORM, CLASSIFICATION, MLP, Model

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.NullBayesWarning")

EXACT = nb.projectors.ExactDual()
each_network = pytest.mark.parametrize("case", [BATCHNORM, ATTENTION], ids=lambda case: case.name)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def fitted(model: nn.Module, data: tuple[Any, Tensor]) -> Any:
    return nb.ProjectedPosterior(model).fit([data], 4, projector=EXACT, generator=generator(), progress=False)


def put_in(posterior: Any, x: Any) -> Tensor:
    with posterior.sampled_parameters(1) as model, torch.no_grad():
        return model(x).clone()


def save_and_load(posterior: Any, x: Any, folder: Path) -> Tensor:
    posterior.save(folder / "file")
    return nb.load(folder / "file", posterior._network.model).predict(x).samples


# what can be asked of a fitted posterior, with one tensor for an answer
ASKED: dict[str, Callable[[Any, Any, Tensor, Path], Tensor]] = {
    "predict": lambda p, x, y, folder: p.predict(x).samples,
    "probabilities": lambda p, x, y, folder: p.predict(x).probs,
    "sampled": lambda p, x, y, folder: p.predict(x, pred_type="sampled").samples,
    "ood_score": lambda p, x, y, folder: p.ood_score(x),
    "functional_variance": lambda p, x, y, folder: p.functional_variance(x),
    "exact variance": lambda p, x, y, folder: p.functional_variance(x, exact=True),
    "check_fit": lambda p, x, y, folder: torch.tensor(p.check_fit([(x, y)]).nll_posterior, dtype=torch.float64),
    "fit": lambda p, x, y, folder: fitted(p._network.model, (x, y)).directions,
    "save and load": lambda p, x, y, folder: save_and_load(p, x, folder),
    "extend": lambda p, x, y, folder: p.extend(2, progress=False).directions,
    "nll": lambda p, x, y, folder: torch.tensor(p.optimize_prior_precision([(x, y)], "nll"), dtype=torch.float64),
}  # the last two change the posterior
each_question = pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)


# --- modes that do not matter -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "training alone": contextlib.nullcontext,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16),
    "single precision by default": lambda: default_dtype(torch.float32),
    "double precision by default": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
}


@pytest.mark.cpu  # bit by bit, which other devices do not promise
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@each_network
def test_no_mode_of_torch_or_of_the_model_changes_a_prediction(case: Model, mode: Any, tmp_path: Path) -> None:
    model, (x, y) = case.build().float(), CLASSIFICATION.data(case, n=3)
    x = x.float()  # autocast leaves double precision alone
    posterior = fitted(model, (x, y))
    plain = {name: ask(posterior, x, y, tmp_path) for name, ask in ASKED.items()}
    posterior = fitted(model.train(), (x, y))
    with mode():
        answers = {name: ask(posterior, x, y, tmp_path) for name, ask in ASKED.items()}
    for name, answer in answers.items():
        assert torch.equal(answer, plain[name]), name
        assert not answer.requires_grad, name


@each_question
def test_inputs_and_models_of_inference_mode_are_accepted(ask: Any, tmp_path: Path) -> None:
    model, (x, y) = MLP.build(), CLASSIFICATION.data(MLP, n=3)
    plain = ask(fitted(model, (x, y)), x, y, tmp_path)
    with torch.inference_mode():
        made, (x, y) = MLP.build(), CLASSIFICATION.data(MLP, n=3)
    assert torch.equal(ask(fitted(model, (x, y)), x, y, tmp_path), plain)
    assert torch.equal(ask(fitted(made, (x, y)), x, y, tmp_path), plain)


# --- modes of the model's own -----------------------------------------------------------------------------------------


class Casting(nn.Module):
    """Turns autocast on by itself, as models do that were trained with it."""

    def __init__(self, recurrent: bool, enabled: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body = nn.GRU(4, 6, batch_first=True) if recurrent else nn.Linear(4, 6)
            self.weight, self.head = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 3)
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.enabled):
            seen = self.body(x[:, None])[0][:, 0] if isinstance(self.body, nn.GRU) else self.body(x)
            return self.head(torch.tanh(seen @ self.weight)).float()


@pytest.mark.parametrize("recurrent", [False, True], ids=["layers", "recurrent"])
@each_question
def test_autocast_within_a_model_is_off_for_its_posterior(ask: Any, recurrent: bool, tmp_path: Path) -> None:
    x, y = CLASSIFICATION.data(MLP, n=6)
    asked = [ask(fitted(Casting(recurrent, on), (x.float(), y)), x.float(), y, tmp_path) for on in (True, False)]
    torch.testing.assert_close(*asked)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@each_question
def test_parametrizations_are_not_those_of_an_earlier_call(ask: Any, tmp_path: Path) -> None:
    """``parametrize.cached()`` would keep the tensors of other parameters, and hide their derivatives."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    x, y = CLASSIFICATION.data(MLP, n=6)
    plain = ask(fitted(model, (x, y)), x, y, tmp_path)
    with parametrize.cached():
        model(x)
        assert torch.equal(ask(fitted(model, (x, y)), x, y, tmp_path), plain)
        assert model[0].weight is model[0].weight  # cached again
    assert model[0].weight is not model[0].weight


def test_sampled_parameters_are_those_of_the_sample_also_where_parametrizations_are_cached() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    x, y = CLASSIFICATION.data(MLP, n=6)
    posterior, own = fitted(model, (x, y)), model(x)
    with posterior.sampled_parameters(0):
        sampled = model(x)
    with parametrize.cached():
        model(x)
        with posterior.sampled_parameters(0):
            assert torch.equal(model(x), sampled)
        assert torch.equal(model(x), own)
    assert not torch.equal(sampled, own)


# --- nothing is left behind -------------------------------------------------------------------------------------------


def state_of(model: nn.Module) -> dict[str, Any]:
    """Whatever a user could notice about a model."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    named = list(model.named_parameters())
    return {
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {(name, k): list(getattr(m, k).values()) for name, m in model.named_modules() for k in hooks},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "identity": {n: (id(p), p.data_ptr(), p._version) for n, p in named},
        "gradients": {n: p.grad if p.grad is None else (id(p.grad), p.grad.tolist()) for n, p in named},
        "requires_grad": {n: p.requires_grad for n, p in named},
        "hooks of tensors": {n: len(p._backward_hooks or ()) for n, p in named},
        "values": {name: t.tolist() for name, t in model.state_dict().items()},
    }


def state_of_torch() -> dict[str, Any]:
    return {
        "random": torch.get_rng_state().tolist(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "precision": (torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "kernels": (
            torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
        ),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


@each_question
@each_network
def test_a_query_changes_neither_the_model_nor_the_state_of_torch(case: Model, ask: Any, tmp_path: Path) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case, n=3)
    before = state_of_torch()
    posterior = fitted(model, (x, y))
    for i, module in enumerate(model.modules()):
        module.train(i % 2 == 0)
    calls: list[Any] = []
    list(model.modules())[1].register_forward_hook(lambda *args: calls.append(args))
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(i)) if i % 2 else None
        parameter.requires_grad_(i % 3 != 0)
    before |= state_of(model)
    ask(posterior, x, y, tmp_path)
    after = state_of_torch() | state_of(model)
    for what, value in before.items():
        assert after[what] == value, what


# --- a model that changed ---------------------------------------------------------------------------------------------

ASKED_OF_CHANGED = {
    **{name: ask for name, ask in ASKED.items() if name != "fit"},
    "sampled_parameters": lambda p, x, y, folder: put_in(p, x),
    "prepare": lambda p, x, y, folder: p.prepare([(x, y)], projector=EXACT),
    "marglik": lambda p, x, y, folder: p.optimize_prior_precision([(x, y)], "marglik"),
    "fit again": lambda p, x, y, folder: p.fit([(x, y)], 4, progress=False),  # forgets the earlier one
}
SENTENCE = r"^'{}' of the model has changed since the posterior was made: load the old parameters back, or make and fit"


def rounded(model: nn.Module) -> nn.Module:
    """The model with values that half precision has, too: moved there and back they are the same."""
    return model.load_state_dict({k: t.half().to(t.dtype) for k, t in model.state_dict().items()}) and model


def add(name: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.state_dict()[name].view(-1)[0].add_(1e-3)

    return change


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a parameter": (add("8.bias"), r"8\.bias"),
    "a parameter that does not vary": (add("0.weight"), r"0\.weight"),
    "a running statistic": (add("1.running_mean"), r"1\.running_mean"),
    "a count": (lambda model: model.state_dict()["1.num_batches_tracked"].add_(1), r"1\.num_batches_tracked"),
    "single precision": (lambda model: model.float(), r"[58]\..*"),
    "half precision": (lambda model: model.half(), r"[58]\..*"),
    "another device": (lambda model: model.to("meta"), r"[58]\..*"),
    "a layer less": (lambda model: model.__delitem__(8), r"8\..*"),
}


@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
def test_every_method_refuses_a_changed_model_with_the_same_message(change: Any, name: str, tmp_path: Path) -> None:
    model, (x, y) = rounded(BATCHNORM.build()), CLASSIFICATION.data(BATCHNORM, n=3)
    posterior = nb.ProjectedPosterior(model, parameters=["5.*", "8.*"])
    posterior.fit([(x, y)], 4, projector=EXACT, progress=False)
    change(model)
    for what, ask in ASKED_OF_CHANGED.items():
        with pytest.raises(ModelError, match=SENTENCE.format(name)):
            ask(posterior, x, y, tmp_path)
        assert not list(tmp_path.iterdir()), what


@each_question
def test_a_model_with_its_parameters_restored_works_again(ask: Any, tmp_path: Path) -> None:
    model, (x, y) = rounded(BATCHNORM.build()), CLASSIFICATION.data(BATCHNORM, n=3)
    plain, posterior = ask(fitted(model, (x, y)), x, y, tmp_path), fitted(model, (x, y))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for change, back in ((add("8.bias"), lambda: model.load_state_dict(state)), (nn.Module.half, model.double)):
        change(model)
        with pytest.raises(ModelError, match="has changed"):
            posterior.predict(x)
        back()
    torch.testing.assert_close(ask(posterior, x, y, tmp_path), plain, rtol=1e-12, atol=1e-12)
