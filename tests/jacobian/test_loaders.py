"""Loaders made for training: why they are refused (all reasons at once), and how `evaluation_loader` replaces them."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import nullbayes as nb
from nullbayes.errors import DataError
from support.drawing import randn

pytestmark = pytest.mark.filterwarnings("ignore:.*are training data")  # which test no one's quality here

X, Y = randn(11, 3, generator=torch.Generator().manual_seed(0)).cpu(), torch.arange(11, device="cpu") % 2
DATASET = TensorDataset(X, Y)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Gives each example another offset each time."""

    def __init__(self, draw: Any) -> None:
        self.transform = draw

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + self.transform(), Y[i]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def by_torch() -> float:
    return float(torch.rand((), device="cpu"))


def by_numpy() -> float:
    return float(np.random.rand())  # noqa: NPY002 - as many transforms do


TRAINING = {
    "shuffled": DataLoader(DATASET, 4, shuffle=True),
    "dropped": DataLoader(DATASET, 4, drop_last=True),
    "both": DataLoader(DATASET, 4, shuffle=True, drop_last=True),
    "weighted": DataLoader(DATASET, 4, sampler=WeightedRandomSampler([1.0] * 11, 11)),
    "batch sampler": DataLoader(DATASET, batch_sampler=BatchSampler(RandomSampler(DATASET), 4, True)),
    "own batches": DataLoader(DATASET, batch_sampler=[[3, 1, 2, 0], [4, 5, 6, 7], [10, 9, 8]]),
    "distributed": DataLoader(DATASET, 4, sampler=DistributedSampler(DATASET, 2, 0)),
    "stream": DataLoader(Stream(), 4, drop_last=True),
}


@pytest.mark.parametrize("loader", TRAINING.values(), ids=TRAINING)
def test_every_example_comes_once_and_in_order(loader: DataLoader[Any]) -> None:
    state = torch.get_rng_state()
    read = list(nb.evaluation_loader(loader))
    assert torch.equal(torch.cat([x for x, _ in read]), X)
    assert torch.equal(torch.cat([y for _, y in read]), Y)
    assert len(read[0][1]) == 4
    again = list(nb.evaluation_loader(loader))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(read, again, strict=True))
    del state


class Shuffled(Sampler[int]):
    """A sampler of one's own, of some of the examples."""

    def __init__(self, indices: list[int], *, others: bool = False) -> None:
        self.indices, self.others = indices, others

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Any:
        order = random.sample(range(11) if self.others else self.indices, len(self.indices))
        return iter(order)


SUBSETS = {
    "random": SubsetRandomSampler([7, 2, 5]), "list": [7, 2, 5], "range": range(2, 8, 3), "own": Shuffled([7, 2, 5]),
}  # fmt: skip


@pytest.mark.parametrize("sampler", SUBSETS.values(), ids=SUBSETS)
def test_a_subset_stays_that_subset(sampler: Any) -> None:
    wanted = [2, 5] if isinstance(sampler, range) else [2, 5, 7]
    loader = DataLoader(DATASET, 2, sampler=sampler)
    assert torch.equal(torch.cat([x for x, _ in nb.evaluation_loader(loader)]), X[wanted])


def test_custom_samplers_that_shuffle_are_noticed(posterior: nb.ProjectedPosterior) -> None:
    random.seed(0)
    loader, state = DataLoader(DATASET, 2, sampler=Shuffled(list(range(11)))), random.getstate()
    for ask in (posterior.predict, lambda data: nb.ProjectedPosterior(nn.Linear(3, 2)).fit(data)):
        with pytest.raises(DataError, match=r"random order \(Shuffled\)"):
            ask(loader)
    with pytest.raises(DataError, match="takes other examples each time"):
        nb.evaluation_loader(DataLoader(DATASET, 2, sampler=Shuffled([1, 2, 3], others=True)))
    assert random.getstate() == state
    assert posterior.predict(DataLoader(DATASET, 2, sampler=[3, 1])).mean.shape == (2, 2)  # an order of one's own
    with pytest.raises(DataError, match="takes one part in 2 of the examples"):
        posterior.predict(TRAINING["distributed"])


class Buckets(BatchSampler):
    """Batches in random or in fixed order, as of examples of similar length; what it inherits draws no numbers."""

    shuffle = True

    def __iter__(self) -> Any:
        batches = list(super().__iter__())
        order = torch.randperm(len(batches), device="cpu").tolist() if self.shuffle else range(len(batches))
        return (batches[i] for i in order)


class FixedBuckets(Buckets):
    shuffle = False


