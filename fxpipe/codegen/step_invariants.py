"""The functions ``once_a_step`` and ``counts``: what sections take of the dict ``once``, which no microbatch
changes, and of what the rest of it are means over the microbatches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import torch
from torch import fx

from fxpipe.codegen.expressions import CONTAINERS, Aliases, Scope, item, variable
from fxpipe.codegen.layers.layer_functions import INDUCTOR, from_to
from fxpipe.codegen.layers.sequences import loop_head
from fxpipe.codegen.nodes import node_lines, place, storages
from fxpipe.codegen.statements import Statement, body
from fxpipe.codegen.wrapping import wrapped
from fxpipe.ir.graph import Kind
from fxpipe.ir.names import text_literal, unused
from fxpipe.ir.size import size_names
from fxpipe.ir.storage import is_view, leading_to
from fxpipe.ir.text import shape_text

aten = torch.ops.aten

Values = Mapping[fx.Node, str]
"""The nodes of a graph that compute the values of a rank, each with the value's name."""


def once_containers(values: Values) -> list[str]:
    """The arguments of a function, beside the batch."""
    kinds = {node.meta["input"].kind for node in leading_to(values) if node.op == "placeholder"}
    return [name for kind, name in CONTAINERS.items() if kind in kinds - {Kind.BATCH}]


def count_lengths(values: Values) -> list[str]:
    """The lengths of a microbatch that ``counts`` takes."""
    return size_names(leading_to(values))


def once_source(values: Values, names: Aliases, *, compiled: bool) -> str:
    """compiled: whether Inductor compiles functions of the program; then this one, too, if it computes more
    of weights than casts."""
    scope = Scope(names, {node: item(Kind.ONCE, name) for node, name in values.items()})
    nodes = sorted(n for n in leading_to(values) if n.op == "call_function")
    loops = [alike for alike in _layers(nodes, values) if len(alike) > 2]
    in_loops = {node for alike in loops for layer in alike for node in layer}
    first = leading_to(in_loops) - in_loops  # of which loops read no more than what no tensor leads to

    def lines(some: AbstractSet[fx.Node]) -> Iterator[Statement]:
        def shape(node: fx.Node) -> str:
            return shape_text(node.meta["val"]) if node in values else ""

        return node_lines([n for n in nodes if n in some], scope, place, values.keys(), shape)

    is_compiled = compiled and any(map(_is_weight, nodes))
    names.uses_inductor |= is_compiled
    text = [
        *[INDUCTOR] * is_compiled,
        f"def once_a_step({', '.join(once_containers(values))}):",
        '    """What no microbatch changes."""',
        "    once = {}",
        *body(
            [*lines(first), *_loops(loops, values, scope), *lines({*nodes} - first - in_loops)],
            (),
            storages((n for n in nodes if n not in in_loops), scope),
        ),
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


def _is_weight(node: fx.Node) -> bool:
    """Whether an op computes of a parameter what is no cast."""
    sources = (n.meta["input"].kind for n in leading_to([node]) if n.op == "placeholder")
    return not is_view(node) and node.target is not aten._to_copy.default and Kind.PARAMETER in sources


_Nodes = Sequence[fx.Node]


def _layers(nodes: _Nodes, values: Values) -> list[list[_Nodes]]:
    """The ops on the tensors of each layer, as those that make its weights smaller; lists of layers that do
    the same."""
    layer: dict[fx.Node, list[fx.Node]] = {}  # that a node belongs to
    for node in nodes:
        if any(n.op == "placeholder" or n in layer for n in node.all_input_nodes):
            known = {id(layer[n]): layer[n] for n in node.all_input_nodes if n in layer}
            *others, largest = sorted(known.values(), key=len) or [[]]
            largest += [node, *(n for other in others for n in other)]
            layer |= dict.fromkeys(largest if others else [node], largest)
    alike = defaultdict[Hashable, list[_Nodes]](list)
    for members in {id(each): each for each in layer.values()}.values():
        ops = sorted(members)
        alike[_form(ops, values)].append(ops)
    return [*alike.values()]


def _form(ops: _Nodes, values: Values) -> Hashable:
    """What layers have in common that do the same."""
    places = {node: f"{place}" for place, node in enumerate(ops)}
    for source in _sources(ops):
        places[source] = f"{len(places)} {source.meta['input'].kind} {_blank(source.meta['input'].name)}"

    def text(node: fx.Node) -> str:
        return places.get(node, node.name)

    arguments = [repr(fx.map_arg((node.args, dict(node.kwargs)), text)) for node in ops]
    results = [_blank(values.get(node, "")) for node in ops]
    return tuple(zip([node.target for node in ops], arguments, results, strict=True))


def _sources(ops: _Nodes) -> list[fx.Node]:
    """The tensors of the rank that ops read, in the order of their use."""
    return [*dict.fromkeys(n for node in ops for n in node.all_input_nodes if n.op == "placeholder")]


def _blank(name: str) -> str:
    """The name of a tensor of any layer."""
    return re.sub("[0-9]+", "0", name)


def _loops(loops: Iterable[Sequence[_Nodes]], values: Values, scope: Scope) -> Iterator[Statement]:
    """One loop for all values of the same layers."""
    inner, reads = defaultdict[str, list[str]](list), defaultdict[str, set[str]](set)
    for layers in loops:
        head, lines, outer = _loop(layers, values, scope)
        inner[head] += lines
        reads[head] |= outer
    return (Statement("\n".join([head, *lines]), (*sorted(reads[head]),)) for head, lines in inner.items())


def _loop(layers: Sequence[_Nodes], values: Values, scope: Scope) -> tuple[str, list[str], set[str]]:
    """The head of a loop, the lines in it, and the variables from before it that these read."""
    used, first = set[str](), layers[0]

    def new(name: str) -> str:
        text = unused(scope.names.local(variable(name)), used.__contains__)
        used.add(text)
        return text

    varying: dict[str, Sequence[str]] = {}
    of_rank = zip(*map(_sources, layers), strict=True)
    results = zip(*([n for n in ops if n in values] for ops in layers), strict=True)
    items: list[tuple[fx.Node, str, str]] = []  # with the container and the variable of the name in it
    for nodes in of_rank:
        varying[name := new("source")] = [node.meta["input"].name for node in nodes]
        items.append((nodes[0], CONTAINERS[nodes[0].meta["input"].kind], name))
    for nodes in results:
        varying[name := new("name")] = [values[node] for node in nodes]
        items.append((nodes[0], CONTAINERS[Kind.ONCE], name))
    fixed = {name: text_literal(texts[0]) for name, texts in varying.items() if len({*texts}) == 1}
    head, texts = loop_head(len(layers), {name: of for name, of in varying.items() if name not in fixed})
    inner = {node: f"{container}[{(texts | fixed)[name]}]" for node, container, name in items}
    inner |= {node: new(re.sub(r"_\d+(?=_)", "", node.name)) for node in first if node not in inner}
    before = {n for node in first for n in node.all_input_nodes if n.op == "call_function"} - {*first}
    inner |= {node: scope.text(node) for node in before}
    paths = {node: [ops[at].meta["origin"].path for ops in layers] for at, node in enumerate(first)}
    inside = Scope(scope.names, inner)
    lines = [*node_lines(first, inside, lambda n: from_to(paths[n]), values.keys(), lambda _: "")]
    if len(lines) == 1:  # as the cast of a weight, which says where it is
        lines = [replace(each, heading=None) for each in lines]
    outer = {*map(scope.text, before)}
    return head, body(lines, outer, storages(first, inside)), outer
