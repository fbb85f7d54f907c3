"""Small float64 networks, and likelihoods with data for them.

Nothing here uses the library, except for its likelihoods.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nullbayes as nb
from support import recipes
from support.drawing import randint, randn

# --- networks ---------------------------------------------------------------------------------------------------------


class TiedWeights(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.down, self.up, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, outputs)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(self.down(x).tanh()).tanh())


class CalledTwice(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.head(self.again(self.again(h).tanh()).tanh() + h)


class WeightUsedElsewhere(nn.Module):
    """A layer that is called once, and whose weight has a second use that no hook sees."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(self.first(x).tanh(), self.first.weight.T))


class NamedInputs(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words, self.left, self.head = nn.Embedding(6, 3), nn.Linear(2, 3), nn.Linear(3, outputs)

    def forward(self, *, tokens: Tensor, left: Tensor) -> Tensor:
        return self.head((self.words(tokens).mean(1) + self.left(left)).tanh())


class TwoInputs(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(4, outputs)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.a(a) * self.b(b)).sigmoid())


class Frozen(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, outputs)
        self.body.requires_grad_(False)
        self.middle.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.body(x).relu()).tanh())


class Sequences(nn.Module):
    def __init__(self, outputs: int, *, examples_first: bool = True) -> None:
        super().__init__()
        self.examples_first = examples_first
        self.token, self.head = nn.Linear(2, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, 2)
        if self.examples_first:
            return self.head(self.token(x).tanh().mean(1))
        return self.head(self.token(x.transpose(0, 1)).tanh().mean(0))


class KeywordCalls(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 5), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=self.first(input=x).tanh())


