"""The page of a study: tables with the paper's figures beside ours, figures, pictures, and what we do not find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nullbayes.experiments import paper
from nullbayes.experiments.findings import findings
from nullbayes.experiments.frame import Results
from nullbayes.experiments.gathering import Gathered
from nullbayes.experiments.packing import unpacked_gallery
from nullbayes.experiments.summary import mean, spread, value
from nullbayes.page import Column, Curves, Page, Section, Series, Table, evaluation_sections

Cells = list[Any]

_IN_DISTRIBUTION = {
    "accuracy": ("accuracy", "high"), "nll": ("NLL", "low"), "ece": ("ECE", "low"), "mce": ("MCE", "low"),
    "brier": ("Brier", "low"), "confidence": ("confidence", None),
}  # fmt: skip
_MARK = " †"  # of columns whose figures in the paper cannot be right
_MARKED = ("brier", "ece", "mce")
_OURS = ("ProjectedPosterior", "LossProjectedPosterior")
_FIGURES = ("auroc", "aupr", "fpr95")
_NOTHING: dict[str, Any] = {"intervals": {}} | dict.fromkeys(
    ("nll", "accuracy", "ece", "rmse", "coverage", "aurc", "false_alarms", "fit_seconds", "seconds_per_1000",
     "peak_memory")
)  # fmt: skip  # what a row of an evaluation has beside the figures of strangers


def study_page(results: Results, title: str) -> Page:
    """Return the page of what `nullbayes.experiments.study.run_study` returned."""
    subjects = [Gathered(subject) for subject in results["subjects"]]
    sections = [section for found in subjects for section in _sections(found, several=len(subjects) > 1)]
    if results.get("notes"):
        sections.append(Section("Left out", results["notes"]))
    facts = {name.replace("_", " "): str(size) for name, size in results["sizes"].items() if name != "only"}
    return Page(title, " ".join(_lead(found) for found in subjects), sections, facts)


def _lead(found: Gathered) -> str:
    """Return the result in one or two sentences."""
    parts = []
    for method in _OURS:
        if not found.records(method):
            continue
        score = found.default(method)
        aurocs = [
            f"{name} {mean(found.detection(method, score, name)):.3f}{_published(found, method, name)}"
            for name in found.strangers
        ]
        right, network = found.familiar(method, "accuracy"), found.familiar("MAP", "accuracy")
        beside = f", the network {mean(network):.4f}" if network else ""
        parts.append(
            f"{found.name}, {method}: accuracy {mean(right):.4f}{beside}; AUROC of the {score} score: "
            f"{', '.join(aurocs)}."
        )
    return " ".join(parts)


def _published(found: Gathered, method: str, stranger: str) -> str:
    figure = paper.strangers(found.data, method, stranger)
    return "" if figure is None else f" (the paper {figure:.3f})"


def _sections(found: Gathered, *, several: bool) -> Iterator[Section]:
    made = [
        _in_distribution(found), _strangers(found), *_claims(found), _decisions(found), *_shifts(found),
        *_evaluation(found), _fits(found),
    ]  # fmt: skip
    for section in made:
        blocks = [block for block in section.blocks if not isinstance(block, Table) or block.rows]
        if blocks or (section.paragraphs and not section.blocks):
            yield Section(f"{found.name}: {section.title}" if several else section.title, section.paragraphs, blocks)


# --- tables -----------------------------------------------------------------------------------------------------------


def _in_distribution(found: Gathered) -> Section:
    """Return the metrics of the predictions for test data."""
    columns, marked = [Column("method", "The network itself is the row MAP.")], bool(paper.impossible(found.data))
    for metric, (name, best) in _IN_DISTRIBUTION.items():
        ours, theirs = paper.DEFINITIONS[metric]
        mark = _MARK if marked and metric in _MARKED else ""
        columns.append(Column(name + mark, f"{ours} {theirs}" if found.data else ours, best))
    columns.append(Column("fit s", "Seconds of the fit, with the choice of a prior precision.", None, 1))
    rows = list[Cells]()
    for method in found.methods:
        if not found.familiar(method, "accuracy"):
            continue  # a mere score
        metrics = [
            value(found.familiar(method, metric), paper.familiar(found.data, method, metric))
            for metric in _IN_DISTRIBUTION
        ]
        rows.append([method, *metrics, value([record["fit_seconds"] for record in found.records(method)])])
    size = found.runs[0]["network"]["examples"]["test"]
    said = [f"Predictions for {size:,} test inputs. {_seeds(found)}"]
    if marked:
        said.append(
            f"The paper's figures in the columns marked with{_MARK} are shown and are no target: by its own confidence "
            "and accuracy, ECE is at most (1 − confidence) + (1 − accuracy), and the Brier score at most twice that. "
            "The MCE has no such bound, and comes from the same bins."
        )
    if found.failures:
        said += [f"Left out: {method}. {reason}" for method, reason in found.failures.items()]
    return Section("In distribution", said, [Table("Metrics of test data", columns, rows)])


def _strangers(found: Gathered) -> Section:
    """Return the AUROC of each method by the paper's score, by its own default and by its best score."""
    columns, rows = [Column("method"), Column("default score")], list[Cells]()
    for name in found.strangers:
        columns += [
            Column(f"{name}: the paper's score", " ".join(paper.DEFINITIONS["auroc"]), "high"),
            Column(f"{name}: default score", "AUROC of the score in the second column.", "high"),
            Column(f"{name}: best score", "The highest AUROC of any score: chosen with the strangers.", "high"),
        ]
    for method in found.methods:
        published, default = found.published(method), found.default(method)
        cells: Cells = [method, default]
        for name in found.strangers:
            theirs = [] if published is None else found.detection(method, published, name)
            cells += [
                value(theirs, paper.strangers(found.data, method, name)),
                value(found.detection(method, default, name)),
                value(found.detection(method, found.best(method, name), name)),
            ]
        rows.append(cells)
    said = [
        "How well scores tell strangers from test data. The default score is the one that a method has without being "
        f"asked for another; the posteriors are calibrated on held-out data, without strangers. {_seeds(found)}"
    ]
    return Section("Strangers", said, [Table("AUROC", columns, rows), _which_score(found)])


