"""What both posteriors promise, for every likelihood."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from drawing import rand, randn
from models import (
    BINARY,
    CLASSIFICATION,
    CUSTOM,
    MLP,
    MODELS,
    MULTILABEL,
    REGRESSION,
    TASKS,
    Task,
    batches,
    call,
    flat_parameters,
    gauss_newton,
    jacobian,
    loss_jacobian,
    with_parameters,
)
from nullbayes.errors import NotFittedError, SettingsError
from nullbayes.projectors import Alternating, ExactDual, ExactPrimal, Krylov
from nullbayes.testing import kernel_dimension, kernel_projector

# the networks are not trained, so their losses leave much open: test_collapse.py has that warning
pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

EXACT = ExactDual()
ITERATIVE = Krylov(Alternating(block_rows=4), rtol=1e-9)
X_NEW = MLP.inputs(4, torch.Generator().manual_seed(11))
KINDS = (nb.ProjectedPosterior, nb.LossProjectedPosterior)

each_kind = pytest.mark.parametrize("kind", KINDS)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fit(kind: type, task: Task = CLASSIFICATION, n_samples: int = 5, seed: int = 0, **settings: Any) -> Any:
    model = MLP.build(task.outputs)
    settings = {"projector": EXACT, "generator": seeded(seed), "progress": False, **settings}
    return kind(model, task.likelihood).fit([task.data()], n_samples, **settings)


def rows_of(kind: type, task: Task) -> Tensor:  # (R, P)
    """The rows that a fit of that kind projects against, from the slow oracles."""
    model, (x, y) = MLP.build(task.outputs), task.data()
    return jacobian(model, x).flatten(0, 1) if kind is nb.ProjectedPosterior else loss_jacobian(model, x, y, task)


def probabilities(task: Task, outputs: Tensor) -> Tensor | None:
    if task is CLASSIFICATION:
        return outputs.exp() / outputs.exp().sum(-1, keepdim=True)
    return 1 / (1 + (-outputs).exp()) if task in (BINARY, MULTILABEL) else None


# --- predictions ------------------------------------------------------------------------------------------------------


@each_task
@each_kind
def test_predictions_are_the_linearized_network_at_the_samples(kind: type, task: Task) -> None:
    posterior, model = fit(kind, task), MLP.build(task.outputs)
    prediction = posterior.predict(X_NEW)
    change = torch.einsum("nop,sp->sno", jacobian(model, X_NEW), posterior.directions)
    samples = model(X_NEW).detach() + change / math.sqrt(posterior.prior_precision)
    torch.testing.assert_close(prediction.samples, samples)
    torch.testing.assert_close(prediction.mean, samples.sum(0) / 5)
    torch.testing.assert_close(prediction.variance, (samples - samples.mean(0)).square().sum(0) / 4)
    probs = probabilities(task, samples)
    if probs is None:
        assert prediction.probs is None
    else:
        torch.testing.assert_close(prediction.probs, probs.mean(0))


@each_task
def test_projected_samples_predict_the_training_data_as_the_network_does(task: Task) -> None:
    posterior, (x, _) = fit(nb.ProjectedPosterior, task), task.data()
    own = MLP.build(task.outputs)(x).detach()
    samples = posterior.predict(x).samples
    torch.testing.assert_close(samples, own.expand_as(samples), rtol=1e-9, atol=1e-9)
    assert posterior.predict(X_NEW).variance.min() > 1e-3  # and other data not


@each_task
def test_loss_projected_samples_keep_every_training_loss_to_first_order(task: Task) -> None:
    posterior, (x, y) = fit(nb.LossProjectedPosterior, task), task.data()
    model = MLP.build(task.outputs)
    gradients = loss_jacobian(model, x, y, task)
    assert (gradients @ posterior.directions.T).abs().max() < 1e-10

    def losses(step: float) -> Tensor:
        moved = with_parameters(model, flat_parameters(model) + step * posterior.directions[0])(x)
        return torch.stack([task.loss(moved[i], y[i]) for i in range(len(y))])

    # halving the step divides what is left by four: there is no first order
    far, near = (losses(h) - losses(0.0) for h in (2e-4, 1e-4))
    torch.testing.assert_close(far, 4 * near, rtol=1e-2, atol=1e-9)


@each_kind
def test_fit_returns_the_posterior_and_a_call_predicts(kind: type) -> None:
    posterior = kind(MLP.build())
    assert posterior.fit([CLASSIFICATION.data()], 3, projector=EXACT, progress=False) is posterior
    torch.testing.assert_close(posterior(X_NEW).samples, posterior.predict(X_NEW).samples, rtol=0, atol=0)


def test_inputs_come_in_every_form() -> None:
    posterior = fit(nb.ProjectedPosterior)
    targets = torch.zeros(4, dtype=torch.long)
    wanted = posterior.predict(X_NEW).samples
    for x in (
        [X_NEW],
        [X_NEW[:3], X_NEW[3:]],
        batches(X_NEW, targets, (1, 3)),
        DataLoader(TensorDataset(X_NEW), batch_size=3),
        DataLoader(TensorDataset(X_NEW, targets), batch_size=3),
        (X_NEW,),
        {"input": X_NEW},
        (batch for batch in X_NEW.split(3)),
    ):
        torch.testing.assert_close(posterior.predict(x).samples, wanted)
    torch.testing.assert_close(posterior.ood_score([X_NEW[:3], X_NEW[3:]]), posterior.ood_score(X_NEW))
    for exact in (True, False):
        torch.testing.assert_close(
            posterior.functional_variance([X_NEW[:3], X_NEW[3:]], exact=exact),
            posterior.functional_variance(X_NEW, exact=exact),
        )


@pytest.mark.parametrize("case", [MODELS[10], MODELS[11]], ids=lambda case: case.name)
def test_structured_inputs_come_alone_and_in_loaders(case: Any) -> None:
    x, y = CLASSIFICATION.data(case)
    posterior = nb.ProjectedPosterior(case.build()).fit(batches(x, y, (2, 3)), 3, projector=EXACT, progress=False)
    wanted = posterior.predict(x).samples
    torch.testing.assert_close(posterior.predict(batches(x, y, (4, 1))).samples, wanted)
    torch.testing.assert_close(wanted.mean(0), call(case.build(), x).detach())


@each_kind
def test_fewer_samples_are_the_first_ones(kind: type) -> None:
    posterior = fit(kind)
    torch.testing.assert_close(posterior.predict(X_NEW, n_samples=2).samples, posterior.predict(X_NEW).samples[:2])


@each_task
@each_kind
def test_sampled_predictions_are_the_network_at_the_samples(kind: type, task: Task) -> None:
    posterior, model = fit(kind, task), MLP.build(task.outputs)
    theta = flat_parameters(model)
    wanted = [
        with_parameters(model, theta + v / posterior.prior_precision**0.5)(X_NEW).detach() for v in posterior.directions
    ]
    torch.testing.assert_close(posterior.predict(X_NEW, pred_type="sampled").samples, torch.stack(wanted))


# --- samples ----------------------------------------------------------------------------------------------------------


@each_kind
def test_the_seed_decides(kind: type) -> None:
    one, same, other = fit(kind, seed=3), fit(kind, seed=3), fit(kind, seed=4)
    assert torch.equal(one.directions, same.directions)
    assert (one.directions - other.directions).norm(dim=1).min() > 1


def test_samples_of_a_seed_have_nothing_in_common() -> None:
    """Sample i comes from a generator of its own; two seeds must not share samples either."""
    everything = torch.cat([fit(nb.ProjectedPosterior, seed=seed, n_samples=20).directions for seed in (0, 1)])
    similarity = torch.corrcoef(everything) - torch.eye(40)
    assert similarity.abs().max() < 0.8  # 36 dimensions: 0.8 is six standard deviations away


def test_a_fit_with_a_generator_leaves_the_global_one_alone() -> None:
    before = torch.get_rng_state()
    posterior = fit(nb.ProjectedPosterior)
    posterior.predict(X_NEW)
    posterior.functional_variance(X_NEW, exact=True)
    posterior.optimize_prior_precision([CLASSIFICATION.data()], "marglik")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fit_without_a_generator_follows_the_global_one() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first, second = fit(nb.ProjectedPosterior, generator=None), fit(nb.ProjectedPosterior, generator=None)
        torch.manual_seed(5)
        again = fit(nb.ProjectedPosterior, generator=None)
    assert torch.equal(first.directions, again.directions)
    assert not torch.allclose(first.directions, second.directions)


@pytest.mark.parametrize(
    "projector", [EXACT, ExactPrimal(), ITERATIVE, "auto"], ids=["dual", "primal", "krylov", "auto"]
)
@each_kind
def test_extending_is_fitting_more(kind: type, projector: Any) -> None:
    whole = fit(kind, n_samples=7, projector=projector)
    parts = fit(kind, n_samples=4, projector=projector)
    first = parts.directions.clone()
    assert parts.extend(3, progress=False) is parts
    assert torch.equal(parts.directions[:4], first)
    torch.testing.assert_close(parts.directions, whole.directions)
    torch.testing.assert_close(parts.predict(X_NEW).variance, whole.predict(X_NEW).variance)
    for name in ("n_samples", "kernel_dimension", "kernel_dimension_stderr", "prior_precision", "converged"):
        assert getattr(parts.report, name) == pytest.approx(getattr(whole.report, name)), name
    assert parts.report.train_std == pytest.approx(whole.report.train_std, abs=1e-9)
    assert len(parts.report.residual) == 7


@each_kind
def test_directions_are_noise_projected_on_the_kernel(kind: type) -> None:
    noise = randn(6, 51, generator=seeded(8), dtype=torch.float64)
    projector = kernel_projector(rows_of(kind, CLASSIFICATION))
    for method in (EXACT, ITERATIVE, ExactPrimal()):
        posterior = fit(kind, n_samples=6, base=noise, projector=method)
        torch.testing.assert_close(posterior.directions, noise @ projector, rtol=1e-6, atol=1e-7)


@each_kind
def test_a_base_may_be_a_tensor_a_mapping_or_a_function(kind: type) -> None:
    noise = 3 * randn(4, 51, generator=seeded(8), dtype=torch.float64)
    shapes = {"0.weight": (6, 4), "0.bias": (6,), "2.weight": (3, 6), "2.bias": (3,)}
    pieces = noise.split([24, 6, 18, 3], dim=1)
    named = {name: piece.reshape(4, *shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
    given = []

    def drawn(n: int, generator: torch.Generator) -> Tensor:
        given.append(rand((), generator=generator))
        return noise[:n]

    by_tensor, by_name, by_function = (fit(kind, n_samples=4, base=base) for base in (noise, named, drawn))
    assert torch.equal(by_tensor.directions, by_name.directions)
    assert torch.equal(by_tensor.directions, by_function.directions)
    assert by_tensor.prior_precision == 1.0  # the base has its own scale
    assert by_tensor.report.kernel_dimension == kernel_dimension(rows_of(kind, CLASSIFICATION))
    by_function.extend(2, progress=False)
    torch.testing.assert_close(by_function.directions[4:], by_tensor.directions[:2])
    assert given[0] != given[1]  # another part of the random stream
    with pytest.raises(SettingsError, match="no more to extend with"):
        by_tensor.extend(1)
    with pytest.raises(SettingsError, match="exact=False"):
        by_tensor.functional_variance(X_NEW, exact=True)


def test_the_kernel_of_a_base_is_measured_with_isotropic_probes() -> None:
    posterior = fit(nb.ProjectedPosterior, n_samples=4, base=torch.zeros(4, 51), projector=ITERATIVE)
    report = posterior.report
    assert report.kernel_dimension_stderr > 0
    assert abs(report.kernel_dimension - 36) < 5 * report.kernel_dimension_stderr


@each_kind
def test_samples_are_named_parameters(kind: type) -> None:
    posterior, model = fit(kind), MLP.build()
    named = posterior.sample(3)
    assert {name: tuple(value.shape) for name, value in named.items()} == {
        name: (3, *parameter.shape) for name, parameter in model.named_parameters()
    }
    flat = torch.cat([value.flatten(1) for value in named.values()], dim=1)
    wanted = flat_parameters(model) + posterior.directions[:3] / posterior.prior_precision**0.5
    torch.testing.assert_close(flat, wanted)
    assert len(posterior.sample()["0.bias"]) == 5


@pytest.mark.parametrize("case", [MLP, MODELS[7], MODELS[12]], ids=lambda case: case.name)
def test_a_sample_can_be_put_into_the_model_for_a_while(case: Any) -> None:
    model = case.build()
    posterior = nb.ProjectedPosterior(model).fit([CLASSIFICATION.data()], 3, projector=EXACT, progress=False)
    own, pointers = model(X_NEW), [parameter.data_ptr() for parameter in model.parameters()]
    for i in (0, 2, -1):
        with posterior.sampled_parameters(i) as changed:
            assert changed is model
            inside = model(X_NEW)
        torch.testing.assert_close(inside, posterior.predict(X_NEW, pred_type="sampled").samples[i])
        assert torch.equal(model(X_NEW), own)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_the_trained_parameters_return_after_an_error() -> None:
    posterior = fit(nb.ProjectedPosterior)
    model = posterior._network.model
    own = model(X_NEW)

    def interrupted() -> None:
        with posterior.sampled_parameters(1):
            assert not torch.allclose(model(X_NEW), own)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(model(X_NEW), own)
    posterior.predict(X_NEW)


def test_released_rows_can_be_built_again() -> None:
    whole, posterior = fit(nb.ProjectedPosterior, n_samples=6), fit(nb.ProjectedPosterior, n_samples=4)
    before = posterior.predict(X_NEW).samples
    assert posterior.release() is posterior
    torch.testing.assert_close(posterior.predict(X_NEW).samples, before, rtol=0, atol=0)
    for ask in (lambda: posterior.extend(2), lambda: posterior.functional_variance(X_NEW, exact=True)):
        with pytest.raises(NotFittedError, match=r"prepare\(loader\)"):
            ask()
    posterior.prepare([CLASSIFICATION.data()], projector=EXACT).extend(2, progress=False)
    torch.testing.assert_close(posterior.directions, whole.directions)


def test_samples_of_a_posterior_that_was_prepared_again_meet_the_tolerance_of_the_fit() -> None:
    data = [CLASSIFICATION.data(n=12)]
    posterior = nb.ProjectedPosterior(MLP.build()).fit(data, 3, tolerance=1e-7, progress=False)
    posterior.release().prepare(data).extend(3, progress=False)
    assert max(posterior.report.residual) <= posterior.report.tolerance == 1e-7
    posterior.release().prepare(data, tolerance=0.3).extend(3, progress=False)
    assert posterior.report.tolerance == 0.3  # what all of them meet


@each_kind
def test_a_fit_that_is_interrupted_while_it_measures_leaves_all_or_nothing(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    posterior, fresh = fit(kind), kind(MLP.build())
    before, alpha, report = posterior.directions, posterior.prior_precision, posterior.report
    monkeypatch.setattr("nullbayes.posteriors.kernel.train_std", interrupted)
    with pytest.raises(KeyboardInterrupt):
        posterior.extend(3, progress=False)
    assert torch.equal(posterior.directions, before)
    assert (posterior.prior_precision, posterior.report) == (alpha, report)
    with pytest.raises(KeyboardInterrupt):
        fresh.fit([CLASSIFICATION.data()], 3, progress=False)
    with pytest.raises(NotFittedError):
        fresh.predict(X_NEW)


# --- prior precision --------------------------------------------------------------------------------------------------


@each_task
@each_kind
def test_the_optimal_precision_is_rank_over_squared_norm(kind: type, task: Task) -> None:
    posterior, rows = fit(kind, task), rows_of(kind, task)
    rank = int(torch.linalg.matrix_rank(rows))
    optimal = rank / float(flat_parameters(MLP.build(task.outputs)).square().sum())
    assert posterior.prior_precision == pytest.approx(optimal)
    posterior.prior_precision = "paper"
    assert posterior.prior_precision == pytest.approx(1 / optimal)
    posterior.prior_precision = 3
    assert posterior.prior_precision == 3.0
    posterior.prior_precision = "optimal"
    assert posterior.prior_precision == pytest.approx(optimal)
    assert posterior.optimize_prior_precision([]) == pytest.approx(optimal)


@pytest.mark.parametrize("value", [7.5, "optimal", "paper"])
def test_a_precision_can_be_given_at_the_start(value: float | str) -> None:
    posterior = nb.ProjectedPosterior(MLP.build(), prior_precision=value)
    posterior.fit([CLASSIFICATION.data()], 4, projector=EXACT, progress=False)
    later = fit(nb.ProjectedPosterior)
    later.prior_precision = value
    assert posterior.prior_precision == later.prior_precision
    posterior.extend(2, progress=False)
    assert posterior.prior_precision == later.prior_precision


@each_kind
def test_variance_is_inverse_to_the_precision(kind: type) -> None:
    posterior = fit(kind)
    posterior.prior_precision = 1.0
    one, exact, directions = (
        posterior.predict(X_NEW),
        posterior.functional_variance(X_NEW, exact=True),
        posterior.directions,
    )
    train_std = posterior.report.train_std
    for alpha in (1e-3, 4.0, 1e6):
        posterior.prior_precision = alpha
        prediction = posterior.predict(X_NEW)
        torch.testing.assert_close(prediction.variance, one.variance / alpha, rtol=1e-7, atol=0)
        torch.testing.assert_close(posterior.functional_variance(X_NEW, exact=True), exact / alpha, rtol=1e-14, atol=0)
        assert posterior.report.train_std == pytest.approx(train_std / math.sqrt(alpha))
        assert posterior.directions is directions


# --- what is measured -------------------------------------------------------------------------------------------------


@each_task
@each_kind
def test_the_report_counts_and_measures(kind: type, task: Task) -> None:
    posterior, rows = fit(kind, task), rows_of(kind, task)
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
    outputs = model(x).detach()
    spread = (outputs - outputs.mean(0)).square().mean().sqrt()
    assert report.output_std == pytest.approx(float(spread))
    assert set(report.seconds) == {"data", "rows", "factors", "projection", "measure"}
    assert report.peak_memory is None or report.peak_memory > 2**10


def test_the_residual_is_that_of_each_sample() -> None:
    """One tolerance a sample: what is left of the change of the training outputs, over what the noise would do."""
    noise = randn(5, 51, generator=seeded(2), dtype=torch.float64)
    rows = rows_of(nb.ProjectedPosterior, CLASSIFICATION)
    loose = Krylov(Alternating(block_rows=3), rtol=0.05)
    posterior = fit(nb.ProjectedPosterior, base=noise, projector=loose)
    wanted = (posterior.directions @ rows.T).norm(dim=1) / (noise @ rows.T).norm(dim=1)
    torch.testing.assert_close(torch.tensor(posterior.report.residual, dtype=torch.float64), wanted)
    assert 1e-6 < wanted.max() <= 0.05
    left = (posterior.directions @ rows.T).square().mean().sqrt()
    assert posterior.report.train_std == pytest.approx(float(left) / posterior.prior_precision**0.5)
    assert posterior.report.tolerance == 0.05
    assert posterior.report.sweeps > 0


def test_an_estimated_dimension_comes_with_its_error() -> None:
    posterior = fit(nb.ProjectedPosterior, n_samples=40, projector=ITERATIVE)
    report = posterior.report
    assert 0.5 < report.kernel_dimension_stderr < 3  # sqrt(2 * 36 / 40) = 1.3
    assert abs(report.kernel_dimension - 36) < 4 * report.kernel_dimension_stderr


@each_kind
def test_the_report_prints_and_is_json(kind: type) -> None:
    posterior = fit(kind)
    report = posterior.report
    text = str(report)
    for wanted in (
        "ExactDual",
        "5 examples",
        "kernel dimension",
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


@each_task
@each_kind
def test_check_fit_compares_with_the_network(kind: type, task: Task) -> None:
    posterior, model = fit(kind, task), MLP.build(task.outputs)
    x, y = task.data(n=9, seed=4)
    outputs, samples = model(x).detach(), posterior.predict(x).samples
    check = posterior.check_fit(batches(x, y, (4, 5)))
    shift = samples.mean(0) - outputs

    def nll(outputs: Tensor) -> float:  # (S, N, O): of the mean density
        losses = torch.stack([torch.stack([task.loss(f, t) for f, t in zip(s, y, strict=True)]) for s in outputs])
        return float(-(-losses).exp().mean(0).log().mean())

    def accuracy(outputs: Tensor) -> float | None:
        probs = probabilities(task, outputs)
        if probs is None:
            return None
        probs = probs.mean(0)
        right = probs.argmax(1) == y if task is CLASSIFICATION else (probs > 0.5).long() == y.view(probs.shape)
        return float(right.double().mean())

    assert check.n_data == 9
    assert check.mean_shift == pytest.approx(float(shift.square().mean().sqrt()))
    assert check.max_shift == pytest.approx(float(shift.abs().max()))
    assert check.std == pytest.approx(float(samples.var(0).mean().sqrt()))
    assert check.output_std == pytest.approx(float((outputs - outputs.mean(0)).square().mean().sqrt()))
    assert check.nll_model == pytest.approx(nll(outputs[None]))
    assert check.nll_posterior == pytest.approx(nll(samples))
    assert check.accuracy_model == accuracy(outputs[None])
    assert check.accuracy_posterior == accuracy(samples)
    assert f"{check.nll_posterior:.4f}" in str(check)
    assert ("accuracy" in str(check)) == (check.accuracy_model is not None)


def test_check_fit_on_the_training_data_of_a_projected_posterior_finds_nothing() -> None:
    check = fit(nb.ProjectedPosterior).check_fit([CLASSIFICATION.data()])
    assert check.max_shift < 1e-10
    assert check.std < 1e-10
    assert check.nll_posterior == pytest.approx(check.nll_model)


def test_accuracy_takes_probabilities_for_targets() -> None:
    x, y = CLASSIFICATION.data(n=9)
    posterior = fit(nb.ProjectedPosterior)
    soft = 0.8 * torch.nn.functional.one_hot(y, 3) + 0.2 / 3
    hard, smooth = posterior.check_fit([(x, y)]), posterior.check_fit([(x, soft.double())])
    assert hard.accuracy_model == smooth.accuracy_model


# --- scores and variances ---------------------------------------------------------------------------------------------


@each_task
@each_kind
def test_scores_are_what_they_are_called(kind: type, task: Task) -> None:
    posterior = fit(kind, task)
    samples = posterior.predict(X_NEW).samples
    variance = (samples - samples.mean(0)).square().sum(0) / 4
    torch.testing.assert_close(posterior.ood_score(X_NEW), variance.max(1).values)
    torch.testing.assert_close(posterior.ood_score(X_NEW, "sum_variance"), variance.sum(1))
    probs = probabilities(task, samples)
    if probs is None:
        return  # test_bad_input.py: the others are refused
    spread = (probs - probs.mean(0)).square().sum(0) / 4
    torch.testing.assert_close(posterior.ood_score(X_NEW, "max_prob_variance"), spread.max(1).values)

    def entropy(p: Tensor) -> Tensor:
        sides = [p] if task is CLASSIFICATION else [p, 1 - p]
        return -sum((side * side.log()).sum(-1) for side in sides)

    torch.testing.assert_close(posterior.ood_score(X_NEW, "entropy"), entropy(probs.mean(0)))
    information = entropy(probs.mean(0)) - entropy(probs).mean(0)
    torch.testing.assert_close(posterior.ood_score(X_NEW, "mutual_information"), information)
    sampled = posterior.predict(X_NEW, pred_type="sampled").variance.max(1).values
    torch.testing.assert_close(posterior.ood_score(X_NEW, pred_type="sampled"), sampled)


@each_task
@each_kind
def test_the_exact_variance_has_no_monte_carlo_error(kind: type, task: Task) -> None:
    rows = jacobian(MLP.build(task.outputs), X_NEW)  # (n, O, P)
    projector = kernel_projector(rows_of(kind, task))
    for method in (EXACT, ITERATIVE):
        posterior = fit(kind, task, projector=method)
        wanted = torch.einsum("nop,pq,noq->no", rows, projector, rows) / posterior.prior_precision
        torch.testing.assert_close(posterior.functional_variance(X_NEW, exact=True), wanted, rtol=1e-6, atol=1e-9)


@each_kind
def test_sampled_variances_agree_with_exact_ones(kind: type) -> None:
    posterior = fit(kind, n_samples=2000)
    ratio = posterior.functional_variance(X_NEW) / posterior.functional_variance(X_NEW, exact=True)
    assert (ratio - 1).abs().max() < 5 * math.sqrt(2 / 1999)  # the relative error of a variance of normal samples


LOOSE = {
    "one block": Krylov(rtol=0.01),
    "krylov": Krylov(Alternating(block_rows=150), rtol=0.03),
    "alternating": Alternating(block_rows=150, rtol=0.1),
    "coarse": Alternating(block_rows=150, rtol=0.1, coarse=50),
}


@pytest.mark.parametrize("projector", LOOSE.values(), ids=LOOSE)
def test_exact_variances_leave_as_much_as_samples_have_left(projector: Any) -> None:
    """The rows of inputs meet a loose tolerance long before noise does; what counts is the map that samples went by."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4)).double()
    x = randn(150, 20, generator=seeded(), dtype=torch.float64)
    posterior = nb.ProjectedPosterior(model)
    posterior.fit([(x, torch.arange(150) % 4)], 300, projector=projector, generator=seeded(), progress=False)
    for inputs in (x[:5], x[:5].flip(1)):
        ratio = posterior.functional_variance(inputs) / posterior.functional_variance(inputs, exact=True)
        assert abs(float(ratio.log().mean())) < 0.15
        assert 0.5 < ratio.min() < ratio.max() < 2.0


