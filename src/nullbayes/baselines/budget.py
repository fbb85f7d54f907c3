"""Methods that hold a few vectors of the size of the parameters, as many as a budget allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from nullbayes.baselines.base import Baseline, Work
from nullbayes.errors import SettingsError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.network import OutputFn, Selection
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.posteriors.header import Fields, count

_COPIES = 3  # of the vectors, while they are found


class Budgeted(Baseline):
    """A method with a budget of numbers to hold.

    Parameters
    ----------
    model, likelihood, parameters, prior_precision, batch_fn, output_fn
        See :class:`Baseline <nullbayes.baselines.base.Baseline>`.
    memory_budget : int
        Numbers that may be held, as a multiple of the number of parameters; the paper takes 300 for all such methods.
    """

    _header_fields: ClassVar[Fields] = {"seed": count, "memory_budget": count}

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood | LossFn = "classification",
        *,
        parameters: Selection = None,
        prior_precision: float = 1.0,
        batch_fn: BatchFn | None = None,
        output_fn: OutputFn | None = None,
        memory_budget: int = 300,
    ) -> None:
        super().__init__(
            model, likelihood, parameters=parameters, prior_precision=prior_precision, batch_fn=batch_fn,
            output_fn=output_fn,
        )  # fmt: skip
        if memory_budget < 1:
            msg = f"memory_budget must be at least 1, one vector of the size of the parameters, not {memory_budget}."
            raise SettingsError(msg)
        self._budget = int(memory_budget)

    def _rank(self, work: Work) -> int:
        """Return how many vectors of full size the budget allows, if the memory limit does, too."""
        rank = min(self._budget, work.rows.n_rows, work.rows.n_columns)
        self._check_memory(_COPIES * rank * work.rows.n_columns, work)
        return rank

    def _check_memory(self, numbers: int, work: Work) -> None:
        needed = numbers * work.rows.dtype.itemsize
        if needed > work.available:
            msg = (
                f"{type(self).__name__} with memory_budget={self._budget} takes {needed / 2**20:,.1f} MiB, more than "
                f"the memory limit of {work.available / 2**20:,.1f} MiB: lower memory_budget, or raise memory_limit."
            )
            raise SettingsError(msg)

    def _header(self) -> dict[str, Any]:
        return {**super()._header(), "memory_budget": self._budget}

    def _restore(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        self._budget = int(header["memory_budget"])
        super()._restore(tensors, header)
