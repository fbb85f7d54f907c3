"""An entry of the table of models: a network, what it takes, and what is expected of its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from support.drawing import randint, randn

Inputs = Callable[[int, torch.Generator], Any]
LAYERS, FORWARD = "by layers (100% of the parameters)", "forward mode"


@dataclass(frozen=True)
class Case:
    """A model, what it takes, and by which route its derivatives are to come."""

    name: str
    group: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    rows: str = LAYERS
    predictions: str = FORWARD
    targets: Inputs = lambda n, generator: randint(3, (n,), generator=generator)
    likelihood: Any = "classification"
    loss: Callable[[Tensor, Tensor], Tensor] | None = None  # outputs, targets -> (n,); for likelihoods with another
    outputs: Callable[[Any], Tensor] = lambda returned: returned  # out of what the model returns
    options: dict[str, Any] = field(default_factory=dict)  # of the posterior
    dtype: torch.dtype = torch.float64
    only_loss: bool = False  # so many outputs that only the loss-projected posterior makes sense
    needs: str | None = None  # another package
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model  # what makes of the network what the user has

    def build(self, dtype: torch.dtype | None = None, seed: int = 0) -> nn.Module:
        """Make the network in evaluation mode, with no parameter or running statistic at a round number."""
        place = torch.get_default_device()
        with torch.random.fork_rng(), torch.device("cpu"):  # the same network on every device
            torch.manual_seed(seed)
            model = self.make().double().train()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
                for _ in range(3):
                    call(model, self.inputs(8, torch.default_generator))
        return model.to(self.dtype).to(dtype or self.dtype).eval().to(place)  # rounded first, where it is narrower

    def data(self, n: int, seed: int, dtype: torch.dtype | None = None) -> tuple[Any, Tensor]:
        """Inputs and targets."""
        generator = torch.Generator().manual_seed(seed)
        x = cast(cast(self.inputs(n, generator), self.dtype), dtype or self.dtype)
        return x, cast(self.targets(n, generator), dtype or self.dtype)


def call(model: nn.Module, x: Any) -> Any:
    """The model on what it takes."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Inputs whose floating-point tensors have another precision."""
    return _mapped(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, x)


def moved(x: Any, device: torch.device) -> Any:
    """Inputs on another device."""
    return _mapped(lambda leaf: leaf.to(device), x)


def _mapped(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _mapped(change, value) for key, value in x.items()}
    return tuple(_mapped(change, value) for value in x) if isinstance(x, tuple) else change(x)


# --- inputs -----------------------------------------------------------------------------------------------------------


def numbers(*shape: int) -> Inputs:
    return lambda n, generator: randn(n, *shape, generator=generator, dtype=torch.float64)


def words(vocabulary: int, length: int) -> Inputs:
    return lambda n, generator: randint(vocabulary, (n, length), generator=generator)


def labels(classes: int, *shape: int, ignored: int | None = None) -> Inputs:
    """Integer labels; with `ignored`, some of the positions have that one."""

    def draw(n: int, generator: torch.Generator) -> Tensor:
        found = randint(classes, (n, *shape), generator=generator)
        if ignored is not None:
            found.flatten(1)[:, ::3] = ignored
        return found

    return draw


def tags(classes: int, length: int) -> Inputs:
    """Labels of masked words: the first, as special tokens are, and padding are ignored."""

    def draw(n: int, generator: torch.Generator) -> Tensor:
        found = randint(classes, (n, length), generator=generator)
        found[:, 0], found[::2, -2:] = -100, -100
        return found

    return draw


def masked_words(vocabulary: int, length: int) -> Inputs:
    def draw(n: int, generator: torch.Generator) -> dict[str, Tensor]:
        mask = torch.ones(n, length, dtype=torch.long)
        mask[::2, -2:] = 0
        return {"input_ids": randint(vocabulary, (n, length), generator=generator), "attention_mask": mask}

    return draw
