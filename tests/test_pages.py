"""The pages as a whole: their length, what stands in them twice, and the table that each points to."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/*.md"))
#: Without the table of models, which is made from data, and searched.
READ = [page for page in PAGES if page.name != "coverage.md"]


def words(page: Path) -> int:
    return sum(any(map(str.isalnum, word)) for word in page.read_text().split())  # not the lines of tables


def test_pages_are_short():
    assert words(ROOT / "README.md") <= 1_000
    assert sum(map(words, READ)) <= 30_000, {page.name: words(page) for page in READ}


def test_no_sentence_stands_twice():
    sentences: Counter[str] = Counter()
    for page in [*ROOT.glob("*.md"), *READ]:
        text = re.sub(r"```.*?```|^\|.*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        sentences.update(re.split(r"(?<=[.:;])\s", " ".join(text.split())))
    assert not [text for text, count in sentences.items() if count > 1 and len(text.split()) > 6]


@pytest.mark.parametrize("page", [page.name for page in PAGES if page.name != "limits.md"])
def test_each_page_points_to_what_ran_where(page):
    assert "limits.md" in (ROOT / "docs" / page).read_text()
