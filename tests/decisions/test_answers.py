"""Label sets and intervals are those of a loop over held-out errors, and cover the targets of new data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.decisions.answers import errors
from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods import Classification
from nullbayes.predictive import Prediction
from support.models import BINARY, CLASSIFICATION, CUSTOM, MULTILABEL, POISSON, REGRESSION, TASKS, Task
from support.trained import draw, trained

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
M = 199
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def fitted(task: Task, kind: Any = nb.ProjectedPosterior) -> Any:
    posterior = kind(trained(task), task.likelihood, prior_precision=10.0)
    return posterior.fit(*draw(task), 4, generator=torch.Generator().manual_seed(0), progress=False)


def calibrated(task: Task, kind: Any = nb.ProjectedPosterior) -> Any:
    return fitted(task, kind).calibrate(*draw(task, M, 1), kind="max_variance")  # which ranks all examples


def level(values: list[float], alpha: float) -> float:
    """The smallest value that is not below so large a share of the values and one more."""
    return sorted(values)[math.ceil((len(values) + 1) * (1 - alpha) - 1e-9) - 1]


def of_labels(task: Task, probs: Tensor, y: Tensor) -> list[float]:
    """Minus the probability of the right label; of several labels, of the least probable one that applies."""
    found = []
    for p, label in zip(probs.tolist(), y.tolist(), strict=True):
        if task is CLASSIFICATION:
            found.append(-p[label])
        elif task is BINARY:
            found.append(-p[0] if label else p[0] - 1)
        else:
            found.append(-min((q for q, applies in zip(p, label, strict=True) if applies), default=math.inf))
    return found


@pytest.mark.parametrize("alpha", [0.1, *(pytest.param(a, marks=pytest.mark.slow) for a in (0.01, 0.5))])
@pytest.mark.parametrize("task", [CLASSIFICATION, BINARY, MULTILABEL], ids=lambda task: task.name)
def test_a_set_holds_the_labels_that_are_probable_enough(task: Task, alpha: float) -> None:
    posterior = calibrated(task)
    x, y = draw(task, M, 1)
    limit = level(of_labels(task, posterior.predict(x).probs, y), alpha)
    new, _ = draw(task, 50, 2)
    probs = posterior.predict(new).probs
    probs = torch.cat([1 - probs, probs], 1) if task is BINARY else probs
    found = posterior.predict_set(new, alpha)
    assert found.shape == (50, 2 if task is BINARY else 3)
    clear = (probs + limit).abs() > 2e-6  # what is nearer may be in the set
    assert torch.equal(found[clear], (-probs <= limit)[clear])
    assert found[-probs <= limit].all()


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5])
def test_an_interval_is_as_wide_as_held_out_errors_say(alpha: float) -> None:
    posterior = calibrated(REGRESSION)
    x, y = draw(REGRESSION, M, 1)
    prediction = posterior.predict(x)
    distance = (y - prediction.mean).abs() / (prediction.variance + 0.5**2).sqrt()
    limits = [level(column.tolist(), alpha) for column in distance.T]
    new, _ = draw(REGRESSION, 50, 2)
    wanted, (lower, upper) = posterior.predict(new), posterior.predict_interval(new, alpha)
    half = torch.tensor(limits).double() * (wanted.variance + 0.25).sqrt()
    assert torch.allclose(lower, wanted.mean - half, atol=1e-5)
    assert torch.allclose(upper, wanted.mean + half, atol=1e-5)


def test_smaller_levels_give_larger_answers() -> None:
    new, _ = draw(CLASSIFICATION, 50, 2)
    small, large = (calibrated(CLASSIFICATION).predict_set(new, alpha) for alpha in (0.2, 0.01))
    assert (small <= large).all()
    assert small.sum() < large.sum()
    (a, b), (c, d) = (calibrated(REGRESSION).predict_interval(new, alpha) for alpha in (0.2, 0.01))
    assert ((c < a) & (b < d)).all()


def test_one_output_and_targets_without_a_dimension() -> None:
    x, y = draw(REGRESSION, 300, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 200), nn.Tanh(), nn.Linear(200, 1)).double()
    posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(
        x[:20], y[:20, 0], 4, progress=False
    )
    flat = posterior.calibrate(x[20:], y[20:, 0]).predict_interval(x)
    column = posterior.calibrate(x[20:], y[20:, :1]).predict_interval(x)
    assert flat[0].shape == (300, 1)
    assert torch.equal(flat[0], column[0])
    assert torch.equal(flat[1], column[1])


def test_sets_do_not_change_with_the_size_of_a_batch() -> None:
    posterior = calibrated(CLASSIFICATION)
    x, _ = draw(CLASSIFICATION, 50, 2)
    assert torch.equal(posterior.predict_set(x), torch.cat([posterior.predict_set(row[None]) for row in x]))
    assert torch.equal(posterior.predict_set([x[:20], x[20:]]), posterior.predict_set(x))


@pytest.mark.filterwarnings("ignore:alpha=")
def test_rounding_takes_no_label_out_of_a_set() -> None:
    """Of few different inputs, many have the error that is the limit, up to the rounding of their batch."""
    x = torch.cartesian_prod(*(torch.arange(3.0) for _ in range(4)))  # 81 inputs
    y = (x.sum(1) % 3).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3))
    posterior = nb.baselines.MAP(model).fit(x[:5] + 0.5, y[:5], progress=False).calibrate(x, y)
    for k in range(1, 82):
        found = posterior.predict_set(x, k / 82)
        alone = torch.cat([posterior.predict_set(row[None], k / 82) for row in x[::9]])
        assert torch.equal(found[::9], alone), k
        assert int((~found.gather(1, y[:, None])).sum()) <= k


def test_examples_without_a_label_are_covered_by_every_set() -> None:
    x, y = draw(MULTILABEL, M, 1)
    posterior = fitted(MULTILABEL)
    posterior.calibrate(x, torch.zeros_like(y))
    assert (posterior.calibration.errors == -math.inf).all()
    assert not posterior.predict_set(x).any()


def test_labels_to_be_ignored_have_no_error() -> None:
    probs = torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
    prediction = Prediction(probs.log(), probs, probs, probs[None], None, None, "classification")
    found = errors(Classification(), prediction, torch.tensor([1, -100, 0]), torch.Generator())
    assert found is not None
    assert found[[0, 2]].tolist() == pytest.approx([-0.8, -0.5])
    assert found[1].isnan()


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "classification": ("predict_interval", "Intervals are for regressions, not for classification: use predict_set"),
    "binary": ("predict_interval", "Intervals are for regressions, not for binary: use predict_set"),
    "multilabel": ("predict_interval", "Intervals are for regressions, not for multilabel: use predict_set"),
    "regression": (
        "predict_set",
        "Label sets are for likelihoods with classes, not for regression: use predict_interval",
    ),
}


@pytest.mark.parametrize("task", [CLASSIFICATION, BINARY, MULTILABEL, REGRESSION], ids=lambda task: task.name)
def test_the_wrong_kind_of_answer_is_refused(task: Task) -> None:
    method, sentence = REFUSED[task.name]
    x, _ = draw(task, 5, 2)
    with pytest.raises(LikelihoodError, match=sentence):
        getattr(fitted(task), method)(x)
    with pytest.raises(LikelihoodError, match=sentence):
        getattr(calibrated(task), method)(x)


@pytest.mark.parametrize("task", [POISSON, CUSTOM], ids=lambda task: task.name)
def test_a_likelihood_without_classes_and_noise_has_p_values_and_no_answers(task: Task) -> None:
    x, y = draw(task, M, 1)
    posterior = calibrated(task).calibrate(x, y)
    assert posterior.p_value(x).shape == (M,)
    for ask in (posterior.predict_set, posterior.predict_interval):
        with pytest.raises(LikelihoodError, match=rf"(regressions|classes), not for {task.name}\.$"):
            ask(x)


@each_task
def test_the_network_itself_can_be_calibrated_for_every_likelihood(task: Task) -> None:
    posterior = nb.baselines.MAP(trained(task), task.likelihood).fit(*draw(task), progress=False)
    x, y = draw(task, M, 1)
    posterior.calibrate(x, y)
    assert posterior.p_value(x).shape == (M,)
    if task is REGRESSION:
        lower, upper = posterior.predict_interval(x, 0.1)
        assert float(((y >= lower) & (y <= upper)).double().mean()) > 0.8
