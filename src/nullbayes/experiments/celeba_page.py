"""The page of the experiment on CelebA, from its results alone."""

from __future__ import annotations

import statistics

from nullbayes.experiments.frame import Results
from nullbayes.experiments.photographs_page import Cells, cell, cost, fitted, images, quickly
from nullbayes.page import Column, Page, Section, Table

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
    """Return the page of what `nullbayes.experiments.celeba.run` returned."""
    sections = [_strangers(results), _predictions(results), cost(results), _how(results)]
    return Page("CelebA with three attributes held out", _lead(results), sections)


def _lead(results: Results) -> str:
    means = {
        name: {kind: statistics.fmean(each["auroc"][kind] for each in seeds) for kind in KINDS}
        for name, seeds in fitted(results).items()
    }
    said = [f"{kind} {max(means, key=lambda name: means[name][kind])}" for kind in KINDS]
    shown = "Projected" if "Projected" in means else next(iter(means))
    ours = ", ".join(f"{kind} {means[shown][kind]:.3f} ({p:.3f})" for kind, p in zip(KINDS, PAPER[shown], strict=True))
    return (
        f"AUROC of the method “{shown}”, with the paper's in brackets: {ours}. The best methods: {', '.join(said)}."
        f"{quickly(results)}"
    )


def _strangers(results: Results) -> Section:
    rows, calibrated = list[Cells](), list[Cells]()
    for name, seeds in fitted(results).items():
        paper = zip(KINDS, PAPER[name], strict=True)
        rows.append([name, seeds[0]["score"], *(cell(seeds, "auroc", kind, paper=said) for kind, said in paper)])
        if seeds[0]["calibrated"] is not None:
            cells = (cell(seeds, "calibrated", kind) for kind in KINDS)
            calibrated.append([f"{name}, calibrated", "combined", *cells])
    columns = [Column("Method"), Column("Score"), *(Column(kind, "", "high") for kind in KINDS)]
    text = (
        "AUROC of the score, with strangers as positives and familiar test images as negatives. “Bald only” are test "
        "images with that attribute and without the other two. The paper does not say which score its deep ensemble, "
        "LLA and SWAG have; here it is the largest variance of a logit, as for the posteriors. The rows “calibrated” "
        "have no counterpart in the paper: the posterior decides by the statistics that tell held-out images from "
        "images that were spoiled on purpose."
    )
    return Section("Strangers", [text], [Table("AUROC against four kinds of strangers", columns, rows + calibrated)])


def _predictions(results: Results) -> Section:
    kinds = {"nll": ("NLL", "low"), "accuracy": ("Accuracy", "high"), "ece": ("ECE", "low")}
    columns = [Column("Method"), *(Column(name, "", best) for name, best in kinds.values())]
    rows = [
        [name, *(cell(seeds, kind) for kind in kinds)]
        for name, seeds in fitted(results).items()
        if seeds[0]["nll"] is not None
    ]
    text = (
        "Test images without a held-out attribute; figures are means over all attributes. Methods that are only a "
        "score make no predictions."
    )
    return Section("Familiar faces", [text], [Table("Predictions of the attributes", columns, rows)])


def _how(results: Results) -> Section:
    counts = results["images"]
    same = results["parameters"] == PAPER_PARAMETERS
    p = f"{results['parameters']:,} parameters" + (", as in the paper" if same else f" (paper: {PAPER_PARAMETERS:,})")
    text = [
        f"A Visual Attention Network with {p} and {results['outputs']} outputs was trained on {counts['training']:,} "
        f"images for {results['epochs']} epochs with Adam, at a rate that falls from 1e-3 to 1e-5 along a cosine. "
        f"Images are the central square of the aligned ones, {results['pixels']} pixels wide; the paper gives no size.",
        f"All methods were fitted to {counts['rows']:,} of these images and hold {results['budget']} numbers per "
        f"parameter. Prior precisions were chosen on {counts['validation']:,} validation images. Posteriors have "
        f"{results['samples']} samples; the projection of the outputs stops after {results['sweeps']} sweeps, whether "
        f"or not it has reached its tolerance. The ensemble has {results['members']} networks, trained once.",
        "The score of the max logit is minus the largest logit of an image. AUROC, NLL, accuracy and ECE (15 equal "
        "bins, both ends included) are those of nb.metrics.",
    ]
    return Section("How it was done", text, [images(results)])
