"""Who may import whom: the directions between the rooms of the library, read from its source."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.source_files import PACKAGE, each_module

MAX_LINES = 400

ROOT = "nullbayes"  # `import nullbayes`, and the names that its __init__ gives out
_BELOW_POSTERIORS = {
    "decisions", "distributed", "errors", "hashing", "io", "jacobian", "likelihoods", "limits", "linalg", "precision",
    "predictive", "projectors",
}  # fmt: skip

# room -> the rooms that it imports (and itself). A room is a module or a package directly under nullbayes.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "hashing": set(),
    "limits": set(),
    "distributed": {"errors", "limits"},
    "torch_internals": set(),
    "precision": {"torch_internals"},
    "metrics": set(),
    "testing": set(),
    "likelihoods": {"errors"},
    "linalg": {"distributed", "errors", "limits", "precision"},
    "projectors": {"errors", "limits", "linalg", "precision"},
    "jacobian": {"distributed", "errors", "hashing", "likelihoods", "limits", "linalg", "precision", "torch_internals"},
    "io": {"errors", "hashing"},
    "predictive": {"distributed", "errors", "jacobian", "likelihoods", "limits"},
    "decisions": {
        "errors",
        "hashing",
        "jacobian",
        "likelihoods",
        "limits",
        "linalg",
        "metrics",
        "precision",
        "predictive",
    },
    "posteriors": _BELOW_POSTERIORS,
    "baselines": (_BELOW_POSTERIORS - {"distributed", "hashing", "io", "projectors"}) | {"posteriors"},
    "detectors": {"baselines", "errors", "jacobian", "likelihoods", "linalg", "precision", "predictive"},
    "evaluation": {"decisions", "errors", "jacobian", "likelihoods", "metrics", "posteriors", "predictive"},
    ROOT: (_BELOW_POSTERIORS | {"baselines", "detectors", "evaluation", "metrics", "posteriors"})
    - {"hashing", "io", "limits", "precision"},
    "demo": {ROOT},
    "page": {ROOT},
    "experiments": {ROOT, "demo", "page"},
    "integrations": {ROOT, "errors", "jacobian", "predictive"},
    "command": {ROOT, "demo", "experiments", "page"},
    "__main__": {"command"},
}

# The guarded parts of torch, and room -> those that it may use, with all that is below them.
GUARDED = ("torch.func", "torch._functorch", "functorch", "torch.nn")
ALLOWED_TORCH: dict[str, set[str]] = {
    "jacobian": {"torch.func", "torch.nn"},
    "hashing": {"torch.nn.functional"},
    "precision": {"torch.nn.attention"},
    "torch_internals": {"torch.nn"},
    "decisions": {"torch.nn.functional"},
    "posteriors": {"torch.nn"},
    "baselines": {"torch.nn"},
    "detectors": {"torch.nn"},
    "demo": {"torch.nn"},
    "integrations": {"torch.nn"},
    "experiments": {"torch.nn"},
    "command": {"torch.nn"},
}

# What `import nullbayes` must not load: extras, test oracles, and what is slow to import.
NOT_AT_IMPORT = [
    "click",
    "rich",
    "matplotlib",
    "sklearn",
    "scipy",
    "curvlinops",
    "pandas",
    "pytorch_ood",
    "transformers",
    "lightning",
    "onnxscript",
    "nullbayes.integrations",
    "benchmarks",
]


def is_within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` as a string; None for any other expression."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return head and f"{head}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Full dotted names that a module of `package` imports, anywhere in it: a late import is an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = package.split(".")
            base = here[: len(here) - node.level + 1] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def torch_attributes(tree: ast.Module) -> Iterator[str]:
    """What is reached as `torch.a.b`, without an import of its own."""
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    spellings = {"torch"} | {alias.asname for alias in imports if alias.name == "torch" and alias.asname}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}  # torch.nn in torch.nn.functional is no use of torch.nn
    for name in (dotted(node) for node in attributes if id(node) not in inner):
        head, _, tail = (name or "").partition(".")
        if head in spellings:
            yield f"torch.{tail}"


def room_of(name: str) -> str | None:
    """The room that a dotted name is in; None for what is not ours."""
    if not is_within(name, ROOT):
        return None
    second = [*name.split("."), ROOT][1]
    return second if second in ALLOWED else ROOT


def forbidden_rooms(source: str, package: str, room: str) -> set[str]:
    rooms = {room_of(name) for name in imported_names(ast.parse(source), package)}
    return {other for other in rooms if other} - {room} - ALLOWED[room]


def forbidden_torch(source: str, package: str, room: str) -> set[str]:
    tree = ast.parse(source)
    used = {*imported_names(tree, package), *torch_attributes(tree)}
    guarded = {name for name in used if any(is_within(name, part) for part in GUARDED)}
    return {name for name in guarded if not any(is_within(name, p) for p in ALLOWED_TORCH.get(room, set()))}


def locate(path: Path) -> tuple[str, str]:
    """The package that a file's relative imports start from, and its room."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join([ROOT, *parts[:-1]]), ROOT if parts[0] == "__init__" else parts[0]


