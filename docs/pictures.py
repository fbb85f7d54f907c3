"""Draws the pictures of the documentation: `python docs/pictures.py` writes them to `docs/pictures/`.

Each picture has a light and a dark form, `NAME.svg` and `NAME-dark.svg`. What they show is computed by the library,
but for the two drawings of lines in the plane.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.demo import load_digits, train_on_digits

FOLDER = Path(__file__).parent / "pictures"
RESULTS = Path(__file__).parents[1] / "results"  # of experiments that were run in full
BLUE, ORANGE, GREEN, GREY = "#4c78c8", "#e08a3c", "#4ca377", "#8a8f98"
SWEEPS = range(1, 31)
TITLES = {  # of networks and data
    "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "kmnist": "KMNIST", "svhn": "SVHN", "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100", "LeNet, mnist": "LeNet, MNIST", "LeNet, fashion-mnist": "LeNet, Fashion-MNIST",
    "ResNet, svhn": "ResNet, SVHN", "ResNet, cifar10": "ResNet, 15,000 of CIFAR-10",
    "ResNet-20, published weights": "ResNet-20, CIFAR-10, published",
}  # fmt: skip
FORMS = {"": "#24292f", "-dark": "#d5d9e0"}  # the ends of file names, and the colour of text and axes


@contextmanager
def style(ink: str) -> Iterator[None]:
    """Draw small figures on a transparent ground, with text that stays text."""
    with mpl.rc_context(
        {
            "svg.fonttype": "none", "svg.hashsalt": "nullbayes", "font.family": "sans-serif", "font.size": 10,
            "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink,
            "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "legend.frameon": False,
        }
    ):  # fmt: skip
        yield


def plane(axis: Any, limit: float = 1.45) -> None:
    """Make an axis a plane without ticks."""
    axis.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal", xticks=[], yticks=[])
    for side in axis.spines.values():
        side.set_visible(False)


def arrow(axis: Any, start: tuple[float, float], end: tuple[float, float], color: str, **options: Any) -> None:
    """Draw an arrow."""
    kind = {"arrowstyle": "-|>", "color": color, "lw": 1.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 13}
    axis.annotate("", end, start, arrowprops=kind | options)


def null_space(figure: Figure, ink: str) -> None:
    """Draw a row, its null space, noise, and the part of it that is kept."""
    figure.set_size_inches(5.2, 3.4)
    axis = figure.subplots()
    plane(axis)
    axis.set(xlim=(-1.7, 2.0), ylim=(-1.1, 1.4))
    angle = math.radians(25)
    along, across = (math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle))
    axis.plot([-1.6 * along[0], 1.75 * along[0]], [-1.6 * along[1], 1.75 * along[1]], color=GREEN, lw=2)
    arrow(axis, (0, 0), across, GREY)
    noise = (0.95 * along[0] + 0.75 * across[0], 0.95 * along[1] + 0.75 * across[1])
    kept = (0.95 * along[0], 0.95 * along[1])
    arrow(axis, (0, 0), noise, ORANGE)
    axis.plot([noise[0], kept[0]], [noise[1], kept[1]], color=ink, lw=1, ls=":")
    arrow(axis, (0, 0), kept, BLUE)
    axis.plot(0, 0, "o", color=ink, ms=5)
    axis.text(-0.12, -0.2, "θ", color=ink, size=12)
    axis.text(across[0] - 0.1, across[1] + 0.1, "row of the training data", color=GREY, ha="center")
    axis.text(noise[0] + 0.06, noise[1] + 0.03, "noise ε", color=ORANGE)
    axis.text(kept[0] + 0.02, kept[1] - 0.26, "direction v, kept", color=BLUE)
    axis.text(-1.6, -0.98, "null space: predictions on\nthe training data stay", color=GREEN, va="bottom", ha="left")


def residual(figure: Figure, ink: str) -> None:
    """Draw alternating projections on two lines, and the residual of the algorithm on a matrix."""
    figure.set_size_inches(7.6, 3.1)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    plane(left, 1.3)
    left.set(xlim=(-0.35, 1.4), ylim=(-0.25, 1.25), title="projected on block after block")
    lines = [torch.tensor([1.0, 0.0]), torch.tensor([math.cos(0.55), math.sin(0.55)])]
    for line, name in zip(lines, ("block 1", "block 2"), strict=True):
        left.plot([-0.3 * line[0], 1.35 * line[0]], [-0.3 * line[1], 1.35 * line[1]], color=GREEN, lw=1.6)
        left.text(1.28 * line[0], 1.28 * line[1] + (0.08 if line[1] else -0.13), name, color=GREEN, ha="center")
    point = torch.tensor([0.75, 1.1])
    left.text(point[0] + 0.05, point[1], "ε", color=ORANGE, size=12)
    for step in range(9):
        following = lines[(step + 1) % 2] * (lines[(step + 1) % 2] @ point)
        left.plot([point[0], following[0]], [point[1], following[1]], color=ORANGE, lw=1.4)
        point = following
    generator = torch.Generator().manual_seed(1)
    entries = torch.randn(50, 60, generator=generator, dtype=torch.float64)
    noise = torch.randn(1, 60, generator=generator, dtype=torch.float64)
    for projector, color in ((nb.projectors.Alternating, ORANGE), (nb.projectors.Krylov, BLUE)):
        found = []
        for sweeps in SWEEPS:
            rows = nb.DenseRows(entries, block_rows=10)
            with warnings.catch_warnings(action="ignore", category=nb.errors.NullBayesWarning):
                method = projector(rtol=1e-9, max_sweeps=sweeps)
                found.append(float(method.apply(method.prepare(rows), noise).info.residual.max()))
        right.semilogy(SWEEPS, found, "o-", color=color, ms=3.5, lw=1.4, label=projector.__name__)
    right.axhline(0.01, color=ink, lw=1, ls="--")
    right.text(1, 0.008, "tolerance 0.01", color=ink, va="top")
    right.set(xlabel="sweeps", ylabel="residual  ‖A v‖ / ‖A ε‖", title="50 rows in 5 blocks, 60 parameters")
    right.legend()


def toy(n: int, width: int = 24) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a small network that was trained on n points of a curve, and the points."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 1.6 - 0.8
    x = torch.where(x.abs() < 0.2, x + 0.4 * x.sign(), x).sort(dim=0).values
    y = torch.sin(3 * x) + 0.05 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(800):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.eval(), x, y


def band(axis: Any, posterior: Any, x: Tensor, y: Tensor, ink: str) -> None:
    """Draw a regression with its standard deviations and its data."""
    grid = torch.linspace(-1.5, 1.5, 121, dtype=torch.float64)[:, None]
    mean, std = (
        posterior.predict(grid).mean[:, 0].detach(),
        posterior.functional_variance(grid, exact=True)[:, 0].sqrt(),
    )
    axis.fill_between(grid[:, 0], mean - 2 * std, mean + 2 * std, color=BLUE, alpha=0.25, lw=0)
    axis.plot(grid[:, 0], mean, color=BLUE, lw=1.6)
    axis.plot(x[:, 0], y[:, 0], ".", color=ink, ms=4)
    axis.set(ylim=(-2.6, 2.6), xticks=[], yticks=[])


def fitted(n: int, width: int = 24, tolerance: float = 0.01, **options: Any) -> tuple[Any, Tensor, Tensor]:
    """Return a posterior of the small network, and its data."""
    model, x, y = toy(n, width)
    posterior = nb.ProjectedPosterior(model, nb.likelihoods.Regression(sigma_noise=0.05), **options)
    with warnings.catch_warnings(action="ignore", category=nb.errors.NullBayesWarning):
        posterior.fit(x, y, 30, progress=False, tolerance=tolerance, generator=torch.Generator().manual_seed(0))
    return posterior, x, y


def precision(figure: Figure, ink: str) -> None:
    """Draw a regression at three precisions."""
    figure.set_size_inches(7.6, 2.5)
    posterior, x, y = fitted(30)
    chosen = posterior.prior_precision
    cases = {"a tenth of it": chosen / 10, "the chosen precision": chosen, "ten times as much": chosen * 10}
    for axis, (title, value) in zip(figure.subplots(1, 3), cases.items(), strict=True):
        posterior.prior_precision = value
        band(axis, posterior, x, y, ink)
        axis.set_title(title)


def temperature(figure: Figure, ink: str) -> None:
    """Draw probabilities at three temperatures."""
    figure.set_size_inches(7.2, 2.2)
    logits = torch.tensor([2.0, 1.0, -0.5])
    for axis, value in zip(figure.subplots(1, 3, sharey=True), (0.5, 1.0, 3.0), strict=True):
        bars = axis.bar(["a", "b", "c"], (logits / value).softmax(0).tolist(), color=[BLUE, GREY, GREY], width=0.65)
        axis.bar_label(bars, fmt="%.2f", color=ink, padding=2)
        axis.set(title=f"T = {value:g}", ylim=(0, 1.12), yticks=[0, 0.5, 1])


def calibration(figure: Figure, ink: str) -> None:
    """Draw scores of held-out and of unseen digits, and the threshold that decides."""
    figure.set_size_inches(6.4, 2.9)
    digits = load_digits()
    torch.manual_seed(0)
    model = train_on_digits(digits, steps=300)
    posterior = nb.ProjectedPosterior(model).fit(digits.x_train, digits.y_train, progress=False)
    posterior.calibrate(digits.x_test[:300], digits.y_test[:300])
    known, unseen = posterior.ood_score(digits.x_test[300:]), posterior.ood_score(digits.x_unseen)
    line = float(unseen[posterior.is_ood(unseen_inputs := digits.x_unseen)].min())
    axis = figure.subplots()
    edges = torch.linspace(float(known.min()), float(unseen.max()), 36)
    for scores, color, name in ((known, BLUE, "digits 0 to 7, new"), (unseen, ORANGE, "digits 8 and 9, never seen")):
        shares = torch.full((len(scores),), 1 / len(scores))
        axis.hist(scores, edges, weights=shares, color=color, alpha=0.7, label=name)
    axis.axvline(line, color=ink, lw=1, ls="--")
    top = axis.get_ylim()[1]
    axis.set_ylim(0, 1.3 * top)
    axis.text(line + 0.06, 1.27 * top, "p-value ≤ 0.05:\nflagged", color=ink, va="top")
    share = float(posterior.is_ood(unseen_inputs).float().mean())
    axis.set(xlabel="calibrated score", ylabel="share of inputs", title=f"{share:.0%} of the unseen digits are flagged")
    axis.legend(loc="upper left")


def collapse(figure: Figure, ink: str) -> None:
    """Draw a regression with a shrinking null space; a small tolerance counts every independent row."""
    figure.set_size_inches(7.6, 2.5)
    for axis, (n, width) in zip(figure.subplots(1, 3), ((5, 4), (10, 4), (200, 4)), strict=True):
        posterior, x, y = fitted(n, width, tolerance=1e-6, prior_precision=0.3)
        band(axis, posterior, x, y, ink)
        left = posterior.report.kernel_dimension
        axis.set_title(f"{n} rows, 13 parameters:\nnull space of {left:.1f} dimensions")


def between(figure: Figure, ink: str) -> None:
    """Draw what `nullbayes reproduce toy` measured: the predicted function, and twice its standard deviation."""
    found = json.loads((RESULTS / "toy.json").read_text(encoding="utf-8"))["results"]
    first, seeds = found["methods"]["0"], found["methods"].values()
    figure.set_size_inches(7.6, 4.4)
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    for axis, (name, drawn) in zip(axes.flat, first.items(), strict=True):
        mean, std = torch.tensor(drawn["mean"]), torch.tensor(drawn["std"])
        ours = name in ("projected", "loss-projected")
        color = BLUE if ours else ORANGE
        axis.fill_between(found["grid"], mean - 2 * std, mean + 2 * std, color=color, alpha=0.25, lw=0)
        axis.plot(found["grid"], mean, color=color, lw=1.6)
        axis.plot(found["x"], found["y"], ".", color=ink, ms=3)
        ratio = sum(seed[name]["ratio"] for seed in seeds) / len(seeds)
        axis.set(title=f"{name}: {ratio:.1f}", ylim=(-2.2, 2.2))


def strangers(figure: Figure, ink: str) -> None:
    """Draw what `nullbayes reproduce` measured of images: AUROC of the network, the paper's posterior and ours."""
    lines: list[tuple[str, float, float | None, float]] = []
    for study in ("fashion-mnist", "mnist", "svhn", "cifar10"):
        found = json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))["results"]
        for subject in found["subjects"]:
            auroc = subject["summary"]["strangers"]
            own, ours = auroc["MAP"]["max_probability"], auroc["ProjectedPosterior"]
            for name, calibrated in ours["calibrated"].items():
                line = own[name]["mean"], ours["max_variance"][name]["paper"], calibrated["mean"]
                lines.append((f"{TITLES.get(subject['name'], subject['name'])} → {TITLES[name]}", *line))
    figure.set_size_inches(7.6, 3.6)
    axis, places = figure.subplots(), range(len(lines))
    axis.hlines(places, 0.7, 1.0, color=GREY, lw=0.4, alpha=0.5)
    labels, network, paper, ours = zip(*lines, strict=True)
    both = [(value, place) for value, place in zip(paper, places, strict=True) if value is not None]
    axis.plot(network, places, "|", color=GREY, ms=11, mew=2, label="network, largest probability")
    axis.plot(
        *zip(*both, strict=True), "o", color=ORANGE, mfc="none", mew=1.6, label="projected posterior in the paper"
    )
    axis.plot(ours, places, "o", color=BLUE, label="projected posterior, calibrated")
    axis.set(yticks=list(places), yticklabels=labels, xlabel="AUROC", xlim=(0.7, 1.005))
    axis.invert_yaxis()
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=3, handletextpad=0.3, columnspacing=1.4)


