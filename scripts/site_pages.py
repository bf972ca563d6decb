"""A hook of mkdocs: pages of the repository that are outside of docs/, and the links to them.

On GitHub, README.md and the pages in docs/ link to each other and to files of the repository by relative
paths. In the site README.md is the front page, and linked files outside of docs/ are in ``repository/``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
#: How far up the search shows a page, where it is not 1: newcomers' pages before contributors'.
BOOST = {
    "howto.md": 3.0,
    "training.md": 2.0,
    "gpus.md": 2.0,
    "trainers.md": 2.0,
    "schedules.md": 2.0,
    "tutorial.md": 1.5,
    "models.md": 1.5,
    "reference.md": 0.5,
    "certificate.md": 0.5,
    "coverage.md": 0.5,
    "architecture.md": 0.3,
}
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is linked, and what that links to in turn."""
    waiting = [*(ROOT / page for page in PAGES), *ROOT.glob("docs/*.md")]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        if not path.is_relative_to(ROOT / "docs"):
            files.append(File.generated(config, in_site(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += [(path.parent / link).resolve() for link in LINK.findall(path.read_text())]
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    boost = 0.3 if page.file.src_uri.startswith("repository/") else BOOST.get(page.file.src_uri, 1.0)
    page.meta["search"] = {"boost": boost}
    here, source = os.path.dirname(page.file.src_uri), Path(page.file.abs_src_path or "")

    def linked(match: re.Match[str]) -> str:
        target = (source.parent / match.group(1)).resolve()
        if target.is_dir():
            target /= "README.md"
        if not target.is_relative_to(ROOT):
            return match.group()
        return os.path.relpath(in_site(target), here)

    # Every second part is a block of code.
    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(linked, part) for part in parts[::2]]
    return "".join(parts)


def in_site(path: Path) -> str:
    """The place of a file of the repository in the site's sources."""
    if path == ROOT / "README.md":
        return "index.md"
    docs = ROOT / "docs"
    if path.is_relative_to(docs):
        return str(path.relative_to(docs))
    return f"repository/{path.relative_to(ROOT)}"
