"""What a baseline says of itself: how it learns, how it draws samples or scores inputs, and what a file keeps of it."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.jacobian.batches import BatchFn, n_examples, take_examples
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.network import Network, OutputFn, Selection
from nullbayes.jacobian.products import output_rows, rows_are_less_work
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.limits import free_memory
from nullbayes.linalg.curvature import LowRank, lanczos_pairs
from nullbayes.linalg.lanczos import block_width
from nullbayes.linalg.rows import Rows
from nullbayes.posteriors.measured import REPORT
from nullbayes.predictive import SCORES, Mask, Prediction, default_score, predict, stream

State = TypeVar("State")
LikelihoodLike = str | Likelihood | LossFn
_ROW_BYTES = {"cpu": 2**26, "cuda": 2**30}  # of rows at new inputs, at a time: at least so many
_FORMED, _SCORED = 6, 24  # parts of a GPU's free memory: one for rows that are formed together, and that are scored
REPORT_FIELDS = {name: REPORT[name] for name in ("reason", "n_data", "rank", "seconds", "peak_memory")}  # in a file
DEFAULT_PRECISION = 1.0  # of the prior, whatever the data
_COPIES = 3  # of the vectors of a budget, while they are found
_PRODUCTS = 3  # for each eigenvector: two to find it, and one to find its eigenvalue


class Options(TypedDict, total=False):
    """The keyword arguments that all baselines are made with."""

    parameters: Selection
    prior_precision: float
    batch_fn: BatchFn | None
    output_fn: OutputFn | None


class FitOptions(TypedDict, total=False):
    """The keyword arguments that ``fit`` of every baseline takes."""

    generator: torch.Generator | None
    memory_limit: int | str | None
    progress: bool


@dataclass(frozen=True)
class FitContext:
    """What a method is given to fit from."""

    name: str  # of the posterior class, for messages
    rows: OutputJacobian  # the matrix A on the training data
    n_samples: int  # that the user asked for
    seed: int  # that the samples follow from
    available: int  # bytes of memory that the method may use

    @property
    def network(self) -> Network:
        """The network, with the parameters that vary."""
        return self.rows.network

    def generator(self) -> torch.Generator:
        """Return a new generator with the seed of the fit."""
        return torch.Generator().manual_seed(self.seed)

    def held(self, beside: int) -> Rows:
        """Return the rows, stored if memory has room for them beside so many bytes, or formed as many at a time."""
        if self._fit(beside):
            return self.rows.stored("device")
        return self.rows.within(max(self._room(beside), self.rows.working_bytes))

    def _fit(self, beside: int) -> bool:
        return self.rows.costs().held_bytes <= self._room(beside)

    def _room(self, beside: int) -> int:
        return (self.available - beside) // 8 * 7  # the rest is for products with them

    def multiplied(self, beside: int, at_a_time: int, in_all: float = math.inf) -> Rows:
        """Return the rows in the form in which products with vectors are the least work.

        They are stored if memory has room for them, and else formed for every product. Where forward and reverse mode
        are less work than that, they are not formed at all.

        Parameters
        ----------
        beside : int
            Bytes that are needed for other things.
        at_a_time, in_all : int, float
            How many vectors each product has, and all of them together.
        """
        rows = self.rows
        if not self.network.forward_mode:
            return self.held(beside)
        factors = 2 * rows.numbers_per_row < rows.n_columns  # which take less work than entries
        if self._fit(beside) and (factors or rows_are_less_work(rows.rows_per_example, in_all)):
            return self.held(beside)
        return self.once(at_a_time)

    def once(self, at_a_time: int) -> Rows:
        """Return the rows for products with so many vectors in one pass: they are not stored.

        They are formed part by part, or not at all where forward and reverse mode are less work.
        """
        rows = self.rows
        if not self.network.forward_mode or rows_are_less_work(rows.rows_per_example, at_a_time):
            return rows
        too_much = rows.costs("matrix_free").least_working_bytes(at_a_time) > rows.working_bytes
        return rows if too_much else rows.stored("matrix_free")

    def vectors(self, memory_budget: int) -> int:
        """Return how many vectors of the size of the parameters a budget allows; refuse it if memory does not."""
        rank = min(memory_budget, self.rows.n_rows, self.rows.n_columns)
        self.check_budget(memory_budget, _COPIES * rank * self.rows.n_columns)
        return rank

    def lanczos_rows(self, memory_budget: int, at_a_time: int, in_all: int) -> Rows:
        """Return the rows for the Lanczos process, whose vectors take a budget; see `multiplied`."""
        beside = _COPIES * memory_budget * self.rows.n_columns * self.rows.dtype.itemsize
        return self.multiplied(beside, at_a_time, in_all)

    def leading_pairs(self, memory_budget: int) -> LowRank:
        """Return the leading eigenpairs of the curvature, as many as a budget allows."""
        rank = self.vectors(memory_budget)
        rows = self.lanczos_rows(rank, block_width(self.rows, rank), _PRODUCTS * rank)
        return lanczos_pairs(rows, rank, self.generator())

    def check_budget(self, memory_budget: int, numbers: int) -> None:
        """Refuse a budget if so many numbers do not fit in memory."""
        needed = numbers * self.rows.dtype.itemsize
        if needed > self.available:
            msg = (
                f"{self.name} with memory_budget={memory_budget} takes {needed / 2**20:,.1f} MiB, more than the memory "
                f"limit of {self.available / 2**20:,.1f} MiB: lower memory_budget, or raise memory_limit."
            )
            raise SettingsError(msg)


@dataclass(frozen=True)
class Learned(Generic[State]):
    """What a method has learned."""

    state: State
    rank: int | None  # of what it found, if it has one
    reason: str  # its form in a few words, for the report


@dataclass(frozen=True)
class Question:
    """Inputs, and everything that an answer about them depends on beside what the method has learned."""

    x: Any
    network: Network
    likelihood: Likelihood
    batch_fn: BatchFn | None
    directions: Tensor  # (S, P); the deviations of the samples are directions / sqrt(alpha)
    alpha: float
    pred_type: str
    link: str | None = None
    mask: Mask = None


@dataclass(frozen=True)
class Method(ABC, Generic[State]):
    """How a baseline approximates; abstract. A subclass is a frozen dataclass whose fields are its settings.

    ``fit`` returns the state that everything else starts from. A file holds the settings, and of the state what
    ``tensors`` returns; ``restored`` makes the state of it again. The class attributes say what the method can do.

    Examples
    --------
    The same variance for every parameter, whatever the data, as a method and as the posterior around it:

    >>> import torch, nullbayes as nb
    >>> from nullbayes.baselines.method import Learned
    >>> class Isotropic(nb.baselines.Method):
    ...     hessian = False  # of the likelihood: it is not used
    ...
    ...     def fit(self, context):
    ...         return Learned((), rank=None, reason="noise of the prior")
    ...
    ...     def deviations(self, state, network, seed, n_samples, alpha):
    ...         generator = torch.Generator().manual_seed(seed)
    ...         return torch.randn(n_samples, network.n_parameters, generator=generator) / alpha**0.5
    >>> class IsotropicNoise(nb.baselines.Baseline):
    ...     _method = Isotropic()
    >>> posterior = IsotropicNoise(torch.nn.Linear(4, 2), prior_precision=100.0)
    >>> posterior.fit(torch.eye(4), torch.tensor([0, 1, 0, 1])).predict(torch.eye(4))
    Prediction(mean (4, 2), variance (4, 2), probs (4, 2), samples (30, 4, 2))
    """

    hessian: ClassVar[bool] = True  # scale the rows of the fit by a root of the likelihood's Hessian
    has_prior: ClassVar[bool] = True  # deviations depend on the prior precision
    is_laplace: ClassVar[bool] = False  # the state is a curvature, deviations are samples of its Gaussian
    pred_type: ClassVar[str] = "linearized"  # the default
    fewest: ClassVar[int] = 2  # samples: as many as a variance needs; 1 if they do not vary, 0 if it is only a score
    of_predictions: ClassVar[tuple[str, ...]] = SCORES  # names of the scores that are computed from its predictions
    own_score: ClassVar[str | None] = None  # the default; score_inputs computes it if it is not one of those

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of all scores, the method's own first."""
        if self.own_score is None:
            return self.of_predictions
        return (self.own_score, *(name for name in self.of_predictions if name != self.own_score))

    @abstractmethod
    def fit(self, context: FitContext) -> Learned[State]:
        """Learn from the training data. The state is not None, which stands for one that a file could not hold."""

    def deviations(self, state: State, network: Network, seed: int, n_samples: int, alpha: float) -> Tensor:  # (S, P)
        """Return how far each sample is from the trained parameters, with ``alpha`` taken into account.

        A method that is only a score has none.
        """
        return network.theta.new_zeros(0, network.n_parameters)

    def parameters(self, network: Network, x: Any) -> Network:
        """Return the network with the parameters that vary if the user chose none; ``x`` are a few inputs."""
        return network

    def predict(self, state: State, question: Question) -> Prediction:
        """Predict with all samples."""
        asked = {f.name: getattr(question, f.name) for f in dataclasses.fields(question)}
        return predict(root=math.sqrt(asked.pop("alpha")), **asked)

    def sampled(self, state: State, network: Network, i: int, flat: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the model that sample ``i``, with the parameters ``flat``, replaces."""
        return network.unflatten(flat)

    def default_score(self, likelihood: Likelihood) -> str:
        """Return the name of the score of a posterior that is not calibrated."""
        return default_score(likelihood) if self.scores is SCORES else self.scores[0]

    def score_inputs(self, state: State, question: Question) -> Tensor:  # (N,)
        """Return the score ``own_score`` of each input; by default from the rows of its outputs."""
        return torch.cat([self.score_rows(state, rows, part) for part, rows in rows_at(question)])

    def score_rows(self, state: State, rows: Tensor, question: Question) -> Tensor:  # (n, O, P) -> (n,)
        """Return the score ``own_score`` of a few inputs, from the rows of their outputs."""
        raise NotImplementedError

    def tensors(self, state: State) -> dict[str, Tensor]:
        """Return the tensors that a file keeps of the state."""
        return {}

    def restored(self, tensors: Mapping[str, Tensor], network: Network, seed: int) -> State | None:
        """Return the state from a file's tensors; None where a file cannot hold it.

        Tensors may come from a file that was altered: raise a ``ValueError`` for those that do not fit the network.
        """
        return None

    def copied(self, state: State) -> State | None:
        """Return the state that a copy of the posterior takes along; None where it must stay behind."""
        return state


def check_counts(settings: Mapping[str, int | None]) -> None:
    """Refuse settings that are neither left out nor whole numbers of at least one."""
    for name, value in settings.items():
        if value is not None and (type(value) is not int or value < 1):
            what = ", one vector of the size of the parameters" if name == "memory_budget" else ""
            msg = f"{name} must be at least 1{what}, not {value}."
            raise SettingsError(msg)


def rows_at(question: Question) -> Iterator[tuple[Question, Tensor]]:  # rows (n, O, P)
    """Iterate over parts of the inputs with the rows of their outputs, few enough at a time to be held in memory.

    On a GPU, the rows of many parts are formed together: for large networks, calls take longer than computing. While
    rows are formed, those before them are still held, so that together they take three times their bytes at most.
    """
    network = question.network
    few, many = _row_bytes(network.device)
    for piece in stream(question.x, network, question.batch_fn, 1):
        each = math.prod(network.output_shape(piece)) * network.n_parameters * network.dtype.itemsize
        step = max(1, few // each)
        together = max(1, many // each // step) * step
        for first in range(0, n_examples(piece), together):
            formed = take_examples(piece, first, first + together)
            rows = output_rows(network, formed, many).flatten(1, -2)
            for start in range(0, len(rows), step):
                part = take_examples(formed, start, start + step)
                yield dataclasses.replace(question, x=part), rows[start : start + step]


def _row_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of rows that are scored together, and of those that are formed together."""
    least = _ROW_BYTES.get(device.type, 2**26)
    if device.type != "cuda":
        return least, least
    free = free_memory(device)
    return max(least, free // _SCORED), max(least, free // _FORMED)


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

    Examples
    --------
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 3), torch.eye(4), torch.tensor([0, 1, 2, 0])
    >>> report = nb.baselines.LinearizedLaplace(model).fit(x, y, n_samples=10).report
    >>> report.method, report.reason, report.n_data, report.n_parameters, report.n_samples, report.prior_precision
    ('LinearizedLaplace', 'all parameters, factored', 4, 15, 10, 1.0)
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

    @property
    def has_default_precision(self) -> bool:
        """Whether the prior precision in use is the default of 1, at which predictions can be far too uncertain."""
        return self.prior_precision == DEFAULT_PRECISION

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and strings, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Lay the report out as a table."""
        advice = ", the default: optimize_prior_precision(held_out) chooses one" if self.has_default_precision else ""
        memory = "unknown" if self.peak_memory is None else f"{self.peak_memory / 2**30:.2f} GiB at the peak"
        lines = [
            ("method", f"{self.method}: {self.reason}"),
            ("examples", f"{self.n_data:,}"),
            ("parameters", f"{self.n_parameters:,}"),
            ("samples", f"{self.n_samples}"),
            ("rank", "-" if self.rank is None else f"{self.rank:,}"),
            ("prior precision", "-" if self.prior_precision is None else f"{self.prior_precision:.4g}{advice}"),
            ("time", ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())),
            ("memory", memory),
        ]
        return "\n".join(f"{name:<17} {value}" for name, value in lines)
