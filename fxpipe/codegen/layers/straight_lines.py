"""Stretches of a section between its loops, as functions of their own, which Inductor compiles.

carry = [x, mask]
del x
blocks_7_add, mean = stage0_forward_1(params, key, carry)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from torch import fx

from fxpipe.codegen.expressions import ARGUMENTS, Scope
from fxpipe.codegen.layers.layer_functions import LayerFunctions, from_to
from fxpipe.codegen.layers.loops import CARRY
from fxpipe.codegen.nodes import defined, node_lines, place, reads, storages
from fxpipe.codegen.statements import Statement, body, emptying
from fxpipe.codegen.wrapping import wrapped
from fxpipe.ir.graph import Input
from fxpipe.ir.names import comment
from fxpipe.ir.sections import computing

#: Fewest ops that compute something: one alone has nothing to be fused with.
FEWEST = 2


def is_worth_compiling(nodes: Sequence[fx.Node]) -> bool:
    """Not a single op, nor masks and tables that are made of nothing."""
    takes = {x for node in nodes for x in node.all_input_nodes} - set(nodes)
    return bool(takes) and sum(1 for _ in computing(nodes)) >= FEWEST


def call_lines(
    nodes: Sequence[fx.Node], name: str, scope: Scope, needed: AbstractSet[str], layers: LayerFunctions
) -> Iterator[Statement]:
    """The lines of a section that call a function with these ops.

    ``needed``: the variables that are read behind the stretch.  What the stretch takes travels in a list,
    which the function empties, so that what dies in it is freed there.
    """
    made = dict.fromkeys(text for node in nodes for text in defined(node, scope))
    read = dict.fromkeys(text for node in nodes for text in reads(node, scope))
    arguments_in, results = (
        [text for text in read if text not in made],
        [text for text in made if text in needed],
    )
    arguments = _containers(nodes) + ([CARRY] if arguments_in else [])
    paths = [path for node in nodes if (path := node.meta["origin"].path)] or [""]
    text = _text(nodes, scope, arguments_in, results)
    called = layers.function(name, arguments, text, [paths[0], paths[-1]], compiled=True)
    heading = comment(from_to(paths))
    if arguments_in:
        yield Statement(f"{CARRY} = [{', '.join(arguments_in)}]", tuple(arguments_in), heading, frees=True)
    left = f"{', '.join(results)} = " if results else ""
    yield Statement(f"{left}{called}({', '.join(arguments)})", (), heading)


def _containers(nodes: Sequence[fx.Node]) -> list[str]:
    """The dicts of tensors that nodes read, and the key."""
    inputs = {x.meta.get("input") for n in nodes for x in n.all_input_nodes if x.op == "placeholder"}
    kinds = {one.kind for one in inputs if isinstance(one, Input)}
    return [text for kind, text in ARGUMENTS.items() if kind in kinds]


def _text(nodes: Sequence[fx.Node], scope: Scope, inputs: list[str], results: list[str]) -> list[str]:
    lines = emptying(inputs, CARRY) if inputs else []
    lines += node_lines(nodes, scope, place)
    text = [wrapped(line) for line in body(lines, results, storages(nodes, scope))]
    return text + ([wrapped(f"    return {', '.join(results)}")] if results else [])
