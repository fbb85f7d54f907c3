"""Installs distributions into empty environments and runs README's lines there: ``make wheel-test``.

Each environment has what a person gets with ``pip install 'nullbayes[demo]'`` and nothing else. The lines run in an
empty folder, so that nothing is imported from the checkout.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECK = """
import doctest, pathlib, sys
import nullbayes
assert pathlib.Path(nullbayes.__file__).is_relative_to(sys.prefix), nullbayes.__file__
found = doctest.testfile(sys.argv[1], module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
assert found.attempted > 9 and not found.failed, found
print(nullbayes.__version__, found.attempted, "lines")
"""


def ten_lines(readme: str) -> str:
    """Return the first block of Python in README."""
    found = re.search(r"(?ms)^```python\n(.*?)^```", readme)
    assert found is not None, "README has no block of Python"
    assert len(doctest.DocTestParser().get_examples(found[1])) >= 10
    return found[1]


def try_out(distribution: Path, folder: Path) -> str:
    """Install a distribution into a new environment, run README's lines there, and return what they printed."""
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    constraints = ROOT / "constraints.txt"
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", constraints]
    subprocess.run([*pip, f"{distribution.resolve()}[demo]"], check=True)
    lines = folder / "lines.txt"
    lines.write_text(ten_lines((ROOT / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = [python, "-W", "error::UserWarning:nullbayes", "-c", CHECK, lines]
    return subprocess.run(run, check=True, cwd=folder, env=clean, capture_output=True, text=True).stdout.strip()


def main(paths: list[str]) -> None:
    """Try out distributions, one after the other."""
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{path.name}: {try_out(path, Path(folder))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
