"""The pictures: what is in them, for graphs small enough to count by hand."""

import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxpipe
import fxpipe.ir.liveness
from fxpipe.errors import FxpipeError
from fxpipe.ir.sections import edges_between
from fxpipe.ir.storage import call_nodes
from fxpipe.ir.text import shape_text
from fxpipe.schedule.costs import Exchange, StageCost, Update, chain
from fxpipe.schedule.offload.planner import offload, with_link
from fxpipe.schedule.ops import Color, Phase, Schedule, parse_order
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.steps import simulate_steps
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.units import PLAIN, bytes_text, flops_text, number_text, seconds_text, ticks
from fxpipe.viz.graph.boxes import BoxKey, collapse
from fxpipe.viz.graph.graph_picture import graph_picture
from fxpipe.viz.graph.section_picture import section_picture
from fxpipe.viz.pictures import draw
from fxpipe.viz.svg import text_width
from fxpipe.viz.timeline_picture import timeline_svg

F, B, W = Phase.F, Phase.B, Phase.W
SVG = "{http://www.w3.org/2000/svg}"


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


def blocks(count: int, ranks: int = 2, **options):
    model = nn.Sequential(*(Block(8) for _ in range(count)))
    example = (torch.zeros(4, 8),)
    options = {"microbatches": 4, "schedule": "1f1b"} | options
    return fxpipe.compile(
        model, example, ranks=ranks, loss_fn=lambda out, batch: out.pow(2).mean(), **options
    )


@pytest.fixture(scope="module")
def pipe():
    return blocks(4, split_points=["2"], schedule="zb-h1")


def place(stage: int, phase: Phase, path: str) -> BoxKey:
    return BoxKey(Color(stage, phase), path)


# Boxes


def test_a_box_for_each_stage_phase_and_module(pipe):
    boxes = collapse(pipe.graph, per_section=3)
    by_place = {box.place: box for box in boxes.boxes}
    assert [p.path for p in by_place if p.color == Color(0, F)] == ["0", "1"]
    assert [p.path for p in by_place if p.color == Color(1, F)] == ["2", "3", ""]
    assert by_place[place(0, F, "0")].flops == 2 * (2 * 4 * 8 * 32)
    assert sum(box.nodes for box in boxes.boxes) == len(call_nodes(pipe.graph))


def test_depth_follows_the_number_of_boxes(pipe):
    def paths(**limits):
        return {box.place.path for box in collapse(pipe.graph, **limits).boxes}

    assert paths(per_section=3) == {"0", "1", "2", "3", ""}
    assert {"0", "0.inner", "0.outer"} < paths(per_section=8)
    assert paths(per_section=8, total=20) == {"0", "1", "2", "3", ""}
    assert paths(total=1) == {""}


