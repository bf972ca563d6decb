"""A traced function in pieces, each compiled for itself, with the ops that lanes run together between them.

before: mm, all_reduce, add, gelu, mm, all_reduce, add
after:  [mm], all_reduce, [add, gelu, mm], all_reduce, [add]

So all lanes come to these ops in the order of the program, whatever a compiler makes of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpipe.runtime.program.lanes import FUNCTIONS

Run = Callable[[list[torch.Tensor]], Sequence[object]]


@dataclass(frozen=True, eq=False)
class _Piece:
    """``run`` takes the values ``reads`` in a list, which it empties, and gives the values ``gives``.
    ``last``: the reads that no later piece reads."""

    run: Run
    reads: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    last: frozenset[fx.Node]


def compiled_in_pieces(
    traced: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    compiled: Callable[[fx.GraphModule, Sequence[torch.Tensor]], Run],
) -> Run:
    """``compiled`` makes such a function of each stretch of the graph.

    The result takes the inputs in a list, which it empties: each is freed after its last use.
    """
    placeholders, output = traced.graph.find_nodes(op="placeholder"), traced.graph.output_node()
    values: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    later, pieces = {*output.all_input_nodes}, list[_Piece]()
    # From the last: what later pieces read is known then, and with it what this one gives, and may free.
    for nodes in reversed([*_cut(traced.graph)]):
        reads = tuple(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in nodes))
        gives = tuple(n for n in nodes if n in later)
        if nodes[0].target in FUNCTIONS:
            run = _between_lanes(nodes[0])
        else:
            graph = fx.Graph()
            copies = {x: graph.placeholder(x.name) for x in reads}
            for n in nodes:
                copies[n] = graph.node_copy(n, copies.__getitem__)
            graph.output([copies[n] for n in gives])
            like = [values[x] if x in values else x.meta["val"] for x in reads]
            run = compiled(fx.GraphModule(traced, graph), like)
        pieces.insert(0, _Piece(run, reads, gives, frozenset(reads) - later))
        later |= {*reads}
    results: Any = output.args[0]

    def run_all(arguments: list[torch.Tensor]) -> Sequence[object]:
        known = dict(zip(placeholders, arguments, strict=True))
        arguments.clear()
        for piece in pieces:
            operands = [known.pop(x) if x in piece.last else known[x] for x in piece.reads]
            known.update(zip(piece.gives, piece.run(operands), strict=True))
        outcome: Sequence[object] = fx.map_arg(results, known.__getitem__)
        return outcome

    return run_all


def _cut(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The ops of the graph in order, cut before and behind those between lanes."""
    stretch = list[fx.Node]()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target in FUNCTIONS:
            yield from filter(None, (stretch, [node]))
            stretch = []
        else:
            stretch.append(node)
    if stretch:
        yield stretch


def _between_lanes(node: fx.Node) -> Run:
    function, rest = FUNCTIONS[node.target], node.args[1:]

    def run(operands: list[torch.Tensor]) -> list[torch.Tensor]:
        return [function(operands.pop(), *rest)]

    return run
