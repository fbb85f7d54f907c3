"""Small networks of several kinds, each with strangers of kinds that ``calibrate`` does not make itself.

A problem is a function of the settings that returns a task. Its strangers are what goes wrong in use, such as a column
in other units, a sensor that is stuck or a class that was never seen. The options ``n``, ``held_out`` and ``test`` say
how many examples there are at most, and ``epochs`` how long a network is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, scaled_dot_product_attention

from benchmarks.frame import Settings, Skipped
from nullbayes.experiments.tasks import Data, Inputs, Task, take


def _task(
    settings: Settings,
    name: str,
    model: Callable[[], nn.Module],
    parts: Sequence[Data],
    strangers: Mapping[str, Inputs],
    likelihood: str = "classification",
) -> Task:
    """Train a network on the first part; the others are held out and for tests. Everything is on the device."""

    def there(x: Inputs) -> Inputs:
        return x.to(settings.device) if isinstance(x, Tensor) else {k: v.to(settings.device) for k, v in x.items()}

    known, held_out, test = ((there(x), y.to(settings.device)) for x, y in parts)
    trained = settings.trained(name, model, lambda model: _train(model, known, settings.options.epochs))
    return Task(name, trained, known, test, held_out, {k: there(x) for k, x in strangers.items()}, likelihood)


def _train(model: nn.Module, data: Data, epochs: int) -> None:
    """Train with AdamW at a rate that rises and falls."""
    x, y = data
    loss = binary_cross_entropy_with_logits if y.is_floating_point() else cross_entropy
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * -(-len(y) // 64))
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).to(y.device).split(64):
            some = take(x, batch)
            optimizer.zero_grad()
            loss(model(some) if isinstance(some, Tensor) else model(**some), y[batch]).backward()
            optimizer.step()
            rate.step()


def _sizes(settings: Settings) -> tuple[int, int, int]:
    return settings.options.n, settings.options.held_out, settings.options.test


def _drawn(
    settings: Settings, draw: Callable[[str, int, Generator], Tensor], *kinds: str
) -> list[tuple[Tensor, Tensor]]:
    """Return examples of several kinds, whose class is the kind: for training, held out, and for tests."""
    g, parts = settings.generator(), list[tuple[Tensor, Tensor]]()
    for n in _sizes(settings):
        y = torch.randint(len(kinds), (n,), generator=g)
        parts.append((torch.stack([draw(kind, n, g) for kind in kinds], 1)[torch.arange(n), y], y))
    return parts


# --- tables -----------------------------------------------------------------------------------------------------------


def breast_cancer(settings: Settings) -> Task:
    """Return a network with layer normalization and one logit, on a table of 30 measurements."""
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError as error:
        msg = "The table comes with scikit-learn: pip install scikit-learn."
        raise Skipped(msg) from error
    bunch = load_breast_cancer()
    x, y = torch.tensor(bunch.data, dtype=torch.float32), torch.tensor(bunch.target, dtype=torch.float32)[:, None]
    split = torch.randperm(569, generator=settings.generator()).split((229, 170, 170))
    index = [part[:most] for part, most in zip(split, _sizes(settings), strict=True)]
    mean, std, test, column = x[index[0]].mean(0), x[index[0]].std(0), x[index[2]], torch.arange(30)
    any_column = torch.randint(30, (len(test), 1), generator=settings.generator())
    strangers = {
        "a column in other units": torch.where(column == 3, 100 * test, test),
        "ten columns are 0": torch.where(column >= 20, 0.0, test),
        "all columns 1.3 times": 1.3 * test,
        "columns in another order": test[:, (column + 20) % 30],
        "a column is -999": torch.where(column == any_column, -999.0, test),
    }

    def model() -> nn.Module:
        parts = (nn.Sequential(nn.Linear(i, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.2)) for i in (30, 64))
        return nn.Sequential(*parts, nn.Linear(64, 1))

    scaled = {name: (x - mean) / std for name, x in strangers.items()}
    return _task(settings, "breast cancer", model, [((x[i] - mean) / std, y[i]) for i in index], scaled, "binary")


def multilabel_table(settings: Settings) -> Task:
    """Return a network that answers six questions about twenty columns, which depend on four factors."""
    g, column = settings.generator(), torch.arange(20)
    factors, others, weights = *torch.randn(2, 4, 20, generator=g), torch.randn(20, 6, generator=g) / 2

    def draw(n: int, factors: Tensor = factors) -> tuple[Tensor, Tensor]:
        x = torch.tanh(torch.randn(n, 4, generator=g) @ factors / 1.5) + 0.2 * torch.randn(n, 20, generator=g)
        return x, (x @ weights + 0.6 * x[:, :6] * x[:, 6:12] + 0.4 * torch.randn(n, 6, generator=g) > 0.7).float()

    parts = [draw(n) for n in _sizes(settings)]
    x = parts[2][0]
    strangers = {
        "other dependences": draw(len(x), others)[0],
        "five columns are 0": torch.where(column % 4 == 0, 0.0, x),
        "a column is stuck at 6": torch.where(column == 7, 6.0, x),
        "three columns drift": torch.where(column % 7 == 0, x + 1.5, x),
    }

    def model() -> nn.Module:
        hidden = (nn.SiLU(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.SiLU())
        return nn.Sequential(nn.Linear(20, 64), *hidden, nn.Linear(64, 6))

    return _task(settings, "multilabel table", model, parts, strangers, "multilabel")


# --- series -----------------------------------------------------------------------------------------------------------


def _waves(kind: str, n: int, g: Generator) -> Tensor:  # (n, 64)
    """Return noisy waves of random frequency, phase and amplitude."""
    time, (speed, phase, size) = torch.arange(64) / 64, torch.rand(3, n, 1, generator=g)
    u = (2 + 3 * speed) * time + phase
    made = {
        "sine": torch.sin(2 * math.pi * u), "square": torch.sign(torch.sin(2 * math.pi * u)), "saw": 2 * (u % 1) - 1,
        "pulse": 2.0 * (u % 1 < 0.2) - 0.4, "triangle": 4 * (u % 1 - 0.5).abs() - 1,
        "chirp": torch.sin(2 * math.pi * (u + 6 * time**2)),
    }  # fmt: skip
    return (0.7 + 0.6 * size) * made[kind] + 0.15 * torch.randn(n, 64, generator=g)


def _series(settings: Settings, name: str, model: Callable[[], nn.Module], *shape: int) -> Task:
    """Return a network that tells four kinds of waves apart; each wave is given in the shape."""
    parts = _drawn(settings, _waves, "sine", "square", "saw", "pulse")
    x, g, time = parts[2][0], settings.with_seed(settings.seed + 1000).generator(), torch.arange(64)
    strangers = {
        "triangle": _waves("triangle", len(x), g),
        "chirp": _waves("chirp", len(x), g),
        "random walk": torch.randn(x.shape, generator=g).cumsum(1) / 4,
        "drift": x + time / 32,
        "stuck from the middle on": torch.where(time >= 32, x[:, 32:33], x),
        "three spikes": x.scatter(1, torch.rand(x.shape, generator=g).argsort(1)[:, :3], 6.0),
        "clipped": x.clamp(-0.4, 0.4),
    }
    shaped = {stranger: x.view(-1, *shape) for stranger, x in strangers.items()}
    return _task(settings, name, model, [(x.view(-1, *shape), y) for x, y in parts], shaped)


def series_mlp(settings: Settings) -> Task:
    """Return a network of two hidden layers on waves, which are rows of a table to it."""
    return _series(settings, "MLP on series", lambda: nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4),
    ), 64)  # fmt: skip


def series_cnn(settings: Settings) -> Task:
    """Return a convolutional network with batch normalization on waves."""
    return _series(settings, "CNN on series", lambda: nn.Sequential(
        nn.Conv1d(1, 16, 7, padding=3), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(16, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(32, 4),
    ), 1, 64)  # fmt: skip


# --- sets and tokens --------------------------------------------------------------------------------------------------


class _Sets(nn.Module):
    """A network for sets of points, whose order does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.all = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = self.each(x)
        return self.all(torch.cat([h.mean(1), h.amax(1)], 1))


