"""Data larger than memory are read from their loader in every sweep: in order, few batches at a time, the same."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import nullbayes as nb
from nullbayes.errors import DataError
from nullbayes.jacobian import data as data_module
from nullbayes.jacobian.data import Examples
from support.drawing import randperm
from support.models import CLASSIFICATION, MLP, MODELS, batches

DEVICE = torch.get_default_device()
X, Y = CLASSIFICATION.data(n=23)
SIZES = (5, 1, 7, 6, 4)


class Reread:
    """A loader that a function makes anew for each pass, and that counts passes and batches."""

    def __init__(self, function: Callable[[int], Any] = lambda _: batches(X, Y, SIZES)) -> None:
        self.function, self.passes, self.yielded = function, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for batch in self.function(self.passes - 1):
            self.yielded += 1
            yield batch


class Shares(IterableDataset):
    """Each worker yields its share."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.cpu(), y.cpu()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return zip(self.x[start::step], self.y[start::step], strict=True)


def streamed(loader: Any, held_bytes: int = 0) -> Examples:
    return Examples(loader, None, DEVICE, held_bytes=held_bytes)


def check_all(examples: Examples, size: int) -> None:
    for start, stop in examples.ranges(size):
        x, y = examples.read(start, stop)
        assert torch.equal(x, X[start:stop])
        assert torch.equal(y, Y[start:stop])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 22, 23])
def test_a_sweep_is_one_pass(size: int) -> None:
    loader = Reread()
    examples = streamed(loader)
    assert len(examples) == 23
    check_all(examples, size)
    assert loader.passes == 2  # the beginning was read a second time, and then read on
    check_all(examples, size)
    assert loader.passes == 3
    assert loader.yielded == 3 * len(SIZES)


def test_reads_that_skip_or_overlap_continue_the_same_pass() -> None:
    loader = Reread()
    examples = streamed(loader)
    for start, stop in ((0, 3), (2, 5), (4, 6), (5, 9), (8, 12), (11, 13), (18, 20), (19, 23)):
        assert torch.equal(examples.read(start, stop)[0], X[start:stop])
    assert loader.passes == 2
    assert torch.equal(examples.read(7, 9)[0], X[7:9])
    assert loader.passes == 3
    for _ in range(3):
        assert torch.equal(examples.read(0, 5)[0], X[:5])  # the first batch is held
    assert torch.equal(examples.read(9, 14)[0], X[9:14])
    assert loader.passes == 3


def test_a_block_that_is_held_is_read_once() -> None:
    loader = Reread()
    batch_bytes = X[0].numel() * 8 + 8
    examples = streamed(loader, held_bytes=8 * batch_bytes)
    for block in ((0, 5), (5, 13), (13, 19), (19, 23)):
        for _ in range(3):
            for start, stop in examples.ranges(2, *block):
                assert torch.equal(examples.read(start, stop)[0], X[start:stop])
    assert loader.passes == 2


@pytest.mark.parametrize(("size", "most"), [(1, 3), (5, 4), (23, 7)])
def test_only_few_batches_are_in_memory(size: int, most: int) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    peak = 0

    def fresh(_: int) -> Iterator[Any]:
        nonlocal peak
        for x, y in batches(X, Y, SIZES):
            x = x.clone()
            alive.add(x)
            peak = max(peak, len(alive))
            yield x, y
            del x

    examples = streamed(Reread(fresh))
    assert peak <= 3
    peak = 0
    for _ in range(2):
        check_all(examples, size)
    assert 1 < peak <= most
    gc.collect()
    assert len(alive) <= 2


def test_data_that_fit_in_memory_are_read_only_twice() -> None:
    loader = Reread()
    examples = Examples(loader, None, DEVICE)
    for _ in range(3):
        check_all(examples, 4)
    assert loader.passes == 2


# --- what changes -----------------------------------------------------------------------------------------------------


def later(change: Callable[[], Any]) -> Callable[[int], Any]:
    """Batches that are as they should be in the first two passes."""
    return lambda times: batches(X, Y, SIZES) if times < 2 else change()


def shuffled() -> Any:
    order = torch.cat([torch.arange(13), 13 + randperm(10, generator=torch.Generator().manual_seed(0))])
    return batches(X[order], Y[order], SIZES)


def augmented() -> Any:
    return [(x + 1e-6 * (i == 3), y) for i, (x, y) in enumerate(batches(X, Y, SIZES))]


def augmented_first() -> Any:
    return [(x + 1e-6 * (i == 0), y) for i, (x, y) in enumerate(batches(X, Y, SIZES))]


def relabelled() -> Any:
    return [(x, (y + (i == 2)) % 3) for i, (x, y) in enumerate(batches(X, Y, SIZES))]


CHANGED = {
    "shuffles": (shuffled, "Batch 3 is not the same when the loader is read.*shuffle=False"),
    "augments": (augmented, "Batch 3 is not the same.*no random transforms"),
    "augments the first": (augmented_first, "Batch 0 is not the same"),
    "relabels": (relabelled, "Batch 2 is not the same"),
    "cuts otherwise": (lambda: batches(X, Y, (5, 1, 7, 5, 5)), "Batch 3 is not the same"),
    "loses a batch": (lambda: batches(X, Y, SIZES)[:4], "yields 4 batches now and yielded 5 at first.*same data"),
    "loses examples": (lambda: batches(X[:22], Y[:22], (5, 1, 7, 6, 3)), "Batch 4 is not the same"),
    "gains a batch": (lambda: batches(X, Y, SIZES) * 2, "more than the 5 batches that it yielded at first"),
    "gains examples": (lambda: [(torch.cat([x, x]), torch.cat([y, y])) for x, y in batches(X, Y, SIZES)], "Batch 0 is"),
    "another type": (lambda: [(x, y.int()) for x, y in batches(X, Y, SIZES)], "Batch 0 is not the same"),
    "another shape": (lambda: [(x.view(-1, 2, 2), y) for x, y in batches(X, Y, SIZES)], "Batch 0 is not the same"),
    "another batch": (lambda: [*batches(X, Y, SIZES)[:4], X], "Batch 4: A training batch must be a pair"),
    "nothing": (list, "can be read only once"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "fragment"), CHANGED.values(), ids=CHANGED)
