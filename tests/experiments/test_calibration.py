"""Appendix B's claim is judged on the same examples for all, beside a temperature that does as much."""

from __future__ import annotations

import copy

import pytest
import torch

import nullbayes as nb
from nullbayes.experiments import calibration
from nullbayes.experiments.calibration import ALL, CORRECT, NETWORK, RULES
from nullbayes.experiments.frame import Settings
from nullbayes.experiments.summary import as_asked
from nullbayes.experiments.tasks import demo_digits

SIZES = calibration.Sizes(n=120, epochs=25, test=120, samples=6)
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def results() -> dict:
    return calibration.run(Settings(seeds=1), SIZES)


def test_figures_with_and_without_misclassified_examples(results: dict) -> None:
    [run] = results["data"]["digits"].values()
    wrong = run[NETWORK]["misclassified"]
    assert 0 < wrong < 60  # otherwise there is nothing to leave out
    assert run[ALL]["rows"] == 120
    assert run[CORRECT]["rows"] == 120 - wrong
    assert set(RULES) <= set(run[ALL])
    for side in ("train", "test"):
        network = run[NETWORK][side]
        assert network["wrong"] == pytest.approx(network["softened wrong"], abs=1e-6)  # at a temperature of one
        assert network["wrong"] < network["correct"]
        scales = sorted(RULES, key=lambda rule: run[ALL][rule]["prior precision"])
        assert run[ALL][scales[0]][side]["confidence"] < run[ALL][scales[-1]][side]["confidence"]
    assert run[NETWORK]["train"]["accuracy"] == pytest.approx(1 - wrong / 120)


def test_every_precision_is_judged_as_the_library_predicts_with_it(results: dict) -> None:
    settings = Settings()
    task = demo_digits(settings, 120, 25, held_out=120, test=120)
    posterior = nb.LossProjectedPosterior(task.model)
    with as_asked():
        posterior.fit(*task.train, 6, generator=settings.generator(), progress=False)
    for rule in ("auto", "optimal", "paper"):
        posterior.prior_precision = rule
        probs = posterior.predict(task.test[0], link_approx="mc").probs
        found = results["data"]["digits"]["0"][ALL][rule]["test"]
        assert found["nll"] == pytest.approx(nb.metrics.nll(probs, task.test[1]), rel=1e-3)
        assert found["ece"] == pytest.approx(nb.metrics.ece(probs, task.test[1]), abs=1e-3)


def test_temperature_makes_correct_examples_as_confident_as_asked() -> None:
    logits = 3.0 * torch.randn(200, 5, dtype=torch.float64)
    right = torch.arange(200) % 3 > 0
    for wanted in (0.4, 0.8):
        soft = calibration.softened(logits, right, wanted)
        assert float(soft[right].max(1).values.mean()) == pytest.approx(wanted, abs=1e-9)
        scale = soft.log()[:, 0] - soft.log()[:, 1]
        assert torch.allclose(scale / (logits[:, 0] - logits[:, 1]), scale[0] / (logits[0, 0] - logits[0, 1]))


def test_groups_are_those_of_the_network() -> None:
    logits, targets = torch.tensor([[4.0, 0.0], [4.0, 0.0]]), torch.tensor([0, 1])
    found = calibration.figures(torch.tensor([[0.3, 0.7], [0.4, 0.6]]), targets, logits)
    assert found["correct"] == pytest.approx(0.7)
    assert found["wrong"] == pytest.approx(0.6)
    assert found["accuracy"] == 0.5
    alone = calibration.figures(logits[:1].softmax(1), targets[:1], logits[:1])
    assert alone["wrong"] is None


def test_sentences_follow_the_numbers(results: dict) -> None:
    page = calibration.page(results)
    assert [len(section.blocks) for section in page.sections] == [0, 2]
    assert len(page.sections[1].blocks[1].rows) == 1 + 2 * len(RULES)
    changed = copy.deepcopy(results)
    [run] = changed["data"]["digits"].values()
    for side in ("train", "test"):
        before, after = run[NETWORK][side], run[ALL]["auto"][side]
        after |= {"wrong": before["wrong"] - 0.2, "correct": before["correct"], "ece": before["ece"] / 2 - 0.01}
    claimed = calibration.page(changed)
    assert claimed.sections[1].paragraphs[1].count("as the appendix says") == 2
    assert "improves with the library's default precision" in claimed.lead
    for rule in RULES:
        run[ALL][rule]["test"]["ece"] = run[NETWORK]["test"]["ece"] + 0.1
        run[ALL][rule]["test"]["correct"] = run[ALL][rule]["train"]["correct"] = 0.0
    denied = calibration.page(changed)
    assert "does not improve" in denied.lead
    assert denied.sections[1].paragraphs[1].count("which is not what the appendix says") == 2
