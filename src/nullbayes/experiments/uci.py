"""Regression on small tables, with the usual splits: errors, proper scores, and how often intervals hold.

The paper has no such experiment. Each network has one hidden layer of 50 units. The main figures are of networks that
were trained on all training data of a split; for conformal intervals another network is trained without a fifth of
them, which calibrates the intervals.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import nullbayes as nb
from nullbayes.experiments.datasets import WHERE, uci_indices
from nullbayes.experiments.frame import Estimate, Experiment, Missing, Results, Settings, sized
from nullbayes.experiments.networks import mlp, train
from nullbayes.experiments.summary import as_asked, brief, mean, row
from nullbayes.experiments.tasks import Task, uci_regression
from nullbayes.page import Column, Page, Section, Table

LEVEL = 0.9  # of the intervals
BATCH = 32  # as `uci_regression` has it
KINDS: dict[str, Any] = {
    "projected": nb.ProjectedPosterior,
    "loss-projected": nb.LossProjectedPosterior,
    "network": nb.baselines.MAP,
    "network, corrected noise": nb.baselines.MAP,
    "linearized Laplace": nb.baselines.LinearizedLaplace,
    "last-layer Laplace": nb.baselines.LastLayerLaplace,
    "deep ensemble": nb.baselines.DeepEnsemble,
}
CONFORMAL = ("projected", "loss-projected", "network", "linearized Laplace")


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes
    ----------
    names : tuple of str
        Data sets.
    splits : int
        At most; fewer where there are fewer.
    steps : int
        Of training, about, with batches of 32.
    samples, members : int
        Samples of each posterior, networks of the ensemble.
    """

    names: tuple[str, ...] = ("concrete", "energy", "yacht")
    splits: int = 20
    steps: int = 12_000
    samples: int = 100
    members: int = 5


FULL, QUICK = Sizes(), Sizes(splits=3, steps=2500, samples=30, members=3)


def estimate(settings: Settings, sizes: Sizes) -> Estimate:
    """Say what a run takes."""
    n = sum(len(_splits(settings.data, name, sizes.splits)) for name in sizes.names)
    seconds = n * ((sizes.members + 2) * sizes.steps * 4e-4 + 4.0)
    return Estimate(seconds, 300 * 2**20, note=f"{n} splits, with {sizes.members + 2} networks each")


# --- the run ----------------------------------------------------------------------------------------------------------


def run(settings: Settings, sizes: Sizes) -> Results:
    """Measure every method on every split of every data set."""
    found: dict[str, Any] = {}
    for name in sizes.names:
        splits = _splits(settings.data, name, sizes.splits)
        if not splits:
            msg = f"This needs uci/{name}/data.txt, index_train_0.txt and the other indices: {WHERE}."
            raise Missing(msg)
        found[name] = {
            str(split): _split(settings.with_seed(settings.seed + split), name, split, sizes) for split in splits
        }
    return {"splits": found, "level": LEVEL}


def _splits(data: Path | None, name: str, most: int) -> list[int]:
    """Return the splits that are there, in order and without a gap."""
    found = 0
    while data is not None and found < most and (data / "uci" / name / f"index_train_{found}.txt").is_file():
        found += 1
    return list(range(found))


def _split(settings: Settings, name: str, split: int, sizes: Sizes) -> Results:
    """Measure every method on one split."""
    here = f"{name}/split {split}"
    task = uci_regression(settings, name, split, _epochs(settings.data, name, split, sizes.steps))
    unit = target_unit(settings.data, name, split)

    def plain(method: str) -> Results:
        return measure(method, settings, task, unit, sizes)

    def conformal(method: str) -> Results:
        return measure_conformal(method, settings, task, f"{here}/without held-out", unit, sizes)

    return {
        "plain": {method: settings.step(f"{here}/{method}", partial(plain, method)) for method in KINDS},
        "conformal": {
            method: settings.step(f"{here}/{method}, conformal", partial(conformal, method)) for method in CONFORMAL
        },
    }


