"""A model of a fit on many processes: time, exchanged bytes and memory from a handful of constants.

A process forms its rows, factors their blocks, and sweeps; after every sweep the processes add up S · P numbers, each
of which goes around a ring of processes twice. Where rows do not fit, they are formed again whenever they are needed.
Solving with the factors, which takes as much less than a product as a block has fewer rows than the network has
parameters, is not counted; neither is reading the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.cases.processes import TOGETHER

VECTORS = 10  # of the size of the parameters that a fit plans with for each sample
RENEW_EVERY = 20  # sweeps after which conjugate gradients compute their gradient anew, which takes another sweep
NUMBER = 4  # bytes of a number of a row or a vector
_FACTOR = 8  # bytes of a number of a factor
_USABLE = 0.85  # part of the memory of a GPU that a fit plans with
_LEAST_ROWS = 4  # that must fit while rows are formed
_PASSES = 3  # over all rows, for their norm, for the noise before it is projected, and for the losses at the end


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be fitted.

    Attributes
    ----------
    rows, parameters, samples : int
        Their numbers.
    block_rows : int
        Rows per block, at most.
    sweeps : int or None
        That the slowest sample needs; None for what the number of blocks lets expect.
    sample_sweeps, part_sweeps : int or None
        The sweeps of all samples together, and those of all parts of 16 samples; None if all need as many.
    tolerance : float
        To which the sweeps are expected.
    held_bytes : int
        Of all rows where they are held in memory; 0 if they are formed again whenever they are needed.
    network_flops : float
        Operations of the network to form a row, where its entries are not all that takes time.
    """

    rows: int
    parameters: int
    samples: int = 30
    block_rows: int = 20_000
    sweeps: int | None = None
    sample_sweeps: int | None = None
    part_sweeps: int | None = None
    tolerance: float = 2e-2
    held_bytes: int = 0
    network_flops: float = 0.0

    @property
    def sample_bytes(self) -> int:
        """Of one vector per sample: what a sweep adds up."""
        return self.samples * self.parameters * NUMBER


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a process takes for things; an entry is a number of a row.

    Attributes
    ----------
    cores : int or None
        That the processes share; None if each process has a device of its own.
    fixed : float
        Seconds that do not depend on the number of processes.
    form, read, multiply : float
        Seconds per entry: to form it; to read it in a sweep; and to multiply it and its transpose, for each sample.
    factor, network : float
        Seconds per operation of Gram matrices and factors, and of the network.
    handshake, latency : float
        Seconds of a handshake between two processes, and of a sum between two beyond that.
    bandwidth, between : float
        Bytes per second that a process sends to the next, on the same machine and on another.
    node : int or None
        Processes per machine; None if there is one machine.
    beside : int
        Exchanges of a fit beside those of sweeps and residuals.
    memory : float
        Bytes of a process.
    temporary : float
        Bytes that a process takes beside rows, factors and vectors.
    """

    cores: int | None = None
    fixed: float = 0.0
    form: float
    read: float
    multiply: float
    factor: float
    network: float = 0.0
    handshake: float
    latency: float
    bandwidth: float
    between: float = math.inf
    node: int | None = None
    beside: int = 20
    memory: float = math.inf
    temporary: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a process of a fit takes: seconds by what they are spent on, bytes that it passes on, and memory."""

    processes: int
    block_rows: int
    sweeps: int
    forming: float
    factoring: float
    multiplying: float
    exchanging: float
    fixed: float
    exchanges: int
    passed_bytes: float  # to sums and broadcasts, in all
    sent_bytes: float  # over the wire, in all
    memory: float
    stretch: float = 1.0  # of the clock, where processes wait for a core
    fits: bool = True

    @property
    def cpu_seconds(self) -> float:
        """Of one process."""
        return self.forming + self.factoring + self.multiplying + self.exchanging + self.fixed

    @property
    def seconds(self) -> float:
        """By the clock, if no other program runs."""
        return self.cpu_seconds * self.stretch if self.fits else math.inf


# --- the model --------------------------------------------------------------------------------------------------------


def expected_sweeps(n_blocks: int, tolerance: float) -> int:
    """Return how many sweeps a plan expects for a number of blocks; measured for up to 60 of them."""
    if n_blocks == 1:
        return 6
    return round(min(25.0 * n_blocks**0.8, 80.0 * n_blocks**0.3) * (1e-2 / tolerance) ** 0.75)


