r"""The published algorithm, written as well as it can be with this library's products, to compare the library with.

"Bayes without Underfitting" projects noise on the kernel of one small block of examples after the other. For each block
of 16 examples the (pseudo-)inverse of its Gram matrix is computed once and kept; a sweep then takes, for every block
and every sample, one product with the Jacobian (JVP) and one with its transpose (VJP):

.. math:: v \leftarrow v - J_b^\top (J_b J_b^\top)^+ J_b\, v.

The order is fixed, nothing is accelerated, rows are never held. What is better here than in the released code: no
example is dropped, the cut is relative, the Gram matrices are formed from rows and factored in float64, the samples go
through one vectorized product, and on CUDA a block step is recorded once as a graph and replayed, so that no time goes
to launching kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import nullbayes as nb
from nullbayes.experiments.measuring import Clock

EXAMPLES = 16  # of a block, in the paper's experiments
_TOGETHER = 256  # Gram matrices inverted at a time
_CHUNK_ENTRIES = 2**27  # of rows formed at a time for Gram matrices on CUDA


class BlockSweeps:
    """Sweeps over blocks of rows, with the pseudo-inverse of each block's Gram matrix kept.

    Parameters
    ----------
    rows : nb.Rows
        Whose products to take.
    block_rows : int
        Rows a block.
    formed : nb.Rows, optional
        The same rows in a form that gives Gram matrices sooner.
    cutoff : float, optional
        Eigenvalues up to this share of a block's largest are taken for zero; by default the eps of the rows' dtype,
        beyond which products in that precision carry no digits.
    """

    def __init__(
        self, rows: nb.Rows, block_rows: int, *, formed: nb.Rows | None = None, cutoff: float | None = None
    ) -> None:
        self.rows = rows
        size = max(1, block_rows // rows.rows_per_example) * rows.rows_per_example
        self.cuts = [(start, min(start + size, rows.n_rows)) for start in range(0, rows.n_rows, size)]
        self.cutoff = torch.finfo(rows.dtype).eps if cutoff is None else cutoff
        with Clock(rows.device) as clock:
            self.inverses = self._invert(_grams(rows if formed is None else formed, self.cuts))
        self.factor_seconds = clock.seconds

    def _invert(self, grams: list[Tensor]) -> list[Tensor]:
        """Return pseudo-inverses, many of one size at a time; the last may be smaller."""
        inverses: list[Tensor] = []
        for group in (*(grams[:-1][i : i + _TOGETHER] for i in range(0, len(grams) - 1, _TOGETHER)), grams[-1:]):
            inverses.extend(torch.linalg.pinv(torch.stack(group), hermitian=True, rtol=self.cutoff).to(self.rows.dtype))
        return inverses

    def sweep(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Project on the kernel of each block in turn."""
        for (start, stop), inverse in zip(self.cuts, self.inverses, strict=True):
            block = self.rows.block(start, stop)
            vectors = vectors - block.rmv(block.mv(vectors) @ inverse)
        return vectors


