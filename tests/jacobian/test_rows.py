"""The rows of a network are its derivatives, however they are formed; and the network is left as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import LikelihoodError, ModelError, SettingsError
from nullbayes.limits import Storage
from nullbayes.linalg.held import HeldBlock, StreamedBlock
from support.drawing import randn
from support.models import BATCHNORM, CLASSIFICATION, CUSTOM, MLP, MODELS, TASKS, Model, Task, batches, call
from support.slow_answers import flat_parameters, gauss_newton, jacobian, loss_jacobian, with_parameters

each_model = pytest.mark.parametrize("case", MODELS.values(), ids=lambda case: case.name)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
each_storage = pytest.mark.parametrize("storage", ["recompute", "parts", "matrix_free", "kept", "factors", "host"])


def opened(kind: type, storage: str, *args: Any, **kwargs: Any) -> nb.Rows:
    if storage == "kept":
        return kind(*args, **kwargs).keep()
    if storage in ("factors", "host"):
        return kind(*args, **kwargs).stored(storage)
    if storage == "parts":  # an example at a time, however large the block
        rows = kind(*args, **kwargs)
        rows.working_bytes = 1
        return rows
    return kind(*args, storage=storage, **kwargs)


def check_against(rows: nb.Rows, wanted: Tensor, rows_per_example: int) -> None:
    """Everything that rows can do, against their entries."""
    m, p = wanted.shape
    generator = torch.Generator().manual_seed(7)
    right = randn(3, p, generator=generator, dtype=torch.float64)
    left = randn(2, m, generator=generator, dtype=torch.float64)
    assert (rows.n_rows, rows.n_columns, rows.rows_per_example) == (m, p, rows_per_example)
    torch.testing.assert_close(rows.dense(), wanted)
    torch.testing.assert_close(rows.mv(right), right @ wanted.T)
    torch.testing.assert_close(rows.rmv(left), left @ wanted)
    torch.testing.assert_close(rows.norms(right), (right @ wanted.T).norm(dim=1))
    torch.testing.assert_close(rows.block(0, m).gram(torch.float64), wanted @ wanted.T)
    pieces = list(rows.blocks(2 * rows_per_example))
    assert len(pieces) > 1
    for where, block in pieces:
        part = wanted[where]
        torch.testing.assert_close(block.dense(), part)
        torch.testing.assert_close(block.mv(right), right @ part.T)
        torch.testing.assert_close(block.rmv(left[:, where]), left[:, where] @ part)
        torch.testing.assert_close(block.gram(torch.float64), part @ part.T)


@each_storage
@each_model
def test_output_rows_are_the_derivatives_of_the_outputs(case: Model, storage: str) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case)
    rows = opened(nb.OutputJacobian, storage, model, [(x, y)])
    check_against(rows, jacobian(model, x).flatten(0, 1), rows_per_example=3)


@each_storage
@each_model
def test_loss_rows_are_the_gradients_of_the_losses(case: Model, storage: str) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case)
    rows = opened(nb.LossJacobian, storage, model, [(x, y)])
    check_against(rows, loss_jacobian(model, x, y, CLASSIFICATION), rows_per_example=1)


@each_task
def test_loss_rows_of_each_likelihood(task: Task) -> None:
    model, (x, y) = MLP.build(task.outputs), task.data()
    rows = nb.LossJacobian(model, [(x, y)], task.likelihood)
    check_against(rows, loss_jacobian(model, x, y, task), rows_per_example=1)


@each_model
def test_a_product_is_the_difference_quotient(case: Model) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case)
    rows = nb.OutputJacobian(model, [(x, y)])
    theta, h = flat_parameters(model), 1e-5
    v = randn(len(theta), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ahead, behind = (call(with_parameters(model, theta + s * h * v), x) for s in (1, -1))
    torch.testing.assert_close(
        rows.mv(v[None])[0], ((ahead - behind) / (2 * h)).detach().flatten(), rtol=1e-6, atol=1e-8
    )


@each_storage
@pytest.mark.parametrize("task", [t for t in TASKS if t is not CUSTOM], ids=lambda task: task.name)
@pytest.mark.parametrize("case", [MLP, BATCHNORM], ids=lambda case: case.name)
def test_scaled_rows_give_the_gauss_newton_matrix(case: Model, task: Task, storage: str) -> None:
    model, (x, y) = case.build(task.outputs), task.data(case)
    entries = opened(nb.OutputJacobian, storage, model, [(x, y)], task.likelihood, hessian=True).dense()
    torch.testing.assert_close(entries.T @ entries, gauss_newton(model, x, y, task))


def test_scaled_rows_need_a_likelihood_with_a_hessian() -> None:
    model, data = MLP.build(2), [CUSTOM.data()]
    with pytest.raises(LikelihoodError, match="hessian=True needs a built-in likelihood"):
        nb.OutputJacobian(model, data, CUSTOM.likelihood, hessian=True)
    assert nb.OutputJacobian(model, data, CUSTOM.likelihood).n_rows == 10


# --- which way they are formed ----------------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("kind", ["outputs", "scaled", "losses"])
def test_layers_are_used_where_they_can_be(case: Model, kind: str) -> None:
    model, data = case.build(), [CLASSIFICATION.data(case)]
    if kind == "losses":
        route = nb.LossJacobian(model, data).route
    else:
        route = nb.OutputJacobian(model, data, hessian=kind == "scaled").route
    covered = {"layers": route == "by layers (100% of the parameters)", "plain": route == "vmap(jacrev)"}
    assert covered.get(case.route, route.startswith("by layers") and "100%" not in route), route


def test_share_by_layers_is_that_of_the_parameters() -> None:
    model = MODELS["called twice"].build()  # called twice: 30 of 73 are in the layer that is
    assert nb.OutputJacobian(model, [CLASSIFICATION.data()]).route == "by layers (59% of the parameters)"
    assert nb.OutputJacobian(model, [CLASSIFICATION.data()], storage="matrix_free").route == "jvp and vjp"


def test_unknown_storage_is_refused() -> None:
    with pytest.raises(SettingsError, match=r'"recompute" or "matrix_free".*keep\(\)'):
        nb.OutputJacobian(MLP.build(), [CLASSIFICATION.data()], storage="disk")


@each_model
def test_kept_bytes_match_the_tensors_held(case: Model) -> None:
    rows = nb.OutputJacobian(case.build(), [CLASSIFICATION.data(case)])
    kept = rows.keep()
    tensors = [value for piece in kept.pieces for value in vars(piece).values() if isinstance(value, Tensor)]
    assert rows.costs().held_bytes == 8 * sum(t.numel() for t in tensors)
    assert kept.costs().held_bytes == 0
    assert kept.keep() is kept
    assert kept.costs().gram_flops == rows.costs().gram_flops
    assert kept.costs().product_flops == rows.costs().product_flops


# --- which data -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(7,), (3, 3, 1), (1, 2, 4), (1,) * 7], ids=str)
@each_storage
def test_no_example_is_dropped_however_batches_are_cut(sizes: tuple[int, ...], storage: str) -> None:
    model, (x, y) = MLP.build(), CLASSIFICATION.data(n=7)
    rows = opened(nb.OutputJacobian, storage, model, batches(x, y, sizes))
    torch.testing.assert_close(rows.dense(), jacobian(model, x).flatten(0, 1))


@each_storage
@pytest.mark.parametrize("working_bytes", [1, 10_000, 40_000])
def test_rows_do_not_depend_on_how_much_is_formed_at_a_time(storage: str, working_bytes: int) -> None:
    model, (x, y) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM, n=7)
    formed: Any = nb.OutputJacobian(model, [(x, y)], storage="matrix_free" if storage == "matrix_free" else "recompute")
    formed.working_bytes = working_bytes
    rows = formed.keep() if storage == "kept" else formed
    check_against(rows, jacobian(model, x).flatten(0, 1), rows_per_example=3)


@pytest.mark.parametrize("room", [1, 5000, 2**26])  # one row at a time, a few, all
@each_model
def test_gram_matrix_by_products_does_not_depend_on_how_much_is_held(case: Model, room: int) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case)
    wanted = jacobian(model, x).flatten(0, 1)
    rows = nb.OutputJacobian(model, [(x, y)], storage="matrix_free")
    rows.working_bytes = room
    gram = rows.block(3, 12).gram(torch.float64)
    torch.testing.assert_close(gram, gram.T, rtol=0, atol=1e-13 * float(gram.max()))
    torch.testing.assert_close(gram, wanted[3:12] @ wanted[3:12].T)


@pytest.mark.parametrize("room", [1, 1_000, 3_000, 10**6])
def test_block_is_formed_in_as_many_parts_as_memory_asks_for(room: int) -> None:
    model, (x, y) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM, n=7)
    rows = nb.OutputJacobian(model, [(x, y)])
    rows.working_bytes = room
    wanted = jacobian(model, x).flatten(0, 1)
    assert isinstance(rows.block(0, 21), HeldBlock if room >= 2 * rows.costs().held_bytes else StreamedBlock)
    assert isinstance(rows.block(3, 6), HeldBlock)  # a single example is never cut
    for start, stop in [(0, 21), (3, 21), (6, 15), (3, 6)]:
        block, part = rows.block(start, stop), wanted[start:stop]
        torch.testing.assert_close(block.dense(), part)
        torch.testing.assert_close(block.gram(torch.float64), part @ part.T)


@pytest.mark.parametrize("storage", ["device", "host", "recompute", "matrix_free", "half"])
@each_model
def test_rows_are_the_same_wherever_a_plan_wants_them(case: Model, storage: Storage) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case)
    rows = nb.OutputJacobian(model, [(x, y)])
    stored, wanted = rows.stored(storage), jacobian(model, x).flatten(0, 1)
    assert rows.storage == "recompute"  # itself left as it was
    lengths = wanted.norm(dim=1)
    within = 1e-12 if storage != "half" else 2.0**-11
    assert ((stored.dense() - wanted).norm(dim=1) <= within * lengths + 1e-300).all()
    gram = stored.block(0, 15).gram(torch.float64)
    assert ((gram - wanted @ wanted.T).abs() <= 2.1 * within * lengths * lengths[:, None] + 1e-300).all()
    assert stored.reference is (rows if storage == "half" else stored)
    assert rows.costs("half").held_bytes <= rows.costs().held_bytes


def test_rows_of_a_single_example_work() -> None:
    model, (x, y) = MLP.build(), CLASSIFICATION.data(n=1)
    torch.testing.assert_close(nb.OutputJacobian(model, [(x, y)]).dense(), jacobian(model, x)[0])


class Options(nn.Module):
    """Takes, beside its inputs, a number for all examples and a switch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3).double(), nn.LayerNorm(3).double()

    def forward(self, x: Tensor, scale: Tensor, *, squash: bool) -> Tensor:
        assert scale.ndim == 0
        h = self.norm(self.layer(x)) * scale
        return h.tanh() if squash else h


