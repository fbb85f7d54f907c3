"""What the fit of a baseline measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from nullbayes.posteriors.header import REPORT, Fields, count

HEADER: Fields = {"seed": count, "settings": lambda value: isinstance(value, dict)}
MEASURED: Fields = {name: REPORT[name] for name in ("reason", "n_data", "rank", "seconds", "peak_memory")}


@dataclass(frozen=True)
class BaselineReport:
    """How a fit went; prints as a short table.

    Attributes
    ----------
    method, reason : str
        What was fitted, and in which form.
    n_data, n_parameters, n_samples : int
        The size of the problem; ``n_data`` counts the examples that were read.
    rank : int or None
        The rank of the curvature that was found, or of the deviations of the iterates; None where there is none.
    prior_precision : float or None
        The prior precision in use; None where the method has no prior.
    seconds : dict
        The time of each phase.
    peak_memory : int or None
        In bytes; None where the system does not tell.
    """

    method: str
    reason: str
    n_data: int
    n_parameters: int
    n_samples: int
    rank: int | None
    prior_precision: float | None
    seconds: dict[str, float]
    peak_memory: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and strings, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Lay the report out as a table."""
        memory = "unknown" if self.peak_memory is None else f"{self.peak_memory / 2**30:.2f} GiB at the peak"
        lines = [
            ("method", f"{self.method}: {self.reason}"),
            ("examples", f"{self.n_data:,}"),
            ("parameters", f"{self.n_parameters:,}"),
            ("samples", f"{self.n_samples}"),
            ("rank", "-" if self.rank is None else f"{self.rank:,}"),
            ("prior precision", "-" if self.prior_precision is None else f"{self.prior_precision:.4g}"),
            ("time", ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())),
            ("memory", memory),
        ]
        return "\n".join(f"{name:<17} {value}" for name, value in lines)
