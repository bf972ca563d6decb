"""The pages as a whole: their length, what stands in them twice, and the table that each points to."""

import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
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


def test_a_site_with_a_link_that_leads_nowhere(tmp_path):
    from site_pages import BuildError, on_post_build

    (tmp_path / "a").mkdir()
    (tmp_path / "picture.png").touch()
    (tmp_path / "a" / "page.html").write_text('<h2 id="part">x</h2><img src="../picture.png">')
    right = (
        '<a href="a/page.html#part">1</a> <a href="https://else.org/x">2</a> <a href="#top" id="top">3</a>'
    )
    (tmp_path / "index.html").write_text(right)
    on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    wrong = '<a href="a/page.html#other">4</a> <img src="gone.png"> <a href="#below">5</a>'
    (tmp_path / "index.html").write_text(right + wrong)
    with pytest.raises(BuildError) as error:
        on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    links = ["a/page.html#other", "gone.png", "#below"]
    assert str(error.value).splitlines()[1:] == [f"index.html: {link}" for link in links]
