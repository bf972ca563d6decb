"""One Python function for each section.

Values that pass between two phases of one stage travel in one list (``saved`` from
F to B, ``saved_for_weight`` from F to W, ``gradients`` from B to W), which the receiver empties, so that
each value is freed after its last use and not when the call returns.  Values that can be offloaded
travel in lists of their own (``offloaded``, ``offloaded_for_weight``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from torch import fx

from fxpipe.codegen.comments import input_comments, shape_comment
from fxpipe.codegen.expressions import CONTAINERS, Names, expression, variable
from fxpipe.codegen.wrapping import wrapped
from fxpipe.ir.graph import Kind, Section, Value, offload, reload
from fxpipe.ir.names import comment
from fxpipe.ir.storage import call_nodes
from fxpipe.schedule.ops import Color, Phase

PHASE_NAMES = {Phase.F: "forward", Phase.B: "backward", Phase.W: "weight"}
LISTS = {
    (Phase.F, Phase.B, Kind.VALUE): "saved",
    (Phase.F, Phase.W, Kind.VALUE): "saved_for_weight",
    (Phase.F, Phase.B, Kind.OFFLOADED): "offloaded",
    (Phase.F, Phase.W, Kind.OFFLOADED): "offloaded_for_weight",
    (Phase.B, Phase.W, Kind.VALUE): "gradients",
}


@dataclass(frozen=True)
class Signature:
    """The signature of a section's function.

    ``containers``: the dicts that it reads (``params``, …) and ``key``.  ``lists_in``, ``lists_out``: the
    lists from and to other phases of its own stage, with the values in each.  ``values_in``, ``values_out``:
    the values from and to other stages, with those that the user asks for.  ``results``: loss, count and
    buffers.
    """

    name: str
    containers: tuple[str, ...]
    lists_in: dict[str, tuple[str, ...]]
    values_in: tuple[str, ...]
    values_out: tuple[str, ...]
    results: tuple[Value, ...]
    lists_out: dict[str, tuple[str, ...]]


def signatures(sections: tuple[Section, ...]) -> dict[Color, Signature]:
    consumers: dict[Color, list[tuple[Color, Value]]] = {s.color: [] for s in sections}
    for section in sections:
        for value in (source for given in section.inputs for source in given.sources):
            if value.producer is not None:
                consumers[value.producer].append((section.color, value))
    return {s.color: _signature(s, consumers[s.color]) for s in sections}


def _signature(section: Section, consumers: list[tuple[Color, Value]]) -> Signature:
    kinds = {v.kind for v in section.inputs}
    containers = [text for kind, text in CONTAINERS.items() if kind in kinds]
    if Kind.KEY in kinds:
        containers.append("key")
    lists_in: dict[str, list[str]] = {}
    for v in section.inputs:
        if v.producer is not None and v.producer.stage == section.stage:
            lists_in.setdefault(LISTS[v.producer.phase, section.phase, v.kind], []).append(v.name)
    lists_out: dict[str, list[str]] = {}
    for color, v in consumers:
        if color.stage == section.stage:
            lists_out.setdefault(LISTS[section.phase, color.phase, v.kind], []).append(v.name)
    abroad = {v.name for color, v in consumers if color.stage != section.stage}
    leaving = [v.name for v in section.outputs if v.kind is Kind.VALUE and v.name in abroad]
    leaving += [v.name for v in section.outputs if v.kind is Kind.OUTPUT and v.name not in abroad]
    return Signature(
        name=f"stage{section.stage}_{PHASE_NAMES[section.phase]}",
        containers=tuple(containers),
        lists_in={k: tuple(v) for k, v in lists_in.items()},
        values_in=tuple(
            v.name for v in section.inputs if v.producer is not None and v.producer.stage != section.stage
        ),
        values_out=tuple(leaving),
        results=tuple(v for v in section.outputs if v.kind in (Kind.LOSS, Kind.COUNT, Kind.BUFFER)),
        lists_out={k: tuple(v) for k, v in lists_out.items()},
    )


def function_source(section: Section, signature: Signature, names: Names) -> str:
    """The section as a Python function."""
    arguments = [*signature.containers, *signature.lists_in, *map(variable, signature.values_in)]
    lines = [f"def {signature.name}({', '.join(arguments)}):"]
    lines += input_comments(section, signature.values_in)
    reloaded = {n.all_input_nodes[0].name: n.name for n in call_nodes(section.graph) if n.target is reload}
    for name, values in signature.lists_in.items():
        values = tuple(variable(reloaded.get(v, v)) for v in values)
        lines.append(
            f"    ({values[0]},) = {name}" if len(values) == 1 else f"    {', '.join(values)} = {name}"
        )
        lines.append(f"    {name}.clear()")
    results, returned = _returned(section, signature)
    lines += _body(section, names, returned)
    if results:
        lines.append(f"    return {', '.join(results)}")
    return "\n".join(wrapped(line) for line in lines)


def _returned(section: Section, signature: Signature) -> tuple[list[str], set[str]]:
    """The expressions that are returned, in order, and the names that they use."""
    by_value = dict(zip(section.outputs, section.graph.output_node().args[0], strict=True))  # type: ignore
    results = [variable(v) for v in signature.values_out]
    results += [variable(by_value[v].name) for v in signature.results]
    used = set(results)
    offloaded = {n.name: n.all_input_nodes[0].name for n in call_nodes(section.graph) if n.target is offload}
    for values in signature.lists_out.values():
        values = tuple(variable(offloaded.get(v, v)) for v in values)
        results.append(f"[{', '.join(values)}]")
        used.update(values)
    return results, used


def _body(section: Section, names: Names, returned: set[str]) -> list[str]:
    """One line per node, with a comment for each source line of the model, after which dead names are
    deleted."""
    lines: list[str] = []
    nodes = [n for n in call_nodes(section.graph) if n.target not in (offload, reload)]
    last_use = {n: user for user in nodes for n in user.all_input_nodes}
    ends: dict[fx.Node, list[str]] = {}
    for n, user in last_use.items():
        is_value = n.meta.get("input") is None
        if is_value and variable(n.name) not in returned and not _is_unpacked(n):
            ends.setdefault(user, []).append(variable(n.name))
    heading: tuple[str, str] | None = None
    dead: list[str] = []
    for node in nodes:
        origin = node.meta["origin"]
        if (origin.path, origin.source) != heading:
            lines += _deletion(dead)
            dead = []
            heading = (origin.path, origin.source)
            lines.append(f"    {comment(_place(origin.path, origin.source))}")
        if not _is_item_of_unpacked(node):
            lines.append(f"    {_targets(node)}{expression(node, names)}{shape_comment(node)}")
        dead += ends.get(node, [])
    return lines + _deletion(dead)


def _targets(node: fx.Node) -> str:
    """The left-hand side with its ``=``; empty for an op that only writes to its arguments."""
    if _is_unpacked(node):
        items = {int(u.args[1]): variable(u.name) for u in node.users}  # type: ignore[arg-type]
        return ", ".join(items.get(i, "_") for i in range(len(node.meta["val"]))) + " = "
    return f"{variable(node.name)} = " if node.users else ""


def _is_unpacked(node: fx.Node) -> bool:
    """Whether the op's tuple is unpacked in the line that computes it."""
    val = node.meta.get("val")
    if node.op != "call_function" or not isinstance(val, (tuple, list)) or len(val) < 2:
        return False
    return all(user.target is operator.getitem for user in node.users)


def _is_item_of_unpacked(node: fx.Node) -> bool:
    return node.target is operator.getitem and _is_unpacked(node.args[0])  # type: ignore[arg-type]


def _deletion(dead: Iterable[str]) -> list[str]:
    unique = list(dict.fromkeys(dead))
    return [f"    del {', '.join(unique)}"] if unique else []


def _place(path: str, source: str) -> str:
    if not path and not source:
        return "autograd"
    file, _, line = source.rpartition(":")
    return f"{path or 'the model itself'}  ({PurePath(file).name}:{line})" if source else path
