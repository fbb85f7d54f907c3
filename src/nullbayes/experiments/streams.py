"""What the large experiments share: data that are read batch by batch, training on them, and what a pass takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import nullbayes as nb
from nullbayes.experiments.measuring import Clock, seeded
from nullbayes.experiments.networks import Loss

RATES = 1e-3, 1e-5  # of Adam, at the beginning and at the end
Batches = DataLoader[tuple[Tensor, Tensor]]


class Placeholder(Dataset[tuple[Tensor, Tensor]]):
    """Noise in the place of images that are not there, to plan by: as many of them, and of the same size.

    Parameters
    ----------
    n, size : int
        How many images there are, and the pixels along their sides.
    target : Tensor
        Of every one of them.
    """

    def __init__(self, n: int, size: int, target: Tensor) -> None:
        self.n, self.size, self.target = n, size, target

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), self.target


def in_order(images: Dataset[tuple[Tensor, Tensor]], batch_size: int) -> Batches:
    """Return batches of images, in their order."""
    return DataLoader(images, batch_size=batch_size)


def shuffled(images: Dataset[tuple[Tensor, Tensor]], batch_size: int) -> Batches:
    """Return batches of images in a new order in every epoch; a last batch that is smaller is left out."""
    whole = len(images) > batch_size  # type: ignore[arg-type]
    return DataLoader(images, batch_size=batch_size, shuffle=True, drop_last=whole)


def train(model: nn.Module, batches: Batches, epochs: int, loss: Loss) -> nn.Module:
    """Train with Adam at a rate that falls from 1e-3 to 1e-5 along a cosine, with the global generator."""
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), lr=RATES[0])
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs * len(batches)), RATES[1])
    model.train()
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            falling.step()
    return model.eval()


def some_steps(batches: Batches, steps: int, loss: Loss) -> Callable[[nn.Module], None]:
    """Return a function that trains a network so many steps further with SGD, as SWAG collects its iterates."""
    state: dict[str, Any] = {}

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from batches

    def go_on(model: nn.Module) -> None:
        if state.get("model") is not model:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=3e-4)
            state.update(model=model, optimizer=optimizer, batches=endless())
        device = next(model.parameters()).device
        for _ in range(steps):
            x, y = next(state["batches"])
            state["optimizer"].zero_grad()
            loss(model(x.to(device)), y.to(device)).backward()
            state["optimizer"].step()

    return go_on


def outputs_of(answer: Callable[[Tensor], tuple[Tensor, ...]], batches: Iterable[Any], device: torch.device) -> Any:
    """Return what a function of inputs gives for all batches, joined, on the host; and the targets behind it."""
    parts = [(*(part.cpu() for part in answer(x.to(device))), y) for x, y in batches]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


@contextmanager
def noted(notes: list[str]) -> Iterator[None]:
    """Add what the library warns of to notes, for the page, instead of printing it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for each in caught:
        if issubclass(each.category, nb.errors.NullBayesWarning):
            notes.append(str(each.message))
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def pass_cost(model: nn.Module, size: int, device: torch.device) -> tuple[float, int]:
    """Return the seconds of an image forward and back through a network, and the bytes kept meanwhile, as measured."""
    clocks, n = [Clock(device) for _ in range(3)], 64 if device.type == "cuda" else min(64, max(4, 2**16 // size**2))
    with seeded(0):
        x = torch.randn(n, 3, size, size).to(device)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):  # the first time is not timed
        torch.autograd.grad(model(x).sum(), weights)
    for clock in clocks:
        with clock:
            torch.autograd.grad(model(x).sum(), weights)
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    least = min(clock.seconds for clock in clocks)  # others may be using the machine, too
    return least / n, sum(size for place, size in kept.items() if place not in own) // n
