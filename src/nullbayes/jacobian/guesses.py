"""How well a network predicts the targets of some data, beside what one can say without it.

A network that is not trained, whose weights were not loaded or whose inputs are prepared in another way, is found by
this. So are targets in another order than their inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nullbayes.errors import UntrainedWarning, warn
from nullbayes.likelihoods import Bernoulli, Classification, Likelihood, Regression

# how much worse than the mean, in squared errors, or than frequencies, in likelihood, causes a warning
_NUMBERS = {"training": 1.0, "held-out": 1.25}
_LABELS = {"training": (1.0, 0.0), "held-out": (1.5, 0.2)}  # times, and nats per label beyond that
_ADVICE = {
    "training": "A posterior around it says nothing. Are the trained weights loaded, model.load_state_dict(...)?",
    "held-out": "Are the targets in the order of their inputs?",
}


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
        ``kind`` says what data these are: a weak network may be worse than what held-out data say themselves by chance,
        and one whose targets are in another order is far worse.
        """
        varies = self._squares > 0
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
        balanced = gained <= 2.0 * float(errors.sqrt()) / len(counts)
        frequencies = float(
            torch.special.entr(counts / counts.sum(1, keepdim=True).clamp_min(1.0)).sum(1) @ counts.sum(1)
        )
        chance = 2.0 * (most * (1.0 - most / max(n, 1.0))) ** 0.5  # two standard errors
        factor, nats = _LABELS[kind]
        if 0.0 < factor * frequencies + nats * n <= self._nll and right <= most + chance and balanced:
            message = (
                f"The network predicts its {kind} labels no better than their frequencies do: "
                f"NLL {self._nll / n:.3g} where frequencies have {frequencies / n:.3g}, accuracy {right / n:.3g} "
                f"where the most frequent label has {most / n:.3g}. {_ADVICE[kind]} Are inputs prepared, and classes "
                "numbered, as in training?"
            )
            warn(message, UntrainedWarning)


def _frequencies(labels: Tensor, chosen: Tensor, one_of_many: bool, n_classes: int) -> Tensor:  # (1, C) or (O, 2)
    """Count the chosen ones of some labels (n, ...)."""
    if one_of_many:
        return torch.bincount(labels[chosen], minlength=n_classes)[None]
    ones, all_chosen = (labels * chosen).flatten(1).sum(0), chosen.flatten(1).sum(0)
    return torch.stack([all_chosen - ones, ones], 1)