def convergence(figure: Figure, ink: str) -> None:
    """Draw what `nullbayes reproduce convergence` measured: residual and dimensions against passes over the rows."""
    found = json.loads((RESULTS / "convergence.json").read_text(encoding="utf-8"))["results"]["problems"]
    titles = {"small": "CNN, 200 images", "lenet": "LeNet, 2,000 images"}
    kinds = {"Alternating": ORANGE, "Krylov": BLUE, "Lanczos": GREEN}
    figure.set_size_inches(7.6, 4.6)
    for column, (problem, title) in zip(figure.subplots(2, 2, sharex=True).T, titles.items(), strict=True):
        points = found[problem]["points"]
        for axis, key in zip(column, ("residual", "dimension"), strict=True):
            for name, color in kinds.items():
                own = points[name]
                axis.plot([each["sweeps"] for each in own], [each[key] for each in own], ".-", color=color, label=name)
        column[0].set(title=title, xscale="log", yscale="log", ylabel="largest residual")
        column[1].axhline(points["ExactDual"][0]["dimension"], color=ink, lw=0.8, ls="--", label="ExactDual")
        column[1].set(xlabel="passes over the rows, or Lanczos vectors", ylabel="dimensions left")
    handles, labels = column[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)


PICTURES: dict[str, Callable[[Figure, str], None]] = {
    "null-space": null_space,
    "residual": residual,
    "precision": precision,
    "temperature": temperature,
    "calibration": calibration,
    "collapse": collapse,
    "between": between,
    "strangers": strangers,
    "convergence": convergence,
}


def main(folder: Path = FOLDER, names: tuple[str, ...] = tuple(PICTURES)) -> list[Path]:
    """Draw pictures in both forms, and return their paths."""
    written = []
    folder.mkdir(exist_ok=True)
    for name in names:
        for end, ink in FORMS.items():
            with style(ink):
                figure = Figure(layout="constrained")
                PICTURES[name](figure, ink)
                path = folder / f"{name}{end}.svg"
                figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
            path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
            written.append(path)
    return written


if __name__ == "__main__":
    for picture in main():
        print(picture)
