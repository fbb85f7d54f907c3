"""The documentation has every public name, every error and every warning; its figures are those that were measured."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nullbayes as nb
from nullbayes import errors, testing
from support import installed
from support.user_folder import imported

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TROUBLES = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
PUBLIC = (
    nb, nb.baselines, nb.detectors, nb.distributed, nb.errors, nb.likelihoods, nb.metrics, nb.projectors, testing,
)  # fmt: skip
CLASSES = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_reference_has_every_public_name_once(module: ModuleType) -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    shown = re.findall(rf"(?m)^::: {module.__name__}\.(\w+)$", pages)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
        if value.__module__.startswith("nullbayes") and name not in ("warn", "optional")
        if module is errors or value.__module__ != errors.__name__
    }
    assert len(shown) == len(set(shown)), "a name is there twice"
    assert (public - set(shown), set(shown) - public) == (set(), set()), "not in docs/api; there, but not public"


# --- troubleshooting --------------------------------------------------------------------------------------------------


def sentences(node: ast.expr) -> str:
    """The fixed words of a string in source code, with … where a value is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(sentences(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return sentences(node.left) + sentences(node.right)
    return "…"


def strings() -> Iterator[str]:
    """All strings of the library."""
    for path in Path(nb.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp):
                yield sentences(node)


def warned() -> list[str]:
    """The messages of all warnings: what is passed to `warn`, or the strings that are assigned to that name."""
    found = []
    for path in Path(nb.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef) or function.name == "warn":
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "warn":
                    name = call.args[0].id if isinstance(call.args[0], ast.Name) else None
                    assigned = [
                        (node.lineno, sentences(node.value))
                        for node in ast.walk(function)
                        if isinstance(node, ast.Assign) and name and ast.unparse(node.targets[0]) == name
                        if node.lineno <= call.lineno
                    ]
                    found.append(max(assigned)[1] if name else sentences(call.args[0]))
    return found


def quoted() -> list[str]:
    """The pieces of messages that the page quotes: in italics, in the first column of its tables."""
    cells = re.findall(r"(?m)^\| (\*.+?\*) \| ", TROUBLES)
    return [piece for cell in cells for piece in re.findall(r"\*([^*]+)\*", cell)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_of_errors_and_warnings_has_an_entry(kind: type) -> None:
    [text] = re.findall(rf"(?ms)^### {kind.__name__}\n(.*?)(?=^##|\Z)", TROUBLES)
    assert re.search(r"(?m)^\| \*", text), "an entry quotes at least one message"


def test_messages_that_are_quoted_are_those_of_the_library() -> None:
    everything = "\n".join(strings())
    assert len(quoted()) > 50
    assert not [piece for piece in quoted() if piece not in everything]


def test_every_warning_has_an_entry() -> None:
    messages, pieces = warned(), [piece for piece in quoted() if len(piece) >= 16]  # "file" is in many
    assert len(messages) > 10
    assert not [message for message in messages if not any(piece in message for piece in pieces)]


# --- the command line -------------------------------------------------------------------------------------------------


def test_what_is_typed_is_defined_in_the_file_that_is_printed() -> None:
    page, readme = ((ROOT / path).read_text(encoding="utf-8") for path in ("docs/command-line.md", "README.md"))
    [printed] = re.findall(r"(?ms)^```python\n# own\.py\n(.*?)^```", page)
    defined = {node.name for node in ast.walk(ast.parse(printed)) if isinstance(node, ast.FunctionDef)}
    typed = re.findall(r"own:(\w+)", "\n".join(re.findall(r"(?ms)^```sh\n(.*?)^```", page + readme)))
    assert len(typed) > 20
    assert set(typed) == defined


# --- figures, pictures, versions --------------------------------------------------------------------------------------


def test_figures_are_those_of_the_measured_table() -> None:
    measured = dict(re.findall(r"(?m)^\| (`\w+`[^|]*?) \|.*?\| \**([\d.]+)\** \|$", (DOCS / "scores.md").read_text()))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = {name.replace("`", ""): figure for name, figure in re.findall(r"(?m)^\| (`\w+`.*) \| (0\.\d{3}) \|$", text)}
    plain = {name.replace("`", ""): figure for name, figure in measured.items()}
    assert len(found) >= 5
    for name, figure in found.items():
        assert figure == plain.get(name, plain.get(name.split(",")[0])), name


def test_pictures_are_there_in_both_forms_and_used() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *DOCS.glob("*.md")])
    used = set(re.findall(r"pictures/([\w-]+\.(?:svg|png))\)", text))
    dark = {name.replace(".svg", "-dark.svg") for name in used}  # the site shows them in place of the others
    assert used | dark == {path.name for path in (DOCS / "pictures").iterdir()}


def test_pictures_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures = imported(DOCS / "pictures.py")
    drawn = pictures.main(tmp_path, ("null-space", "temperature"))
    assert {path.name for path in drawn} < {path.name for path in (DOCS / "pictures").iterdir()}
    assert all("<svg" in path.read_text(encoding="utf-8") for path in drawn)
    assert len(pictures.PICTURES) * 2 == len(list((DOCS / "pictures").glob("*.svg")))


def test_version_is_written_in_one_place_and_quoted_right() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in settings["project"]
    assert settings["tool"]["hatch"]["version"]["path"] == "src/nullbayes/__init__.py"
    assert f"\nversion: {nb.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## [{nb.__version__}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_lines_that_are_tried_out_are_those_of_the_readme() -> None:
    lines = installed.ten_lines((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "posterior.calibrate(" in lines
    assert len([line for line in lines.splitlines() if line.startswith(">>> ")]) <= 14


# --- the site itself --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quickstart_runs() -> None:
    found = doctest.testfile(str(DOCS / "quickstart.md"), False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 25
    assert found.failed == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of MkDocs and its plugins are not ours; --strict stops at ours
def test_site_is_built_without_warnings_and_fetches_nothing(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")
    }
    for name in ("index.html", "contributing.html", "changelog.html", "troubleshooting.html"):
        assert name in pages
    for page in pages.values():
        assert not re.findall(r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="(?:https?:)?//', page)
    posteriors = pages["api/posteriors.html"]
    for name in ("fit", "predict", "calibrate", "is_ood", "prior_precision"):
        assert f'id="nullbayes.ProjectedPosterior.{name}"' in posteriors
    assert "<math" in posteriors
    assert not re.findall(r":(?:math|meth|class):", "".join(text for name, text in pages.items() if "api/" in name))
