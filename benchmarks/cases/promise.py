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

``parts`` says which networks, joined by plus signs; those without their data or packages are left out, with a note:

- digits: the network of the demonstration; batchnorm: a CNN with batch normalization, on scikit-learn's digits;
- lenet: on the folders ``lenet_data``, with ``lenet_n`` images (several of either are joined by plus signs);
- resnet20: the published network on CIFAR-10, with ``resnet_parameters`` free (globs joined by plus signs; all: ``*``);
- uci: regressions, networks of one hidden layer, on the first ``splits`` of the usual splits;
- minilm: a sentence encoder fine-tuned on CLINC150, ``minilm_parameters`` free for the loss-projected posterior and the
  head for the projected one, to which 150 outputs are 150 rows an example. ``minilm`` is the folder with its weights.
"""  # noqa: D205 - the claim takes more than a line

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import nullbayes as nb
from benchmarks import text
from benchmarks.frame import Settings, Skipped, result
from benchmarks.measure import Clock, seeded
from benchmarks.problems import KINDS, batchnorm_cnn, digits, lenet, read_cifar, read_images, read_uci, resnet20, train

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
BATCH = 250
NINETY = 1.645  # standard deviations to either side
ROUNDING = 1e-9  # of accuracies, which are shares
HELD_OUT = "held-out data"
Inputs = Tensor | Mapping[str, Tensor]
Data = tuple[Inputs, Tensor]
Row = dict[str, Any]
COLUMNS = (
    "network", "method", "kept", "n", "parameters", "fit_seconds", "prior_precision", "decided_by", "temperature",
    "train_accuracy", "test_accuracy", "accuracy_change", "train_nll", "test_nll", "nll_change", "test_std", "coverage",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A trained network, and the data to judge its posteriors by: all on the device.

    Attributes
    ----------
    name : str
        Of network and data.
    model : nn.Module
        Trained.
    train, test, held_out : (inputs, targets)
        None of them overlaps another; ``held_out`` is None for regressions.
    strangers : mapping of inputs
        By the name that their columns have.
    likelihood : str
        "classification" or "regression".
    parameters : mapping
        Which may vary, for the rows "output" and "loss"; all where nothing is said.
    """

    name: str
    model: nn.Module
    train: Data
    test: Data
    held_out: Data | None = None
    strangers: Mapping[str, Inputs] = field(default_factory=dict)
    likelihood: str = "classification"
    parameters: Mapping[str, list[str]] = field(default_factory=dict)


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
            posterior.fit(_batches(task.train), generator=settings.generator(), progress=False)
        name = kind.__name__.removesuffix("Posterior")
        network, own = _scores(posterior, task)
        if not rows:
            rows.append(_row(task, "network", **network))
            rows += [] if scaled is None else [_row(task, "temperature scaling", **scaled)]
        row = _row(task, name, fit_seconds=fitting.seconds, decided_by=_reason(posterior.report), **own)
        rows.append(_judged(row, network, TEST_ACCURACY, TEST_NLL, TRAIN_ACCURACY))
        if task.held_out is not None and scaled is not None:
            posterior.tune(_batches(task.held_out))
            row = _row(task, f"{name} + held-out", decided_by=HELD_OUT, **_scores(posterior, task)[1])
            rows.append(_judged(row, scaled, SCALED_ACCURACY, SCALED_NLL))
    return rows


def _row(task: Task, method: str, **values: Any) -> Row:
    """Return a row with its columns in their order."""
    return {**dict.fromkeys(COLUMNS), "network": task.name, "method": method, "n": len(task.train[1]), **values}


