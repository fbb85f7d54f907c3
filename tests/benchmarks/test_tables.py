"""Results of the case ``detection`` become the tables of the page about scores."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from benchmarks.tables import document, kept, main, printed

ROOT = Path(__file__).parents[2]

DECISION = {
    "network": "LeNet", "method": "ProjectedPosterior", "seed": 3, "flagged at 0.01": 0.0105, "flagged at 0.05": 0.052,
    "flagged at 0.1": 0.098, "stranger 1": "mnist", "stranger 1 at 0.01": 0.2, "stranger 1 at 0.05": 0.7,
    "stranger 1 at 0.1": 0.8, "stranger 2": "kmnist", "stranger 2 at 0.01": 0.1, "stranger 2 at 0.05": 0.6,
    "stranger 2 at 0.1": 0.75, "weights": "energy 1.00", "set covers": 0.901, "set size": 1.5,
    "network's set covers": 0.902, "network's set size": 1.6,
}  # fmt: skip


def result(rows: list[dict[str, Any]], decisions: list[dict[str, Any]] | None = None, seed: int = 0) -> dict[str, Any]:
    """Return what a run would have written: one row per method, column and seed."""
    other = {"case": "latency", "rows": [{"method": "slow", "a": 1.0}]}
    each = [
        {"method": row["method"], "column": column, "seed": seed, "auroc": auroc}
        for row in rows
        for column, auroc in row.items()
        if column != "method" and auroc is not None
    ]
    return {"cases": [other, {"case": "detection", "rows": rows, "each": each, "decisions": decisions or []}]}


def table(*rows: dict[str, Any]) -> list[str]:
    return document([result(list(rows))]).splitlines()


def test_best_of_each_column_is_bold_as_it_is_rounded() -> None:
    lines = table({"method": "KNN", "a": 0.9004, "b": 0.7}, {"method": "MSP", "a": 0.9001, "b": 0.8})
    assert lines == [
        "| method | a | b | mean |",
        "|---|---|---|---|",
        "| `KNN` | **0.900** | 0.700 | 0.800 |",
        "| `MSP` | **0.900** | **0.800** | **0.850** |",
    ]


def test_columns_of_several_files_stand_side_by_side() -> None:
    first = result([{"method": "KNN", "a": 0.5}, {"method": "MSP", "a": 0.9}])
    second = result([{"method": "KNN", "b": 0.7}, {"method": "GEN", "b": 0.6}])
    assert document([first, second]).splitlines() == [
        "| method | a | b | mean |",
        "|---|---|---|---|",
        "| `KNN` | 0.500 | **0.700** | **0.600** |",
        "| `MSP` | **0.900** |  |  |",  # which has no mean, because it lacks a column
        "| `GEN` |  | 0.600 |  |",
    ]


def test_a_later_file_replaces_what_an_earlier_one_measured() -> None:
    old, new = (
        result([{"method": "KNN", "a": 0.5}], [DECISION]),
        result([{"method": "KNN", "a": 0.6}], [{**DECISION, "flagged at 0.05": 0.049}]),
    )
    text = document([old, new])
    assert "0.600" in text
    assert "0.500" not in text
    assert text.count("| LeNet |") == 1
    assert "0.049" in text


def test_seeds_of_several_files_are_averaged() -> None:
    first = result([{"method": "KNN", "a": 0.5}], [DECISION])
    second = result([{"method": "KNN", "a": 0.6}], [{**DECISION, "seed": 4, "flagged at 0.05": 0.05}], seed=1)
    text = document([first, second])
    assert "| `KNN` | **0.550** |" in text
    assert "| LeNet | `ProjectedPosterior` | 0.011 | 0.051 |" in text


def test_a_baseline_has_the_row_of_its_best_score_and_a_posterior_all_of_them() -> None:
    scores = {"energy": (0.6, 0.8), "entropy": (0.9, 0.4)}
    lines = table(
        *(
            {"method": f"{name}, {score}", "a": a, "b": b}
            for name in ("SWAG", "ProjectedPosterior")
            for score, (a, b) in scores.items()
        )
    )
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| `SWAG`, `energy`",
        "| `ProjectedPosterior`, `energy`",
        "| `ProjectedPosterior`, `entropy`",
    ]


def test_scores_are_written_as_code_and_states_are_not() -> None:
    lines = table(
        {"method": "ProjectedPosterior, calibrated", "a": 0.9}, {"method": "ProjectedPosterior, energy", "a": 0.8}
    )
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| `ProjectedPosterior`, calibrated",
        "| `ProjectedPosterior`, `energy`",
    ]


def test_figures_that_are_missing_leave_a_gap() -> None:
    lines = table({"method": "MSP", "a": 0.5, "b": 0.6}, {"method": "KNN", "a": None, "b": 0.7})
    assert lines[2:] == ["| `MSP` | **0.500** | 0.600 | **0.550** |", "| `KNN` |  | **0.700** |  |"]


def test_decisions_have_alarms_strangers_and_sets() -> None:
    assert document([result([{"method": "KNN", "a": 0.5}], [DECISION])]).split("\n\n")[1].splitlines()[2] == (
        "| LeNet | `ProjectedPosterior` | 0.011 | 0.052 | 0.098 | mnist 0.700, kmnist 0.600 "
        "| 0.901 | 1.500 | 0.902 | 1.600 |"
    )


def test_files_are_read_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result([{"method": "KNN", "a": 0.5}], [DECISION])))
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| method | a |\n")
    assert "| LeNet | `ProjectedPosterior` |" in printed


def test_files_without_such_results_are_refused() -> None:
    with pytest.raises(SystemExit, match="python -m benchmarks detection"):
        document([{"cases": [{"case": "detection", "rows": None, "decisions": None}]}])


SUMMARY = {
    "name": "LeNet",
    "familiar": {
        "MAP": {"accuracy": {"mean": 0.9}, "nll": {"mean": 0.3}, "ece": {"mean": 0.02}},
        "ProjectedPosterior": {"accuracy": {"mean": 0.9}, "nll": {"mean": 0.29}, "ece": {"mean": 0.01}},
    },
    "strangers": {
        "MAP": {"max_probability": {"kmnist": {"mean": 0.75, "paper": 0.66}, "noise": {"mean": 0.5, "paper": None}}},
        "ProjectedPosterior": {
            "max_variance": {"kmnist": {"mean": 0.99, "paper": 0.86}, "noise": {"mean": 0.8, "paper": None}},
            "calibrated": {"kmnist": {"mean": 0.995, "paper": None}, "noise": {"mean": 0.9, "paper": None}},
        },
    },
}


def test_what_posteriors_keep_stands_beside_the_network() -> None:
    assert kept([SUMMARY]).splitlines()[2:] == ["| LeNet | 0.900 / 0.900 / - | 0.300 / 0.290 / - | 0.020 / 0.010 / - |"]


def test_what_the_paper_printed_stands_beside_what_was_measured() -> None:
    assert printed([SUMMARY]).splitlines()[2:] == [
        "| LeNet → kmnist | 0.660 / 0.860 | 0.750 | 0.990 | 0.995 | - |",
        "| LeNet → noise | - / - | 0.500 | 0.800 | 0.900 | - |",
    ]


def test_pages_have_the_tables_of_the_stored_runs() -> None:
    names = ("fashion-mnist", "mnist", "svhn", "text", "cifar10", "digits")
    found = [json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    scores, experiments = (
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("scores", "experiments")
    )
    aurocs, decided, network, paper = document(found).split("\n\n")
    assert aurocs in scores
    assert decided in scores
    assert network in experiments
    assert paper in experiments


def test_page_has_the_figures_of_the_sentence_encoder() -> None:
    found = json.loads((ROOT / "results" / "text.json").read_text(encoding="utf-8"))["results"]["subjects"]
    page = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    rows = {
        "last layer and head, loss-projected": ("MiniLM, last layer and head", "LossProjectedPosterior"),
        "head, loss-projected": ("MiniLM, head", "LossProjectedPosterior"),
        "head, projected": ("MiniLM, last layer and head", "ProjectedPosterior"),
        "LoRA adapters and head, loss-projected": ("MiniLM, LoRA adapters and head", "LossProjectedPosterior"),
        "head of the network with adapters, projected": ("MiniLM, LoRA adapters and head", "ProjectedPosterior"),
    }
    for title, (name, method) in rows.items():
        runs = next(each["runs"] for each in found if each["name"] == name)
        own, network = ([run["methods"][each] for run in runs] for each in (method, "MAP"))
        nll = [fmean(each["familiar"]["nll"] for each in some) for some in (network, own)]
        aurocs = [
            fmean(each["scores"][score]["out of scope"]["auroc"] for each in own)
            for score in ("calibrated", "max_variance", "mutual_information")
        ]
        figures = " | ".join(f"{auroc:.3f}" for auroc in aurocs)
        free = own[0]["report"]["n_parameters"]
        assert f"| {title} | {free:,} | {nll[0]:.3f} / {nll[1]:.3f} | {figures} |" in page
