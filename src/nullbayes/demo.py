"""The demonstration: a small network on scikit-learn's digits, and both posteriors with their default settings.

The network learns the digits 0 to 7 and never sees an 8 or a 9. A good posterior predicts the known digits as the
network does, and flags the unknown ones. `nullbayes.command.demo` prints the table and the picture.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import nullbayes as nb

KNOWN = 8  # the digits 0 to 7 are learned, 8 and 9 are not
ALPHA = 0.05  # the share of known images that may be flagged
SHOWN = 10  # images of each kind in the picture
METHODS = {
    "network itself": nb.baselines.MAP,
    "projected": nb.ProjectedPosterior,
    "loss-projected": nb.LossProjectedPosterior,
}
_BLUE, _ORANGE, _GREY = "#2563a8", "#d9782d", "#444444"


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) between 0 and 1, and labels, for training and testing; and images of unseen digits."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    x_unseen: Tensor


@dataclass(frozen=True)
class Line:
    """One line of the table: how well the known digits are predicted, and which images are flagged as unknown.

    ``scores`` and ``p_values`` are those of the known test images and of the unseen ones, after ``calibrate``.
    """

    name: str
    accuracy: float
    nll: float
    ece: float
    auroc: float  # of the score as it comes
    auroc_calibrated: float
    false_alarms: float  # share of the known images that are flagged
    flagged: float  # share of the unseen ones
    ranked: int  # held-out images that p-values compare with
    kernel_dimension: float | None
    train_std: float | None
    scores: tuple[Tensor, Tensor]
    p_values: tuple[Tensor, Tensor]


def load_digits() -> Digits:
    """Return scikit-learn's digits; two thirds of the known ones are for training."""
    numbers = _read_digits()
    x = torch.tensor(numbers[:, :-1], dtype=torch.float32, device="cpu").view(-1, 1, 8, 8) / 16
    y = torch.tensor(numbers[:, -1], dtype=torch.int64, device="cpu")
    known = y < KNOWN
    order = torch.randperm(int(known.sum()), generator=torch.Generator().manual_seed(0), device="cpu")
    x_known, y_known = x[known][order], y[known][order]
    n = 2 * len(order) // 3
    return Digits(x_known[:n], y_known[:n], x_known[n:], y_known[n:], x[~known])


def _read_digits() -> np.ndarray[Any, Any]:  # (1797, 65)
    """Read the file of scikit-learn, without importing it, which takes longer than the rest together."""
    msg = "The digits come with scikit-learn: pip install 'nullbayes[demo]'"
    try:
        spec = importlib.util.find_spec("sklearn")
    except ValueError:  # it was made impossible to import
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(msg)
    file = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn import datasets  # a version that keeps the file elsewhere

    data = datasets.load_digits()
    return np.column_stack([data.data, data.target])


def train(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Train a model with Adam on random batches of 64, and return it in evaluation mode."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,), generator=generator, device="cpu")
        optimizer.zero_grad()
        loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model.eval()


def network() -> nn.Module:
    """Return a convolutional network with about 20,000 parameters, untrained."""
    with torch.device("cpu"):
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(128, 112), nn.Tanh(), nn.Linear(112, KNOWN),
        )  # fmt: skip


def train_on_digits(digits: Digits, steps: int = 800) -> nn.Module:
    """Return the network, trained on the digits 0 to 7."""
    return train(network(), nn.functional.cross_entropy, digits.x_train, digits.y_train, steps)


def compare(model: nn.Module, digits: Digits) -> list[Line]:
    """Fit both posteriors with their defaults, calibrate them, and measure them and the network itself.

    One half of the test images is held out to calibrate with, and the other half is tested.
    """
    lines = []
    for name, kind in METHODS.items():
        method = kind(model).fit(digits.x_train, digits.y_train, generator=torch.Generator().manual_seed(0))
        lines.append(_line(name, method, digits))
    return lines


def halves(digits: Digits) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the known test images in two halves: to calibrate with, and to test."""
    n = len(digits.x_test) // 2
    return (digits.x_test[:n], digits.y_test[:n]), (digits.x_test[n:], digits.y_test[n:])


def _line(name: str, method: Any, digits: Digits) -> Line:
    held_out, (x, y) = halves(digits)
    inputs = (x, digits.x_unseen)
    probs = method.predict(x).probs
    report = method.report if isinstance(method, (nb.ProjectedPosterior, nb.LossProjectedPosterior)) else None
    assert probs is not None
    auroc = nb.metrics.auroc(*(method.ood_score(z) for z in inputs))
    method.calibrate(*held_out)
    scores, p_values = ((call(x), call(digits.x_unseen)) for call in (method.ood_score, method.p_value))
    return Line(
        name=name,
        accuracy=nb.metrics.accuracy(probs, y),
        nll=nb.metrics.nll(probs, y),
        ece=nb.metrics.ece(probs, y),
        auroc=auroc,
        auroc_calibrated=nb.metrics.auroc(*scores),
        false_alarms=float((p_values[0] <= ALPHA).double().mean()),
        flagged=float((p_values[1] <= ALPHA).double().mean()),
        ranked=len(method.calibration.scores),
        kernel_dimension=None if report is None else report.kernel_dimension,
        train_std=None if report is None else report.train_std,
        scores=scores,
        p_values=p_values,
    )


@dataclass(frozen=True)
class Toy:
    """The toy regression: data with a gap, the network's predictions, and the posterior's standard deviation."""

    x: Tensor
    y: Tensor
    grid: Tensor
    mean: Tensor
    std: Tensor


def toy_regression() -> Toy:
    """Fit the paper's toy problem: two hidden layers of ten units, and data on both sides of a gap."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.linspace(*ends, 30, device="cpu") for ends in ((-1.0, -0.35), (0.35, 1.0)))
    x = torch.cat([left, right]).double()[:, None]
    y = torch.sin(4 * x) * x + 0.03 * torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    _fit_curve(model, x, y)
    posterior = nb.ProjectedPosterior(model, likelihood="regression")
    posterior.fit([(x, y)], generator=torch.Generator().manual_seed(0))
    grid = torch.linspace(-1.6, 1.6, 321, dtype=torch.float64, device="cpu")[:, None]
    std = posterior.functional_variance(grid, exact=True).sqrt()
    with torch.no_grad():
        return Toy(x[:, 0], y[:, 0], grid[:, 0], model(grid)[:, 0], std[:, 0])


