"""Model, data and likelihood checked against each other, before rows are formed of them.

One pass over the data evaluates the network batch by batch. What the likelihood takes from the training data, how far
the outputs spread, and whether the outputs can be what the likelihood takes them for, are sums over examples: they are
added up, and no outputs are kept. So is how well the network predicts the targets, beside what one can say without it:
that finds a network that is not trained, whose weights were not loaded or whose inputs are prepared in another way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nullbayes.distributed import Group
from nullbayes.errors import DataError, InputError, LikelihoodError, NullBayesError, UntrainedWarning, warn
from nullbayes.jacobian.batches import BatchFn, described, leaves, map_leaves, ordinary, signed
from nullbayes.jacobian.checks import check_derivatives, check_examples, check_outputs
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.modules import Writing
from nullbayes.jacobian.named_inputs import by_name, check_labels, compare_with_mask, if_swapped
from nullbayes.jacobian.network import Network, OutputFn, Selection
from nullbayes.likelihoods import Bernoulli, Classification, Likelihood, LossFn, Regression, resolve
from nullbayes.limits import is_out_of_memory
from nullbayes.precision import recording

_EXAMPLES_AT_A_TIME = {"cpu": 64, "cuda": 1024}
_NUMBERS_KEPT = 2**21  # outputs that wait to be added up: a sum over many small batches takes longer than one over all
_PASSING = {  # operations that move numbers and leave them as they are
    "AliasBackward", "CloneBackward", "IndexBackward", "PermuteBackward", "ReshapeAliasBackward", "SelectBackward",
    "SliceBackward", "SqueezeBackward", "TBackward", "ToCopyBackward", "TransposeBackward", "UnsafeViewBackward",
    "UnsqueezeBackward", "ViewBackward",
}  # fmt: skip
_SUM_TOLERANCE = 1e-3  # of probabilities, which may come from half precision
_SAME = 1e-6  # of the size of the outputs: as much as rounding makes them differ
_ROUNDING = 1e-13  # of a mean of equal numbers, in float64
_ENOUGH = 20  # examples to judge by, where values are the only evidence
# how much worse than the mean, in squared errors, or than frequencies, in likelihood, causes a warning
_NUMBERS = {"training": 1.0, "held-out": 1.25}
_LABELS = {"training": (0.99, 0.0), "held-out": (1.5, 0.2)}  # times, and nats per label beyond that
# of what guesses leave to be gained: a network that knows less knows nothing
_GAIN = {"training": 0.1, "held-out": 0.0}
_ADVICE = {
    "training": "A posterior around it says nothing. Are the trained weights loaded, model.load_state_dict(...)?",
    "held-out": "Are the targets in the order of their inputs?",
}
_LOGS = (
    "Pass the network without it, or output_fn=lambda p: p.clamp_min(1e-12).log(), whose softmax gives the same "
    "probabilities."
)
_LOGITS = (
    "Pass the network without it, or output_fn=lambda p: p.logit(1e-7), whose sigmoid gives the same probabilities."
)


@dataclass(frozen=True)
class Opened:
    """Checked inputs of a Jacobian, with statistics of the network's outputs."""

    network: Network
    examples: Examples
    likelihood: Likelihood  # with what it takes from the training data
    n_counted: int  # outputs that have a target
    output_std: float
    output_stds: Tensor | None  # (O,) of outputs that are independent, each in its own units


