"""Appendix B's claim: the loss-projected posterior is less confident of misclassified examples, and so calibrated.

The posterior keeps the loss of each training example, so the probability of its true class, and may change those of the
other classes. The appendix expects that it therefore keeps its confidence of what it classifies correctly and loses
confidence of what it does not. The expected calibration error that the paper prints cannot be one: it exceeds what
accuracy and confidence allow. Here it is computed over 15 equal bins that include both ends.

Three questions are asked. Does confidence fall on misclassified examples, and not on others? Is it the misclassified
training examples in the projection that do it: what if they are left out? And does it do more than a temperature that
makes the network just as much less confident of what it classifies correctly?
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

import nullbayes as nb
from nullbayes.experiments.datasets import there
from nullbayes.experiments.frame import Estimate, Experiment, Results, Settings, sized
from nullbayes.experiments.summary import as_asked, brief, mean, times, value
from nullbayes.experiments.tasks import Data, Task, demo_digits, lenet_images, logits_of, take, thinned
from nullbayes.page import Column, Page, Section, Table, Value

NAMES = ("mnist", "fashion-mnist")
RULES = {
    "auto": "the library's default precision",
    "optimal": "the precision of the closed form",
    "paper": "the precision that the paper prints, its reciprocal",
    "tuned": "the precision with the best likelihood of held-out data",
}
ALL, CORRECT = "all training examples", "without misclassified ones"
NETWORK = "network"
SMALL = 0.005  # a change of confidence or calibration error that is called one
SHARE = 0.25  # of the fall on misclassified examples, up to which confidence of correct ones is called unchanged
# Table 1: confidence, accuracy, NLL and what is called ECE there, for the network and for the loss-projected posterior
PAPER = {
    "mnist": {NETWORK: (0.981, 0.977, 0.080, 0.787), "paper": (0.813, 0.949, 1.225, 0.666)},
    "fashion-mnist": {NETWORK: (0.938, 0.897, 0.325, 0.732), "paper": (0.744, 0.871, 1.529, 0.617)},
}


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes
    ----------
    n, epochs : int
        Training examples and epochs; few enough that some training examples are misclassified, and enough that the
        network is overconfident of test examples, as the appendix takes it to be.
    test : int
        Test examples; at most as many training examples are judged.
    samples : int
        Of each posterior; the paper has 30.
    """

    n: int = 10_000
    epochs: int = 40
    test: int = 5000
    samples: int = 30


FULL, QUICK = Sizes(), Sizes(n=800, epochs=60, test=800, samples=20)


def estimate(settings: Settings, sizes: Sizes) -> Estimate:
    """Say what a run takes."""
    cuda, fits = settings.device.type == "cuda", 2 * len(_names(settings)) * settings.seeds
    fit = 44_426 * sizes.n * (sizes.n + 20.0 * sizes.samples) * (2e-12 if cuda else 1e-10)
    trained = fits / 2 * sizes.n * sizes.epochs * (1e-5 if cuda else 2e-4)
    memory = 4 * 44_426 * sizes.n + 16 * sizes.n**2 + 300 * 2**20
    return Estimate(fits * (fit + 6.0) + trained, memory, note=f"{sizes.n:,} rows, two fits a network")


# --- the run ----------------------------------------------------------------------------------------------------------


def _names(settings: Settings) -> list[str]:
    return there(settings.data, *NAMES) or ["digits"]


def run(settings: Settings, sizes: Sizes) -> Results:
    """Fit with and without misclassified training examples, on every data set and with every seed."""
    found: dict[str, Any] = {}
    for name in _names(settings):
        found[name] = {}
        for each in settings.each_seed():
            task = _task(each, name, sizes)
            key = f"{name}/seed {each.seed}"
            works = {rows: partial(measure, each, task, rows, sizes) for rows in (ALL, CORRECT)}
            found[name][str(each.seed)] = {
                NETWORK: each.step(f"{key}/network", partial(judge_network, task, sizes)),
                **{rows: each.step(f"{key}/{rows}", work) for rows, work in works.items()},
            }
    return {"data": found}


