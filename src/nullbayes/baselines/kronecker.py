r"""Kronecker-factored Laplace: the Gauss-Newton matrix of each layer as :math:`B \otimes A`.

:math:`A` holds the correlations between the inputs of a layer, and :math:`B` those between the gradients of its outputs
(Martens and Grosse 2015; Ritter, Botev and Barber 2018). Weight and bias are separate blocks. The factors come from
``curvlinops``, an optional dependency.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.laplace import Laplace
from nullbayes.baselines.method import FitContext
from nullbayes.errors import ModelError
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.linalg.curvature import Curvature, Kronecker, KroneckerBlock, decomposed

_BATCH = 256


@dataclass(frozen=True)
class _Kronecker(Laplace):
    form = Kronecker

    def approximate(self, context: FitContext) -> Curvature:
        with torch.inference_mode(False):  # tensors of inference mode have no gradients
            return Kronecker(list(_factors(context.rows)))


class KroneckerLaplace(Baseline):
    """Laplace approximation with Kronecker factors of each layer, for linear and two-dimensional convolution layers.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    parameters, prior_precision, batch_fn, output_fn : optional
        Which parameters vary, by name (leave out those of other layers); the precision of the Gaussian prior (1.0,
        until ``optimize_prior_precision(held_out)`` chooses one); functions that read batches and outputs. See
        :class:`Baseline <nullbayes.baselines.Baseline>` for details.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> posterior = nb.baselines.KroneckerLaplace(model, nb.likelihoods.Regression(sigma_noise=1.0))
    >>> posterior = posterior.fit(x[:1], torch.zeros(1, 1))
    >>> posterior.functional_variance(x, exact=True).flatten()
    tensor([0.6667, 2.0000])
    """

    _method = _Kronecker()


class _Scaled(nn.Module):
    """The function whose rows are differentiated, as a module that takes pairs of inputs and targets.

    Its outputs are already scaled by a root of the likelihood's Hessian. So the sum of squares, whose Hessian is two,
    can stand for every likelihood.
    """

    def __init__(self, rows: OutputJacobian, leaves: list[Tensor]) -> None:
        super().__init__()
        self.inner, self._function, self._leaves = rows.network.module, rows.function, leaves

    def forward(self, pair: tuple[Any, Tensor]) -> Tensor:
        """Return scaled outputs."""
        return self._function(torch.cat([leaf.reshape(-1) for leaf in self._leaves]), *pair)


class _Batches:
    """The data in batches, with zeros as targets: the Hessian of the sum of squares does not depend on them."""

    def __init__(self, examples: Examples, width: int) -> None:
        self._examples, self._width = examples, width

    def __iter__(self) -> Iterator[tuple[tuple[Any, Tensor], Tensor]]:
        for start, stop in self._examples.ranges(_BATCH):
            pair = self._examples.read(start, stop)
            yield pair, torch.zeros(stop - start, self._width, device=self._examples.device)


def _factors(rows: OutputJacobian) -> Iterator[KroneckerBlock]:
    """Compute the factors of every layer, and iterate over their eigenpairs, for weights and biases."""
    operator = _curvlinops()
    network = copy.copy(rows.network)
    shared = {id(t): _plain(t) for t in (*network.module.parameters(), *network.module.buffers())}
    network.module = copy.deepcopy(network.module, shared)  # a copy, because hooks are set on it
    rows = OutputJacobian(network, rows.examples, rows.likelihood, hessian=True)
    named = dict(network.module.named_parameters())
    leaves = [named[name].detach().requires_grad_() for name in network.names]
    model = _Scaled(rows, leaves)
    mapping = _layers(operator, leaves, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside a dependency do not concern the user
        kfac = operator(
            model,
            nn.MSELoss(reduction="sum"),
            leaves,
            _Batches(rows.examples, rows.rows_per_example),
            fisher_type="type-2",
            check_deterministic=False,
            num_per_example_loss_terms=1,
            num_data=len(rows.examples),
            batch_size_fn=lambda pair: len(pair[1]),
        )
        try:
            with torch.enable_grad():
                kfac.compute_kronecker_factors()
        except ValueError as error:
            msg = f"There are no Kronecker factors of this network ({error}): use nb.baselines.LanczosLaplace."
            raise ModelError(msg) from error
    state = kfac.state_dict()
    starts = [sum(network.sizes[:i]) for i in range(len(network.sizes))]
    for layer, places in mapping.items():
        outputs = state["gradient_covariances"][layer].detach().double() / 2  # the Hessian of a square
        for kind, place in places.items():
            inputs = state["input_covariances"][layer].detach().double() if kind == "weight" else outputs.new_ones(1, 1)
            found = decomposed(starts[place], outputs, inputs)
            yield KroneckerBlock(found.column, *(part.to(network.dtype) for part in found[1:]))


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor that can have gradients: itself, or a copy if it was made in inference mode."""
    if not tensor.is_inference():
        return tensor
    return nn.Parameter(tensor.clone()) if isinstance(tensor, nn.Parameter) else tensor.clone()


def _layers(operator: Any, leaves: list[Tensor], model: nn.Module) -> dict[str, dict[str, int]]:
    """Return which parameters each layer has; refuse layers that have no factors."""
    try:
        mapping: dict[str, dict[str, int]] = operator.compute_parameter_mapping(leaves, model)
    except NotImplementedError as error:
        msg = (
            "Kronecker factors are known for nn.Linear and nn.Conv2d only: leave the parameters of other layers out "
            "with parameters=..., or use nb.baselines.LanczosLaplace."
        )
        raise ModelError(msg) from error
    places = [place for layer in mapping.values() for place in layer.values()]
    odd = next((name for name in mapping if getattr(model.get_submodule(name), "padding_mode", "zeros") != "zeros"), "")
    if odd or len(set(places)) != len(places):
        what = (
            f"layer {odd.removeprefix('inner.')!r} pads with other than zeros" if odd else "two layers share a weight"
        )
        msg = f"There are no Kronecker factors, because {what}: use nb.baselines.LanczosLaplace."
        raise ModelError(msg)
    return mapping


def _curvlinops() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own dependencies
            from curvlinops import KFACLinearOperator
    except ImportError as error:
        msg = f"KroneckerLaplace needs curvlinops ({error}): pip install 'nullbayes[kronecker]'."
        raise ImportError(msg) from error
    return KFACLinearOperator
