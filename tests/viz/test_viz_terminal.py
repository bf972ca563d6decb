"""The timeline in a terminal."""

from rich.style import Style

from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.viz.palette import PHASES, tint
from fxpipe.viz.terminal import timeline_text


def timeline(name="1f1b", ranks=2, microbatches=2, chunks=1):
    costs = chain([StageCost(1 / chunks, 1 / chunks, 1 / chunks)] * ranks * chunks)
    return simulate(
        build(name, ranks=ranks, microbatches=microbatches, costs=costs, stages_per_rank=chunks), costs
    )


def test_letters():
    assert timeline_text(timeline(), 38, colored=False).plain.splitlines() == [
        "0 F0··F1··        B0······    B1······",
        "1     F0··B0······F1··B1······        ",
        "  F forward   B both gradients   ",
    ]


def test_blocks_of_color():
    text = timeline_text(timeline(), 38, colored=True)
    rows = text.plain.splitlines()
    assert rows[0].split() == ["0", "0", "1", "0", "1"]
    blocks = [span for span in text.spans if isinstance(span.style, Style) and span.style.bgcolor]
    colors = [span.style.bgcolor.name for span in blocks[:4]]
    forward, backward = (PHASES[phase].lower() for phase in "FB")
    assert colors == [forward, tint(forward, 0.22).lower(), backward, tint(backward, 0.22).lower()]


def test_more_ops_than_cells():
    text = timeline_text(timeline("zb-h1", ranks=3, microbatches=50), 20, colored=False)
    assert all(len(row) == 20 for row in text.plain.splitlines()[:3])


def test_many_ranks_are_cut():
    rows = timeline_text(timeline(ranks=100, microbatches=2), 60, colored=False).plain.splitlines()
    assert len(rows) == 34
    assert rows[15].startswith("15 ")
    assert rows[16] == "…  68 more ranks"
    assert rows[17].startswith("84 ")
