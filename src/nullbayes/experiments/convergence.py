"""How projectors converge: residual, null-space dimension, accuracy and AUROC against sweeps and seconds.

The paper runs a fixed number of alternating projections and shows no figure of what they reach. Here each projector
stops early on purpose, and a posterior is judged at each stop. All posteriors have the same noise and the same prior
precision: that of the closed form for the exact null space. Probabilities are means over the samples: the library's
default predicts the class of the network whatever the samples are, so that accuracy would say nothing about them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

import nullbayes as nb
from nullbayes.experiments.datasets import read_images, there
from nullbayes.experiments.frame import Estimate, Experiment, Results, Settings, sized
from nullbayes.experiments.networks import cnn, train
from nullbayes.experiments.summary import as_asked
from nullbayes.experiments.tasks import Task, demo_digits, lenet_images
from nullbayes.page import Column, Curves, Page, Section, Series, Table, Value

TIGHT = 1e-4  # a tolerance that is not reached before the sweeps run out
PHASES = ("rows", "factors", "projection")
LARGEST_PRIMAL = 20_000  # parameters whose eigenvectors are computed within minutes
EXACT = "ExactDual"
FLOOR = 1e-5  # of residuals in a figure: those of exact projectors are rounding


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes
    ----------
    problems : tuple of str
        "small" (a network for 8 by 8 images in double precision) and "lenet".
    n, n_lenet, test : int
        Training examples of each, and test examples; as many strangers.
    width, epochs : int
        Of the small network, and of its training.
    samples, block : int
        Of each posterior; examples per block, 16 in the paper.
    sweeps, ranks : tuple of int
        At which the iterations and ``Lanczos`` are stopped.
    tolerances : tuple of float
        Down to which the exact projectors are truncated.
    """

    problems: tuple[str, ...] = ("small", "lenet")
    n: int = 200
    n_lenet: int = 2000
    test: int = 2000
    width: int = 5
    epochs: int = 300
    samples: int = 30
    block: int = 16
    sweeps: tuple[int, ...] = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    ranks: tuple[int, ...] = (10, 30, 100, 300, 1000)
    tolerances: tuple[float, ...] = (1e-1, 1e-2, 1e-3)


FULL = Sizes()
QUICK = replace(FULL, problems=("small",), test=1000, samples=10, sweeps=(1, 2, 5, 10, 20, 50, 100, 200, 500))


def estimate(settings: Settings, sizes: Sizes) -> Estimate:
    """Say what a run takes."""
    rate = 5e11 if settings.device.type == "cuda" else 1e10  # operations a second
    small, large = (sizes.n * 10, 2600), (sizes.n_lenet * 10, 44_426)
    used = [shape for name, shape in (("small", small), ("lenet", large)) if name in sizes.problems]
    sweeps = 2 * sum(sizes.sweeps)
    operations = sum(4 * r * p * sizes.samples * sweeps + 3 * r * r * p + 20 * min(r, p) ** 3 for r, p in used)
    memory = max(4 * r * p + 24 * min(r, p) ** 2 for r, p in used)
    points = len(used) * (2 * len(sizes.sweeps) + len(sizes.ranks) + 8)
    return Estimate(operations / rate + points + 20.0, memory + 300 * 2**20, note="one seed: times do not average")


# --- problems ---------------------------------------------------------------------------------------------------------


def problem(settings: Settings, name: str, sizes: Sizes) -> Task:
    """Return a trained network with its data: Fashion-MNIST, or digits where there is none."""
    if not there(settings.data, "fashion-mnist"):
        return _double(demo_digits(settings, sizes.n, 4 * sizes.epochs, held_out=sizes.test, test=sizes.test))
    if name == "lenet":
        return lenet_images(settings, "fashion-mnist", sizes.n_lenet, held_out=sizes.test, test=sizes.test)
    x, y = _some(settings, "fashion-mnist", "train", sizes.n)
    fit = partial(train, x=x, y=y, epochs=sizes.epochs, batch_size=32)
    model = settings.trained("small", partial(cnn, sizes.width), fit)
    others = there(settings.data, "mnist", "kmnist")
    strangers = {other: _some(settings, other, "t10k", sizes.test)[0] for other in others}
    test = _some(settings, "fashion-mnist", "t10k", sizes.test)
    return _double(Task("CNN, fashion-mnist at 8 by 8", model, (x, y), test, strangers=strangers))


