"""A study judges every method by what plain torch and scikit-learn compute, keeps its steps, and makes its page."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.experiments import digits
from nullbayes.experiments.frame import Mixed, Settings, Store
from nullbayes.experiments.networks import lenet
from nullbayes.experiments.study import Sizes
from nullbayes.experiments.tasks import lenet_images
from nullbayes.page import Curves, Gallery, Histograms, Page, Reliability, Table, Value
from support.processes import ENVIRONMENT

N, TEST = 20, 30
TINY = Sizes(
    n=N, epochs=25, held_out=40, test=TEST, shifted=10, samples=3, members=2, budget=4, pictures=2,
    only=("ProjectedPosterior", "LossProjectedPosterior", "MAP", "LastLayerLaplace", "KNN", "TemperatureScaling"),
)  # fmt: skip
ANGLES = (0.0, 90.0)
KEY = "LeNet, mnist"
pytestmark = pytest.mark.usefixtures("ordinary_default")


@pytest.fixture(scope="module")
def settings(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    said: list[str] = []
    return Settings(data=blobs, store=Store(tmp_path_factory.mktemp("run"), said.append), seeds=2)


@pytest.fixture(scope="module")
def results(settings: Settings) -> Any:
    return digits.study("mnist", settings, TINY, ANGLES)


@pytest.fixture(scope="module")
def page(results: Any) -> Page:
    return digits.EXPERIMENTS["mnist"].page(json.loads(json.dumps(results, allow_nan=False)))


def stored_network(settings: Settings, seed: int) -> torch.nn.Module:
    """The trained network of a seed, from the weights of the run."""
    model = lenet()
    model.load_state_dict(
        settings.with_seed(seed).trained(f"mnist/seed {seed}", lenet, pytest.fail).state_dict()  # not trained again
    )
    return model.eval()


# --- what is measured -------------------------------------------------------------------------------------------------


def test_study_has_every_seed_and_method(results: Any) -> None:
    (subject,) = results["subjects"]
    assert [run["seed"] for run in subject["runs"]] == [0, 1]
    for run in subject["runs"]:
        assert set(run["methods"]) == set(TINY.only)
        assert run["network"]["examples"] == {
            "rows": N, "held out": 40, "test": TEST, "fashion-mnist": TEST, "kmnist": TEST,
        }  # fmt: skip
        assert all("failed" not in record for record in run["methods"].values())
    assert len({run["methods"]["MAP"]["familiar"]["nll"] for run in subject["runs"]}) == 2


def test_metrics_of_the_network_are_what_plain_torch_computes(results: Any, settings: Settings) -> None:
    for run in results["subjects"][0]["runs"]:
        own = settings.with_seed(run["seed"])
        x, y = lenet_images(own, "mnist", N, 25, held_out=40, test=TEST).test
        with torch.no_grad():
            probs = stored_network(settings, run["seed"])(x).double().softmax(1)
        top, predicted = probs.max(1)
        right = predicted == y
        gaps, numbers = [], []
        for low in range(15):
            inside = (top > low / 15) & (top <= (low + 1) / 15)
            numbers.append(int(inside.sum()))
            if inside.any():
                gaps.append((float((top[inside].sum() - right[inside].sum()).abs()), int(inside.sum())))
        expected = {
            "accuracy": float(right.double().mean()),
            "confidence": float(top.mean()),
            "nll": float(-probs[range(TEST), y].log().mean()),
            "brier": float(((probs - torch.eye(10)[y]) ** 2).sum(1).mean()),
            "ece": sum(gap for gap, _ in gaps) / TEST,
            "mce": max(gap / n for gap, n in gaps),
        }
        record = run["methods"]["MAP"]
        assert record["familiar"] == pytest.approx(expected, abs=1e-5)
        counts, met, said = (np.array(row) for row in record["reliability"])
        assert counts.tolist() == numbers
        assert met.sum() == pytest.approx(TEST * expected["accuracy"])
        assert np.abs(met - said).sum() / TEST == pytest.approx(expected["ece"], abs=1e-4)
        assert said.sum() == pytest.approx(TEST * expected["confidence"], abs=1e-3)


def test_detection_is_what_scikit_learn_computes(results: Any, settings: Settings) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    task = lenet_images(settings, "mnist", N, 25, held_out=40, test=TEST)
    model = stored_network(settings, 0)

    def strangeness(x: Any) -> Tensor:
        with torch.no_grad():
            return -model(x).double().softmax(1).amax(1)

    inside = strangeness(task.test[0])
    record = results["subjects"][0]["runs"][0]["methods"]["MAP"]
    for name, x in task.strangers.items():
        scores, labels = torch.cat([inside, strangeness(x)]), torch.arange(2 * TEST) >= TEST
        found = record["scores"]["max_probability"][name]
        assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(labels, scores), abs=1e-6)
        assert found["aupr"] == pytest.approx(sklearn.average_precision_score(labels, scores), abs=1e-6)


def test_scores_of_a_posterior_are_those_of_a_fit_by_hand(results: Any, settings: Settings) -> None:
    task = lenet_images(settings, "mnist", N, 25, held_out=40, test=TEST)
    posterior = nb.ProjectedPosterior(stored_network(settings, 0))
    posterior.fit([task.train], 3, generator=settings.generator(), progress=False).calibrate([task.held_out])
    record = results["subjects"][0]["runs"][0]["methods"]["ProjectedPosterior"]
    assert (record["default"], record["published"]) == ("calibrated", "max_variance")
    for name, x in task.strangers.items():
        for score, kind in (("calibrated", None), ("max_variance", "max_variance")):
            auroc = nb.metrics.auroc(posterior.ood_score(task.test[0], kind), posterior.ood_score(x, kind))
            assert record["scores"][score][name]["auroc"] == pytest.approx(auroc, abs=0.01)
        flagged = float(posterior.is_ood(x, 0.05).double().mean())
        assert record["decisions"]["flagged"][name]["0.05"] == pytest.approx(flagged, abs=0.05)
    sets = posterior.predict_set(task.test[0], 0.1)
    assert record["decisions"]["sets"]["size"] == pytest.approx(float(sets.double().sum(1).mean()), abs=0.05)
    assert record["report"]["kernel_dimension"] == pytest.approx(posterior.report.kernel_dimension, rel=1e-3)


def test_laplace_is_judged_with_sampled_networks_as_in_the_paper(results: Any) -> None:
    record = results["subjects"][0]["runs"][0]["methods"]["LastLayerLaplace"]
    assert record["published"] == "max_variance, sampled networks"
    assert record["published"] in record["scores"]


def test_no_shift_leaves_the_metrics_as_they_are(results: Any, blobs: Path, tmp_path: Path) -> None:
    sizes = Sizes(n=N, epochs=25, held_out=40, test=30, shifted=30, samples=3, only=("MAP",))
    found = digits.study("mnist", Settings(data=blobs, store=Store(tmp_path), seeds=1), sizes, ANGLES)
    record = found["subjects"][0]["runs"][0]["methods"]["MAP"]
    still, turned = record["shift"]["rotation"]
    assert (still["strength"], turned["strength"]) == ANGLES
    assert {name: still[name] for name in ("accuracy", "ece", "nll")} == pytest.approx(
        {name: record["familiar"][name] for name in ("accuracy", "ece", "nll")}, abs=1e-6
    )
    assert turned["nll"] != pytest.approx(still["nll"], abs=1e-3)
    shifted = {name for name, r in results["subjects"][0]["runs"][0]["methods"].items() if "shift" in r}
    assert shifted == {"MAP", "ProjectedPosterior", "LossProjectedPosterior", "LastLayerLaplace"}


def test_gallery_shows_real_inputs_in_the_order_of_their_p_values(results: Any, settings: Settings) -> None:
    task = lenet_images(settings, "mnist", N, 25, held_out=40, test=TEST)
    galleries = results["subjects"][0]["runs"][0]["methods"]["ProjectedPosterior"]["gallery"]
    assert "gallery" not in results["subjects"][0]["runs"][1]["methods"]["ProjectedPosterior"]
    by = {made["caption"]: made["pictures"] for made in galleries}
    sets = {"test": task.test[0], **task.strangers}
    assert by.keys() == {f"{name}: the {what}" for name in sets for what in ("strangest", "most certain")}
    for name, x in sets.items():
        originals = {bytes((255 * image).round().to(torch.uint8).flatten().tolist()) for image in x}
        p = {}
        for what in ("strangest", "most certain"):
            pictures = by[f"{name}: the {what}"]
            assert len(pictures) == 2
            assert all(base64.b64decode(picture["bytes"]) in originals for picture in pictures)
            p[what] = [float(picture["label"].removeprefix("p = ")) for picture in pictures]
        assert max(p["strangest"]) <= min(p["most certain"])


# --- steps ------------------------------------------------------------------------------------------------------------


def test_second_run_does_nothing_again(results: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randperm", pytest.fail)  # without which nothing is trained or split
    said: list[str] = []
    assert settings.store is not None
    again = Settings(data=settings.data, store=Store(settings.store.folder, said.append), seeds=2)
    assert digits.study("mnist", again, TINY, ANGLES) == results
    assert len(said) == 2 * (1 + len(TINY.only))
    assert all(line.endswith("done before") for line in said)


def test_a_method_that_was_lost_is_done_alone_and_gives_the_same(results: Any, settings: Settings) -> None:
    assert settings.store is not None
    said: list[str] = []
    store = Store(settings.store.folder, said.append)
    (store.folder / "steps" / KEY / "seed 1" / "MAP.json").unlink()
    again = digits.study("mnist", Settings(data=settings.data, store=store, seeds=2), TINY, ANGLES)
    assert [line for line in said if "done before" not in line] == [f"{KEY}/seed 1/MAP"]
    one, other = (r["subjects"][0]["runs"][1]["methods"]["MAP"] for r in (results, again))
    assert one["familiar"] == other["familiar"]
    assert one["scores"] == other["scores"]


SHARED = """
import json, sys
from pathlib import Path
import torch
from nullbayes.experiments import digits
from nullbayes.experiments.frame import Mixed, Settings, Store
from nullbayes.experiments.study import Sizes

