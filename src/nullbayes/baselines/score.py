"""What it takes to answer with a score in closed form instead of samples."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Never

import torch
from torch import Tensor

from nullbayes.baselines.base import Baseline
from nullbayes.errors import SettingsError
from nullbayes.posteriors.predictions import FitCheck
from nullbayes.precision import full_precision
from nullbayes.predictive import Mask


class Scored(Baseline):
    """A method with a score of its own, named ``_score``, on the rows of the outputs at an input; abstract."""

    _score: str

    @abstractmethod
    def _score_rows(self, rows: Tensor, x: Any) -> Tensor:  # (n, O, P) -> (n,)
        """Return the score of each example from the rows of its outputs."""

    @full_precision()
    def _own_score(self, x: Any, per: str = "input", mask: Mask = None) -> Tensor:  # (N,)
        _ = self.directions  # says what to do before fit
        if per != "input" or not (mask is None or (isinstance(mask, str) and mask == "all")):
            msg = f'The score "{self._score}" is of all outputs of an input: it has no positions and takes no mask.'
            raise SettingsError(msg)
        return torch.cat([self._score_rows(rows, piece) for piece, rows in self._row_pieces(x)])


class ScoreOnly(Scored):
    """A method that has a score and nothing else: no samples, no predictions, no prior; abstract."""

    _has_prior = False
    _least_samples = 1
    _fewest = 0

    def ood_score(
        self,
        x: Any,
        kind: str | None = None,
        *,
        per: str = "input",
        mask: Mask = None,
        pred_type: str = "linearized",
    ) -> Tensor:  # (N,)
        """Return one number an input: higher is stranger.

        ``kind`` is the method's own, "local_ensemble" or "sketched_lanczos", which is the default.
        """
        if kind not in (None, self._score):
            msg = f"kind must be one of {self._score}, the only score of {type(self).__name__}, not {kind!r}."
            raise SettingsError(msg)
        return self._own_score(x, per, mask)

    def predict(
        self,
        x: Any,
        *,
        pred_type: str = "linearized",
        n_samples: int | None = None,
        link_approx: str | None = None,
        mask: Mask = None,
    ) -> Never:
        """Refuse: a score is no distribution over predictions."""
        _ = self.directions  # says what to do before fit
        msg = (
            f"{type(self).__name__} is a score and makes no predictions: for samples in the same space use "
            "nb.ProjectedPosterior with projector=nb.projectors.Lanczos(rank=...)."
        )
        raise SettingsError(msg)

    __call__ = predict

    def check_fit(self, loader: Any, targets: Any = None) -> FitCheck:
        """Refuse: without predictions there is nothing to check."""
        return self.predict(loader)

    def sample(self, n: int | None = None) -> Never:
        """Refuse: there are no samples."""
        self.predict(n)

    def _no_samples(self) -> None:
        """Stand for samples, of which there are none: (0, P)."""
        self._directions = self._network.theta.new_zeros(0, self._network.n_parameters)