def test_flows_within_a_stage(pipe):
    flows = {(f.source, f.target): f for f in collapse(pipe.graph, per_section=3).flows}
    hidden = flows[place(0, F, "0"), place(0, F, "1")]
    assert (hidden.values, hidden.bytes, hidden.crosses) == (1, 4 * 8 * 4, False)
    # A block's input and the output of its relu are what its gradients need.
    kept = [f for f in flows.values() if f.source == place(0, F, "1")]
    assert {f.target for f in kept} == {place(0, B, "1"), place(0, W, "1"), place(1, F, "2")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_flows_between_stages_are_the_edges(ranks):
    pipe = blocks(4, ranks)
    flows = [f for f in collapse(pipe.graph).flows if f.crosses]
    found = sum(f.values for f in flows), sum(f.bytes for f in flows)
    passing = edges_between(pipe.sections)
    assert found == (sum(len(m.names) for m in passing), sum(e.bytes for e in pipe.plan.costs.edges))
    assert {(f.source.color, f.target.color) for f in flows} == {(m.source, m.target) for m in passing}


def test_a_value_enters_a_stage_once():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            first = self.parts[0](x)
            second = self.parts[1](first)
            return self.parts[3](self.parts[2](second + first) + first)

    pipe = fxpipe.compile(
        Skip(),
        (torch.zeros(4, 8),),
        ranks=2,
        microbatches=2,
        schedule="1f1b",
        split_points=["parts.2"],
        loss_fn=lambda out, batch: out.sum(),
    )
    # The sum and the skipped value both go to parts.2 and parts.3: the second arrives at one of them.
    flows = collapse(pipe.graph).flows
    sent = [f for f in flows if f.crosses and f.source.color.phase is F]
    passing = [e for e in edges_between(pipe.sections) if e.source.phase is F]
    assert sum(f.values for f in sent) == sum(len(m.names) for m in passing)


def test_batch_and_loss_stand_at_their_boxes(pipe):
    boxes = collapse(pipe.graph, per_section=3)
    assert boxes.batch == (("0", place(0, F, "0")),)
    assert boxes.results == (("loss", place(1, F, "")),)


# The collapsed picture


def picture(pipe):
    boxes = collapse(pipe.graph, per_section=3)
    return graph_picture(boxes, ("Blocks & more",), (("stage 0 on rank 0",), ("stage 1 on rank 1",)))


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz")
def test_dot_lays_out_rows_of_modules_downwards_as_the_forward_runs(pipe):
    plain = picture(pipe).pipe(format="plain", encoding="utf-8")
    centers = {
        name: (float(x), float(y))
        for name, x, y in re.findall(r"^node (b\d+) (\S+) (\S+)", plain, re.MULTILINE)
    }
    places = [box.place for box in collapse(pipe.graph, per_section=3).boxes]
    x, y = ({place: centers[f"b{i}"][axis] for i, place in enumerate(places)} for axis in (0, 1))
    assert len(set(centers.values())) == len(places)
    for stage, path in ((0, "1"), (1, "2"), (1, "3")):
        forward, backward, weights = (place(stage, phase, path) for phase in (F, B, W))
        assert y[forward] == y[backward] > y[weights]
        assert x[forward] != x[backward]
    rows = [place(0, F, "0"), place(0, F, "1"), place(1, F, "2"), place(1, F, "3"), place(1, F, "")]
    assert [y[row] for row in rows] == sorted((y[row] for row in rows), reverse=True)
    assert min(y[p] for p in places if p.color.stage == 0) > max(y[p] for p in places if p.color.stage == 1)


def test_graph_source_says_what_is_in_a_box_and_on_an_edge(pipe):
    boxes, source = collapse(pipe.graph, per_section=3), picture(pipe).source
    assert "Blocks &amp; more" in source
    assert 'label="stage 1 on rank 1"' in source
    assert source.count("group=") == len(boxes.boxes)
    edges = [line for line in source.splitlines() if "->" in line]
    assert len(edges) == len(boxes.flows) + len(boxes.batch) + len(boxes.results)
    sent = [line for line in edges if "penwidth=4.0" in line]
    assert len(sent) == 2
    assert all('label="128 B"' in line for line in sent)
    assert {re.search(r'color="(#\w+)"', line)[1] for line in sent} == {"#56B4E9", "#E69F00"}
    # That of the gradient stands from its target to its source.
    assert ["dir=back" in line for line in sorted(sent, key=lambda line: "#E69F00" in line)] == [False, True]


# One section


def test_section_source_has_every_node(pipe):
    section = next(s for s in pipe.sections if s.color == Color(1, B))
    source = section_picture(section, pipe.sections, "Blocks").source
    ops = [n for n in section.graph.nodes if n.op == "call_function"]
    for node in ops:
        assert re.search(rf'\t{node.name} \[label="[^"]*{node.target}', source)
    assert source.count("shape=cylinder") == sum(v.kind == "parameter" for v in section.inputs)
    assert "parameter\n3.outer.weight\nf32[8, 32]" in source
    assert "test_viz.py:" in source
    assert "to stage 0 B" in source
    assert "to stage 1 W" in source


def test_shape_text():
    assert shape_text(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bf16[2, 3]"
    assert shape_text((torch.zeros(2), torch.zeros((), dtype=torch.bool))) == "f32[2], bool[]"
    assert shape_text(3) == "int"


# The timeline


def hand(text: str, placement: tuple[int, ...], microbatches: int):
    schedule = Schedule("hand", placement, microbatches, parse_order(text))
    costs = chain(
        [StageCost(0.001, 0.001, 0.001, saved_activations=2048, saved_for_weight=1024)] * len(placement)
    )
    return simulate(schedule, costs)


def rectangles(svg: str) -> list[tuple[str, float, float, str]]:
    """(class, x, width, tooltip) of every op's rectangle."""
    found = ET.fromstring(svg).findall(f".//{SVG}g/{SVG}rect[{SVG}title]")
    return [
        (r.get("class"), float(r.get("x")), float(r.get("width")), r.findtext(f"{SVG}title")) for r in found
    ]


def texts(svg: str) -> list[str]:
    return [t.text for t in ET.fromstring(svg).iter(f"{SVG}text")]


def test_timeline_has_a_rectangle_for_each_op():
    svg = timeline_svg(hand("F0.0 B0.0 W0.0\nF1.0 BW1.0", (0, 1), 1), "Model")
    # F0 B1+W1 B0 W0 one after the other: 900 pixels are 6 ms.
    assert rectangles(svg) == [
        ("F", 0, 150, "F0.0 from 0 s, 1 ms"),
        ("B", 600, 150, "B0.0 from 4 ms, 1 ms"),
        ("W", 750, 150, "W0.0 from 5 ms, 1 ms"),
        ("F", 150, 150, "F1.0 from 1 ms, 1 ms"),
        ("BW", 300, 300, "BW1.0 from 2 ms, 2 ms"),
    ]


def test_timeline_says_bubble_peak_and_units():
    timeline = hand("F0.0 F0.1 B0.0 W0.0 B0.1 W0.1\nF1.0 B1.0 W1.0 F1.1 B1.1 W1.1", (0, 1), 2)
    said = " ".join(texts(timeline_svg(timeline, "Model")))
    assert "Model: hand, 2 ranks, 2 microbatches" in said
    assert f"step {seconds_text(timeline.seconds)}" in said
    assert f"span bubble {timeline.span_bubble:.2%}" in said
    assert "peak memory 4 KiB (rank 0)" in said
    assert "peak 2 KiB" in said
    assert "1 ms" in said
    plain = " ".join(texts(timeline_svg(timeline, "Model", PLAIN)))
    assert "ms" not in plain
    assert "KiB" not in plain


def test_memory_curve_rises_and_falls():
    svg = timeline_svg(hand("F0.0 B0.0 W0.0", (0,), 1), "Model")
    # The strip is 26 pixels high and ends at 52; all at F, half from the end of B on.
    path = ET.fromstring(svg).find(f".//{SVG}path").get("d")
    assert path == "M0 52H0V26H600V39H900V52H900V52Z"


def test_later_stages_of_a_rank_are_paler_and_named():
    svg = timeline_svg(hand("F0.0 F3.0 BW3.0 BW0.0\nF1.0 F2.0 BW2.0 BW1.0", (0, 1, 1, 0), 1), "Model")
    looks = [look for look, *_ in rectangles(svg)]
    assert looks == ["F", "F late", "BW late", "BW", "F", "F late", "BW late", "BW"]
    assert "3.0" in texts(svg)


def test_transfers_have_lanes_of_their_own():
    costs = with_link(chain([StageCost(1, 1, 1, 1, 0.5)] * 4), 0.2)
    whole = simulate(build("1f1b", ranks=4, microbatches=8, costs=costs), costs)
    moved = offload(whole, 1.0).timeline
    plain, drawn = (ET.fromstring(timeline_svg(t, "Net", PLAIN)) for t in (whole, moved))
    for direction in ("offload", "reload"):
        shown = [r for r in drawn.iter(f"{SVG}rect") if r.get("class") == direction]
        transfers = [t for own in moved.transfers for t in own if t.transfer.direction == direction]
        assert len(shown) == len(transfers) + 1 > 1  # one in the key
        assert not [r for r in plain.iter(f"{SVG}rect") if r.get("class") == direction]
    heights = [float(svg.get("height")) for svg in (plain, drawn)]
    assert heights[1] > heights[0]


def test_exchanges_have_a_lane_of_their_own():
    costs = replace(chain([StageCost(1, 1, 1)] * 2), exchanges=(Exchange(3.0, 0.5),) * 2)
    timeline = simulate(build("1f1b", ranks=2, microbatches=2, costs=costs), costs)
    svg = ET.fromstring(timeline_svg(timeline, "Net", PLAIN))
    for what, seconds in (("sum", 3.0), ("gather", 0.5)):
        _, *shown = (r for r in svg.iter(f"{SVG}rect") if r.get("class") == what)
        pixels = [float(r.get("width")) for r in shown]
        assert pixels == pytest.approx([900 * seconds / timeline.seconds] * 2, rel=0.01)
    gathered, summed = (
        next(
            r for r in svg.iter(f"{SVG}rect") if r.get("class") == what and r.find(f"{SVG}title") is not None
        )
        for what in ("gather", "sum")
    )
    assert (gathered.get("x"), gathered.find(f"{SVG}title").text) == (
        "0",
        "parameters gathered, stage 0, from 0, 0.5",
    )
    assert summed.find(f"{SVG}title").text == "gradients summed, stage 0, from 9.5, 3"
    assert summed.get("y") == gathered.get("y") > "22"


def test_offloadable_values_are_seen_in_the_graph(monkeypatch):
    monkeypatch.setattr(fxpipe.ir.liveness, "SMALLEST", 1)
    model, example = nn.Sequential(Block(4), Block(4), Block(4)), (torch.randn(8, 4),)
    options = {"ranks": 1, "microbatches": 4, "schedule": "gpipe", "loss_fn": lambda y, x: y.sum()}
    light = fxpipe.compile(model, example, offload=fxpipe.Offload(bandwidth=1e12), **options)
    flows = collapse(light.graph).flows
    offloaded = [flow for flow in flows if flow.offloaded]
    assert {(flow.source.color.phase, flow.target.color.phase) for flow in offloaded} == {(F, B), (F, W)}
    assert all(flow.offloaded <= flow.bytes for flow in offloaded)
    cost = light.plan.costs.stages[0]
    assert sum(flow.offloaded for flow in offloaded) == cost.offloadable + cost.offloadable_for_weight
    source = graph_picture(collapse(light.graph), ("Net",), (("stage 0",),)).source
    assert "of it can be offloaded" in source
    assert "purple, dashed" in source
    assert not any(f.offloaded for f in collapse(fxpipe.compile(model, example, **options).graph).flows)


def test_a_large_timeline_is_small_and_bounded():
    costs = chain([StageCost(1, 1, 1, 1, 0.5)] * 8)
    timeline = simulate(build("zb-h1", ranks=8, microbatches=64, costs=costs), costs)
    svg = timeline_svg(timeline, "Model", PLAIN)
    assert len(rectangles(svg)) == 8 * 64 * 3
    assert len(svg) < 400_000
    assert int(ET.fromstring(svg).get("width")) < 5000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1536), "1.5 KiB"),
        (bytes_text(3 * 2**30), "3 GiB"),
        (flops_text(3_145_728), "3.15 MFLOP"),
        (seconds_text(0), "0 s"),
        (seconds_text(1.25e-4), "125 µs"),
        (seconds_text(0.01802), "18 ms"),
        (number_text(1234.5), "1234"),
    ],
)
def test_numbers(text, expected):
    assert text == expected


