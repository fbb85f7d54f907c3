"""Kronecker factors against those of a loop over examples, written out."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nullbayes.baselines import DiagonalLaplace, KroneckerLaplace
from nullbayes.errors import ModelError
from support.models import BATCHNORM, BINARY, CLASSIFICATION, MLP, MODELS, MULTILABEL, REGRESSION, Model, Task
from support.slow_answers import jacobian

CNN, KEYWORDS, NAMED, TIED, ODD = (
    MODELS[name] for name in ("cnn", "keyword calls", "named inputs", "tied weights", "odd convolutions")
)
ALPHA = 0.6

pytestmark = pytest.mark.skipif(importlib.util.find_spec("curvlinops") is None, reason="needs curvlinops")

each_task = pytest.mark.parametrize(
    "task", [CLASSIFICATION, BINARY, MULTILABEL, REGRESSION], ids=lambda task: task.name
)


def fit(task: Task, case: Model, **settings: Any) -> KroneckerLaplace:
    posterior = KroneckerLaplace(case.build(task.outputs), task.likelihood, prior_precision=ALPHA, **settings)
    return posterior.fit([task.data(case, 6)], 5, progress=False)


def hessian_roots(outputs: Tensor, targets: Tensor, task: Task) -> Tensor:
    """Roots of the Hessians of the loss in the outputs, by eigenvectors: (n, O, O)."""
    found = []
    for f, y in zip(outputs, targets, strict=True):
        values, vectors = torch.linalg.eigh(torch.autograd.functional.hessian(lambda f, y=y: task.loss(f, y), f))
        found.append(torch.diag(values.clamp_min(0).sqrt()) @ vectors.T)
    return torch.stack(found)


def dense(model: nn.Sequential, x: Tensor, y: Tensor, task: Task) -> Tensor:
    """The block diagonal matrix of Kronecker products, layer by layer: positions of a convolution are examples."""
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    h = x
    for i, layer in enumerate(model):
        inputs[i] = h
        h = layer(h)
        outputs[i] = h
    roots = hessian_roots(h.detach(), y, task)
    blocks = []
    for i, layer in enumerate(model):
        if not isinstance(layer, (nn.Linear, nn.Conv2d)):
            continue
        gradients = [
            torch.autograd.grad((roots[:, o] * h).sum(), outputs[i], retain_graph=True)[0] for o in range(h.shape[1])
        ]
        a = inputs[i]
        if isinstance(layer, nn.Conv2d):
            a = nn.functional.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
            gradients = [g.flatten(2).mT for g in gradients]
        a, g = a.reshape(-1, a.shape[-1]), torch.cat([g.reshape(-1, g.shape[-1]) for g in gradients])
        left, right = g.T @ g, a.T @ a / len(a)
        blocks.append(torch.kron(left, right))
        if layer.bias is not None:
            blocks.append(left)
    return torch.block_diag(*blocks).detach()


@pytest.mark.parametrize("case", [MLP, CNN], ids=lambda case: case.name)
@each_task
def test_variances_match_the_dense_blocks(task: Task, case: Model) -> None:
    model, (x, y) = case.build(task.outputs), task.data(case, 6)
    new = case.inputs(4, torch.Generator().manual_seed(11))
    matrix, rows, posterior = dense(model, x, y, task), jacobian(model, new), fit(task, case)
    for alpha in (ALPHA, 9.0):
        posterior.prior_precision = alpha
        inverse = torch.linalg.inv(matrix + alpha * torch.eye(len(matrix), dtype=torch.float64))
        wanted = torch.einsum("nop,pq,noq->no", rows, inverse, rows)
        torch.testing.assert_close(posterior.functional_variance(new, exact=True), wanted, rtol=1e-8, atol=1e-10)
        logdet = float(torch.logdet(matrix + alpha * torch.eye(len(matrix), dtype=torch.float64)))
        assert posterior.curvature.log_determinant(alpha) == pytest.approx(logdet)


def test_a_single_example_makes_the_factors_exact() -> None:
    """With one example and one output, the product of the factors is the block of the Gauss-Newton matrix itself."""
    model, (x, y) = MLP.build(1), BINARY.data(MLP, 1)
    kronecker, diagonal = (
        kind(model, "binary", prior_precision=ALPHA).fit([(x, y)], 3, progress=False)
        for kind in (KroneckerLaplace, DiagonalLaplace)
    )
    matrix = torch.block_diag(*(torch.kron(f.left @ torch.diag(f.left_values) @ f.left.T,
                                           f.right @ torch.diag(f.right_values) @ f.right.T)
                                for f in sorted(kronecker.curvature.blocks, key=lambda f: f.column)))  # fmt: skip
    torch.testing.assert_close(matrix.diagonal(), diagonal.curvature.diagonal)


def test_inputs_may_be_named_and_frozen_layers_chosen() -> None:
    model = NAMED.build()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    posterior = KroneckerLaplace(model, parameters="head.*").fit([CLASSIFICATION.data(NAMED)], 3, progress=False)
    assert set(posterior.sample()) == {"head.weight", "head.bias"}
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("case", "advice"),
    [
        (BATCHNORM, "nn.Linear and nn.Conv2d only"),
        (KEYWORDS, "no Kronecker factors of this network"),
        (TIED, "two layers share a weight"),
        (ODD, "pads with other than zeros"),
    ],
)
def test_layers_without_kronecker_factors_are_refused(case: Model, advice: str) -> None:
    with pytest.raises(ModelError, match=advice):
        fit(CLASSIFICATION, case)


def test_without_curvlinops_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "curvlinops", None)
    with pytest.raises(ImportError, match=r"pip install 'nullbayes\[kronecker\]'"):
        fit(CLASSIFICATION, MLP)