def test_a_batch_sampler_that_shuffles_is_noticed_whatever_it_derives_from(posterior: nb.ProjectedPosterior) -> None:
    loader = DataLoader(DATASET, batch_sampler=Buckets(SequentialSampler(DATASET), 1, drop_last=False))
    with pytest.raises(DataError, match=r"random order \(Buckets\).*evaluation_loader"):
        posterior.predict(loader)
    expected = posterior.predict(X).mean
    torch.testing.assert_close(posterior.predict(nb.evaluation_loader(loader)).mean, expected)
    fixed = DataLoader(DATASET, batch_sampler=FixedBuckets(SequentialSampler(DATASET), 2, drop_last=False))
    torch.testing.assert_close(posterior.predict(fixed).mean, expected)


@pytest.mark.parametrize("sampler", [None, SubsetRandomSampler([7, 2, 5])], ids=["all", "some"])
def test_a_loader_that_accelerate_has_divided_is_refused_and_repaired(
    posterior: nb.ProjectedPosterior, sampler: Any
) -> None:
    divide = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    whole = DataLoader(DATASET, 2, sampler=sampler)
    divided = DataLoader(DATASET, batch_sampler=divide(whole.batch_sampler, 2, 0))
    for ask in (posterior.predict, lambda data: nb.ProjectedPosterior(nn.Linear(3, 2)).fit(data)):
        with pytest.raises(DataError, match=r"takes one part in 2 of the examples \(BatchSamplerShard"):
            ask(divided)
    read = torch.cat([x for x, _ in nb.evaluation_loader(divided)])
    assert torch.equal(read, X if sampler is None else X[[2, 5, 7]])


def test_inputs_that_cannot_come_with_separate_targets_are_named() -> None:
    for data, what in (
        (X.tolist(), "no tensor or array"),
        (TRAINING["shuffled"], r"brings its own targets: fit\(loader\)"),
    ):
        with pytest.raises(DataError, match=what):
            nb.ProjectedPosterior(nn.Linear(3, 2)).fit(data, Y)


def test_collate_functions_and_datasets_of_whole_batches_are_kept() -> None:
    def collate(examples: list[Any]) -> dict[str, Tensor]:
        return {"input": torch.stack([x for x, _ in examples]), "labels": torch.stack([y for _, y in examples])}

    assert set(next(iter(nb.evaluation_loader(DataLoader(DATASET, 4, True, collate_fn=collate))))) == {
        "input",
        "labels",
    }
    whole = [(X[:6], Y[:6]), (X[6:], Y[6:])]
    read = list(nb.evaluation_loader(DataLoader(whole, batch_size=None, shuffle=True)))
    assert torch.equal(read[0][0], X[:6])


@pytest.mark.parametrize("draw", [by_torch, by_numpy])
def test_random_augmentation_is_refused_and_named(draw: Any) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    with pytest.raises(DataError, match=r"another example 0 each time \(random augmentation, by its transform"):
        nb.evaluation_loader(DataLoader(Augmented(draw), 4, shuffle=True))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002


def test_all_reasons_are_named_at_once() -> None:
    loader = DataLoader(Augmented(by_torch), 4, shuffle=True, drop_last=True)
    with pytest.raises(DataError) as caught:
        nb.ProjectedPosterior(nn.Linear(3, 2)).fit(loader)
    said = str(caught.value)
    reasons = "random order (RandomSampler)", "drops its last 3 examples", "random augmentation"
    ways_out = "shuffle=False, drop_last=False", "nb.evaluation_loader(loader)", "switch off in the dataset"
    assert [part for part in (*reasons, *ways_out) if part not in said] == []


def test_objects_that_are_not_loaders_are_refused() -> None:
    with pytest.raises(DataError, match=re.escape("takes a DataLoader, not a list")):
        nb.evaluation_loader([(X, Y)])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def posterior() -> nb.ProjectedPosterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 2))
    return nb.ProjectedPosterior(model, prior_precision=1.0).fit(X, Y, 5, progress=False)


@pytest.mark.parametrize("name", ["shuffled", "dropped", "both", "weighted", "batch sampler"])
def test_predict_refuses_a_shuffled_loader_and_check_fit_accepts_it(
    posterior: nb.ProjectedPosterior, name: str
) -> None:
    if torch.get_default_device().type != "cpu" and name != "dropped":
        pytest.skip("torch shuffles on the CPU only")
    for answer in (posterior.predict, posterior.ood_score):
        with pytest.raises(DataError, match=r"in the order of the inputs, one for each.*evaluation_loader"):
            answer(TRAINING[name])
    assert posterior.predict(nb.evaluation_loader(TRAINING[name])).mean.shape == (11, 2)
    check = posterior.check_fit(TRAINING[name])
    if name == "shuffled":
        whole = posterior.check_fit((X, Y))
        assert check.nll_posterior == pytest.approx(whole.nll_posterior)
        assert check.accuracy_model == whole.accuracy_model
    assert posterior.optimize_prior_precision(TRAINING[name], "grid") > 0
    posterior.tune(TRAINING[name])