def _grams(rows: nb.Rows, cuts: list[tuple[int, int]]) -> list[Tensor]:
    """Return the Gram matrix of each block, in float64; on CUDA many blocks at a time."""
    size = cuts[0][1] - cuts[0][0]
    together = max(1, _CHUNK_ENTRIES // (size * rows.n_columns)) if rows.device.type == "cuda" else 1
    full = sum(stop - start == size for start, stop in cuts)
    grams: list[Tensor] = []
    while len(grams) < len(cuts):
        first = len(grams)
        last = min(full, first + together)
        if last - first > 1:
            entries = rows.block(cuts[first][0], cuts[last - 1][1]).dense().view(last - first, size, -1).double()
            grams.extend(entries @ entries.mT)
        else:
            grams.append(rows.block(*cuts[first]).gram(torch.float64))
    return grams


class PublishedSweeps(BlockSweeps):
    """The published algorithm for a network.

    Parameters
    ----------
    kind : type
        ``nb.OutputJacobian`` or ``nb.LossJacobian``.
    model, x, y
        The network and its training data, on its device.
    examples : int
        Of a block.
    """

    def __init__(self, kind: type, model: nn.Module, x: Tensor, y: Tensor, *, examples: int = EXAMPLES) -> None:
        rows = kind(model, [(x, y)], storage="matrix_free")
        super().__init__(rows, examples * rows.rows_per_example, formed=kind(model, [(x, y)]))
        self._kind, self._model, self._x, self._y, self._examples = kind, model, x, y, examples
        self._step: _Recorded | None = None
        self.unrecorded: str | None = None  # why block steps could not be recorded, where that was tried

    def record(self, noise: Tensor) -> None:
        """Record a block step for noise of this shape, on CUDA; sweeps then replay it."""
        self._step = None
        if noise.device.type != "cuda" or len(self._x) < self._examples:
            return
        x, y = self._x[: self._examples].clone(), self._y[: self._examples].clone()
        rows = self._kind(self._model, [(x, y)], storage="matrix_free")
        try:
            self._step = _Recorded(rows, x, y, self.inverses[0].clone(), noise.clone())
        except RuntimeError as error:  # a network that cannot be recorded: slower, but the same algorithm
            self.unrecorded = str(error).splitlines()[0]

    def sweep(self, vectors: Tensor) -> Tensor:  # (S, P) -> (S, P)
        """Project on the kernel of each block in turn."""
        step = self._step
        if step is None or step.vectors.shape != vectors.shape:
            return super().sweep(vectors)
        step.vectors.copy_(vectors)
        for i, inverse in enumerate(self.inverses):
            start, stop = i * self._examples, (i + 1) * self._examples
            if stop <= len(self._x):
                step(self._x[start:stop], self._y[start:stop], inverse)
            else:  # the tail of the data is data
                block = self.rows.block(*self.cuts[i])
                step.vectors.sub_(block.rmv(block.mv(step.vectors) @ inverse))
        return step.vectors.clone()


class _Recorded:
    """One block step on CUDA as a graph: what it reads is copied into the places that it was recorded with.

    The products are taken here and not by the library, which looks at data and results on the way, for which a graph
    has no place.
    """

    def __init__(
        self, rows: nb.OutputJacobian | nb.LossJacobian, x: Tensor, y: Tensor, inverse: Tensor, vectors: Tensor
    ) -> None:
        self.x, self.y, self.inverse, self.vectors = x, y, inverse, vectors
        self._rows = rows
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as the recording wants it: a few steps beforehand, on a stream of their own
            for _ in range(3):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._compute()

    def _compute(self) -> None:
        self.vectors.sub_(block_step(self._rows, self.x, self.y, self.inverse, self.vectors))

    def __call__(self, x: Tensor, y: Tensor, inverse: Tensor) -> None:
        """Take one block step."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.inverse.copy_(inverse)
        self._graph.replay()


def block_step(
    rows: nb.OutputJacobian | nb.LossJacobian, x: Tensor, y: Tensor, inverse: Tensor, vectors: Tensor
) -> Tensor:  # (S, P) -> (S, P)
    """Return what a block takes away from each vector: one JVP and one VJP for each, and nothing but these."""
    theta = rows.network.theta

    def function(flat: Tensor) -> Tensor:  # (P,) -> (n, rows_per_example)
        return rows.function(flat, x, y)

    def forward(vector: Tensor) -> Tensor:
        tangent: Tensor = jvp(function, (theta,), (vector,))[1]
        return tangent

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        changes = vmap(forward)(vectors).flatten(1) @ inverse
        backward = vjp(function, theta)[1]
        taken: Tensor = vmap(lambda weight: backward(weight)[0])(changes.view(len(vectors), len(y), -1))
        return taken


@dataclass(frozen=True)
class Run:
    """How far sweeps came.

    Attributes
    ----------
    directions : Tensor (S, P)
        What is left of the noise.
    residual : float
        The largest ``|A v| / |A noise|`` of a sample, on all rows.
    reached : bool
        Whether that is the tolerance; if not, the budget ended first and ``seconds`` is a lower bound.
    sweeps : int
        Taken.
    seconds, factor_seconds, measure_seconds : float
        For factors and sweeps; of it, for the factors; and, not counted, for measuring the residual.
    """

    directions: Tensor
    residual: float
    reached: bool
    sweeps: int
    seconds: float
    factor_seconds: float
    measure_seconds: float


def run_until(sweeps: BlockSweeps, noise: Tensor, *, tolerance: float, budget: float) -> Run:
    """Sweep until every sample's residual is within the tolerance, or the seconds are spent; at least once.

    The residual is measured after each of the first sweeps, later after every tenth more, and never counted.
    """
    rows = sweeps.rows
    working, measuring = Clock(rows.device), Clock(rows.device)
    working.seconds = sweeps.factor_seconds
    with measuring:
        before = rows.norms(noise)
    directions, k, next_check = noise, 0, 1
    while True:
        with working:
            directions = sweeps.sweep(directions)
        k += 1
        spent = working.seconds >= budget
        if k < next_check and not spent:
            continue
        next_check = k + max(1, k // 10)
        with measuring:
            ratio = torch.where(before > 0, rows.norms(directions) / before, 0.0)
            residual = float(ratio.max())
        if residual <= tolerance or spent:
            return Run(
                directions,
                residual,
                reached=residual <= tolerance,
                sweeps=k,
                seconds=working.seconds,
                factor_seconds=sweeps.factor_seconds,
                measure_seconds=measuring.seconds,
            )
