"""Builds the wheel and the sdist that go to an index, where README.md and its pictures stand alone.

    python scripts/release.py https://github.com/OWNER/fxpipe --site https://OWNER.github.io/fxpipe

In a copy of the last commit README's links become addresses, those of pages of docs/ on the site if there is
one, and pyproject.toml gets the project's.  The files are in build/release/.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build/release"
#: ``](target`` and, before a picture, ``![text](target``.
LINK = re.compile(r"(!\[[^]]*)?\]\((?!https?:|#)([^)\s]+)")


def absolute(markdown: str, repository: str, site: str = "") -> str:
    """The text of README.md with addresses in the place of relative links."""

    def address(link: re.Match[str]) -> str:
        picture, target = link.groups()
        if site and not picture and target.startswith("docs/"):
            target = f"{site}/{re.sub(r'[.]md(?=#|$)', '.html', target.removeprefix('docs/'))}"
        else:
            target = f"{repository}/{'raw' if picture else 'blob'}/main/{target}"
        return f"{picture or ''}]({target}"

    return LINK.sub(address, markdown)


def urls(repository: str, site: str = "") -> str:
    """The table of a project's addresses in pyproject.toml."""
    known = {
        "Repository": repository,
        "Documentation": site or f"{repository}/blob/main/docs/pages.md",
        "Changes": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{address}"\n' for name, address in known.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("repository", help="its address, which has /blob/main and /raw/main")
    parser.add_argument("--site", default="", help="the address of what make site has built")
    options = parser.parse_args()
    addresses = options.repository.rstrip("/"), options.site.rstrip("/")
    with tempfile.TemporaryDirectory() as folder:
        copy, python = Path(folder) / "fxpipe", Path(folder) / "venv/bin/python"
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), copy], check=True)
        readme, project = copy / "README.md", copy / "pyproject.toml"
        readme.write_text(absolute(readme.read_text(), *addresses))
        project.write_text(project.read_text() + urls(*addresses))
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "build", "twine"], check=True)
        subprocess.run([python, "-m", "build", "--outdir", OUT, copy], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([python, "-m", "twine", "check", "--strict", *OUT.iterdir()], check=True)


if __name__ == "__main__":
    main()
