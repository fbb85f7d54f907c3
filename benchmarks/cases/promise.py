"""With defaults, both posteriors predict as well as their network, on training data and on test data; with held-out \
data, as well as temperature scaling.

Networks of several kinds, and both posteriors of each with nothing but defaults. Each is judged twice:

- as it comes, beside the network: the accuracy on training data changes by at most 0.001; on test data the accuracy
  falls by at most 0.003 and the negative log-likelihood (NLL) of a target rises by at most 0.005;
- after ``tune`` on held-out data (classifiers only), beside temperature scaling on the same data, which is computed
  here and not by the library: on test data the NLL is higher by at most 0.003 and the accuracy lower by at most 0.002.

``kept`` says whether that is so. A posterior that never moves would keep it too, so ``test_std`` says how far the
outputs vary on test data (root mean square standard deviation). How well strange inputs are told apart (AUROC) and how
often the 90 % interval of a regression covers its target are there for information. Held-out data are neither trained
on nor scored.

``parts`` says which networks, joined by plus signs (``benchmarks/tasks.py`` describes them); those without their data
or packages are left out, with a note.
"""  # noqa: D205 - the claim takes more than a line

from __future__ import annotations

import math
from typing import Any

from torch.nn.functional import cross_entropy

import nullbayes as nb
from benchmarks.frame import Settings, Skipped, result
from benchmarks.problems import KINDS
from benchmarks.tasks import PARTS
from nullbayes.experiments.measuring import Clock
from nullbayes.experiments.tasks import Data, Task, batches, logits_of, thinned

_ALL = "digits+batchnorm+lenet+resnet20+uci+minilm"
SMALL = {
    "parts": _ALL, "test": 40, "held_out": 20, "digits_n": 40, "digits_steps": 40, "batchnorm_epochs": 20,
    "lenet_data": "mnist", "lenet_n": "30", "lenet_epochs": 2, "resnet_n": 10, "resnet_parameters": "linear.*",
    "splits": 1, "uci_epochs": 5, "minilm": "", "minilm_parameters": "head.*", "minilm_n": 60, "minilm_epochs": 1,
    "minilm_length": 16,
}  # fmt: skip
FULL = {
    "parts": _ALL, "test": 2000, "held_out": 1000, "digits_n": 1000, "digits_steps": 1200, "batchnorm_epochs": 40,
    "lenet_data": "fashion-mnist+mnist", "lenet_n": "2000", "lenet_epochs": 60, "resnet_n": 150,
    "resnet_parameters": "layer3.*+linear.*", "splits": 1, "uci_epochs": 400, "minilm": "",
    "minilm_parameters": "bert.encoder.layer.5.*+head.*", "minilm_n": 600, "minilm_epochs": 12, "minilm_length": 32,
}  # fmt: skip
CUDA = {
    "test": 10_000, "lenet_n": "2000+60000", "resnet_n": 10_000, "resnet_parameters": "*", "splits": 5,
    "minilm_n": 15_000, "minilm_epochs": 6,
}  # fmt: skip

TRAIN_ACCURACY, TEST_ACCURACY, TEST_NLL = 0.001, 0.003, 0.005  # what the claim allows beside the network
SCALED_ACCURACY, SCALED_NLL = 0.002, 0.003  # and beside temperature scaling
CHECKED = 5000  # training examples at most
NINETY = 1.645  # standard deviations to either side
ROUNDING = 1e-9  # of accuracies, which are shares
HELD_OUT = "held-out data"
Row = dict[str, Any]
COLUMNS = (
    "network", "method", "kept", "n", "parameters", "fit_seconds", "prior_precision", "decided_by", "temperature",
    "train_accuracy", "test_accuracy", "accuracy_change", "train_nll", "test_nll", "nll_change", "test_std", "coverage",
)  # fmt: skip


def run(settings: Settings) -> dict[str, Any]:
    """Measure one network after the other."""
    wanted, rows, notes = settings.options.parts.split("+"), list[Row](), list[str]()
    if odd := next((part for part in wanted if part not in PARTS), None):
        msg = f"There is no part {odd!r}: there are {', '.join(PARTS)}."
        raise Skipped(msg)
    for part in wanted:
        try:
            for task in PARTS[part](settings):
                rows += measure(settings, task)
        except Skipped as reason:
            notes.append(f"{part} is left out. {reason}")
    if not rows:
        raise Skipped(" ".join(notes))
    judged = [row for row in rows if row["kept"] is not None]
    return result(rows, _summary(judged), holds=all(row["kept"] for row in judged), notes=notes)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(settings: Settings, task: Task) -> list[Row]:
    """Return rows for the network, for temperature scaling, and for each posterior as it comes and after tuning."""
    scaled = None if task.held_out is None else _scaled(task, task.held_out)
    rows = list[Row]()
    for key, (kind, _) in KINDS.items():
        with Clock(settings.device) as fitting:
            posterior = kind(task.model, task.likelihood, parameters=task.parameters.get(key))
            posterior.fit(batches(task.train), generator=settings.generator(), progress=False)
        name = kind.__name__.removesuffix("Posterior")
        network, own = _scores(posterior, task)
        if not rows:
            rows.append(_row(task, "network", **network))
            rows += [] if scaled is None else [_row(task, "temperature scaling", **scaled)]
        row = _row(task, name, fit_seconds=fitting.seconds, decided_by=_reason(posterior.report), **own)
        rows.append(_judged(row, network, TEST_ACCURACY, TEST_NLL, TRAIN_ACCURACY))
        if task.held_out is not None and scaled is not None:
            posterior.tune(batches(task.held_out))
            row = _row(task, f"{name} + held-out", decided_by=HELD_OUT, **_scores(posterior, task)[1])
            rows.append(_judged(row, scaled, SCALED_ACCURACY, SCALED_NLL))
    return rows