def open_data(
    model: nn.Module | Network,
    loader: Iterable[Any] | Examples,
    likelihood: str | Likelihood | LossFn,
    parameters: Selection,
    batch_fn: BatchFn | None,
    output_fn: OutputFn | None,
) -> Opened:
    """Check model, data and likelihood against each other, and fit what the likelihood takes from the data."""
    network = model if isinstance(model, Network) else Network(model, parameters, output_fn)
    examples = (
        loader if isinstance(loader, Examples) else Examples(loader, batch_fn, network.device, dtype=network.dtype)
    )
    few, few_targets = examples.read(0, min(8, len(examples)))
    whole = network.whole
    with Writing(dict(whole.module.named_parameters()) | whole.unflatten(whole.theta)) as writing:
        answers = _first_answers(network, few, few_targets)
    check_outputs(examples, 0, answers)
    network.input_signature = signed(described(few), examples.columns)  # once the network takes them
    check_examples(network, few)
    try:
        check_derivatives(network, few)
    except RuntimeError as error:  # of autograd, after a network wrote what was there already
        writing.explain(error)
        raise
    chosen, sums = likelihood if isinstance(likelihood, Likelihood) else resolve(likelihood), None
    for start, stop in examples.ranges(_EXAMPLES_AT_A_TIME.get(network.device.type, 64)):
        x, y = examples.read(start, stop)
        outputs = network.outputs(x)
        check_outputs(examples, start, outputs)
        chosen.check(outputs, y)
        sums = sums or OutputSums(chosen, outputs[:1], y[:1])
        sums.see(x, outputs, y)
    assert sums is not None  # there is at least one example
    sums.add_waiting()
    sums.join(examples.group)
    if sums.n_counted == 0 and not examples.partial:
        msg = "Every target is one to be ignored (ignore_index): there is nothing to project on."
        raise DataError(msg)
    check_ending(network, chosen, few)
    if isinstance(few, Mapping):
        check_labels(network, chosen, few, few_targets, answers)
    if not examples.partial:
        sums.check()
    return Opened(network, examples, sums.fitted(), sums.n_counted, sums.spread(), sums.stds())


def _first_answers(network: Network, x: Any, y: Tensor) -> Tensor:
    """Return the outputs on the first examples, or say what form of input the network cannot take."""
    try:
        return network.outputs(x)
    except NullBayesError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        whole = "type" in said[0] and any(not leaf.is_floating_point() for leaf in leaves(x))
        hint = f". Whole numbers may have to be converted: x.to({network.dtype})." if whole else ""
        if isinstance(x, Mapping) and "unexpected keyword" in said[0]:
            hint = by_name(network, x)
        hint = if_swapped(network, x, y) or hint
        msg = f"The network failed on the first batch, {described(x)} (n examples): {said[0]}{hint}"
        raise InputError(msg) from error