def _scores(posterior: Any, task: Task) -> tuple[Row, Row]:
    """Return how well the network predicts training data and test data, and how well its posterior does."""
    checks = {
        "train": posterior.check_fit(_batches(_thinned(task.train, CHECKED))),
        "test": posterior.check_fit(_batches(task.test)),
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
    logits, y = _logits(task.model, held_out[0]), held_out[1]
    low, high, golden = math.log(0.05), math.log(20.0), (math.sqrt(5.0) - 1.0) / 2.0
    while high - low > 1e-4:
        left, right = high - golden * (high - low), low + golden * (high - low)
        a, b = (float(cross_entropy(logits / math.exp(point), y)) for point in (left, right))
        low, high = (low, right) if a <= b else (left, high)
    temperature = math.exp((low + high) / 2)
    logits, y = _logits(task.model, task.test[0]) / temperature, task.test[1]
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


# --- data -------------------------------------------------------------------------------------------------------------


def _take(inputs: Inputs, index: Any) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs[index]
    return {name: part[index] for name, part in inputs.items()}


def _batches(data: Data) -> list[Data]:
    x, y = data
    slices = (slice(start, start + BATCH) for start in range(0, len(y), BATCH))
    return [(_take(x, part), y[part]) for part in slices]


def _thinned(data: Data, most: int) -> Data:
    """Return at most so many examples, at equal distances: some data are sorted by class."""
    x, y = data
    index = torch.arange(min(most, len(y)), device=y.device) * len(y) // min(most, len(y))
    return _take(x, index), y[index]


@torch.no_grad()
def _logits(model: nn.Module, x: Inputs) -> Tensor:
    """Return the network's logits, in double precision."""
    n = len(x if isinstance(x, Tensor) else next(iter(x.values())))
    parts = (_take(x, slice(start, start + BATCH)) for start in range(0, n, BATCH))
    return torch.cat([model(part) if isinstance(part, Tensor) else model(**part) for part in parts]).double()


def _halves(settings: Settings, x: Tensor, y: Tensor) -> dict[str, Data]:
    """Return one half of the data as held-out and the other as test, or as many as the options say."""
    o, half = settings.options, len(y) // 2
    held_out, test = slice(min(half, o.held_out)), slice(half, half + o.test)
    return {"held_out": (x[held_out], y[held_out]), "test": (x[test], y[test])}


# --- networks ---------------------------------------------------------------------------------------------------------


def _digits(settings: Settings) -> Iterator[Task]:
    """Yield the network of the demonstration, which never saw an 8 or a 9."""
    o, device, demo = settings.options, settings.device, importlib.import_module("nullbayes.demo")
    digits()  # says what is missing
    data = demo.load_digits()
    data = replace(data, x_train=data.x_train[: o.digits_n], y_train=data.y_train[: o.digits_n])
    with seeded(settings.seed):
        model = demo.train_on_digits(data, o.digits_steps).to(device)
    x, y, x_test, y_test, unseen = (getattr(data, each.name).to(device) for each in fields(data))
    yield Task(
        "CNN, digits 0 to 7", model, (x, y), **_halves(settings, x_test, y_test), strangers={"other": unseen[: o.test]}
    )


def _batchnorm(settings: Settings) -> Iterator[Task]:
    """Yield a network with batch normalization."""
    o, (x, y) = settings.options, digits()
    order = torch.randperm(len(x), generator=settings.generator())
    x, y = x[order].to(settings.device), y[order].to(settings.device)
    n = min(900, o.digits_n)
    with seeded(settings.seed):
        model = train(batchnorm_cnn().to(settings.device), x[:n], y[:n], o.batchnorm_epochs)
    yield Task("BatchNorm CNN, digits", model, (x[:n], y[:n]), **_halves(settings, x[900:], y[900:]))


def _lenet(settings: Settings) -> Iterator[Task]:
    """Yield LeNet on data sets that are each other's strangers."""
    o, device = settings.options, settings.device
    for own in o.lenet_data.split("+"):
        x, y = (part.to(device) for part in read_images(settings.data, own, "train"))
        x_test, y_test = (part.to(device) for part in read_images(settings.data, own, "t10k"))
        wanted = {"other": "mnist" if own != "mnist" else "fashion-mnist", "kmnist": "kmnist"}
        there = {column: name for column, name in wanted.items() if (settings.data / name).is_dir()}
        strangers = {
            column: read_images(settings.data, name, "t10k")[0][: o.test].to(device) for column, name in there.items()
        }
        for n in map(int, o.lenet_n.split("+")):
            epochs, batch_size = (o.lenet_epochs, 128) if n <= 10_000 else (20, 256)
            with seeded(settings.seed):
                model = train(lenet().to(device), x[:n], y[:n], epochs, batch_size=batch_size)
            held_out, start = (x[n:][-o.held_out :], y[n:][-o.held_out :]), 0
            if not len(held_out[1]):
                held_out, start = (x_test[: o.held_out], y_test[: o.held_out]), o.held_out
            test = x_test[start:][: o.test], y_test[start:][: o.test]
            yield Task(f"LeNet, {own}", model, (x[:n], y[:n]), test, held_out, strangers)


def _resnet20(settings: Settings) -> Iterator[Task]:
    """Yield the published ResNet-20."""
    o, device = settings.options, settings.device
    model, published = resnet20(settings.data)
    known, new = read_cifar(settings.data, "train"), read_cifar(settings.data, "test")
    if not published or known is None or new is None:
        msg = (
            "This needs weights/resnet20-12fca82f.th and cifar10*/*.npz with x_train, y_train, x_test and y_test in "
            "the data folder: --data FOLDER, or NULLBAYES_DATA."
        )
        raise Skipped(msg)

    def some(data: Data, start: int, stop: int) -> Data:
        index = torch.randperm(len(data[1]), generator=settings.generator())[start:stop]
        return _take(data[0], index).to(device), data[1][index].to(device)

    free = o.resnet_parameters.split("+")
    yield Task(
        "ResNet-20, CIFAR-10", model.to(device), some(known, 0, o.resnet_n),
        test=some(new, o.held_out, o.held_out + o.test), held_out=some(new, 0, o.held_out),
        parameters={"output": free, "loss": free},
    )  # fmt: skip


def _uci(settings: Settings) -> Iterator[Task]:
    """Yield small regressions."""
    o = settings.options
    for name in ("concrete", "energy", "yacht"):
        for split in range(o.splits):
            x, y, x_test, y_test = (part.to(settings.device) for part in read_uci(settings.data, name, split))
            with seeded(settings.seed):
                model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1)).to(settings.device)
                train(model, x, y, o.uci_epochs, batch_size=32, loss=mse_loss)
            yield Task(f"MLP, {name} {split}", model, (x, y), (x_test, y_test), likelihood="regression")


def _minilm(settings: Settings) -> Iterator[Task]:
    """Yield a sentence encoder, fine-tuned to tell 150 intents apart."""
    o, device = settings.options, settings.device
    splits, folder = text.read_clinc(settings.data), text.weights_folder(o.minilm, settings.data)

    def some(split: str, most: int) -> Data:
        texts, y = splits[split]
        index = _thinned((torch.arange(len(y)), y), most)[0].tolist()
        x = text.encode(folder, [texts[i] for i in index], o.minilm_length)
        return {name: part.to(device) for name, part in x.items()}, y[index].to(device)

    with seeded(settings.seed):
        model = text.minilm(folder, 150).to(device)
        known = some("train", o.minilm_n)
        text.fine_tune(model, *known, o.minilm_epochs)
    yield Task(
        "MiniLM, CLINC150", model, known, test=some("test", o.test), held_out=some("val", o.held_out),
        strangers={"other": some("oos_test", o.test)[0]},
        parameters={"output": ["head.*"], "loss": o.minilm_parameters.split("+")},
    )  # fmt: skip


PARTS = {
    "digits": _digits, "batchnorm": _batchnorm, "lenet": _lenet, "resnet20": _resnet20, "uci": _uci, "minilm": _minilm,
}  # fmt: skip