torch.set_num_threads(1)
sizes = Sizes(
    n=20, epochs=25, held_out=40, test=30, shifted=10, samples=3,
    only=("MAP", "KNN", "MSP", "Energy", "GEN", "Mahalanobis", "ViM", "TemperatureScaling"),
)
said = []
store = Store(Path(sys.argv[2]), said.append)
found = digits.study("mnist", Settings(data=Path(sys.argv[1]), store=store, seeds=2), sizes, (0.0,))
print(json.dumps({"said": said, "found": found}))
"""


@pytest.mark.slow
def test_processes_in_one_folder_share_the_steps_and_have_the_same_results(blobs: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHARED, str(blobs), str(tmp_path)]
    both = [subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) for _ in range(2)]
    one, other = (json.loads(each.communicate()[0]) for each in both)
    assert one["found"] == other["found"]
    names = [*one["found"]["subjects"][0]["runs"][0]["methods"], "network"]
    steps = [*(f"{KEY}/seed {seed}/{name}" for seed in (0, 1) for name in names), "mnist/seed 0", "mnist/seed 1"]
    new = [line for each in (one, other) for line in each["said"] if not line.endswith(": done before")]
    assert sorted(new) == sorted(steps)


@pytest.mark.slow
def test_methods_that_are_chosen_run_alone_and_the_others_follow(settings: Settings, tmp_path: Path) -> None:
    said: list[str] = []
    own = replace(settings, store=Store(tmp_path, said.append), seeds=1)
    some = digits.study("mnist", replace(own, methods=("KNN",)), TINY, ANGLES)["subjects"][0]
    assert said == [f"{KEY}/seed 0/network", "mnist/seed 0", f"{KEY}/seed 0/KNN"]
    assert {name for name, found in some["runs"][0]["methods"].items() if "--methods" not in str(found)} == {"KNN"}
    assert digits.EXPERIMENTS["mnist"].page({"sizes": {}, "subjects": [some]}).sections
    both = digits.study("mnist", replace(own, methods=("MAP",)), TINY, ANGLES)["subjects"][0]["runs"][0]["methods"]
    assert [name for name, found in both.items() if "failed" not in found] == ["MAP", "KNN"]  # done is done
    whole = digits.study("mnist", own, TINY, ANGLES)["subjects"][0]["runs"][0]["methods"]
    assert said.count(f"{KEY}/seed 0/KNN") == 1
    assert not any("failed" in found for found in whole.values())


def earlier(results: Any, **records: Any) -> dict[str, Any]:
    """What ``results.json`` holds of a run, with other records of some methods in its first seed."""
    found = json.loads(json.dumps(results, allow_nan=False))
    found["subjects"][0]["runs"][0]["methods"].update(records)
    return {"results": found, "environment": {"commit": "0123abc"}}


def test_a_run_does_what_an_earlier_one_lacks_and_takes_the_rest(
    results: Any, settings: Settings, tmp_path: Path
) -> None:
    said: list[str] = []
    lacking = earlier(results, KNN={"failed": "It was not run on this network.", "again": True})
    own = replace(settings, store=Store(tmp_path, said.append), earlier=lacking)
    again = digits.study("mnist", own, TINY, ANGLES)
    steps = 2 * (1 + len(results["subjects"][0]["runs"][0]["methods"])) - 1
    done = [line for line in said if not line.endswith(": done before")]
    assert done == [f"{steps} steps are taken from the earlier results.", f"{KEY}/seed 0/KNN", "mnist/seed 0"]
    first, then = (found["subjects"][0]["runs"][0]["methods"] for found in (results, again))
    assert then["KNN"]["scores"]["knn"] == first["KNN"]["scores"]["knn"]
    assert "note" not in then["KNN"]
    assert then["MAP"] == {"note": "At commit 0123abc.", **first["MAP"]}
    assert again["subjects"][0]["summary"] == results["subjects"][0]["summary"]
    said.clear()
    assert digits.study("mnist", replace(own, store=Store(tmp_path, said.append)), TINY, ANGLES) == again
    assert said[0] == "0 steps are taken from the earlier results."  # the folder has them


def test_earlier_results_of_other_sizes_are_refused(results: Any, settings: Settings, tmp_path: Path) -> None:
    own = replace(settings, store=Store(tmp_path), earlier=earlier(results))
    with pytest.raises(Mixed, match="of other sizes"):
        digits.study("mnist", own, replace(TINY, samples=4), ANGLES)


# --- the page ---------------------------------------------------------------------------------------------------------


def table(page: Page, section: str, number: int = 0) -> tuple[list[str], dict[str, list[Any]]]:
    """The names of the columns of a table, and its rows by their names."""
    (found,) = (s for s in page.sections if s.title == section)
    block = found.blocks[number]
    assert isinstance(block, Table)
    return [column.name for column in block.columns], {str(row[0]): list(row) for row in block.rows}


def test_tables_have_means_over_seeds_with_the_papers_figures_beside(results: Any, page: Page) -> None:
    columns, rows = table(page, "In distribution")
    assert next(iter(rows)) == "MAP"
    assert "KNN" not in rows  # which makes no predictions
    figures = [run["methods"]["MAP"]["familiar"] for run in results["subjects"][0]["runs"]]
    for metric, column, published in (("accuracy", "accuracy", 0.977), ("ece", "ECE †", 0.787)):
        cell, values = rows["MAP"][columns.index(column)], [figure[metric] for figure in figures]
        assert isinstance(cell, Value)
        assert (cell.mean, cell.spread) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
        assert cell.paper == published
    columns, rows = table(page, "Strangers")
    cell = rows["ProjectedPosterior"][columns.index("kmnist: the paper's score")]
    assert cell.paper == 0.862
    default = rows["ProjectedPosterior"][columns.index("kmnist: default score")]
    scores = [r["methods"]["ProjectedPosterior"]["scores"] for r in results["subjects"][0]["runs"]]
    assert default.mean == pytest.approx(np.mean([s["calibrated"]["kmnist"]["auroc"] for s in scores]))
    best = max(np.mean([s[name]["kmnist"]["auroc"] for s in scores]) for name in scores[0])
    assert rows["ProjectedPosterior"][columns.index("kmnist: best score")].mean == pytest.approx(best)
    summary = results["subjects"][0]["summary"]
    assert summary["strangers"]["ProjectedPosterior"]["calibrated"]["kmnist"]["mean"] == pytest.approx(default.mean)
    assert summary["strangers"]["ProjectedPosterior"]["max_variance"]["kmnist"]["paper"] == 0.862


def test_page_names_the_score_that_comes_closest_to_the_papers_figure(results: Any, page: Page) -> None:
    columns, rows = table(page, "Strangers", 1)
    scores = [r["methods"]["ProjectedPosterior"]["scores"] for r in results["subjects"][0]["runs"]]
    gaps = {name: abs(np.mean([s[name]["kmnist"]["auroc"] for s in scores]) - 0.862) for name in scores[0]}
    named = rows["ProjectedPosterior, kmnist"][columns.index("closest score")]
    assert gaps[named] == pytest.approx(min(gaps.values()))


def test_page_has_every_kind_of_figure(page: Page) -> None:
    blocks = [block for section in page.sections for block in section.blocks]
    assert {type(block) for block in blocks} == {Table, Curves, Histograms, Reliability, Gallery}
    assert [block.caption for block in blocks if isinstance(block, Reliability)] == [
        f"Reliability of {name}" for name in ("ProjectedPosterior", "LossProjectedPosterior", "MAP")
    ]
    curves = [block for block in blocks if isinstance(block, Curves)]
    assert [curve.y_label for curve in curves] == ["accuracy", "ECE"]
    assert all(list(series.x) == list(ANGLES) and series.spread is not None for c in curves for series in c.series)
    for histogram in (block for block in blocks if isinstance(block, Histograms)):
        assert set(histogram.shares) == {"familiar", "fashion-mnist", "kmnist"}
        assert all(sum(shares) == pytest.approx(1.0, abs=1e-3) for shares in histogram.shares.values())
    assert all(block.rows for block in blocks if isinstance(block, Table))