@pytest.mark.filterwarnings("ignore::nullbayes.errors.ConvergenceWarning")
def test_exact_variances_of_an_interrupted_fit_are_those_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(sweeps: int, residual: Tensor) -> None:
        if sweeps == 2:
            raise KeyboardInterrupt

    posterior, wanted = (nb.ProjectedPosterior(MLP.build(), prior_precision=1.0) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr("nullbayes.posteriors.progress.Progress.sweeps", lambda *_: stop)
        posterior.fit([CLASSIFICATION.data()], 4, projector=Alternating(4, 1e-9), generator=seeded(), progress=False)
    wanted.fit(
        [CLASSIFICATION.data()], 4, projector=Alternating(4, 1e-9, max_sweeps=2), generator=seeded(), progress=False
    )
    torch.testing.assert_close(posterior.directions, wanted.directions)
    exact = [p.functional_variance(X_NEW, exact=True) for p in (posterior, wanted)]
    torch.testing.assert_close(*exact)


def test_exact_variances_do_not_depend_on_how_many_rows_fit_in_memory() -> None:
    posterior = fit(nb.ProjectedPosterior, n_samples=2)
    whole = posterior.functional_variance(X_NEW, exact=True)
    posterior._jacobian.working_bytes = 1
    assert posterior._at_once() == 2
    torch.testing.assert_close(posterior.functional_variance(X_NEW, exact=True), whole)


def test_exact_variance_on_training_data_is_nothing() -> None:
    posterior, (x, _) = fit(nb.ProjectedPosterior), CLASSIFICATION.data()
    assert posterior.functional_variance(x, exact=True).max() < 1e-20


@pytest.mark.parametrize("projector", [EXACT, ITERATIVE], ids=["dual", "krylov"])
def test_exact_variance_of_inputs_that_have_nothing_to_do_with_the_data_is_silent(projector: Any) -> None:
    axes = torch.linalg.qr(randn(8, 8, generator=seeded(), dtype=torch.float64)).Q
    model = torch.nn.Linear(8, 2, bias=False).double()
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0)
    posterior.fit([(axes[:3], torch.tensor([0, 1, 0]))], 4, projector=projector, progress=False)
    variance = posterior.functional_variance(axes[3:], exact=True)
    torch.testing.assert_close(variance, torch.ones(5, 2, dtype=torch.float64))


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projector", [EXACT, ITERATIVE, ExactPrimal()], ids=["dual", "krylov", "primal"])
@each_kind
def test_rows_that_are_formed_again_give_the_same_directions(
    kind: type, projector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = fit(kind, n_samples=4, projector=projector)
    rows = nb.OutputJacobian if kind is nb.ProjectedPosterior else nb.LossJacobian
    monkeypatch.setattr(rows, "keep", None)
    little = rows(MLP.build(), [CLASSIFICATION.data()]).kept_bytes()
    again = fit(kind, n_samples=4, projector=projector, memory_limit=little)
    torch.testing.assert_close(again.directions, held.directions)


@pytest.mark.parametrize("limit", [None, 2**30, "1GB", "1.5 GiB", "900m", 1e9])
def test_memory_limits_are_sizes(limit: Any) -> None:
    assert fit(nb.ProjectedPosterior, memory_limit=limit).n_samples == 5


@each_kind
def test_auto_says_why(kind: type) -> None:
    posterior = fit(kind, projector="auto", tolerance=1e-3)
    plan = nb.plan(MLP.build(), [CLASSIFICATION.data()], 5, loss=kind is nb.LossProjectedPosterior, tolerance=1e-3)
    assert posterior.report.reason == plan.reason
    assert posterior.report.projector == type(plan.projector).__name__
    assert posterior.report.tolerance == 1e-3
    assert max(posterior.report.residual) < 3e-3
    assert plan.reason in str(plan)


@each_kind
def test_the_last_layer_alone_may_vary(kind: type) -> None:
    model = MLP.build()
    posterior = kind(model, parameters="2.*").fit([CLASSIFICATION.data(n=3)], 4, projector=EXACT, progress=False)
    assert posterior.report.n_parameters == 21
    assert list(posterior.sample()) == ["2.weight", "2.bias"]
    change = torch.einsum("nop,sp->sno", jacobian(model, X_NEW, ["2.weight", "2.bias"]), posterior.directions)
    torch.testing.assert_close(
        posterior.predict(X_NEW).samples, model(X_NEW).detach() + change / posterior.prior_precision**0.5
    )


@pytest.mark.parametrize("task", [t for t in TASKS if t is not CUSTOM], ids=lambda task: task.name)
def test_scaled_rows_leave_the_kernel_of_the_gauss_newton_matrix(task: Task) -> None:
    model, data = MLP.build(task.outputs), task.data()
    posterior = nb.ProjectedPosterior(model, task.likelihood, hessian=True)
    posterior.fit([data], 5, projector=EXACT, progress=False)
    matrix = gauss_newton(model, *data, task)
    assert (matrix @ posterior.directions.T).abs().max() < 1e-9
    assert posterior.report.kernel_dimension == len(matrix) - int(torch.linalg.matrix_rank(matrix, hermitian=True))
    change = torch.einsum("nop,sp->sno", jacobian(model, data[0]), posterior.directions)
    assert posterior.report.train_std == pytest.approx(
        float(change.square().mean().sqrt()) / posterior.prior_precision**0.5, abs=1e-9
    )


def test_a_second_fit_forgets_the_first() -> None:
    (x, y), (x2, y2) = REGRESSION.data(), REGRESSION.data(n=6, seed=9)
    twice, once = (nb.ProjectedPosterior(MLP.build(2), "regression") for _ in range(2))
    twice.fit([(x, y)], 4, progress=False)
    for posterior in (twice, once):
        posterior.fit([(x2, 100 * y2)], 4, projector=EXACT, generator=seeded(), progress=False)
    assert torch.equal(twice.directions, once.directions)
    assert twice.likelihood == once.likelihood
    assert twice.report.n_data == 6
    assert twice.prior_precision == once.prior_precision


@each_kind
def test_single_precision_stays_single_precision(kind: type) -> None:
    x, y = CLASSIFICATION.data()
    posterior = kind(MLP.build().float()).fit([(x.float(), y)], 4, projector=EXACT, progress=False)
    prediction = posterior.predict(X_NEW.float())
    assert {posterior.directions.dtype, prediction.samples.dtype, prediction.probs.dtype} == {torch.float32}
    assert max(posterior.report.residual) < 1e-4
