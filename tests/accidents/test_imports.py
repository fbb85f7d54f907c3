"""The command line imports what it needs, and nothing that happens to lie in the current folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nullbayes import command
from support.processes import PACKAGES

HEAVY = {"matplotlib", "sklearn", "transformers", "scipy", "curvlinops", "pandas"}
CHECKOUT = Path(command.__file__).parents[3]

# the command that an installer writes, which then tells what was imported
SCRIPT = """
import atexit, json, sys
atexit.register(lambda: print("\\n" + json.dumps(sorted(sys.modules))))
from nullbayes.command import main
sys.exit(main())
"""
STRANGERS = (
    "torch", "argparse", "numpy", "json", "nullbayes", "sitecustomize", "usercustomize", "matplotlib", "sklearn",
    "benchmarks/__init__", "benchmarks/run", "benchmarks/frame", "safetensors/__init__", "tqdm/__init__",
)  # fmt: skip


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A folder of files that say so when they are imported."""
    folder = tmp_path / "strange"
    for name in STRANGERS:
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r} + '\\n')\nraise ImportError({name!r})\n"
        )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nullbayes").write_text(SCRIPT)
    return folder


def run(folder: Path, *arguments: str, told: bool = True) -> tuple[str, set[str]]:
    """What Python prints, started in a folder, and what it had imported in the end, where it is told."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    if not told:
        return done.stdout, set()
    assert done.returncode == 0, done.stdout + done.stderr
    text, _, modules = done.stdout.rstrip().rpartition("\n")
    return text, set(json.loads(modules))


def test_the_command_imports_no_file_of_the_current_folder_and_nothing_heavy(strange: Path) -> None:
    text, modules = run(strange, str(strange.parent / "bin" / "nullbayes"), "--help")
    assert "demo" in text
    assert not (strange.parent / "imported").exists()
    assert not modules & HEAVY
    assert not {"benchmarks", "nullbayes.demo"} & modules


@pytest.mark.slow
def test_python_m_with_P_imports_no_file_of_the_current_folder(strange: Path) -> None:
    """``python -m`` puts the current folder first, whatever a package does; ``-P`` is what its docstring advises."""
    text, _ = run(strange, "-P", "-m", "nullbayes", "--help", told=False)
    assert "demo" in text
    assert not (strange.parent / "imported").exists()


@pytest.mark.slow
def test_a_benchmark_subprocess_imports_no_file_of_the_current_folder(strange: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); from benchmarks import frame; "
        "print(frame.in_fresh_process('benchmarks.run', '_plain', 3)); print('[]')"
    )
    assert run(strange, "-P", "-c", code)[0] == "3"
    assert not (strange.parent / "imported").exists()
