"""Extraction: one function per (stage, phase), cut out of the colored graph by color alone.

before: one graph whose edges run between colors
after:  sections with named inputs and outputs; a value that a stage gets from another one arrives in
        the first phase that needs it, which hands it on to the later phases of that stage
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import fx

from fxpipe.errors import VerifyError
from fxpipe.ir.graph import Input, Kind, Section, Value, offload
from fxpipe.ir.nodes import copy_node
from fxpipe.ir.step_invariants import inputs_behind
from fxpipe.ir.storage import call_nodes, graph_outputs
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.schedule.ops import Color, Phase, arrival

ORDER = (Phase.F, Phase.B, Phase.W)


@dataclass(frozen=True, eq=False)
class SectionEdge:
    """The named values of section ``source`` that section ``target`` of another stage needs.

    Values for W alone arrive with B, so that ``target`` is a B or an F, and may be a B without ops.
    ``sums``: of values that are summands, the name of the sum that ``target`` needs.
    """

    source: Color
    target: Color
    names: tuple[str, ...]
    sums: Mapping[str, str] = field(default_factory=dict)


def extract(graph: fx.Graph) -> tuple[Section, ...]:
    """Cut the graph into its sections, ordered by stage and phase."""
    by_color: dict[Color, list[fx.Node]] = defaultdict(list)
    for node in call_nodes(graph):
        # The message adds up the parts, so no section has this op.
        if node.target is not sum_over_ranks:
            by_color[node.meta["color"]].append(node)
    phases: dict[int, list[Phase]] = defaultdict(list)
    for color in sorted(by_color, key=lambda c: (c.stage, ORDER.index(c.phase))):
        phases[color.stage].append(color.phase)

    wanted = {color: _foreign(nodes) for color, nodes in by_color.items()}
    outputs: dict[Color, dict[fx.Node, None]] = defaultdict(dict)
    inputs: dict[Color, dict[fx.Node, Color]] = defaultdict(dict)
    for stage, of_stage in phases.items():
        arrived: dict[fx.Node, Color] = {}
        for phase in of_stage:
            color = Color(stage, phase)
            for node in wanted[color]:
                parts = _summands(node) or (node,)
                home = parts[0].meta["color"]
                # What one section of a stage has received, the later ones get from it, without another
                # message.
                producer = home if home.stage == stage else arrived.setdefault(node, home)
                inputs[color][node] = producer
                for part in parts if producer == home else (node,):
                    outputs[part.meta["color"] if producer == home else producer][part] = None
                # From now on this section is where the value comes from on this stage.
                if home.stage != stage and producer == home:
                    arrived[node] = color
    return tuple(
        _section(graph, Color(stage, phase), by_color[Color(stage, phase)], inputs, outputs)
        for stage in sorted(phases)
        for phase in phases[stage]
    )


def _foreign(nodes: list[fx.Node]) -> dict[fx.Node, None]:
    """Values of other sections that these nodes use, in order of use."""
    section = set(nodes)
    used: dict[fx.Node, None] = {}
    for node in nodes:
        for n in node.all_input_nodes:
            if n.op == "call_function" and n not in section:
                used[n] = None
    return used


def _section(
    graph: fx.Graph,
    color: Color,
    nodes: list[fx.Node],
    inputs: dict[Color, dict[fx.Node, Color]],
    outputs: dict[Color, dict[fx.Node, None]],
) -> Section:
    members = set(nodes)
    placeholders = {n: None for node in nodes for n in node.all_input_nodes if n.op == "placeholder"}
    ins = [_input(n.meta["input"]) for n in placeholders]
    for node, producer in inputs[color].items():
        parts = _summands(node) if producer.stage != color.stage else ()
        summands = tuple(Value(Kind.VALUE, part.name, part.meta["color"]) for part in parts)
        ins.append(Value(_kind(node), node.name, producer, summands))
    outs = [(Value(_kind(node), node.name, color), node) for node in outputs[color]]
    named = graph_outputs(graph)
    for kind, result in ((Kind.LOSS, named.loss), (Kind.COUNT, named.count)):
        if result in members:
            outs.append((Value(kind, kind.value), result))
    # Two names of one value are one result.
    for node in dict.fromkeys(named.outputs.values()):
        value = _result(graph, node)
        if node in members and value.kind is Kind.OUTPUT:
            outs.append((value, node))
    for name, node in named.buffers.items():
        if node in members:
            outs.append((Value(Kind.BUFFER, name), node))
    sources, returned = [*placeholders, *inputs[color]], [node for _, node in outs]
    return Section(
        color, tuple(ins), tuple(v for v, _ in outs), partial(_graph, color, sources, nodes, returned)
    )


def _input(step_input: Input) -> Value:
    behind = () if step_input.computed is None else inputs_behind(step_input)
    return Value(step_input.kind, step_input.name, computed_from=tuple(Value(x.kind, x.name) for x in behind))


def _graph(color: Color, sources: list[fx.Node], nodes: list[fx.Node], returned: list[fx.Node]) -> fx.Graph:
    """``nodes`` as a graph of their own, with a placeholder for each of ``sources``."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in sources:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = copy_node(new, node, copies.__getitem__)
    # Programs, plans and pictures find a value by its name.
    renamed = [n for n in copies if copies[n].name != n.name]
    if renamed:
        raise VerifyError(f"{renamed[0].name} was renamed in section {color}: names must be unique.")
    new.output(tuple(copies[node] for node in returned))
    return new


def _summands(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(node.all_input_nodes) if node.target is sum_over_ranks else ()


def _kind(node: fx.Node) -> Kind:
    return Kind.OFFLOADED if node.target is offload else Kind.VALUE


def requested_outputs(graph: fx.Graph) -> dict[str, Value]:
    """The outputs that the user asked for: name -> the output of a section."""
    return {name: _result(graph, node) for name, node in graph_outputs(graph).outputs.items()}


def _result(graph: fx.Graph, node: fx.Node) -> Value:
    named = graph_outputs(graph)
    for kind, result in ((Kind.LOSS, named.loss), (Kind.COUNT, named.count)):
        if node is result:
            return Value(kind, kind.value)
    return Value(Kind.OUTPUT, node.name)


def edges_between(sections: tuple[Section, ...]) -> tuple[SectionEdge, ...]:
    """The edges between stages: one for each pair of sections that exchange values."""
    names: dict[tuple[Color, Color], list[str]] = defaultdict(list)
    sums: dict[tuple[Color, Color], dict[str, str]] = defaultdict(dict)
    for section in sections:
        for value in section.inputs:
            for source in value.sources:
                if source.producer is not None and source.producer.stage != section.stage:
                    # By where they arrive, so that B and W of a stage get their values in one message.
                    ends = source.producer, arrival(section.color)
                    names[ends].append(source.name)
                    if value.summands:
                        sums[ends][source.name] = value.name
    return tuple(SectionEdge(a, b, tuple(n), sums[a, b]) for (a, b), n in names.items())
