r"""What all Laplace approximations share: a curvature, noise and a prior precision.

Samples are :math:`\theta + \delta` with :math:`\delta \sim \mathcal N(0, (C + \alpha I)^{-1})`. The noise follows from
the seed, and the curvature :math:`C` holds for all :math:`\alpha`, so a new precision needs no new fit. The methods
differ only in their curvature.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, TypeVar

from torch import Tensor

from nullbayes.baselines.method import Context, Learned, Method
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.linalg.curvature import Curvature
from nullbayes.posteriors import noise
from nullbayes.precision import full_precision

Form = TypeVar("Form", bound=Curvature)
_PREFIX = "curvature."


class Laplace(Method[Curvature]):
    """Samples from a Gaussian whose precision is a curvature plus that of the prior; abstract.

    Attributes
    ----------
    form : type
        The class of the curvature that a file holds.
    """

    is_laplace = True
    form: ClassVar[type[Curvature]]

    @abstractmethod
    def approximate(self, context: Context) -> Curvature:
        """Return the curvature of the training data."""

    def describe(self, curvature: Curvature) -> str:
        """Return the form of the curvature in a few words, for the report."""
        return f"{type(curvature).__name__.lower()} curvature"

    @full_precision()
    def fit(self, context: Context) -> Learned[Curvature]:
        """Compute the curvature."""
        with context.meter.phase("factors"):
            curvature = self.approximate(context)
        return Learned(curvature, curvature.rank, self.describe(curvature))

    def deviations(self, state: Curvature, network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:
        """Draw from the Gaussian."""
        drawn = noise.normal(network, seed, 0, n_samples, state.noise_size)
        return state.sample(drawn.to(network.device), alpha)

    def tensors(self, state: Curvature) -> dict[str, Tensor]:
        """Return those of the curvature."""
        return {_PREFIX + name: tensor for name, tensor in state.tensors().items()}

    def restored(self, tensors: Mapping[str, Tensor], network: Network, seed: int) -> Curvature | None:
        """Build the curvature, unless it was too large for the file."""
        held = {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}
        return fitting(self.form.of(held), network) if held else None

    def copied(self, state: Curvature) -> Curvature | None:
        """Leave out a curvature whose rows are formed from the training data, as a file does."""
        return None if isinstance(state.rows, JacobianRows) else state


def fitting(curvature: Form, network: Network) -> Form:
    """Return a curvature from a file, or refuse one that is not over the parameters of the network."""
    if curvature.n_columns != network.n_parameters:
        msg = f"vectors of {curvature.n_columns} numbers"
        raise ValueError(msg)
    return curvature
