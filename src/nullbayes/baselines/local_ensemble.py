r"""Two scores of an input: the length of its prediction gradients outside the directions of large curvature.

:class:`LocalEnsemble` (Madras, Atwood and D'Amour 2020) finds the eigenvectors of largest curvature by the Lanczos
process. The authors take the Hessian of the loss; here it is the Gauss-Newton matrix :math:`A^\top A`. It is positive
semi-definite, its null space keeps the predictions (the paper's Section 2), and it differs little from the Hessian
where the network fits its data. With several outputs the squared lengths add up.

:class:`SketchedLanczos` (Miani, Roy and Hauberg 2024) runs the process with two vectors in memory. Each vector is
sketched as it comes, :math:`S v_i`, and the sketches are made orthonormal, which repairs the orthogonality that the
process has lost. The score :math:`\|J(x)\|^2 - \|U_S^\top S J(x)^\top\|^2` estimates the squared length, with far more
eigenvectors than would fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.method import FitContext, Learned, LikelihoodLike, Method, Options, Question, check_counts
from nullbayes.errors import SettingsError
from nullbayes.jacobian.network import Network
from nullbayes.linalg.curvature import LowRank
from nullbayes.linalg.lanczos import lanczos_process
from nullbayes.linalg.sketch import Sketch, padded_size
from nullbayes.linalg.spectral import right_singular
from nullbayes.precision import full_precision

_PROPORTION = 10 / 3  # of rank to budget, and of parameters to sketch: the paper's 1,000 vectors of 0.3 P within 300 P


@dataclass(frozen=True)
class _Outside(Method[LowRank]):
    memory_budget: int = 300

    has_prior = False
    fewest = 0
    of_predictions = ()
    own_score = "local_ensemble"

    def __post_init__(self) -> None:
        check_counts(vars(self))

    @full_precision()
    def fit(self, context: FitContext) -> Learned[LowRank]:
        pairs = context.leading_pairs(self.memory_budget)
        return Learned(pairs, pairs.rank, "outside the leading eigenvectors")

    def score_rows(self, state: LowRank, rows: Tensor, question: Question) -> Tensor:
        return state.outside(rows.flatten(0, 1)).view(rows.shape[:2]).sum(1).sqrt()

    def tensors(self, state: LowRank) -> dict[str, Tensor]:
        return state.tensors()

    def restored(self, tensors: Mapping[str, Tensor], network: Network, seed: int) -> LowRank:
        pairs = LowRank(tensors["basis"], tensors["values"])
        if pairs.n_columns != network.n_parameters:
            msg = f"vectors of {pairs.n_columns} numbers"
            raise ValueError(msg)
        return pairs


class LocalEnsemble(Baseline):
    """A score: how much of an input's gradients lies outside all directions of large curvature.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    memory_budget : int
        How many eigenvectors of the size of the parameters to find and to hold in memory.
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Examples
    --------
    The gradient at the training input scores zero, and one orthogonal to it scores its own length:

    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> noise = nb.likelihoods.Regression(sigma_noise=1.0)
    >>> posterior = nb.baselines.LocalEnsemble(model, noise, memory_budget=10).fit(x[:1], torch.zeros(1, 1))
    >>> posterior.ood_score(x).round(decimals=4)
    tensor([0.0000, 1.4142])
    """

    _method = _Outside()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        memory_budget: int = 300,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _Outside(int(memory_budget))


@dataclass(frozen=True)
class Sketched:
    """A random map and an orthonormal basis (k, s) of the sketched vectors."""

    sketch: Sketch
    basis: Tensor


@dataclass(frozen=True)
class _SketchedLanczos(Method[Sketched]):
    memory_budget: int = 300
    rank: int | None = None
    sketch_size: int | None = None

    has_prior = False
    fewest = 0
    of_predictions = ()
    own_score = "sketched_lanczos"

    def __post_init__(self) -> None:
        check_counts(vars(self))

    @full_precision()
    def fit(self, context: FitContext) -> Learned[Sketched]:
        rank, size = self._sizes(context)
        sketch = Sketch(context.rows.n_columns, size, context.seed, context.rows.device)
        sketched = context.network.theta.new_empty(rank, size)

        def keep(k: int, vector: Tensor) -> None:
            sketched[k] = sketch(vector[None])[0]

        rows = context.lanczos_rows(self.memory_budget, 1, 2 * rank)
        combinations = lanczos_process(rows, rank, context.generator(), keep).in_row_space()
        found = len(combinations)
        basis = _orthonormal(combinations.T.to(sketched) @ sketched[:found])
        reason = f"{found:,} Lanczos vectors, sketched to {size:,} numbers"
        return Learned(Sketched(sketch, basis), len(basis), reason)

    def _sizes(self, context: FitContext) -> tuple[int, int]:
        """Return rank and sketch size."""
        p, budget = context.rows.n_columns, self.memory_budget
        usual = min(round(_PROPORTION * budget), math.isqrt(budget * p))  # no more than the sketch is long
        rank = min(self.rank or usual, context.rows.n_rows, p)
        size = self.sketch_size or min(padded_size(p), budget * p // rank)
        if rank > size:
            msg = f"A sketch of {size:,} numbers cannot tell {rank:,} vectors apart: use a smaller rank."
            raise SettingsError(msg)
        if rank * size > budget * p:
            msg = (
                f"{rank:,} vectors of {size:,} numbers exceed memory_budget={budget} times {p:,} parameters: "
                "use a smaller rank or sketch_size, or a larger memory_budget."
            )
            raise SettingsError(msg)
        context.check_budget(budget, 2 * rank * size + 6 * padded_size(p))
        return rank, size

    def score_rows(self, state: Sketched, rows: Tensor, question: Question) -> Tensor:
        flat = rows.flatten(0, 1)
        seen = state.sketch(flat) @ state.basis.T
        squares = flat.square().sum(1) - seen.square().sum(1)
        return squares.view(rows.shape[:2]).sum(1)

    def tensors(self, state: Sketched) -> dict[str, Tensor]:
        return {"sketched": state.basis}

    def restored(self, tensors: Mapping[str, Tensor], network: Network, seed: int) -> Sketched:
        basis = tensors["sketched"]
        return Sketched(Sketch(network.n_parameters, basis.shape[1], seed, basis.device), basis)


def _orthonormal(vectors: Tensor) -> Tensor:  # (k, s) -> (r, s)
    """Return an orthonormal basis of the span, without directions that only rounding keeps apart."""
    if len(vectors) == 0:
        return vectors
    lengths, basis = right_singular(vectors)
    orthonormal: Tensor = basis[lengths > torch.finfo(vectors.dtype).eps ** 0.25 * lengths[0]]
    return orthonormal


class SketchedLanczos(Baseline):
    """The score of local ensembles with more, shorter vectors for the same memory.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", "binary", "multilabel" or "regression".
    memory_budget : int
        How many numbers may be held, as a multiple of the number of parameters: rank times sketch size.
    rank : int, optional
        The number of Lanczos vectors; by default ten thirds of the budget.
    sketch_size : int, optional
        How many numbers each vector is sketched to; by default as many as the rank leaves of the budget.
    parameters, batch_fn, output_fn, prior_precision : optional
        As for :class:`Baseline <nullbayes.baselines.Baseline>`; leave the last one out, because there is no prior.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    >>> noise = nb.likelihoods.Regression(sigma_noise=1.0)
    >>> posterior = nb.baselines.SketchedLanczos(model, noise, memory_budget=10).fit(x[:1], torch.zeros(1, 1))
    >>> posterior.ood_score(x).round(decimals=4)  # squared lengths
    tensor([0., 2.])
    """

    _method = _SketchedLanczos()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        memory_budget: int = 300,
        rank: int | None = None,
        sketch_size: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _SketchedLanczos(int(memory_budget), rank and int(rank), sketch_size and int(sketch_size))
