"""The page of the experiment on ImageNet, from its results alone."""

from __future__ import annotations

import statistics

from nullbayes.experiments.frame import Results
from nullbayes.experiments.photographs_page import cell, cost, fitted, images, quickly
from nullbayes.page import Column, Page, Section, Table

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
_LED = ("accuracy", "NLL", "AUROC against Places365")  # in the lead


def page(results: Results) -> Page:
    """Return the page of what `nullbayes.experiments.imagenet.run` returned."""
    sections = [_predictions(results), _strangers(results), cost(results), _how(results)]
    return Page("A Swin transformer on ImageNet", _lead(results), sections)


def _lead(results: Results) -> str:
    told = []
    for name, score in (("MAP", "max_probability"), ("Loss-projected", "max_variance")):
        if seeds := fitted(results).get(name):
            mean = {key: statistics.fmean(each[key] for each in seeds) for key in ("accuracy", "nll")}
            mean[score] = statistics.fmean(each["auroc"][score] for each in seeds)
            figures = (
                f"{heading} {mean[key]:.3f} ({PAPER[name][key]:.3f})" for key, heading in zip(mean, _LED, strict=True)
            )
            told.append(f"{name}: {', '.join(figures)}.")
    return f"{' '.join(told)} The paper's figures are in brackets.{quickly(results)}"


def _predictions(results: Results) -> Section:
    columns = [Column("Method"), *(Column(*head) for head in FIGURES.values())]
    rows = [
        [name, *(cell(seeds, key, paper=PAPER[name][key]) for key in FIGURES)]
        for name, seeds in fitted(results).items()
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
        [name, *(cell(seeds, "auroc", key, paper=PAPER[name].get(key)) for key in SCORES)]
        for name, seeds in fitted(results).items()
    ]
    return Section("Places365 as strangers", [], [Table("AUROC, by score", columns, rows)])


def _how(results: Results) -> Section:
    counts = results["images"]
    varied = f"of {', '.join(results['varied'])} alone" if results["varied"] else "of all of its parameters"
    text = [
        f"A Swin-T with {results['parameters']:,} parameters; images of {results['pixels']} pixels. The posterior "
        f"{varied} keeps the losses of {counts['rows']:,} training images, has {results['samples']} samples, and was "
        f"projected for at most {results['sweeps']} sweeps over blocks of {results['block']} images; the paper has "
        "about a million images, 5 samples, and 15 iterations over blocks of 16.",
        f"The prior precision was chosen on {counts['validation']:,} validation images, which are not among the "
        f"{counts['test']:,} judged. The paper takes a closed form.",
    ]
    return Section("How it was done", text, [images(results)])