def _task(settings: Settings, name: str, sizes: Sizes) -> Task:
    if name == "digits":
        return demo_digits(settings, sizes.n, sizes.epochs, held_out=sizes.test, test=sizes.test)
    return lenet_images(settings, name, sizes.n, sizes.epochs, held_out=sizes.test, test=sizes.test)


def _sides(task: Task, sizes: Sizes) -> dict[str, Data]:
    return {"train": thinned(task.train, sizes.test), "test": task.test}


def judge_network(task: Task, sizes: Sizes) -> Results:
    """Return the figures of the network, and how many training examples it misclassifies."""
    x, y = task.train
    found: Results = {"misclassified": int((logits_of(task.model, x).argmax(1) != y).sum()), "n": len(y)}
    for side, (x, y) in _sides(task, sizes).items():
        logits = logits_of(task.model, x)
        found[side] = figures(logits.softmax(1), y, logits)
    return found


def measure(settings: Settings, task: Task, rows: str, sizes: Sizes) -> Results:
    """Fit the loss-projected posterior to some of the training data; judge it at each prior precision."""
    x, y = task.train
    if rows == CORRECT:
        kept = logits_of(task.model, x).argmax(1) == y
        x, y = take(x, kept), y[kept]
    posterior = nb.LossProjectedPosterior(task.model)
    precisions = {}
    with as_asked():
        posterior.fit(x, y, sizes.samples, generator=settings.generator(), progress=False)
    with warnings.catch_warnings():  # a network that is not overconfident is best with next to no samples
        warnings.filterwarnings("ignore", "The held-out likelihood is still rising", nb.errors.NullBayesWarning)
        precisions["tuned"] = posterior.optimize_prior_precision(task.held_out, "nll")
    for rule in ("paper", "optimal", "auto"):  # the last is that of the predictions
        posterior.prior_precision = rule
        precisions[rule] = posterior.report.prior_precision
    found: Results = {"rows": len(y), **{rule: {"prior precision": precisions[rule]} for rule in RULES}}
    for side, (inputs, targets) in _sides(task, sizes).items():
        logits = logits_of(task.model, inputs)
        change = posterior.predict(inputs).samples.double() - logits
        for rule in RULES:  # samples scale with the root of the precision
            sampled = logits + change * (precisions["auto"] / precisions[rule]) ** 0.5
            found[rule][side] = figures(sampled.softmax(2).mean(0), targets, logits)
    return found


def figures(probs: Tensor, targets: Tensor, logits: Tensor) -> Results:
    """Return what is said of predictions, and what a temperature does that is as confident of correct examples.

    Correct and wrong are the predictions of the network, by its logits, whatever the posterior makes of them: the
    examples are then the same for all. A group without examples has None.
    """
    probs = probs.double()
    right = logits.argmax(1) == targets
    confidence = probs.max(1).values
    soft = softened(logits, right, float(confidence[right].mean())) if bool(right.any()) else logits.softmax(1)
    return {
        "accuracy": nb.metrics.accuracy(probs, targets),
        "nll": nb.metrics.nll(probs, targets),
        "ece": nb.metrics.ece(probs, targets),
        "confidence": nb.metrics.confidence(probs),
        "correct": _mean(confidence[right]),
        "wrong": _mean(confidence[~right]),
        "softened wrong": _mean(soft.max(1).values[~right]),
        "softened ece": nb.metrics.ece(soft, targets),
        "softened nll": nb.metrics.nll(soft, targets),
    }


def softened(logits: Tensor, right: Tensor, wanted: float) -> Tensor:
    """Return probabilities at the temperature at which the mean confidence of some examples is as wanted."""
    low, high = -4.0, 8.0  # logarithms of the temperature
    for _ in range(60):
        middle = (low + high) / 2
        confident = float((logits[right].double() * math.exp(-middle)).softmax(1).max(1).values.mean())
        low, high = (middle, high) if confident > wanted else (low, middle)
    return (logits.double() * math.exp(-(low + high) / 2)).softmax(1)


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


