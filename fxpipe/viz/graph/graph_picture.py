"""The collapsed graph as graphviz source, which dot lays out: a cluster for each stage, in it a row for each
module, F and B beside each other and W below.

The picture reads downwards as the forward runs.  Gradients flow upwards: dot gets these edges from their
target to their source, with the arrow at the other end.
"""

from __future__ import annotations

import graphviz

from fxpipe.errors import number_of, shortened
from fxpipe.schedule.ops import Phase
from fxpipe.schedule.units import bytes_text, flops_text
from fxpipe.viz.graph.boxes import Box, Boxes, Flow
from fxpipe.viz.labels import FONT, dot_html, dot_label
from fxpipe.viz.palette import OFFLOADED, PHASES, tint
from fxpipe.viz.roles import MEANING

GREY = "#666666"
FRAME = {"style": "rounded,filled", "color": "#888888", "fillcolor": "#F6F6F6", "labeljust": "c"}


def graph_picture(
    boxes: Boxes, title: tuple[str, ...], stages: tuple[tuple[str, ...], ...]
) -> graphviz.Digraph:
    """title: lines above the picture.  stages: per stage the lines above its boxes."""
    # newrank: boxes of one row stand at one height within their clusters.
    layout = {"newrank": "true", "ranksep": "0.12", "nodesep": "0.6", "labelloc": "t", "labeljust": "l"}
    dot = graphviz.Digraph(
        "fxpipe",
        graph_attr=FONT | layout | {"label": _heading(title, boxes)},
        node_attr=FONT | {"shape": "box", "style": "rounded,filled"},
        edge_attr=FONT | {"fontsize": "8", "color": GREY, "arrowsize": "0.7"},
    )
    ids = {box.place: f"b{i}" for i, box in enumerate(boxes.boxes)}
    for stage, lines in enumerate(stages):
        with dot.subgraph(name=f"cluster_{stage}") as cluster:
            cluster.attr(label=dot_label(lines), **FRAME)
            _add_rows(cluster, {ids[box.place]: box for box in boxes.boxes if box.place.color.stage == stage})
    largest = max((flow.bytes for flow in boxes.flows if flow.crosses), default=1)
    for flow in boxes.flows:
        source, target, look = ids[flow.source], ids[flow.target], _look(flow, largest)
        if flow.source.color.phase is not Phase.F and not flow.is_to_weights:  # upwards
            dot.edge(target, source, dir="back", **look)
        else:
            dot.edge(source, target, **look)
    leaf = {"shape": "ellipse", "style": "filled", "fillcolor": "white"}
    for number, (name, place) in enumerate(boxes.batch):
        dot.node(f"batch{number}", dot_label([f"batch: {shortened(name)}"]), **leaf)
        dot.edge(f"batch{number}", ids[place], style="dashed")
    for number, (name, place) in enumerate(boxes.results):
        dot.node(f"result{number}", dot_label([shortened(name)]), **leaf)
        dot.edge(ids[place], f"result{number}", style="dashed")
    return dot


def _heading(title: tuple[str, ...], boxes: Boxes) -> str:
    phases = {box.place.color.phase for box in boxes.boxes}
    keys = "".join(
        f"<TD BGCOLOR='{tint(PHASES[p], 0.45)}' BORDER='1' COLOR='{PHASES[p]}'>{p} {MEANING[p]}</TD>"
        for p in Phase
        if p in phases
    )
    lines = "thick, colored: sent to another stage; thin: handed on within a stage"
    if any(flow.offloaded for flow in boxes.flows):
        lines += "; purple, dashed: includes offloadable values"
    rows = [
        f"<FONT POINT-SIZE='16'><B>{dot_html(title[0])}</B></FONT>",
        *map(dot_html, title[1:]),
        f"<TABLE BORDER='0' CELLSPACING='4'><TR>{keys}</TR></TABLE>",
        lines,
        " ",
    ]
    cells = "".join(f"<TR><TD ALIGN='LEFT'>{row}</TD></TR>" for row in rows)
    return f"<<TABLE BORDER='0' CELLBORDER='0' CELLSPACING='2'>{cells}</TABLE>>"


def _add_rows(cluster: graphviz.Digraph, boxes: dict[str, Box]) -> None:
    """boxes: of one stage, by their names."""
    rows: dict[tuple[str, bool], list[str]] = {}
    for name, box in boxes.items():
        phase, size = box.place.color.phase, number_of(box.nodes, "op")
        lines = (
            shortened(box.place.path) or "(the model itself)",
            f"{size}, {flops_text(box.flops)}" if box.flops else size,
        )
        look = {"fillcolor": tint(PHASES[phase], 0.45), "color": PHASES[phase], "group": str(phase)}
        cluster.node(name, dot_label(lines), **look)
        rows.setdefault((box.place.path, phase is Phase.W), []).append(name)
    for row in rows.values():
        cluster.body.append(f"\t\t{{rank=same {' '.join(row)}}}\n")


def _look(flow: Flow, largest: int) -> dict[str, str]:
    """largest: bytes of the largest flow between stages."""
    text = bytes_text(flow.bytes)
    tip = f"{number_of(flow.values, 'value')}, {text}"
    # Rows are two ranks apart, with W between them.
    look = {"label": text, "tooltip": tip, "minlen": "1" if flow.is_to_weights else "2"}
    if flow.crosses:
        width = 1.5 + 2.5 * flow.bytes / max(largest, 1)  # in points: thicker than what stays in a stage
        return look | {"penwidth": f"{width:.1f}", "color": PHASES[flow.source.color.phase], "weight": "2"}
    if flow.offloaded:
        tip = f"{tip}, {bytes_text(flow.offloaded)} of it can be offloaded"
        return look | {"tooltip": tip, "penwidth": "1.2", "color": OFFLOADED, "style": "dashed"}
    return look | {"penwidth": "0.8"}
