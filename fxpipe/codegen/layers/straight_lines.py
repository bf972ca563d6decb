"""Stretches of a section between its loops, or between the additions of a W to gradients, as functions of
their own, which Inductor compiles.

carry = [x, mask]
del x
blocks_7_add, mean = stage0_forward_1(params, key, carry)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import count

from torch import fx

from fxpipe.codegen.expressions import ARGUMENTS, Scope
from fxpipe.codegen.layers.layer_functions import LayerFunctions, from_to
from fxpipe.codegen.nodes import defined, node_lines, reads, storages
from fxpipe.codegen.statements import CARRY, Statement, body, emptying
from fxpipe.codegen.wrapping import wrapped
from fxpipe.ir.compiled import computing, stretches
from fxpipe.ir.names import comment
from fxpipe.ir.size import size_names
from fxpipe.schedule.ops import Phase

#: Fewest ops that compute something: one alone has nothing to be fused with.
FEWEST = 2


Part = tuple[Sequence[fx.Node], Sequence[Statement]]
"""The lines of some ops, and the ops if they are to be a function of their own."""


def straight_parts(
    nodes: Sequence[fx.Node],
    phase: Phase,
    scope: Scope,
    place: Callable[[fx.Node], str],
    named: AbstractSet[fx.Node] = frozenset(),
    *,
    apart: bool,
) -> Iterator[Part]:
    """The ops of a section between two loops, or of a layer.

    ``place``, ``named``: see ``node_lines``.  ``apart``: whether stretches become functions.
    """
    for part, is_worth in _split(nodes, phase):
        # What varies from layer to layer is an argument of the layer's function alone.
        is_function = apart and is_worth and scope.numbers.keys().isdisjoint(part)
        yield part if is_function else (), [*node_lines(part, scope, place, named)]


def _split(nodes: Sequence[fx.Node], phase: Phase) -> Iterator[tuple[Sequence[fx.Node], bool]]:
    """Stretches, and whether they are worth compiling."""
    if phase is not Phase.W:
        yield nodes, is_worth_compiling(nodes)
        return
    begins = {stretch[0]: stretch for stretch in stretches(nodes)}
    inside = {node for stretch in begins.values() for node in stretch}
    others: list[fx.Node] = []
    for node in nodes:
        if node in begins:
            yield others, False
            yield begins[node], True
            others = []
        elif node not in inside:
            others.append(node)
    yield others, False


def is_worth_compiling(nodes: Sequence[fx.Node]) -> bool:
    """Not a single op, nor masks and tables that are made of nothing."""
    takes = {x for node in nodes for x in node.all_input_nodes} - set(nodes)
    return bool(takes) and sum(1 for _ in computing(nodes)) >= FEWEST


def lines_of(
    parts: Sequence[Part],
    name: str,
    scope: Scope,
    place: Callable[[fx.Node], str],
    returned: AbstractSet[str],
    layers: LayerFunctions,
) -> Iterator[Statement]:
    """The lines of a function's parts.  ``name``: of the function, which returns the variables ``returned``;
    those of the stretches have numbers behind it."""
    numbers = count(1)
    for k, (nodes, lines) in enumerate(parts):
        if nodes:
            needed = {
                *returned,
                *(text for _, lines in parts[k + 1 :] for line in lines for text in line.reads),
            }
            stretch = _Stretch(nodes, f"{name}_{next(numbers)}", scope, place, needed)
            yield from stretch.call(layers)
        else:
            yield from lines


@dataclass(frozen=True)
class _Stretch:
    """``needed``: the variables that are read behind it."""

    nodes: Sequence[fx.Node]
    name: str
    scope: Scope
    place: Callable[[fx.Node], str]
    needed: AbstractSet[str]

    def call(self, layers: LayerFunctions) -> Iterator[Statement]:
        """The lines that call a function with these ops.

        What the stretch takes travels in a list, which the function empties, so that what dies in it is freed
        there.
        """
        made = dict.fromkeys(text for node in self.nodes for text in defined(node, self.scope))
        read = dict.fromkeys(text for node in self.nodes for text in reads(node, self.scope))
        inputs = [text for text in read if text not in made]
        results = [text for text in made if text in self.needed]
        arguments = self._containers() + ([CARRY] if inputs else [])
        modules = [self.place(node) for node in self.nodes if node.meta["origin"].path] or [""]
        text = self._text(inputs, results)
        called = layers.function(self.name, arguments, text, [modules[0], modules[-1]], compiled=True)
        heading = comment(from_to(modules))
        if inputs:
            yield Statement(f"{CARRY} = [{', '.join(inputs)}]", tuple(inputs), heading, frees=True)
        left = f"{', '.join(results)} = " if results else ""
        yield Statement(f"{left}{called}({', '.join(arguments)})", (), heading)

    def _containers(self) -> list[str]:
        """The dicts of tensors that the ops read, the key, and lengths."""
        inputs = {x for node in self.nodes for x in node.all_input_nodes if x.op == "placeholder"}
        read = {self.scope.text(x).partition("[")[0] for x in inputs}
        return [text for text in ARGUMENTS.values() if text in read] + size_names(self.nodes)

    def _text(self, inputs: list[str], results: list[str]) -> list[str]:
        lines = emptying(inputs, CARRY) if inputs else []
        lines += node_lines(self.nodes, self.scope, self.place)
        text = [wrapped(line) for line in body(lines, results, storages(self.nodes, self.scope))]
        return text + ([wrapped(f"    return {', '.join(results)}")] if results else [])
