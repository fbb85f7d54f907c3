"""The page of the experiment on ImageNet, from its results alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from nullbayes.experiments.frame import Results
from nullbayes.page import Column, Page, Section, Table, Value

# Figure -> head of the column, its definition, and which end is better.
FIGURES = {
    "confidence": ("Confidence", "Mean of the largest probability.", None),
    "nll": ("NLL", "Minus the log of the mean probability of the class, in nats.", "low"),
    "accuracy": ("Accuracy", "Share of images whose most probable class is right.", "high"),
    "brier": ("Brier", "Mean over images of the summed squares of p − y.", "low"),
    "ece": ("ECE", "Over 15 equal bins of confidence, both ends included.", "low"),
    "mce": ("MCE", "Of the worst of these bins.", "low"),
}
PAPER = {
    "MAP": {
        "confidence": 0.626, "nll": 1.358, "accuracy": 0.726, "brier": 0.407, "ece": 0.136, "mce": 0.583,
        "max_probability": 0.751,
    },
    "Loss-projected": {
        "confidence": 0.618, "nll": 1.427, "accuracy": 0.716, "brier": 0.394, "ece": 0.107, "mce": 0.259,
        "max_variance": 0.756,
    },
}  # fmt: skip
SCORES = {
    "max_probability": "One minus the largest probability.",
    "max_variance": "Largest variance of a linearized logit.",
    "calibrated": "What the calibrated posterior decides by.",
}


def page(results: Results) -> Page:
    """Return the page of the results of `nullbayes.experiments.imagenet.run`.

    Parameters
    ----------
    results : dict
        As ``run`` returned them, or as JSON gives them back.
    """
    sections = [_predictions(results), _strangers(results), _how(results)]
    return Page("A Swin transformer on ImageNet", _lead(results), sections)


def _value(numbers: Sequence[float | None], paper: float | None = None) -> Value | None:
    known = [number for number in numbers if number is not None]
    if not known:
        return None
    return Value(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, paper)


def _lead(results: Results) -> str:
    network, ours = (results["methods"][name][0] for name in ("MAP", "Loss-projected"))
    auroc = statistics.fmean(each["auroc"]["max_variance"] for each in results["methods"]["Loss-projected"])
    small = " These are the figures of a quick run, on few images." if results["quick"] else ""
    return (
        f"Accuracy {network['accuracy']:.3f} of the network and {ours['accuracy']:.3f} of the posterior (paper: 0.726 "
        f"and 0.716), NLL {network['nll']:.3f} and {ours['nll']:.3f} (1.358 and 1.427); AUROC against Places365 "
        f"{network['auroc']['max_probability']:.3f} and {auroc:.3f} (0.751 and 0.756).{small}"
    )


def _predictions(results: Results) -> Section:
    columns = [Column("Method"), *(Column(*head) for head in FIGURES.values())]
    rows = [
        [name, *(_value([each[key] for each in seeds], PAPER[name][key]) for key in FIGURES)]
        for name, seeds in results["methods"].items()
    ]
    text = (
        "The weights are those that the authors of the network publish, with an accuracy of 0.812 on all of the "
        "validation images; the paper took others, of a lower accuracy, so that its figures are not those of this "
        "network."
    )
    return Section("Validation images", [text], [Table("Predictions", columns, rows)])


def _strangers(results: Results) -> Section:
    columns = [Column("Method"), *(Column(name, meaning, "high") for name, meaning in SCORES.items())]
    rows = [
        [name, *(_value([each["auroc"].get(key) for each in seeds], PAPER[name].get(key)) for key in SCORES)]
        for name, seeds in results["methods"].items()
    ]
    return Section("Places365 as strangers", [], [Table("AUROC, by score", columns, rows)])


def _how(results: Results) -> Section:
    images, posterior = results["images"], results["methods"]["Loss-projected"]
    varied = f"of {', '.join(results['varied'])} alone" if results["varied"] else "of all of its parameters"
    text = [
        f"A Swin-T with {results['parameters']:,} parameters; images of {results['pixels']} pixels. The posterior "
        f"{varied} keeps the losses of {images['rows']:,} training images, has {results['samples']} samples, and was "
        f"projected for at most {results['sweeps']} sweeps over blocks of {results['block']} images; the paper has "
        "about a million images, 5 samples, and 15 iterations over blocks of 16.",
        f"The prior precision was chosen on {images['held_out']:,} validation images, which are not among the "
        f"{images['test']:,} judged. The paper takes a closed form.",
        *sorted({note for each in posterior for note in each["notes"]}),
    ]
    columns = [
        Column("Seed"), Column("Seconds", "Of the fit.", "low", 1), Column("Memory, MB", "At the peak.", "low", 0),
        Column("Residual", "Share of the noise's effect on the losses that is left.", "low"),
        Column("Prior precision", "", None, 3),
    ]  # fmt: skip
    rows: list[list[str | Value | None]] = []
    for i, each in enumerate(posterior):
        memory = None if each["memory"] is None else each["memory"] / 1e6
        numbers = (each["seconds"], memory, each["residual"], each["precision"])
        rows.append([str(i), *(None if number is None else Value(number) for number in numbers)])
    return Section("How it was done", text, [Table("The fit of each seed", columns, rows)])
