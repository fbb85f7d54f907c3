"""Errors and warnings of the library. Every message says what to change.

Errors derive from `NullBayesError` and from a built-in error, so that ``except ValueError`` works too. Warnings derive
from `NullBayesWarning`; the numbers that cause them are also in ``info`` and ``report``.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

_LIBRARIES = ("nullbayes", "contextlib", "torch")  # whose frames may lie between a warning and the user's code


class NullBayesError(Exception):
    """Base class of the errors that the library raises."""


class DataError(NullBayesError, ValueError):
    """The loader, a batch or the targets cannot be used as they are."""


class InputError(DataError, RuntimeError):
    """The network failed on inputs that differ from the training inputs in shape or type."""


class ModelError(NullBayesError, ValueError):
    """The model or its parameters cannot be used as they are."""


class LikelihoodError(NullBayesError, ValueError):
    """The likelihood does not fit the outputs or the targets."""


class SettingsError(NullBayesError, ValueError):
    """An argument is out of range, or two of them contradict each other."""


class NotFittedError(NullBayesError, RuntimeError):
    """A method was called before ``fit`` or ``prepare``, which it needs."""


class FileError(NullBayesError, ValueError):
    """A posterior file is damaged, of another format or of another model, or could not be written."""


class DistributedError(NullBayesError, RuntimeError):
    """Another process of the same run failed, was killed, or does something else."""


class ProcessLostError(DistributedError):
    """Another process of the same run was killed, or the connection to it broke."""


class NullBayesWarning(UserWarning):
    """Base class of the warnings of the library."""


class ConvergenceWarning(NullBayesWarning):
    """Some samples did not reach the tolerance; the best ones found are returned."""


class CollapseWarning(NullBayesWarning):
    """Almost no noise is left after the projection: the posterior is nearly the point estimate."""


class UnderfitWarning(NullBayesWarning):
    """The predictions on the training data moved more than they should."""


class UntrainedWarning(NullBayesWarning):
    """The network knows nothing about its data: it is untrained, its weights were not loaded, or targets are equal."""


@contextlib.contextmanager
def optional(purpose: str) -> Iterator[None]:
    """Say what to install, where a package is missing that is imported in this ``with`` block."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"{purpose} needs {error.name}: pip install {error.name}"
        raise ModuleNotFoundError(msg, name=error.name) from error


def warn(message: str, category: type[Warning] = NullBayesWarning) -> None:
    """Warn at the line of the user's code that called the library.

    That line is in the first frame outside of the package, and outside of the decorators of contextlib and torch.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
