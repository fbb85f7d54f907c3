"""What a fit measures, and what a check of it says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.projectors import Alternating, Krylov
from nullbayes.testing import kernel_dimension
from support.drawing import randn, seeded
from support.models import CLASSIFICATION, CUSTOM, MLP, MULTILABEL, REGRESSION, Task, batches
from support.posterior_fits import ITERATIVE, each_kind, each_task, fit_mlp, probabilities, rows_of
from support.slow_answers import jacobian

# the networks are not trained, so their losses leave much open: test_collapse.py has that warning
pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


@each_task
@each_kind
def test_the_report_counts_and_measures(kind: type, task: Task) -> None:
    posterior, rows = fit_mlp(kind, task), rows_of(kind, task)
    model, (x, _) = MLP.build(task.outputs), task.data()
    report, p = posterior.report, rows.shape[1]
    assert (report.n_data, report.n_rows, report.n_parameters, report.n_samples) == (5, len(rows), p, 5)
    assert (report.kernel_dimension, report.kernel_dimension_stderr) == (kernel_dimension(rows), 0.0)
    assert (report.projector, report.reason) == ("ExactDual", "as asked for")
    assert report.route == "by layers (100% of the parameters)"
    assert len(report.residual) == 5
    assert report.converged == (max(report.residual) <= report.tolerance)
    assert report.converged
    assert not report.collapsed
    assert report.prior_precision == posterior.prior_precision
    change = torch.einsum("nop,sp->sno", jacobian(model, x), posterior.directions) / posterior.prior_precision**0.5
    assert report.train_std == pytest.approx(float(change.square().mean().sqrt()), abs=1e-12)
    if kind is nb.LossProjectedPosterior:
        losses = (posterior.directions @ rows.T) / posterior.prior_precision**0.5
        assert report.train_loss_std == pytest.approx(float(losses.square().mean().sqrt()), abs=1e-12)
    else:
        assert report.train_loss_std is None
    outputs = model(x).detach()
    spread = (outputs - outputs.mean(0)).square().mean().sqrt()
    assert report.output_std == pytest.approx(float(spread))
    assert set(report.seconds) == {"data", "rows", "factors", "projection", "measure"}
    assert report.peak_memory is None or report.peak_memory >= 0


@pytest.mark.parametrize(("sigma", "shown"), [(0.25, "0.25"), ((0.5, 0.25), "0.25 to 0.5, one per output")])
def test_the_report_has_the_noise_of_a_regression_that_is_in_use(sigma: Any, shown: str) -> None:
    x, n_outputs = randn(2, 4, generator=seeded()), 1 if isinstance(sigma, float) else 2
    model, y = torch.nn.Linear(4, n_outputs), x[:, :n_outputs]
    posterior = nb.ProjectedPosterior(model, nb.likelihoods.Regression(sigma), prior_precision=1.0).fit(x, y)
    assert f"noise             {shown} (sigma_noise: standard deviation" in str(posterior.report)
    assert posterior.report.sigma_noise == sigma
    posterior.temperature = 4.0
    assert posterior.report.sigma_noise == pytest.approx(2 * sigma if isinstance(sigma, float) else (1.0, 0.5))


def test_the_report_of_a_classification_has_no_noise() -> None:
    report = fit_mlp(nb.ProjectedPosterior, CLASSIFICATION).report
    assert report.sigma_noise is None
    assert "sigma_noise" not in str(report)


def test_the_residual_is_that_of_each_sample() -> None:
    """One tolerance a sample: what is left of the change of the training outputs, over what the noise would do."""
    noise = randn(5, 51, generator=seeded(2), dtype=torch.float64)
    rows = rows_of(nb.ProjectedPosterior, CLASSIFICATION)
    loose = Krylov(Alternating(block_rows=3), rtol=0.05)
    posterior = fit_mlp(nb.ProjectedPosterior, base=noise, projector=loose)
    wanted = (posterior.directions @ rows.T).norm(dim=1) / (noise @ rows.T).norm(dim=1)
    torch.testing.assert_close(torch.tensor(posterior.report.residual, dtype=torch.float64), wanted)
    assert 1e-6 < wanted.max() <= 0.05
    left = (posterior.directions @ rows.T).square().mean().sqrt()
    assert posterior.report.train_std == pytest.approx(float(left) / posterior.prior_precision**0.5)
    assert posterior.report.tolerance == 0.05
    assert posterior.report.sweeps > 0


def test_an_estimated_dimension_comes_with_its_error() -> None:
    posterior = fit_mlp(nb.ProjectedPosterior, n_samples=40, projector=ITERATIVE)
    report = posterior.report
    assert 0.5 < report.kernel_dimension_stderr < 3  # sqrt(2 * 36 / 40) = 1.3
    assert abs(report.kernel_dimension - 36) < 4 * report.kernel_dimension_stderr


@each_kind
def test_the_report_prints_and_is_json(kind: type) -> None:
    posterior = fit_mlp(kind)
    report = posterior.report
    text = str(report)
    for wanted in (
        "ExactDual",
        "5 examples",
        "null space",
        "dimensions",
        "±",
        "std on training",
        f"{report.prior_precision:.4g}",
    ):
        assert wanted in text
    assert "NOT reached" not in text
    assert "COLLAPSED" not in text
    read = json.loads(json.dumps(report.to_dict()))
    assert read == report.to_dict()
    assert read["residual"] == list(report.residual)
    assert set(read) == set(type(report).__dataclass_fields__)


@pytest.mark.parametrize("task", [CLASSIFICATION, MULTILABEL], ids=["classification", "multilabel"])
def test_outputs_with_targets_of_their_own_are_judged_one_by_one(task: Task) -> None:
    posterior = fit_mlp(nb.ProjectedPosterior, task)
    alone = task is MULTILABEL
    assert (posterior.report.worst_ratio is not None) == alone
    assert (posterior.check_fit([task.data()]).worst_ratio is not None) == alone


@each_task
@each_kind
def test_check_fit_compares_with_the_network(kind: type, task: Task) -> None:
    posterior, model = fit_mlp(kind, task), MLP.build(task.outputs)
    x, y = task.data(n=9, seed=4)
    prediction, outputs = posterior.predict(x), model(x).detach()
    samples = prediction.samples
    check = posterior.check_fit(batches(x, y, (4, 5)))
    per = {CLASSIFICATION: 1, CUSTOM: 1}.get(task, task.outputs)  # targets of an example

    def nll(outputs: Tensor) -> float:  # (S, N, O): of the mean density
        losses = torch.stack([torch.stack([task.loss(f, t) for f, t in zip(s, y, strict=True)]) for s in outputs])
        return float(-(-losses).exp().mean(0).log().mean()) / per

    def closed_nll() -> float:
        if not posterior.likelihood.has_closed_form:
            return nll(samples)
        if task is REGRESSION:
            spread = (prediction.variance + 0.5**2).sqrt()
            return float(-torch.distributions.Normal(outputs, spread).log_prob(y).mean())
        probs = prediction.probs
        right = probs.gather(1, y[:, None]) if task is CLASSIFICATION else (1 - y.view(probs.shape) - probs).abs()
        return float(-right.log().mean())

    def accuracy(probs: Tensor | None) -> float | None:
        if probs is None:
            return None
        right = probs.argmax(1) == y if task is CLASSIFICATION else (probs > 0.5).long() == y.view(probs.shape)
        return float(right.double().mean())

    assert check.n_data == 9
    assert max(check.mean_shift, check.max_shift) < 1e-12  # the mean is the network's own output
    assert check.std == pytest.approx(float(samples.var(0).mean().sqrt()))
    assert check.output_std == pytest.approx(float((outputs - outputs.mean(0)).square().mean().sqrt()))
    assert check.nll_model == pytest.approx(nll(outputs[None]))
    assert check.nll_posterior == pytest.approx(closed_nll())
    assert check.accuracy_model == check.accuracy_posterior == accuracy(probabilities(task, outputs))
    assert f"{check.nll_posterior:.4f}" in str(check)
    assert ("accuracy" in str(check)) == (check.accuracy_model is not None)


def test_check_fit_on_the_training_data_of_a_projected_posterior_finds_nothing() -> None:
    check = fit_mlp(nb.ProjectedPosterior).check_fit([CLASSIFICATION.data()])
    assert check.max_shift < 1e-10
    assert check.std < 1e-10
    assert check.nll_posterior == pytest.approx(check.nll_model)


@pytest.mark.parametrize("task", [CLASSIFICATION, MULTILABEL, REGRESSION], ids=lambda task: task.name)
def test_a_check_has_the_network_as_it_is_and_at_the_temperature_of_the_posterior(task: Task) -> None:
    posterior, (x, y) = fit_mlp(nb.ProjectedPosterior, task), task.data(n=9)
    before = posterior.check_fit([(x, y)])
    assert before.nll_untempered == before.nll_model
    assert "temperature" not in str(before)
    posterior.temperature = 3.0
    outputs, check = MLP.build(task.outputs)(x).detach(), posterior.check_fit([(x, y)])
    if task is REGRESSION:
        sigma = torch.tensor(0.5 * 3.0**0.5, dtype=x.dtype)
        tempered = float(-torch.distributions.Normal(outputs, sigma).log_prob(y).mean())
    else:
        losses = torch.stack([task.loss(f, t) for f, t in zip(outputs / 3.0, y, strict=True)])
        tempered = float(losses.mean()) / (1 if task is CLASSIFICATION else task.outputs)
    assert check.nll_untempered == pytest.approx(before.nll_model, rel=1e-12)
    assert check.nll_model == pytest.approx(tempered)
    assert check.temperature == 3.0
    lines = str(check).splitlines()
    assert [line.split("  ")[0] for line in lines[4:7]] == ["network", "network at temperature 3", "posterior"]
    wanted = (check.nll_untempered, check.nll_model, check.nll_posterior)
    assert [f"{nll:.4f}" in line for nll, line in zip(wanted, lines[4:7], strict=True)] == [True] * 3
    assert lines[-1].startswith("The posterior predicts at a temperature of 3, so it is compared with")


def test_accuracy_takes_probabilities_for_targets() -> None:
    x, y = CLASSIFICATION.data(n=9)
    posterior = fit_mlp(nb.ProjectedPosterior)
    soft = 0.8 * torch.nn.functional.one_hot(y, 3) + 0.2 / 3
    hard, smooth = posterior.check_fit([(x, y)]), posterior.check_fit([(x, soft.double())])
    assert hard.accuracy_model == smooth.accuracy_model


def smooth(tolerance: float, seed: int = 0) -> nb.ProjectedPosterior:
    """A network with fewer parameters than rows, of which few matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1))
        x = torch.randn(200, 3)
    posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0)
    return posterior.fit(x, x.sin().sum(1, keepdim=True), tolerance=tolerance, generator=seeded(seed), progress=False)


