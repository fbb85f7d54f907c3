"""What MkDocs does beside building pages: it takes in the pages that lie outside of `docs/`, and mends their links.

README.md, CONTRIBUTING.md, CHANGELOG.md and examples/README.md are read where they are, so that nothing is written
twice. A link to a source file, which the site does not have, becomes its text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {  # pages of the site, and where they are in the repository
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "examples.md": "examples/README.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Fill in the entries of the navigation that are patterns, such as `tutorials/*.md`."""
    config["nav"] = [_filled(entry, Path(config["docs_dir"])) for entry in config["nav"]]
    return config


def _filled(entry: Any, folder: Path) -> Any:
    if not isinstance(entry, dict):
        return entry
    [(title, what)] = entry.items()
    if isinstance(what, list):
        found: list[Any] = []
        for inner in what:
            if isinstance(inner, str) and "*" in inner:
                paths = sorted(path.relative_to(folder).as_posix() for path in folder.glob(inner))
                found += [path for path in paths if path not in found]
            else:
                found.append(_filled(inner, folder))
        return {title: found}
    return entry


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of `docs/`."""
    from mkdocs.structure.files import File

    for name, path in OUTSIDE.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend links between pages inside and outside of `docs/`."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]  # it has none beside the tabs
    here = PurePosixPath("docs", page.file.src_uri)
    source = PurePosixPath(OUTSIDE.get(page.file.src_uri, str(here)))
    pages = {path: name for name, path in OUTSIDE.items()}

    def mended(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        found = os.path.normpath(source.parent / path)
        uri = pages.get(found, found.removeprefix("docs/") if found.startswith("docs/") else None)
        if uri is None or files.get_file_from_path(uri) is None:
            if (ROOT / found).exists() and not found.startswith("docs/"):
                return text  # a file of the source, which the site does not show
            return match[0]  # MkDocs says that it leads nowhere
        relative = os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent)
        dark = uri.replace(".svg", "-dark.svg")
        if image and dark != uri and files.get_file_from_path(dark) is not None:
            twin = relative.replace(".svg", "-dark.svg")
            return f"![{text}]({relative}#only-light)![{text}]({twin}#only-dark)"
        return f"{image}[{text}]({relative}{mark}{anchor})"

    parts = re.split(r"(?ms)(^ *```.*?^ *```)", markdown)
    return "".join(part if part.lstrip().startswith("```") else _LINK.sub(mended, part) for part in parts)