class Guesses:
    """How well labels are predicted, beside their frequencies, or numbers beside their mean; added up over batches."""

    def __init__(self) -> None:
        self._nll = 0.0
        self._counts: Tensor | None = None  # (1, C), or (O, 2) for independent labels: how often each label is there
        self._hits: Tensor | None = None  # how often it is predicted where it is there
        self._n = 0  # examples of a regression; squared errors of each output, and squares of targets around their mean
        self._mean = self._squares = self._errors = torch.zeros((), dtype=torch.float64, device="cpu")

    def add(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:  # (n, ...)
        """Take in another batch; only labels that are whole numbers have frequencies."""
        if isinstance(likelihood, Regression):
            y = targets.reshape(outputs.shape).double()
            mean = y.mean(0)
            self._add_numbers(len(y), mean, (y - mean).square().sum(0), (outputs.double() - y).square().sum(0))
            return
        one_of_many = isinstance(likelihood, Classification) and not targets.is_floating_point()
        if not (one_of_many or isinstance(likelihood, Bernoulli)):
            return
        logits = likelihood.choices(outputs)  # (n, ..., C)
        labels = targets.reshape(logits.shape[:-1]).long()
        ignored = labels == likelihood.ignore_index if isinstance(likelihood, Classification) else labels < 0
        terms = logits.log_softmax(-1).gather(-1, labels.masked_fill(ignored, 0)[..., None])[..., 0]
        self._nll -= float(terms.masked_fill(ignored, 0.0).sum())
        right = (logits.argmax(-1) == labels) & ~ignored
        counts, hits = (_frequencies(labels, chosen, one_of_many, logits.shape[-1]) for chosen in (~ignored, right))
        self._counts = counts if self._counts is None else self._counts + counts
        self._hits = hits if self._hits is None else self._hits + hits

    def join(self, other: Guesses) -> None:
        """Take in the guesses about other examples."""
        if other._counts is not None and other._hits is not None:
            self._nll += other._nll
            self._counts = other._counts + (0 if self._counts is None else self._counts.to(other._counts))
            self._hits = other._hits + (0 if self._hits is None else self._hits.to(other._hits))
        if other._n:
            self._add_numbers(other._n, other._mean, other._squares, other._errors)

    def _add_numbers(self, n: int, mean: Tensor, squares: Tensor, errors: Tensor) -> None:  # (...) each
        """Take in n targets of a regression: their mean, the squares around it, and the squared errors."""
        before, apart = self._n, mean - self._mean.to(mean)
        self._n, self._errors = before + n, self._errors.to(mean) + errors
        self._mean = self._mean.to(mean) + apart * n / self._n
        self._squares = self._squares.to(mean) + squares + apart.square() * before * n / self._n

    def check(self, kind: str) -> None:
        """Warn of a network that is no better than the frequencies, by likelihood, accuracy and balanced accuracy.

        A network that was trained with weights of the classes loses to the frequencies by the first two. For numbers,
        the squared error is compared with that of their mean, on average over the outputs, each in units of its own.
        One that predicts every label is trained, however unsure it is. ``kind`` says what data these are: a weak
        network may be worse than what held-out data say themselves by chance, and one whose targets are in another
        order is far worse. Targets that are all the same number cause a warning, too.
        """
        varies = self._squares > self._n * (_ROUNDING * self._mean).square()
        if self._n >= _ENOUGH and not bool(varies.any()):
            message = (
                f"All {self._n:,} {kind} targets of an output are the same number, so that nothing can be learned from "
                "them. Pass the targets that the network was trained with."
            )
            warn(message, UntrainedWarning)
        worse = (self._errors / torch.where(varies, self._squares, 1.0))[varies]
        if worse.numel() and float(worse.mean()) >= _NUMBERS[kind]:
            message = (
                f"The network predicts its {kind} targets no better than their mean does: its squared errors are "
                f"{float(worse.mean()):.3g} times those of the mean. {_ADVICE[kind]} Are inputs and targets scaled as "
                "in training?"
            )
            warn(message, UntrainedWarning)
        if self._counts is None or self._hits is None:
            return
        counts, hits = self._counts.double(), self._hits.double()
        n, most, right = float(counts.sum()), float(counts.amax(1).sum()), float(hits.sum())
        there, recalls = counts > 0, hits / counts.clamp_min(1.0)
        by_chance = 1.0 / there.sum(1, keepdim=True).clamp_min(1)
        gained = float(((recalls - by_chance) * there * by_chance).sum(1).mean())  # in balanced accuracy
        errors = (by_chance * (1.0 - by_chance) / counts.clamp_min(1.0) * by_chance.square() * there).sum()
        room = _GAIN[kind] * float(1.0 - by_chance.mean())
        balanced = gained <= max(2.0 * float(errors.sqrt()) / len(counts), room)
        frequencies = float(
            torch.special.entr(counts / counts.sum(1, keepdim=True).clamp_min(1.0)).sum(1) @ counts.sum(1)
        )
        chance = max(2.0 * (most * (1.0 - most / max(n, 1.0))) ** 0.5, _GAIN[kind] * (n - most))  # two standard errors
        factor, nats = _LABELS[kind]
        if 0.0 < factor * frequencies + nats * n <= self._nll and right < n and right <= most + chance and balanced:
            message = (
                f"The network hardly knows its {kind} labels: NLL {self._nll / n:.3g} where their frequencies have "
                f"{frequencies / n:.3g}, accuracy {right / n:.3g} where the most frequent label has {most / n:.3g}. "
                f"{_ADVICE[kind]} Are inputs prepared, and classes numbered, as in training?"
            )
            warn(message, UntrainedWarning)


def _frequencies(labels: Tensor, chosen: Tensor, one_of_many: bool, n_classes: int) -> Tensor:  # (1, C) or (O, 2)
    """Count the chosen ones of some labels (n, ...)."""
    if one_of_many:
        return torch.bincount(labels[chosen], minlength=n_classes)[None]
    ones, all_chosen = (labels * chosen).flatten(1).sum(0), chosen.flatten(1).sum(0)
    return torch.stack([all_chosen - ones, ones], 1)


class OutputSums:
    """Statistics of the outputs on the training data, added up over batches in float64.

    ``outputs`` and ``targets`` (1, ...) are those of the first example; the likelihood has nothing of the data yet.
    """

    def __init__(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
        self.likelihood, self._first, self._first_target = likelihood, outputs.clone(), targets.clone()
        self._placed = likelihood.fitted(outputs, targets)  # which knows where the classes are
        self.n = self.n_counted = 0
        self._weight, self._mean, self._squares = (torch.zeros_like(outputs[0], dtype=torch.float64) for _ in range(3))
        self._statistics = torch.zeros_like(likelihood.statistics(outputs, targets))
        self._lowest, self._highest = float("inf"), -float("inf")
        self._differs = self._sum_of_squares = self._off_one = self._as_logits = self._as_probabilities = 0.0
        self._label_on_padding = self._ignored_in_mask = False
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._guesses = Guesses()

    def see(self, x: Any, outputs: Tensor, targets: Tensor) -> None:  # (n, ...)
        """Take in another batch. It is added to the sums when there are enough numbers, or by `add_waiting`."""
        if isinstance(x, Mapping):
            on_padding, in_mask = compare_with_mask(self.likelihood, x, targets)
            self._label_on_padding |= on_padding
            self._ignored_in_mask |= in_mask
        self._waiting.append((outputs, targets))
        if sum(waiting.numel() for waiting, _ in self._waiting) >= _NUMBERS_KEPT:
            self.add_waiting()

    def add_waiting(self) -> None:
        """Add the batches that wait to the sums."""
        if self._waiting:
            outputs, targets = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
            self._waiting.clear()
            self._add(outputs, targets)

    def _add(self, outputs: Tensor, targets: Tensor) -> None:  # (n, ...)
        values = outputs.double()
        counted = self.likelihood.counted(outputs, targets)
        self.n_counted += outputs.numel() if counted is None else int(counted.sum())
        weights = torch.ones_like(values) if counted is None else counted.double()
        total = weights.sum(0)
        mean = (values * weights).sum(0) / total.clamp_min(1.0)
        squares = ((values - mean).square() * weights).sum(0)
        self._add_moments(len(outputs), total, mean, squares, self.likelihood.statistics(outputs, targets))
        self._add_values(values, targets, outputs)

    def _add_moments(self, n: int, weight: Tensor, mean: Tensor, squares: Tensor, statistics: Tensor) -> None:
        """Take in the weights, means and sums of squares of n examples, and their statistics."""
        apart, together = mean - self._mean, self._weight + weight
        self._squares += squares
        self._squares += apart.square() * self._weight * weight / together.clamp_min(1.0)
        self._mean += apart * weight / together.clamp_min(1.0)
        self._weight = together
        share = self.n / (self.n + n)
        self._statistics = share * self._statistics + (1 - share) * statistics
        self.n += n

    def join(self, group: Group) -> None:
        """Take in what other processes have seen, in order of rank, so that all come to the same numbers."""
        if group.size == 1:
            return
        mine = {name: value for name, value in vars(self).items() if name not in ("likelihood", "_placed", "_waiting")}
        device = self._first.device
        found = [map_leaves(lambda leaf: leaf.to(device), each) for each in group.gather(map_leaves(Tensor.cpu, mine))]
        vars(self).update(found[0])
        for other in found[1:]:
            moments = (other[name] for name in ("n", "_weight", "_mean", "_squares", "_statistics"))
            self._add_moments(*moments)
            self._differs = max(self._differs, float((other["_first"] - self._first).abs().max()))
            for name in ("n_counted", "_sum_of_squares", "_as_logits", "_as_probabilities"):
                setattr(self, name, getattr(self, name) + other[name])
            for name in ("_highest", "_differs", "_off_one", "_label_on_padding", "_ignored_in_mask"):
                setattr(self, name, max(getattr(self, name), other[name]))
            self._lowest = min(self._lowest, other["_lowest"])
            self._guesses.join(other["_guesses"])

    def _add_values(self, values: Tensor, targets: Tensor, outputs: Tensor) -> None:
        """Take in what tells probabilities from logits, and a network that always answers the same."""
        self._lowest = min(self._lowest, float(values.min()))
        self._highest = max(self._highest, float(values.max()))
        self._differs = max(self._differs, float((outputs - self._first).abs().max()))
        self._sum_of_squares += float(values.square().sum())
        self._guesses.add(self._placed, values, targets)
        if isinstance(self._placed, Classification) and self._lowest >= 0.0:
            sums = self._placed.at_positions(outputs, largest=False)
            self._off_one = max(self._off_one, float((sums - 1.0).abs().max()))
        if isinstance(self._placed, Bernoulli) and self._lowest >= 0.0 and self._highest <= 1.0:
            y, inside = targets.reshape(values.shape).double(), values.clamp(1e-7, 1.0 - 1e-7)
            self._as_logits += float(Bernoulli("binary").nll_terms(values, y).sum())
            self._as_probabilities -= float((y * inside.log() + (1.0 - y) * (1.0 - inside).log()).sum())

    def fitted(self) -> Likelihood:
        """Return the likelihood with what it takes from the training data."""
        fitted = self.likelihood.fitted(self._first, self._first_target, self._statistics)
        if isinstance(fitted, Classification) and self._ignored_in_mask:
            fitted = replace(fitted, more_ignored=True)
        return fitted

    def spread(self) -> float:
        """Return the root mean square standard deviation over examples of the outputs that have targets."""
        return float((self._squares.sum() / self._weight.sum()).sqrt())

    def stds(self) -> Tensor | None:  # (O,)
        """Return the standard deviation of each output, where they are independent; else None."""
        apart = self._mean.ndim == 1 and self.likelihood.independent_outputs
        return (self._squares / self.n).sqrt() if apart else None

    def check(self) -> None:
        """Refuse outputs that are probabilities; warn of those that may be, and of a network that is dead."""
        name = self.likelihood.name
        if isinstance(self._placed, Classification) and self._lowest >= 0.0 and self._off_one <= _SUM_TOLERANCE:
            msg = f'The outputs are probabilities: they sum to 1. "classification" takes logits. {_LOGS}'
            raise LikelihoodError(msg)
        bounded = isinstance(self._placed, Bernoulli) and self._lowest >= 0.0 and self._highest <= 1.0
        if bounded and self.n >= _ENOUGH and self._as_probabilities < self._as_logits:
            message = (
                "All outputs lie between 0 and 1, and explain the targets better as probabilities than as logits, "
                f'which "{name}" takes them for. If the network ends in something like a sigmoid: {_LOGITS}'
            )
            warn(message)
        size = (self._sum_of_squares / (self.n * self._mean.numel())) ** 0.5
        if self.n >= _ENOUGH and self._differs <= _SAME * size:
            message = (
                f"The network gives the same outputs for all {self.n:,} training examples: it is dead, or was not "
                "trained, and a posterior of it cannot tell inputs apart."
            )
            warn(message)
        elif self.n >= _ENOUGH:
            self._guesses.check("training")
        if self._label_on_padding:
            message = (
                "Some labels count where attention_mask is 0: padding becomes part of the training data. Label it with "
                "ignore_index (-100)."
            )
            warn(message)


def check_ending(network: Network, likelihood: Likelihood, x: Any) -> None:
    """Refuse a network that ends in the softmax or the sigmoid that the likelihood applies to its outputs."""
    if not isinstance(likelihood, (Bernoulli, Classification)):
        return
    with recording(), network.lock:
        theta = network.theta.clone().requires_grad_()
        last = _last_operation(network(theta, map_leaves(ordinary, x)))
    if isinstance(likelihood, Classification) and last == "SoftmaxBackward":
        msg = f'The network ends in a softmax: "classification" takes logits, and would apply a second one. {_LOGS}'
        raise LikelihoodError(msg)
    if isinstance(likelihood, Bernoulli) and last == "SigmoidBackward":
        msg = (
            f'The network ends in a sigmoid: "{likelihood.name}" takes logits, and would apply a second one. {_LOGITS}'
        )
        raise LikelihoodError(msg)


def _last_operation(outputs: Tensor) -> str:
    """Return the name of the operation that outputs come from, without operations that only move them."""
    node = outputs.grad_fn
    while node is not None and node.name().rstrip("0123456789") in _PASSING and node.next_functions:
        node = node.next_functions[0][0]
    return "" if node is None else node.name().rstrip("0123456789")
