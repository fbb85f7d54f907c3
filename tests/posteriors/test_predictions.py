"""What both posteriors predict, for every likelihood and every form of input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from support.models import CLASSIFICATION, MLP, MODELS, Task, batches, call
from support.posterior_fits import EXACT, X_NEW, averaged, each_kind, each_task, fit_mlp, probabilities
from support.slow_answers import flat_parameters, jacobian, loss_jacobian, with_parameters

# the networks are not trained, so their losses leave much open: test_collapse.py has that warning
pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


@each_task
@each_kind
def test_predictions_are_the_linearized_network_at_the_samples(kind: type, task: Task) -> None:
    posterior, model = fit_mlp(kind, task), MLP.build(task.outputs)
    prediction = posterior.predict(X_NEW)
    change = torch.einsum("nop,sp->sno", jacobian(model, X_NEW), posterior.directions)
    change = (change - change.mean(0)) / math.sqrt(posterior.prior_precision)  # the mean is the network's own output
    own = model(X_NEW).detach()
    torch.testing.assert_close(prediction.samples, own + change)
    torch.testing.assert_close(prediction.mean, own)
    torch.testing.assert_close(prediction.variance, change.square().sum(0) / 4)
    probs = averaged(task, own, change)
    if probs is None:
        assert prediction.probs is None
    else:
        torch.testing.assert_close(prediction.probs, probs)
        each = probabilities(task, own + change)
        torch.testing.assert_close(posterior.predict(X_NEW, link_approx="mc").probs, each.mean(0))


@each_task
def test_projected_samples_predict_the_training_data_as_the_network_does(task: Task) -> None:
    posterior, (x, _) = fit_mlp(nb.ProjectedPosterior, task), task.data()
    own = MLP.build(task.outputs)(x).detach()
    samples = posterior.predict(x).samples
    torch.testing.assert_close(samples, own.expand_as(samples), rtol=1e-9, atol=1e-9)
    assert posterior.predict(X_NEW).variance.min() > 1e-3  # and other data not


@each_task
def test_loss_projected_samples_keep_every_training_loss_to_first_order(task: Task) -> None:
    posterior, (x, y) = fit_mlp(nb.LossProjectedPosterior, task), task.data()
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


@each_kind
def test_posteriors_and_predictions_print_on_one_line(kind: type) -> None:
    size = sum(parameter.numel() for parameter in MLP.build().parameters())
    assert repr(kind(MLP.build())) == f"{kind.__name__}(classification, {size} parameters)"
    posterior = fit_mlp(kind)
    assert repr(posterior) == f"{kind.__name__}(classification, {size} parameters, {posterior.n_samples} samples)"
    assert repr(posterior.predict(X_NEW)) == "Prediction(mean (4, 3), variance (4, 3), probs (4, 3), samples (5, 4, 3))"


def test_inputs_come_in_every_form() -> None:
    posterior = fit_mlp(nb.ProjectedPosterior)
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


@pytest.mark.parametrize("case", [MODELS["named inputs"], MODELS["two inputs"]], ids=lambda case: case.name)
def test_structured_inputs_come_alone_and_in_loaders(case: Any) -> None:
    x, y = CLASSIFICATION.data(case)
    posterior = nb.ProjectedPosterior(case.build()).fit(batches(x, y, (2, 3)), 3, projector=EXACT, progress=False)
    wanted = posterior.predict(x).samples
    torch.testing.assert_close(posterior.predict(batches(x, y, (4, 1))).samples, wanted)
    torch.testing.assert_close(wanted.mean(0), call(case.build(), x).detach())


@each_kind
def test_fewer_samples_are_the_first_ones(kind: type) -> None:
    posterior = fit_mlp(kind)
    few, first = posterior.predict(X_NEW, n_samples=2), posterior.predict(X_NEW).samples[:2]
    torch.testing.assert_close(few.samples, few.mean + first - first.mean(0))


@each_task
@each_kind
def test_sampled_predictions_are_the_network_at_the_samples(kind: type, task: Task) -> None:
    posterior, model = fit_mlp(kind, task), MLP.build(task.outputs)
    theta = flat_parameters(model)
    wanted = [
        with_parameters(model, theta + v / posterior.prior_precision**0.5)(X_NEW).detach() for v in posterior.directions
    ]
    torch.testing.assert_close(posterior.predict(X_NEW, pred_type="sampled").samples, torch.stack(wanted))
