"""How a fit goes about its rows: by which projector, where they are, and what they may take for a moment."""

from __future__ import annotations

from dataclasses import dataclass

from nullbayes.errors import SettingsError
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.posteriors.resources import host_memory_bytes, memory_limit_bytes
from nullbayes.projectors import Projector, choose
from nullbayes.types import Storage


@dataclass(frozen=True)
class Asked:
    """What was asked for."""

    rows: JacobianRows
    n_samples: int
    projector: str | Projector
    tolerance: float
    memory_limit: int | str | None


@dataclass(frozen=True)
class Setup:
    """What will be done.

    Attributes
    ----------
    projector, reason, storage, working_bytes
        As in a :class:`Plan <nullbayes.projectors.Plan>`.
    limit, host : int
        The bytes of the device and of the host that it was made for.
    """

    projector: Projector
    reason: str
    storage: Storage
    working_bytes: int
    limit: int
    host: int

    def __str__(self) -> str:
        """Say all that the result depends on, to the last bit."""
        return f"{self.projector}, rows: {self.storage}, {self.working_bytes} bytes at a time"


def set_up(asked: Asked, limit: int | None = None, host: int | None = None) -> Setup:
    """Make a plan where "auto" asks for one, within the memory that there is now unless told otherwise."""
    rows, projector = asked.rows, asked.projector
    if not isinstance(projector, Projector) and projector != "auto":
        msg = f'projector must be "auto" or a projector such as nb.projectors.Krylov(), not {projector!r}.'
        raise SettingsError(msg)
    limit = memory_limit_bytes(asked.memory_limit, rows.device) if limit is None else limit
    host = host_memory_bytes(rows.device) if host is None else host
    if isinstance(projector, Projector):
        storage: Storage = "device" if rows.kept_bytes() <= limit // 2 else "form"
        return Setup(projector, "as asked for", storage, min(rows.working_bytes, limit // 8), limit, host)
    plan = choose(rows, n_samples=asked.n_samples, memory_limit=limit, rtol=asked.tolerance, host_limit=host)
    return Setup(plan.projector, plan.reason, plan.storage, plan.working_bytes, limit, host)
