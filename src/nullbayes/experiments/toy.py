"""Regression with a gap: which posteriors are less certain between the data than on them.

The paper's figure of in-between uncertainty, and a number for it: the mean standard deviation of the predicted function
in the middle half of the gap, divided by that at the training inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.experiments.frame import Estimate, Experiment, Results, Settings, sized
from nullbayes.experiments.summary import as_asked, brief, mean, row, times
from nullbayes.page import Column, Curves, Page, Section, Series, Table

GAP = 0.8  # there are no data between -GAP and GAP
EDGE = 2.0  # nor beyond this
SHOWN = 2.8
NOISE = 0.1
PRECISION = 1.0  # of the prior, for all methods: the paper's
FULL_COVARIANCE = ("projected", "loss-projected", "linearized Laplace", "sampled Laplace")
SPARSE = ("diagonal Laplace", "last-layer Laplace")
MEANING = {
    "projected": "Noise in the null space of the outputs on the training data.",
    "loss-projected": "Noise in the null space of the gradients of the training losses.",
    "linearized Laplace": "The full Gaussian of the Gauss-Newton matrix, with the linearized network.",
    "sampled Laplace": "The same Gaussian, with the network itself at the sampled parameters.",
    "diagonal Laplace": "The diagonal of that Gauss-Newton matrix, with the linearized network.",
    "last-layer Laplace": "The last layer alone varies.",
}


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes
    ----------
    n : int
        Training examples, half of them on each side of the gap.
    steps : int
        Of Adam, on all examples at once.
    samples : int
        Of each posterior.
    points : int
        Of a curve.
    """

    n: int = 60
    steps: int = 4000
    samples: int = 500
    points: int = 141


FULL, QUICK = Sizes(), Sizes(steps=2000, samples=200, points=85)


def estimate(settings: Settings, sizes: Sizes) -> Estimate:
    """Say what a run takes."""
    seconds = settings.seeds * (sizes.steps * 6e-4 + 2.0)
    return Estimate(seconds, 100 * 2**20, note="a network of 141 parameters")


# --- the run ----------------------------------------------------------------------------------------------------------


def run(settings: Settings, sizes: Sizes) -> Results:
    """Fit all methods with every seed."""
    found: dict[str, Any] = {}
    for each in settings.each_seed():
        x, y = data(sizes.n, each.generator())
        model = each.trained(f"network/seed {each.seed}", network, lambda m, x=x, y=y: _train(m, x, y, sizes.steps))  # type: ignore[misc]
        seen = each, model, x.to(each.device), y.to(each.device), sizes
        found[str(each.seed)] = {
            name: each.step(f"seed {each.seed}/{name}", lambda name=name, seen=seen: measure(name, *seen))  # type: ignore[misc]
            for name in MEANING
        }
    x, y = data(sizes.n, settings.generator())
    return {"x": x[:, 0].tolist(), "y": y[:, 0].tolist(), "grid": _grid(sizes)[:, 0].tolist(), "methods": found}


def data(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return noisy values of a curve on both sides of a gap, (n, 1) each."""
    side = torch.arange(n) % 2 * 2.0 - 1.0
    x = (side * (GAP + (EDGE - GAP) * torch.rand(n, generator=generator)))[:, None]
    return x, torch.sin(2.0 * x) + 0.3 * x + NOISE * torch.randn(n, 1, generator=generator)


def network() -> nn.Module:
    """Return the paper's network: two layers with ten hidden units each."""
    return nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))


