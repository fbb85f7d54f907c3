"""The library fits both large networks as it fits others: samples keep outputs or losses, to first order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import nullbayes as nb
from nullbayes.experiments.swin import Swin
from nullbayes.experiments.van import VAN

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning"),  # nothing was trained
]


def van() -> tuple[nn.Module, Tensor, Tensor, str, Any]:
    model = VAN(3, (1, 1), (4, 6), (2, 2))
    x, y = torch.randn(7, 3, 16, 16), (torch.rand(7, 3) > 0.5).float()
    model.train()(3 + 2 * torch.randn(20, 3, 16, 16))  # running statistics that are not those of the start
    return model.eval(), x, y, "multilabel", lambda f, y: binary_cross_entropy_with_logits(f, y, reduction="sum")


def swin() -> tuple[nn.Module, Tensor, Tensor, str, Any]:
    model = Swin(3, 16, 2, 4, (2, 1), (1, 2))
    return model.eval(), torch.randn(7, 3, 16, 16), torch.arange(7) % 3, "classification", cross_entropy


@pytest.mark.parametrize("make", [van, swin])
@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
def test_samples_keep_what_was_projected_out(make: Any, kind: Any) -> None:
    torch.manual_seed(0)
    model, x, y, likelihood, loss = make()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    posterior = kind(model, likelihood, prior_precision=1.0).fit([(x[:4], y[:4]), (x[4:], y[4:])], 2, progress=False)
    weights = list(model.parameters())
    rows = []
    for each, target in zip(x, y, strict=True):
        outputs = model(each[None])
        kept = outputs[0] if kind is nb.ProjectedPosterior else [loss(outputs, target[None])]
        for value in kept:
            gradient = torch.autograd.grad(value, weights, retain_graph=True)
            rows.append(torch.cat([part.flatten() for part in gradient]))
    matrix = torch.stack(rows).double()
    drawn = posterior.sample(2)
    moved = torch.cat([(drawn[name] - w).flatten(1) for name, w in model.named_parameters()], 1).detach().double()
    assert posterior.report.n_rows == len(matrix)
    change = (moved @ matrix.T).norm() / (moved.norm(dim=1).mean() * matrix.norm())
    assert moved.norm() > 1
    assert change < 1e-4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
