"""What users pass to `evaluate`: methods with their scores, familiar data with targets, sets of strangers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nullbayes.decisions import COMBINED
from nullbayes.errors import DataError, LikelihoodError, SettingsError
from nullbayes.jacobian.batches import is_array
from nullbayes.jacobian.loaders import as_loader, check_order
from nullbayes.likelihoods import Likelihood
from nullbayes.predictive import SCORES

ALL = "all"
CALIBRATED = "calibrated"  # the score that a calibrated method decides by


@dataclass(frozen=True)
class Entry:
    """A method, and the scores that it is judged by; None is the score that a calibrated method decides by."""

    name: str
    method: Any
    kinds: dict[str, str | None]  # by the names of the rows

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the method."""
        found: Likelihood = self.method.likelihood
        return found

    @property
    def predicts(self) -> bool:
        """Whether the method makes predictions, and is not only a score."""
        return self.method.n_samples > 0 and hasattr(self.method, "predict")

    def from_prediction(self, kind: str | None) -> bool:
        """Return whether a score is computed from the prediction for an input."""
        return self.predicts and kind in SCORES and kind not in self.method._scoring.own


def read_methods(methods: Any, scores: str | None) -> list[Entry]:
    """Return the methods by name, with the scores that were asked for; refuse what cannot be compared."""
    if not (scores is None or isinstance(scores, str)):
        msg = f'scores must be None (the default of each method), the name of a score, or "all", not {scores!r}.'
        raise SettingsError(msg)
    named = list(_named(methods))
    if not named:
        msg = 'There is no method to evaluate: pass a mapping such as {"projected": posterior}.'
        raise SettingsError(msg)
    entries = []
    for name, given in named:
        method, kind = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        if isinstance(method, type):
            msg = f"{name!r} is the class {method.__name__}: pass an object, {method.__name__}(model).fit(x, y)."
            raise SettingsError(msg)
        if not hasattr(method, "ood_score"):
            msg = f"{name!r} is {_described(method)}, which has no ood_score: pass a fitted posterior or baseline."
            raise SettingsError(msg)
        assert method.n_samples >= 0  # which refuses a method without a fit
        entries.append(Entry(name, method, _kinds(name, method, scores if kind is None else kind, kind is None)))
    _check_names([row for entry in entries for row in entry.kinds])
    likelihoods = {entry.likelihood.name: entry.name for entry in entries}
    if len(likelihoods) > 1:
        found = " and ".join(f"{kind} ({name!r})" for kind, name in likelihoods.items())
        msg = f"The methods have different likelihoods, {found}: evaluate each kind in a table of its own."
        raise LikelihoodError(msg)
    return entries


def read_familiar(data: Any) -> Any:
    """Return familiar data in a form that can be read with targets, again for each method and in the same order."""
    if is_array(data):
        msg = "in_data has no targets: pass a pair in brackets, evaluate(methods, (x, y)), or a loader of such pairs."
        raise DataError(msg)
    data = [data] if isinstance(data, Mapping) else data
    _check_repeats("in_data", data)
    check_order(as_loader(data), "Methods are compared on the same examples in the same order")
    return data


def read_strangers(strangers: Any) -> dict[str, Any]:
    """Return the sets of strangers by name; there may be none, if only predictions are compared."""
    strangers = {} if strangers is None else strangers
    if not isinstance(strangers, Mapping) or not all(isinstance(name, str) for name in strangers):
        msg = 'strangers must be a mapping from names to inputs, such as {"noise": x}.'
        raise DataError(msg)
    for name, data in strangers.items():
        _check_repeats(f"strangers[{name!r}]", data)
    return dict(strangers)


def scores_of(method: Any) -> tuple[str, ...]:
    """Return the names of the scores of a method that its likelihood allows."""
    return tuple(kind for kind in method.scores if kind != COMBINED)


def _named(methods: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(methods, Mapping):
        for name, given in methods.items():
            if not isinstance(name, str):
                msg = f"The names of methods must be strings, not {name!r}."
                raise SettingsError(msg)
            yield name, given
        return
    if hasattr(methods, "ood_score"):
        methods = [methods]
    if isinstance(methods, (str, bytes)) or not isinstance(methods, Sequence):
        msg = f'methods must be a mapping such as {{"projected": posterior}}, not {_described(methods)}.'
        raise SettingsError(msg)
    for given in methods:
        method = given[0] if isinstance(given, tuple) and given else given
        yield (method if isinstance(method, type) else type(method)).__name__, given


def _kinds(name: str, method: Any, asked: str | None, for_all: bool) -> dict[str, str | None]:
    """Return the scores of the rows of a method by the names of the rows."""
    known, calibrated = scores_of(method), getattr(method, "calibration", None) is not None
    if asked == ALL:
        first: dict[str, str | None] = {f"{name}: {CALIBRATED}": None} if calibrated else {}
        found = first | {f"{name}: {kind}": kind for kind in known}
        if not found:
            msg = f"{type(method).__name__} has no score for a {method.likelihood.name} likelihood: leave it out."
            raise SettingsError(msg)
        return found
    if calibrated and (asked is None or asked == COMBINED == method.calibration.kind):
        return {name: None}
    if asked == COMBINED and COMBINED in method.scores:
        what = f"{name!r} ({type(method).__name__})"
        msg = f'{what} is not calibrated for "{COMBINED}": call calibrate(held_out, kind="{COMBINED}") first.'
        raise SettingsError(msg)
    if asked is None:
        asked = method._scoring.default
    if asked not in known:
        have = f"it has {', '.join(known)}" if known else f"none fits a {method.likelihood.name} likelihood"
        repair = "choose one of them for it, name: (method, score)" if for_all and known else "choose one of them"
        msg = f"{name!r} ({type(method).__name__}) has no score {asked!r}: {have}" + f"; {repair}." * bool(known)
        raise SettingsError(msg if known else f"{msg}; leave it out.")
    return {name: asked}


def _check_names(names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        msg = (
            f"Two rows of the table would be called {twice[0]!r}: give the methods names of their own, "
            '{"one": method, "other": method}.'
        )
        raise SettingsError(msg)


def _check_repeats(name: str, data: Any) -> None:
    """Refuse what can be iterated only once: each method reads the data."""
    if isinstance(data, Iterator):
        msg = f"{name} can be read only once, and each method reads it: pass a list or a DataLoader."
        raise DataError(msg)


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
