"""The demonstration: a small network on scikit-learn's digits, and both posteriors with their default settings.

The network learns the digits 0 to 7 and never sees an 8 or a 9. A good posterior predicts the known digits as the
network does, and its variance is larger on the unknown ones. `nullbayes.cli` prints the table and the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import nullbayes as nb

KNOWN = 8  # the digits 0 to 7 are learned, 8 and 9 are not


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
    """One line of the table, with the logit scores of the test images and of the unseen ones."""

    name: str
    accuracy: float
    nll: float
    ece: float
    auroc_logits: float
    auroc_probs: float
    kernel_dimension: float | None
    train_std: float | None
    scores: tuple[Tensor, Tensor]


def load_digits() -> Digits:
    """Return scikit-learn's digits; two thirds of the known ones are for training."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        msg = "The digits come with scikit-learn: pip install 'nullbayes[demo]'"
        raise ModuleNotFoundError(msg) from error

    data = datasets.load_digits()
    x = torch.tensor(data.images, dtype=torch.float32, device="cpu")[:, None] / 16
    y = torch.tensor(data.target, device="cpu")
    known = y < KNOWN
    order = torch.randperm(int(known.sum()), generator=torch.Generator().manual_seed(0), device="cpu")
    x_known, y_known = x[known][order], y[known][order]
    n = 2 * len(order) // 3
    return Digits(x_known[:n], y_known[:n], x_known[n:], y_known[n:], x[~known])


def train(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, steps: int) -> nn.Module:
    """Train a model with Adam on random batches of 64, and return it in evaluation mode."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,), generator=generator, device="cpu")
        optimizer.zero_grad()
        loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model.eval()


def train_on_digits(digits: Digits, steps: int = 1200) -> nn.Module:
    """Return a trained convolutional network with about 20,000 parameters."""
    with torch.device("cpu"):
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(128, 112), nn.Tanh(), nn.Linear(112, KNOWN),
        )  # fmt: skip
    return train(model, nn.functional.cross_entropy, digits.x_train, digits.y_train, steps)


def compare(model: nn.Module, digits: Digits) -> list[Line]:
    """Fit both posteriors with their defaults and measure them and the network itself.

    Inputs are scored twice: by the logits (minus the largest one for the network, the largest variance for a
    posterior), and by the probabilities (one minus the largest for the network, mutual information for a posterior).
    """
    with torch.no_grad():
        known, unseen = model(digits.x_test), model(digits.x_unseen)
    by_logits = (-known.amax(1), -unseen.amax(1))
    by_probs = (-known.softmax(1).amax(1), -unseen.softmax(1).amax(1))
    lines = [_line("network itself", known.softmax(1), digits.y_test, by_logits, by_probs)]
    for name, kind in (("projected", nb.ProjectedPosterior), ("loss-projected", nb.LossProjectedPosterior)):
        posterior = kind(model).fit(digits.x_train, digits.y_train, generator=torch.Generator().manual_seed(0))
        probs = posterior.predict(digits.x_test).probs
        assert probs is not None
        by_logits, by_probs = (
            (posterior.ood_score(digits.x_test, score), posterior.ood_score(digits.x_unseen, score))
            for score in ("max_variance", "mutual_information")
        )
        lines.append(_line(name, probs, digits.y_test, by_logits, by_probs, posterior.report))
    return lines


def _line(
    name: str,
    probs: Tensor,
    y: Tensor,
    by_logits: tuple[Tensor, Tensor],
    by_probs: tuple[Tensor, Tensor],
    report: nb.FitReport | None = None,
) -> Line:
    return Line(
        name=name,
        accuracy=nb.metrics.accuracy(probs, y),
        nll=nb.metrics.nll(probs, y),
        ece=nb.metrics.ece(probs, y),
        auroc_logits=nb.metrics.auroc(*by_logits),
        auroc_probs=nb.metrics.auroc(*by_probs),
        kernel_dimension=None if report is None else report.kernel_dimension,
        train_std=None if report is None else report.train_std,
        scores=by_logits,
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
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    train(model, nn.functional.mse_loss, x, y, steps=4000)
    posterior = nb.ProjectedPosterior(model, likelihood="regression")
    posterior.fit([(x, y)], generator=torch.Generator().manual_seed(0))
    grid = torch.linspace(-1.6, 1.6, 321, dtype=torch.float64, device="cpu")[:, None]
    std = posterior.functional_variance(grid, exact=True).sqrt()
    with torch.no_grad():
        return Toy(x[:, 0], y[:, 0], grid[:, 0], model(grid)[:, 0], std[:, 0])


def draw(toy: Toy, lines: list[Line], path: Path) -> None:
    """Draw the toy regression and the histograms of the scores."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    blue, orange, grey = "#2563a8", "#d9782d", "#444444"
    left.fill_between(toy.grid, toy.mean - 2 * toy.std, toy.mean + 2 * toy.std, color=blue, alpha=0.2, lw=0)
    left.plot(toy.grid, toy.mean, color=blue, label="network, ± 2 standard deviations")
    left.plot(toy.x, toy.y, "o", color=grey, ms=3.5, label="training data")
    left.set(title="Variance is small at the data and grows away from them", xlabel="x", ylabel="y")
    middle, reach = float(toy.y.mean()), float((toy.y - toy.y.mean()).abs().max())
    left.set_ylim(middle - 3 * reach, middle + 3 * reach)
    left.legend(frameon=False, loc="upper center")
    line = lines[1]
    inside, outside = (scores.log10() for scores in line.scores)
    both = torch.cat([inside, outside])
    bins = torch.linspace(float(both.min()), float(both.max()), 41, device="cpu").numpy()
    right.hist(inside.numpy(), bins, color=blue, alpha=0.75, label="digits 0 to 7, test images")
    right.hist(outside.numpy(), bins, color=orange, alpha=0.75, label="digits 8 and 9, never seen")
    right.set_title(f"Score of known and of unknown digits, AUROC {line.auroc_logits:.3f}")
    right.set(xlabel="log₁₀ of the largest variance of a logit (projected posterior)", ylabel="images")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
