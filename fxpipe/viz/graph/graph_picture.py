"""The collapsed graph as graphviz source: boxes at the positions of the layout; graphviz routes the flows."""

from __future__ import annotations

import graphviz
from rich.cells import cell_len

from fxpipe.errors import number_of, shortened
from fxpipe.schedule.ops import Phase
from fxpipe.schedule.units import bytes_text, flops_text
from fxpipe.viz.graph.boxes import Box, Boxes, BoxKey, Flow
from fxpipe.viz.graph.layout import HEIGHT, Frame, GraphLayout, Position, lay_out
from fxpipe.viz.labels import dot_html, dot_label
from fxpipe.viz.palette import OFFLOADED, PHASES, tint
from fxpipe.viz.roles import MEANING

FONT = {"fontname": "Helvetica", "fontsize": "10"}
GREY = "#666666"
FRAME = "#F6F6F6"
TERMINAL = 90.0  # from a frame to the middle of a batch leaf beside it


def graph_picture(
    boxes: Boxes, title: tuple[str, ...], stages: tuple[tuple[str, ...], ...]
) -> graphviz.Digraph:
    """title: lines above the picture.  stages: per stage the lines above its boxes."""
    texts = {box.place: _text(box) for box in boxes.boxes}
    layout = lay_out(boxes, len(stages), max(cell_len(line) for text in texts.values() for line in text))
    dot = graphviz.Digraph("fxpipe", node_attr=FONT | {"shape": "box"}, edge_attr=FONT | {"fontsize": "8"})
    # nop: graphviz uses the given positions, and routes the edges.
    dot.attr(layout="nop", splines="ortho", outputorder="edgesfirst")
    ids = {box.place: f"b{i}" for i, box in enumerate(boxes.boxes)}
    _heading(dot, title, boxes, layout.frames[0])
    for stage, (lines, frame) in enumerate(zip(stages, layout.frames, strict=True)):
        _frame(dot, stage, lines, frame)
    for box in boxes.boxes:
        _box(dot, ids[box.place], box, texts[box.place], layout)
    largest = max((flow.bytes for flow in boxes.flows if flow.crosses), default=1)
    for flow in boxes.flows:
        dot.edge(ids[flow.source], ids[flow.target], **_look(flow, largest))
    _terminals(dot, boxes, ids, layout)
    return dot


def _text(box: Box) -> tuple[str, str]:
    size = number_of(box.nodes, "op")
    path = shortened(box.place.path) or "(the model itself)"
    return path, f"{size}, {flops_text(box.flops)}" if box.flops else size


def _heading(dot: graphviz.Digraph, title: tuple[str, ...], boxes: Boxes, first: Frame) -> None:
    rows = [f"<TR><TD ALIGN='LEFT'><FONT POINT-SIZE='16'><B>{dot_html(title[0])}</B></FONT></TD></TR>"]
    rows += [f"<TR><TD ALIGN='LEFT'>{dot_html(line)}</TD></TR>" for line in title[1:]]
    phases = {box.place.color.phase for box in boxes.boxes}
    keys = "".join(
        f"<TD BGCOLOR='{tint(PHASES[p], 0.45)}' BORDER='1' COLOR='{PHASES[p]}'>{p} {MEANING[p]}</TD>"
        for p in Phase
        if p in phases
    )
    rows.append(f"<TR><TD ALIGN='LEFT'><TABLE BORDER='0' CELLSPACING='4'><TR>{keys}</TR></TABLE></TD></TR>")
    key = "thick, colored: sent to another stage; thin: handed on within a stage"
    if any(flow.offloaded for flow in boxes.flows):
        key += "; purple, dashed: includes offloadable values"
    rows.append(f"<TR><TD ALIGN='LEFT'>{key}</TD></TR>")
    label = f"<<TABLE BORDER='0' CELLBORDER='0' CELLSPACING='2'>{''.join(rows)}</TABLE>>"
    middle = Position((first.left + first.right) / 2, first.top - 20 - 12 * len(rows))
    dot.node("title", label=label, shape="plaintext", pos=_at(middle), width="6")


def _frame(dot: graphviz.Digraph, stage: int, lines: tuple[str, ...], frame: Frame) -> None:
    with dot.subgraph(name=f"cluster_{stage}") as drawn:
        head = Position((frame.left + frame.right) / 2, frame.top + 6 + 6 * len(lines))
        drawn.attr(
            label=dot_label(lines),
            lp=_at(head),
            bb=f"{frame.left},{-frame.bottom},{frame.right},{-frame.top}",
        )
        drawn.attr(style="rounded,filled", color="#888888", fillcolor=FRAME, **FONT)


def _box(dot: graphviz.Digraph, name: str, box: Box, text: tuple[str, ...], layout: GraphLayout) -> None:
    phase = box.place.color.phase
    dot.node(
        name,
        label=dot_label(text),
        pos=_at(layout.centers[box.place]),
        style="filled,rounded",
        fillcolor=tint(PHASES[phase], 0.45),
        color=PHASES[phase],
        fixedsize="true",
        width=f"{layout.width / 72:.3f}",
        height=f"{HEIGHT / 72:.3f}",
    )


def _look(flow: Flow, largest: int) -> dict[str, str]:
    """largest: bytes of the largest flow between stages."""
    label = bytes_text(flow.bytes)
    tip = f"{number_of(flow.values, 'value')}, {label}"
    look = {"xlabel": _over_lines(label), "tooltip": tip, "arrowsize": "0.7"}
    if flow.crosses:
        width = 1.5 + 2.5 * flow.bytes / max(largest, 1)
        return look | {
            "penwidth": f"{width:.1f}",
            "color": PHASES[flow.source.color.phase],
            "arrowsize": "0.7",
        }
    if flow.offloaded:
        note = {"tooltip": f"{tip}, {bytes_text(flow.offloaded)} of it can be offloaded"}
        return look | note | {"penwidth": "1.2", "color": OFFLOADED, "style": "dashed"}
    return look | {"penwidth": "0.8", "color": GREY}


def _over_lines(text: str) -> str:
    """A label with a background: graphviz cannot keep it off the lines of other flows."""
    table = f"<TABLE BORDER='0' CELLBORDER='0' CELLSPACING='0' CELLPADDING='0' BGCOLOR='{FRAME}'>"
    return f"<{table}<TR><TD>{text}</TD></TR></TABLE>>"


def _terminals(dot: graphviz.Digraph, boxes: Boxes, ids: dict[BoxKey, str], layout: GraphLayout) -> None:
    """Draw leaves of the batch, loss and count as ellipses beside the frames."""
    x = layout.frames[0].left - TERMINAL
    beside: dict[BoxKey, int] = {}
    ends = [(f"batch: {name}", place, True) for name, place in boxes.batch]
    ends += [(name, place, False) for name, place in boxes.results]
    for number, (name, place, enters) in enumerate(ends):
        center = layout.centers[place]
        beside[place] = beside.get(place, -1) + 1
        at = Position(x, center.y + 34 * beside[place])
        dot.node(
            f"t{number}",
            label=dot_label([shortened(name)]),
            shape="ellipse",
            style="filled",
            fillcolor="white",
            pos=_at(at),
            height="0.36",
        )
        pair = (f"t{number}", ids[place]) if enters else (ids[place], f"t{number}")
        dot.edge(*pair, color=GREY, style="dashed", arrowsize="0.7")


def _at(point: Position) -> str:
    return f"{point.x:.1f},{-point.y:.1f}"
