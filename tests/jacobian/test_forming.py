"""How rows are formed: all outputs in one pass, and as many examples at a time as there is memory for."""

from __future__ import annotations

import pytest
import torch

import nullbayes as nb
from nullbayes.jacobian.routes import gradients, many_gradients
from nullbayes.jacobian.row_builder import RowBuilder
from support.layer_table import randn
from support.models import BATCHNORM, CLASSIFICATION, MODELS, Model


@pytest.mark.parametrize("at_once", [1, 2, 3, 8])
def test_several_outputs_in_one_backward_pass(at_once: int) -> None:
    model, (x, _) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM)
    tensors = [x.clone().requires_grad_()]
    for layer in model:
        tensors.append(layer(tensors[-1].clone()))
    values, unused = tensors.pop().sum(0), randn(2, 3).requires_grad_()
    one_by_one = [gradients(value, [*tensors, unused]) for value in values]
    at_once = many_gradients(values, [*tensors, unused], at_once)
    assert not at_once[-1].any()
    torch.testing.assert_close(at_once, [torch.stack(parts) for parts in zip(*one_by_one, strict=True)])


@pytest.mark.parametrize(
    "case", [case for case in MODELS.values() if case.route == "plain"], ids=lambda case: case.name
)
def test_the_bytes_of_plain_rows_include_three_copies_and_the_graph(case: Model) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case)
    rows = nb.OutputJacobian(model, [(x, y)])
    entries = 3 * rows.n_columns * 8  # three outputs, in float64
    assert rows._layers.example_bytes > 3 * entries
    assert nb.LossJacobian(model, [(x, y)])._layers.example_bytes < rows._layers.example_bytes


def test_forward_mode_needs_memory_for_what_passes_through_layers_alone() -> None:
    """Not for rows: inputs of 5 and 7 numbers, outputs of 7 and 3, and twice as much between the layers."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    data = [(randn(4, 5).float(), torch.tensor([0, 1, 2, 0]))]
    for kind in (nb.OutputJacobian, nb.LossJacobian):
        rows = kind(model, data)
        assert rows._layers.pushed_bytes == 4 * (5 + 7 + 3 * (7 + 3))
        rows.working_bytes = 6 * 10 * rows._layers.pushed_bytes
        assert rows.examples_within(6) == 10
        assert rows.examples_within(1000) == 1


def test_operations_of_layers_are_counted_forwards_and_for_each_output_backwards() -> None:
    """A convolution with nine positions of 2 x 3 x 2 x 2 weights, and a linear layer of 18 inputs and 4 outputs."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(18, 4))
    data, forward = [(randn(5, 3, 4, 4).float(), torch.tensor([0, 1, 2, 3, 0]))], 2 * (9 * 24 + 72)
    assert nb.OutputJacobian(model, data).costs().example_flops == forward * (1 + 2 * 4)
    assert nb.LossJacobian(model, data).costs("recompute").example_flops == forward * (1 + 2)


def test_rows_are_formed_in_chunks_of_even_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM, n=7)
    rows, sizes = nb.OutputJacobian(model, [(x, y)]), []
    form = RowBuilder.form
    monkeypatch.setattr(RowBuilder, "form", lambda self, x, y: sizes.append(len(y)) or form(self, x, y))
    rows.working_bytes = 6 * rows._layers.example_bytes  # six would fit, and leave one
    rows.keep()
    assert sizes == [4, 3]


@pytest.mark.parametrize(("storage", "share", "n_chunks"), [("device", 1, 2), ("half", 2, 3), ("recompute", 4, 7)])
def test_chunks_are_counted_as_they_are_formed(
    storage: str, share: int, n_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (x, y) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM, n=7)
    rows, sizes = nb.OutputJacobian(model, [(x, y)]), []
    working = rows.working_bytes = 6 * rows._layers.example_bytes
    assert rows.costs(storage).forming_chunks(working) == n_chunks
    form = RowBuilder.form
    monkeypatch.setattr(RowBuilder, "form", lambda self, x, y: sizes.append(len(y)) or form(self, x, y))
    rows._form(0, 7, working // share)
    assert len(sizes) == n_chunks