def _which_score(found: Gathered) -> Table:
    """Return which score comes closest to the paper's figure."""
    columns = [
        Column("method and strangers"), Column("the paper", "Table 2."), Column("by its score", "The paper's score."),
        Column("closest score", "The score whose AUROC is closest to the paper's figure."),
        Column("its AUROC"), Column("default score", "Ours."), Column("best score"), Column("its AUROC"),
    ]  # fmt: skip
    rows = list[Cells]()
    for method in ("MAP", *_OURS):
        for name in found.strangers if found.records(method) else ():
            figure = paper.strangers(found.data, method, name)
            published = found.published(method)
            if figure is None or published is None:
                continue
            aurocs = {score: found.detection(method, score, name) for score in found.scores(method)}
            gap = {score: abs(mean(values) - figure) for score, values in aurocs.items()}
            closest, best = min(gap, key=gap.__getitem__), found.best(method, name)
            rows.append([
                f"{method}, {name}", value([figure]), value(aurocs[published]), closest, value(aurocs[closest]),
                value(aurocs[found.default(method)]), best, value(aurocs[best]),
            ])  # fmt: skip
    return Table("Which score gives the paper's figures, and what ours give", columns, rows)


def _decisions(found: Gathered) -> Section:
    """Return rates of alarm and label sets of the calibrated posteriors."""
    kept = [method for method in found.methods if "decisions" in found.records(method)[0]]
    if not kept:
        return Section("Decisions")
    first = found.records(kept[0])[0]["decisions"]
    columns = [Column("method"), *(Column(f"alarms at {level}", "Share of test data.") for level in first["alarms"])]
    for name in found.strangers:
        columns += [Column(f"{name} flagged at {level}", "Share.", "high") for level in first["alarms"]]
    columns += [
        Column("sets cover", "Share of label sets at 90 % that hold the label."),
        Column("size", "Labels in a set, on average.", "low", 2),
        Column("network's sets cover", "Split conformal prediction with the network's probabilities."),
        Column("size", "Labels in such a set, on average.", "low", 2),
    ]
    rows = list[Cells]()
    for method in kept:
        all_seeds = [record["decisions"] for record in found.records(method)]
        row: Cells = [method, *(value([d["alarms"][level] for d in all_seeds]) for level in first["alarms"])]
        for name in found.strangers:
            row += [value([d["flagged"][name][level] for d in all_seeds]) for level in first["alarms"]]
        for sets in ("sets", "network_sets"):
            row += [value([d[sets][what] for d in all_seeds]) for what in ("coverage", "size")]
        rows.append(row)
    said = "An input is flagged if its p-value is at most the level: that share of familiar inputs should be."
    return Section("Decisions", [said], [Table("Alarms and label sets", columns, rows)])


