"""Every kind of data that people have: which examples and targets are read, in which order, and what is refused."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import nullbayes as nb
from nullbayes.errors import DataError, LikelihoodError
from nullbayes.jacobian.batches import inputs_of
from nullbayes.jacobian.data import Examples
from support.drawing import randn
from support.models import CLASSIFICATION, MLP, batches

DEVICE = torch.get_default_device()
N = 11
X, Y = CLASSIFICATION.data(n=N)
PARTS = batches(X, Y, (4, 4, 3))
Pair = namedtuple("Pair", ["inputs", "labels"])
Triple = namedtuple("Triple", ["inputs", "labels", "mask"])


class Shares(IterableDataset):
    """A stream of unknown length, of which each worker yields a share."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return zip(X.cpu()[start::step], Y.cpu()[start::step], strict=True)


class Boasting(Shares):
    """A stream that claims to be longer than it is."""

    def __len__(self) -> int:
        return 10 * N


class ReadOnce(IterableDataset):
    """A stream that is used up."""

    def __init__(self) -> None:
        self.left = iter(list(zip(X, Y, strict=True)))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.left


def workers(**options: Any) -> Any:
    return DataLoader(TensorDataset(X.cpu(), Y.cpu()), batch_size=4, num_workers=2, **options)


IN_ORDER = list(range(N))
BY_WORKERS = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 9]  # batches of 4 from two workers in turn, each with every second example

LOADERS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "one batch": (lambda: [(X, Y)], IN_ORDER),
    "batches": (lambda: PARTS, IN_ORDER),
    "lists": (lambda: [[x, y] for x, y in PARTS], IN_ORDER),
    "named tuples": (lambda: [Pair(x, y) for x, y in PARTS], IN_ORDER),
    "mappings": (lambda: [{"input": x, "label": y} for x, y in PARTS], IN_ORDER),
    "user mappings": (lambda: [UserDict(input=x, labels=y) for x, y in PARTS], IN_ORDER),
    "loader": (lambda: DataLoader(TensorDataset(X, Y), batch_size=4), IN_ORDER),
    "stream": (lambda: DataLoader(Shares(), batch_size=4), IN_ORDER),
    "stream of another length": (lambda: DataLoader(Boasting(), batch_size=4), IN_ORDER),
    "loader with workers": (workers, IN_ORDER),
    "persistent workers": (lambda: workers(persistent_workers=True), IN_ORDER),
    "stream with workers": (lambda: DataLoader(Shares(), batch_size=4, num_workers=2), BY_WORKERS),
}


@pytest.mark.parametrize("name", LOADERS)
def test_all_examples_are_seen_in_order_with_their_targets(name: str) -> None:
    if DEVICE.type != "cpu" and "workers" in name:
        pytest.skip("workers cannot use what lies on a GPU")
    make, order = LOADERS[name]
    loader = make()
    examples = Examples(loader, None, DEVICE)
    assert len(examples) == N
    x, y = examples.read(0, N)
    assert torch.equal(x["input"] if isinstance(x, dict) else x, X[order])
    assert torch.equal(y, Y[order])
    posterior = nb.ProjectedPosterior(MLP.build()).fit(loader, 3, progress=False)
    assert posterior.report.n_data == N
    prediction = posterior.predict(loader)
    assert torch.equal(prediction.mean.argmax(1), MLP.build()(X[order]).argmax(1))
    assert float(prediction.variance.max()) < 1e-2


def test_a_stream_that_is_used_up_is_refused() -> None:
    with pytest.raises(DataError, match=r"read only once.*list\(loader\)"):
        nb.ProjectedPosterior(MLP.build()).fit(DataLoader(ReadOnce(), batch_size=4), 2, progress=False)


def test_batch_fn_splits_any_batch() -> None:
    loader = [{"meta": ["a", "b"], "image": x, "info": {"class": y}} for x, y in PARTS]
    posterior = nb.ProjectedPosterior(MLP.build(), batch_fn=lambda b: (b["image"], b["info"]["class"]))
    assert posterior.fit(loader, 2, progress=False).report.n_data == N