def test_ticks():
    assert ticks(10, 5) == (0, 2, 4, 6, 8, 10)
    assert ticks(0.007, 10) == pytest.approx([i * 0.001 for i in range(8)])
    assert ticks(0, 10) == (0,)


# Files


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs graphviz")
def test_pictures_with_dot(pipe, tmp_path):
    files = pipe.draw(tmp_path / "new", expand=(1, "B"))
    assert [f.name for f in files] == [
        "graph.dot",
        "graph.svg",
        "stage1_B.dot",
        "stage1_B.svg",
        "timeline.svg",
    ]
    drawn = texts((tmp_path / "new" / "graph.svg").read_text())
    assert "stage 1 on rank 1" in drawn
    assert "Sequential: one microbatch of a training step" in drawn
    assert "schedule zb-h1, 2 ranks, 2 stages, 4 microbatches" in drawn
    assert "batch: 0" in drawn


def test_sources_and_one_line_without_dot(pipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    files = draw(pipe.plan, pipe.graph, pipe.sections, pipe.simulate(), tmp_path, (0, "F"))
    assert [f.name for f in files] == ["graph.dot", "stage0_F.dot", "timeline.svg"]
    assert all(f.stat().st_size for f in files)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "apt install graphviz" in lines[0]
    assert (
        "beside the .dot files: dot -Tsvg -O graph.dot stage0_F.dot" in lines[0]
    )  # saving renames the folder


def test_a_section_that_is_not_there(pipe, tmp_path):
    with pytest.raises(FxpipeError, match=r"no section \(2, 'B'\).*\(0, 'F'\), \(0, 'B'\)"):
        pipe.draw(tmp_path, expand=(2, "B"))
    assert not list(tmp_path.iterdir())


def test_a_loaded_pipeline_has_a_timeline(pipe, tmp_path):
    loaded = replace(pipe, graph=None, sections=())
    assert [f.name for f in loaded.draw(tmp_path)] == ["timeline.svg"]
    with pytest.raises(FxpipeError, match="loaded"):
        loaded.draw(tmp_path, expand=(0, "F"))


def test_the_legend_has_lines_that_fit():
    """With a wide font too: none of its texts ends behind the next box or the picture."""
    order = parse_order("F0.0 F2.0 F4.0 B4.0 W4.0 B2.0 W2.0 B0.0 W0.0\nF1.0 F3.0 F5.0 BW5.0 B3.0 W3.0 BW1.0")
    schedule = Schedule("hand", (0, 1) * 3, 1, order, vocabulary=Vocabulary(2, 2, 1))
    costs = chain([StageCost(1.0, 1.0, 1.0)] * 6)
    svg = ET.fromstring(timeline_svg(simulate(schedule, costs), "Model", PLAIN))
    height, width = (float(svg.get(name)) for name in ("height", "width"))
    legend = [t for t in svg.findall(f"{SVG}text") if 50 < float(t.get("y")) < height - 20]
    boxes = [(float(r.get("x")), float(r.get("y"))) for r in svg.findall(f"{SVG}rect") if r.get("x")]
    assert len({t.get("y") for t in legend}) == 2
    assert len(boxes) == len(legend) - 1
    for text in legend:
        x, y = float(text.get("x")), float(text.get("y"))
        behind = [left for left, top in boxes if left > x and top == y - 10]
        assert x + text_width(text.text, 11) < min([*behind, width])
    (first,) = {float(line.get("y1")) for line in svg.findall(f"{SVG}line")}
    assert first > max(float(text.get("y")) for text in legend)


@pytest.mark.parametrize(
    ("text", "pixels"),
    [
        ("memory held between ops", 147.2),
        ("S vocabulary, before its barrier", 171.1),
        ("transformer.h.0.attn", 112.2),
    ],
)
def test_a_text_has_room_in_a_wide_font(text, pixels):
    """As measured in DejaVu Sans at 11 pixels."""
    assert pixels <= text_width(text, 11) <= 1.1 * pixels


def test_the_seam_between_two_steps():
    """Updates are boxes, a wait for the verdict is one with a line where the verdict comes."""
    schedule = Schedule("hand", (0, 1), 1, parse_order("F0.0 B0.0 W0.0\nF1.0 B1.0 W1.0"))
    costs = chain([StageCost(1.0, 1.0, 0.0), StageCost(1.0, 1.0, 2.0)])
    costs = replace(costs, update=Update((0.5, 0.25), (), 3.0))
    svg = timeline_svg(simulate_steps(schedule, costs, "post", 3).last(2), "Model", PLAIN)
    drawn = [(look, tip) for look, _, _, tip in rectangles(svg) if look in ("update", "wait")]
    # From 4.5 on, where rank 0 begins the second step; see tests/schedule/test_steps.py.
    assert drawn == [
        ("update", "update from 4.5, 0.5"),
        ("update", "update from 9.5, 0.5"),
        ("update", "update from 5.5, 0.25"),
        ("wait", "waits for the verdict from 2, 0.5"),
        ("update", "update from 10.5, 0.25"),
        ("wait", "waits for the verdict from 7, 0.5"),
    ]
    lines = [line for line in ET.fromstring(svg).iter(f"{SVG}line") if line.get("class") == "verdict"]
    scale = 900 / (15.25 - 4.5)
    expected = [time * scale for time in (3.5, 8.5, 2.5, 7.5)]
    assert [float(line.get("x1")) for line in lines] == pytest.approx(expected, abs=0.01)
    said = " ".join(texts(svg))
    assert "2 steps of many with post-validation: 5 a step" in said
    assert "V wait for the verdict on the step before" in said
    barrier = " ".join(
        texts(timeline_svg(simulate_steps(schedule, costs, "barrier").last(1), "Model", PLAIN))
    )
    assert "with a barrier" in barrier
    assert "verdict" not in barrier
