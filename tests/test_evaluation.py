"""`nb.evaluate` puts methods side by side with the figures of `nb.metrics`, and refuses what cannot be compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from nullbayes.errors import DataError, LikelihoodError, NotFittedError, SettingsError
from nullbayes.evaluation import Detection, Evaluation, EvaluationRow
from nullbayes.predictive import SCORES
from support.drawing import randint, randn
from support.models import CLASSIFICATION, MLP, REGRESSION, Task

pytestmark = pytest.mark.filterwarnings("ignore:.*are training data")  # which test no one's quality here

N, M = 60, 40


def drawn(seed: int, n: int, scale: float = 1.0) -> Tensor:
    return scale * randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(kind: type, task: Task = CLASSIFICATION, **settings: Any) -> Any:
    return kind(MLP.build(task.outputs), task.likelihood, **settings).fit(
        *task.data(), 5, generator=torch.Generator().manual_seed(0), progress=False
    )


def labels(n: int = N, classes: int = 3) -> Tensor:
    return randint(classes, (n,), generator=torch.Generator().manual_seed(3))


X, Y = drawn(1, N), labels()
FAR, NEAR = drawn(2, M, 4.0), drawn(3, M - 10)
STRANGERS = {"far": FAR, "near": NEAR}


@pytest.fixture(scope="module")
def projected() -> Any:
    return fitted(nb.ProjectedPosterior)


@pytest.fixture(scope="module")
def network() -> Any:
    return fitted(nb.baselines.MAP)


@pytest.fixture(scope="module")
def ensemble() -> Any:
    return fitted(nb.baselines.LocalEnsemble, memory_budget=3)


@pytest.fixture(scope="module")
def evaluation(projected: Any, network: Any, ensemble: Any) -> Evaluation:
    methods = {"projected": projected, "network": (network, "energy"), "ensemble": ensemble}
    return nb.evaluate(methods, (X, Y), STRANGERS)


def check_detection(row: EvaluationRow, method: Any, kind: str | None, inside: Any, strangers: dict[str, Any]) -> None:
    familiar = method.ood_score(inside, kind)
    assert list(row.strangers) == list(strangers)
    for name, outside in strangers.items():
        scores, found = method.ood_score(outside, kind), row.strangers[name]
        assert found.auroc == nb.metrics.auroc(familiar, scores)
        assert found.aupr == nb.metrics.aupr(familiar, scores)
        assert found.fpr95 == nb.metrics.fpr95(familiar, scores)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_of_classes_are_those_of_the_metrics(evaluation: Evaluation, projected: Any, network: Any) -> None:
    for name, method, kind in (("projected", projected, None), ("network", network, "energy")):
        row, probs = evaluation[name], method.predict(X).probs
        check_detection(row, method, kind, X, STRANGERS)
        assert row.accuracy == pytest.approx(nb.metrics.accuracy(probs, Y), rel=1e-12)
        assert row.nll == pytest.approx(nb.metrics.nll(probs, Y), rel=1e-12)
        assert row.ece == pytest.approx(nb.metrics.ece(probs, Y), rel=1e-12)
        wrong = probs.argmax(1) != Y
        assert row.aurc == pytest.approx(nb.metrics.aurc(method.ood_score(X, kind), wrong), rel=1e-12)
        assert row.rmse is None
        assert row.coverage is None
    assert (evaluation.n_familiar, evaluation.n_strangers) == (N, {"far": M, "near": M - 10})


def test_figures_of_numbers_are_those_of_the_metrics() -> None:
    posterior = fitted(nb.ProjectedPosterior, REGRESSION)
    y = randn(N, REGRESSION.outputs, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    row = nb.evaluate([posterior], (X, y), STRANGERS).rows[0]
    prediction = posterior.predict(X)
    check_detection(row, posterior, None, X, STRANGERS)
    variance = prediction.variance + prediction.noise
    assert row.rmse == pytest.approx(nb.metrics.rmse(prediction.mean, y), rel=1e-12)
    assert row.nll == pytest.approx(nb.metrics.gaussian_nll(prediction.mean, variance, y), rel=1e-12)
    assert row.coverage == pytest.approx(nb.metrics.interval_coverage(*prediction.interval(0.9), y), rel=1e-12)
    losses = (prediction.mean - y).square().mean(1)
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(X), losses), rel=1e-12)
    assert row.accuracy is None
    assert row.ece is None
    counts, met, promised = row.reliability
    for level, inside in zip(promised / counts, met / counts, strict=True):
        lower, upper = prediction.interval(float(level))
        assert float(inside) == pytest.approx(nb.metrics.interval_coverage(lower, upper, y), abs=1e-9)


@pytest.mark.parametrize(("likelihood", "outputs"), [("binary", 1), ("multilabel", 3)])
def test_figures_of_labels_are_those_of_the_metrics(likelihood: str, outputs: int) -> None:
    targets = randint(2, (N, outputs), generator=torch.Generator().manual_seed(5))
    posterior = nb.ProjectedPosterior(MLP.build(outputs), likelihood, prior_precision=1.0)
    posterior.fit(X[:9], targets[:9].double(), 5, progress=False)
    row, probs = nb.evaluate([posterior], (X, targets), STRANGERS).rows[0], posterior.predict(X).probs
    assert row.accuracy == pytest.approx(nb.metrics.accuracy(probs, targets, multilabel=True), rel=1e-12)
    assert row.nll == pytest.approx(nb.metrics.nll(probs, targets, multilabel=True), rel=1e-12)
    assert row.ece == pytest.approx(nb.metrics.ece(probs, targets, multilabel=True), rel=1e-12)
    wrong = ((probs >= 0.5) != targets.bool()).double().mean(1)
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(X), wrong), rel=1e-12)


def test_a_certain_and_wrong_label_costs_what_the_metric_says() -> None:
    model = nb.as_module(lambda p, x: x * p["w"], {"w": torch.full((1,), 40.0)})
    x, y = torch.tensor([[1.0], [-1.0], [1.0], [0.02]]), torch.tensor([1, 0, 0, 1])
    network = nb.baselines.MAP(model, "binary").fit(x, y)
    probs = network.predict(x).probs
    assert float(probs[2]) == 1.0  # in float32
    row = nb.evaluate([network], (x, y), {"zeros": torch.zeros(2, 1)}).rows[0]
    assert row.nll == pytest.approx(nb.metrics.nll(probs[:, 0], y), rel=1e-12)
    assert row.nll > 21.0


def test_a_loss_of_ones_own_is_the_selective_risk() -> None:
    def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().sum(1)

    y = randn(N, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    posterior = nb.ProjectedPosterior(MLP.build(2), absolute, prior_precision=1.0).fit(X[:9], y[:9], 5, progress=False)
    row = nb.evaluate([posterior], (X, y), STRANGERS).rows[0]
    losses = absolute(posterior.predict(X).mean, y)
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(X), losses), rel=1e-12)
    assert row.nll is None
    assert row.reliability is None
    assert len(nb.evaluate([posterior], (X, y), STRANGERS).plot().axes) == 4


def test_a_method_without_predictions_has_scores_alone(evaluation: Evaluation, ensemble: Any) -> None:
    row = evaluation["ensemble"]
    check_detection(row, ensemble, None, X, STRANGERS)
    assert row.score == "local_ensemble"
    assert (row.nll, row.ece, row.accuracy, row.aurc, row.reliability) == (None,) * 5


def test_costs_are_those_of_the_report(evaluation: Evaluation, projected: Any) -> None:
    row = evaluation["projected"]
    assert row.fit_seconds == sum(projected.report.seconds.values())
    assert row.peak_memory == projected.report.peak_memory
    assert row.seconds_per_1000 > 0
    assert row.false_alarms is None
    assert row.strangers["far"].flagged is None


def test_scores_are_kept_on_the_cpu(evaluation: Evaluation, projected: Any) -> None:
    row = evaluation["projected"]
    assert torch.equal(row.scores_in, projected.ood_score(X).cpu())
    assert torch.equal(row.scores_out["far"], projected.ood_score(FAR).cpu())
    assert row.scores_in.device.type == "cpu"


# --- scores -----------------------------------------------------------------------------------------------------------


def test_every_score_of_a_method_has_a_row(projected: Any, ensemble: Any) -> None:
    found = nb.evaluate({"p": projected, "e": ensemble}, (X, Y), STRANGERS, scores="all")
    assert [row.name for row in found.rows] == [
        *(f"p: {kind}" for kind in (*SCORES, "relative_variance")),
        "e: local_ensemble",
    ]
    for row in found.rows:
        check_detection(row, projected if row.name.startswith("p") else ensemble, row.score, X, STRANGERS)


def test_a_method_with_a_score_of_its_own_has_that_and_the_others() -> None:
    scod = fitted(nb.baselines.SCOD)
    found = nb.evaluate({"scod": scod}, (X, Y), STRANGERS, scores="all")
    assert [row.score for row in found.rows] == ["scod", *SCORES]
    for row in found.rows:
        check_detection(row, scod, row.score, X, STRANGERS)
    assert nb.evaluate([scod], (X, Y), STRANGERS)["SCOD"].score == "scod"


def test_scores_that_need_probabilities_are_left_out_of_a_regression() -> None:
    posterior = fitted(nb.ProjectedPosterior, REGRESSION)
    y = torch.zeros(N, REGRESSION.outputs, dtype=torch.float64)
    found = nb.evaluate([posterior], (X, y), STRANGERS, scores="all")
    assert [row.score for row in found.rows] == ["max_variance", "sum_variance", "relative_variance"]


def test_one_score_is_for_all_methods_but_those_with_their_own(projected: Any, network: Any) -> None:
    methods = {"a": projected, "b": (network, "max_logit")}
    found = nb.evaluate(methods, (X, Y), STRANGERS, scores="entropy")
    assert [(row.name, row.score) for row in found.rows] == [("a", "entropy"), ("b", "max_logit")]
    check_detection(found["a"], projected, "entropy", X, STRANGERS)


def test_methods_without_names_are_named_after_their_classes(projected: Any, network: Any) -> None:
    found = nb.evaluate([projected, (network, "energy")], (X, Y), STRANGERS)
    assert [(row.name, row.method, row.score) for row in found.rows] == [
        ("ProjectedPosterior", "ProjectedPosterior", "generalized_entropy"),
        ("MAP", "MAP", "energy"),
    ]
    assert nb.evaluate(projected, (X, Y), STRANGERS).rows[0].name == "ProjectedPosterior"


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["loader", "list", "dataset", "arrays"])
def test_data_may_come_in_any_form(evaluation: Evaluation, projected: Any, form: str) -> None:
    inside, far, near = (TensorDataset(*part) for part in ((X, Y), (FAR,), (NEAR, torch.zeros(len(NEAR)))))
    if form == "loader":
        inside, far, near = (DataLoader(part, batch_size=7) for part in (inside, far, near))
    elif form == "list":
        inside, far, near = [(X[:25], Y[:25]), (X[25:], Y[25:])], [FAR[:3], FAR[3:]], [(NEAR, torch.zeros(len(NEAR)))]
    elif form == "arrays":
        inside, far = (X.cpu().numpy(), Y.cpu().numpy()), FAR.cpu().numpy()
        near = (NEAR, torch.zeros(len(NEAR)))  # a pair with targets
    found = nb.evaluate({"projected": projected}, inside, {"far": far, "near": near})["projected"]
    wanted = evaluation["projected"]
    for name in STRANGERS:
        assert found.strangers[name].auroc == pytest.approx(wanted.strangers[name].auroc, rel=1e-9)
    for name in ("nll", "ece", "accuracy", "aurc"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6), name


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.words(input_ids).tanh())


def sentences(length: int, seed: int, n: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = randint(9, (n, length), generator=generator)
    lengths = 1 + randint(length, (n, 1), generator=generator)
    mask = (torch.arange(length, device=ids.device) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": (ids % 3).masked_fill(mask == 0, -100)}


def test_sequences_of_any_length_leave_ignored_positions_out() -> None:
    posterior = nb.ProjectedPosterior(Tagger().double(), prior_precision=1.0)
    posterior.fit([sentences(5, 0)], 5, progress=False)
    batches, strangers = [sentences(5, 1), sentences(3, 2)], [sentences(4, 3), sentences(7, 4)]
    row = nb.evaluate({"tags": posterior}, batches, {"other": strangers})["tags"]
    check_detection(row, posterior, None, batches, {"other": strangers})
    probs, targets, wrong = [], [], []
    for batch in batches:
        p, y = posterior.predict(batch).probs, batch["labels"]
        counted = y != -100
        probs.append(p[counted])
        targets.append(y[counted])
        wrong += [float((a.argmax(1) != b)[c].double().mean()) for a, b, c in zip(p, y, counted, strict=True)]
    probs, targets = torch.cat(probs), torch.cat(targets)
    assert row.accuracy == pytest.approx(nb.metrics.accuracy(probs, targets), rel=1e-12)
    assert row.nll == pytest.approx(nb.metrics.nll(probs, targets), rel=1e-12)
    assert row.ece == pytest.approx(nb.metrics.ece(probs, targets), rel=1e-12)
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(batches), wrong), rel=1e-12)
    one = nb.evaluate({"tags": posterior}, batches[0], {"other": strangers[0]})  # mappings
    assert (one.n_familiar, one.n_strangers) == (6, {"other": 6})


def test_a_mask_counts_in_scores() -> None:
    posterior = nb.ProjectedPosterior(Tagger().double(), prior_precision=1.0)
    posterior.fit([sentences(5, 0)], 5, progress=False)
    data = {"inside": sentences(5, 1), "other": sentences(5, 3)}
    found = nb.evaluate([posterior], data["inside"], {"other": data["other"]}, mask="all").rows[0]
    for name, scores in (("inside", found.scores_in), ("other", found.scores_out["other"])):
        assert torch.equal(scores, posterior.ood_score(data[name], mask="all").cpu())
        assert not torch.equal(scores, posterior.ood_score(data[name]).cpu())


def test_images_of_classes_are_read_by_their_positions() -> None:
    with torch.random.fork_rng():
        model = nn.Conv2d(1, 3, 3, padding=1).double()
    x = randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = randint(3, (8, 4, 4), generator=torch.Generator().manual_seed(1))
    y[0] = -100  # a whole image
    posterior = nb.baselines.MAP(model).fit(x[1:5], y[1:5])
    row, probs = nb.evaluate([posterior], (x, y), {"flat": 0 * x}).rows[0], posterior.predict(x).probs
    assert row.nll == pytest.approx(F.nll_loss(probs.log(), y).item(), rel=1e-9)
    assert row.ece == pytest.approx(nb.metrics.ece(probs, y), rel=1e-12)
    wrong = (probs.argmax(1) != y).double().mean((1, 2))[1:]
    assert row.aurc == pytest.approx(nb.metrics.aurc(posterior.ood_score(x)[1:], wrong), rel=1e-12)


def test_a_loaded_posterior_is_evaluated_as_the_one_that_was_saved(
    evaluation: Evaluation, projected: Any, tmp_path: Any
) -> None:
    projected.save(tmp_path / "posterior.safetensors")
    loaded = nb.load(tmp_path / "posterior.safetensors", MLP.build(3))
    row = nb.evaluate({"projected": loaded}, (X, Y), STRANGERS)["projected"]
    assert row.strangers == evaluation["projected"].strangers
    assert row.nll == evaluation["projected"].nll


# --- intervals --------------------------------------------------------------------------------------------------------


def widths(row: EvaluationRow) -> dict[str, float]:
    found = {f"{s}: {name}": ends for s, d in row.strangers.items() for name, ends in d.intervals.items()}
    return {name: high - low for name, (low, high) in {**found, **row.intervals}.items()}


def test_intervals_contain_their_figures_and_shrink_with_more_data(projected: Any) -> None:
    inside, strangers = drawn(7, 1600), {"far": drawn(8, 1600, 1.5)}
    y = labels(1600)
    asked = {"bootstrap": 100, "generator": torch.Generator().manual_seed(0)}
    large = nb.evaluate([projected], (inside, y), strangers, **asked).rows[0]
    small = nb.evaluate([projected], (inside[:100], y[:100]), {"far": strangers["far"][:100]}, **asked).rows[0]
    for row in (large, small):
        assert set(row.intervals) == {"nll", "accuracy", "aurc"}
        for name, (low, high) in row.intervals.items():
            assert low < getattr(row, name) < high
        for name, (low, high) in row.strangers["far"].intervals.items():
            assert low < getattr(row.strangers["far"], name) < high
    assert set(large.strangers["far"].intervals) == {"auroc", "aupr", "fpr95"}
    for name, wide in widths(small).items():
        assert widths(large)[name] < 0.5 * wide, name  # about a quarter


def test_intervals_of_an_accuracy_are_those_of_a_binomial(network: Any) -> None:
    row = nb.evaluate([network], (X, Y), STRANGERS, bootstrap=2000, generator=torch.Generator().manual_seed(0)).rows[0]
    low, high = row.intervals["accuracy"]
    wanted = 2 * 1.645 * (row.accuracy * (1 - row.accuracy) / N) ** 0.5
    assert high - low == pytest.approx(wanted, rel=0.15)  # steps of 1/60


def test_the_same_seed_gives_the_same_intervals(projected: Any, network: Any) -> None:
    def asked(seed: int) -> list[Any]:
        methods, generator = {"a": projected, "b": network}, torch.Generator().manual_seed(seed)
        found = nb.evaluate(methods, (X, Y), STRANGERS, scores="max_logit", bootstrap=20, generator=generator)
        return [(row.intervals, row.strangers["far"].intervals) for row in found.rows]

    assert asked(0) == asked(0)
    assert asked(0) != asked(1)
    (first, _), (second, _) = asked(0)
    assert first["aurc"] == pytest.approx(second["aurc"])  # the same score and classes, on the same resamples


def test_without_resamples_nothing_is_drawn(projected: Any) -> None:
    before = torch.get_rng_state()
    row = nb.evaluate([projected], (X, Y), STRANGERS).rows[0]
    assert torch.equal(before, torch.get_rng_state())
    assert row.intervals == {}


# --- the table --------------------------------------------------------------------------------------------------------


def made(name: str, nll: float | None, auroc: float, **more: Any) -> EvaluationRow:
    given = {"scores_in": torch.zeros(1), "scores_out": {"night": torch.ones(1)}, **more}
    return EvaluationRow(name, "MAP", "energy", {"night": Detection(auroc, 0.5, 0.25)}, nll, **given)


def table(*rows: EvaluationRow) -> Evaluation:
    return Evaluation("classification", 10, {"night": 20}, rows)


def test_text_marks_the_best_and_shows_what_is_missing_as_a_dash() -> None:
    text = str(table(made("one", 0.5, 0.9), made("another", 0.25, 0.75), made("score", None, 0.90001)))
    lines = text.splitlines()
    assert lines[0].split() == ["familiar", "(10)", "night", "(20)"]
    assert lines[1].split() == ["method", "NLL", "↓", "AUROC", "↑", "AUPR", "↑", "FPR95", "↓"]
    assert lines[2].split() == ["one", "0.5000", "0.900*", "0.500*", "0.250*"]
    assert lines[3].split() == ["another", "0.2500*", "0.750", "0.500*", "0.250*"]
    assert lines[4].split() == ["score", "-", "0.900*", "0.500*", "0.250*"]
    assert lines[2].index("0.5000") == lines[3].index("0.2500")
    assert lines[2].index("0.900") == lines[3].index("0.750") == lines[4].index("0.900")


def test_a_single_row_has_no_best() -> None:
    assert "*" not in str(table(made("one", 0.5, 0.9)))  # nor does the legend explain what is not there


def test_the_legend_says_what_a_star_is() -> None:
    text = str(table(made("one", 0.5, 0.9), made("another", 0.25, 0.75)))
    assert text.splitlines()[-1] == "* best method of its column, ties share it; ↑ higher, ↓ lower is better"


def test_coverage_is_best_where_it_is_close_to_its_level() -> None:
    rows = [made(str(c), 1.0, 0.5, rmse=1.0, coverage=c) for c in (0.99, 0.88, 0.5)]
    assert "0.880*" in str(table(*rows))
    assert "0.990*" not in str(table(*rows))


def test_text_fits_a_line_with_many_strangers_and_long_names(projected: Any, network: Any) -> None:
    strangers = {f"stranger number {i} with a name that is long": NEAR for i in range(5)}
    methods = {"a name of a method that is much longer than a column of names": projected, "network": network}
    for bootstrap in (0, 10):
        text = str(nb.evaluate(methods, (X, Y), strangers, bootstrap=bootstrap, scores="energy"))
        assert max(map(len, text.splitlines())) <= 120
        assert text.count("AUROC") == 5
        assert text.count("NLL") == 1
        assert ("[" in text) == (bootstrap > 0)


def test_markdown_is_one_table(evaluation: Evaluation) -> None:
    lines = [line.strip("|").split("|") for line in evaluation.to_markdown().splitlines()]
    assert len({len(line) for line in lines}) == 1
    assert all(set(cell.strip()) <= {"-", ":"} for cell in lines[1])
    assert [line[0].strip() for line in lines[2:]] == ["projected", "network", "ensemble"]
    column = [head.strip() for head in lines[0]].index("far (40): AUROC ↑")
    values = [float(line[column].strip().strip("*")) for line in lines[2:]]
    assert values == [pytest.approx(row.strangers["far"].auroc, abs=6e-4) for row in evaluation.rows]
    best = max(evaluation.rows, key=lambda row: row.strangers["far"].auroc)
    assert [line[0].strip() for line in lines[2:] if "**" in line[column]] == [best.name]
    assert "a\\|b" in table(made("a|b", 0.5, 0.5)).to_markdown()


def test_a_dictionary_is_json(projected: Any) -> None:
    found = nb.evaluate({"projected": projected}, (X, Y), STRANGERS, bootstrap=5)
    plain = found.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    row = plain["rows"][0]
    assert row["strangers"]["far"]["auroc"] == found["projected"].strangers["far"].auroc
    assert row["intervals"]["nll"] == list(found["projected"].intervals["nll"])
    assert "scores_in" not in row
    assert plain["n_strangers"] == {"far": M, "near": M - 10}


def test_pandas_has_the_figures(evaluation: Evaluation, projected: Any) -> None:
    frame = evaluation.to_pandas()
    assert list(frame.index) == ["projected", "network", "ensemble"]
    assert frame.loc["network", ("far", "AUROC")] == evaluation["network"].strangers["far"].auroc
    assert frame.loc["network", ("familiar", "NLL")] == evaluation["network"].nll
    assert frame["familiar", "NLL"].isna().tolist() == [False, False, True]
    with_intervals = nb.evaluate([projected], (X, Y), STRANGERS, bootstrap=5)
    low = with_intervals.to_pandas()["near", "FPR95 low"].item()
    assert low == with_intervals.rows[0].strangers["near"].intervals["fpr95"][0]


def test_an_unknown_row_is_refused_with_those_there_are(evaluation: Evaluation) -> None:
    with pytest.raises(KeyError, match="'projected', 'network', 'ensemble'"):
        evaluation["other"]


# --- the figure -------------------------------------------------------------------------------------------------------


def test_figure_has_two_panels_for_each_set_and_one_of_reliability(evaluation: Evaluation, tmp_path: Any) -> None:
    figure = evaluation.plot(tmp_path / "evaluation.png")
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == 5
    roc = figure.axes[0]
    assert [text.get_text().partition(" (")[0] for text in roc.get_legend().get_texts()] == [
        row.name for row in sorted(evaluation.rows, key=lambda row: -row.strangers["far"].auroc)
    ]
    for line, row in zip(roc.lines[1:], sorted(evaluation.rows, key=lambda r: -r.strangers["far"].auroc), strict=True):
        x, y = (torch.tensor(values) for values in line.get_data())
        assert float(torch.trapezoid(y, x)) == pytest.approx(row.strangers["far"].auroc, abs=1e-9)
    reliability = figure.axes[-1]
    assert len(reliability.lines) == 3  # the diagonal, and two methods that predict


def test_figure_of_scores_alone_has_no_reliability(ensemble: Any) -> None:
    assert len(nb.evaluate([ensemble], (X, Y), STRANGERS).plot().axes) == 4


def test_figure_shows_predictions_once_for_all_scores_of_a_method(projected: Any, network: Any) -> None:
    found = nb.evaluate({"a": projected, "b": network}, (X, Y), {"far": FAR}, scores="all").plot()
    assert [text.get_text() for text in found.axes[-1].get_legend().get_texts()] == ["a", "b"]
    assert len(found.axes[0].lines) == 1 + 8  # the best eight of fourteen


def test_figure_of_a_regression_shows_coverage() -> None:
    posterior = fitted(nb.ProjectedPosterior, REGRESSION)
    y = torch.zeros(N, REGRESSION.outputs, dtype=torch.float64)
    assert "Intervals" in nb.evaluate([posterior], (X, y), STRANGERS).plot().axes[-1].get_title()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_sets_that_cannot_be_compared_are_refused(projected: Any) -> None:
    def ask(in_data: Any = (X, Y), strangers: Any = STRANGERS, **options: Any) -> None:
        nb.evaluate([projected], in_data, strangers, **options)

    with pytest.raises(DataError, match="There are no strangers: pass at least one set"):
        ask(strangers={})
    with pytest.raises(DataError, match="strangers must be a mapping from names to inputs"):
        ask(strangers=FAR)
    with pytest.raises(DataError, match=r"strangers\['far'\]: There is nothing to predict"):
        ask(strangers={"far": FAR[:0]})
    with pytest.raises(DataError, match=r"strangers\['far'\]: There is nothing to predict"):
        ask(strangers={"far": []})
    with pytest.raises(DataError, match="in_data: The loader is empty"):
        ask([])
    with pytest.raises(DataError, match="in_data: Batch 0 is empty"):
        ask((X[:0], Y[:0]))
    with pytest.raises(DataError, match=r"in_data has no targets: pass a pair \(x, y\)"):
        ask(X)
    with pytest.raises(DataError, match=r"in_data: Batch 0: .*\(inputs, targets\)"):
        ask([X])
    with pytest.raises(DataError, match="in_data can be read only once"):
        ask(iter([(X, Y)]))
    with pytest.raises(DataError, match=r"strangers\['far'\] can be read only once"):
        ask(strangers={"far": iter([FAR])})
    with pytest.raises(DataError, match="random order"):
        ask(DataLoader(TensorDataset(X, Y), shuffle=True))
    with pytest.raises(DataError, match="Every target of in_data is one to be ignored"):
        ask((X, torch.full_like(Y, -100)))
    with pytest.raises(LikelihoodError, match="labels must be 0 to 2"):
        ask((X, Y + 1))
    with pytest.raises(LikelihoodError, match="pass integer labels"):
        ask((X, F.one_hot(Y, 3).double()))
    with pytest.raises(SettingsError, match="bootstrap must be a number of resamples"):
        ask(bootstrap=-1)
    with pytest.raises(SettingsError, match="mask must be a function"):
        ask(mask=torch.ones(N, 2))


def test_methods_that_cannot_be_compared_are_refused(projected: Any, network: Any, ensemble: Any) -> None:
    def ask(methods: Any, **options: Any) -> None:
        nb.evaluate(methods, (X, Y), STRANGERS, **options)

    with pytest.raises(NotFittedError, match=r"call fit\(loader\) first"):
        ask([nb.ProjectedPosterior(MLP.build(3))])
    with pytest.raises(NotFittedError, match=r"call fit\(loader\) first"):
        ask({"a": nb.baselines.LocalEnsemble(MLP.build(3))})
    with pytest.raises(SettingsError, match="'a' is a Sequential, which has no ood_score"):
        ask({"a": MLP.build(3)})
    with pytest.raises(SettingsError, match="There is no method to evaluate"):
        ask([])
    with pytest.raises(SettingsError, match="methods must be a mapping"):
        ask("projected")
    with pytest.raises(SettingsError, match="names of methods must be strings, not 0"):
        ask({0: projected})
    with pytest.raises(SettingsError, match=r"'network' \(MAP\) has no score 'max_variance': it has max_probability"):
        ask({"network": network}, scores="max_variance")
    with pytest.raises(SettingsError, match=r"no score 'surprise': it has local_ensemble"):
        ask({"ensemble": (ensemble, "surprise")})
    with pytest.raises(SettingsError, match="scores must be None"):
        ask([projected], scores=["energy"])
    with pytest.raises(SettingsError, match="Two rows of the table would be called 'ProjectedPosterior'"):
        ask([projected, projected])
    with pytest.raises(SettingsError, match="Two rows of the table would be called 'a: energy'"):
        ask({"a": projected, "a: energy": (network, "energy")}, scores="all")
    regression = fitted(nb.ProjectedPosterior, REGRESSION)
    with pytest.raises(LikelihoodError, match=r"classification .* and regression .* a table of its own"):
        ask({"a": projected, "b": regression})
    with pytest.raises(SettingsError, match="regression likelihood; leave it out"):
        nb.evaluate([fitted(nb.baselines.MAP, REGRESSION)], (X, Y), STRANGERS)


# --- calibrated methods -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calibrated() -> dict[str, Any]:
    data = CLASSIFICATION.data(n=120, seed=21)
    return {kind.__name__: fitted(kind).calibrate(*data) for kind in (nb.ProjectedPosterior, nb.detectors.KNN)}


def test_a_calibrated_method_is_judged_by_its_calibrated_score_and_its_decisions(calibrated: dict[str, Any]) -> None:
    found = nb.evaluate(calibrated, (X, Y), STRANGERS)
    for name, method in calibrated.items():
        row = found[name]
        assert row.score == "calibrated"
        check_detection(row, method, None, X, STRANGERS)
        assert row.false_alarms == pytest.approx(float(method.is_ood(X).double().mean()))
        for stranger, x in STRANGERS.items():
            assert row.strangers[stranger].flagged == pytest.approx(float(method.is_ood(x).double().mean()))
    assert "false alarms" in str(found)
    assert "flagged" in found.to_markdown()


def test_all_scores_of_a_calibrated_method_have_rows_and_one_decides(calibrated: dict[str, Any]) -> None:
    found = nb.evaluate({"p": calibrated["ProjectedPosterior"]}, (X, Y), STRANGERS, scores="all")
    assert [row.score for row in found.rows] == ["calibrated", *SCORES, "relative_variance"]
    assert [row.false_alarms is None for row in found.rows] == [False, *(True for _ in (*SCORES, "one more"))]


def test_the_combined_score_may_be_named_where_it_was_learned(calibrated: dict[str, Any]) -> None:
    posterior, detector = calibrated["ProjectedPosterior"], calibrated["KNN"]
    row = nb.evaluate({"p": (posterior, "combined")}, (X, Y), STRANGERS)["p"]
    assert torch.equal(row.scores_in, posterior.ood_score(X, "combined").cpu())
    assert row.false_alarms is not None
    for method in (detector, fitted(nb.ProjectedPosterior)):
        with pytest.raises(SettingsError, match=r'not calibrated for "combined": call calibrate\(held_out, kind="comb'):
            nb.evaluate({"m": method}, (X, Y), STRANGERS, scores="combined")


def test_the_legend_says_which_methods_are_not_calibrated(calibrated: dict[str, Any], network: Any) -> None:
    together = str(nb.evaluate({**calibrated, "network": network}, (X, Y), STRANGERS))
    assert "not calibrated: MAP; call calibrate(held_out) on all methods, or on none" in together
    assert "not calibrated" not in str(nb.evaluate(calibrated, (X, Y), STRANGERS))
    assert "not calibrated" not in str(nb.evaluate({"network": network}, (X, Y), STRANGERS))