def halved(batch: Any) -> tuple[Tensor, Any]:
    """Of batches of all kinds: (x, y), {"image": x, "class": y}, x alone."""
    if isinstance(batch, dict):
        return batch["image"] / 2, batch.get("class")
    return (batch / 2, None) if isinstance(batch, Tensor) else (batch[0] / 2, batch[1])


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UntrainedWarning")
@pytest.mark.filterwarnings("ignore:.*have calibrated")  # the same data serve for everything here
def test_batch_fn_is_applied_to_batches_of_loaders_and_to_nothing_else() -> None:
    x, y = CLASSIFICATION.data(n=320)
    (x, old), (y, of_old) = x.split([300, 20]), y.split([300, 20])
    kind = partial(nb.LossProjectedPosterior, MLP.build(), batch_fn=halved, prior_precision=1e4)
    loaders = {
        "tensors": DataLoader(x.cpu(), 50),  # type: ignore[arg-type]
        "list of tensors": list(x.split(50)),
        "pairs": list(zip(x.split(50), y.split(50), strict=True)),
        "dataset": TensorDataset(x, y),
        "mappings": [{"image": x, "class": y}],
        "mappings without targets": [{"image": x}],
    }
    by_loader, by_pair = (
        kind().fit(*data, generator=torch.Generator().manual_seed(0), progress=False)
        for data in ([[(old, of_old)]], (old / 2, of_old))
    )
    torch.testing.assert_close(by_loader.sample(), by_pair.sample())  # type: ignore[attr-defined]
    expected = by_pair.predict(x / 2)
    for posterior in (by_loader, by_pair):
        posterior.tune((x[:100] / 2, y[:100]))
        posterior.calibrate(x[100:] / 2, y[100:])
        assert posterior.check_fit((x / 2, y)) == posterior.check_fit([(x, y)])
        table = nb.evaluate(posterior, (x / 2, y), {"pair": (x / 2, y), "inputs": 3 * x, "loader": [6 * x]})
        assert table.n_strangers == {"pair": 300, "inputs": 300, "loader": 300}
        assert table.rows[0].strangers["inputs"] == table.rows[0].strangers["loader"]
    for name, loader in loaders.items():
        torch.testing.assert_close(by_pair.predict(loader).mean, expected.mean, msg=name)
        assert torch.equal(by_pair.is_ood(loader), by_pair.is_ood(x / 2)), name
    nb.plan(MLP.build(), (x, y), batch_fn=lambda batch: (batch["image"], batch["class"]))  # not applied


def test_a_batch_fn_that_cannot_take_inputs_alone_says_so_instead_of_leaving_them_as_they_are() -> None:
    named = nb.ProjectedPosterior(MLP.build(), batch_fn=lambda b: (b["image"] / 2, b["class"]))
    named.fit(X, Y, 2, progress=False)
    with pytest.raises(
        DataError, match=r"batch_fn failed on a batch .* KeyError: 'class'.*\(inputs, None\).*predict\(x\)"
    ):
        named.predict([{"image": X}])
    numbered = nb.ProjectedPosterior(MLP.build(), batch_fn=lambda b: (b[0] / 2, b[1])).fit(X, Y, 2, progress=False)
    with pytest.raises(DataError, match=r"other examples of a batch of 11 inputs.*\(batch, None\).*predict\(x\)"):
        numbered.predict([X])
    with pytest.raises(DataError, match=r"batch_fn failed on a batch .* IndexError"):
        numbered.predict(DataLoader(TensorDataset(X.cpu()), 11))


# --- targets ----------------------------------------------------------------------------------------------------------

