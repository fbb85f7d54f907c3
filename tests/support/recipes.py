"""The classes that CONTRIBUTING.md calls complete, as the page has them: `Poisson` and `RelativeNoise`.

They stand in the tables of likelihoods and methods, so that the contract tests run with a likelihood and a baseline
that the library knows nothing of, and the recipes are known to work.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCK = re.compile(r"(?ms)^ *```python\n( *from __future__ .*?)^ *```$")

for block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
    exec(compile(textwrap.dedent(block), str(PAGE), "exec", dont_inherit=True), globals())