def _epochs(data: Path | None, name: str, split: int, steps: int) -> int:
    """Return how often a table is gone through in so many steps: small ones need more epochs."""
    n = len(uci_indices((data or Path()) / "uci" / name, f"train_{split}"))
    return max(1, steps // -(-n // BATCH))


def target_unit(data: Path | None, name: str, split: int) -> float:
    """Return the standard deviation of the training targets, which is one unit of what networks predict."""
    here = (data or Path()) / "uci" / name
    column, rows = (uci_indices(here, part) for part in ("target", f"train_{split}"))
    spread = float(np.loadtxt(here / "data.txt")[rows][:, column[0]].std())
    return spread if spread > 0 else 1.0


def _fitted(method: str, settings: Settings, model: nn.Module, x: Tensor, y: Tensor, task: Task, sizes: Sizes) -> Any:
    """Fit a method with its defaults; the Laplace approximations choose their prior precision by the evidence."""
    likelihood: Any = "regression"
    if method.endswith("corrected noise"):  # that of the projected posterior, to tell its two effects apart
        noise = _fitted("projected", settings, model, x, y, task, sizes).predict(x[:1]).noise
        likelihood = nb.likelihoods.Regression(sigma_noise=float(noise.sqrt()))
    posterior = KINDS[method](model, likelihood)
    ensemble = {"train": task.member} if method == "deep ensemble" else {}
    n = sizes.members if ensemble else sizes.samples
    with as_asked():
        posterior.fit(x, y, n, generator=settings.generator(), progress=False, **ensemble)
        if "Laplace" in method:
            posterior.optimize_prior_precision(method="marglik")
    return posterior


def measure(method: str, settings: Settings, task: Task, unit: float, sizes: Sizes) -> Results:
    """Fit one method on all training data of a split and judge it on the test data, in the unit of the targets."""
    (x, y), (x_test, y_test) = task.train, task.test
    posterior = _fitted(method, settings, task.model, x, y, task, sizes)  # type: ignore[arg-type]
    found = posterior.predict(x_test, pred_type="sampled" if method == "deep ensemble" else "linearized")
    variance = found.variance + found.noise
    lower, upper = found.interval(LEVEL)
    return {
        "rmse": unit * nb.metrics.rmse(found.mean, y_test),
        "nll": math.log(unit) + nb.metrics.gaussian_nll(found.mean, variance, y_test),
        "crps": unit * nb.metrics.crps(found.mean, variance, y_test),
        "coverage": nb.metrics.interval_coverage(lower, upper, y_test),
        "width": unit * nb.metrics.interval_width(lower, upper),
        "noise": unit * float(torch.as_tensor(found.noise).sqrt().mean()),
        "std": unit * float(found.std.mean()),
    }


def measure_conformal(method: str, settings: Settings, task: Task, key: str, unit: float, sizes: Sizes) -> Results:
    """Train without a fifth of the data, which then calibrates intervals; judge these on the test data."""
    (x, y), (x_test, y_test) = task.train, task.test
    order = torch.randperm(len(y), generator=settings.generator()).to(y.device)
    held, rest = order[: len(y) // 5], order[len(y) // 5 :]
    x_rest, y_rest = x[rest], y[rest]  # type: ignore[index]
    epochs = max(1, sizes.steps // -(-len(y_rest) // BATCH))
    fit = partial(train, x=x_rest, y=y_rest, epochs=epochs, batch_size=BATCH, loss=mse_loss)
    model = settings.trained(key, partial(mlp, x_rest.shape[1]), fit)
    posterior = _fitted(method, settings, model, x_rest, y_rest, task, sizes)
    with warnings.catch_warnings():  # some of these tables have the same inputs more than once
        warnings.filterwarnings("ignore", r".*held-out inputs are equal to training inputs", nb.errors.NullBayesWarning)
        posterior.calibrate(x[held], y[held])  # type: ignore[index]
    lower, upper = posterior.predict_interval(x_test, 1.0 - LEVEL)
    return {
        "coverage": nb.metrics.interval_coverage(lower, upper, y_test),
        "width": unit * nb.metrics.interval_width(lower, upper),
        "n": len(y_test),
        "held out": len(held),
    }


# --- the page ---------------------------------------------------------------------------------------------------------


def page(results: Results) -> Page:
    """Return the page: one table of scores and one of conformal intervals for each data set."""
    level, sections = results["level"], []
    for name, splits in results["splits"].items():
        plain = {method: [split["plain"][method] for split in splits.values()] for method in KINDS}
        conformal = {method: [split["conformal"][method] for split in splits.values()] for method in CONFORMAL}
        sections.append(
            Section(
                name.capitalize(), [_found(plain, level), _found_conformal(conformal, level)],
                [_scores(name, plain, level), _intervals(name, conformal, level)],
            )
        )  # fmt: skip
    intro = Section(
        "How it was done",
        [
            "The paper has no experiment with these data, so there is no claim of its own to check: its lemmas say "
            "that predictions on the training data stay, which says nothing about the error on new data. Networks have "
            "one hidden layer of 50 units. Figures are means over the given splits with their standard deviation, in "
            "the unit of the target. The noise is estimated from the training residuals; the projected posteriors "
            "correct it for the degrees of freedom of the network. Laplace approximations have the prior precision of "
            "the largest evidence.",
            f"Intervals are meant to contain {level:.0%} of the targets. Those of the first table come from the "
            "predictive Gaussian. Those of the second are conformal: the width of the same Gaussian is multiplied by a "
            "factor that a held-out fifth of the training data determines. Some inputs of the concrete table occur "
            "more than once, on both sides of a split, too.",
        ],
    )
    return Page("Regression on small tables", _lead(results), [intro, *sections], {"Seeds": "one per split"})


def _all(results: Results, method: str, key: str, part: str = "plain") -> list[float]:
    return [split[part][method][key] for splits in results["splits"].values() for split in splits.values()]


def _lead(results: Results) -> str:
    level = results["level"]
    parts = [f"{method} {mean(_all(results, method, 'coverage')):.2f}" for method in KINDS]
    conformal = [f"{method} {mean(_all(results, method, 'coverage', 'conformal')):.2f}" for method in CONFORMAL]
    return (
        f"Share of test targets in intervals for {level:.0%}, over all splits: {', '.join(parts)}. With conformal "
        f"intervals: {', '.join(conformal)}."
    )


def _found(plain: dict[str, list[Results]], level: float) -> str:
    def of(method: str, key: str) -> float:
        return mean([run[key] for run in plain[method]])

    best = {key: min(KINDS, key=lambda method: of(method, key)) for key in ("rmse", "nll", "crps")}
    changed = of("projected", "rmse") / of("network", "rmse") - 1.0
    gained = of("network", "nll") - of("projected", "nll")
    by_noise = of("network", "nll") - of("network, corrected noise", "nll")
    nearest = min(KINDS, key=lambda method: abs(of(method, "coverage") - level))
    return (
        f"Lowest error: {best['rmse']}. Lowest NLL: {best['nll']}. Lowest CRPS: {best['crps']}. Coverage nearest to "
        f"{level:.0%}: {nearest}. Compared with the network and its noise, the projected posterior changes the error "
        f"by {changed:+.1%} and {'lowers' if gained >= 0 else 'raises'} the NLL by {abs(gained):.3f} nats. "
        f"The noise that it corrects for the degrees of freedom does {by_noise:.3f} of these {gained:.3f} nats by "
        f"itself, without any samples."
    )


def _found_conformal(conformal: dict[str, list[Results]], level: float) -> str:
    runs = conformal["projected"]
    n, held = sum(run["n"] for run in runs), mean([run["held out"] for run in runs])
    # of the test targets, and of the factor, which a finite number of held-out ones determines in each split
    error = math.sqrt(level * (1 - level) * (1 / n + 1 / (held * len(runs))))
    off = {method: mean([run["coverage"] for run in own]) - level for method, own in conformal.items()}
    missed = [method for method in conformal if abs(off[method]) > 3 * error]
    widths = {method: mean([run["width"] for run in own]) for method, own in conformal.items()}
    narrow = min(widths, key=lambda method: widths[method])
    held_up = (
        f"is within three standard errors ({3 * error:.3f}) of {level:.0%} for every method"
        if not missed
        else f"misses {level:.0%} by more than three standard errors ({3 * error:.3f}) with {' and '.join(missed)}"
    )
    return (
        f"Coverage of conformal intervals {held_up}. Those of {narrow} are the narrowest: {widths[narrow]:.3g} wide "
        f"in the mean, against {widths['network']:.3g} with one width for all inputs (network)."
    )


def _scores(name: str, plain: dict[str, list[Results]], level: float) -> Table:
    columns = [
        Column("method"),
        Column("RMSE", "Root mean square error of the mean prediction, in the unit of the target.", "low"),
        Column("NLL", "Minus the log-density of the targets under the predictive Gaussian, in nats.", "low"),
        Column("CRPS", "Continuous ranked probability score of that Gaussian, in the unit of the target.", "low"),
        Column(f"in {level:.0%}", f"Share of the targets in the central {level:.0%} interval of that Gaussian."),
        Column("width", "Mean width of that interval, in the unit of the target."),
        Column("noise", "Standard deviation of the noise that the method takes the targets to have."),
        Column("std", "Mean standard deviation of the predicted function, without noise."),
    ]
    keys = ("rmse", "nll", "crps", "coverage", "width", "noise", "std")
    rows = [row(method, runs, keys) for method, runs in plain.items()]
    return Table(f"{name}: {len(plain['network'])} splits, mean ± standard deviation", columns, rows)


def _intervals(name: str, conformal: dict[str, list[Results]], level: float) -> Table:
    columns = [
        Column("method"),
        Column(f"in {level:.0%}", "Share of the targets in the conformal interval."),
        Column("width", "Mean width of that interval, in the unit of the target.", "low"),
    ]
    rows = [row(method, runs, ("coverage", "width")) for method, runs in conformal.items()]
    spread = brief([run["held out"] for run in conformal["network"]], 0)
    return Table(f"{name}: conformal intervals, {spread} held-out examples", columns, rows)


EXPERIMENTS = {
    "uci": Experiment(
        "uci",
        "Regression on small tables: errors, proper scores and intervals.",
        ("uci",),
        sized(estimate, FULL, QUICK),
        sized(run, FULL, QUICK),
        page,
    ),
}