one_hot = F.one_hot(Y, 3)
numbers = randn(N, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

TARGETS = {
    "labels": ("classification", Y, 3),
    "labels of few bits": ("classification", Y.to(torch.uint8), 3),
    "labels (n, 1)": ("classification", Y[:, None], 3),
    "one-hot floats": ("classification", one_hot.double(), 3),
    "one-hot floats of lower precision": ("classification", one_hot.float(), 3),
    "booleans": ("binary", Y > 0, 1),
    "0 and 1": ("multilabel", one_hot, 3),
    "numbers": ("regression", numbers, 3),
    "numbers (n, 1)": ("regression", numbers[:, :1], 1),
    "numbers (n,)": ("regression", numbers[:, 0], 1),
}


@pytest.mark.parametrize(("likelihood", "y", "outputs"), TARGETS.values(), ids=TARGETS)
def test_targets_keep_their_values_and_dtype(likelihood: str, y: Tensor, outputs: int) -> None:
    loader = batches(X, y, (4, 4, 3))
    seen = Examples(loader, None, DEVICE).read(2, 9)[1]
    assert torch.equal(seen, y[2:9])
    assert seen.dtype == y.dtype
    posterior = nb.ProjectedPosterior(MLP.build(outputs), likelihood).fit(loader, 2, progress=False)
    assert posterior.report.n_data == N


# --- what is refused, with a way out ----------------------------------------------------------------------------------

W = torch.ones(N)
NOT_WEIGHED = "weights of examples change nothing.*weight zero"

REFUSED: dict[str, tuple[Any, str]] = {
    "list of targets": ((X, Y.tolist()), r"not a list of 11: torch\.as_tensor\(targets\)"),
    "no targets": ((X, None), r"not NoneType.*torch\.as_tensor"),
    "words in an array": ((X, np.array(["a"] * N)), r"array of <U1 cannot be made a tensor: .*numpy\.unique\(labels"),
    "weights": ((X, Y, W), rf"a tuple of 3.*\(\(batch\[0\], batch\[1\]\), batch\[2\]\).*{NOT_WEIGHED}"),
    "two inputs": ([X, X, Y], r"a list of 3.*\(\(batch\[0\], batch\[1\]\), batch\[2\]\)"),
    "named tuple of three": (Triple(X, Y, W), "a Triple of 3"),
    "named weights": ({"input": X, "labels": Y, "weight": W}, rf"holds 'weight': {NOT_WEIGHED}.*batch\['labels'\]"),
    "sample weights": ({"input": X, "y": Y, "sample_weight": W}, rf"'sample_weight': {NOT_WEIGHED}.*batch\['y'\]"),
    "strings": ({"input": X, "name": ["a"] * N, "labels": Y}, r"inputs\['name'\] is a list of 11.*batch_fn"),
    "list of ids": ({"input": X, "id": list(range(N)), "labels": Y}, r"inputs\['id'\] is a list.*as_tensor"),
    "object": ({"input": X, "extra": object(), "labels": Y}, r"inputs\['extra'\] is object"),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "fragment"), REFUSED.values(), ids=REFUSED)
def test_unusable_data_are_refused_with_advice(batch: Any, fragment: str) -> None:
    with pytest.raises(DataError, match=fragment):
        nb.ProjectedPosterior(MLP.build()).fit([batch], 2, progress=False)


def test_a_table_that_is_no_tensor_is_refused_with_its_columns() -> None:
    pandas = pytest.importorskip("pandas")
    table, labels = pandas.DataFrame(X.cpu().numpy(), columns=["a", "b", "c", "d"]), Y.cpu().numpy()
    posterior = nb.ProjectedPosterior(MLP.build())
    with pytest.raises(DataError, match=r"Columns of the table hold no numbers \('b', 'd'\): encode or drop them"):
        posterior.fit(table.assign(b="word", d=pandas.Timestamp("2020")), labels, 2, progress=False)
    mixed = table.assign(b=True)
    with pytest.raises(DataError, match=r"columns of bool, float64 .*: pass table\.astype\('float32'\)"):
        posterior.fit(mixed, labels, 2, progress=False)
    assert posterior.fit(mixed.astype("float32"), labels, 2, progress=False).n_samples == 2


