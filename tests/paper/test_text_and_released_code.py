"""Why it matters where the released code departs from the text: what each departure would do, on small examples."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nullbayes import metrics
from support.drawing import randn
from support.paper import oracle
from support.paper.fitting import projected
from support.paper.networks import classifier
from support.paper.probabilities import predictions


def test_a_dropped_tail_keeps_its_variance() -> None:
    """Lemma 3.1 holds on the examples that were projected against, and on no others."""
    trained = classifier()
    first = replace(trained, x=trained.x[:16], y=trained.y[:16])
    variance = projected(first).functional_variance(trained.x, exact=True).sum(1)
    assert variance[:16].max() < 1e-16
    assert variance[16:].min() > 1e-2


def test_macro_batches_that_are_not_returned_to_are_not_in_the_kernel() -> None:
    """One exact projection after the other is one sweep, not its limit."""
    rows = classifier().jacobian
    first, second = rows[:30], rows[30:]
    once = oracle.kernel_projector(second) @ oracle.kernel_projector(first)
    assert np.linalg.norm(second @ once) < 1e-10
    assert np.linalg.norm(first @ once) > 0.1 * np.linalg.norm(first @ oracle.kernel_projector(second))


def test_mean_of_the_samples_nll_is_larger_than_the_nll_of_the_mean() -> None:
    trained = classifier()
    generator = torch.Generator().manual_seed(0)
    noise = 2 * randn(30, 20, 3, generator=generator, dtype=torch.float64)
    probs = (trained.model(trained.x).detach() + noise).softmax(2)
    mean_of_scores = float(np.mean([metrics.nll(sample, trained.y) for sample in probs]))
    assert metrics.nll(probs.mean(0), trained.y) < 0.8 * mean_of_scores


def test_most_confident_predictions_are_most_predictions() -> None:
    """An ECE that leaves out confidences of 0.99 and above leaves out most of a data set such as MNIST."""
    probs, labels = predictions(0.981, 0.977, seed=0)
    top = probs.amax(1)
    assert float((top >= 0.99).double().mean()) > 0.9
    rest = top < 0.99
    assert metrics.ece(probs[rest], labels[rest]) > 5 * metrics.ece(probs, labels)


def test_variance_of_probabilities_hides_a_variance_of_logits() -> None:
    """The same spread of a logit, far from the boundary and on it."""
    spread = torch.linspace(-3, 3, 101, dtype=torch.float64)
    far, near = (torch.sigmoid(20 + spread).var(), torch.sigmoid(spread).var())
    assert float(far) < 1e-12
    assert float(near) == pytest.approx(0.1, abs=0.05)