def _cloud(kind: str, n: int, g: Generator) -> Tensor:  # (n, 32, 2)
    """Return points of a shape that is turned and noisy."""
    (u, v), normal = 2 * torch.rand(2, n, 32, generator=g) - 1, torch.randn(n, 32, 2, generator=g)
    circle, turn = torch.stack([(math.pi * u).cos(), (math.pi * u).sin()], 2), math.pi * torch.rand(n, generator=g)
    made = {
        "ring": circle, "bars": torch.stack([v, u.sign()], 2), "blob": 0.6 * normal, "line": torch.stack([u, 0 * u], 2),
        "spiral": u[..., None] * circle, "two blobs": 0.25 * normal + u.sign()[..., None],
        "cross": torch.stack([(u > 0) * v, (u <= 0) * v], 2),
    }  # fmt: skip
    turned = torch.stack([turn.cos(), -turn.sin(), turn.sin(), turn.cos()], 1).view(n, 2, 2)
    return made[kind] @ turned + 0.05 * torch.randn(n, 32, 2, generator=g)


def point_sets(settings: Settings) -> Task:
    """Return a network that tells four shapes of sets of points apart."""
    parts = _drawn(settings, _cloud, "ring", "bars", "blob", "line")
    x, g = parts[2][0], settings.with_seed(settings.seed + 1000).generator()
    strangers = {kind: _cloud(kind, len(x), g) for kind in ("spiral", "two blobs", "cross")} | {
        "moved": x + torch.tensor([1.0, 0.0]),
        "squeezed": x * torch.tensor([1.0, 0.25]),
        "three points far off": torch.cat([4 * torch.randn(len(x), 3, 2, generator=g), x[:, 3:]], 1),
    }
    return _task(settings, "point sets", _Sets, parts, strangers)