# --- the page ---------------------------------------------------------------------------------------------------------


def page(results: Results) -> Page:
    """Return the page: what the appendix claims and what the figures say, for each data set."""
    sections = [_section(name, list(seeds.values())) for name, seeds in results["data"].items()]
    verdicts = [_verdict(name, list(seeds.values())) for name, seeds in results["data"].items()]
    claim = Section(
        "The claim",
        [
            "Appendix B says that the loss-projected posterior keeps the confidence of correctly classified examples "
            "and lowers that of misclassified ones, because it changes the probabilities of all classes but the true "
            "one, and that this improves calibration. It argues with an example and shows a figure; Table 1 prints an "
            "expected calibration error (ECE) of 0.787 for the network on MNIST and 0.666 for the posterior. With the "
            "accuracy and confidence of the same table an ECE cannot exceed 0.042 there, so these are no figures to "
            "compare with, and the claim is checked anew.",
            "Correct and wrong are the predictions of the network, so that groups are the same for all methods. "
            "Probabilities are means over the samples. The temperature of comparison makes the network exactly as "
            "confident of correct predictions as the posterior is. The claim counts as found where confidence of wrong "
            f"predictions falls by more than {SMALL:g}, and that of correct ones by less than a quarter of it.",
        ],
    )
    return Page("Calibration of the loss-projected posterior", " ".join(verdicts), [claim, *sections])


def _get(runs: Sequence[Results], rows: str, rule: str, side: str, key: str) -> list[float]:
    """Return a figure for each seed that has it."""
    own = [run[NETWORK] if rows == NETWORK else run[rows][rule] for run in runs]
    return [each[side][key] for each in own if each[side][key] is not None]


def _changes(runs: Sequence[Results], rule: str, side: str, key: str) -> list[float]:
    """Return by how much a figure of the posterior is larger than that of the network, for each seed."""
    both = zip(_get(runs, ALL, rule, side, key), _get(runs, NETWORK, "", side, key), strict=True)
    return [ours - network for ours, network in both]


def _verdict(name: str, runs: Sequence[Results]) -> str:
    """Say in one sentence whether calibration on test data improved at any precision."""
    before = mean(_get(runs, NETWORK, "", "test", "ece"))
    after = {rule: mean(_get(runs, ALL, rule, "test", "ece")) for rule in RULES}
    costs = {rule: mean(_changes(runs, rule, "test", "nll")) for rule in RULES}
    parts = [f"{after[rule]:.3f} with {about} (NLL {costs[rule]:+.3f})" for rule, about in RULES.items()]
    better = [rule for rule in RULES if after[rule] < before - SMALL]
    found = f"improves with {' and '.join(RULES[rule] for rule in better)}" if better else "does not improve"
    return f"{name}: the ECE of the network on test data, {before:.3f}, {found}: {', '.join(parts)}."


def _section(name: str, runs: Sequence[Results]) -> Section:
    wrong = [run[NETWORK]["misclassified"] for run in runs]
    share = mean([run[NETWORK]["misclassified"] / run[NETWORK]["n"] for run in runs])
    intro = f"Of {runs[0][NETWORK]['n']:,} training examples, {brief(wrong, 0)} ({share:.1%}) are misclassified. " + (
        "Without any there is nothing to leave out, and both fits are the same. " if not any(wrong) else ""
    )
    over = mean(_get(runs, NETWORK, "", "test", "confidence")) - mean(_get(runs, NETWORK, "", "test", "accuracy"))
    side = (
        "overconfident, as the appendix takes it to be" if over > 0 else "not overconfident, so that less of it harms"
    )
    intro += f"On test data the network is {side}: confidence is {over:+.3f} from accuracy."
    said = [_found(runs, rule) for rule in RULES]
    tables = [_table(name, runs, side) for side in ("train", "test")]
    return Section(name, [intro, *said], tables)


