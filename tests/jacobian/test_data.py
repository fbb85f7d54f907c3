"""The data are read in order, all of them, the same each time; what cannot be is refused with a way out."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import nullbayes as nb
from nullbayes.errors import DataError, NullBayesError
from nullbayes.jacobian.batches import inputs_of, n_examples
from nullbayes.jacobian.data import Examples
from support.drawing import randperm
from support.models import CLASSIFICATION, MLP, MODELS, REGRESSION, batches
from support.slow_answers import jacobian

X, Y = CLASSIFICATION.data(n=7)
DATASET = TensorDataset(X, Y)
CPU = torch.get_default_device()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(DATASET)


class Reread:
    """An iterable that a function makes anew, told how often it was read before."""

    def __init__(self, function: Callable[[int], list[Any]]) -> None:
        self.function, self.read = function, 0

    def __iter__(self) -> Iterator[Any]:
        self.read += 1
        return iter(self.function(self.read - 1))


def shuffled(times: int) -> list[Any]:
    order = randperm(7, generator=torch.Generator().manual_seed(times))
    return batches(X[order], Y[order], (4, 3))


def augmented(times: int) -> list[Any]:
    return batches(X + 1e-3 * times, Y, (4, 3))


def relabelled(times: int) -> list[Any]:
    return batches(X, (Y + times) % 3, (4, 3))


def resized(times: int) -> list[Any]:
    return batches(X, Y, (4 - times, 3 + times))


def without(entry: float) -> Tensor:
    return torch.where(torch.arange(4) == 2, entry, X)


READABLE = {
    "loader": DataLoader(DATASET, batch_size=3),
    "loader of a subset": DataLoader(Subset(TensorDataset(torch.cat([X, X]), torch.cat([Y, Y])), range(7)), 3),
    "loader with a batch sampler": DataLoader(
        DATASET, batch_sampler=BatchSampler(SequentialSampler(DATASET), 3, False)
    ),
    "loader that drops nothing": DataLoader(DATASET, batch_size=7, drop_last=True),
    "loader of a stream": DataLoader(Stream(), batch_size=3),
    "loader without batches": DataLoader(batches(X, Y, (4, 3)), batch_size=None),
    "pair": (X, Y),
    "arrays": (X.cpu().numpy(), Y.cpu().numpy()),
    "arrays in batches": [(x.cpu().numpy(), y.cpu().numpy()) for x, y in batches(X, Y, (3, 4))],
    "dataset": DATASET,
    "list of pairs": batches(X, Y, (3, 4)),
    "list of lists": [[x, y] for x, y in batches(X, Y, (3, 4))],
    "own iterable": Reread(lambda _: batches(X, Y, (3, 4))),
    "mappings": [UserDict(input=x, labels=y) for x, y in batches(X, Y, (3, 4))],
}

REFUSED = {
    "shuffling loader": (DataLoader(DATASET, 3, shuffle=True), r"random order \(RandomSampler\).*shuffle=False"),
    "random subset": (DataLoader(DATASET, 3, sampler=SubsetRandomSampler(range(7))), "SubsetRandomSampler.*=False"),
    "weighted": (DataLoader(DATASET, 3, sampler=WeightedRandomSampler([1.0] * 7, 7)), "WeightedRandomSampler"),
    "random batch sampler": (
        DataLoader(DATASET, batch_sampler=BatchSampler(RandomSampler(DATASET), 3, False)),
        "random order.*shuffle=False",
    ),
    "dropped tail": (DataLoader(DATASET, batch_size=3, drop_last=True), "drops its last 1 examples.*drop_last=False"),
    "dropped by a batch sampler": (
        DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(DATASET), 4, True)),
        "drops its last 3 examples.*drop_last=False",
    ),
    "dropped from a stream": (DataLoader(Stream(), batch_size=3, drop_last=True), "drop_last=False"),
    "shuffles": (Reread(shuffled), "not the same when the loader is read a second time.*shuffle=False"),
    "augments": (Reread(augmented), "no random transforms"),
    "relabels": (Reread(relabelled), "Batch 0 is not the same"),
    "cuts otherwise": (Reread(resized), "Batch 0 is not the same"),
    "one-shot": ((pair for pair in batches(X, Y, (3, 4))), r"read only once.*list\(loader\)"),
    "shrinks": (Reread(lambda times: batches(X, Y, (3, 4))[times:]), "Batch 0 is not the same"),
    "empty": ([], "empty"),
    "empty loader": (DataLoader(TensorDataset(X[:0], Y[:0]), batch_size=2), "empty"),
    "empty batch": ([(X, Y), (X[:0], Y[:0])], "Batch 1 is empty"),
    "tensor": (X, r"not a Tensor.*\[\(x, y\)\]"),
    "three of them at once": ((X, X, Y), r"\[\(x, y\)\]"),
    "two batches in a tuple": (((X, Y), (X, Y)), r"\[\(x, y\)\]"),
    "mapping": ({"x": X, "labels": Y}, r"a dict with 'x', 'labels' is one batch: put it into a list, fit\(\[batch\]\)"),
    "string": ("train.csv", "not a str"),
    "number": (3, "not a int"),
    "inputs alone": ([X], "batch_fn=lambda batch"),
    "three of them": ([(X, Y, Y)], "batch_fn=lambda batch"),
    "mapping without labels": ([{"x": X}], "'labels'.*batch_fn"),
    "targets in a list": ([(X, Y.tolist())], "batch_fn=lambda batch"),
    "one target": ([(X, torch.tensor(1))], "one entry per example"),
    "too few targets": ([(X, Y[:5])], "Batch 0 holds 7 inputs but 5 targets"),
    "no tensor": ([("words", Y)], "no tensor"),
    "lengths that differ": ([((X, X[:3]), Y)], r"different lengths \[3, 7\]"),
    "shapes that differ": ([(X, Y), (X[:, :3], Y)], r"Batch 1.*shape \(3,\).*\(4,\): pad"),
    "NaN input": ([(X, Y), (without(torch.nan), Y)], r"Batch 1 holds NaN or Inf in its inputs, the first at example 0"),
    "infinite input": ([(without(torch.inf), Y)], "Batch 0 holds NaN or Inf"),
}  # fmt: skip


@pytest.mark.parametrize("loader", READABLE.values(), ids=READABLE)
def test_every_kind_of_loader_gives_the_same_rows(loader: Any) -> None:
    model = MLP.build()
    rows = nb.OutputJacobian(model, loader)
    torch.testing.assert_close(rows.dense(), jacobian(model, X).flatten(0, 1))


@pytest.mark.parametrize(("loader", "fragment"), REFUSED.values(), ids=REFUSED)
def test_unusable_data_are_refused(loader: Any, fragment: str) -> None:
    with pytest.raises(DataError, match=fragment) as caught:
        nb.OutputJacobian(MLP.build(), loader)
    assert isinstance(caught.value, NullBayesError | ValueError)


@pytest.mark.parametrize("entry", [torch.nan, -torch.inf])
def test_targets_that_are_not_finite_are_refused(entry: float) -> None:
    x, y = REGRESSION.data()
    y[3, 1] = entry
    with pytest.raises(DataError, match="in its targets, the first at example 3, counted from 0: clean"):
        nb.OutputJacobian(MLP.build(2), [(x, y)], "regression")


def test_batch_fn_splits_a_batch() -> None:
    model = MLP.build()
    data = [("7 examples", Y, X)]
    rows = nb.OutputJacobian(model, data, batch_fn=lambda batch: (batch[2], batch[1]))
    torch.testing.assert_close(rows.dense(), jacobian(model, X).flatten(0, 1))


@pytest.mark.parametrize("key", ["labels", "label", "targets", "target", "y"])
def test_targets_of_a_mapping_are_found_by_several_names(key: str) -> None:
    case = MODELS["named inputs"]
    x, y = CLASSIFICATION.data(case)
    model = case.build()
    torch.testing.assert_close(nb.OutputJacobian(model, [{**x, key: y}]).dense(), jacobian(model, x).flatten(0, 1))


def test_ranges_cross_batches() -> None:
    examples = Examples(batches(X, Y, (2, 1, 4)), None, CPU)
    assert len(examples) == 7
    assert list(examples.ranges(3)) == [(0, 3), (3, 6), (6, 7)]
    assert list(examples.ranges(2, 1, 4)) == [(1, 3), (3, 4)]
    for start in range(7):
        for stop in range(start + 1, 8):
            x, y = examples.read(start, stop)
            assert torch.equal(x, X[start:stop])
            assert torch.equal(y, Y[start:stop])


def test_ranges_of_structured_inputs_cross_batches() -> None:
    pair, named = MODELS["two inputs"], MODELS["named inputs"]
    for case in (pair, named):
        x, y = CLASSIFICATION.data(case)
        got, _ = Examples(batches(x, y, (2, 3)), None, CPU).read(1, 4)
        wanted = {k: v[1:4] for k, v in x.items()} if case is named else tuple(v[1:4] for v in x)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_inputs_may_come_with_or_without_targets() -> None:
    assert inputs_of(X, None) is X
    assert inputs_of((X, Y), None) is X
    assert inputs_of([X], None) is X
    assert inputs_of({"x": X}, None) == {"x": X}
    assert inputs_of({"x": X, "labels": Y}, None) == {"x": X}
    assert inputs_of((X, X, Y), None) == (X, X, Y)
    assert inputs_of({"a": X, "b": Y}, lambda batch: (batch["a"], batch["b"])) is X


def test_examples_are_counted_in_every_structure() -> None:
    assert n_examples(X) == n_examples((X, Y)) == n_examples({"x": X, "options": [Y, torch.tensor(3.0)]}) == 7


@pytest.mark.parametrize("held_bytes", [None, 0], ids=["held", "streamed"])
@pytest.mark.parametrize("numbers", [[0], [6], [0, 1, 2, 3, 4, 5, 6], [1, 3, 4, 6], [2, 5]])
def test_chosen_examples_are_those_with_the_given_indices(numbers: list[int], held_bytes: int | None) -> None:
    examples = Examples(batches(X, Y, (3, 3, 1)), None, torch.get_default_device(), held_bytes=held_bytes)
    chosen = examples.chosen(numbers)
    assert len(chosen) == len(numbers)
    x, y = chosen.read(0, len(numbers))
    assert torch.equal(x, X[numbers])
    assert torch.equal(y, Y[numbers])
    x.zero_()  # nobody else's
    assert torch.equal(chosen.read(0, 1)[0], X[numbers[:1]])
    assert chosen.name([0]) == examples.name([numbers[0]])
    assert list(chosen.ranges(2)) == [(i, min(i + 2, len(numbers))) for i in range(0, len(numbers), 2)]


def test_chosen_examples_keep_values_that_all_examples_share() -> None:
    batch = ({"x": X, "scale": torch.tensor(2.0)}, Y)
    x, y = Examples([batch], None, torch.get_default_device()).chosen([1, 4]).read(0, 2)
    assert torch.equal(x["x"], X[[1, 4]])
    assert float(x["scale"]) == 2.0
    assert torch.equal(y, Y[[1, 4]])
