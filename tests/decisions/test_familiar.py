"""A fit remembers features of training examples, and finds training inputs again whatever their targets are."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.decisions import familiar, remembering
from nullbayes.decisions.familiar import Familiar
from nullbayes.decisions.remembering import check_probe, remember
from nullbayes.errors import DataError, FileError
from nullbayes.hashing import checksums
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.features import OUTPUTS
from nullbayes.jacobian.network import Network
from support.drawing import randint, randn, seeded
from support.posterior_files import rewritten
from support.zoo import Wired


def network(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def data(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return randn(n, 4, generator=seeded(seed), dtype=dtype), randint(3, (n,), generator=seeded(seed))


def remembered(model: nn.Module, x: Tensor, y: Tensor, size: int = 100) -> Familiar:
    opened = Network(model, None, None)
    batches = [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]
    return remember(opened, Examples(batches, None, opened.device, dtype=opened.dtype))


# --- features ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 10, 39, 130, 1040])
def test_distances_are_those_of_a_loop(n: int, dtype: torch.dtype) -> None:
    model, (x, y), (new, _) = network().to(dtype), data(n, dtype=dtype), data(20, 1, dtype=dtype)
    found = remembered(model, x, y)
    with torch.no_grad():
        trained, others = (model[1](model[0](part)) for part in (x, new))
    wanted = []
    for one in others.double():
        unit = one / one.norm()
        near = sorted(float((unit - other / other.norm()).norm()) for other in trained.double())
        wanted.append([near[min(k, max(1, n // 20)) - 1] for k in (1, 10, 50)])
    assert found.layer == "2"
    assert found.features.shape == (n, 6)
    result = found.distances(others).exp()
    assert result.dtype == torch.float64
    assert torch.allclose(
        result, torch.tensor(wanted, dtype=torch.float64), atol=5e-4 if dtype == torch.float32 else 1e-9
    )


def test_many_inputs_at_a_time_change_no_distance() -> None:
    found = Familiar("2", nn.functional.normalize(randn(70, 5, generator=seeded())), torch.zeros(1, dtype=torch.int64))
    new = randn(2500, 5, generator=seeded(1))
    assert torch.allclose(
        found.distances(new), torch.cat([found.distances(part) for part in new.split(999)]), atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 130])  # fewer examples than the six features, as many, and more
def test_residual_is_the_length_outside_of_the_leading_half_of_the_directions(n: int, dtype: torch.dtype) -> None:
    model, (x, y), (new, _) = network().to(dtype), data(n, dtype=dtype), data(20, 1, dtype=dtype)
    with torch.no_grad():
        trained, others = (model[1](model[0](part)).double() for part in (x, new))
    unit, mean = others / others.norm(dim=1, keepdim=True), (trained / trained.norm(dim=1, keepdim=True)).mean(0)
    _, lengths, directions = torch.linalg.svd(trained / trained.norm(dim=1, keepdim=True) - mean, full_matrices=False)
    leading = directions[: int((lengths > 1e-4).sum()) // 2]
    wanted = (unit - mean - (unit - mean) @ leading.T @ leading).norm(dim=1)
    result = remembered(model, x, y).residual(others.to(dtype)).exp()
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, wanted.clamp_min(1e-7**0.5), rtol=0, atol=1e-5)


def test_principal_directions_of_wide_features_are_those_of_some_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    features = nn.functional.normalize(randn(90, 12, generator=seeded()))
    every, some = (Familiar("2", part, torch.zeros(1, dtype=torch.int64)) for part in (features, features[::9]))
    new = randn(5, 12, generator=seeded(1))
    assert not torch.allclose(every.residual(new), some.residual(new))
    monkeypatch.setattr(familiar, "_MOST_DIRECTIONS", 10)
    again = Familiar("2", features, torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(again.residual(new), some.residual(new))


def test_residual_tells_features_in_directions_that_training_never_had() -> None:
    plane = torch.cat([randn(200, 3, generator=seeded()), torch.zeros(200, 3)], 1)
    found = Familiar("2", nn.functional.normalize(plane), torch.zeros(1, dtype=torch.int64))
    beside = plane + torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 2.0])
    assert float(found.residual(beside).mean()) > float(found.residual(plane).mean()) + 0.2


def test_residual_of_features_that_are_all_alike_is_finite() -> None:
    alike = Familiar("2", torch.ones(9, 4) / 2, torch.zeros(1, dtype=torch.int64))
    assert torch.isfinite(alike.residual(randn(5, 4, generator=seeded()))).all()
    single = Familiar("2", torch.ones(9, 1), torch.zeros(1, dtype=torch.int64))
    assert torch.isfinite(single.residual(torch.tensor([[2.0], [-1.0]]))).all()


def test_a_training_example_has_the_smallest_distance() -> None:
    model, (x, y) = network(), data(60)
    found = remembered(model, x, y)
    near = found.distances(model[:2](x).detach())[:, 0]
    assert float(near.max()) < -7.0
    assert torch.isfinite(near).all()


def test_evenly_spaced_examples_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "_MOST_EXAMPLES", 30)
    model, (x, y) = network(), data(100)
    found = remembered(model, x, y, size=7)
    every = nn.functional.normalize(model[:2](x).detach())
    numbers = [int((every - row).abs().sum(1).argmin()) for row in found.features]
    assert len(set(numbers)) == 30
    assert numbers == sorted(numbers)
    assert {b - a for a, b in itertools.pairwise(numbers)} <= {3, 4}
    assert len(found.sums) == 100


def test_at_most_five_thousand_examples_and_not_too_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(5100)
    assert len(remembered(network(2), x, y, size=1700).features) == 5000
    monkeypatch.setattr(remembering, "_MOST_NUMBERS", 60)
    assert remembered(network(7), x[:90], y[:90]).features.shape == (8, 7)
    assert remembered(network(70), x[:90], y[:90]).features.shape == (1, 70)


def test_a_function_without_layers_is_remembered_by_its_outputs() -> None:
    model, (x, y) = nb.as_module(lambda p, x: x @ p["w"], {"w": torch.eye(4)[:, :3]}), data(50)
    found = remembered(model, x, y)
    assert found.layer == OUTPUTS
    assert torch.allclose(found.features, nn.functional.normalize(x[:, :3]))


def test_a_layer_whose_calls_depend_on_the_number_of_examples_does_not_stop_a_fit() -> None:
    """Of two examples, the positions before the examples look like examples."""
    model = Wired(lambda m, x: m.a(x.view(-1, 2, 2).transpose(0, 1)).sum(0), a=nn.Linear(2, 3))
    posterior = nb.baselines.MAP(model).fit(*data(30), progress=False)
    assert posterior._familiar.layer == OUTPUTS
    posterior.calibrate(data(60, 1)[0], kind="combined")
    assert torch.isfinite(posterior.p_value(data(5, 2)[0])).all()


# --- checksums --------------------------------------------------------------------------------------------------------


def test_training_inputs_are_found_whatever_their_labels() -> None:
    (x, y), (new, _) = data(60), data(40, 1)
    found = remembered(network(), x, y)
    mixed = torch.cat([new, x[10:20]])
    assert found.seen_in(checksums([mixed], 50)).tolist() == [False] * 40 + [True] * 10
    other = remembered(network(), x, (y + 1) % 3)
    assert torch.equal(found.sums, other.sums)


def test_training_inputs_are_found_whatever_the_order_of_a_mapping_and_the_width_of_tokens() -> None:
    """Tokenizers and tables of tokens name the same tensors in different orders, and numpy has tokens of 32 bits."""

    def forward(p: dict[str, Tensor], tokens: Tensor, amounts: Tensor) -> Tensor:
        return p["table"][tokens.long()].mean(1) * amounts

    generator = torch.Generator().manual_seed(0)
    model = nb.as_module(forward, {"table": randn(30, 3, generator=generator)})
    tokens, amounts = randint(30, (50, 4), generator=generator), randn(50, 1, generator=generator)
    posterior = nb.baselines.MAP(model).fit([{"tokens": tokens, "amounts": amounts, "labels": tokens[:, 0] % 3}])
    for same in (
        {"tokens": tokens, "amounts": amounts},
        {"amounts": amounts, "tokens": tokens},
        {"amounts": amounts.double().cpu().numpy(), "tokens": tokens.int().cpu().numpy()},
    ):
        with pytest.raises(DataError, match="50 of the 50 held-out inputs are training data"):
            posterior.calibrate(same, kind="energy")
    swapped = {"tokens": tokens.flip(1), "amounts": amounts}
    assert posterior.calibrate(swapped, kind="energy").calibration is not None


def test_a_small_change_makes_a_new_input() -> None:
    x, y = data(60)
    found = remembered(network(), x, y)
    assert not found.seen_in(checksums([torch.nextafter(x, x + 1)], 60)).any()


def test_the_share_of_inputs_that_repeat() -> None:
    x, y = data(60)
    assert remembered(network(), x, y).repeated == 0.0
    x[:6], x[6:12] = x[0].clone(), x[7].clone()
    assert remembered(network(), x, y).repeated == pytest.approx(0.2)


# --- files ------------------------------------------------------------------------------------------------------------


def saved(tmp_path: Path) -> tuple[Any, nn.Module, Path]:
    model, path = network(), tmp_path / "posterior.safetensors"
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(*data(12), 3, progress=False)
    posterior.save(path)
    return posterior, model, path


def test_a_file_keeps_what_was_remembered(tmp_path: Path) -> None:
    posterior, model, path = saved(tmp_path)
    found, wanted = nb.load(path, model)._familiar, posterior._familiar
    assert found.layer == wanted.layer == "2"
    assert torch.equal(found.features, wanted.features)
    assert torch.equal(found.sums, wanted.sums)


CHANGES: dict[str, Any] = {
    "no features": lambda tensors, header: tensors.pop("familiar.features"),
    "no checksums": lambda tensors, header: tensors.pop("familiar.sums"),
    "flat features": lambda tensors, header: tensors.update({"familiar.features": torch.zeros(4)}),
    "no examples": lambda tensors, header: tensors.update({"familiar.features": torch.zeros(0, 6)}),
    "another type": lambda tensors, header: tensors.update({"familiar.features": torch.zeros(4, 6).double()}),
    "NaN": lambda tensors, header: tensors["familiar.features"][0].fill_(torch.nan),
    "checksums of floats": lambda tensors, header: tensors.update({"familiar.sums": torch.zeros(4)}),
    "another layer": lambda tensors, header: header.update(familiar="encoder"),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", CHANGES)
def test_an_altered_file_is_refused(name: str, tmp_path: Path) -> None:
    _, model, path = saved(tmp_path)
    rewritten(path, CHANGES[name])
    with pytest.raises(FileError, match="fit and save again"):
        nb.load(path, model)


# --- the probe of a file ----------------------------------------------------------------------------------------------


def test_a_probe_allows_what_rounding_of_another_machine_does_where_large_numbers_cancel() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)), 3e5 + randn(40, 4, generator=seeded())
    with torch.no_grad():
        model[0].bias -= 3e5 * model[0].weight.sum(1)  # the first layer centres its inputs
    opened = Network(model, None, None)
    found = remember(opened, Examples([(x, x[:, :1])], None, opened.device, dtype=opened.dtype)).probe
    precise = copy.deepcopy(model).double()(x[:: len(x) // 4][:4].double()).float()
    other = dataclasses.replace(found, outputs=precise.detach().cpu())
    assert (other.outputs - found.outputs).abs().max() > 3e-3 * (found.outputs.max() - found.outputs.min())
    check_probe(other, opened)
    with pytest.raises(FileError, match="computes something else"):
        check_probe(dataclasses.replace(found, outputs=-10 * found.outputs), opened)
