"""The page of the experiment on CelebA, from its results alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from nullbayes.experiments.frame import Results
from nullbayes.page import Column, Page, Section, Table, Value

KINDS = ("Food-101", "Bald only", "Eyeglasses only", "Mustache only")

# AUROC in the paper's table, in the order of KINDS.
PAPER = {
    "Max logit": (0.959, 0.32, 0.57, 0.40),
    "Deep ensemble": (0.957, 0.71, 0.74, 0.61),
    "Projected": (0.958, 0.81, 0.75, 0.66),
    "Loss-projected": (0.947, 0.76, 0.72, 0.62),
    "Projected, Lanczos": (0.954, 0.80, 0.74, 0.64),
    "Local ensemble": (0.951, 0.79, 0.73, 0.63),
    "LLA": (0.954, 0.80, 0.74, 0.64),
    "LLA, diagonal": (0.797, 0.54, 0.57, 0.45),
    "SCOD": (0.964, 0.79, 0.73, 0.64),
    "SWAG": (0.740, 0.70, 0.52, 0.49),
    "SLU": (0.953, 0.80, 0.74, 0.64),
}
PAPER_PARAMETERS = 3_858_309


def page(results: Results) -> Page:
    """Return the page of the results of `nullbayes.experiments.celeba.run`.

    Parameters
    ----------
    results : dict
        As ``run`` returned them, or as JSON gives them back.
    """
    sections = [_strangers(results), _predictions(results), _cost(results), _how(results)]
    return Page("CelebA with three attributes held out", _lead(results), sections)


def _value(numbers: Sequence[float | None], paper: float | None = None) -> Value | None:
    known = [number for number in numbers if number is not None]
    if not known:
        return None
    spread = statistics.stdev(known) if len(known) > 1 else None
    return Value(statistics.fmean(known), spread, paper)


def _mean_auroc(results: Results, name: str, kind: str) -> float:
    return statistics.fmean(each["auroc"][kind] for each in results["methods"][name])


def _lead(results: Results) -> str:
    best = {kind: max(results["methods"], key=lambda name: _mean_auroc(results, name, kind)) for kind in KINDS}
    shown = "Projected" if "Projected" in results["methods"] else next(iter(results["methods"]))
    ours = ", ".join(f"{_mean_auroc(results, shown, kind):.3f} ({kind})" for kind in KINDS)
    theirs = ", ".join(f"{number:.3f}" for number in PAPER[shown])
    tops = ", ".join(f"{name} ({kind})" for kind, name in best.items())
    small = " These are the figures of a quick run, on a small network and few images." if results["quick"] else ""
    return f"AUROC of the method “{shown}”: {ours}; the paper has {theirs}. The best method is {tops}.{small}"


def _strangers(results: Results) -> Section:
    rows: list[list[str | Value | None]] = []
    for name, seeds in results["methods"].items():
        paper = PAPER.get(name, (None,) * len(KINDS))
        cells = [_value([each["auroc"][kind] for each in seeds], said) for kind, said in zip(KINDS, paper, strict=True)]
        rows.append([name, seeds[0]["score"], *cells])
    for name, seeds in results["methods"].items():
        if seeds[0]["calibrated"] is not None:
            rows.append(
                [f"{name}, calibrated", "combined", *(_value([s["calibrated"][kind] for s in seeds]) for kind in KINDS)]
            )
    meaning = "AUROC of the score, with these images as positives and familiar test images as negatives."
    columns = [Column("Method"), Column("Score"), *(Column(kind, meaning, "high") for kind in KINDS)]
    text = (
        "“Bald only” are test images with that attribute and without the other two. The paper does not say which score "
        "its deep ensemble, LLA and SWAG have; here it is the largest variance of a logit, as for the posteriors. The "
        "rows “calibrated” have no counterpart in the paper: the posterior decides by the statistics that tell "
        "held-out images from images that were spoiled on purpose."
    )
    return Section("Strangers", [text], [Table("AUROC against four kinds of strangers", columns, rows)])


def _predictions(results: Results) -> Section:
    kinds = {"nll": ("NLL", "low"), "accuracy": ("Accuracy", "high"), "ece": ("ECE", "low")}
    columns = [Column("Method"), *(Column(name, "Mean over all attributes.", best) for name, best in kinds.values())]
    rows = [
        [name, *(_value([each[kind] for each in seeds]) for kind in kinds)]
        for name, seeds in results["methods"].items()
        if seeds[0]["nll"] is not None
    ]
    text = "Test images without a held-out attribute. Methods that are only a score make no predictions."
    return Section("Familiar faces", [text], [Table("Predictions of the attributes", columns, rows)])


def _cost(results: Results) -> Section:
    columns = [
        Column("Method"), Column("Seconds", "Of the fit.", "low", 1), Column("Memory, MB", "At the peak.", "low", 0),
        Column("Rank", "Directions that the method found.", None, 0), Column("Prior precision", "", None, 3),
    ]  # fmt: skip
    rows: list[list[str | Value | None]] = []
    for name, seeds in results["methods"].items():
        memory = [None if each["memory"] is None else each["memory"] / 1e6 for each in seeds]
        cells = [
            [each["seconds"] for each in seeds],
            memory,
            *([s[key] for s in seeds] for key in ("rank", "precision")),
        ]
        rows.append([name, *(_value(cell) for cell in cells)])
    notes = sorted(
        {f"{name}: {note}" for name, seeds in results["methods"].items() for s in seeds for note in s["notes"]}
    )
    return Section("What it took", notes, [Table("Cost of the fits", columns, rows)])


def _how(results: Results) -> Section:
    images = results["images"]
    same = results["parameters"] == PAPER_PARAMETERS
    p = f"{results['parameters']:,} parameters" + (", as in the paper" if same else f" (paper: {PAPER_PARAMETERS:,})")
    text = [
        f"A Visual Attention Network with {p} and {results['outputs']} outputs was trained on {images['training']:,} "
        f"images for {results['epochs']} epochs with Adam, at a rate that falls from 1e-3 to 1e-5 along a cosine. "
        f"Images are the central square of the aligned ones, {results['pixels']} pixels wide; the paper gives no size.",
        f"All methods were fitted to {images['rows']:,} of these images and hold {results['budget']} numbers per "
        f"parameter. Prior precisions were chosen on {images['validation']:,} validation images. Posteriors have "
        f"{results['samples']} samples; the projection of the outputs stops after {results['sweeps']} sweeps, whether "
        f"or not it has reached its tolerance. The ensemble has {results['members']} networks, trained once.",
        "The score of the max logit is minus the largest logit of an image. AUROC, NLL, accuracy and ECE (15 equal "
        "bins, both ends included) are those of nb.metrics.",
    ]
    counts = Table("Images", [Column("Set"), Column("Images", "", None, 0)], [[n, Value(c)] for n, c in images.items()])
    return Section("How it was done", text, [counts])
