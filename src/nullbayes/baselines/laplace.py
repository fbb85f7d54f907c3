r"""The machine behind every Laplace approximation: a curvature, noise, and a prior precision.

Samples are :math:`\theta + \delta` with :math:`\delta \sim \mathcal N(0, (C + \alpha I)^{-1})`. The noise follows from
the seed and the curvature holds for all :math:`\alpha`, so a new precision costs no new fit. Which curvature is the
only difference between the methods.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nullbayes import priors
from nullbayes.baselines.base import Baseline, Work
from nullbayes.errors import NotFittedError
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.linalg.curvature import Curvature
from nullbayes.posteriors.arguments import normal
from nullbayes.precision import full_precision

_PREFIX = "curvature."


class Laplace(Baseline):
    """Samples from a Gaussian with a curvature for its precision; abstract: a subclass says which."""

    _curvature: Curvature | None = None
    _drawn_at: float | None = None  # the precision that the directions at hand belong to

    @abstractmethod
    def _approximate(self, work: Work) -> Curvature:
        """Return the curvature of the training data."""

    @abstractmethod
    def _rebuilt(self, tensors: Mapping[str, Tensor]) -> Curvature:
        """Return the curvature that a file holds the tensors of."""

    def _forget(self) -> None:
        super()._forget()
        self._curvature = self._drawn_at = None

    @full_precision()
    def _learn(self, work: Work) -> tuple[int | None, str]:
        with work.meter.phase("factors"):
            self._curvature = self._approximate(work)
        self._directions = torch.empty(work.n_samples, 0)
        with work.meter.phase("samples"):
            _ = self.directions
        return self._curvature.rank, self._form(self._curvature)

    def _form(self, curvature: Curvature) -> str:
        return f"{type(curvature).__name__.lower()} curvature"

    @property
    def directions(self) -> Tensor:
        """The deviations of the samples (S, P) at the precision in use, times its root."""
        held = super().directions
        alpha = self.prior_precision
        if self._drawn_at != alpha:
            curvature = self.curvature
            drawn = normal(self._network, self._seed, 0, len(held), curvature.noise_size)
            with full_precision():
                deviations = curvature.sample(drawn.to(self._network.device), alpha)
            self._directions, self._drawn_at = deviations * math.sqrt(alpha), alpha
        return super().directions

    @property
    def curvature(self) -> Curvature:
        """The curvature, in the method's form; ``curvature.log_determinant`` and ``curvature.variance`` take α."""
        if self._curvature is None:
            msg = (
                "No file or copy holds this curvature, which was too large or had rows of its own: it predicts at the "
                f"prior precision {self._drawn_at:g} that it was made with. Fit a new one for another."
                if self._drawn_at is not None
                else f"{type(self).__name__} has no curvature yet: call fit(loader) first."
            )
            raise NotFittedError(msg)
        return self._curvature

    @full_precision()
    def functional_variance(self, x: Any, *, exact: bool = False) -> Tensor:  # (N, ...)
        r"""Return the variance of the linearized outputs.

        Parameters
        ----------
        x : as for ``predict``
            The inputs.
        exact : bool
            :math:`J(x) (C + \alpha I)^{-1} J(x)^\top` itself, without Monte Carlo error.
        """
        if not exact:
            return super().functional_variance(x)
        curvature = self.curvature
        variances = [
            curvature.variance(rows.flatten(0, 1), self.prior_precision).view(-1, *self._network.output_shape(piece))
            for piece, rows in self._row_pieces(x)
        ]
        return torch.cat(variances)

    def _maximize_evidence(self) -> float:
        values, weights = self.curvature.spectrum()
        return priors.best_evidence(values, weights, self._theta_squared())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a curvature whose rows are formed again from the training data, as a file does."""
        if not isinstance(getattr(self._curvature, "rows", None), JacobianRows):
            return dict(vars(self))
        _ = self.directions  # at the precision in use
        return {**vars(self), "_curvature": None}

    def _tensors(self) -> dict[str, Tensor]:
        held = {} if self._curvature is None else self._curvature.tensors()
        return {_PREFIX + name: tensor for name, tensor in held.items()}

    def _take_up(self, tensors: Mapping[str, Tensor]) -> None:
        self._drawn_at = self.prior_precision
        held = {n.removeprefix(_PREFIX): t for n, t in tensors.items() if n.startswith(_PREFIX)}
        if held:
            self._curvature = self._rebuilt(held)
            if self._curvature.n_columns != self._network.n_parameters:
                msg = f"a curvature of {self._curvature.n_columns} columns"
                raise ValueError(msg)