class NoGradBody(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.body(x).tanh()
        return self.head(h)


class Residual(nn.Module):
    """A skip connection, a layer whose output is not used, and a parameter without dimensions."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.step, self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, outputs)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.unused(x)
        return self.head(x + self.gain * self.step(x).tanh())


class Attention(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(2, 4), nn.Linear(4, outputs)
        self.mix = nn.TransformerEncoderLayer(4, 2, dim_feedforward=3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # (n, 3, 2)
        h = self.mix(self.up(x))
        return self.head(F.scaled_dot_product_attention(h, h, h).mean(1))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def inplace_relu(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, outputs))


def cnn(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(3, 2, (2, 1), dilation=(1, 2), padding=(0, 1), bias=False), nn.Tanh(),
        nn.Flatten(), nn.Linear(20, outputs),
    )  # fmt: skip


def odd_convolutions(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 2, 3, padding="same"), nn.Tanh(),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(24, outputs),
    )  # fmt: skip


def batchnorm(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.3),
        nn.Linear(24, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs),
    )  # fmt: skip


def layernorm(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, outputs))


def vectors(n: int, generator: torch.Generator) -> Tensor:
    return randn(n, 4, generator=generator, dtype=torch.float64)


def images(n: int, generator: torch.Generator) -> Tensor:
    return randn(n, 2, 6, 5, generator=generator, dtype=torch.float64)


def sequences(n: int, generator: torch.Generator) -> Tensor:
    return randn(n, 3, 2, generator=generator, dtype=torch.float64)


def pairs(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return (
        randn(n, 2, generator=generator, dtype=torch.float64),
        randn(n, 3, generator=generator, dtype=torch.float64),
    )


def named(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    tokens = randint(6, (n, 4), generator=generator)
    return {"tokens": tokens, "left": randn(n, 2, generator=generator, dtype=torch.float64)}


class Slow(nn.Module):
    """Gives other threads a turn between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        time.sleep(0.003)
        return self.second(h)


@dataclass(frozen=True)
class Model:
    """A network and what it takes; `route` says how its rows are to be formed."""

    name: str
    make: Callable[[int], nn.Module]  # number of outputs -> network
    inputs: Callable[[int, torch.Generator], Any]  # number of examples -> inputs
    route: str  # "layers", "plain" or "mixed"

    def build(self, outputs: int = 3, seed: int = 0) -> nn.Module:
        """Make the network, in evaluation mode, with no parameter or running statistic at a round number."""
        place = torch.get_default_device()
        with torch.random.fork_rng(), torch.device("cpu"):  # the same network on every device
            torch.manual_seed(seed)
            model = self.make(outputs).double().train()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
                for _ in range(3):
                    call(model, self.inputs(16, torch.default_generator))
        return model.eval().to(place)


_MODELS = (
    Model("mlp", mlp, vectors, "layers"),
    Model("one layer", lambda outputs: nn.Linear(4, outputs), vectors, "layers"),
    Model("in-place relu", inplace_relu, vectors, "layers"),
    Model("cnn", cnn, images, "layers"),
    Model("odd convolutions", odd_convolutions, images, "layers"),
    Model("batchnorm", batchnorm, images, "layers"),
    Model("layernorm", layernorm, vectors, "layers"),
    Model("tied weights", TiedWeights, vectors, "layers"),
    Model("called twice", CalledTwice, vectors, "mixed"),
    Model("weight used elsewhere", WeightUsedElsewhere, vectors, "plain"),
    Model("named inputs", NamedInputs, named, "layers"),
    Model("two inputs", TwoInputs, pairs, "layers"),
    Model("frozen", Frozen, vectors, "layers"),
    Model("sequences", Sequences, sequences, "layers"),
    Model("sequences first", lambda outputs: Sequences(outputs, examples_first=False), sequences, "plain"),
    Model("keyword calls", KeywordCalls, vectors, "layers"),
    Model("residual", Residual, vectors, "mixed"),
    Model("attention", Attention, sequences, "plain"),
)
MODELS = {model.name: model for model in _MODELS}
MLP, CNN, BATCHNORM, ATTENTION = MODELS["mlp"], MODELS["cnn"], MODELS["batchnorm"], MODELS["attention"]


def call(model: nn.Module, x: Any) -> Tensor:
    """The model on what it takes."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def cut(x: Any, start: int, stop: int) -> Any:
    """Some of the examples."""
    if isinstance(x, dict):
        return {key: value[start:stop] for key, value in x.items()}
    return tuple(part[start:stop] for part in x) if isinstance(x, tuple) else x[start:stop]


def batches(x: Any, y: Tensor, sizes: Iterable[int]) -> list[tuple[Any, Tensor]]:
    """The data as a list of batches of the given sizes."""
    result, start = [], 0
    for size in sizes:
        result.append((cut(x, start, start + size), y[start : start + size]))
        start += size
    assert start == len(y)
    return result


# --- likelihoods ------------------------------------------------------------------------------------------------------


def cauchy(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of one's own: (n, O), (n, O) -> (n,)."""
    return torch.log1p((outputs - targets).square()).sum(-1)


@dataclass(frozen=True)
class Task:
    """A likelihood, targets that fit it, and its loss for one example, written out."""

    name: str
    likelihood: Any
    outputs: int
    targets: Callable[[int, torch.Generator], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]  # (O,), one target -> (): minus its log probability, constants included
    learnable: Callable[[Tensor, torch.Generator], Tensor]  # numbers (n, 4) that follow from inputs -> targets
    wrong: tuple[float, ...] = ()  # values that no target can have
    own: bool = False  # whether a file cannot hold the likelihood, because it is not one of the library

    def data(self, model: Model = MLP, n: int = 5, seed: int = 1) -> tuple[Any, Tensor]:
        """Inputs and targets."""
        generator = torch.Generator().manual_seed(seed)
        return model.inputs(n, generator), self.targets(n, generator)

    @property
    def loading(self) -> dict[str, Any]:
        """What `nb.load` needs beside file and model."""
        return {"likelihood": self.likelihood} if self.own else {}


def _normal(width: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: randn(n, width, generator=generator, dtype=torch.float64)


def _noisy(numbers: Tensor, generator: torch.Generator) -> Tensor:
    return numbers[:, :2] + 0.1 * randn(len(numbers), 2, generator=generator, dtype=torch.float64)


CLASSIFICATION = Task(
    "classification", "classification", 3,
    lambda n, generator: randint(3, (n,), generator=generator),
    lambda f, y: f.exp().sum().log() - f[y],
    lambda numbers, generator: numbers[:, :3].argmax(1),
    wrong=(-1, 3),
)  # fmt: skip
BINARY = Task(
    "binary", "binary", 1,
    lambda n, generator: randint(2, (n,), generator=generator),
    lambda f, y: ((1 + f.exp()).log() - y * f).sum(),
    lambda numbers, generator: (numbers[:, 0] > 0).long(),
    wrong=(-1, 2, 0.5, math.nan),
)  # fmt: skip
MULTILABEL = Task(
    "multilabel", "multilabel", 3,
    lambda n, generator: randint(2, (n, 3), generator=generator),
    lambda f, y: ((1 + f.exp()).log() - y * f).sum(),
    lambda numbers, generator: (numbers[:, :3] > 0).long(),
    wrong=(-1, 2, 0.5, math.nan),
)  # fmt: skip
REGRESSION = Task(
    "regression",
    nb.likelihoods.Regression(0.5),
    2,
    _normal(2),
    lambda f, y: ((f - y) ** 2 / (2 * 0.5**2) + math.log(0.5 * math.sqrt(2 * math.pi))).sum(),
    _noisy,
)
POISSON = Task(
    "poisson", recipes.Poisson(), 2,
    lambda n, generator: randint(5, (n, 2), generator=generator),
    lambda f, y: (f.exp() - y * f + (y + 1).double().lgamma()).sum(),
    lambda numbers, generator: (1.5 * numbers[:, :2]).exp().round().clamp(max=20.0),
    wrong=(-1, 0.5, math.nan),
    own=True,
)  # fmt: skip
CUSTOM = Task("custom", cauchy, 2, _normal(2), lambda f, y: (1 + (f - y) ** 2).log().sum(), _noisy, own=True)
TASKS = (CLASSIFICATION, BINARY, MULTILABEL, REGRESSION, POISSON, CUSTOM)