def test_a_change_is_caught_in_the_pass_in_which_it_happens(change: Callable[[], Any], fragment: str) -> None:
    loader = Reread(later(change))
    examples = streamed(loader)
    check_all(examples, 4)
    with pytest.raises(DataError, match=fragment):
        check_all(examples, 4)
    assert loader.passes == 3


@pytest.mark.parametrize(("change", "fragment"), CHANGED.values(), ids=CHANGED)
def test_a_pass_starts_over_after_an_error(change: Callable[[], Any], fragment: str) -> None:
    examples = streamed(Reread(lambda times: change() if times == 2 else batches(X, Y, SIZES)))
    check_all(examples, 4)
    with pytest.raises(DataError, match=fragment):
        check_all(examples, 4)
    check_all(examples, 4)


def test_lists_that_are_written_into_are_caught_too() -> None:
    loader = [(x.clone(), y) for x, y in batches(X, Y, SIZES)]
    examples = streamed(loader)
    loader[4][0][1] = 0.0
    examples.read(0, 20)
    with pytest.raises(DataError, match=r"Batch 4 is not the same.*written into"):
        examples.read(19, 21)


# --- workers ----------------------------------------------------------------------------------------------------------


def workers() -> int:
    return len(multiprocessing.active_children())


def loaders(*, persistent: bool = False) -> dict[str, DataLoader[Any]]:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
    return {
        "dataset": DataLoader(TensorDataset(X.cpu(), Y.cpu()), batch_size=4, **options),
        "stream": DataLoader(Shares(X, Y), batch_size=4, **options),
    }


@pytest.mark.cpu
@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_workers_of_an_abandoned_pass_end(kind: str) -> None:
    before = workers()
    examples = streamed(loaders()[kind])
    assert len(examples) == 23
    examples.read(9, 10)
    assert workers() == before + 2  # a pass is under way
    examples.read(4, 6)  # begins another
    assert workers() == before + 2
    examples.read(21, 23)  # ends it
    assert workers() == before
    examples.read(4, 6)
    del examples
    assert workers() == before


@pytest.mark.cpu
def test_persistent_workers_are_not_multiplied() -> None:
    before = workers()
    loader = loaders(persistent=True)["dataset"]
    examples = streamed(loader)
    for start in (9, 4, 16, 0, 12):
        assert torch.equal(examples.read(start, start + 3)[0], X[start : start + 3])
        assert workers() == before + 2
    del examples, loader
    assert workers() == before


@pytest.mark.cpu
def test_a_copy_begins_its_own_pass() -> None:
    examples = streamed(loaders()["dataset"])
    examples.read(9, 10)
    other = copy.deepcopy(examples)
    check_all(other, 3)
    check_all(examples, 3)


class Lazy(Dataset[Any]):
    """Makes its examples when they are asked for."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not 0 <= i < len(X):
            raise IndexError
        return X[i].cpu() * 1.0, Y[i].cpu()


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
@pytest.mark.parametrize("kind", ["list", pytest.param("loader", marks=pytest.mark.slow), "workers"])
@pytest.mark.parametrize(
    "posterior", [pytest.param(nb.ProjectedPosterior, marks=pytest.mark.slow), nb.LossProjectedPosterior]
)
def test_a_fit_over_streamed_data_gives_the_same_directions(
    posterior: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "workers" and DEVICE.type != "cpu":
        pytest.skip("workers cannot use what lies on a GPU")
    make: Callable[[], Any] = {
        "list": lambda: batches(X, Y, SIZES),
        "loader": lambda: DataLoader(Lazy(), batch_size=4),
        "workers": lambda: DataLoader(Lazy(), batch_size=4, num_workers=2, persistent_workers=True),
    }[kind]
    method = nb.projectors.Krylov(nb.projectors.Alternating(block_rows=12))
    for limit in (2**28, 2**14):  # rows that are held, and rows that are formed in every sweep
        directions = []
        for share in (0.25, 0.0):
            monkeypatch.setattr(data_module, "_HELD_SHARE", share)
            torch.manual_seed(0)  # from which a fit draws its seed
            fitted = posterior(MLP.build()).fit(make(), 3, projector=method, memory_limit=limit, progress=False)
            assert fitted.report.n_data == 23
            directions.append(fitted.directions)
        assert torch.equal(*directions)


def test_named_inputs_are_streamed() -> None:
    case = MODELS["named inputs"]
    x, y = CLASSIFICATION.data(case, n=9)
    examples = Examples(batches(x, y, (4, 3, 2)), None, DEVICE, held_bytes=0)
    for start, stop in ((0, 5), (3, 9)):
        got, targets = examples.read(start, stop)
        torch.testing.assert_close(got, {k: v[start:stop] for k, v in x.items()}, rtol=0, atol=0)
        assert torch.equal(targets, y[start:stop])
