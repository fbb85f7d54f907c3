"""The inputs that a page shows: the strangest, the most certain, and the strangers that look familiar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nullbayes.command.answers import Answers, ask, shown
from nullbayes.command.data import Given, batches, inputs_in, is_given
from nullbayes.page import Gallery, gallery

_MOST = 8  # inputs of a gallery


@dataclass
class _Best:
    """The inputs with the largest keys among all that were seen."""

    key: Callable[[Answers], Any]  # (n,) of a batch
    entries: list[tuple[float, Any, str]] = field(default_factory=list)  # key, input, what is said of it

    def see(self, x: Tensor | None, answers: Answers, start: int) -> None:
        """Take in inputs, with what a posterior says about them; ``start`` is the number of the first."""
        keys = self.key(answers)
        for i in keys.argsort()[::-1][:_MOST].tolist():
            one = None if x is None else x[i].detach().cpu().clone()  # a view would keep the whole batch
            self.entries.append((float(keys[i]), one, _label(answers, i, start + i)))
        self.entries = sorted(self.entries, key=lambda entry: -entry[0])[:_MOST]

    def gallery(self, caption: str) -> Gallery:
        """Return the pictures of what was found."""
        return gallery(caption, [one for _, one, _ in self.entries], [label for _, _, label in self.entries])


def galleries(
    posterior: Any, data: Any, strangers: Mapping[str, Any], alpha: float, batch_fn: Callable[[Any], Any] | None = None
) -> list[Gallery]:
    """Return pictures of familiar inputs, the strangest and the most certain, and of strangers that look familiar.

    They have p-values where the posterior is calibrated, and scores where it is not.
    """
    strangest, certain = _Best(_strangeness), _Best(_certainty)
    _see(posterior, data, alpha, batch_fn, [strangest, certain])
    found = [
        strangest.gallery("Familiar inputs that look the strangest"),
        certain.gallery("Familiar inputs that are predicted with most certainty"),
    ]
    for label, inputs in strangers.items():
        missed = _Best(lambda answers: -_strangeness(answers))
        _see(posterior, inputs, alpha, batch_fn, [missed])
        found.append(missed.gallery(f"{label}: those that look the most familiar"))
    return found


def _see(posterior: Any, data: Any, alpha: float, batch_fn: Callable[[Any], Any] | None, wanted: list[_Best]) -> None:
    start, given = 0, is_given(data)
    batch_fn = None if given else batch_fn
    for batch in shown(batches(data), "looking at inputs"):
        answers = ask(posterior, Given([batch]) if given else [batch], alpha)
        for best in wanted:
            best.see(inputs_in(batch, batch_fn), answers, start)
        start += len(answers.arrays["score"])


def _strangeness(answers: Answers) -> Any:
    return answers.arrays["score"]


def _certainty(answers: Answers) -> Any:
    """Return the largest probability, or minus the standard deviation; of positions the mean."""
    probs = answers.arrays.get("probs")
    if probs is None:
        values = -answers.arrays["std"]
    else:
        values = probs.max(1) if answers.likelihood == "classification" else abs(probs - 0.5)
    return values.reshape(len(values), -1).mean(1)


def _label(answers: Answers, i: int, number: int) -> str:
    """Say what the posterior says about an input."""
    arrays, parts = answers.arrays, [f"input {number}"]
    parts.append(f"p = {arrays['p_value'][i]:.3f}" if "p_value" in arrays else f"score {arrays['score'][i]:.3g}")
    probs = arrays.get("probs")
    if probs is not None and probs.ndim == 2 and answers.likelihood == "classification":
        parts.append(f"class {probs[i].argmax()} with {probs[i].max():.1%}")
    elif probs is None and arrays["mean"].ndim == 2:
        parts.append(f"{arrays['mean'][i][0]:.3g} ± {arrays['std'][i][0]:.2g}")
    return ", ".join(parts)
