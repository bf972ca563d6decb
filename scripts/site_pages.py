"""A hook of mkdocs: pages of the repository that are outside of docs/, and the links to them.

On GitHub, README.md and the pages in docs/ link to each other and to files of the repository by relative
paths. In the site README.md is the front page, and linked files outside of docs/ are in ``repository/``.

mkdocs checks the links of Markdown; ``on_post_build`` those of the pages as built, so also of raw HTML, of
docstrings and of what the theme adds.
"""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import BuildError
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
    "replay.md": 0.5,
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


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site with a link that leads nowhere within it."""
    pages = {path.resolve(): Anchors(path.read_text()) for path in Path(config.site_dir).rglob("*.html")}
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc or path.name == "404.html":  # whose links begin at the root
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            place = unquote(address.fragment)
            if not target.exists() or (place and target in pages and place not in pages[target].names):
                broken.append(f"{path.relative_to(Path(config.site_dir).resolve())}: {link}")
    if broken:
        raise BuildError("Links that lead nowhere:\n" + "\n".join(broken))


class Anchors(HTMLParser):
    """The links of a page of HTML, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.names.add(value)


def in_site(path: Path) -> str:
    """The place of a file of the repository in the site's sources."""
    if path == ROOT / "README.md":
        return "index.md"
    docs = ROOT / "docs"
    if path.is_relative_to(docs):
        return str(path.relative_to(docs))
    return f"repository/{path.relative_to(ROOT)}"
