"""Every public function and class says what it takes and returns, and has an example. Doctests run the examples."""

from __future__ import annotations

import doctest
import enum
import inspect
import re
import typing
from types import ModuleType
from typing import Any

import pytest

import nullbayes as nb
from nullbayes import testing

MODULES: dict[str, ModuleType] = {
    "nb": nb,
    "nb.baselines": nb.baselines,
    "nb.detectors": nb.detectors,
    "nb.distributed": nb.distributed,
    "nb.likelihoods": nb.likelihoods,
    "nb.metrics": nb.metrics,
    "nb.projectors": nb.projectors,
    "nb.testing": testing,
}
POSTERIOR_METHODS = [
    name for name in dir(nb.ProjectedPosterior)
    if not name.startswith("_") and inspect.isfunction(getattr(nb.ProjectedPosterior, name))
]  # fmt: skip


def public_names() -> dict[str, Any]:
    """The functions and classes of the library that its public modules give out, and the methods of a posterior."""
    found = {
        f"{prefix}.{name}": value
        for prefix, module in MODULES.items()
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
        if value.__module__.startswith("nullbayes.") and not value.__module__.startswith("nullbayes.errors")
    }
    methods = {f"nb.ProjectedPosterior.{name}": getattr(nb.ProjectedPosterior, name) for name in POSTERIOR_METHODS}
    return found | methods


NAMES = public_names()


def sections(text: str) -> dict[str, str]:
    """The sections of a NumPy docstring by their titles; the text before the first one has the title ""."""
    parts = re.split(r"(?m)^(\w[\w ]*)\n-+\n", inspect.cleandoc(text))
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def described(section: str) -> set[str]:
    """The names that a section describes: those at the start of its lines, before a colon."""
    heads = re.findall(r"(?m)^(\S[^:\n]*?)(?: :.*)?$", section)
    return {name.strip().lstrip("*") for head in heads for name in head.split(",")}


def parameters(value: Any) -> set[str]:
    """The names of the arguments, without ``self``; those of ``**options`` are the keys of their typed dictionary."""
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return set()
    names = set(inspect.signature(value).parameters) - {"self", "args", "kwargs"}
    if "options" not in names:
        return names
    hint = typing.get_type_hints(value.__init__ if inspect.isclass(value) else value)["options"]
    return (names - {"options"}) | set(typing.get_args(hint)[0].__annotations__)


def shows_something(examples: str) -> bool:
    """Whether an example runs: one that is skipped proves nothing."""
    return ">>>" in examples and "+SKIP" not in examples


def returns_something(value: Any) -> bool:
    return not inspect.isclass(value) and inspect.signature(value).return_annotation not in (None, "None")


def missing(name: str, value: Any) -> list[str]:
    """What the docstring of a name lacks."""
    found = sections(value.__doc__ or "")
    inputs = described(found.get("Parameters", "") + found.get("Attributes", ""))
    wanted = {
        "a summary that is a sentence": found[""].split("\n\n")[0].rstrip().endswith((".", "`")),
        f"parameters {sorted(parameters(value) - inputs)}": parameters(value) <= inputs,
        "what it returns": not returns_something(value) or "Returns" in found or "Yields" in found,
        "an example": shows_something(found.get("Examples", "")),
    }
    return [what for what, there in wanted.items() if not there]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_public_name_is_documented(name: str) -> None:
    assert not missing(name, NAMES[name])


@pytest.mark.cpu  # what the examples print is for the CPU
@pytest.mark.parametrize("name", POSTERIOR_METHODS)
def test_example_of_a_method_runs(name: str) -> None:
    """Doctests of modules leave decorated functions out."""
    text = inspect.cleandoc(getattr(nb.ProjectedPosterior, name).__doc__)
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
    assert example.examples
    assert runner.run(example).failed == 0


def test_options_are_the_arguments_that_their_typed_dictionary_names() -> None:
    assert "**options" in str(inspect.signature(nb.baselines.SCOD))
    assert {"model", "memory_budget", "parameters", "prior_precision"} <= parameters(nb.baselines.SCOD)


def test_an_example_that_is_skipped_is_none() -> None:
    assert shows_something(">>> 1 + 1")
    assert not shows_something(">>> 1 + 1  # doctest: +SKIP")


def test_what_is_missing_is_found() -> None:
    def bare(x: int, y: int) -> int:
        """Do something

        Parameters
        ----------
        x : int
            A number.
        """
        return x + y

    def full(x: int, y: int, **z: int) -> int:
        """Do something.

        Parameters
        ----------
        x, y : int
            Numbers.
        **z
            More of them.

        Returns
        -------
        int
            The sum.

        Examples
        --------
        >>> 1 + 1
        2
        """
        return x + y + sum(z.values())

    assert missing("bare", bare) == [
        "a summary that is a sentence",
        "parameters ['y']",
        "what it returns",
        "an example",
    ]
    assert missing("full", full) == []
