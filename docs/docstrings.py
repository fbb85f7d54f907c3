r"""Docstrings as the site shows them: roles and formulas as Markdown, and functions that a class binds as its methods.

`mkdocstrings` reads docstrings with griffe, which takes them for Markdown. Ours have roles such as :meth:`fit` and
formulas such as :math:`A^\top A`, which become code and MathML. Browsers show MathML without a script.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe
from latex2mathml.converter import convert

_MATH = re.compile(r":math:`([^`]+)`", re.DOTALL)
_DISPLAYED = re.compile(r"(?m)^([ ]*)\.\. math:: (.+)$")
_ROLE = re.compile(r":(?:class|meth|func|data|attr|mod):`~?([^`<]+?)(?:\s*<[^`>]+>)?`")


def mathml(latex: str, display: str = "inline") -> str:
    """Return a formula as MathML, in one line."""
    found = " ".join(latex.split())
    found = re.sub(r"\\(?:B|b)igl?r?\b|\\(?:B|b)ig[lr]?(?=[()])", "", found)  # sizes of brackets, which MathML finds
    return convert(found, display=display).replace("\n", "")


def markdown(text: str) -> str:
    """Return a docstring with its roles and formulas as Markdown."""
    text = _DISPLAYED.sub(lambda match: match[1] + mathml(match[2], "block"), text)
    text = _MATH.sub(lambda match: f"<span>{mathml(match[1])}</span>", text)  # Markdown takes bare math for a block
    return _ROLE.sub(lambda match: f"`{match[1]}`", text)


def bound(owner: Any, name: str) -> Any:
    """Return the function that a class holds under a name, if that name is not defined in the class itself."""
    found = inspect.getattr_static(owner, name, None)
    found = found.fget if isinstance(found, property) else found
    return inspect.unwrap(found) if inspect.isfunction(found) else None


class Docstrings(griffe.Extension):
    """What is done to every docstring, and to every class, when griffe has read the library."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Turn docstrings into Markdown, and names that a class binds to functions into methods."""
        for cls in list(_objects(pkg, griffe.Class)):
            if not cls.module.path.startswith(f"{pkg.name}.integrations"):  # which import what may not be there
                self._bind(pkg, cls)
        for found in _objects(pkg, griffe.Object):
            if found.docstring is not None:
                found.docstring.value = markdown(found.docstring.value)

    def _bind(self, pkg: griffe.Module, cls: griffe.Class) -> None:
        owner = getattr(importlib.import_module(cls.module.path), cls.name, None)
        for name in vars(owner) if inspect.isclass(owner) else ():
            function = None if name.startswith("_") else bound(owner, name)
            if function is None or "." in function.__qualname__ or not function.__module__.startswith(pkg.name):
                continue  # no function of a module
            source = pkg[f"{function.__module__}.{function.__qualname__}".removeprefix(f"{pkg.name}.")]
            cls.set_member(name, self._method(name, source, isinstance(getattr(owner, name), property)))

    def _method(self, name: str, source: griffe.Function, is_property: bool) -> griffe.Object:
        old = source.docstring
        text = old and griffe.Docstring(old.value, parser=old.parser, parser_options=old.parser_options)
        if is_property:
            found: griffe.Object = griffe.Attribute(name, annotation=source.returns, docstring=text)
            found.labels.add("property")
            return found
        return griffe.Function(
            name,
            parameters=griffe.Parameters(*source.parameters),
            returns=source.returns,
            docstring=text,
        )


def _objects(found: griffe.Object, kind: type[griffe.Object]) -> Any:
    """Yield an object and all that it holds, without what is imported, if they are of a kind."""
    if isinstance(found, kind):
        yield found
    for member in found.members.values():
        if not member.is_alias:
            yield from _objects(member, kind)
