"""A plan reads a few batches, is the plan of the fit, and says in words and numbers what a fit takes."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

import nullbayes as nb
from nullbayes.errors import DataError, NullBayesWarning, SettingsError
from nullbayes.posteriors import preview
from nullbayes.projectors import choose
from nullbayes.projectors.plan import _in_words
from support.drawing import randn, seeded
from support.models import CLASSIFICATION, MLP

N = 1000
X, Y = CLASSIFICATION.data(n=N)


class Watched(Dataset[tuple[Tensor, Tensor]]):
    """Remembers which examples were read."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.read.add(i)
        return X[i], Y[i]


class Batches:
    """A loader of one's own that has a length."""

    def __init__(self) -> None:
        self.n_read = 0

    def __len__(self) -> int:
        return 63

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in zip(X.split(16), Y.split(16), strict=True):
            self.n_read += 1
            yield x, y


class Stream(IterableDataset[Any]):
    """Examples without a number of them."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, Y, strict=True)


def plan(loader: Any, **options: Any) -> nb.Plan:
    return nb.plan(MLP.build(), loader, 5, "1GB", **options)


@pytest.mark.cpu
def test_seconds_are_those_of_a_cpu_as_fast_as_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice does not depend on it: the same projector is taken, however busy the machine is."""
    found, cpu = plan([(X, Y)]), torch.device("cpu")
    monkeypatch.setattr("nullbayes.projectors.plan._slowness", lambda n_threads: 3.0)
    assert dataclasses.replace(plan([(X, Y)]), seconds=found.seconds) == found
    assert found.for_this_machine(cpu).seconds == 3.0 * found.seconds
    assert found.for_this_machine(torch.device("cuda")).seconds == found.seconds


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("batch_size", [1, 16, 48])
def test_a_plan_reads_a_few_batches_and_is_the_plan_of_all_of_them(loss: bool, batch_size: int) -> None:
    data = Watched()
    found = plan(DataLoader(data, batch_size), loss=loss)
    assert len(data.read) <= 4 * batch_size
    rows: Any = nb.LossJacobian if loss else nb.OutputJacobian
    tolerance = 2e-2 if loss else 1e-2
    wanted = choose(rows(MLP.build(), [(X, Y)]), n_samples=5, memory_limit=2**30, rtol=tolerance)
    assert dataclasses.replace(found, seconds=wanted.seconds) == wanted
    assert found.seconds > wanted.seconds  # a trial comes first
    assert found == plan([(X, Y)], loss=loss)  # all of which is read
    assert found == plan(list(zip(X.split(batch_size), Y.split(batch_size), strict=True)), loss=loss)


def test_a_plan_by_the_number_of_batches_says_so() -> None:
    loader = Batches()
    found = plan(loader)
    assert loader.n_read <= 2
    assert found.n_rows == 3 * 63 * 16
    assert "about 1,008 examples, by the length of the loader" in str(found)
    data = Watched()
    sampler = BatchSampler(SequentialSampler(data), 16, drop_last=False)
    assert plan(DataLoader(data, batch_sampler=sampler)).note == ""

    class Own(BatchSampler):
        pass

    assert "about 1,008" in plan(DataLoader(data, batch_sampler=Own(SequentialSampler(data), 16, False))).note


def test_a_batch_fn_that_changes_the_number_of_examples_is_counted_by_batches() -> None:
    found = plan(DataLoader(Watched(), 20), batch_fn=lambda batch: (batch[0][:10], batch[1][:10]))
    assert found.n_rows == 3 * 500
    assert "about 500 examples" in found.note


def test_a_loader_without_a_length_is_read_to_its_end() -> None:
    found = plan(DataLoader(Stream(), 16))
    assert (found.n_rows, found.note) == (3 * N, "")


def test_a_loader_that_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(DataError, match="only once"):
        plan(iter([(X, Y)]))


def test_short_loaders_are_counted_exactly() -> None:
    assert plan([(X[:5], Y[:5])]).n_rows == 15
    assert plan([(X[:5], Y[:5]), (X[5:7], Y[5:7])]).n_rows == 21


def test_first_batches_may_hold_only_ignored_targets() -> None:
    targets = Y.clone()
    targets[:64] = -100
    found = plan(list(zip(X.split(16), targets.split(16), strict=True)))
    assert found.n_rows == 3 * N


def test_planning_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    plan(DataLoader(Watched(), 16))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plan_is_plain_numbers_and_strings() -> None:
    found = plan([(X, Y)])
    back = json.loads(json.dumps(found.to_dict()))
    assert back["seconds"] == found.seconds
    assert back["projector"] == str(found.projector)
    assert back.keys() == vars(found).keys()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "less than a second"), (12.3, "about 12 s"), (89.0, "about 89 s"), (180.0, "about 3 min"),
     (7300.0, "about 2 h"), (400000.0, "about 4.6 days")],
)  # fmt: skip
def test_durations_are_printed_in_words(seconds: float, words: str) -> None:
    assert _in_words(seconds) == words


def test_printed_plans_say_the_time_and_that_it_is_an_estimate() -> None:
    found = plan([(X, Y)])
    line = next(line for line in str(found).splitlines() if line.startswith("  time"))
    assert _in_words(found.seconds) in line
    assert "estimate" in line


def test_a_plan_for_several_processes_says_what_each_holds() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(X.shape[1], 400), torch.nn.Tanh(), torch.nn.Linear(400, 3)).double()
    one, four = (nb.plan(model, [(X, Y)], 5, "4GB", processes=n) for n in (1, 4))
    assert (one.n_rows, four.n_rows, one.processes, four.processes) == (3 * N, 3 * N, 1, 4)
    assert four.projector.block_size(nb.DenseRows(torch.zeros(3 * N, 1))) <= 3 * N // 4
    assert four.peak_bytes < one.peak_bytes
    assert four.operations < one.operations
    assert "4 processes" in str(four)
    assert f"{3 * N // 4} in each process" in str(four)
    assert "process" not in str(one)
    with pytest.raises(SettingsError, match="processes must be at least 1, not 0"):
        nb.plan(model, [(X, Y)], processes=0)


def images() -> tuple[nn.Module, Any]:
    """A network whose rows are large beside their number."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()
    model, x = nn.Sequential(*layers, nn.Linear(256, 10)), randn(300, 1, 14, 14, generator=seeded())
    return model, (x, model(x).argmax(1))


@pytest.mark.cpu
def test_a_small_limit_that_makes_a_fit_slow_causes_a_warning_with_a_better_one() -> None:
    model, data = images()
    with pytest.warns(NullBayesWarning, match="limit of 8.0 MiB makes this fit slow: about") as caught:
        slow = nb.plan(model, data, memory_limit="8MB")
    (better,) = re.findall(r'memory_limit="([0-9]+MB)"', str(caught[0].message))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NullBayesWarning)
        assert nb.plan(model, data, memory_limit=better).seconds < slow.seconds / 4


def test_a_fit_gives_the_same_warning_before_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = MLP.build(), *CLASSIFICATION.data(n=8)
    monkeypatch.setattr(preview, "_LONG", 0.0)
    monkeypatch.setattr(preview, "_SOONER", 0.0)  # any plan is soon enough
    with pytest.warns(NullBayesWarning, match='memory_limit="128MB", which is free'):
        nb.ProjectedPosterior(model, prior_precision=1.0).fit(x, y, 4, memory_limit="64MB")
    with warnings.catch_warnings():
        warnings.simplefilter("error", NullBayesWarning)
        nb.ProjectedPosterior(model, prior_precision=1.0).fit(x, y, 4)  # which takes what is free