def _fit_curve(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Fit a model to a few data by L-BFGS, which needs far fewer steps than Adam does."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.mse_loss(model(x), y)
        value.backward()
        return value

    optimizer.step(loss)


def draw(toy: Toy, lines: list[Line], digits: Digits, path: Path) -> None:
    """Draw the toy regression, the scores of the projected posterior, and the images that it finds most strange."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = cast("Any", figure.subfigures(2, 1, height_ratios=(1.5, 1.0)))
    left, right = above.subplots(1, 2)
    _draw_toy(left, toy)
    _draw_scores(right, lines[1])
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    _draw_images(below, lines[1], digits)
    figure.savefig(path, dpi=120)


def _draw_toy(axis: Any, toy: Toy) -> None:
    axis.fill_between(toy.grid, toy.mean - 2 * toy.std, toy.mean + 2 * toy.std, color=_BLUE, alpha=0.2, lw=0)
    axis.plot(toy.grid, toy.mean, color=_BLUE, label="network, ± 2 standard deviations")
    axis.plot(toy.x, toy.y, "o", color=_GREY, ms=3.5, label="training data")
    axis.set(title="A toy regression: variance is small at the data", xlabel="x", ylabel="y")
    middle, reach = float(toy.y.mean()), float((toy.y - toy.y.mean()).abs().max())
    axis.set_ylim(middle - 3 * reach, middle + 3 * reach)
    axis.legend(frameon=False, loc="upper center")


def _draw_scores(axis: Any, line: Line) -> None:
    both = torch.cat(line.scores)
    bins = torch.linspace(float(both.min()), float(both.max()), 41, device="cpu").numpy()
    for scores, color, label in zip(
        line.scores, (_BLUE, _ORANGE), ("digits 0 to 7, test images", "digits 8 and 9, never seen"), strict=True
    ):
        share = torch.full_like(scores, 1.0 / len(scores)).numpy()
        axis.hist(scores.numpy(), bins, weights=share, color=color, alpha=0.7, label=label)
    limit = both[torch.cat(line.p_values) <= ALPHA].min()
    label = f"flagged from here on (false alarms: {ALPHA:.0%})"
    axis.axvline(float(limit), ymax=0.78, color=_GREY, ls="--", lw=1, label=label)  # below the legend
    axis.set_title(f"Flagged: {line.flagged:.0%} of the unseen digits, {line.false_alarms:.1%} of the known")
    axis.set(xlabel="calibrated score (projected posterior)", ylabel="share of the images")
    axis.legend(frameon=False)


def _draw_images(figure: Any, line: Line, digits: Digits) -> None:
    """Show the images that are least and most strange, known and unseen together, with their p-values."""
    x, y = halves(digits)[1]
    images, names = torch.cat([x, digits.x_unseen])[:, 0], [*(f"known: {digit}" for digit in y.tolist())]
    names += ["unseen"] * len(digits.x_unseen)
    p_values, order = torch.cat(line.p_values), torch.cat(line.scores).argsort()
    rows = (
        ("The least strange of all test images, of known and of unseen digits", order[:SHOWN]),
        (f"The strangest: no p-value is less with {line.ranked} held-out images", order[-SHOWN:].flip(0)),
    )
    size, step = images.shape[-1], images.shape[-1] + 2
    for axis, (title, chosen) in zip(figure.subplots(2, 1), rows, strict=True):  # a row in one axis: many take long
        row = torch.zeros(size, step * SHOWN - 2, device="cpu")
        for k, number in enumerate(chosen.tolist()):
            row[:, k * step : k * step + size] = images[number]
            text = f"p = {p_values[number]:.3f}, {names[number]}"
            axis.text(k * step + size / 2, -1.0, text, fontsize=7.5, ha="center")
        axis.imshow(row.numpy(), cmap="gray_r", vmin=0, vmax=1)
        axis.set_title(title, fontsize=11, pad=18)
        axis.set_axis_off()
