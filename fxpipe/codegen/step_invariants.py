"""The functions ``once_a_step`` and ``counts``: what sections take of the dict ``once``, which no microbatch
changes, and of what the rest of it are means over the microbatches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from torch import fx

from fxpipe.codegen.expressions import CONTAINERS, Aliases, Scope, item
from fxpipe.codegen.layers.sequences import loop_head
from fxpipe.codegen.nodes import node_lines, place, storages
from fxpipe.codegen.statements import Statement, body
from fxpipe.codegen.wrapping import wrapped
from fxpipe.ir.graph import Kind
from fxpipe.ir.names import text_literal
from fxpipe.ir.size import size_names
from fxpipe.ir.storage import leading_to
from fxpipe.ir.text import shape_text

Values = Mapping[fx.Node, str]
"""The nodes of a graph that compute the values of a rank, each with the value's name."""


def once_containers(values: Values) -> list[str]:
    """The arguments of a function, beside the batch."""
    kinds = {node.meta["input"].kind for node in leading_to(values) if node.op == "placeholder"}
    return [name for kind, name in CONTAINERS.items() if kind in kinds - {Kind.BATCH}]


def count_lengths(values: Values) -> list[str]:
    """The lengths of a microbatch that ``counts`` takes."""
    return size_names(leading_to(values))


def once_source(values: Values, names: Aliases) -> str:
    scope = Scope(names, {node: item(Kind.ONCE, name) for node, name in values.items()})
    loops = [rows for rows in _of_layers(values) if len(rows) > 2]
    in_loops = {node for rows in loops for node in rows}
    nodes = sorted(n for n in leading_to(values) if n.op == "call_function" and n not in in_loops)

    def shape(node: fx.Node) -> str:
        return shape_text(node.meta["val"]) if node in values else ""

    # The loops read tensors of the rank alone; others may read what they compute.
    lines = [*_loops(loops, values, scope)]
    lines += node_lines(nodes, scope, place, values.keys(), shape)
    text = [
        f"def once_a_step({', '.join(once_containers(values))}):",
        '    """What no microbatch changes."""',
        "    once = {}",
        *body(lines, (), storages(nodes, scope)),
        "    return once",
    ]
    return "\n".join(map(wrapped, text))


def counts_source(values: Values, names: Aliases) -> str:
    scope = Scope(names, {})
    nodes = sorted(n for n in leading_to(values) if n.op == "call_function")
    lines = node_lines(nodes, scope, place, values.keys(), lambda node: "")
    entries = ", ".join(f"{text_literal(name)}: {scope.text(node)}" for node, name in values.items())
    arguments = ["batch", *once_containers(values), *count_lengths(values)]
    text = [
        f"def counts({', '.join(arguments)}):",
        '    """What the loss of a microbatch is a mean over; the batch\'s is over all of them."""',
        *body([*lines], [scope.text(node) for node in values], storages(nodes, scope)),
        f"    return {{{entries}}}",
    ]
    return "\n".join(map(wrapped, text))


def _of_layers(values: Values) -> list[list[fx.Node]]:
    """The values that one op computes of a tensor of each layer, as casts of weights are."""
    alike = defaultdict[Hashable, list[fx.Node]](list)
    for node, name in values.items():
        if [n.op for n in node.all_input_nodes] == ["placeholder"]:
            source = node.all_input_nodes[0]
            arguments = repr(fx.map_arg((node.args, dict(node.kwargs)), lambda _: ""))
            alike[node.target, arguments, _blank(source.meta["input"].name), _blank(name)].append(node)
    return [*alike.values()]


def _blank(name: str) -> str:
    """The name of a tensor of any layer."""
    return re.sub("[0-9]+", "0", name)


def _loops(loops: Iterable[Sequence[fx.Node]], values: Values, scope: Scope) -> Iterator[Statement]:
    """One loop for all values of the same layers."""
    inner = defaultdict[str, list[str]](list)
    for nodes in loops:
        head, line = _loop(nodes, values, scope)
        inner[head].append(f"    {line}")
    return (Statement("\n".join([head, *lines])) for head, lines in inner.items())


def _loop(nodes: Sequence[fx.Node], values: Values, scope: Scope) -> tuple[str, str]:
    """The head of a loop, and the line in it."""
    sources = [node.all_input_nodes[0] for node in nodes]
    names = {"source": [x.meta["input"].name for x in sources], "name": [values[node] for node in nodes]}
    head, texts = loop_head(len(nodes), names)
    container = CONTAINERS[sources[0].meta["input"].kind]
    inner = Scope(scope.names, {sources[0]: f"{container}[{texts['source']}]"})
    return head, f"once[{texts['name']}] = {inner.expression(nodes[0])}"