def test_the_printed_residual_agrees_with_the_tolerance() -> None:
    """Where a direct method meets the tolerance in the mean, samples that the rows hardly see count by that mean."""
    for seed in range(12):
        report = smooth(1e-3, seed).report
        assert report.converged == (max(report.residual) <= 1e-3)
        assert ("NOT reached" in str(report)) == (max(report.residual) > 1e-3)


def test_the_report_says_when_the_tolerance_sets_the_size_of_the_variance() -> None:
    x = randn(50, 3, generator=seeded()).float()
    posterior, other = smooth(1e-3), smooth(1e-1)
    small, large = (each.predict(x).variance.mean() for each in (posterior, other))
    assert large > 10 * small  # which is what the report says
    assert posterior.report.sized_by_tolerance
    assert "means nothing by itself" in str(posterior.report)
    assert "by itself" not in str(fit_mlp(nb.ProjectedPosterior, REGRESSION).report)


def test_ignored_positions_do_not_count_as_rows() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        x, y = torch.randn(4, 10, 2), torch.randint(3, (4, 10))
    y[:, 2:] = -100
    report = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x, y, progress=False).report
    assert (report.n_rows, report.n_counted, report.n_parameters) == (120, 24, 33)
    assert not report.sized_by_tolerance
    assert "120 of 4 examples (24 count, the rest is ignored)" in str(report)


def test_peak_memory_counts_only_the_fit() -> None:
    held = torch.zeros(2**26)  # 256 MiB that a fit has nothing to do with
    report = fit_mlp(nb.ProjectedPosterior).report
    assert report.peak_memory is None or report.peak_memory < 2**27
    del held


def test_a_tolerance_finer_than_float32_is_blamed_on_the_dtype() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
        x = torch.randn(50, 3)
    posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0)
    with pytest.warns(ConvergenceWarning, match="finer than the precision of the numbers: use float64"):
        posterior.fit(x, x[:, :1], tolerance=1e-8, progress=False)
