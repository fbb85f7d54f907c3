"""Model, data and likelihood are checked in one pass over the data, which adds up sums and keeps no outputs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import InputError
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.opening import OutputSums, open_data
from nullbayes.likelihoods import Bernoulli, Classification, Likelihood, Regression
from support.drawing import randint, randn
from support.models import CLASSIFICATION, MLP, REGRESSION, Task

N = 640  # ten times what is evaluated at a time on a CPU, and a few times what a GPU evaluates
GENERATOR = torch.Generator().manual_seed(0)
X = randn(N, 4, generator=GENERATOR, dtype=torch.float64)


def opened(likelihood: Any, y: Tensor, outputs: int = 3) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, outputs).double().to(X.device)
    return open_data(model, [(X, y)], likelihood, None, None, None)


def test_outputs_of_earlier_batches_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most, outputs_of = list[Any](), 0, Network.outputs

    def watched(self: Network, x: Any) -> Tensor:
        nonlocal most
        outputs = outputs_of(self, x)
        alive.append(weakref.ref(outputs))
        gc.collect(0)
        most = max(most, sum(ref() is not None for ref in alive))
        return outputs

    monkeypatch.setattr(Network, "outputs", watched)
    monkeypatch.setitem(nb.jacobian.opening._EXAMPLES_AT_A_TIME, X.device.type, 64)
    monkeypatch.setattr(nb.jacobian.opening, "_NUMBERS_KEPT", 64)
    opened("classification", randint(3, (N,), generator=GENERATOR))
    assert len(alive) > N // 64
    assert most <= 4  # that of the first examples, the current and the previous batch


def batches(outputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(outputs.split([7, 1, 30, 2]), targets.split([7, 1, 30, 2]), strict=True))


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
@pytest.mark.parametrize("likelihood", [Regression(), Classification(class_dim=-1), Bernoulli("multilabel")])
@pytest.mark.parametrize("kept", [1, 60, 10**6])
def test_sums_over_batches_are_those_of_all_data(
    likelihood: Likelihood, shape: tuple[int, ...], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nb.jacobian.opening, "_NUMBERS_KEPT", kept)
    outputs = 100.0 + randn(40, *shape, generator=GENERATOR, dtype=torch.float64)
    if isinstance(likelihood, Classification):
        targets = randint(3, (40, *shape[:-1]), generator=GENERATOR)
        targets[3:9] = likelihood.ignore_index
    else:
        targets = (randn(40, *shape, generator=GENERATOR, dtype=torch.float64) > 0).double()
    sums = OutputSums(likelihood, outputs[:1], targets[:1])
    for part in batches(outputs, targets):
        sums.see(None, *part)
    sums.add_waiting()
    counted = likelihood.counted(outputs, targets)
    assert sums.n_counted == (outputs.numel() if counted is None else int(counted.sum()))
    assert sums.spread() == pytest.approx(likelihood.spread(outputs, targets), rel=1e-10)
    wanted, found = likelihood.fitted(outputs, targets), sums.fitted()
    if isinstance(wanted, Regression):
        assert found.sigma_noise == pytest.approx(wanted.sigma_noise, rel=1e-10)
    else:
        assert found == wanted
    if sums.stds() is not None:
        torch.testing.assert_close(sums.stds(), outputs.std(0, unbiased=False))


@pytest.mark.parametrize("flat", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION], ids=["classes", "numbers"])
def test_inputs_and_targets_that_are_swapped_are_told_so(task: Task, flat: bool) -> None:
    x, y = task.data(n=12)
    model = MLP.build(task.outputs)
    network = nn.Sequential(nn.Flatten(), model) if flat else model
    with pytest.raises(InputError, match=r"takes the targets in their place: if they were swapped, pass \(inputs"):
        nb.OutputJacobian(network, [(y, x)], task.likelihood)
    with pytest.raises(InputError) as other:
        nb.OutputJacobian(network, [(x[:, :1], y)], task.likelihood)
    assert "in their place" not in str(other.value)


def test_inputs_of_as_many_numbers_as_targets_are_not_said_to_be_swapped() -> None:
    numbers = randn(12, 4, generator=GENERATOR).float()
    with pytest.raises(InputError, match="Whole numbers may have to be converted"):
        nb.OutputJacobian(nn.Linear(4, 4), [(numbers.byte(), numbers)], "regression")
    with pytest.raises(InputError) as other:  # which lack the dimension of the one input
        nb.OutputJacobian(nn.Linear(1, 1), [(numbers[:, 0], numbers[:, :1])], "regression")
    assert "in their place" not in str(other.value)


def test_bytes_of_images_are_not_said_to_be_swapped_where_a_network_takes_targets_of_another_size() -> None:
    twice = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Upsample(scale_factor=2), nn.Conv2d(2, 1, 1))
    small, large = (randn(6, 1, side, side, generator=GENERATOR).float() for side in (4, 8))
    with pytest.raises(InputError, match="Whole numbers may have to be converted"):
        nb.OutputJacobian(twice, [(small.byte(), large)], "regression")


def test_labels_to_be_ignored_are_not_tried_as_inputs() -> None:
    """On a GPU, an index below zero stops the process from computing anything more."""
    seen: list[int] = []

    class Tokens(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(int(x.min()))
            return super().forward(x)

    x = randn(12, 4, generator=GENERATOR).float().abs()
    with pytest.raises(InputError):
        nb.OutputJacobian(Tokens(9, 3), [(x, torch.full((12,), -100))])
    assert min(seen) >= 0
