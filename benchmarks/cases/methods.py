"""Of all methods on one network, the projected posterior tells strange data apart best, and loses no accuracy.

Every method of the library, and laplace-torch where it is installed, on the same trained network and the same data:
seconds to fit, to choose the prior precision (the paper's grid, by held-out likelihood) and to predict, peak memory of
the fit, accuracy, NLL, ECE, and the AUROC of the method's own score between test data and strange data. Predictions are
those that the paper takes: the sampled network for diagonal and last-layer Laplace, SWAG and ensembles, the linearized
one for the rest. The full size takes LeNet on Fashion-MNIST against MNIST where ``--data`` has them; else it is a small
convolutional network on the digits 0 to 7, with 8 and 9 as strange data. Deep ensembles train other networks: the ratio
compares methods that start from the given one.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import nullbayes as nb
from benchmarks.frame import Settings, Skipped, in_fresh_process, result
from benchmarks.measure import Peak
from benchmarks.rivals import methods
from nullbayes.experiments.datasets import digits, read_images, there
from nullbayes.experiments.measuring import Clock, seeded
from nullbayes.experiments.methods import Bench
from nullbayes.experiments.networks import Build, cnn, lenet, train

SMALL = {
    "n": 60, "test": 40, "epochs": 3, "samples": 4, "members": 2, "budget": 20, "width": 3, "images": False,
    "fresh": False, "only": "",
}  # fmt: skip
FULL = {
    "n": 2000, "test": 10_000, "epochs": 60, "samples": 30, "members": 5, "budget": 300, "width": 16, "images": True,
    "fresh": True, "only": "",
}  # fmt: skip
LOST = 0.005  # what the claim allows of accuracy, as a share
_NEEDS_TRAINING = ("SWAG", "DeepEnsemble")
Data = dict[str, Tensor]


def run(settings: Settings) -> dict[str, Any]:
    """Train once, then measure one method after the other."""
    o = settings.options
    data, build, name = _problem(settings)
    with seeded(settings.seed), Clock(settings.device) as training:
        model = train(build().to(settings.device), data["x"], data["y"], o.epochs)
    notes = [f"{name}; the network was trained on {len(data['x'])} images in {training.seconds:.1f} s."]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "problem.pt")
        torch.save({"state": model.state_dict(), **data}, path)
        spec = {**vars(o), "path": path, "device": str(settings.device), "seed": settings.seed, "name": name}
        for method in _names(spec, o.only):
            asked = {**spec, "method": method}
            rows.append(in_fresh_process("benchmarks.cases.methods", "measure", asked) if o.fresh else measure(asked))
    if not o.fresh and settings.device.type == "cpu":
        notes.append("Peak memory on a CPU is a lower bound unless each method has a process of its own: fresh=true.")
    found = {row["method"]: row for row in rows}
    if missing := {"ProjectedPosterior", "MAP"} - found.keys():
        return result(rows, dict.fromkeys(("accuracy", "AUROC")), holds=None, notes=[*notes, f"Without {missing}."])
    projected, network = found["ProjectedPosterior"], found["MAP"]
    rivals = {k: r["auroc"] for k, r in found.items() if "Projected" not in k and k not in _NEEDS_TRAINING}
    best = max(rivals, key=lambda k: rivals[k])
    ratios = {
        "accuracy, projected/network": projected["accuracy"] / network["accuracy"] if network["accuracy"] else None,
        f"AUROC, projected/best of the others ({best})": projected["auroc"] / max(rivals[best], 1e-9),
    }
    kept = projected["accuracy"] >= (1 - LOST) * network["accuracy"]
    return result(rows, ratios, holds=kept and projected["auroc"] >= rivals[best], notes=notes)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Fit, tune, predict and score with one method."""
    o = SimpleNamespace(**spec)
    device = torch.device(o.device)
    data = torch.load(o.path, map_location=device, weights_only=True)
    build = _build(o.name, o.width)
    model = build().to(device).eval()
    model.load_state_dict(data.pop("state"))
    pair = ([(data["x"], data["y"])], [(data["x_held"], data["y_held"])])

    def member(seed: int) -> torch.nn.Module:
        with seeded(seed):
            return train(build().to(device), data["x"], data["y"], o.epochs)

    bench = Bench(model, *pair, o.samples, o.members, o.budget, o.seed, member=member)
    made = methods(bench)[o.method]()
    with warnings.catch_warnings(), seeded(o.seed):
        warnings.simplefilter("ignore")  # what a rival deprecates; what a fit has to say is in its report
        with Peak(device) as peak, Clock(device) as fitting:
            made.fit()
        with Clock(device) as tuning:
            alpha = made.tune()
        with Clock(device) as predicting:
            probs, inside = made.probs(data["x_test"]), made.score(data["x_test"])
        outside = made.score(data["x_strange"])
    m, targets = nb.metrics, data["y_test"]
    quality = {name: None if probs is None else getattr(m, name)(probs, targets) for name in ("accuracy", "nll", "ece")}
    return {
        "method": o.method, "fit_seconds": fitting.seconds, "tune_seconds": tuning.seconds,
        "predict_seconds": predicting.seconds, "peak_mib": None if peak.bytes is None else peak.bytes / 2**20,
        "prior_precision": alpha, **quality, "auroc": m.auroc(inside, outside),
    }  # fmt: skip


_DIGITS, _IMAGES = "CNN on digits", "LeNet on Fashion-MNIST"


def _build(name: str, width: int) -> Build:
    return lenet if name == _IMAGES else lambda: cnn(width, outputs=8)


def _problem(settings: Settings) -> tuple[Data, Build, str]:
    """Return data for training, tuning, testing, and strange ones, with the network for them."""
    o, device = settings.options, settings.device
    if o.images and there(settings.data, "fashion-mnist"):
        name = _IMAGES
        x, y = read_images(settings.data, "fashion-mnist", "train")
        x_test, y_test = read_images(settings.data, "fashion-mnist", "t10k")
        strange = read_images(settings.data, "mnist", "t10k")[0]
        held = (x[-1000:], y[-1000:])
    else:
        name = _DIGITS
        x, y = digits()
        order = torch.randperm(len(x), generator=settings.generator())
        x, y = x[order], y[order]
        strange, x, y = x[y >= 8], x[y < 8], y[y < 8]
        cut = (len(x) // 2, 2 * len(x) // 3)  # a half to train, a sixth to tune, a third to test
        held, x_test, y_test = (x[cut[0] : cut[1]], y[cut[0] : cut[1]]), x[cut[1] :], y[cut[1] :]
        x, y = x[: cut[0]], y[: cut[0]]
    data = {
        "x": x[: o.n], "y": y[: o.n], "x_held": held[0], "y_held": held[1],
        "x_test": x_test[: o.test], "y_test": y_test[: o.test], "x_strange": strange[: o.test],
    }  # fmt: skip
    return {key: value.to(device) for key, value in data.items()}, _build(name, o.width), name


def _names(spec: dict[str, Any], only: str) -> list[str]:
    """Return the methods to run: all, or those named, separated by plus signs."""
    bench = Bench(torch.nn.Identity(), [], [], 0, 0, 1, spec["seed"], member=lambda _: torch.nn.Identity())
    known = list(methods(bench))
    wanted = only.split("+") if only else known
    if odd := next((name for name in wanted if name not in known), None):
        msg = f"There is no method {odd!r}: there are {', '.join(known)}."
        raise Skipped(msg)
    return wanted
