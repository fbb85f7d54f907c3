"""Turn results of the case ``detection`` and of studies into the Markdown tables of ``docs/scores.md``.

    python -m benchmarks detection --size full --json digits.json --set parts=digits+batchnorm
    nullbayes reproduce mnist --device cuda --data FOLDER
    python -m benchmarks.tables digits.json results/mnist/results.json

prints up to four tables. The first has the AUROC of every method against every set of strangers, their mean for methods
that have all of them, and the best of each column in bold. Projected posteriors are shown by every score, and each
baseline by the score that is best for it on average over the columns that it has. The second has the decisions of the
calibrated posteriors. With several files, networks and seeds are put together; what two files measured is taken from
the later one. The other two are of studies, for ``docs/experiments.md``: what the posteriors keep of the network's
predictions, and what they find beside what the paper printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nullbayes as nb
from benchmarks.cases.detection import auroc_rows, decision_row, means
from nullbayes.experiments.judging import LEVELS

_STRANGERS_AT = 0.05  # the level at which the share of flagged strangers is shown
Row = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of the files that are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --json has written, or results.json")
    results = [json.loads(path.read_text(encoding="utf-8")) for path in parser.parse_args(arguments).files]
    print(document(results))
    return 0


def document(results: Sequence[Mapping[str, Any]]) -> str:
    """Return all tables."""
    cases = [case for result in results for case in _cases(result)]
    if not any(case["each"] for case in cases):
        msg = "No file has results of the case detection or of a study: run python -m benchmarks detection --json FILE."
        raise SystemExit(msg)
    found = _latest((row for case in cases for row in case["each"]), "column", "method", "seed")
    decisions = _latest((row for case in cases for row in case.get("decisions") or ()), "network", "method", "seed")
    parts = [aurocs(_best_scores(means(found))), *([decided(_decided_means(decisions))] if decisions else [])]
    subjects = [subject for result in results for subject in result.get("results", {}).get("subjects", ())]
    own = [
        subject["summary"] | {"name": subject["name"]} for subject in subjects if "MSP" in subject["runs"][0]["methods"]
    ]
    return "\n\n".join([*parts, *([kept(own), printed(own)] if own else [])])


def _cases(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a file has: of cases, or of a study whose subjects were given to detectors, too."""
    if "cases" in result:
        return [case for case in result["cases"] if case["case"] == "detection" and case.get("rows")]
    return [_case(subject) for subject in result["results"].get("subjects", ())]


def _case(subject: Mapping[str, Any]) -> Mapping[str, Any]:
    each, decisions, network = list[Row](), list[Row](), subject["name"]
    for run in subject["runs"]:
        if "MSP" not in run["methods"]:  # other parameters of a network that has its columns
            continue
        for method, found in run["methods"].items():
            for score, figures in found.get("scores", {}).items():
                aurocs = {stranger: figure["auroc"] for stranger, figure in figures.items()}
                each += auroc_rows(network, method, score, run["seed"], aurocs)
            if "decisions" in found:
                decisions.append(decision_row(network, method, run["seed"], found["decisions"]))
    return {"each": each, "decisions": decisions}


def _best_scores(rows: Sequence[Row]) -> list[Row]:
    """Leave of each baseline the row of its best score."""
    shown: dict[str, Row] = {}
    for row in rows:
        name = row["method"].partition(", ")[0]
        key = name if hasattr(nb.baselines, name) else row["method"]
        if key not in shown or _mean(row) > _mean(shown[key]):
            shown[key] = row
    return list(shown.values())


def _mean(row: Row) -> float:
    """Return the mean over the columns that a row has."""
    return statistics.fmean(v for name, v in row.items() if name not in ("method", "mean") and v is not None)


def aurocs(rows: Sequence[Row]) -> str:
    """Return the AUROCs of methods by columns, with the mean over the columns, and the best of each in bold."""
    columns = [name for name in rows[0] if name != "method"]
    if len(columns) == 2:
        columns.remove("mean")
    best = {c: max((round(row[c], 3) for row in rows if row[c] is not None), default=None) for c in columns}
    lines = [[_code(row["method"]), *(_figure(row[c], best[c]) for c in columns)] for row in rows]
    return _markdown(["method", *columns], lines)