def _fits(found: Gathered) -> Section:
    """Return what the fits of the posteriors measured."""
    names = {
        "n_rows": ("rows", "Of the Jacobian.", 0), "n_parameters": ("parameters", "That may vary.", 0),
        "kernel_dimension": ("null space", "Its dimension, estimated from the samples.", 1),
        "residual": ("residual", "The largest |A v| / |A noise| of a sample.", 4),
        "prior_precision": ("precision", "Of the prior.", 2),
        "train_std": ("std on training", "Standard deviation of the outputs on training data.", 4),
    }  # fmt: skip
    columns = [Column("method"), *(Column(name, said, None, digits) for name, said, digits in names.values())]
    kept = [method for method in found.methods if "report" in found.records(method)[0]]
    rows = [[m, *(value([r["report"][name] for r in found.records(m)]) for name in names)] for m in kept]
    return Section("Fits", ["What the fits of the posteriors measured."], [Table("Fits", columns, rows)])


# --- claims -----------------------------------------------------------------------------------------------------------


def _claims(found: Gathered) -> Iterator[Section]:
    """Yield what the paper claims and we do not find, and what we find."""
    all_of_them = findings(found)
    columns = [
        Column("claim"), Column("what we measured"), Column("rule", "When the claim counts as found."),
    ]  # fmt: skip
    for title, holds in (("What the paper claims and we do not find", False), ("What we find as the paper does", True)):
        rows = [[f.claim, f.measured, f.rule] for f in all_of_them if f.holds is holds]
        said = f"{len(rows)} of {len(all_of_them)} claims that these figures can judge, each by the rule beside it."
        if all_of_them:
            yield Section(title, [said], [Table("Claims", columns, rows)] if rows else [])


# --- figures ----------------------------------------------------------------------------------------------------------


def _shifts(found: Gathered) -> Iterator[Section]:
    """Yield accuracy and calibration error against the strength of each shift."""
    for shift, unit in found.subject["shifts"].items():
        strengths, blocks = found.strengths(shift), []
        for metric, label in (("accuracy", "accuracy"), ("ece", "ECE")):
            series, ends = [], []
            for method in found.methods:
                if curves := found.shift(method, shift, metric):
                    points = [list(values) for values in zip(*curves, strict=True)]
                    means = [mean(values) for values in points]
                    around = [spread(values) or 0.0 for values in points] if len(curves) > 1 else None
                    series.append(Series(method, strengths, means, around))
                    ends.append(f"{method} from {means[0]:.3f} to {means[-1]:.3f}")
            alt = f"{label} against {shift}: {'; '.join(ends)}."
            blocks.append(Curves(f"{label} under {shift}", f"{shift}, {unit}", label, series, alt))
        yield Section(f"Under {shift}", [f"Test inputs changed by {shift}. {_seeds(found)}"], blocks)


def _evaluation(found: Gathered) -> list[Section]:
    """Return every score of every method, reliability diagrams, histograms of scores, and pictures of inputs."""
    first = found.runs[0]["methods"]
    runs = [
        {
            "n_familiar": run["network"]["examples"]["test"],
            "n_strangers": {name: run["network"]["examples"][name] for name in found.strangers},
            "rows": list(_rows(found, run)), "histograms": {}, "reliability": {},
        }
        for run in found.runs
    ]  # fmt: skip
    for method, record in first.items():
        if record.get("histogram"):
            runs[0]["histograms"][f"{method}: {record['default']}"] = record["histogram"]
        if record.get("reliability"):
            runs[0]["reliability"][method] = record["reliability"]
    galleries = [unpacked_gallery(packed) for record in first.values() for packed in record.get("gallery", ())]
    sections = evaluation_sections(runs, paper=_beside(found), galleries=galleries)
    titles = {"Detection": "Every score of every method"}
    return [Section(titles.get(s.title, s.title), s.paragraphs, s.blocks) for s in sections if s.title != "Predictions"]


def _rows(found: Gathered, run: Any) -> Iterator[Results]:
    """Yield one row per method and score, with None for what this run does not have."""
    for method in found.methods:
        scores = run["methods"].get(method, {}).get("scores", {})
        for score in found.scores(method):
            missing = {name: dict.fromkeys(_FIGURES) for name in found.strangers}
            figures = {
                name: {**own, "flagged": None, "intervals": {}} for name, own in scores.get(score, missing).items()
            }
            yield {"name": f"{method}: {score}", "score": score, "strangers": figures, **_NOTHING}


def _beside(found: Gathered) -> dict[str, dict[str, float]]:
    """Return the paper's AUROC by row and column of the table of all scores."""
    made: dict[str, dict[str, float]] = {}
    for method in found.methods:
        for name in found.strangers:
            if (figure := paper.strangers(found.data, method, name)) is not None:
                made.setdefault(f"{method}: {found.published(method)}", {})[f"{name}: AUROC"] = figure
    return made


def _seeds(found: Gathered) -> str:
    n = len(found.runs)
    return f"Mean ± standard deviation over {n} seeds." if n > 1 else "One seed."
