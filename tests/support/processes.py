"""Other Python processes, for what cannot be tried in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nullbayes

PACKAGES = Path(nullbayes.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), str(Path(__file__).parent)])}


def python(*arguments: str | Path, cwd: Path) -> str:
    """What a new interpreter prints, which must end well; it finds the library, and the helpers of the tests."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