def checks(sweeps: int) -> int:
    """Return how often the residual is measured: after each of five sweeps, then whenever they grew by a fifth."""
    k, count = 1, 0
    while k <= sweeps:
        k, count = k + max(1, k // 5), count + 1
    return count


def applications(sweeps: int) -> int:
    """Return how often the sum of the block steps is applied: to start, in each sweep, and to renew the gradient."""
    return 1 + sweeps + sweeps // RENEW_EVERY


def times_formed(pieces: int, times: float, n_checks: int) -> float:
    """Return how often rows that are not held are formed: for the factors, in sweeps, and to measure.

    Of a block in several pieces, each pair meets once in the Gram matrix, and the rows are gone when a sweep needs them
    for the way back.
    """
    return (pieces + 1) / 2 + (1 if pieces == 1 else 2) * times + n_checks + _PASSES


def sent_bytes(n_bytes: float, processes: int) -> float:
    """Return what a process sends to add up ``n_bytes`` bytes around a ring: each part goes around twice."""
    return 2.0 * (processes - 1) / processes * n_bytes


def simulate(problem: Problem, machine: Machine, parallel: str, processes: int) -> Estimate:
    """Return what each of some processes takes for a fit that shares the data or the samples."""
    by_data = parallel == "data"
    own = -(-problem.rows // processes) if by_data else problem.rows
    block = min(problem.block_rows, own)
    n_blocks = -(-own // block) * (processes if by_data else 1)
    sweeps = expected_sweeps(n_blocks, problem.tolerance) if problem.sweeps is None else problem.sweeps
    sample_sweeps = sweeps * problem.samples if problem.sample_sweeps is None else problem.sample_sweeps
    parts = 1 if by_data else -(-problem.samples // TOGETHER)
    own_parts = -(-parts // processes) if not by_data else 1
    taken = min(own_parts * sweeps, problem.part_sweeps or math.inf) if not by_data else sweeps
    share = 1.0 if by_data else min(1.0, own_parts * TOGETHER / problem.samples)
    renewed = 1.0 + (sweeps // RENEW_EVERY) / sweeps
    times = own_parts + taken * renewed  # that the rows are read
    vectors = share * (problem.samples + sample_sweeps * renewed)  # that they are multiplied with

    entries = float(own) * problem.parameters
    held = problem.held_bytes * own / problem.rows
    lasting = held + own * block * _FACTOR + VECTORS * problem.sample_bytes + machine.temporary
    row = problem.parameters * NUMBER
    least = 0 if problem.held_bytes else _LEAST_ROWS * row
    formings, fits = 1.0, lasting + least <= _USABLE * machine.memory
    if not problem.held_bytes:
        room = max(_USABLE * machine.memory - lasting, least)
        pieces = 1 if block * row <= room / 2 else math.ceil(4.0 * block * row / room)
        formings = times_formed(pieces, times, own_parts * checks(sweeps))

    exchanges, passed, sent, exchanging = 0, 0.0, 0.0, 0.0
    if processes > 1:
        if by_data:
            exchanges = applications(sweeps) + checks(sweeps) + machine.beside
            passed = vectors * problem.parameters * NUMBER
            sent = sent_bytes(passed, processes)
        else:
            exchanges = parts + machine.beside
            passed = sent = float(problem.sample_bytes)
        around = machine.node is not None and processes > machine.node
        bandwidth = min(machine.bandwidth, machine.between) if around else machine.bandwidth
        exchanging = exchanges * (processes - 1) * (machine.handshake + machine.latency) + sent / bandwidth
    return Estimate(
        processes=processes,
        block_rows=block,
        sweeps=sweeps,
        forming=formings * (entries * machine.form + own * problem.network_flops * machine.network),
        factoring=own * (block * problem.parameters + block**2 / 3.0) * machine.factor,
        multiplying=entries * (times * machine.read + vectors * machine.multiply),
        exchanging=exchanging,
        fixed=machine.fixed,
        exchanges=exchanges,
        passed_bytes=passed,
        sent_bytes=sent,
        memory=lasting + least,
        stretch=1.0 if machine.cores is None else max(1.0, processes / machine.cores),
        fits=fits,
    )


def fastest(problem: Problem, machine: Machine, parallel: str, processes: int) -> Estimate:
    """Return the estimate with the best number of blocks per process; with the least memory if none fits."""
    own = -(-problem.rows // processes) if parallel == "data" else problem.rows
    sizes = [-(-own // 2**k) for k in range(own.bit_length())]
    found = [simulate(replace(problem, block_rows=size), machine, parallel, processes) for size in sizes]
    return min(found, key=lambda estimate: (estimate.seconds, estimate.memory))


def mesh(problem: Problem, machine: Machine, by_data: int, by_samples: int) -> Estimate:
    """Return what both ways at once would take: each group of processes that share the data has some of the samples."""
    part = replace(problem, samples=-(-problem.samples // by_samples))
    return fastest(part, machine, "data", by_data)


def limit(problem: Problem, machine: Machine, least: int = 1) -> int:
    """Return the number of processes, doubled from ``least``, from which a doubling gains less than a factor of 1.4."""
    processes = least
    while processes < problem.rows:
        now, twice = (fastest(problem, machine, "data", n).seconds for n in (processes, 2 * processes))
        if twice * 1.4 > now:
            return processes
        processes *= 2
    return processes