@each_module
def test_module_imports_only_rooms_below_it(path: Path) -> None:
    package, room = locate(path)
    assert room in ALLOWED, f"{room} is a new room: add it to ALLOWED, with the rooms that it may import"
    forbidden = forbidden_rooms(path.read_text(encoding="utf-8"), package, room)
    assert not forbidden, f"{room} may import {sorted(ALLOWED[room])}, not {sorted(forbidden)}"


@each_module
def test_module_uses_only_the_parts_of_torch_allowed_to_its_package(path: Path) -> None:
    package, room = locate(path)
    forbidden = forbidden_torch(path.read_text(encoding="utf-8"), package, room)
    assert not forbidden, f"{room} may not use {sorted(forbidden)}: that is for jacobian to know"


@each_module
def test_module_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{lines} lines, more than {MAX_LINES}: split it, one idea per module"


@each_module
def test_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), "say in a docstring what it is for"


def test_table_has_no_cycle() -> None:
    assert set(graphlib.TopologicalSorter(ALLOWED).static_order()) == set(ALLOWED)


def test_import_is_light() -> None:
    code = f"import json, sys, nullbayes; print(json.dumps(sorted(set({NOT_AT_IMPORT}) & set(sys.modules))))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [], "import it inside the function that needs it"


@pytest.mark.parametrize(
    ("source", "room"),
    [
        ("import nullbayes.linalg.cg", "linalg"),
        ("from nullbayes.linalg.cg import solve", "linalg"),
        ("from nullbayes import linalg", "linalg"),
        ("from nullbayes import load", ROOT),
        ("import nullbayes as nb", ROOT),
        ("from ..linalg import cg", "linalg"),
        ("from .. import linalg", "linalg"),
        ("def f():\n    from nullbayes import linalg", "linalg"),
        ("if TYPE_CHECKING:\n    from nullbayes.linalg import cg", "linalg"),
    ],
)
def test_every_spelling_of_an_import_is_seen(source: str, room: str) -> None:
    assert forbidden_rooms(source, "nullbayes.metrics", "metrics") == {room}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.func",
        "from torch.func import vmap",
        "from torch import func",
        "import torch\nf = torch.func.vmap(g)",
        "import torch as t\nf = t.func.vmap(g)",
        "from functorch import vmap",
    ],
)
def test_every_spelling_of_autodiff_is_seen(source: str) -> None:
    assert forbidden_torch(source, "nullbayes.linalg", "linalg")
    assert forbidden_torch(source, "nullbayes.posteriors", "posteriors")


def test_functions_are_allowed_where_networks_are_not() -> None:
    for source in (
        "import torch.nn.functional as F",
        "from torch.nn import functional as F",
        "import torch\nloss = torch.nn.functional.mse_loss(a, b).sum()",
    ):
        assert not forbidden_torch(source, "nullbayes", "hashing")
        assert forbidden_torch(source, "nullbayes.linalg", "linalg")
    assert forbidden_torch("from torch import nn", "nullbayes", "hashing")
    assert forbidden_torch("import torch\ndef f(m: torch.nn.Module): ...", "nullbayes", "hashing")


def test_rooms_import_themselves_and_what_is_below() -> None:
    below = "from .base import Projector\nfrom ..linalg import cg"
    assert not forbidden_rooms(below, "nullbayes.projectors", "projectors")


def test_rows_and_projectors_never_meet() -> None:
    assert forbidden_rooms("import nullbayes.jacobian", "nullbayes.projectors", "projectors") == {"jacobian"}
    assert forbidden_rooms("import nullbayes.projectors", "nullbayes.jacobian", "jacobian") == {"projectors"}
