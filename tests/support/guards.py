"""Which tests guard which module: the table at the end of `CONTRIBUTING.md`, measured by running the tests.

`make guards` runs the tests, at most three cases of each function, notes which functions of the library each test file
enters, and writes the table. A test file guards a module the more, the more functions of the module it enters that few
other test files enter, and the fewer other functions it enters. The same name, the same folder and a direct import
count more. `python -m support.guards jacobian/rows` prints the test files of one module.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "nullbayes"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- guards: written by `make guards` -->", "<!-- guards end -->"
FOLDER = "NULLBAYES_GUARDS"  # the environment variable with the folder that workers write to
WIDTH, MOST, SHARE = 120, 3, 0.2  # of a line; test files per module; score of the last one relative to the first
ELSE = "test_architecture.py"  # for a module without functions

Entered = dict[str, set[str]]  # test file -> functions, as "module.py:line:name"


def modules() -> list[str]:
    """All modules of the library, as paths below `src/nullbayes`."""
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


# --- the table --------------------------------------------------------------------------------------------------------


def table() -> dict[str, list[str]]:
    """Module -> its test files below `tests`, as `CONTRIBUTING.md` has them."""
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index(BEGIN) : text.index(END)]
    lines = [re.findall(r"`([^`]+)`", line) for line in part.splitlines() if line.startswith("| `")]
    return {module: files for module, *files in lines}


def written(found: dict[str, list[str]]) -> str:
    """The table as Markdown, with as many test files as a line has room for."""
    lines = ["| module | tests |", "|---|---|"]
    for module, files in sorted(found.items()):
        while len(line := f"| `{module}` | {', '.join(f'`{file}`' for file in files)} |") > WIDTH and len(files) > 1:
            files = files[:-1]
        lines.append(line)
    return "\n".join(lines)


def chosen(entered: Entered) -> dict[str, list[str]]:
    """For each module the test files that guard it, the best first."""
    files_of: dict[str, set[str]] = defaultdict(set)  # function -> test files that enter it
    for file, functions in entered.items():
        for function in functions:
            files_of[function].add(file)
    breadth = {file: sum(1 / len(files_of[f]) for f in functions) ** 0.5 for file, functions in entered.items()}
    scores: dict[str, dict[str, float]] = {module: defaultdict(float) for module in modules()}
    for function, files in files_of.items():
        if (found := scores.get(function.split(":")[0])) is not None:
            for file in files:
                found[file] += 1 / len(files) / breadth[file]
    result = {}
    for module, found in scores.items():
        for file in found:
            found[file] *= likeness(module, file)
        ranked = sorted(found, key=lambda file: (-found[file], file))
        result[module] = [file for file in ranked[:MOST] if found[file] >= SHARE * found[ranked[0]]] or [ELSE]
    return result


def likeness(module: str, file: str) -> int:
    """How much more a test file counts if it has the name of the module, is in its folder, or imports it."""
    dotted = "nullbayes." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = dotted.rpartition(".")
    direct = re.compile(rf"\b{re.escape(dotted)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    path = ROOT / "tests" / file
    imports = path.is_file() and direct.search(path.read_text(encoding="utf-8")) is not None
    same_folder = module.split("/")[0] in (file.split("/")[0], file.split("/")[0].removeprefix("test_").split(".")[0])
    return (3 if path.stem == f"test_{name}" else 1) * (2 if same_folder else 1) * (2 if imports else 1)


# --- the measurement, a plugin of pytest ------------------------------------------------------------------------------


class Recorder:
    """Notes the functions of the library that are entered while a test runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[int, CodeType] = {}  # by identity: to hash a code object takes longer than to run it
        self.entered: dict[str, dict[int, CodeType]] = defaultdict(dict)
        self.inside = str(PACKAGE) + os.sep

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        self.seen[id(code)] = code

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the first, the middle and the last case of each test function: others enter the same functions."""
        cases: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            cases[item.nodeid.split("[")[0]].append(item)
        items[:] = [
            item for found in cases.values() for item in dict.fromkeys((found[0], found[len(found) // 2], found[-1]))
        ]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        file = Path(item.path)
        if not file.is_relative_to(ROOT / "tests"):  # a doctest
            yield
            return
        name = file.relative_to(ROOT / "tests").as_posix()
        if name not in self.entered:
            self.write()
        self.seen = self.entered[name]
        threading.settrace(self.note)
        sys.settrace(self.note)
        yield
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        """Write what was noted so far, so that a run that is cut short still has a result."""
        found = {
            file: sorted(set(filter(None, map(self.named, codes.values())))) for file, codes in self.entered.items()
        }
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(found))

    def named(self, code: CodeType) -> str | None:
        if not code.co_filename.startswith(self.inside) or code.co_name == "<module>":
            return None
        return f"{Path(code.co_filename).relative_to(PACKAGE).as_posix()}:{code.co_firstlineno}:{code.co_qualname}"


def pytest_configure(config: pytest.Config) -> None:
    if folder := os.environ.get(FOLDER):
        config.pluginmanager.register(Recorder(Path(folder)))


def measure() -> Entered:
    """Run the tests once, two or more at a time, and read what the workers noted."""
    entered: Entered = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        options = ["-p", "support.guards", "-n", "auto", "--dist", "worksteal", "-m", "not slow"]
        command = [sys.executable, "-m", "pytest", "tests", "-q", *options]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, FOLDER: folder}, check=False)
        if done.returncode > 1:  # 1: a test failed, which says nothing about what it guards
            sys.exit(done.returncode)
        for part in Path(folder).glob("*.json"):
            for file, functions in json.loads(part.read_text()).items():
                entered[file].update(functions)
    return entered


def main(arguments: list[str]) -> None:
    if arguments:
        [module] = arguments
        sys.stdout.write(" ".join(f"tests/{file}" for file in table()[module.removesuffix(".py") + ".py"]) + "\n")
        return
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{head}{BEGIN}\n\n{written(chosen(measure()))}\n\n{tail}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