def test_options_in_a_batch_are_passed_to_the_model() -> None:
    model, (x, y) = Options(), CLASSIFICATION.data()
    options = {"scale": torch.tensor(2.0, dtype=torch.float64), "squash": True}
    data = [{"x": cut_x, **options, "labels": cut_y} for cut_x, cut_y in batches(x, y, (3, 2))]
    wanted = jacobian(model, {"x": x, **options})
    torch.testing.assert_close(nb.OutputJacobian(model, data).dense(), wanted.flatten(0, 1))
    posterior = nb.ProjectedPosterior(model).fit(data, 4, progress=False)
    assert posterior.predict({"x": x, **options}).samples.shape == (4, 5, 3)
    assert posterior.functional_variance({"x": x, **options}, exact=True).shape == (5, 3)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_rows_do_not_depend_on_the_grad_mode_around_them(grad: Any) -> None:
    model, (x, y) = MLP.build(), CLASSIFICATION.data()
    with grad():
        rows = nb.OutputJacobian(model, batches(x, y, (2, 3)))
        entries = rows.dense()
    assert rows.route.startswith("by layers")
    assert not entries.requires_grad
    torch.testing.assert_close(entries.clone(), jacobian(model, x).flatten(0, 1))


class Locked(nn.Module):
    """A network that cannot be copied: it holds a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.lock = MLP.build(), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.layers(x)


def test_a_network_that_cannot_be_copied_is_used_as_it_is() -> None:
    model, (x, y) = Locked().eval(), CLASSIFICATION.data()
    before = portrait(model)
    rows = nb.OutputJacobian(model, [(x, y)])
    torch.testing.assert_close(rows.dense(), jacobian(MLP.build(), x).flatten(0, 1))
    after = portrait(model)
    torch.testing.assert_close(after.pop("values"), before.pop("values"), rtol=0, atol=0)
    assert after == before
    with pytest.raises(ModelError, match=r"cannot be copied.*call model.eval\(\)"):
        nb.OutputJacobian(model.train(), [(x, y)])
    posterior = nb.ProjectedPosterior(model.eval()).fit([(x, y)], 2, progress=False)
    model.train()
    with pytest.raises(ModelError, match=r"must stay as it was fitted: call model.eval\(\)"):
        posterior.predict(x)
    model.eval()
    assert posterior.predict(x).mean.shape == (len(x), 3)


# --- which parameters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ("middle.bias", ["middle.bias"]),
        ("head.*", ["head.weight", "head.bias"]),
        ("*.bias", ["body.bias", "middle.bias", "head.bias"]),
        (["head.bias", "middle.*"], ["middle.weight", "middle.bias", "head.bias"]),
        (lambda name, parameter: parameter.ndim == 2, ["body.weight", "middle.weight", "head.weight"]),
        (None, ["middle.bias", "head.weight", "head.bias"]),
    ],
    ids=["name", "last layer", "glob", "list", "predicate", "what requires gradients"],
)
@each_storage
def test_parameters_choose_the_columns(parameters: Any, names: list[str], storage: str) -> None:
    model, (x, y) = MODELS["frozen"].build(), CLASSIFICATION.data()  # frozen
    rows = opened(nb.OutputJacobian, storage, model, [(x, y)], parameters=parameters)
    check_against(rows, jacobian(model, x, names).flatten(0, 1), rows_per_example=3)


@pytest.mark.parametrize("parameters", ["words.weight", "left.bias", lambda name, _: "weight" in name])
def test_parameters_can_be_chosen_in_layers_with_and_without_rules(parameters: Any) -> None:
    case = MODELS["named inputs"]  # named inputs
    model, (x, y) = case.build(), CLASSIFICATION.data(case)
    names = [n for n, _ in model.named_parameters() if n == parameters or (callable(parameters) and "weight" in n)]
    rows = nb.OutputJacobian(model, [(x, y)], parameters=parameters)
    torch.testing.assert_close(rows.dense(), jacobian(model, x, names).flatten(0, 1))


# --- the model afterwards ---------------------------------------------------------------------------------------------


def portrait(model: nn.Module) -> dict[str, Any]:
    """What a user could see of a model."""
    return {
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "attributes": [(name, sorted(vars(module))) for name, module in model.named_modules()],
        "hooks": [
            (name, key, len(value))
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key.endswith("hooks")
        ],
        "identities": [(n, id(t)) for n, t in model.named_parameters(remove_duplicate=False)],
        "gradients": [(n, p.grad, p.requires_grad) for n, p in model.named_parameters()],
        "values": {n: t.clone() for n, t in model.state_dict().items()},
    }


@pytest.mark.parametrize("enabled", [False, True])
def test_the_switches_of_torch_are_left_as_they_were(enabled: bool) -> None:
    torch.backends.mha.set_fastpath_enabled(enabled)
    flash, grad = torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled()
    try:
        nb.OutputJacobian(MLP.build(), [CLASSIFICATION.data()]).dense()
        assert torch.backends.mha.get_fastpath_enabled() is enabled
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled()) == (flash, grad)


@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
@each_model
def test_the_model_is_left_as_it_was(case: Model, mode: str) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case)
    model.train(mode == "train")
    if mode == "mixed":
        next(m for m in reversed(list(model.modules())) if m is not model or isinstance(model, nn.Linear)).train()
    model.register_forward_hook(lambda *_: None)
    before = portrait(model)
    for kind in (nb.OutputJacobian, nb.LossJacobian):
        rows = kind(model, [(x, y)])
        rows.keep()
        rows.mv(torch.zeros(1, rows.n_columns, dtype=torch.float64))
        kind(model, [(x, y)], storage="matrix_free").dense()
    after = portrait(model)
    torch.testing.assert_close(after.pop("values"), before.pop("values"), rtol=0, atol=0)
    assert after == before
