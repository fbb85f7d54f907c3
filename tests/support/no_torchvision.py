"""Hides a torchvision that does not import from packages that look for it.

``curvlinops`` installs torchvision by way of ``backpack``, which imports it in its examples alone. Beside a torch of
another build, such as one for the CPU only, torchvision does not import. Lightning and torchmetrics look at its version
and then fail as a whole, and transformers looks for its module. Once hidden, it is a package that is not installed.
Nothing is uninstalled, so the tests do not depend on how an environment was made, and a torchvision that works stays.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError


def hide_broken_torchvision() -> None:
    """Make torchvision look as if it was not installed, unless it can be imported."""
    try:
        import torchvision  # noqa: F401
    except Exception:  # missing, or not made for this torch: a RuntimeError about its operators
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        found = Distribution.from_name

        def from_name(name: str) -> Distribution:
            if name == "torchvision":
                raise PackageNotFoundError(name)
            return found(name)

        Distribution.from_name = from_name  # type: ignore[method-assign, assignment]
