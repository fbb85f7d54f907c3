"""What a fit would do, as a value that prints."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace

import torch

from nullbayes.limits import Storage, rates_of
from nullbayes.projectors.base import Projector

_SIDE, _TIMES = 768, 5  # of matrices that are multiplied to learn how fast a CPU is, and how often: 30 milliseconds


@dataclass(frozen=True)
class Plan:
    """What a fit would do, and why.

    Attributes
    ----------
    projector : Projector
        The method, with its settings.
    storage : "device", "half", "factors", "host", "recompute" or "matrix_free"
        Where the rows are: held on the device, held there in half precision (the final residual is measured on rows
        that are formed again), held there as inputs and gradients of layers, from which products compute the entries,
        held in host memory, formed again in every sweep, or never formed: products by JVP and VJP.
    reason : str
        Why this projector, in one sentence.
    n_rows, n_parameters, n_samples : int
        The size of the problem.
    peak_bytes : int
        Estimated memory, not counting the model and the data.
    operations : float
        Floating-point operations of matrix products and factorizations, to prepare and for one sweep: Gram or normal
        matrices, Cholesky factors or eigenvectors, products of all rows with the samples and back, solves. What the
        network computes to form rows is not counted.
    memory_limit : int
        The bytes that the plan was made for.
    working_bytes : int
        The part of them that is temporary memory for forming and multiplying rows.
    seconds : float
        Estimated time. :func:`choose` counts the projection alone, on one machine of each kind; ``nb.plan`` adds the
        trial that finds a precision, and half a second for everything else, and counts with the speed of this CPU.
    note : str
        What the plan had to guess; empty if nothing.
    processes : int
        That the rows or the parameters are spread over. Memory, work and time are those of each of them.
    parameters_each : int
        The most parameters that a process has, where the processes divide the parameters; 0 where they do not.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> plan = nb.projectors.choose(nb.DenseRows(torch.eye(20, 50)), n_samples=10, memory_limit=2**30)
    >>> print(plan)  # doctest: +ELLIPSIS
    20 rows over 50 parameters, 10 samples
      projector  ExactDual(truncate=True, cutoff=None, rtol=0.01, atol=0.0)
      because    20 rows are few: the eigenvectors of their Gram matrix are removed, leading ones first, until ...
      rows       held in memory
      memory     0.00 GiB of 1.00
      work       1.7e+05 operations to prepare and sweep once
      time       less than a second, a rough estimate
    """

    projector: Projector
    storage: Storage
    reason: str
    n_rows: int
    n_parameters: int
    n_samples: int
    peak_bytes: int
    operations: float
    memory_limit: int
    working_bytes: int
    seconds: float
    note: str = ""
    processes: int = 1
    parameters_each: int = 0

    def for_this_machine(self, device: torch.device) -> Plan:
        """Return the plan with the seconds of this machine, by a product of matrices that is timed once on a CPU."""
        slowness = _slowness(torch.get_num_threads()) if device.type == "cpu" else 1.0
        return replace(self, seconds=slowness * self.seconds)

    def to_dict(self) -> dict[str, str | int | float]:
        """Return the plan as plain numbers and strings, ready for JSON; the projector as it prints."""
        return {**vars(self), "projector": str(self.projector)}

    def __str__(self) -> str:
        """Describe the plan in a few lines."""
        rows = {
            "device": "held in memory",
            "half": "held in half precision; the final residual is measured in full",
            "factors": "held as inputs and gradients of the layers, from which products compute the entries",
            "host": "held in host memory, brought to the device block by block",
            "recompute": "formed again, block by block, in every sweep",
            "matrix_free": "never formed: products by JVP and VJP",
        }[self.storage]
        each = "" if self.processes == 1 else f", {-(-self.n_rows // self.processes):,} in each process"
        each = f", of at most {self.parameters_each:,} parameters in each process" if self.parameters_each else each
        spread = "" if self.processes == 1 else f"; {self.processes} processes, with this memory and work each"
        return (
            f"{self.n_rows:,} rows over {self.n_parameters:,} parameters, {self.n_samples} samples{spread}\n"
            f"  projector  {self.projector}\n  because    {self.reason}\n  rows       {rows}{each}\n"
            f"  memory     {self.peak_bytes / 2**30:.2f} GiB of {self.memory_limit / 2**30:.2f}\n"
            f"  work       {self.operations:.2g} operations to prepare and sweep once\n"
            f"  time       {_in_words(self.seconds)}, a rough estimate"
            + (f"\n  note       {self.note}" if self.note else "")
        )


def _in_words(seconds: float) -> str:
    """Say how long something takes, in a unit that suits it."""
    if seconds < 1.0:
        return "less than a second"
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.2g} {unit}"
    return f"about {seconds:.0f} s"


@functools.cache
def _slowness(n_threads: int) -> float:
    """Return how many times as long a product of matrices takes as on the CPU whose rates the cost model has."""
    matrix, took = torch.ones(_SIDE, _SIDE, dtype=torch.float32, device="cpu"), list[float]()
    for _ in range(_TIMES):
        start = time.perf_counter()
        matrix @ matrix
        took.append(time.perf_counter() - start)
    return min(took) * rates_of(matrix.device).single / (2.0 * _SIDE**3)