def _train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Train with Adam to the mode of the posterior with the prior that the methods have."""
    x, y = (each.to(next(model.parameters()).device) for each in (x, y))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        prior = sum(p.square().sum() for p in model.parameters())
        ((model(x) - y).square().sum() / NOISE**2 + PRECISION * prior).div(2 * len(x)).backward()
        optimizer.step()


def measure(name: str, settings: Settings, model: nn.Module, x: Tensor, y: Tensor, sizes: Sizes) -> Results:
    """Fit one method; return its curve and the standard deviations by region."""
    noise = nb.likelihoods.Regression(sigma_noise=NOISE)
    kinds: dict[str, Any] = {
        "projected": nb.ProjectedPosterior,
        "loss-projected": nb.LossProjectedPosterior,
        "linearized Laplace": nb.baselines.LinearizedLaplace,
        "sampled Laplace": nb.baselines.LinearizedLaplace,
        "diagonal Laplace": nb.baselines.DiagonalLaplace,
        "last-layer Laplace": nb.baselines.LastLayerLaplace,
    }
    posterior = kinds[name](model, noise, prior_precision=PRECISION)
    with as_asked():  # a prior precision of one is the paper's
        posterior.fit(x, y, sizes.samples, generator=settings.generator(), progress=False)
    pred_type = "sampled" if name.startswith("sampled") else "linearized"
    grid, edge = _grid(sizes).to(x), torch.linspace(-GAP / 2, GAP / 2, sizes.points)[:, None].to(x)
    curve = posterior.predict(grid, pred_type=pred_type)
    known, between = (posterior.predict(part, pred_type=pred_type) for part in (x, edge))
    on_data, in_gap = float(known.std.mean()), float(between.std.mean())
    return {
        "mean": curve.mean[:, 0].tolist(),
        "std": curve.std[:, 0].tolist(),
        "on data": on_data,
        "in gap": in_gap,
        "ratio": in_gap / max(on_data, 1e-12),
        "rmse": nb.metrics.rmse(known.mean, y),
    }


def _grid(sizes: Sizes) -> Tensor:
    return torch.linspace(-SHOWN, SHOWN, sizes.points)[:, None]


# --- the page ---------------------------------------------------------------------------------------------------------


def page(results: Results) -> Page:
    """Return the page: what was found, the number of each method, and its curve."""
    methods = results["methods"]
    each = {name: [seed[name] for seed in methods.values()] for name in MEANING}
    first = next(iter(methods.values()))
    return Page(
        "Uncertainty between the data",
        _lead(each),
        [
            Section(
                "A number for it",
                [
                    "The paper says that sparse approximations of the posterior fail to capture uncertainty between "
                    "the data, and that fully correlated posteriors can capture it. It shows a figure and no number. "
                    f"Here the number is a ratio: the mean standard deviation of the function in the middle half of "
                    f"the gap (|x| below {GAP / 2:g}), divided by that at the training inputs. It is 1 for a posterior "
                    f"that does not see the gap. All methods have the prior precision {PRECISION:g} of the paper.",
                    *_found(each),
                ],
                [_table(each)],
            ),
            Section(
                "The curves",
                ["Seed 0. Standard deviations are those of the function, without noise."],
                [_curve(name, first[name], results) for name in MEANING],
            ),
        ],
    )


def _ratios(each: dict[str, list[Results]], name: str) -> list[float]:
    return [run["ratio"] for run in each[name]]


def _lead(each: dict[str, list[Results]]) -> str:
    ratios = [(name, mean(_ratios(each, name))) for name in MEANING]
    ours = f"{ratios[0][1]:.1f} times as uncertain in the gap as on the data"
    others = ", ".join(f"{name} {ratio:.1f}" for name, ratio in ratios[1:])
    return f"The projected posterior is {ours}. The other methods: {others}."


def _found(each: dict[str, list[Results]]) -> list[str]:
    """Say whether the paper's claim is found, for each seed."""
    n = len(each["projected"])
    sparse = [max(_ratios(each, name)[i] for name in SPARSE) for i in range(n)]
    below = [name for name in FULL_COVARIANCE if any(_ratios(each, name)[i] <= sparse[i] for i in range(n))]
    ours = sum(_ratios(each, "projected")[i] > sparse[i] for i in range(n))
    exceptions = f", except {' and '.join(below)}: correlations alone are not enough" if below else ""
    blind = [name for name in MEANING if mean(_ratios(each, name)) < 1.5]
    worst = max(MEANING, key=lambda name: mean([run["rmse"] for run in each[name]]))
    error, usual = (mean([run["rmse"] for run in each[name]]) for name in (worst, "linearized Laplace"))
    lines = [
        f"The projected posterior has a larger ratio than both sparse approximations {times(ours, n)}. So have "
        f"the four fully correlated posteriors with every seed{exceptions}."
    ]
    if blind:
        lines.append(f"Hardly less certain in the gap than on the data (ratio below 1.5): {', '.join(blind)}.")
    if error > 1.5 * usual:
        lines.append(
            f"The mean prediction of {worst} misses the training targets by {error:.2f} (root mean square), that of "
            f"the network by {usual:.2f}: its samples underfit."
        )
    return lines


def _table(each: dict[str, list[Results]]) -> Table:
    columns = [
        Column("method"),
        Column("gap / data", "Mean standard deviation in the gap, divided by that on the data.", "high", 2),
        Column("in the gap", "Mean standard deviation of the function in the middle half of the gap.", digits=3),
        Column("on the data", "Mean standard deviation of the function at the training inputs.", "low", 3),
        Column("error", "Root mean square error of the mean prediction at the training inputs.", "low", 3),
    ]
    keys = ("ratio", "in gap", "on data", "rmse")
    rows = [row(name, runs, keys) for name, runs in each.items()]
    return Table("Uncertainty in the gap and on the data", columns, rows)


def _curve(name: str, run: Results, results: Results) -> Curves:
    ends = [[middle + sign * std for middle, std in zip(run["mean"], run["std"], strict=True)] for sign in (2, -2)]
    return Curves(
        f"{name}: {MEANING[name]} The band is one standard deviation wide on either side, the lines are at two.",
        "x", "y",
        [
            Series("prediction", results["grid"], run["mean"], run["std"]),
            *(Series(f"{sign} 2 std", results["grid"], end) for sign, end in zip("+−", ends, strict=True)),
            Series("training data", results["x"], results["y"], points_only=True),
        ],
        alt=f"Prediction of {name} with its band. Standard deviation {brief([run['in gap']])} in the gap and "
        f"{brief([run['on data']])} on the data.",
    )  # fmt: skip


EXPERIMENTS = {
    "toy": Experiment(
        "toy",
        "Regression with a gap: uncertainty between the data.",
        (),
        sized(estimate, FULL, QUICK),
        sized(run, FULL, QUICK),
        page,
    ),
}
