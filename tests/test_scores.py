"""Scores of confidence: what they say of certain, of undecided and of masked predictions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes import predictive
from nullbayes.errors import LikelihoodError
from nullbayes.likelihoods import Bernoulli, Classification, Likelihood, Regression
from nullbayes.predictive import OF_MEAN, SCORES
from support.drawing import randn
from support.models import MLP, REGRESSION

OF_LOGITS = ("energy", "max_logit")
OF_PROBABILITIES = tuple(kind for kind in OF_MEAN if kind not in OF_LOGITS)
each_score = pytest.mark.parametrize("kind", OF_MEAN)
D = torch.float64


def predicted(outputs: Tensor, likelihood: Likelihood, mask: Tensor | None = None) -> predictive.Prediction:
    """The prediction of one sample, which is the mean."""
    probs = likelihood.probabilities(outputs) if likelihood.has_probabilities else None
    return predictive.Prediction(outputs, torch.zeros_like(outputs), probs, outputs[None], mask=mask)


def score(outputs: Tensor, likelihood: Likelihood, kind: str, mask: Tensor | None = None, per: str = "input") -> Tensor:
    return predictive.score(predicted(outputs, likelihood, mask), likelihood, kind, per)


def draw(*shape: int, scale: float = 3.0) -> Tensor:
    return scale * randn(*shape, generator=torch.Generator().manual_seed(0), dtype=D)


# --- definitions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """One decision between C classes, as S samples of the logits see it."""

    samples: Tensor  # (S, C)

    @property
    def logits(self) -> Tensor:  # (C,), of the mean
        return self.samples.mean(0)

    @property
    def each(self) -> Tensor:  # (S, C)
        return self.samples.exp() / self.samples.exp().sum(1, keepdim=True)

    @property
    def probs(self) -> Tensor:  # (C,), averaged over the samples
        return self.each.mean(0)

    @property
    def own(self) -> Tensor:  # (C,), of the mean logits
        return self.logits.exp() / self.logits.exp().sum()


def spread(values: Tensor) -> Tensor:  # (S, C) -> (C,)
    return (values - values.mean(0)).square().sum(0) / (len(values) - 1)


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(-1)


FORMULAS: dict[str, Callable[[Decision], Tensor]] = {  # every score of the library, written out once more
    "max_variance": lambda d: spread(d.samples).max(),
    "sum_variance": lambda d: spread(d.samples).sum(),
    "max_prob_variance": lambda d: spread(d.each).max(),
    "entropy": lambda d: entropy(d.probs),
    "mutual_information": lambda d: entropy(d.probs) - entropy(d.each).mean(),
    "energy": lambda d: -d.logits.exp().sum().log(),
    "max_logit": lambda d: -d.logits.max(),
    "max_probability": lambda d: 1 - d.probs.max(),
    "generalized_entropy": lambda d: (d.own * (1 - d.own)).pow(0.1).sum(),
}


def by_hand(kind: str, samples: Tensor) -> float:  # (S, C)
    return float(FORMULAS[kind](Decision(samples)))


def test_every_score_has_a_formula_here_a_section_and_a_line_where_users_look() -> None:
    assert set(FORMULAS) == set(SCORES)
    page = (Path(__file__).parents[1] / "docs" / "scores.md").read_text(encoding="utf-8")
    sections = {name for title in re.findall(r"(?m)^### (.+)$", page) for name in title.split(" and ")}
    assert set(SCORES) <= sections
    for described in (nb.ProjectedPosterior.ood_score, predictive.scores):
        assert not [kind for kind in SCORES if not re.search(rf'["`]{kind}["`]', str(described.__doc__))], described
    assert not [kind for kind in OF_MEAN if f'"{kind}"' not in str(nb.baselines.MAP.__doc__)]


@pytest.mark.parametrize("kind", SCORES)
def test_scores_are_their_formulas(kind: str) -> None:
    samples = draw(6, 4, 5, scale=1.5)  # of four inputs
    mean, likelihood = samples.mean(0), Classification()
    prediction = predictive.summarize(mean, samples - mean, likelihood, "mc")
    wanted = torch.tensor([by_hand(kind, samples[:, i]) for i in range(4)], dtype=D)
    torch.testing.assert_close(predictive.score(prediction, likelihood, kind), wanted)


# --- certain and undecided predictions --------------------------------------------------------------------------------


def test_the_largest_probability_keeps_its_digits_for_confident_inputs() -> None:
    """In float32, one minus a probability of 1 - 1e-9 is zero, and confident inputs could not be told apart."""
    margins = torch.tensor([10.0, 20.0, 30.0, 40.0], dtype=torch.float32)
    outputs = torch.stack([margins, torch.zeros(4), -margins], 1)
    others = [(math.exp(-m) + math.exp(-2 * m)) / (1 + math.exp(-m) + math.exp(-2 * m)) for m in margins.tolist()]
    torch.testing.assert_close(
        score(outputs, Classification(), "max_probability"), torch.tensor(others), rtol=1e-5, atol=0
    )
    found = score(outputs, Classification(), "generalized_entropy")
    wanted = []
    for m, o in zip(margins.tolist(), others, strict=True):
        p = [math.exp(-m), math.exp(-2 * m)]  # of the other two, up to a part in ten thousand
        wanted.append(sum((q * (1 - q)) ** 0.1 for q in (*p, o)))
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=0)


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("kind", OF_PROBABILITIES)
def test_a_certain_prediction_has_the_lowest_score_and_a_uniform_one_the_highest(kind: str, classes: int) -> None:
    certain, uniform = torch.zeros(1, classes, dtype=D), torch.zeros(1, classes, dtype=D)
    certain[0, classes // 2] = 600.0
    between = draw(200, classes)
    low, middle, high = (score(outputs, Classification(), kind) for outputs in (certain, between, uniform))
    assert 0 <= float(low) < 1e-20
    assert float(low) < float(middle.min()) <= float(middle.max()) < float(high)


def test_the_generalized_entropy_of_many_classes_is_that_of_the_hundred_largest() -> None:
    outputs = draw(5, 250, scale=1.0)
    largest = (outputs.exp() / outputs.exp().sum(1, keepdim=True)).sort(1, descending=True).values[:, :100]
    wanted = (largest * (1 - largest)).pow(0.1).sum(1)
    torch.testing.assert_close(score(outputs, Classification(), "generalized_entropy"), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_score
def test_confidently_negative_inputs_are_as_familiar_as_confidently_positive_ones(
    kind: str, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[0.0], [0.5], [3.0], [8.0], [20.0], [60.0]], dtype=dtype)
    positive, negative = (score(side * logits, Bernoulli("binary"), kind) for side in (1, -1))
    torch.testing.assert_close(negative, positive, rtol=1e-3, atol=0 if kind != "entropy" else 1e-6)
    assert (negative[:-1] >= negative[1:]).all()
    assert (negative[:4].diff() < 0).all()


@pytest.mark.parametrize("kind", OF_LOGITS)
def test_of_several_labels_those_that_apply_make_an_input_familiar(kind: str) -> None:
    none, one, two = torch.tensor([[-9.0, -9.0], [-9.0, 9.0], [9.0, 9.0]], dtype=D).split(1)
    scores = [float(score(outputs, Bernoulli("multilabel"), kind)) for outputs in (none, one, two)]
    assert scores == pytest.approx([0.0, -9.0, -18.0], abs=1e-3)


@each_score
def test_the_order_of_the_classes_does_not_matter(kind: str) -> None:
    outputs = draw(6, 5)
    order = torch.tensor([3, 0, 4, 1, 2], device=outputs.device)
    for likelihood in (Classification(), Bernoulli("multilabel")):
        torch.testing.assert_close(score(outputs[:, order], likelihood, kind), score(outputs, likelihood, kind))


@pytest.mark.parametrize("kind", OF_LOGITS)
def test_scores_of_logits_follow_a_shift_of_all_of_them_and_scores_of_probabilities_do_not(kind: str) -> None:
    outputs = draw(6, 5)
    torch.testing.assert_close(
        score(outputs + 2.0, Classification(), kind), score(outputs, Classification(), kind) - 2.0
    )
    for other in OF_PROBABILITIES:
        torch.testing.assert_close(
            score(outputs + 2.0, Classification(), other), score(outputs, Classification(), other)
        )


def test_large_logits_do_not_overflow() -> None:
    outputs = torch.tensor([[500.0, -500.0, 0.0]])
    for likelihood in (Classification(), Bernoulli("multilabel")):
        for kind in OF_MEAN:
            assert torch.isfinite(score(outputs, likelihood, kind)).all(), (likelihood.name, kind)


def test_a_temperature_changes_no_score_of_the_mean_outputs() -> None:
    outputs = draw(6, 5)
    for kind in OF_MEAN:
        warm, plain = (score(outputs, Classification(temperature=t), kind) for t in (4.0, 1.0))
        assert torch.equal(warm, plain) == (kind in ("energy", "max_logit", "generalized_entropy")), kind


# --- positions --------------------------------------------------------------------------------------------------------


@each_score
@pytest.mark.parametrize("layout", ["images", "sequences"])
def test_scores_of_positions_are_averaged_without_the_masked_ones(kind: str, layout: str) -> None:
    values = draw(3, 4, 5)  # (n, positions, classes)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1]]).bool()
    wanted = torch.tensor([[by_hand(kind, values[i, t][None]) for t in range(4)] for i in range(3)], dtype=D)
    if layout == "images":
        outputs, likelihood, shape = values.movedim(2, 1).unflatten(2, (2, 2)), Classification(class_dim=1), (3, 2, 2)
    else:
        outputs, likelihood, shape = values, Classification(class_dim=-1), (3, 4)
    found = score(outputs, likelihood, kind, mask.view(shape), "position")
    assert found.shape == shape
    torch.testing.assert_close(found.reshape(3, 4), wanted.masked_fill(~mask, torch.nan), equal_nan=True)
    torch.testing.assert_close(score(outputs, likelihood, kind, mask.view(shape)), (wanted * mask).sum(1) / mask.sum(1))
    torch.testing.assert_close(score(outputs, likelihood, kind), wanted.mean(1))


# --- the default, and what has no such scores -------------------------------------------------------------------------


def test_default_is_the_entropy_where_there_are_probabilities_and_the_variance_elsewhere() -> None:
    for likelihood in (Classification(), Bernoulli("binary"), Bernoulli("multilabel")):
        assert predictive.default_score(likelihood) == "entropy"
    for likelihood in (Regression(1.0), nb.likelihoods.CustomLoss(lambda f, y: (f - y).square().sum(1))):
        assert predictive.default_score(likelihood) == "max_variance"


@each_score
def test_a_regression_is_refused_with_what_to_use_instead(kind: str) -> None:
    outputs = draw(4, 2)
    prediction = predictive.Prediction(outputs, torch.ones_like(outputs), None, torch.stack([outputs, outputs]))
    message = f"kind='{kind}' needs probabilities, which a regression likelihood does not have: use 'max_variance'"
    with pytest.raises(LikelihoodError, match=message):
        predictive.score(prediction, Regression(1.0), kind)
    network = nb.baselines.MAP(MLP.build(2), REGRESSION.likelihood).fit([REGRESSION.data()], progress=False)
    for asked in (kind, None):  # the network itself has no variance either
        with pytest.raises(
            LikelihoodError, match=r"needs probabilities, which a regression likelihood does not have\."
        ):
            network.ood_score(MLP.inputs(4, torch.Generator().manual_seed(1)), asked)