def _some(settings: Settings, name: str, split: str, n: int) -> tuple[Tensor, Tensor]:
    """Return the first images of a data set, 8 by 8, and their labels."""
    x, y = read_images(settings.data, name, split)
    return adaptive_avg_pool2d(x[:n], 8).to(settings.device), y[:n].to(settings.device)


def _double(task: Task) -> Task:
    """Return the same in double precision, in which the rank of the rows is no question of rounding."""

    def twice(x: Any) -> Tensor:
        wide: Tensor = x.double()
        return wide

    (x, y), (x_test, y_test) = task.train, task.test
    strangers = {name: twice(each) for name, each in task.strangers.items()}
    model, known, test = task.model.double(), (twice(x), y), (twice(x_test), y_test)
    return replace(task, model=model, train=known, test=test, held_out=None, strangers=strangers)


def stops(task: Task, sizes: Sizes) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return how each projector is made, by its name and by where it stops."""
    p, rows = nb.projectors, sizes.block * 10
    n_parameters = sum(each.numel() for each in task.model.parameters())
    blocks = p.Alternating(block_rows=rows, rtol=TIGHT)
    table: dict[str, dict[str, Callable[[], Any]]] = {
        EXACT: {"exact": lambda: p.ExactDual(rtol=TIGHT)},
        "Alternating": {_sweeps(k): partial(replace, blocks, max_sweeps=k) for k in sizes.sweeps},
        "Krylov": {_sweeps(k): partial(p.Krylov, blocks, TIGHT, 0.0, k) for k in sizes.sweeps},
        "Lanczos": {f"rank {k}": partial(p.Lanczos, k, 0, TIGHT) for k in sizes.ranks},
        "ExactDual, truncated": {f"{t:g}": partial(p.ExactDual, True, None, t) for t in sizes.tolerances},
    }
    if n_parameters <= LARGEST_PRIMAL:
        table["ExactPrimal"] = {"exact": lambda: p.ExactPrimal(rtol=TIGHT)}
    return table


def _sweeps(n: int) -> str:
    return f"{n} sweep{'s' * (n != 1)}"


# --- the run ----------------------------------------------------------------------------------------------------------


def run(settings: Settings, sizes: Sizes) -> Results:
    """Stop every projector at every place, on every problem."""
    found: dict[str, Any] = {}
    for name in sizes.problems:
        task = problem(settings, name, sizes)
        exact = settings.step(f"{name}/{EXACT}/exact", partial(measure, settings, task, sizes, EXACT, "exact", None))
        points: dict[str, list[Results]] = {}
        for projector, places in stops(task, sizes).items():
            points[projector] = [
                exact if projector == EXACT else settings.step(
                    f"{name}/{projector}/{place}",
                    partial(measure, settings, task, sizes, projector, place, exact["prior precision"]),
                )
                for place in places
            ]  # fmt: skip
        network = settings.step(f"{name}/network", partial(judge_network, task))
        about = {"name": task.name, "n": len(task.train[1]), "parameters": exact["parameters"], "rows": exact["rows"]}
        found[name] = {**about, "network": network, "points": points}
    return {"problems": found}


def measure(
    settings: Settings, task: Task, sizes: Sizes, projector: str, place: str, precision: float | None
) -> Results:
    """Fit with one projector, stopped at one place, and judge the posterior."""
    posterior = nb.ProjectedPosterior(task.model, prior_precision="optimal" if precision is None else precision)
    made = stops(task, sizes)[projector][place]()
    with as_asked():
        posterior.fit(
            *task.train, sizes.samples, projector=made, generator=settings.generator(), progress=False,
        )  # fmt: skip
    report = posterior.report
    x_test, y_test = task.test
    probs = posterior.predict(x_test, link_approx="mc").probs
    seen = posterior.ood_score(x_test, "max_variance")
    return {
        "place": place,
        "sweeps": report.sweeps,
        "seconds": sum(report.seconds.get(phase, 0.0) for phase in PHASES),
        "residual": max(report.residual),
        "dimension": report.kernel_dimension,
        "parameters": report.n_parameters,
        "rows": report.n_rows,
        "prior precision": report.prior_precision,
        "accuracy": nb.metrics.accuracy(probs, y_test),  # type: ignore[arg-type]
        "nll": nb.metrics.nll(probs, y_test),  # type: ignore[arg-type]
        "auroc": {
            name: nb.metrics.auroc(seen, posterior.ood_score(x, "max_variance")) for name, x in task.strangers.items()
        },
    }


def judge_network(task: Task) -> Results:
    """Return what the network itself reaches."""
    x_test, y_test = task.test
    posterior = nb.baselines.MAP(task.model).fit(*task.train, progress=False)
    probs = posterior.predict(x_test).probs
    return {"accuracy": nb.metrics.accuracy(probs, y_test), "nll": nb.metrics.nll(probs, y_test)}  # type: ignore[arg-type]


# --- the page ---------------------------------------------------------------------------------------------------------


def page(results: Results) -> Page:
    """Return the page: curves against sweeps and seconds for each problem, and a table of the last stops."""
    problems = results["problems"]
    lead = " ".join(_lead(found) for found in problems.values())
    sections = [_section(found) for found in problems.values()]
    return Page("How projectors converge", lead, sections, {"Seeds": "one: times do not average"})


def _last(found: Results, projector: str) -> Results:
    last: Results = found["points"][projector][-1]
    return last


def _lead(found: Results) -> str:
    slow, fast, exact = (_last(found, projector) for projector in ("Alternating", "Krylov", EXACT))
    return (
        f"{found['name']}: after {slow['sweeps']} sweeps alternating projections are at a residual of "
        f"{slow['residual']:.1e}, and after {fast['sweeps']} conjugate gradients around them at "
        f"{fast['residual']:.1e}. "
        f"They leave {slow['dimension']:,.0f} and {fast['dimension']:,.0f} dimensions; the exact null space has "
        f"{exact['dimension']:,.0f}."
    )  # fmt: skip


def _found(found: Results) -> list[str]:
    """Say what the sweeps change, from the numbers."""
    points, network = found["points"], found["network"]
    slow, exact = points["Alternating"], _last(found, EXACT)
    kept = [each for each in slow if each["accuracy"] >= network["accuracy"] - 0.002]
    accuracy = (
        f"Alternating projections keep the network's accuracy of {network['accuracy']:.3f} to within 0.002 from "
        f"{_sweeps(kept[0]['sweeps'])} on"
        if kept and all(each in kept for each in slow[slow.index(kept[0]) :])
        else f"Alternating projections do not keep the network's accuracy of {network['accuracy']:.3f} to within 0.002 "
        f"at the last stop: {slow[-1]['accuracy']:.3f}"
    )
    target = slow[-1]["residual"]
    faster = next((each for each in points["Krylov"] if each["residual"] <= target), None)
    speed = (
        f"Conjugate gradients reach the residual of {slow[-1]['sweeps']} alternating sweeps, {target:.1e}, within "
        f"{faster['sweeps']}."
        if faster
        else f"Conjugate gradients do not reach the residual of {slow[-1]['sweeps']} alternating sweeps, {target:.1e}."
    )
    lines = [
        "The paper runs 1000 alternating projections and has no figure of their convergence. The residual is |A v| / "
        "|A ε|: what is left, in a sample v, of the effect that its noise ε has on the training outputs.",
        f"{accuracy}. {speed} A small residual is not yet the null space: at the last stop the samples of alternating "
        f"projections have {slow[-1]['dimension']:,.0f} dimensions, {slow[-1]['dimension'] - exact['dimension']:,.0f} "
        f"more than the exact null space of {exact['dimension']:,.0f}. These are directions that the training outputs "
        "hardly depend on.",
    ]
    for name in exact["auroc"]:
        each_stop = [(projector, each) for projector, places in points.items() for each in places]
        best, stop = max(each_stop, key=lambda found: float(found[1]["auroc"][name]))
        lines.append(
            f"AUROC for {name} (largest variance of a logit): {exact['auroc'][name]:.3f} with the exact null space, "
            f"{slow[-1]['auroc'][name]:.3f} after {slow[-1]['sweeps']} alternating sweeps, and at most "
            f"{stop['auroc'][name]:.3f} ({best}, {stop['place']}, residual {stop['residual']:.1e})."
        )
    return lines


def _section(found: Results) -> Section:
    heights = [
        ("residual", "largest residual", True), ("dimension", "dimensions of the null space", False),
        ("accuracy", "test accuracy", False),
        *((f"auroc {name}", f"AUROC, {name}", False) for name in _last(found, EXACT)["auroc"]),
    ]  # fmt: skip
    widths = (("sweeps", "passes over the rows"), ("seconds", "seconds"))
    figures = [_curves(found, width, height) for height in heights for width in widths]
    intro = f"{found['n']:,} training examples, {found['rows']:,} rows, {found['parameters']:,} parameters."
    return Section(found["name"], [intro, *_found(found)], [_table(found), *figures])


def _of(point: Results, key: str) -> float:
    number: float = point["auroc"][key.removeprefix("auroc ")] if key.startswith("auroc ") else point[key]
    return number


def _curves(found: Results, width: tuple[str, str], height: tuple[str, str, bool]) -> Curves:
    (x, x_label), (y, y_label, log) = width, height
    series = []
    for projector, points in found["points"].items():
        ends = sorted((max(_of(each, x), FLOOR), max(_of(each, y), FLOOR if log else 0.0)) for each in points)
        across, up = [end[0] for end in ends], [end[1] for end in ends]
        series.append(Series(projector, across, up, points_only=projector.startswith("Exact")))
    said = "; ".join(f"{each.name} ends at {each.y[-1]:.3g}" for each in series)
    note = f"; what is below {FLOOR:g} is drawn there" if log else ""
    return Curves(f"{y_label} against {x_label}{note}", x_label, y_label, series, f"{y_label}: {said}.", True, log)


def _table(found: Results) -> Table:
    strangers = list(_last(found, EXACT)["auroc"])
    columns = [
        Column("projector, and where it was stopped"),
        Column("passes", "Over all rows.", digits=0),
        Column("seconds", "Rows, factors and projection.", digits=2),
        Column("residual", "|A v| / |A ε| of the worst sample.", "low", 5),
        Column("dimensions", "Of what is left of the noise: the trace of the map.", digits=0),
        Column("NLL", "On test data, of the mean probabilities of the samples.", "low"),
        Column("accuracy", "On test data, of the mean probabilities of the samples.", "high"),
        *(Column(f"AUROC {name}", "By the largest variance of a logit.", "high") for name in strangers),
    ]
    keys = ("sweeps", "seconds", "residual", "dimension", "nll", "accuracy", *(f"auroc {name}" for name in strangers))
    rows: list[list[str | Value | None]] = [
        [f"{projector}, {each['place']}", *(Value(_of(each, key)) for key in keys)]
        for projector, points in found["points"].items()
        for each in points
    ]
    return Table(f"{found['name']}: every stop", columns, rows)


EXPERIMENTS = {
    "convergence": Experiment(
        "convergence",
        "How projectors converge, and what that means for predictions.",
        ("fashion-mnist", "mnist"),
        sized(estimate, FULL, QUICK),
        sized(run, FULL, QUICK),
        page,
    ),
}
