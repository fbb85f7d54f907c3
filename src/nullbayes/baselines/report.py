"""What the fit of a baseline took."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BaselineReport:
    """How a fit went; prints as a short table.

    Attributes
    ----------
    method, reason : str
        What was fitted, and in which form.
    n_data, n_parameters, n_samples : int
        The problem; ``n_data`` counts the examples that were seen.
    rank : int or None
        Of what was found of the curvature, or of the spread of the iterates; None where there is none.
    prior_precision : float or None
        In use now; None where the method has no prior.
    seconds : dict
        By phase.
    peak_memory : int or None
        In bytes.
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