def decided(rows: Iterable[Row]) -> str:
    """Return rates of alarm on familiar inputs, shares of strangers that are flagged, and label sets."""
    head = ["network", "method", *(f"alarms at {level:g}" for level in LEVELS)]
    head += [f"strangers flagged at {_STRANGERS_AT:g}", "sets cover", "size", "network's sets cover", "size"]
    lines = []
    for row in rows:
        alarms = [f"{row[f'flagged at {level:g}']:.3f}" for level in LEVELS]
        names = [name for name in row if name.startswith("stranger ") and " at " not in name]
        flagged = [f"{row[name]} {row[f'{name} at {_STRANGERS_AT:g}']:.3f}" for name in names]
        sets = [f"{row[f'{who} {what}']:.3f}" for who in ("set", "network's set") for what in ("covers", "size")]
        lines.append([row["network"], _code(row["method"]), *alarms, ", ".join(flagged), *sets])
    return _markdown(head, lines)


_POSTERIORS = ("MAP", "ProjectedPosterior", "LossProjectedPosterior")


def kept(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Return accuracy, NLL and ECE of networks and of their posteriors."""
    kinds = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
    head = ["network", *(f"{kind}: network / projected / loss-projected" for kind in kinds.values())]
    lines = [
        [
            found["name"],
            *(_side_by_side(found["familiar"].get(name, {}).get(kind) for name in _POSTERIORS) for kind in kinds),
        ]
        for found in summaries
    ]
    return _markdown(head, lines)


def printed(summaries: Iterable[Mapping[str, Any]]) -> str:
    """Return AUROCs that the paper printed, and those of the same networks and posteriors here."""
    head = [
        "strangers",
        "paper: network / projected",
        "network",
        "projected, the paper's score",
        "projected",
        "loss-projected",
    ]
    lines = []
    for summary in summaries:
        found = summary["strangers"]
        network, ours, loss = (found.get(name, {}) for name in _POSTERIORS)
        for stranger in network.get("max_probability", {}):
            own, theirs = network["max_probability"][stranger], ours.get("max_variance", {}).get(stranger)
            paper = [
                None if figure is None or figure["paper"] is None else {"mean": figure["paper"]}
                for figure in (own, theirs)
            ]
            cells = [own, theirs, *(method.get("calibrated", {}).get(stranger) for method in (ours, loss))]
            lines.append(
                [f"{summary['name']} → {stranger}", _side_by_side(paper), *(_side_by_side([cell]) for cell in cells)]
            )
    return _markdown(head, lines)


def _side_by_side(figures: Iterable[Mapping[str, float] | None]) -> str:
    return " / ".join("-" if figure is None else f"{figure['mean']:.3f}" for figure in figures)


def _latest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """Return the last row with each value of the keys, in the order in which they came first."""
    return list({tuple(row[key] for key in keys): row for row in rows}.values())


def _decided_means(rows: Sequence[Row]) -> list[Row]:
    """Return the decisions of each network and method: the mean over the seeds."""
    found = []
    for key in dict.fromkeys((row["network"], row["method"]) for row in rows):
        own = [row for row in rows if (row["network"], row["method"]) == key]
        numbers = {k: statistics.fmean(row[k] for row in own) for k, v in own[0].items() if isinstance(v, float)}
        found.append({**own[0], **numbers, "seed": len(own)})
    return found


def _code(method: str) -> str:
    """Write the names of a class and of a score as code: "KNN" and "KNN, energy"."""
    name, comma, kind = method.partition(", ")
    return f"`{name}`" + (f", {kind}" if kind in ("default", "calibrated") else f", `{kind}`" if comma else "")


def _figure(value: float | None, best: float | None) -> str:
    """Write a figure with three digits, in bold if it is the best of its column."""
    if value is None:
        return ""
    return f"**{value:.3f}**" if round(value, 3) == best else f"{value:.3f}"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
