"""The library's posteriors on the networks of these tests."""

import torch

import nullbayes as nb
from nullbayes.projectors import ExactDual, ExactPrimal, Projector
from support.paper.networks import Trained

EXACT: list[Projector] = [ExactDual(), ExactPrimal()]


def name_of(value: object) -> str:
    """The id of a parametrized test: a string itself, the name of a network, the type of a projector."""
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def projected(
    trained: Trained,
    projector: Projector = EXACT[0],
    *,
    n_samples: int = 50,
    prior_precision: str | float = 1.0,
    hessian: bool = False,
) -> nb.ProjectedPosterior:
    posterior = nb.ProjectedPosterior(
        trained.model, trained.likelihood, prior_precision=prior_precision, hessian=hessian
    )
    return posterior.fit(trained.loader, n_samples, projector=projector, generator=seeded(), progress=False)


def loss_projected(
    trained: Trained,
    projector: Projector = EXACT[0],
    *,
    n_samples: int = 50,
    prior_precision: str | float = 1e4,
) -> nb.LossProjectedPosterior:
    posterior = nb.LossProjectedPosterior(trained.model, trained.likelihood, prior_precision=prior_precision)
    return posterior.fit(trained.loader, n_samples, projector=projector, generator=seeded(), progress=False)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
