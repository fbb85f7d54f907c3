r"""The Jacobians of a network on its training data, as rows.

``OutputJacobian`` has one row for each output of each example, ``LossJacobian`` one gradient of the loss for each
example. Both can hold their rows, form them again block by block, or only multiply with them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nullbayes.errors import ModelError, SettingsError
from nullbayes.jacobian.data import BatchFn, Examples
from nullbayes.jacobian.layers import LayerRows
from nullbayes.jacobian.network import Network, Selection
from nullbayes.jacobian.products import product_examples, pull, push
from nullbayes.likelihoods import Likelihood, LossFn, resolve
from nullbayes.linalg.held import HeldBlock, HeldRows, StreamedBlock
from nullbayes.linalg.matrix_free import ProductBlock
from nullbayes.linalg.pieces import Piece, normal_cost
from nullbayes.linalg.rows import Block, Rows
from nullbayes.precision import full_precision
from nullbayes.types import RowFunction, Storage

Formed = Literal["form", "products"]
_WALK_BYTES = 2**29  # of rows formed in passing, at most


class JacobianRows(Rows):
    """Rows that are derivatives of a function of the parameters on each example.

    Parameters
    ----------
    network, examples, likelihood
        Whose derivatives, on which data.
    function : RowFunction
        ``(flat parameters, inputs, targets) -> (n, granule)``.
    granule : int
        Rows an example has.
    storage : "form" or "products"
        What a block is: its entries, formed when it is asked for; or two products, by JVP and VJP, that never form it.

    Attributes
    ----------
    pass_bytes : int
        How much of a block may be formed at a time, where blocks are not held.
    """

    pass_bytes: int = 2**62

    def __init__(
        self,
        network: Network,
        examples: Examples,
        likelihood: Likelihood,
        function: RowFunction,
        *,
        granule: int,
        storage: Formed = "form",
    ) -> None:
        if storage not in ("form", "products"):
            msg = f'storage must be "form" or "products", not {storage!r}; .keep() holds all rows.'
            raise SettingsError(msg)
        self.network, self.examples, self.likelihood, self.function = network, examples, likelihood, function
        self.granule = granule
        self.storage: Storage = storage
        self.n_rows, self.n_columns = len(examples) * granule, network.n_parameters
        self.dtype, self.device = network.dtype, network.device
        few = examples.read(0, min(3, len(examples)))
        self._layers = LayerRows(network, function, *few)
        self._compare_modes(*few)

    @property
    def route(self) -> str:
        """Say how the rows come about."""
        return "jvp and vjp" if self.storage == "products" else self._layers.route

    def block(self, start: int, stop: int) -> Block:
        """Return the rows of whole examples, formed at once, part by part, or never, as memory allows."""
        first, last = start // self.granule, stop // self.granule
        like = self.network.theta.new_empty(0)
        if self.storage == "form":
            at_once = max(1, self.pass_bytes // self._bytes_an_example)
            if last - first <= at_once:
                return self._held(first, last)
            ranges = self.examples.ranges(at_once, first, last)
            parts = tuple(slice(a * self.granule - start, b * self.granule - start) for a, b in ranges)

            def form(part: slice) -> HeldBlock:
                return self._held((start + part.start) // self.granule, (start + part.stop) // self.granule)

            return StreamedBlock(parts, form, stop - start, like)
        return ProductBlock(
            n_rows=stop - start,
            n_columns=self.n_columns,
            forward=lambda vectors: self._push(vectors, first, last),
            transposed=lambda vectors: self._pull(vectors, first, last),
            like=like,
        )

    def _held(self, first: int, last: int) -> HeldBlock:
        pieces, n = self._form(first, last), (last - first) * self.granule
        return HeldBlock(pieces, n, self.n_columns, self.granule, self.network.theta.new_empty(0))

    @property
    def walk_rows(self) -> int:
        """Rows of as many examples as may be formed at a time."""
        if self.storage == "products":
            return max(self.granule, min(8192, self.n_rows))
        at_once = max(1, min(_WALK_BYTES, self.pass_bytes) // self._bytes_an_example)
        return min(self.n_rows, at_once * self.granule)

    def keep(self, *, half: bool = False, host: bool = False) -> Rows:
        """Return the same rows, held in memory: factors for linear layers, entries for the rest."""
        place = torch.device("cpu") if host else self.device
        return HeldRows(
            self._form(0, len(self.examples), half=half, place=place), n_rows=self.n_rows, n_columns=self.n_columns,
            like=self.network.theta, granule=self.granule, block_rows=self.block_rows,
            reference=self if half else None,
        )  # fmt: skip

    def stored(self, storage: Storage) -> Rows:
        """Return the same rows where a plan wants them."""
        if storage in ("form", "products"):
            other = copy.copy(self)
            other.storage = storage
            return other
        return self.keep(half=storage == "half", host=storage == "host")

    def kept_bytes(self, *, half: bool = False) -> int:
        """Return the bytes that :meth:`keep` takes."""
        return sum((p.halved() if half else p).n_bytes() for p in self._example_pieces) * len(self.examples)

    def gram_cost(self) -> float:
        """Return the floating-point operations behind one entry of a Gram matrix."""
        return sum(piece.costs()[0] for piece in self._example_pieces)

    def product_cost(self) -> float:
        """Return the floating-point operations of one row times one vector."""
        return sum(piece.costs()[1] for piece in self._example_pieces)

    def normal_cost(self) -> float:
        """Return the floating-point operations of the normal matrix, summed over all rows."""
        factors = [f for piece in self._example_pieces for f in piece.factors(self.granule)]
        return normal_cost(factors) * len(self.examples)

    @cached_property
    def _example_pieces(self) -> list[Piece]:
        """The pieces of one example: what is held of it, and what products cost."""
        return self._layers.pieces(*self.examples.read(0, 1))

    @property
    def working_bytes(self) -> int:
        """What may be in memory only while rows are formed."""
        return self._layers.working_bytes

    @working_bytes.setter
    def working_bytes(self, value: int) -> None:
        self._layers.working_bytes = value

    @property
    def forming_bytes(self) -> int:
        """What is in memory only while rows are formed."""
        return min(len(self.examples), self._layers.examples_at_a_time) * self._layers.example_bytes

    @property
    def _bytes_an_example(self) -> int:
        return max(1, sum(piece.n_bytes() for piece in self._example_pieces))

    def _form(
        self, first: int, last: int, *, half: bool = False, place: torch.device | None = None
    ) -> tuple[Piece, ...]:
        """Form the rows of a range of examples, a chunk at a time, into tensors of the final size."""
        whole: list[Piece] = []
        for start, stop in self.examples.ranges(self._layers.examples_at_a_time, first, last):
            part = self._layers.pieces(*self.examples.read(start, stop))
            if half:
                part = [piece.halved() for piece in part]
            if not whole:
                whole = [piece.allocate((last - first) * self.granule, place or self.device) for piece in part]
            rows = slice((start - first) * self.granule, (stop - first) * self.granule)
            for target, piece in zip(whole, part, strict=True):
                target.take(rows).fill(piece)
        return tuple(whole)

    @full_precision()
    def _compare_modes(self, x: Any, y: Tensor) -> None:
        """Refuse a network that reverse mode, for the rows, and forward mode, for predictions, see differently."""
        theta = self.network.theta
        generator = torch.Generator().manual_seed(0)
        vector = torch.randn(1, self.n_columns, generator=generator, dtype=torch.float64, device="cpu").to(theta)
        try:
            ahead = push(self.function, theta, x, y, vector).flatten(1)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operation without forward mode: predictions go by rows as well
            return
        block = HeldBlock(tuple(self._layers.pieces(x, y)), ahead.shape[1], self.n_columns, self.granule, theta)
        back = block.mv(vector)
        if float((ahead - back).norm()) > torch.finfo(theta.dtype).eps ** 0.4 * float(ahead.norm() + back.norm()):
            msg = (
                "Part of the network runs under torch.no_grad(), so that its parameters look as if they had no "
                "influence: leave them out with parameters=... or requires_grad_(False), or run it with gradients."
            )
            raise ModelError(msg)

    def _chunks(self, n_vectors: int, first: int, last: int) -> Iterable[tuple[int, int]]:
        return self.examples.ranges(product_examples(self.device, n_vectors), first, last)

    def _push(self, vectors: Tensor, first: int, last: int) -> Tensor:  # (S, P) -> (S, m)
        parts = [
            push(self.function, self.network.theta, *self.examples.read(a, b), vectors).flatten(1)
            for a, b in self._chunks(len(vectors), first, last)
        ]
        return torch.cat(parts, dim=1)

    def _pull(self, weights: Tensor, first: int, last: int) -> Tensor:  # (S, m) -> (S, P)
        weights = weights.reshape(len(weights), last - first, self.granule)
        result = weights.new_zeros(len(weights), self.n_columns)
        for a, b in self._chunks(len(weights), first, last):
            part = weights[:, a - first : b - first]
            result += pull(self.function, self.network.theta, *self.examples.read(a, b), part)
        return result


def _open(
    model: nn.Module | Network,
    loader: Iterable[Any] | Examples,
    likelihood: str | Likelihood | LossFn,
    parameters: Selection,
    batch_fn: BatchFn | None,
) -> tuple[Network, Examples, Likelihood]:
    """Check model, data and likelihood against each other, and fit what the likelihood takes from the data."""
    network = model if isinstance(model, Network) else Network(model, parameters)
    examples = loader if isinstance(loader, Examples) else Examples(loader, batch_fn, network.device)
    network.check_examples(examples.read(0, min(8, len(examples)))[0])
    chosen = resolve(likelihood)
    outputs, targets = [], []
    for start, stop in examples.ranges(1024):
        x, y = examples.read(start, stop)
        outputs.append(network.outputs(x))
        targets.append(y)
        if not torch.isfinite(outputs[-1]).all():
            msg = f"The network answers NaN or Inf on training examples {start} to {stop}."
            raise ModelError(msg)
        chosen.check(outputs[-1], y)
    return network, examples, chosen.fitted(torch.cat(outputs), torch.cat(targets))


class OutputJacobian(JacobianRows):
    r"""One row for each output of each example: :math:`\partial f_o(\theta, x_n) / \partial \theta`.

    Parameters
    ----------
    model : nn.Module
        The trained network.
    loader : iterable of batches
        The training data, in fixed order.
    likelihood : str, Likelihood or callable
        Checked against outputs and targets; gives the Hessian.
    hessian : bool
        Scale the rows of each example by a root of the likelihood's Hessian in output space, so that
        :math:`A^\top A` is the generalized Gauss-Newton matrix proper. The paper's default is the identity.
    parameters, batch_fn, storage
        See :class:`Network <nullbayes.jacobian.network.Network>` and :class:`JacobianRows`.
    """

    def __init__(
        self,
        model: nn.Module | Network,
        loader: Iterable[Any] | Examples,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        hessian: bool = False,
        parameters: Selection = None,
        batch_fn: BatchFn | None = None,
        storage: Formed = "form",
    ) -> None:
        network, examples, fitted = _open(model, loader, likelihood, parameters, batch_fn)

        def outputs(flat: Tensor, x: Any, y: Tensor) -> Tensor:
            return network(flat, x)

        def scaled(flat: Tensor, x: Any, y: Tensor) -> Tensor:
            values = network(flat, x)
            root = fitted.hessian_root(values.detach(), y)  # once through the network, so that rows go by layers
            return (root @ values[..., None])[..., 0]

        self.hessian = hessian
        width = network.outputs(examples.read(0, 1)[0]).shape[1]
        function: Callable[..., Tensor] = scaled if hessian else outputs
        super().__init__(network, examples, fitted, function, granule=width, storage=storage)


class LossJacobian(JacobianRows):
    r"""One row for each example: the gradient of its loss, :math:`\partial \ell(f(\theta, x_n), y_n)/\partial \theta`.

    Parameters
    ----------
    model, loader, likelihood, parameters, batch_fn, storage
        As for :class:`OutputJacobian`; the likelihood may be any per-example loss ``(outputs, targets) -> (n,)``.
    """

    def __init__(
        self,
        model: nn.Module | Network,
        loader: Iterable[Any] | Examples,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        parameters: Selection = None,
        batch_fn: BatchFn | None = None,
        storage: Formed = "form",
    ) -> None:
        network, examples, fitted = _open(model, loader, likelihood, parameters, batch_fn)

        def losses(flat: Tensor, x: Any, y: Tensor) -> Tensor:
            return fitted.loss(network(flat, x), y)[:, None]

        super().__init__(network, examples, fitted, losses, granule=1, storage=storage)
