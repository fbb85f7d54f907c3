"""The modules of the library as files, and tests that look at each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nullbayes

PACKAGE = Path(nullbayes.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def each_module(check: Callable[[Path], None]) -> Callable[[], None]:
    """Look at all modules in one test, which names those that fail: tests of their own would take longer to start."""

    def test() -> None:
        failed: dict[str, str] = {}
        for path in MODULES:
            try:
                check(path)
            except AssertionError as error:
                failed[path.relative_to(PACKAGE).as_posix()] = str(error).partition("\n")[0]
        assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())

    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    return test
