"""What an index shows of a release: addresses in the place of links into the repository."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from release import absolute, urls

import fxpipe

ROOT = Path(__file__).parents[1]
REPOSITORY, SITE = "https://example.org/fxpipe", "https://docs.example.org"


@pytest.mark.parametrize("site", ["", SITE])
def test_readme_has_addresses_alone(site):
    readme = (ROOT / "README.md").read_text()
    before, after = (
        re.findall(r"\]\(([^)\s]+)", text) for text in (readme, absolute(readme, REPOSITORY, site))
    )
    assert len(before) == len(after) > 20
    for link, address in zip(before, after, strict=True):
        assert address.startswith(("https://", "#")), address
        assert address == link or (ROOT / link.partition("#")[0]).exists(), link


def test_pages_are_on_the_site_and_pictures_in_the_repository():
    text = "[![A step](docs/step.svg)](docs/live_report.html) [x](docs/a.md#b) [y](CHANGELOG.md) [z](https://z.org)"
    assert absolute(text, REPOSITORY, SITE) == (
        f"[![A step]({REPOSITORY}/raw/main/docs/step.svg)]({SITE}/live_report.html) [x]({SITE}/a.html#b) "
        f"[y]({REPOSITORY}/blob/main/CHANGELOG.md) [z](https://z.org)"
    )


def test_the_changes_begin_with_this_version():
    """An index takes no version twice."""
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == fxpipe.__version__


def test_the_project_has_its_addresses():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text() + urls(REPOSITORY, SITE))["project"]
    assert project["urls"]["Documentation"] == SITE
    assert project["urls"]["Repository"] == REPOSITORY
