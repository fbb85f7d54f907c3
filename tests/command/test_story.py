"""The examples of the help give what Python gives: fit, check, predict, evaluate, plan, report."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import nullbayes as nb
from nullbayes.command import fit, main
from nullbayes.command.frame import Console, Refusal
from nullbayes.command.report import _threshold, make_page
from nullbayes.decisions.conformal import p_values
from nullbayes.page import Gallery, Histograms, Reliability, Table
from support.user_folder import example, imported

pytestmark = pytest.mark.cpu  # the command has a --device of its own
MODEL = ["--model", "own:build", "--weights", "own.pt"]


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command prints as JSON, which must end well and print nothing else on stdout."""
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def fitted(own: Any) -> nb.ProjectedPosterior:
    """The same fit in Python: a random third of the held-out data tunes, the others calibrate."""
    x, y = own.held_out()
    tunes = torch.rand(240, generator=torch.Generator().manual_seed(0)) < 1 / 3
    posterior = nb.ProjectedPosterior(own.model)
    posterior.fit(own.train(), held_out=(x[tunes], y[tunes]), generator=torch.Generator().manual_seed(0))
    return posterior.calibrate(x[~tunes], y[~tunes])


@pytest.fixture
def posterior(own: Any) -> Any:
    return nb.load("posterior.safetensors", own.model)


def test_fit_is_that_of_python(fitted: nb.ProjectedPosterior, posterior: Any) -> None:
    assert torch.equal(posterior.directions, fitted.directions)
    assert (posterior.prior_precision, posterior.temperature) == (fitted.prior_precision, fitted.temperature)
    assert torch.equal(posterior.calibration.scores, fitted.calibration.scores)
    assert posterior.calibration.weights == fitted.calibration.weights


def test_a_fit_prints_its_report_and_takes_its_options(own: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "fit",
        *MODEL,
        "--data",
        "own:train",
        "--posterior",
        "loss-projected",
        "--parameters",
        "2.*",
        "--seed",
        "5",
    ]
    words += ["--samples", "7", "--tolerance", "0.5", "--memory-limit", "1GB", "-o", "other.safetensors"]
    assert main(words) == 0
    printed = capsys.readouterr()
    other: Any = nb.load("other.safetensors", own.model)
    same = nb.LossProjectedPosterior(own.model, parameters="2.*")
    same.fit(own.train(), 7, tolerance=0.5, generator=torch.Generator().manual_seed(5))
    assert torch.equal(other.directions, same.directions)
    assert other.calibration is None
    assert "It is not calibrated" in printed.err
    assert f"null space        {other.report.kernel_dimension:,.1f}" in printed.out
    assert max(map(len, printed.out.splitlines())) <= 100
    found = result(capsys, *words)
    assert found["kind"] == "LossProjectedPosterior"
    assert found["report"]["n_samples"] == 7
    assert found["report"]["tolerance"] == 0.5
    assert found["calibration"] is None


