r"""Local ensembles (Madras, Atwood and D'Amour 2020).

The score of an input is the length of the part of its prediction gradients along which the loss is flat: the part
outside the eigenvectors of largest curvature, which the Lanczos process finds. The authors take the Hessian of the
loss. Here it is the Gauss-Newton matrix, which is positive semi-definite, whose null space keeps the predictions (the
paper's Section 2), and which differs little where the network fits its data. With several outputs the squared lengths
add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from nullbayes.baselines.base import Baseline, LikelihoodLike, Options
from nullbayes.baselines.laplace import fitting
from nullbayes.baselines.method import Context, Learned, Method, Question, check_budget
from nullbayes.jacobian.network import Network
from nullbayes.linalg.curvature import LowRank, lanczos_pairs
from nullbayes.precision import full_precision


@dataclass(frozen=True)
class _Outside(Method[LowRank]):
    memory_budget: int = 300

    has_prior = False
    least_samples = 1
    scores = ("local_ensemble",)
    row_score = "local_ensemble"

    def __post_init__(self) -> None:
        check_budget(self.memory_budget)

    @full_precision()
    def fit(self, context: Context) -> Learned[LowRank]:
        rank = context.vectors(self.memory_budget)
        with context.meter.phase("factors"):
            pairs = lanczos_pairs(context.held(context.available // 4), rank, context.generator())
        return Learned(pairs, pairs.rank, "outside the leading eigenvectors")

    def score_rows(self, state: LowRank, rows: Tensor, question: Question) -> Tensor:
        return state.outside(rows.flatten(0, 1)).view(rows.shape[:2]).sum(1).sqrt()

    def tensors(self, state: LowRank) -> dict[str, Tensor]:
        return state.tensors()

    def restored(self, tensors: Mapping[str, Tensor], network: Network, seed: int) -> LowRank:
        return fitting(LowRank(tensors["basis"], tensors["values"]), network)


class LocalEnsemble(Baseline):
    """A score: how much of an input's gradients lies outside all directions of large curvature.

    Parameters
    ----------
    model, likelihood, parameters, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`.
    memory_budget : int
        How many eigenvectors to find; see :class:`LanczosLaplace <nullbayes.baselines.LanczosLaplace>`.
    """

    _method = _Outside()
    _fewest = 0

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