def _found(runs: Sequence[Results], rule: str) -> str:
    """Say what became of confidence and calibration at one prior precision."""
    parts = [f"With {RULES[rule]}, {mean(_precision(runs, rule)):.3g}:"]
    for side, about in (("train", "training"), ("test", "test")):
        wrong, right = (_changes(runs, rule, side, group) for group in ("wrong", "correct"))
        if not wrong:
            parts.append(f"No {about} example is misclassified.")
            continue
        holds = mean(wrong) < -SMALL and mean(right) > SHARE * mean(wrong)
        claim = "as the appendix says" if holds else "which is not what the appendix says"
        soft, ours = (mean(_get(runs, ALL, rule, side, key)) for key in ("softened wrong", "wrong"))
        parts.append(
            f"On {about} data confidence changes by {mean(wrong):+.3f} on misclassified examples and by "
            f"{mean(right):+.3f} on correct ones, {claim}; the temperature that does the same to correct ones leaves "
            f"{soft:.3f} on misclassified ones, the posterior {ours:.3f}."
        )
    change, n = _changes(runs, rule, "test", "ece"), len(runs)
    soft, ours, fewer = (
        mean(_get(runs, rows, rule, "test", key))
        for rows, key in ((ALL, "softened ece"), (ALL, "ece"), (CORRECT, "ece"))
    )
    parts.append(
        f"The ECE on test data falls {times(sum(each < 0 for each in change), n)}; it changes by {mean(change):+.4f} "
        f"to {ours:.4f}. That temperature alone gives {soft:.4f}."
    )
    if any(run[NETWORK]["misclassified"] for run in runs):
        reason = "so they hardly change it" if abs(fewer - ours) < SMALL else "so they matter"
        parts.append(f"Without the misclassified training examples in the projection it is {fewer:.4f}, {reason}.")
    return " ".join(parts)


def _precision(runs: Sequence[Results], rule: str) -> list[float]:
    return [run[ALL][rule]["prior precision"] for run in runs]


def _table(name: str, runs: Sequence[Results], side: str) -> Table:
    columns = [
        Column("predictions"),
        Column("conf. correct", "Mean confidence where the network is right."),
        Column("conf. wrong", "Mean confidence where the network is wrong.", "low"),
        Column("softened wrong", "The same for the network at the temperature with this confidence where it is right."),
        Column("confidence", "Mean probability of the predicted class."),
        Column("accuracy", "Share of correct predictions.", "high"),
        Column("NLL", "Minus the log of the mean probability of the true class.", "low"),
        Column("ECE", "Gap between confidence and accuracy over 15 bins; the paper's is another quantity.", "low"),
    ]
    paper: Mapping[str, tuple[float, ...]] = PAPER.get(name, {}) if side == "test" else {}
    lines = [(NETWORK, NETWORK, "")]
    lines += [(f"{rule}, {rows}", rows, rule) for rule in RULES for rows in (ALL, CORRECT)]
    table: list[list[str | Value | None]] = []
    for label, rows, rule in lines:
        printed = paper.get(NETWORK if rows == NETWORK else rule if rows == ALL else "", (None,) * 4)
        cells: list[Value | None] = []
        for key, number in zip(
            ("correct", "wrong", "softened wrong", "confidence", "accuracy", "nll", "ece"),
            (None, None, None, *printed), strict=True,
        ):  # fmt: skip
            numbers = _get(runs, rows, rule, side, key)
            cells.append(value(numbers, number))
        table.append([label, *cells])
    caption = f"{name}, {'training' if side == 'train' else 'test'} data: mean ± standard deviation over seeds"
    return Table(caption, columns, table)


EXPERIMENTS = {
    "calibration": Experiment(
        "calibration",
        "Is the loss-projected posterior calibrated better, and do misclassified examples do it?",
        NAMES,
        sized(estimate, FULL, QUICK),
        sized(run, FULL, QUICK),
        page,
    ),
}