def test_a_list_of_words_is_no_targets() -> None:
    with pytest.raises(DataError, match=r"not a list of words: pass the numbers .*numpy\.unique\(labels"):
        nb.ProjectedPosterior(MLP.build()).fit(X, ["a"] * N, progress=False)
    numbered = np.unique(["b", "a", "c"], return_inverse=True)[1]
    assert numbered.tolist() == [1, 0, 2]


WAYS_OUT: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "numpy targets": ((X, Y.cpu().numpy()), lambda b: (b[0], torch.as_tensor(b[1]))),
    "weights": ((X, Y, W), lambda b: (b[0], b[1])),
    "named weights": ({"input": X, "labels": Y, "weight": W}, lambda b: ({"input": b["input"]}, b["labels"])),
    "strings": ({"input": X, "name": ["a"] * N, "labels": Y}, lambda b: ({"input": b["input"]}, b["labels"])),
}  # fmt: skip


@pytest.mark.parametrize(("batch", "batch_fn"), WAYS_OUT.values(), ids=WAYS_OUT)
def test_the_advised_batch_fn_works(batch: Any, batch_fn: Callable[[Any], Any]) -> None:
    x, y = Examples([batch], batch_fn, DEVICE).read(0, N)
    assert torch.equal(x["input"] if isinstance(x, dict) else x, X)
    assert torch.equal(y, Y)
    assert nb.ProjectedPosterior(MLP.build(), batch_fn=batch_fn).fit([batch], 2, progress=False).n_samples == 2


def test_a_batch_fn_that_does_not_return_a_pair_is_refused() -> None:
    for batch_fn in (lambda b: b[0], lambda b: (*b, 1), lambda b: None):
        with pytest.raises(DataError, match=r"Batch 0: batch_fn must return a pair \(inputs, targets\), not"):
            Examples(PARTS, batch_fn, DEVICE)


def test_one_hot_integers_are_refused_with_advice() -> None:
    with pytest.raises(LikelihoodError, match=r"must have shape \(11,\); one-hot targets are passed as floats"):
        nb.ProjectedPosterior(MLP.build()).fit([(X, one_hot)], 2, progress=False)


DIFFERENT: dict[str, tuple[list[Any], str]] = {
    "type": ([(X, Y), (X, Y.int())], r"targets of type torch.int32, the earlier ones torch.int64: convert"),
    "type of inputs": ([({"x": X}, Y), ({"x": X.float()}, Y)], r"Batch 1 holds inputs\['x'\] of type torch.float32"),
    "shape": ([(X, Y), (X[:, :3], Y)], r"holds inputs of shape \(3,\) per example, the earlier ones \(4,\): pad"),
    "padding": ([({"ids": X}, Y), ({"ids": X[:, :3]}, Y)], r"Batch 1 holds inputs\['ids'\] of shape .*max_length"),
    "switch": ([({"x": X, "k": 1}, Y), ({"x": X, "k": 2}, Y)], r"Batch 1 holds 2 as inputs\['k'\], the earlier ones 1"),
    "number": (
        [((X, torch.tensor(0.5)), Y), ((X, torch.tensor(2.0)), Y)],
        r"Batch 1 holds 2.0 as inputs\[1\], the earlier ones 0.5.*one entry per example, or the same",
    ),
    "keys": ([({"a": X}, Y), ({"b": X}, Y)], r"Batch 1 holds inputs\['b'\], targets, the earlier ones inputs\['a'\]"),
}  # fmt: skip


@pytest.mark.parametrize(("loader", "fragment"), DIFFERENT.values(), ids=DIFFERENT)
def test_batches_must_be_of_one_kind(loader: list[Any], fragment: str) -> None:
    with pytest.raises(DataError, match=fragment):
        Examples(loader, None, DEVICE)


def test_inputs_are_found_beside_any_targets() -> None:
    assert inputs_of((X, Y.tolist()), None) is X
    assert inputs_of(Pair(X, Y), None) is X
    assert inputs_of({"x": X, "labels": Y.tolist()}, None) == {"x": X}
    assert inputs_of({"x": X, "labels": Y, "weight": W}, None) == {"x": X, "weight": W}  # an input, for all we know
