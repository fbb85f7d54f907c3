"""Inputs of any form reach the network as it takes them, or are refused with what to pass instead."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import DataError, InputError
from nullbayes.jacobian.data import Examples
from support.drawing import randint, randn
from support.models import CLASSIFICATION, MLP, batches

DEVICE = torch.get_default_device()
N = 11
X, Y = CLASSIFICATION.data(n=N)
PARTS = batches(X, Y, (4, 4, 3))


# --- inputs in a form that the network does not take -----------------------------------------------------------------


def test_one_example_alone_is_told_to_be_passed_with_its_dimension_and_nothing_else_is() -> None:
    torch.manual_seed(0)
    x = randn(20, 6, generator=torch.Generator().manual_seed(0))
    for outputs in (2, 6):  # the second would take the numbers of an example for six of them
        posterior = nb.ProjectedPosterior(
            nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, outputs)), "regression"
        )
        posterior.fit(x, x[:, :outputs], 2, progress=False)
        with pytest.raises(InputError, match=r"\(n,\) .*\(n, 6\) .*x\[None\]"):
            posterior.predict(x[0])
        for other in (x[0, :4], x[:, :4], x[:4].T):
            with pytest.raises(InputError, match=r"\(n, 6\).*Pass inputs of that form\.$"):
                posterior.predict(other)
        assert posterior.predict(x[0][None]).mean.shape == (1, outputs)


class OfDict(nn.Module):
    """Takes one dict, as some do, or a part of it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(30, 8), nn.Linear(8, 3)

    def forward(self, batch: Any) -> Tensor:
        return self.head(torch.tanh(self.words(batch["input_ids"]).mean(1)))


class ByName(OfDict):
    def forward(self, input_ids: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward({"input_ids": input_ids}) * scale


IDS = randint(30, (N, 4), generator=torch.Generator().manual_seed(0))


def test_a_network_that_takes_one_dict_is_told_what_to_pass_and_that_works() -> None:
    batch = {"input_ids": IDS, "length": torch.full((N,), 4), "labels": Y}
    for model, inputs in ((OfDict(), ({"input_ids": IDS, "length": batch["length"]},)), (ByName(), {"input_ids": IDS})):
        with pytest.raises(InputError, match="batch_fn=lambda batch") as refused:
            nb.ProjectedPosterior(model).fit([batch], 2, progress=False)
        advised = re.search(r"batch_fn=(lambda batch: .*, batch\['labels'\]\))", str(refused.value))
        assert advised
        posterior = nb.ProjectedPosterior(model, batch_fn=eval(advised[1]), prior_precision=1.0)
        posterior.fit([batch], 2, progress=False)
        torch.testing.assert_close(posterior.predict(inputs).mean, posterior.predict([batch]).mean)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU does not survive an index that is out of range")
@pytest.mark.parametrize("token", [30, -1])
def test_a_token_outside_of_the_vocabulary_is_named_with_its_table(token: int) -> None:
    strange = IDS.clone()
    strange[3, 2] = token
    posterior = nb.ProjectedPosterior(ByName(), prior_precision=1.0).fit(IDS, Y, 2, progress=False)
    message = rf"'words' for line {token}, and it has the lines 0 to 29.*as in training"
    for ask in (lambda: posterior.predict(strange), lambda: posterior.predict(strange[3:4])):
        with pytest.raises(InputError, match=message):
            ask()
    with pytest.raises(InputError, match=message):
        nb.ProjectedPosterior(ByName()).fit(strange, Y, 2, progress=False)
    assert not any(module._forward_pre_hooks for module in posterior._network.module.modules())
    assert posterior.predict(IDS).mean.shape == (N, 3)


@pytest.mark.cpu  # a GPU does not survive a bad index
def test_an_index_error_of_another_kind_is_left_as_it_is() -> None:
    model = two_columns = nn.Sequential(nn.Linear(2, 3)).to(X)
    model.forward = lambda x: two_columns[0](x[:, [0, 9]])  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"first batch.*index 9 is out of bounds"):
        nb.ProjectedPosterior(model).fit(X, Y, 2, progress=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_advice() -> None:
    posterior = nb.ProjectedPosterior(MLP.build(), prior_precision=1.0).fit(X, Y, 2, progress=False)
    nested = torch.nested.nested_tensor([X[:3], X[:5]])
    for ask in (posterior.predict, lambda x: posterior.fit(x, Y[:2]), lambda x: posterior.fit([(x, Y[:2])])):
        with pytest.raises(DataError, match=r"nested tensor.*torch.nested.to_padded_tensor\(x, 0.0\)"):
            ask(nested)


# --- batches of Hugging Face ------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Takes what a tokenizer gives, and a switch that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 5), nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.tensor(0.7))  # which no rule knows: its column goes the plain way

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None, mode: str = "mean"
    ) -> Tensor:
        assert token_type_ids is None
        h = self.gain * self.words(input_ids) * attention_mask[..., None]
        return self.head(h.sum(1) / attention_mask.sum(1, keepdim=True) if mode == "mean" else h.sum(1))


def tokens() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = randint(9, (N, 6), generator=generator)
    mask = (torch.arange(6) < randint(6, (N, 1), generator=generator) + 1).long()
    return [{"input_ids": ids[a:b], "attention_mask": mask[a:b], "labels": Y[a:b]} for a, b in ((0, 4), (4, 8), (8, N))]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().double()


def whole(parts: list[Any]) -> dict[str, Tensor]:
    return {key: torch.cat([part[key] for part in parts]) for key in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("kind", ["BatchEncoding", "BatchFeature"])
def test_batches_of_transformers_are_read(kind: str) -> None:
    make = getattr(pytest.importorskip("transformers"), kind)
    loader = [make(batch) for batch in tokens()]
    x, y = Examples(loader, None, DEVICE).read(0, N)
    assert x.keys() == {"input_ids", "attention_mask"}
    assert all(torch.equal(x[key], value) for key, value in whole(tokens()).items())
    assert torch.equal(y, Y)
    model = classifier()
    posterior = nb.ProjectedPosterior(model).fit(loader, 3, progress=False)
    assert posterior.report.n_data == N
    for inputs in (loader, make(whole(tokens()))):
        change = posterior.predict(inputs).mean - model(**whole(tokens())).detach()
        assert float(change.abs().max()) < 0.1


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
def test_none_and_shared_values_are_passed_to_the_model() -> None:
    loader = [{**batch, "token_type_ids": None, "mode": "sum"} for batch in tokens()]
    nested = [({"x": {**batch, "labels": None}}, batch["labels"]) for batch in tokens()]
    model = classifier()
    for storage in ("recompute", "matrix_free"):
        rows, fixed = nb.OutputJacobian(model, loader, storage=storage), nb.OutputJacobian(Fixed(model), nested)
        torch.testing.assert_close(rows.dense(), fixed.dense())
    assert nb.LossProjectedPosterior(model).fit(loader, 2, progress=False).report.n_data == N


class Fixed(nn.Module):
    """The classifier with its switch set by hand, and named inputs one level down."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, Any]) -> Tensor:
        return self.model(x["input_ids"], x["attention_mask"], mode="sum")
