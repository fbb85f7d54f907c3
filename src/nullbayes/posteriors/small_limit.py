"""A fit that takes long because its memory limit is small causes a warning, with a limit that makes it sooner."""

from __future__ import annotations

import math

from nullbayes.errors import warn
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.posteriors.arguments import memory_limit_bytes
from nullbayes.projectors import Plan, choose

_LONG = 60.0  # seconds of a plan from which on others are looked for
_SOONER = 5.0  # times: plans are rough


def warn_of_small_limit(rows: JacobianRows, plan: Plan, rtol: float, host: int) -> None:
    """Warn of a plan that takes long where twice its memory, or four times as much, and so on, makes it far sooner."""
    if plan.seconds < _LONG:
        return
    limit, free = 2 * plan.memory_limit, memory_limit_bytes(None, rows.device)
    while limit <= free:
        other = choose(rows, n_samples=plan.n_samples, memory_limit=limit, rtol=rtol, host_limit=host)
        if other.seconds * _SOONER <= plan.seconds:
            break
        limit *= 2
    else:
        return
    message = (
        f"The memory limit of {plan.memory_limit / 2**20:.1f} MiB makes this fit slow: about {_time(plan.seconds)}, "
        f"where it would take about {_time(other.seconds)} with memory_limit="
        f'"{math.ceil(limit / 2**20)}MB", which is free. Take that, or fewer samples.'
    )
    warn(message)


def _time(seconds: float) -> str:
    return f"{max(1.0, seconds):.0f} s" if seconds < 90.0 else f"{seconds / 60.0:.0f} min"
