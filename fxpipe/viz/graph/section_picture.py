"""One section as graphviz source, node by node: boxes for ops, other shapes for inputs and outputs."""

from __future__ import annotations

from pathlib import PurePath

import graphviz
from torch import fx

from fxpipe.errors import number_of, shortened
from fxpipe.ir.graph import Kind, Origin, Section, Value
from fxpipe.ir.storage import node_bytes
from fxpipe.ir.text import shape_text, target_text
from fxpipe.schedule.ops import Color
from fxpipe.schedule.units import bytes_text
from fxpipe.viz.labels import FONT, dot_label
from fxpipe.viz.palette import PHASES, tint
from fxpipe.viz.roles import MEANING

ABREAST = "array_t3"  # unconnected components, as the weight gradients of two modules: three in a row

SHAPES: dict[Kind, tuple[str, str]] = {
    Kind.PARAMETER: ("cylinder", "parameter"),
    Kind.ONCE: ("note", "once a step"),
    Kind.BUFFER: ("cylinder", "buffer"),
    Kind.CONSTANT: ("note", "constant"),
    Kind.BATCH: ("ellipse", "batch"),
    Kind.KEY: ("ellipse", "random key"),
    Kind.VALUE: ("hexagon", "value"),
    Kind.OFFLOADED: ("hexagon", "offloadable value"),
    Kind.LOSS: ("doubleoctagon", "loss"),
    Kind.COUNT: ("doubleoctagon", "count"),
    Kind.OUTPUT: ("doubleoctagon", "output"),
    Kind.GRADIENT: ("cylinder", "gradient so far of"),
}
"""The shape and the label of each kind of input and output."""


def section_picture(section: Section, sections: tuple[Section, ...], title: str) -> graphviz.Digraph:
    """sections: all sections of the step, for the targets of outputs."""
    dot = graphviz.Digraph(f"stage{section.stage}_{section.phase}")
    dot.attr("node", **FONT, shape="box", margin="0.1,0.04")
    dot.attr("edge", **FONT, color="#555555", arrowsize="0.7")
    phase = section.phase
    ops = [n for n in section.graph.nodes if n.op == "call_function"]
    lines = (
        title,
        f"Stage {section.stage}, {phase} ({MEANING[phase]}): {number_of(len(ops), 'op')}, "
        f"{number_of(len(section.inputs), 'input')}, {number_of(len(section.outputs), 'output')}",
        "box: op; cylinder: parameter, buffer or accumulator; hexagon: from another section (grey: to one)",
    )
    dot.attr(label=dot_label([*lines, ""]), labelloc="t", ranksep="0.3", nodesep="0.2", **FONT)
    dot.attr(pack="true", packmode=ABREAST)
    placeholders = [n for n in section.graph.nodes if n.op == "placeholder"]
    for node, value in zip(placeholders, section.inputs, strict=True):
        _input(dot, node, value)
    for node in ops:
        _op(dot, node, PHASES[phase])
        for source in node.all_input_nodes:
            dot.edge(source.name, node.name, tooltip=f"{source.name}: {bytes_text(node_bytes(source))}")
    returned = section.graph.output_node().args[0]
    for number, (value, node) in enumerate(zip(section.outputs, returned, strict=True)):  # type: ignore
        _output(dot, f"output {number}", node, value, _readers(section, value, sections))
    return dot


def _op(dot: graphviz.Digraph, node: fx.Node, color: str) -> None:
    origin: Origin = node.meta["origin"]
    where = [shortened(origin.path) or "(the model itself)"]
    if origin.source:
        where.append(shortened(PurePath(origin.source).name))
    lines = (node.name, f"{target_text(node)}  {shape_text(node.meta.get('val'))}", "  ".join(where))
    dot.node(
        node.name,
        label=dot_label(lines),
        tooltip=dot_label([origin.source or origin.path or node.name]),
        style="filled,rounded",
        fillcolor=tint(color, 0.6),
        color=color,
    )


def _input(dot: graphviz.Digraph, node: fx.Node, value: Value) -> None:
    shape, kind = SHAPES[value.kind]
    if value.producer is not None:
        kind = f"from stage {value.producer.stage} {value.producer.phase}"
    label = dot_label([kind, shortened(value.name), shape_text(node.meta.get("val"))])
    look = {"shape": shape, "style": "filled", "fillcolor": "white", "margin": "0.02,0.02"}
    dot.node(node.name, label=label, color="#555555", **look)


def _output(dot: graphviz.Digraph, name: str, node: fx.Node, value: Value, readers: list[Color]) -> None:
    """name: of the new box."""
    shape, kind = SHAPES[value.kind]
    if value.kind in (Kind.VALUE, Kind.OFFLOADED):
        kind = f"to {', '.join(f'stage {c.stage} {c.phase}' for c in readers)}"
    label = dot_label([kind, shortened(value.name), bytes_text(node_bytes(node))])
    dot.node(name, label=label, shape=shape, style="filled,bold", fillcolor="#DDDDDD")
    dot.edge(node.name, name)


def _readers(section: Section, value: Value, sections: tuple[Section, ...]) -> list[Color]:
    return [
        s.color
        for s in sections
        if any(v.name == value.name and v.producer == section.color for v in s.inputs)
    ]
