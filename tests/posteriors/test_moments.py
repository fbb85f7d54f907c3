"""Samples are normal around the trained parameters; their covariance is the null-space projector over the precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes.testing import kernel_projector
from support.drawing import randn
from support.models import CLASSIFICATION, MLP
from support.slow_answers import flat_parameters, jacobian, loss_jacobian

stats = pytest.importorskip("scipy.stats")

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

N_SAMPLES = 4000
X, Y = CLASSIFICATION.data()
KINDS = {
    nb.ProjectedPosterior: lambda: jacobian(MLP.build(), X).flatten(0, 1),
    nb.LossProjectedPosterior: lambda: loss_jacobian(MLP.build(), X, Y, CLASSIFICATION),
}


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def fitted(request: pytest.FixtureRequest) -> tuple[nb.ProjectedPosterior, Tensor]:
    """A posterior with many samples, and the projector on its kernel."""
    generator = torch.Generator().manual_seed(0)
    posterior = request.param(MLP.build(), prior_precision=2.5)
    posterior.fit([(X, Y)], N_SAMPLES, projector=nb.projectors.ExactDual(), generator=generator, progress=False)
    return posterior, kernel_projector(KINDS[request.param]())


def deviations(posterior: nb.ProjectedPosterior) -> Tensor:  # (S, P)
    samples = torch.cat([value.flatten(1) for value in posterior.sample().values()], dim=1)
    return samples - flat_parameters(MLP.build())


def check_covariance(samples: Tensor, wanted: Tensor) -> None:
    """Every entry within five standard errors.

    A mean of S normal entries has variance C_ii / S, a covariance (C_ii C_jj + C_ij²) / S; five standard errors are
    missed by one entry in two million, and there are 1,326.
    """
    s, diagonal = len(samples), wanted.diagonal()
    assert (samples.mean(0).abs() <= 5 * (diagonal / s).sqrt() + 1e-12).all()
    error = 5 * ((diagonal[:, None] * diagonal + wanted**2) / s).sqrt()
    assert ((samples.T @ samples / s - wanted).abs() <= error + 1e-12).all()


def test_covariance_is_the_projector_over_the_precision(fitted: tuple) -> None:
    posterior, projector = fitted
    check_covariance(deviations(posterior), projector / 2.5)


def test_samples_are_normal_in_the_null_space_and_zero_outside(fitted: tuple) -> None:
    posterior, projector = fitted
    values, vectors = torch.linalg.eigh(projector)
    inside, outside = vectors[:, values > 0.5], vectors[:, values < 0.5]
    assert (posterior.directions @ outside).abs().max() < 1e-9
    coordinates = posterior.directions @ inside  # standard normal, each of them
    assert stats.kstest(coordinates.flatten().cpu().numpy(), "norm").pvalue > 1e-3
    squares = coordinates.square().sum(1)
    assert stats.kstest(squares.cpu().numpy(), "chi2", args=(inside.shape[1],)).pvalue > 1e-3


def test_samples_are_uncorrelated_with_their_neighbours(fitted: tuple) -> None:
    posterior, projector = fitted
    directions, dimension = posterior.directions, float(projector.trace())
    for lag in (1, 2, 17):
        products = (directions[lag:] * directions[:-lag]).sum(1)  # mean 0, variance the kernel's dimension
        assert abs(float(products.mean())) < 5 * math.sqrt(dimension / len(products))


def test_predictions_have_the_moments_of_the_linear_map(fitted: tuple) -> None:
    posterior, projector = fitted
    x = MLP.inputs(3, torch.Generator().manual_seed(5))
    rows = jacobian(MLP.build(), x).flatten(0, 1)
    samples = posterior.predict(x).samples.flatten(1) - MLP.build()(x).detach().flatten()
    check_covariance(samples, rows @ projector @ rows.T / 2.5)


def test_another_base_keeps_its_covariance_inside_the_null_space() -> None:
    scale = torch.linspace(0.1, 3, 51, dtype=torch.float64)

    def base(n: int, generator: torch.Generator) -> Tensor:
        return scale * randn(n, 51, generator=generator, dtype=torch.float64)

    posterior = nb.ProjectedPosterior(MLP.build())
    posterior.fit([(X, Y)], N_SAMPLES, projector=nb.projectors.ExactDual(), base=base, progress=False,
                  generator=torch.Generator().manual_seed(1))  # fmt: skip
    projector = kernel_projector(KINDS[nb.ProjectedPosterior]())
    check_covariance(deviations(posterior), projector @ torch.diag(scale**2) @ projector)
