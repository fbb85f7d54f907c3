"""What decisions ask of a posterior, a baseline or a detector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from nullbayes.decisions.calibration import Calibration
from nullbayes.decisions.familiar import Familiar
from nullbayes.errors import NotFittedError
from nullbayes.jacobian.batches import BatchFn
from nullbayes.jacobian.network import Network
from nullbayes.likelihoods import Likelihood
from nullbayes.predictive import Mask, Prediction


class Scores(Protocol):
    """Which scores there are: those of predictions, that of membership, and the one to calibrate by default."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The scores of predictions."""

    @property
    def membership(self) -> str | None:
        """The score that says how far an input is from the training data."""

    @property
    def calibrated(self) -> str:
        """The score that is calibrated by default."""


class Posterior(Protocol):
    """Predictions and scores of a network, and what a fit and a calibration have left behind."""

    _network: Network
    _batch_fn: BatchFn | None
    _likelihood: Likelihood
    _familiar: Familiar | None
    _calibration: Calibration | None

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs mean."""

    @property
    def n_samples(self) -> int:
        """The number of samples; 0 for a method that is only a score."""

    @property
    def prior_precision(self) -> float:
        """The precision in use."""

    @property
    def temperature(self) -> float:
        """The temperature in use."""

    @property
    def _scoring(self) -> Scores: ...

    def _check_fitted(self) -> Any: ...

    def _need_samples(self) -> None: ...

    def _pieces(self, data: Any) -> Iterator[tuple[Any, Tensor]]: ...

    def _predict(self, x: Any, *, mask: Mask = None) -> Prediction: ...

    def _scored(self, prediction: Prediction, kind: str, per: str, mask: Mask) -> Tensor: ...

    def ood_score(self, x: Any, kind: str | None = None, *, per: str = "input", mask: Mask = None) -> Tensor:
        """Return one score per input."""


def need_familiar(posterior: Posterior) -> Familiar:
    """Return what is remembered of the training data, which not every file and fit has."""
    if posterior._familiar is None:
        msg = "Nothing is known of the features of the training data: fit again, or name another kind of score."
        raise NotFittedError(msg)
    return posterior._familiar