def test_few_held_out_data_are_all_ranked_by_a_score_that_is_named(
    own: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", *MODEL, "--data", "own:train", "--held-out", "own:held_out", "-o", "few.safetensors"]
    assert main(words) == 0
    learned = nb.load("few.safetensors", own.model).calibration
    assert learned.kind == "combined"
    assert f"Only {len(learned.scores)} held-out examples are ranked" in capsys.readouterr().err
    assert main([*words, "--score", "generalized_entropy"]) == 0
    named = nb.load("few.safetensors", own.model).calibration
    assert (named.kind, len(named.scores)) == ("generalized_entropy", len(learned.scores) + learned.n_learned)
    assert "--score" not in capsys.readouterr().err


def test_a_fit_that_was_interrupted_saves_nothing(own: Any) -> None:
    from nullbayes.command import build_parser

    words = [*example("fit")[:-1], "never.safetensors", "--checkpoint", "state"]
    with pytest.raises(Refusal, match="nothing was saved; the same command goes on from state") as refused:
        fit.run(build_parser().parse_args(words), Console(signals=[2]))
    assert refused.value.code == 130
    assert not Path("never.safetensors").exists()


def test_check_says_whether_the_promise_holds(own: Any, posterior: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, *example("check"))
    assert found.pop("kept") is True
    assert found == posterior.check_fit(own.train()).to_dict()
    assert posterior.temperature != 1.0  # held-out data chose it
    assert main(example("check")) == 0
    shown = capsys.readouterr().out
    assert all(f"{found[name]:.4f}" in shown for name in ("nll_untempered", "nll_model", "nll_posterior"))
    assert "as well as the network at its temperature." in shown
    posterior.prior_precision = 1e-9  # samples so far away that predictions are ruined
    with pytest.warns(nb.errors.NullBayesWarning, match="calibrate it again"):
        posterior.save("ruined.safetensors")
    assert main(["check", "ruined.safetensors", *MODEL, "--data", "own:train"]) == 1
    assert "The promise does not hold" in capsys.readouterr().out
    assert main(["check", "ruined.safetensors", *MODEL, "--data", "own:train", "--nats", "9", "--points", "1"]) == 0


def test_predict_writes_the_table_of_python(own: Any, posterior: Any, capsys: pytest.CaptureFixture[str]) -> None:
    x, _ = own.test()
    found = result(capsys, *example("predict"))
    table = posterior.predict(x).to_pandas()
    scores, p, strange = posterior.ood_score(x), posterior.p_value(x), posterior.is_ood(x, 0.05)
    with open("scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["input", *table.columns, "score", "p_value", "strange"]
    assert [row["input"] for row in rows] == [str(i) for i in range(60)]
    for name in table.columns:
        np.testing.assert_allclose([float(row[name]) for row in rows], table[name], rtol=1e-6)
    np.testing.assert_allclose([float(row["score"]) for row in rows], scores, rtol=1e-6)
    np.testing.assert_allclose([float(row["p_value"]) for row in rows], p, rtol=1e-6)
    assert [row["strange"] for row in rows] == ["yes" if flag else "no" for flag in strange]
    assert (found["n"], found["flagged"]) == (60, int(strange.sum()))


def test_arrays_hold_what_a_table_cannot(own: Any, posterior: Any) -> None:
    assert (
        main(["predict", "posterior.safetensors", *MODEL, "--data", "own:noise", "-o", "a.npz", "--alpha", "0.2"]) == 0
    )
    arrays, prediction = np.load("a.npz"), posterior.predict(own.noise())
    assert set(arrays) == {"mean", "variance", "std", "probs", "score", "p_value", "strange"}
    for name in ("mean", "variance", "std", "probs"):
        np.testing.assert_allclose(arrays[name], getattr(prediction, name), rtol=1e-6)
    assert arrays["strange"].tolist() == posterior.is_ood(own.noise(), 0.2).tolist()
    assert arrays["strange"].sum() > 10


def test_parquet_holds_the_columns_of_the_other_table(own: Any) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("scores.csv", "scores.parquet"):
        assert main([*example("predict")[:-1], name]) == 0
    found = parquet.read_table("scores.parquet").to_pydict()
    with open("scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(found) == list(rows[0])
    assert found.pop("strange") == [row["strange"] == "yes" for row in rows]
    for name, column in found.items():
        np.testing.assert_allclose(column, [float(row[name]) for row in rows], rtol=1e-6)


def test_parquet_without_its_package_is_refused_before_any_work(
    own: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["predict", "nowhere", "--model", "none:none", "--data", "none:none", "-o", "a.parquet"]) == 1
    assert "pip install pyarrow" in capsys.readouterr().err


def test_intervals_of_a_calibrated_regression_are_those_with_a_guarantee(own: Any) -> None:
    Path("curve.py").write_text(
        "import torch\nx = torch.linspace(-1, 1, 240, device='cpu')[:, None]\ny = 2 * x + 0.3 * torch.cos(90 * x)\n"
        "model = torch.nn.Linear(1, 1)\n"
        "def data():\n    yield x[::2], y[::2]\n"
        "def held_out():\n    yield x[1::2] + 1e-3, y[1::2]\n"
    )
    words = ["fit", "--model", "curve:model", "--data", "curve:data", "--likelihood", "regression", "-o", "curve"]
    assert main([*words, "--held-out", "curve:held_out"]) == 0
    assert main(["predict", "curve", "--model", "curve:model", "--data", "curve:data", "-o", "curve.csv"]) == 0
    curve = sys.modules["curve"]
    posterior = nb.load("curve", curve.model)
    with open("curve.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = posterior.predict_interval(curve.x[::2], alpha=0.1)
    for name, ends in zip(("lower_0.9", "upper_0.9"), wanted, strict=True):
        np.testing.assert_allclose([float(row[name]) for row in rows], ends[:, 0].cpu(), rtol=1e-5)
    assert not torch.allclose(wanted[0], posterior.predict(curve.x[::2]).interval(0.9)[0], rtol=1e-2)


def test_intervals_of_a_regression_that_was_calibrated_without_targets_are_those_of_the_posterior(own: Any) -> None:
    Path("bare.py").write_text(
        "import torch\nx = torch.linspace(-1, 1, 240, device='cpu')[:, None]\nmodel = torch.nn.Linear(1, 1)\n"
        "def data():\n    yield x[::2], 2 * x[::2]\n"
        "def held_out(): return x[1::2] + 1e-3\n"
    )
    words = ["fit", "--model", "bare:model", "--data", "bare:data", "--likelihood", "regression", "-o", "bare"]
    assert main([*words, "--held-out", "bare:held_out", "--no-tune"]) == 0
    assert main(["predict", "bare", "--model", "bare:model", "--data", "bare:data", "-o", "bare.csv"]) == 0
    bare = sys.modules["bare"]
    posterior = nb.load("bare", bare.model)
    assert posterior.calibration.errors is None
    with open("bare.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for name, ends in zip(("lower_0.9", "upper_0.9"), posterior.predict(bare.x[::2]).interval(0.9), strict=True):
        np.testing.assert_allclose([float(row[name]) for row in rows], ends[:, 0].cpu(), rtol=1e-5)


def test_a_regression_has_intervals_and_no_probabilities(own: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("line.py").write_text(
        "import torch\nx = torch.linspace(-1, 1, 40, device='cpu')[:, None]\nmodel = torch.nn.Linear(1, 1)\n"
        "def data():\n    yield x[:30], 2 * x[:30] + 0.1 * torch.cos(9 * x[:30])\n    yield x[30:], 2 * x[30:]\n"
        "def far():\n    return 5 + x\n"
    )
    words = ["fit", "--model", "line:model", "--data", "line:data", "--likelihood", "regression", "-o", "line"]
    assert main(words) == 0
    assert main(["predict", "line", "--model", "line:model", "--data", "line.py:data", "-o", "line.csv"]) == 0
    line = imported(Path("line.py"))
    line.model.load_state_dict(sys.modules["line"].model.state_dict())
    table = nb.load("line", line.model).predict(line.x).to_pandas()
    with open("line.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["input", *table.columns, "score"]
    np.testing.assert_allclose([float(row["lower_0.9"]) for row in rows], table["lower_0.9"], rtol=1e-5)
    assert "not calibrated" in capsys.readouterr().err
    words = ["report", "line", "--model", "line:model", "--data", "line:data", "-o", "line.html"]
    assert main([*words, "--strangers", "far=line:far"]) == 0
    (noise,) = re.findall(r"([\d.]+) \(sigma_noise", Path("line.html").read_text(encoding="utf-8"))
    assert float(noise) == pytest.approx(nb.load("line", line.model).likelihood.sigma_noise, rel=1e-2)


def test_a_model_with_outputs_batches_and_a_loss_of_its_own(own: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd.py").write_text(
        "import torch\nfrom torch import nn\nfrom own import some\n"
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 3)\n        nn.init.eye_(self.layer.weight)\n"
        "        nn.init.zeros_(self.layer.bias)\n"
        "    def forward(self, x):\n        return {'a': self.layer(x), 'b': x}\n"
        "def outputs(found):\n    return found['a']\n"
        "def split(batch):\n    return batch[1], batch[0]\n"
        "def data():\n    return [some(20, seed)[::-1] for seed in (6, 7)]\n"
        "def loss(outputs, y):\n    return nn.functional.cross_entropy(outputs, y, reduction='none')\n"
    )
    words = ["--model", "odd:Model", "--output-fn", "odd:outputs", "--batch-fn", "odd:split", "--data", "odd:data"]
    words += ["--likelihood", "odd:loss"]
    assert main(["fit", *words, "-o", "odd.safetensors"]) == 0
    assert main(["predict", "odd.safetensors", *words, "-o", "odd.npz"]) == 0
    sys.path.append(".")
    odd, arrays = imported(Path("odd.py")), np.load("odd.npz")
    x = torch.cat([x for _, x in odd.data()])
    np.testing.assert_allclose(arrays["mean"], odd.Model()(x)["a"].detach(), rtol=1e-5)
    assert "probs" not in arrays
    capsys.readouterr()
    assert main(["check", "odd.safetensors", *words, "--json", "--nats", "9"]) == 0
    check = json.loads(capsys.readouterr().out)
    losses = odd.loss(odd.Model()(x)["a"], torch.cat([y for y, _ in odd.data()]))
    assert check["nll_model"] == pytest.approx(float(losses.mean().detach()), rel=1e-5)


def test_held_out_data_may_calibrate_alone(own: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, *example("fit"), "--no-tune", "-o", str(tmp_path / "other.safetensors"))
    x, y = own.held_out()
    posterior = nb.ProjectedPosterior(own.model)
    posterior.fit(own.train(), generator=torch.Generator().manual_seed(0)).calibrate(x, y)
    assert found["report"]["temperature"] == posterior.temperature == 1.0
    assert found["calibration"] == posterior.calibration.to_dict()


def test_evaluate_prints_the_table_of_python(own: Any, posterior: Any, capsys: pytest.CaptureFixture[str]) -> None:
    same = nb.evaluate({"posterior": posterior}, own.test(), {"noise": own.noise()}).to_dict()
    found = result(capsys, *example("evaluate"))
    for row in (*same["rows"], *found["rows"]):
        del row["seconds_per_1000"]  # a time
    assert found == same
    assert main([*example("evaluate"), "--markdown", "--scores", "all", "--bootstrap", "5"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("| method | familiar (60): accuracy")
    assert "| posterior: max_variance |" in table
    assert "[" in table.splitlines()[2]


def test_plan_is_that_of_python(own: Any, capsys: pytest.CaptureFixture[str]) -> None:
    same = nb.plan(own.model, own.train(), memory_limit="8GB").to_dict()
    assert result(capsys, *example("plan")) == same
    assert main(example("plan")) == 0
    assert "144 rows over 67 parameters" in capsys.readouterr().out


def test_a_page_has_every_figure_and_every_kind_of_picture(own: Any, posterior: Any) -> None:
    page, evaluation = make_page(posterior, "mine", own.test(), {"noise": own.noise()}, "nullbayes report")
    blocks = {section.title: list(section.blocks) for section in page.sections}
    assert list(blocks) == [
        "The posterior and its network", "Predictions", "Detection", "Calibration", "Scores", "Inputs", "The fit",
    ]  # fmt: skip
    (familiar, by_score), (noise, cost) = blocks["Predictions"], blocks["Detection"]
    assert isinstance(familiar, Table)
    assert [row[0] for row in familiar.rows] == [row[0] for row in cost.rows] == ["mine"]
    assert [row[0] for row in by_score.rows] == [row[0] for row in noise.rows] == [row.name for row in evaluation.rows]
    shown = [column.name for block in (familiar, by_score) for column in block.columns]
    assert {"NLL", "accuracy"}.isdisjoint(shown), "the table beside the network has them"
    auroc = [column.name for column in noise.columns].index("AUROC")
    assert noise.rows[0][auroc].mean == evaluation["mine: calibrated"].strangers["noise"].auroc
    assert cost.rows
    assert [type(block) for block in blocks["Calibration"]] == [Reliability]
    (histograms,) = blocks["Scores"]
    assert isinstance(histograms, Histograms)
    assert histograms.x_label.endswith("score: combined, calibrated")
    assert histograms.threshold is not None
    for inputs in (own.test()[0], own.noise()):
        scores = posterior.ood_score(inputs)
        above = (scores.log10() if histograms.x_label.startswith("log₁₀ of ") else scores) > histograms.threshold
        assert torch.equal(above, posterior.is_ood(inputs, 0.05))
    strangest, certain, missed = blocks["Inputs"]
    assert all(isinstance(block, Gallery) and len(block.pictures) == 8 for block in (strangest, certain, missed))
    x, _ = own.test()
    first = int(posterior.ood_score(x).argmax())
    p, probs = posterior.p_value(x)[first], posterior.predict(x).probs
    assert f"input {first}, p = {p:.3f}, class {probs[first].argmax()}" in strangest.pictures[0].label
    assert f"input {int(probs.max(1).values.argmax())}," in certain.pictures[0].label
    assert f"input {int(posterior.ood_score(own.noise()).argmin())}," in missed.pictures[0].label
    assert page.facts["command"] == "nullbayes report"
    assert f"{evaluation.rows[0].false_alarms:.1%} of familiar inputs" in page.lead
    assert "AUROC of the calibrated score: noise" in page.lead


@pytest.mark.parametrize("n", [18, 19, 20, 38, 39, 59, 60])
def test_the_threshold_of_a_page_is_where_p_values_are_five_per_cent(n: int) -> None:
    scores = torch.arange(n, dtype=torch.float64)
    limit = _threshold(SimpleNamespace(calibration=SimpleNamespace(scores=scores)))
    new = torch.arange(-1.0, n + 1.0, 0.5, dtype=torch.float64)
    flagged = p_values(scores, new) <= 0.05
    assert torch.equal(flagged, torch.zeros_like(flagged) if limit is None else new > limit)


def test_a_page_compares_with_the_network_as_it_is_and_at_the_temperature(own: Any, posterior: Any) -> None:
    page, _ = make_page(posterior, "mine", own.test(), {"noise": own.noise()}, "nullbayes report")
    (section,) = (section for section in page.sections if section.title == "The posterior and its network")
    (table,), check = section.blocks, posterior.check_fit(own.test())
    assert [row[0] for row in table.rows] == [
        "network", f"network at temperature {posterior.temperature:.3g}", "posterior",
    ]  # fmt: skip
    assert [row[1].mean for row in table.rows] == [check.nll_untempered, check.nll_model, check.nll_posterior]
    assert f"predicts at a temperature of {posterior.temperature:.3g}" in section.paragraphs[0]


def test_without_strangers_a_page_makes_some_and_says_so(own: Any, posterior: Any) -> None:
    x, y = own.test()
    page, evaluation = make_page(posterior, "mine", [(x[:30], y[:30]), (x[30:], y[30:])], {}, "")
    assert evaluation.n_strangers == {"values shuffled": 60}
    assert any("shuffled within each input" in text for section in page.sections for text in section.paragraphs)


def test_pictures_are_of_inputs_wherever_a_batch_has_them(own: Any) -> None:
    x, y = own.test()
    posterior: Any = nb.load("posterior.safetensors", own.model, batch_fn=lambda batch: batch[::-1])
    page, _ = make_page(posterior, "mine", [(y, x)], {"noise": own.noise()}, "", lambda batch: batch[::-1])
    strangest, _, missed = next(section.blocks for section in page.sections if section.title == "Inputs")
    for block, inputs, i in ((strangest, x, posterior.ood_score(x).argmax()), (missed, own.noise(), None)):
        i = posterior.ood_score(inputs).argmin() if i is None else i
        assert block.pictures[0].text == f"({', '.join(f'{value:.3g}' for value in inputs[i].tolist())})"


def test_report_writes_one_page(own: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nullbayes.page.html")
    found = result(capsys, *example("report"), "--held-out", "own:held_out")
    text = Path("report.html").read_text(encoding="utf-8")
    assert found["page"] == "report.html"
    assert f"{found['evaluation']['rows'][0]['strangers']['noise']['auroc']:.3f}" in text
    assert "--strangers noise=own:noise" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_is_for_terminals(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(example("predict")) == 0
        assert ("predicting: " in stream.getvalue()) is shown
