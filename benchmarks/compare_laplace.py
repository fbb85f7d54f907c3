"""Compare the Laplace baselines with laplace-torch: covariances, determinants of precisions, predictive variances.

    python benchmarks/compare_laplace.py

Both sides see the same float64 networks and data; the largest relative difference of each quantity is printed, and the
exit status is 1 if one exceeds the tolerance. Needs ``laplace-torch`` and, for the factors of both, ``curvlinops``. An
environment without torchvision will do, if laplace-torch is installed without its dependencies:

    pip install torch nullbayes[kronecker]
    pip install --no-deps laplace-torch backpack-for-pytorch unfoldNd torchmetrics lightning-utilities asdfghjkl
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb

TOLERANCE, ALPHA, N = 1e-8, 0.7, 40


class Structure(NamedTuple):
    """A form of the curvature, by both names."""

    ours: type[nb.baselines.Baseline]
    weights: str
    hessian: str


STRUCTURES = {
    "full": Structure(nb.baselines.LinearizedLaplace, "all", "full"),
    "diagonal": Structure(nb.baselines.DiagonalLaplace, "all", "diag"),
    "Kronecker": Structure(nb.baselines.KroneckerLaplace, "all", "kron"),
    "last layer": Structure(nb.baselines.LastLayerLaplace, "last_layer", "full"),
}


def mlp(outputs: int) -> nn.Module:
    """Return a network for vectors of five numbers."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, outputs))


def cnn(outputs: int) -> nn.Module:
    """Return a network for images of 6 by 6."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2, stride=2), nn.Tanh(),
        nn.Flatten(), nn.Linear(4, outputs),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)),
    "cnn": (cnn, (1, 6, 6)),
}


def differences(network: str, likelihood: str, structure: Structure) -> dict[str, float]:
    """Return the largest relative difference of each quantity between the two libraries."""
    from laplace import Laplace

    torch.manual_seed(0)
    build, shape = NETWORKS[network]
    model, x, new = build(3).eval(), torch.randn(N, *shape), 2 * torch.randn(9, *shape)
    y = torch.randint(3, (N,)) if likelihood == "classification" else torch.randn(N, 3)
    loader = DataLoader(TensorDataset(x, y), batch_size=16)
    theirs = Laplace(
        model, likelihood, subset_of_weights=structure.weights, hessian_structure=structure.hessian,
        prior_precision=ALPHA, **({} if structure.hessian == "diag" else {"backend": _backend()}),
    )  # fmt: skip
    theirs.fit(loader)
    chosen: Any = likelihood if likelihood == "classification" else nb.likelihoods.Regression(1.0)
    ours = structure.ours(model, chosen, prior_precision=ALPHA).fit(loader, 2, progress=False)
    variance = theirs._glm_predictive_distribution(new)[1].diagonal(dim1=1, dim2=2)
    pairs = {"variances": (ours.functional_variance(new, exact=True), variance)}
    curvature = ours.curvature
    ones = torch.eye(curvature.n_columns)
    pairs["covariance"] = (curvature.variance(ones, ALPHA), _covariance(theirs, structure))
    pairs["log determinant"] = (torch.tensor(curvature.log_determinant(ALPHA)), _log_determinant(theirs, structure))
    return {name: float(((a - b).abs() / b.abs()).max()) for name, (a, b) in pairs.items()}


def _backend() -> Any:
    from laplace.curvature import CurvlinopsGGN

    return CurvlinopsGGN


def _covariance(theirs: Any, structure: Structure) -> Tensor:
    """Return the diagonal of their posterior covariance."""
    if structure.hessian == "kron":
        return theirs.posterior_precision.diag(exponent=-1)
    return theirs.posterior_variance if structure.hessian == "diag" else theirs.posterior_covariance.diagonal()


def _log_determinant(theirs: Any, structure: Structure) -> Tensor:
    """Return the log determinant of their posterior precision."""
    precision = theirs.posterior_precision
    return precision.log().sum() if structure.hessian == "diag" else precision.logdet()


def main() -> int:
    """Compare all structures on all networks and likelihoods; return the exit status."""
    try:
        import laplace  # noqa: F401
    except ImportError as error:
        print(f"laplace-torch cannot be imported ({error}): the docstring of this script says how to install it.")
        return 1
    torch.set_default_dtype(torch.float64)
    worst = 0.0
    print(f"{'network':<9}{'likelihood':<16}{'structure':<12}{'variances':>12}{'covariance':>12}{'log det':>12}")
    for network in NETWORKS:
        for likelihood in ("classification", "regression"):
            for name, structure in STRUCTURES.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = differences(network, likelihood, structure)
                print(f"{network:<9}{likelihood:<16}{name:<12}" + "".join(f"{v:>12.1e}" for v in found.values()))
                worst = max(worst, *found.values())
    print(f"largest relative difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
