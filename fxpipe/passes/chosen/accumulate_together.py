"""Adds the small gradients of a layer, those of biases and norms, to their accumulators in one op.

before: add_(grad_a, a);  add_(grad_b, b)
after:  _foreach_add_([grad_a, grad_b], [a, b])

The sums are the same, bit for bit.  All operands live until the one op, in the place of the last: large ones
keep their own.  Layers are the outermost modules that stand side by side with the same parameters, as ``h.0``
and ``h.1`` of a language model: so W runs layer after layer.  The gradients of a stage that belong to no
layer are added together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fxpipe.ir.builder import Calls, node_arg
from fxpipe.ir.graph import Kind, Origin, module_around, modules_on
from fxpipe.ir.storage import node_bytes, storage_root

aten = torch.ops.aten

LARGEST = 1 << 16
"""Maximum number of bytes of an operand."""


def accumulate_together(graph: fx.Graph) -> None:
    sums = [n for n in graph.find_nodes(op="call_function", target=aten.add_.Tensor) if _is_small_sum(n)]
    layer_of = layers(_parameter(node) for node in sums)
    alike: defaultdict[Any, list[fx.Node]] = defaultdict(list)
    for node in sums:
        total = node_arg(node, 0).meta["val"]
        layer = layer_of[_parameter(node)]
        # By layer, so that layers which are alike keep the same ops, and are one function in the program.
        alike[node.meta["color"], total.dtype, total.device, layer].append(node)
    call, instead = Calls(graph), dict[fx.Node, fx.Node]()
    for (*_, layer), nodes in alike.items():
        if len(nodes) > 1:
            instead |= dict.fromkeys(nodes, _joined(call, nodes, layer))
    # The op gives nothing, so the output names it in the place of each sum.
    output = graph.output_node()
    output.args = fx.map_arg(output.args, lambda node: instead.get(node, node))
    for node in instead:
        graph.erase_node(node)


def layers(parameters: Iterable[str]) -> dict[str, str]:
    """Parameter -> the path of its layer, which has several of them; "" for one that belongs to none."""
    within: defaultdict[str, list[str]] = defaultdict(list)  # module -> its parameters, from there
    paths = {name: modules_on(name)[:-1] for name in parameters}
    for name, modules in paths.items():
        for module in modules:
            within[module].append(name.removeprefix(f"{module}."))
    kinds = {
        module: (_parent(module), tuple(sorted(suffixes)))
        for module, suffixes in within.items()
        if len(suffixes) > 1
    }
    count = Counter(kinds.values())
    return {
        name: next((m for m in modules if m in kinds and count[kinds[m]] > 1), "")
        for name, modules in paths.items()
    }


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _parameter(node: fx.Node) -> str:
    """The parameter of the accumulator that a sum is added to."""
    name: str = node_arg(node, 0).meta["input"].name
    return name


def _is_small_sum(node: fx.Node) -> bool:
    """Whether the op adds a small gradient, of its accumulator's dtype, as the only one of its parameter."""
    into, part = node_arg(node, 0), node_arg(node, 1)
    # Of a parameter with several summands, the order of the sums is the order of the bits.
    if into.op != "placeholder" or into.meta["input"].kind is not Kind.GRADIENT or len(into.users) > 1:
        return False
    a, b = into.meta["val"], part.meta["val"]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and node_bytes(storage_root(part)) <= LARGEST


def _joined(call: Calls, sums: list[fx.Node], layer: str) -> fx.Node:
    """One op for these, in the place of the last."""
    totals, parts = ([node_arg(node, k) for node in sums] for k in (0, 1))
    modules = (_parent(_parameter(node)) for node in sums)
    origin = Origin(layer or module_around(modules), backward=True)
    meta = {"color": sums[0].meta["color"], "origin": origin, "val": None}
    with call.graph.inserting_after(sums[-1]):
        return call(aten._foreach_add_.List, (totals, parts), **meta)
