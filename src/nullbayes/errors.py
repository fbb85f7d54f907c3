"""What can go wrong, by name: every message says what to change.

Errors derive from :class:`NullBayesError` and from the built-in they refine, so ``except ValueError`` works too.
Warnings derive from :class:`NullBayesWarning`; numbers that deserve one are also values in ``info`` and ``report``.
"""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = ("nullbayes", "contextlib", "torch")  # whose frames may lie between a warning and the user's code


class NullBayesError(Exception):
    """Base of every error that the library raises on purpose."""


class DataError(NullBayesError, ValueError):
    """The loader, a batch or a target is not what the computation needs."""


class InputError(DataError, RuntimeError):
    """The network could do nothing with inputs that are not like those it was trained on."""


class ModelError(NullBayesError, ValueError):
    """The model or its parameters cannot be used as they are."""


class LikelihoodError(NullBayesError, ValueError):
    """The likelihood does not fit the outputs or the targets."""


class SettingsError(NullBayesError, ValueError):
    """An argument is out of range, or two of them contradict each other."""


class NotFittedError(NullBayesError, RuntimeError):
    """A method was called before the work that it rests on was done."""


class FileError(NullBayesError, ValueError):
    """A posterior file is damaged, too new, belongs to another model, or could not be written."""


class NullBayesWarning(UserWarning):
    """Base of every warning of the library."""


class ConvergenceWarning(NullBayesWarning):
    """Some samples did not reach the tolerance; they are returned as far as they got."""


class CollapseWarning(NullBayesWarning):
    """Next to nothing is left of the noise: the posterior is (nearly) the point estimate."""


class UnderfitWarning(NullBayesWarning):
    """The predictions on the training data moved more than they should."""


def warn(message: str, category: type[Warning] = NullBayesWarning) -> None:
    """Warn at the line of the user's code that called the library.

    That line is in the first frame outside of the package, and outside of the decorators of contextlib and torch.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
