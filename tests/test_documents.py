"""The pages for contributors name what there is: modules, tests, paths, public names, permitted imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nullbayes as nb
from support import architecture_page, guards, thinned

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("src", "tests", "docs", "benchmarks", "examples", *(p.name for p in (ROOT / "src/nullbayes").glob("*/")))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def code(page: Path) -> list[str]:
    """What a page writes as code: spans between backticks, and the lines of blocks."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```.*?^```", text)
    return [*re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```", "", text)), *blocks]


def test_every_module_has_tests_that_guard_it() -> None:
    found = guards.table()
    missing, gone = sorted(set(guards.modules()) - set(found)), sorted(set(found) - set(guards.modules()))
    assert not missing, "not in the table of CONTRIBUTING.md: run make guards"
    assert not gone, "in the table of CONTRIBUTING.md, but there is no such module: run make guards"
    assert all(found.values())
    assert list(found) == sorted(found), "the table of CONTRIBUTING.md is not sorted: run make guards"


def test_tests_that_guard_a_module_exist() -> None:
    files = {file for files in guards.table().values() for file in files}
    assert not [file for file in sorted(files) if not (ROOT / "tests" / file).is_file()], "run make guards"


def test_guards_are_the_tests_that_enter_what_few_others_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "modules", lambda: ["io.py", "cli.py"])
    often, seldom = {f"io.py:{i}:f" for i in range(4)}, {f"io.py:{i}:g" for i in range(9)}
    entered = {
        "test_a.py": often,
        "test_b.py": often | seldom,
        "test_c.py": often | {f"memory.py:{i}:f" for i in range(9)},
    }
    assert guards.chosen(entered) == {"io.py": ["test_b.py", "test_a.py"], "cli.py": [guards.ELSE]}


@pytest.mark.parametrize(
    ("file", "contents", "factor"),
    [
        ("test_a.py", "import nullbayes as nb", 1),
        ("linalg/test_a.py", "", 2),
        ("test_linalg.py", "", 2),
        ("linalg/test_normal.py", "", 6),
        ("test_a.py", "from nullbayes.linalg.normal import normal_matrix", 2),
        ("test_a.py", "from nullbayes.linalg import held, normal", 2),
        ("test_a.py", 'monkeypatch.setattr("nullbayes.linalg.normal._TILE", 1)', 2),
        ("test_a.py", "from nullbayes.linalg.normalize import normal_matrix", 1),
    ],
)
def test_a_test_file_with_a_relation_to_a_module_counts_more(
    file: str, contents: str, factor: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guards, "ROOT", tmp_path)
    (tmp_path / "tests" / "linalg").mkdir(parents=True)
    (tmp_path / "tests" / file).write_text(contents)
    assert guards.likeness("linalg/normal.py", file) == factor


def test_table_of_guards_fits_a_line() -> None:
    long = {"posteriors/projected.py": [f"posteriors/test_{'x' * 15}_{i}.py" for i in range(3)]}
    assert max(map(len, guards.written(long).splitlines())) <= guards.WIDTH
    assert "_1.py" in guards.written(long)


def test_architecture_page_has_the_imports_that_the_tests_enforce() -> None:
    assert architecture_page.FILE.read_text(encoding="utf-8") == architecture_page.document(), "run make docs"


@each_page
def test_paths_exist(page: Path) -> None:
    named = {match for span in code(page) for match in re.findall(r"[\w/.-]+/[\w.-]*\w(?:\.\w+)?/?", span)}
    paths = {name for name in named if name.split("/")[0] in FOLDERS and "..." not in name}
    places = (ROOT, ROOT / "src" / "nullbayes", ROOT / "tests")
    assert not [path for path in sorted(paths) if not any((place / path).exists() for place in places)]


@each_page
def test_public_names_exist(page: Path) -> None:
    names = {match for span in code(page) for match in re.findall(r"\bnb((?:\.[A-Za-z_]\w*)+)", span)}
    for name in sorted(names):
        found = nb
        for part in name.strip(".").split("."):
            assert hasattr(found, part), f"nb{name}"
            found = getattr(found, part)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


@each_page
def test_lines_can_be_reviewed(page: Path) -> None:
    text = re.sub(r"(?ms)^```text$.*?^```$", "", page.read_text(encoding="utf-8"))  # what a program printed
    lines = text.splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]  # rows of tables cannot be cut


def test_the_recipe_for_likelihoods_lists_the_modules_that_ask_for_their_types() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    part = text[text.index("## How to add a likelihood") : text.index("## How to add a baseline")]
    pattern = re.search(r'grep -rnE "([^"]+)" src', part)
    assert pattern is not None
    package = ROOT / "src" / "nullbayes"
    asking = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if re.search(pattern[1], file.read_text(encoding="utf-8")) and file.parent.name != "likelihoods"
    }
    assert set(re.findall(r"(?m)^ *\| `([\w/]+\.py)` \|", part)) == asking, "step 3 of the recipe"


@pytest.mark.parametrize("n_tasks", range(2, 9))
@pytest.mark.parametrize("every", [2, 3, 4, 5, 6, 7])
def test_every_entry_of_a_table_has_cases_that_make_test_runs(n_tasks: int, every: int) -> None:
    kept = {i % n_tasks for i in range(26 * n_tasks) if i * thinned.TURN % 1.0 < 1.0 / every}
    assert kept == set(range(n_tasks))


def test_glossary_defines_each_term_once() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = [term.strip(".:").lower() for term in re.findall(r"\*\*([^*]+)\*\*", text)]
    assert len(terms) == len(set(terms))
    for term in ("row", "null space", "residual", "tolerance", "sweep", "prior precision", "temperature", "promise"):
        assert term in terms
