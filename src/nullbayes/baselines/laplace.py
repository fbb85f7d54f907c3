r"""Laplace approximations: a curvature, noise and a prior precision.

Samples are :math:`\theta + \delta` with :math:`\delta \sim \mathcal N(0, (C + \alpha I)^{-1})`. The noise follows from
the seed, and the curvature :math:`C` holds for all :math:`\alpha`, so a new precision needs no new fit. The methods
differ only in their curvature, a form of the Gauss-Newton matrix :math:`A^\top A` of the training data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.method import FitContext, Learned, LikelihoodLike, Method, Options, check_counts
from nullbayes.errors import ModelError, SettingsError
from nullbayes.jacobian.features import find_last_layer
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import linearized
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.limits import normal_bytes
from nullbayes.linalg.curvature import (
    FACTORED_BYTES,
    Curvature,
    Diagonal,
    Dual,
    LowRank,
    MatrixFree,
    Primal,
    column_squares,
)
from nullbayes.linalg.normal import normal_matrix
from nullbayes.posteriors.arguments import normal
from nullbayes.precision import full_precision

_PREFIX = "curvature."
_FACTORED = {"cpu": 8_000, "cuda": 60_000}  # columns or rows whose matrix is factored within minutes
_SMALL = 2048  # columns whose matrix is taken even where rows are fewer: it needs no rows later, and fits in a file
_PRECONDITIONED = 200  # eigenpairs
_REASONS: Mapping[type[Curvature], str] = {
    Primal: "all parameters, factored",
    Dual: "all rows, factored",
    MatrixFree: "conjugate gradients",
}


class Laplace(Method[Curvature]):
    """Samples from a Gaussian whose precision is a curvature plus that of the prior; abstract."""

    is_laplace = True
    form: ClassVar[type[Curvature]]  # that a file may hold

    @abstractmethod
    def approximate(self, context: FitContext) -> Curvature:
        """Return the curvature of the training data."""

    @full_precision()
    def fit(self, context: FitContext) -> Learned[Curvature]:
        """Compute the curvature."""
        curvature = self.approximate(context)
        reason = _REASONS.get(type(curvature), f"{type(curvature).__name__.lower()} curvature")
        return Learned(curvature, curvature.rank, reason)

    def deviations(self, state: Curvature, network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:
        """Draw from the Gaussian."""
        drawn = normal(network, seed, 0, n_samples, state.noise_size)
        return state.sample(drawn.to(network.device), alpha)

    def tensors(self, state: Curvature) -> dict[str, Tensor]:
        """Return the tensors of the curvature."""
        return {_PREFIX + name: tensor for name, tensor in state.tensors().items()}

    def restored(self, tensors: Mapping[str, Tensor], network: Network, seed: int) -> Curvature | None:
        """Build the curvature, unless it was too large for the file."""
        held = {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}
        curvature = self.form.of(held) if held else None
        if curvature is not None and curvature.n_columns != network.n_parameters:
            msg = f"a curvature over {curvature.n_columns} parameters"
            raise ValueError(msg)
        return curvature

    def copied(self, state: Curvature) -> Curvature | None:
        """Leave out a curvature whose rows are formed from the training data, as a file does."""
        return None if isinstance(state.rows, JacobianRows) else state


@dataclass(frozen=True)
class _Diagonal(Laplace):
    form = Diagonal

    def approximate(self, context: FitContext) -> Curvature:
        return Diagonal(column_squares(context.rows))


class DiagonalLaplace(Baseline):
    """Laplace approximation in which parameters vary independently: one pass over the data, one number per parameter.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters, prior_precision, batch_fn, output_fn : optional
        Which parameters vary, by name (all by default); the precision of the Gaussian prior (1.0, until
        ``optimize_prior_precision(held_out)`` chooses one); functions that read batches and outputs. See
        :class:`Baseline <nullbayes.baselines.Baseline>` for details.

    Examples
    --------
    The training input determines the sum of two weights, which a diagonal cannot tell from their difference:

    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> noise = nb.likelihoods.Regression(sigma_noise=1.0)
    >>> posterior = nb.baselines.DiagonalLaplace(model, noise).fit(x[:1], torch.zeros(1, 1))
    >>> posterior.functional_variance(x, exact=True).flatten()
    tensor([1., 1.])
    """

    _method = _Diagonal()


@dataclass(frozen=True)
class _Full(Laplace):
    last_layer: bool = False

    form = Primal

    def parameters(self, network: Network, x: Any) -> Network:
        if not self.last_layer:
            return network
        chosen = Network(network.model, last_linear(network, x), network.output_fn)
        if not linearized(chosen, x, normal(chosen, 0, 0, 1).to(chosen.device))[1].any():
            msg = (
                f"The outputs do not depend on {', '.join(chosen.names)}, which the network calls last: name the "
                'parameters of the layer that gives the outputs, parameters="head.*".'
            )
            raise ModelError(msg)
        return chosen

    def approximate(self, context: FitContext) -> Curvature:
        rows, most = context.rows, _FACTORED.get(context.rows.device.type, 8_000)
        side = rows.n_columns if rows.n_columns <= _SMALL else min(rows.n_rows, rows.n_columns)
        needed = FACTORED_BYTES * side**2 + normal_bytes(side, rows.device)
        factored = side <= most and needed <= context.available
        if factored and rows.n_columns == side:
            return Primal(normal_matrix(rows))
        if factored:
            return Dual(context.held(needed))
        vectors = 4 * (context.n_samples + _PRECONDITIONED) * rows.n_columns * rows.dtype.itemsize
        if vectors > context.available:
            msg = (
                f"Samples of {rows.n_columns:,} parameters with a preconditioner take {vectors / 2**20:,.0f} MiB, more "
                f"than the memory limit of {context.available / 2**20:,.0f} MiB: raise memory_limit, or use "
                "nb.baselines.LastLayerLaplace or DiagonalLaplace."
            )
            raise SettingsError(msg)
        return MatrixFree(context.multiplied(vectors, context.n_samples), _PRECONDITIONED, context.generator())


class LinearizedLaplace(Baseline):
    """Full-covariance Laplace (Immer et al. 2021), exact where a matrix of rows or of columns fits in memory.

    Where neither fits, conjugate gradients compute the samples.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters, prior_precision, batch_fn, output_fn : optional
        As for :class:`DiagonalLaplace`.

    Examples
    --------
    The training input determines the sum of two weights, not their difference:

    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> noise = nb.likelihoods.Regression(sigma_noise=1.0)
    >>> posterior = nb.baselines.LinearizedLaplace(model, noise).fit(x[:1], torch.zeros(1, 1))
    >>> posterior.functional_variance(x, exact=True).flatten()
    tensor([0.6667, 2.0000])
    """

    _method = _Full()


class LastLayerLaplace(Baseline):
    """Full-covariance Laplace in which only the last layer varies (Daxberger et al. 2021).

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters : optional
        Which parameters vary: by default those of the ``nn.Linear`` that returns the outputs, or of the one that is
        called last if none does.
    prior_precision, batch_fn, output_fn : optional
        The precision of the Gaussian prior (1.0, until ``optimize_prior_precision(held_out)`` chooses one); functions
        that read batches and outputs. See :class:`Baseline <nullbayes.baselines.Baseline>` for details.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> posterior = nb.baselines.LastLayerLaplace(model).fit(torch.eye(4), torch.tensor([0, 1, 2, 0]))
    >>> sorted(posterior.sample(1)), posterior.report.n_parameters
    (['2.bias', '2.weight'], 27)
    """

    _method = _Full(last_layer=True)


@dataclass(frozen=True)
class _Lanczos(Laplace):
    memory_budget: int = 300

    form = LowRank

    def __post_init__(self) -> None:
        check_counts(vars(self))

    def approximate(self, context: FitContext) -> Curvature:
        return context.leading_pairs(self.memory_budget)


class LanczosLaplace(Baseline):
    """Linearized Laplace on the largest eigenpairs, the paper's LLA: as many as the Lanczos process finds in a budget.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    memory_budget : int
        How many numbers may be held, as a multiple of the number of parameters. The paper takes 300 for all methods
        with such a budget.
    parameters, prior_precision, batch_fn, output_fn : optional
        As for :class:`DiagonalLaplace`.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> noise = nb.likelihoods.Regression(sigma_noise=1.0)
    >>> posterior = nb.baselines.LanczosLaplace(model, noise, memory_budget=10).fit(x[:1], torch.zeros(1, 1))
    >>> posterior.functional_variance(x, exact=True).flatten()
    tensor([0.6667, 2.0000])
    >>> posterior.report.rank
    1
    """

    _method = _Lanczos()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        memory_budget: int = 300,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _Lanczos(int(memory_budget))


def last_linear(network: Network, x: Any) -> list[str]:
    """Return the names of the parameters of the linear layer that returns the outputs, or else is called last."""
    name, returns_outputs = find_last_layer(network, x)
    called: list[nn.Module] = []
    layers = [layer for layer in network.module.modules() if isinstance(layer, nn.Linear)]
    with network.lock, ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(lambda layer, *_: called.append(layer)))
        network.outputs(x)
    if not called:
        msg = "The network calls no nn.Linear, so its last layer is unknown: name its parameters, parameters=[...]."
        raise ModelError(msg)
    head = network.module.get_submodule(name) if returns_outputs else None
    last = {id(parameter) for parameter in (head if head in layers else called[-1]).parameters()}
    return [name for name, parameter in network.module.named_parameters() if id(parameter) in last]
