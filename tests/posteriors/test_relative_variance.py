"""The relative variance is the share of the Jacobian of an input that the training data leave free."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from support.drawing import randn

X = torch.eye(6, dtype=torch.float64)


def posterior(model: nn.Module | None = None, n_samples: int = 30, **settings: Any) -> nb.ProjectedPosterior:
    """Fitted to three inputs of six dimensions, with an exact projector."""
    made = nb.ProjectedPosterior(nn.Linear(6, 2, bias=False).double() if model is None else model, prior_precision=1.0)
    settings = {"projector": nb.projectors.ExactDual(), "generator": torch.Generator().manual_seed(0), **settings}
    return made.fit(X[:3], torch.tensor([0, 1, 0]), n_samples=n_samples, progress=False, **settings)


def test_directions_that_are_known_have_none_and_new_ones_have_all() -> None:
    scores = posterior().ood_score(X, "relative_variance")
    torch.testing.assert_close(scores, torch.tensor([0.0, 0, 0, 1, 1, 1], dtype=torch.float64), rtol=0, atol=1e-8)


def test_the_size_of_a_jacobian_does_not_count() -> None:
    """The variance follows the size of a linear network's input, and the share of what is new does not."""
    fitted = posterior()
    mixed = torch.stack([X[0] + X[4], 10 * (X[0] + X[4])])
    one, ten = fitted.ood_score(mixed, "relative_variance")
    assert float(one) == pytest.approx(float(ten), rel=1e-9)
    small, large = fitted.ood_score(mixed, "max_variance")
    assert float(large) == pytest.approx(100 * float(small), rel=1e-9)


def test_many_samples_give_the_ratio_of_traces() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    new = torch.randn(4, 6, dtype=torch.float64)

    def jacobian(x: Tensor) -> Tensor:  # (n, 2, P)
        rows = []
        for output in model(x).flatten():
            gradients = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([part.flatten() for part in gradients]))
        return torch.stack(rows).view(len(x), 2, -1)

    training = jacobian(X[:3]).flatten(0, 1)
    free = torch.eye(training.shape[1], dtype=torch.float64) - torch.linalg.pinv(training) @ training
    expected = torch.stack([(j @ free @ j.T).trace() / (j @ j.T).trace() for j in jacobian(new)])
    found = posterior(model, 20_000).ood_score(new, "relative_variance")
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.0)


def test_it_does_not_depend_on_the_precision() -> None:
    fitted = posterior()
    before = fitted.ood_score(X + X.roll(1, 0), "relative_variance")
    fitted.prior_precision = 7.0
    torch.testing.assert_close(fitted.ood_score(X + X.roll(1, 0), "relative_variance"), before)


def test_a_base_distribution_is_refused() -> None:
    fitted = posterior(base=lambda n, generator: randn(n, 12, generator=generator, dtype=torch.float64))
    with pytest.raises(nb.errors.SettingsError, match='use "max_variance"'):
        fitted.ood_score(X, "relative_variance")


def test_batches_of_different_lengths_score_as_each_alone() -> None:
    """Sequences, of which a network with one vector per position makes one output per position."""
    made = nb.ProjectedPosterior(nn.Linear(6, 2, bias=False).double(), prior_precision=1.0)
    made.fit(X[None, :3], torch.tensor([[0, 1, 0]]), n_samples=10, progress=False)
    short, long = X[None, 1:5], X[None] + X.roll(1, 0)
    for kind in ("relative_variance", "max_variance"):
        expected = torch.cat([made.ood_score(short, kind), made.ood_score(long, kind)])
        torch.testing.assert_close(made.ood_score([short, long], kind), expected)
    counts = lambda x: torch.arange(x.shape[1])[None].expand(x.shape[:2]) < 4  # noqa: E731
    at_positions = made.ood_score(long, "relative_variance", per="position")
    expected = torch.cat([made.ood_score(short, "relative_variance"), at_positions[:, :4].mean(1)])
    torch.testing.assert_close(made.ood_score([short, long], "relative_variance", mask=counts), expected)
    with pytest.raises(nb.errors.DataError, match="pad them to one length"):
        made.ood_score([short, long], "relative_variance", per="position")


def test_an_unknown_per_is_refused() -> None:
    with pytest.raises(nb.errors.SettingsError, match="per must be one of input, position, not 'token'"):
        posterior().ood_score(X, "relative_variance", per="token")