class _Transformer(nn.Module):
    """One layer of attention over twenty tokens, and the mean over those that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(31, 24, padding_idx=0), nn.Parameter(0.1 * torch.randn(20, 24))
        self.norm, self.queries, self.out = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)
        self.layers = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits."""
        x = self.embedding(input_ids) + self.positions
        q, k, v = self.queries(self.norm(x)).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=attention_mask.bool()[:, None, None])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        weight = attention_mask[..., None] / attention_mask.sum(1)[:, None, None]
        return self.head(((x + self.layers(x)) * weight).sum(1))


def tokens(settings: Settings) -> Task:
    """Return a transformer that tells four Markov chains of thirty tokens apart; inputs are mappings with a mask."""
    g = settings.generator()
    chances = torch.rand(6, 30, 30, generator=g) ** 20

    def padded(ids: Tensor, shortest: int = 6, longest: int = 20) -> dict[str, Tensor]:
        lengths = torch.randint(shortest, longest + 1, (len(ids), 1), generator=g)
        mask = (torch.arange(20) < lengths).long()
        return {"input_ids": (ids + 1) * mask, "attention_mask": mask}

    def chain(y: Tensor, steps: int = 20) -> Tensor:
        ids = [torch.randint(30, y.shape, generator=g)]
        while len(ids) < steps:
            ids.append(torch.multinomial(chances[y, ids[-1]], 1, generator=g)[:, 0])
        return torch.stack(ids, 1)

    targets = [torch.randint(4, (n,), generator=g) for n in _sizes(settings)]
    y = targets[2]
    strangers = {
        "other chains": padded(chain(4 + y % 2)),
        "tokens at random": padded(torch.randint(30, (len(y), 20), generator=g)),
        "numbered from another start": padded((chain(y) + 1) % 30),
        "every second token is lost": padded(chain(y, 40)[:, ::2]),
        "two tokens at most": padded(chain(y), 1, 2),
    }
    return _task(settings, "tokens", _Transformer, [(padded(chain(y)), y) for y in targets], strangers)


_ALL = (breast_cancer, multilabel_table, series_mlp, series_cnn, point_sets, tokens)
PROBLEMS = {problem.__name__: problem for problem in _ALL}
