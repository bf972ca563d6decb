"""``fxpipe compare``: all schedules for one setting."""

import json
import re

import pytest

from fxpipe.cli import main
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.units import PLAIN
from fxpipe.viz.frontier_picture import FrontierPoint, frontier, frontier_svg

pytestmark = pytest.mark.slow

SETTING = ["compare", "--ranks", "4", "--microbatches", "6", "--forward", "1", "--backward-input", "1.2"]
SETTING += ["--backward-weight", "0.6", "--effort", "0.1"]


def compared(capsys, *more: str) -> dict[str, dict]:
    assert main([*SETTING, *more, "--json"]) == 0
    return {entry["schedule"]: entry for entry in json.loads(capsys.readouterr().out)}


def test_every_family_and_auto(capsys):
    found = compared(capsys)
    assert list(found) == [*FAMILIES, "auto"]
    assert found["1f1b"]["seconds"] == pytest.approx(2.8 * 9)
    assert found["1f1b"]["peak_memory"] == [4, 3, 2, 1]
    assert found["1f1b"]["makespan_bubble"] == pytest.approx(1 / 3)
    others = [entry["seconds"] for name, entry in found.items() if name != "auto"]
    assert found["auto"]["seconds"] <= min(others)
    assert found["zb-v"]["placement"] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_limits(capsys):
    found = compared(capsys, "--stages-per-rank", "2", "--memory-limit", "2", "--limits", "2.5", "3.5")
    assert "gpipe" in found["gpipe"]["why_not"]
    assert "zb-h2" in found["zb-h2"]["why_not"], "it has one stage per rank"
    assert max(found["auto"]["peak_memory"]) <= 2
    for limit in (2.5, 3.5):
        assert max(found[f"auto ≤ {limit}"]["peak_memory"]) <= limit
    assert found["auto"]["seconds"] >= found["auto ≤ 2.5"]["seconds"] >= found["auto ≤ 3.5"]["seconds"]


@pytest.mark.variation
def test_many_steps(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    asked = ["--stages-per-rank", "1", "--update", "1", "--verdict", "0.1"]
    post = compared(capsys, *asked, "--validation", "post")
    barrier = compared(capsys, *asked, "--validation", "barrier")
    periods = [own["period"] for own in post.values() if "period" in own]
    assert post["auto"]["period"] == min(periods) < barrier["auto"]["period"]
    assert barrier["1f1b"]["period"] == pytest.approx(2.8 * 9 + 1)
    assert "period" not in compared(capsys, *asked)["1f1b"]
    assert main([*SETTING, *asked, "--validation", "post"]) == 0
    out = capsys.readouterr().out
    assert "W 0.6, transfer 0, update 1\n" in out
    assert "of many" in out
    assert "a smaller span bubble" in out


def test_table_and_picture(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    picture = tmp_path / "frontier.svg"
    assert main([*SETTING, "--stages-per-rank", "1", "--draw", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 ranks, 6 microbatches; F 1, B 1.2, W 0.6, transfer 0\n")
    rows = {cells[1].strip(" *"): cells for line in out.splitlines() if len(cells := line.split("│")) > 4}
    assert [cell.strip() for cell in rows["1f1b"][2:8]] == ["1", "plain", "33.33%", "33.33%", "4", "25.2"]
    assert [cell.strip() for cell in rows["zb-v"][2:4]] == ["–", "–"]
    assert "zb-v: schedule zb-v has 2 stages per rank in v placement, not 1" in out
    assert f"drawn: {picture}" in out
    drawn = set(re.findall(r"<title>([^:]+): ", picture.read_text()))
    assert {"gpipe", "1f1b", "zb-h1", "zb-h2", "auto"} <= drawn
    assert "zb-v" not in drawn


def test_nothing_fits(capsys):
    assert main([*SETTING, "--memory-limit", "0.1"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fxpipe: error: no schedule is possible: ")
    assert captured.err.count("\n") == 1


def test_frontier():
    a, b, c = FrontierPoint("a", 4, 0.3), FrontierPoint("b", 8, 0.1), FrontierPoint("c", 12, 0.1)
    worse, twin = FrontierPoint("worse", 8, 0.2), FrontierPoint("twin", 8, 0.1)
    assert frontier([worse, c, b, a]) == (a, b)
    assert frontier([a, b, twin]) == (a, b, twin)


def test_picture_of_the_frontier():
    points = [FrontierPoint("a", 4, 0.3), FrontierPoint("b", 8, 0.1), FrontierPoint("worse", 8, 0.2)]
    picture = frontier_svg(points, "the title", "span bubble", PLAIN)
    assert "the title" in picture
    assert "span bubble against peak memory" in picture
    assert picture.count('class="on"') == 2
    assert picture.count('class="dot"') == 1
    assert "<title>worse: 8, bubble 20.00%</title>" in picture
