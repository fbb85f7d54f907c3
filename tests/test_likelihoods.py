"""Losses, curvatures and probabilities of each likelihood, against formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nullbayes import likelihoods
from nullbayes.command import options
from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods import BUILT_IN, Bernoulli, Classification, CustomLoss, Regression, resolve
from nullbayes.posteriors import header
from support.drawing import randn
from support.models import BINARY, CLASSIFICATION, CUSTOM, MULTILABEL, REGRESSION, TASKS, Task, cauchy

each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
each_known_task = pytest.mark.parametrize("task", [t for t in TASKS if t is not CUSTOM], ids=lambda task: task.name)


def outputs_of(task: Task, n: int = 6, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = scale * randn(n, task.outputs, generator=generator, dtype=torch.float64)
    return outputs, task.targets(n, generator)


def roots_of(task: Task, outputs: Tensor, targets: Tensor) -> Tensor:  # (n, O, O)
    """The roots that values are scaled by, column by column."""
    units = torch.eye(outputs.shape[1], dtype=outputs.dtype)
    likelihood = resolve(task.likelihood)
    return torch.stack([likelihood.scaled(u.expand_as(outputs), outputs, targets) for u in units], dim=2)


@each_task
def test_each_example_has_its_own_loss(task: Task) -> None:
    outputs, targets = outputs_of(task)
    likelihood = resolve(task.likelihood)
    likelihood.check(outputs, targets)
    outputs.requires_grad_()
    wanted = torch.stack([task.loss(f, y) for f, y in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(likelihood.nll(outputs, targets), wanted)
    losses = likelihood.loss(outputs, targets)
    assert losses.shape == (len(outputs),)
    for i in range(len(outputs)):  # a term that does not depend on the outputs may be left out of the loss
        mine, written = (torch.autograd.grad(v[i], outputs, retain_graph=True)[0] for v in (losses, wanted))
        torch.testing.assert_close(mine, written)


@each_known_task
def test_positions_of_an_example_add_up(task: Task) -> None:
    outputs, targets = outputs_of(task)
    likelihood, paired = resolve(task.likelihood), (outputs.unflatten(0, (3, 2)), targets.unflatten(0, (3, 2)))
    likelihood.check(*paired)
    for function in (likelihood.loss, likelihood.nll):
        torch.testing.assert_close(function(*paired), function(outputs, targets).view(3, 2).sum(1))
    values = randn(*outputs.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scaled = likelihood.scaled(values.unflatten(0, (3, 2)), *paired)
    torch.testing.assert_close(scaled.flatten(0, 1), likelihood.scaled(values, outputs, targets))


@each_known_task
def test_targets_that_do_not_fit_are_refused(task: Task) -> None:
    """Such as those that torch would broadcast, or read in another order."""
    outputs, targets = outputs_of(task)
    likelihood = resolve(task.likelihood)
    shapes = [targets[:-1], targets[:1], torch.cat([targets, targets])]
    if targets.ndim == 2:
        shapes += [targets.T, targets[:, :1], targets[:, None, :1], targets[:, 0]]
    for other in shapes:
        with pytest.raises(LikelihoodError):
            likelihood.check(outputs, other)
    for value in task.wrong:
        changed = targets.clone() if float(value).is_integer() else targets.double()
        changed.view(-1)[-1] = value
        with pytest.raises(LikelihoodError):
            likelihood.check(outputs, changed)


@each_task
def test_a_likelihood_does_what_it_says_of_itself(task: Task) -> None:
    outputs, targets = outputs_of(task)
    likelihood = resolve(task.likelihood)
    terms = likelihood.nll_terms(outputs.float(), targets)
    assert terms.dtype == torch.float64
    assert terms.shape == (outputs.shape if likelihood.independent_outputs else (len(outputs), 1))
    if task is not CUSTOM:  # whose targets are not known
        assert likelihood.independent_outputs == (targets.numel() == outputs.numel())
    if likelihood.has_closed_form:  # and then a fit with held-out data looks for a temperature
        assert likelihood.tempered(2.0).temperature == 2.0
    else:
        with pytest.raises(LikelihoodError, match="no closed form"):
            likelihood.nll(outputs, targets, torch.ones_like(outputs))
        with pytest.raises(LikelihoodError, match="no temperature"):
            likelihood.tempered(2.0)
    if not likelihood.has_probabilities:
        assert likelihood.accuracy(outputs, targets) is None
        for ask in (likelihood.probabilities, likelihood.choices, likelihood.choice_probabilities):
            with pytest.raises(LikelihoodError, match=r"no class probabilities|no logits"):
                ask(outputs)
        return
    assert likelihood.has_closed_form  # the accuracy of a posterior needs it
    probs = likelihood.probabilities(outputs)
    assert probs.shape == outputs.shape
    choices = likelihood.choice_probabilities(probs)
    torch.testing.assert_close(choices.sum(-1), torch.ones_like(choices[..., 0]))
    assert torch.equal(likelihood.choices(outputs).argmax(-1), choices.argmax(-1))
    assert 0.0 <= likelihood.accuracy(probs, targets) <= 1.0


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_name_is_known_wherever_likelihoods_are_named(name: str) -> None:
    likelihood = resolve(name)
    assert likelihood.name == name
    assert name in [task.name for task in TASKS], "not in TASKS of tests/support/models.py"
    assert name in header._LIKELIHOODS, "files that were altered are not refused: not in posteriors/header.py"
    assert header._LIKELIHOODS[name].keys() == likelihood.settings().keys(), "other fields in posteriors/header.py"
    assert name in options.LIKELIHOODS, "the command does not take it: not in command/options.py"
    assert f'\n"{name}"' in likelihoods.__doc__, "not in the table of likelihoods/__init__.py"


@each_known_task
def test_the_root_squares_to_the_hessian(task: Task) -> None:
    outputs, targets = outputs_of(task)
    roots = roots_of(task, outputs, targets)
    for root, f, y in zip(roots, outputs, targets, strict=True):
        hessian = torch.autograd.functional.hessian(lambda g, y=y: task.loss(g, y), f)
        torch.testing.assert_close(root.T @ root, hessian)


@pytest.mark.parametrize("task", [CLASSIFICATION, BINARY, MULTILABEL], ids=lambda task: task.name)
def test_the_root_of_the_hessian_is_finite_at_probability_one(task: Task) -> None:
    outputs, targets = outputs_of(task, scale=1e4)
    roots = roots_of(task, outputs, targets)
    assert torch.isfinite(roots).all()
    assert roots.abs().max() < 1e-6


def test_probabilities_match_their_formulas() -> None:
    outputs, _ = outputs_of(CLASSIFICATION)
    torch.testing.assert_close(Classification().probabilities(outputs).sum(-1), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(
        Classification().probabilities(outputs), outputs.exp() / outputs.exp().sum(-1, keepdim=True)
    )
    torch.testing.assert_close(Bernoulli("multilabel").probabilities(outputs), 1 / (1 + (-outputs).exp()))
    for likelihood in (Regression(1.0), CustomLoss(cauchy)):
        assert not likelihood.has_probabilities
        with pytest.raises(LikelihoodError, match="no class probabilities"):
            likelihood.probabilities(outputs)


def test_entropies_have_their_known_extremes() -> None:
    even, certain = torch.full((1, 4), 0.25), torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    assert float(Classification().entropy_terms(even).sum()) == pytest.approx(math.log(4))
    assert float(Classification().entropy_terms(certain).sum()) == 0.0
    assert float(Bernoulli("multilabel").entropy_terms(torch.full((1, 3), 0.5)).sum()) == pytest.approx(3 * math.log(2))
    assert float(Bernoulli("binary").entropy_terms(torch.ones(1, 1)).sum()) == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_classes_may_be_probabilities(dtype: torch.dtype) -> None:
    outputs, labels = outputs_of(CLASSIFICATION)
    soft = (0.9 * F.one_hot(labels, 3) + 0.1 / 3).to(dtype)
    likelihood = Classification()
    likelihood.check(outputs, soft)
    wanted = (soft.double() * (outputs.exp().sum(-1, keepdim=True).log() - outputs)).sum(-1)
    torch.testing.assert_close(likelihood.loss(outputs, soft).double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_labels_may_be_any_whole_number_in_one_column(dtype: torch.dtype) -> None:
    outputs, labels = outputs_of(CLASSIFICATION)
    labels = labels.clamp(max=1)
    likelihood = Classification()
    for shaped in (labels.to(dtype), labels.to(dtype)[:, None]):
        likelihood.check(outputs, shaped)
        torch.testing.assert_close(likelihood.loss(outputs, shaped), likelihood.loss(outputs, labels))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_binary_targets_may_be_of_any_dtype(dtype: torch.dtype) -> None:
    outputs, targets = outputs_of(BINARY)
    likelihood = Bernoulli("binary")
    for shaped in (targets.to(dtype), targets.to(dtype)[:, None]):
        likelihood.check(outputs, shaped)
        torch.testing.assert_close(likelihood.loss(outputs, shaped), likelihood.loss(outputs, targets))


def test_noise_is_fitted_to_the_residuals() -> None:
    outputs, targets = outputs_of(REGRESSION)
    fitted = Regression().fitted(outputs, targets)
    squares = (outputs - targets).square()
    assert fitted.sigma_noise == pytest.approx(tuple(squares.mean(0).sqrt().tolist()))  # each output has its own
    assert Regression(0.3).fitted(outputs, targets).sigma_noise == 0.3
    torch.testing.assert_close(fitted.loss(outputs, targets), (squares / squares.mean(0)).sum(1) / 2)
    assert min(Regression().fitted(outputs, outputs).sigma_noise) > 0  # a perfect fit divides by nothing
    one = Regression().fitted(outputs[:, :1], targets[:, :1]).sigma_noise
    assert one == pytest.approx(float(squares[:, 0].mean().sqrt()))
    pixels = Regression().fitted(outputs[:, None], targets[:, None]).sigma_noise
    assert pixels == pytest.approx(float(squares.mean().sqrt()))  # positions have one for all


def test_outputs_in_other_units_do_not_change_the_noise_of_an_output() -> None:
    outputs, targets = outputs_of(REGRESSION)
    units = torch.tensor([1e12, 1e-3], dtype=outputs.dtype)
    plain, scaled = Regression().fitted(outputs, targets), Regression().fitted(outputs * units, targets * units)
    wanted = [sigma * float(unit) for sigma, unit in zip(plain.sigma_noise, units, strict=True)]
    assert scaled.sigma_noise == pytest.approx(wanted, rel=1e-5)


def test_an_output_without_residuals_gets_the_noise_of_the_others_in_its_own_units() -> None:
    outputs, targets = (torch.ones(8, 2, dtype=torch.float64) * torch.tensor([1e12, 2.0]) for _ in range(2))
    outputs[:, 0] *= 1.1
    assert Regression().fitted(outputs, targets).sigma_noise == pytest.approx((1e11, 0.2))
    outputs[:, 1] = targets[:, 1] = 0.0
    assert min(Regression().fitted(outputs, targets).sigma_noise) > 0


def test_noise_of_another_number_of_outputs_is_refused() -> None:
    outputs, targets = outputs_of(REGRESSION)
    with pytest.raises(LikelihoodError, match=r"has 3 numbers, but outputs of shape .* need 2"):
        Regression((0.1, 0.2, 0.3)).check(outputs, targets)
    with pytest.raises(LikelihoodError, match="must be positive"):
        Regression((0.1, 0.0))
    assert Regression(torch.tensor([0.5])) == Regression(0.5)


def test_names_and_functions_are_likelihoods() -> None:
    assert resolve("classification") == Classification()
    assert resolve("binary").name == "binary"
    assert resolve("multilabel").name == "multilabel"
    assert resolve("regression") == Regression()
    assert resolve(Regression(2.0)) == Regression(2.0)
    assert resolve(cauchy) == CustomLoss(cauchy)


@pytest.mark.parametrize(
    ("loss", "meant"),
    [(nn.CrossEntropyLoss(), "classification"), (nn.CrossEntropyLoss(reduction="none"), "classification"),
     (nn.CrossEntropyLoss, "classification"), (nn.functional.cross_entropy, "classification"),
     (nn.BCEWithLogitsLoss(), '"binary" for one logit, or "multilabel"'), (nn.MSELoss(), "regression"),
     (nn.functional.mse_loss, "regression"), ("cross-entropy loss", "classification"), ("MSE", "regression")],
)  # fmt: skip
def test_a_loss_of_torch_is_refused_with_the_likelihood_that_is_meant(loss: object, meant: str) -> None:
    with pytest.raises(LikelihoodError, match=f"Pass likelihood=.*{meant}"):
        resolve(loss)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(weight=torch.ones(3), reduction="none"), nn.CrossEntropyLoss(label_smoothing=0.1),
     nn.CrossEntropyLoss(ignore_index=0),
     nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), nn.SmoothL1Loss(), nn.PoissonNLLLoss()],
    ids=lambda loss: type(loss).__name__,
)  # fmt: skip
def test_other_losses_of_torch_are_losses_of_ones_own(loss: object) -> None:
    assert resolve(loss) == CustomLoss(loss)  # type: ignore[arg-type]


# --- averages over a posterior ----------------------------------------------------------------------------------------


def normal_changes(outputs: Tensor, scale: float, n: int = 20_000) -> Tensor:
    changes = scale * randn(n, *outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return changes - changes.mean(0)


@pytest.mark.parametrize("task", [CLASSIFICATION, BINARY, MULTILABEL], ids=lambda task: task.name)
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_the_closed_form_approximates_the_mean_of_the_probabilities(task: Task, scale: float) -> None:
    outputs, _ = outputs_of(task)
    likelihood, changes = resolve(task.likelihood), normal_changes(outputs, scale)
    probs = likelihood.probabilities(outputs, likelihood.link_variance(outputs, changes))
    assert (probs - likelihood.probabilities(outputs + changes).mean(0)).abs().max() < 0.06
    if task is CLASSIFICATION:
        torch.testing.assert_close(probs.sum(1), torch.ones(len(probs), dtype=torch.float64))


@each_task
def test_the_closed_form_approximates_the_mean_of_the_density(task: Task) -> None:
    outputs, targets = outputs_of(task, scale=1.0)
    likelihood, changes = resolve(task.likelihood), normal_changes(outputs, 0.7)
    if not likelihood.has_closed_form:
        return  # and it is refused, see above
    each = torch.stack([likelihood.nll(outputs + change, targets) for change in changes[:4000]])
    wanted = math.log(len(each)) - torch.logsumexp(-each, 0)
    found = likelihood.nll(outputs, targets, likelihood.link_variance(outputs, changes))
    without = likelihood.nll(outputs, targets)
    assert (found - wanted).abs().mean() < 0.5 * (without - wanted).abs().mean()
    still = likelihood.nll(outputs, targets, torch.zeros_like(outputs))
    torch.testing.assert_close(still, without)


@pytest.mark.parametrize("scale", [0.1, 10.0, 1e4])
def test_a_variance_never_changes_the_predicted_class(scale: float) -> None:
    outputs, targets = outputs_of(CLASSIFICATION, n=200)
    changes = scale * randn(5, 200, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    changes = changes * torch.logspace(-2, 2, 3, dtype=torch.float64)  # some classes vary far more than others
    likelihood = Classification()
    probs = likelihood.probabilities(outputs, likelihood.link_variance(outputs, changes - changes.mean(0)))
    assert torch.equal(probs.argmax(1), outputs.argmax(1))
    assert likelihood.accuracy(probs, targets) == likelihood.accuracy(likelihood.probabilities(outputs), targets)


def test_a_shift_of_all_logits_does_not_change_probabilities() -> None:
    outputs, _ = outputs_of(CLASSIFICATION)
    shift = randn(7, len(outputs), 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    likelihood = Classification()
    variance = likelihood.link_variance(outputs, (shift - shift.mean(0)).expand(-1, -1, 3))
    assert variance.max() < 1e-25
    torch.testing.assert_close(likelihood.probabilities(outputs, variance), outputs.softmax(1))


def test_probit_and_bridge_are_those_of_the_literature() -> None:
    """Written out from their formulas: MacKay (1992); Hobbhahn, Kristiadi and Hennig (2022)."""
    outputs, _ = outputs_of(CLASSIFICATION)
    changes = normal_changes(outputs, 0.7, 9)
    likelihood, variance = Classification(temperature=2.0), changes.var(0)
    shrunk = outputs / 2 / (1 + math.pi / 8 * variance / 4).sqrt()
    torch.testing.assert_close(likelihood.probit(outputs, variance), shrunk.softmax(1))
    got = likelihood.bridge(outputs, changes)
    for i, f in enumerate(outputs / 2):
        sigma = torch.cov(changes[:, i].T / 2)
        mean = f - sigma.sum(1) * f.sum() / sigma.sum()
        spread = (sigma - torch.outer(sigma.sum(1), sigma.sum(1)) / sigma.sum()).diagonal()
        alpha = (1 - 2 / 3 + mean.exp() / 9 * (-mean).exp().sum()) / spread
        torch.testing.assert_close(got[i], alpha / alpha.sum())


@each_task
def test_ignored_and_absent_targets_are_not_counted(task: Task) -> None:
    outputs, targets = outputs_of(task)
    expected = {CLASSIFICATION: 6, CUSTOM: 6}.get(task, 6 * task.outputs)
    assert resolve(task.likelihood).n_targets(outputs, targets) == expected
    labels = torch.tensor([[0, -100], [2, 1]])
    assert Classification().n_targets(torch.zeros(2, 2, 3), labels) == 3


@pytest.mark.parametrize("task", [CLASSIFICATION, BINARY, MULTILABEL, REGRESSION], ids=lambda task: task.name)
def test_a_temperature_is_in_the_prediction_and_not_in_the_loss(task: Task) -> None:
    outputs, targets = outputs_of(task)
    plain = resolve(task.likelihood)
    hot = plain.tempered(4.0)
    assert hot.temperature == 4.0
    assert hot.tempered(1.0) == plain
    if task is REGRESSION:
        assert hot.sigma_noise == pytest.approx(2 * plain.sigma_noise)
        return
    torch.testing.assert_close(hot.loss(outputs, targets), plain.loss(outputs, targets))
    torch.testing.assert_close(hot.nll(outputs, targets), plain.nll(outputs / 4, targets))
    torch.testing.assert_close(hot.probabilities(outputs), plain.probabilities(outputs / 4))


def test_a_custom_loss_of_every_output_is_said_to_need_a_sum() -> None:
    """reduction="none" leaves one loss per output, so that it is not what is missing."""
    outputs = torch.zeros(5, 1)
    with pytest.raises(LikelihoodError, match=r"shape \(5,\), not \(5, 1\): sum over .*flatten\(1\).sum\(1\)"):
        CustomLoss(nn.MSELoss(reduction="none")).check(outputs, outputs)
    with pytest.raises(LikelihoodError, match=r"not \(\): use reduction=\"none\""):
        CustomLoss(nn.MSELoss()).check(outputs, outputs)


def test_a_custom_loss_has_neither_temperature_nor_closed_form() -> None:
    likelihood = CustomLoss(cauchy)
    outputs, targets = outputs_of(CUSTOM)
    with pytest.raises(LikelihoodError, match="no temperature"):
        likelihood.tempered(2.0)
    with pytest.raises(LikelihoodError, match="no closed form"):
        likelihood.nll(outputs, targets, torch.ones_like(outputs))


def test_the_index_that_is_ignored_is_no_class_of_labels_in_bytes() -> None:
    outputs, labels = torch.zeros(4, 200), torch.tensor([156, 156, 3, 4])
    likelihood = Classification()  # ignores -100, which is 156 in eight bits without a sign
    assert likelihood.n_targets(outputs, labels.to(torch.uint8)) == 4
    assert not likelihood.fitted(outputs, labels.to(torch.uint8)).some_ignored