def _row(task: Task, method: str, **values: Any) -> Row:
    """Return a row with its columns in their order."""
    return {**dict.fromkeys(COLUMNS), "network": task.name, "method": method, "n": len(task.train[1]), **values}


def _scores(posterior: Any, task: Task) -> tuple[Row, Row]:
    """Return how well the network predicts training data and test data, and how well its posterior does."""
    checks = {
        "train": posterior.check_fit(batches(thinned(task.train, CHECKED))),
        "test": posterior.check_fit(batches(task.test)),
    }
    network, own = (
        {
            f"{side}_{what}": getattr(check, f"{what}_{who}")
            for side, check in checks.items()
            for what in ("accuracy", "nll")
        }
        for who in ("model", "posterior")
    )
    own |= {
        "parameters": posterior.report.n_parameters,
        "prior_precision": posterior.prior_precision,
        "temperature": posterior.temperature,
        "test_std": checks["test"].std,
    }
    x, y = task.test
    if task.likelihood == "regression":
        prediction = posterior.predict(x)
        noise = prediction.noise
        for side, variance in ((network, 0.0 * prediction.variance), (own, prediction.variance)):
            covered = (y - prediction.mean).abs() <= NINETY * (variance + noise).sqrt()
            side["coverage"] = float(covered.double().mean())
    for column, score in (("auroc", "max_variance"), ("auroc_mi", "mutual_information")) if task.strangers else ():
        inside = posterior.ood_score(x, score)
        for name, strange in task.strangers.items():
            own[f"{column}_{name}"] = nb.metrics.auroc(inside, posterior.ood_score(strange, score))
    return network, own


def _reason(report: nb.FitReport) -> str:
    """Say what the default prior precision was decided by."""
    promise = report.promise
    if promise is None:
        return report.precision_rule
    if report.prior_precision > promise.needed:
        return "closed form"
    return f"{promise.decided_by} {'apart' if promise.needed_apart >= promise.needed_inside else 'inside'}"


def _judged(own: Row, beside: Row, accuracy: float, nll: float, train_accuracy: float | None = None) -> Row:
    """Add how far the test scores are from others, and whether that is within what the claim allows."""
    own["nll_change"] = own["test_nll"] - beside["test_nll"]
    own["kept"] = own["nll_change"] <= nll
    if own["test_accuracy"] is not None:
        own["accuracy_change"] = own["test_accuracy"] - beside["test_accuracy"]
        own["kept"] &= own["accuracy_change"] >= -accuracy - ROUNDING
        if train_accuracy is not None:
            own["kept"] &= abs(own["train_accuracy"] - beside["train_accuracy"]) <= train_accuracy + ROUNDING
    return own


def _scaled(task: Task, held_out: Data) -> Row:
    """Return temperature scaling: what of the test data the network predicts at the temperature of the held-out."""
    logits, y = logits_of(task.model, held_out[0]), held_out[1]
    low, high, golden = math.log(0.05), math.log(20.0), (math.sqrt(5.0) - 1.0) / 2.0
    while high - low > 1e-4:
        left, right = high - golden * (high - low), low + golden * (high - low)
        a, b = (float(cross_entropy(logits / math.exp(point), y)) for point in (left, right))
        low, high = (low, right) if a <= b else (left, high)
    temperature = math.exp((low + high) / 2)
    logits, y = logits_of(task.model, task.test[0]) / temperature, task.test[1]
    return {
        "temperature": temperature,
        "test_accuracy": float((logits.argmax(1) == y).double().mean()),
        "test_nll": float(cross_entropy(logits, y)),
    }


def _summary(judged: list[Row]) -> dict[str, float | None]:
    """Return the worst that happened, as it comes and after tuning."""
    tuned = [row for row in judged if row["decided_by"] == HELD_OUT]
    plain = [row for row in judged if row["decided_by"] != HELD_OUT]
    pairs = [(row["test_accuracy"], row["accuracy_change"]) for row in judged if row["test_accuracy"] is not None]
    return {
        "test accuracy, posterior/network, worst": min(
            (own / (own - change) for own, change in pairs if own > change), default=None
        ),
        "test NLL, posterior - network, worst": max((row["nll_change"] for row in plain), default=None),
        "test NLL, tuned - temperature scaling, worst": max((row["nll_change"] for row in tuned), default=None),
    }
