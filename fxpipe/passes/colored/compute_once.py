"""Lets a program compute once a step what no microbatch changes.

needs:  W split off
before: where(le(arange, unsqueeze(arange, 1)), …)      in F, for each microbatch, which keeps it for B
        mm(x, _to_copy(w, bfloat16))
        div(sum, batch_mean(count))
after:  once["where"], mm(x, once["w as bfloat16"])     inputs of each section
        div(sum, once["mean of count"])

Masks, positions and rotary tables are such values (``ir/step_invariants.py``), the parameters that autocast
casts for products, and what else a model makes of its parameters alone: quantized or normalized weights.
What a mean over the batch is of comes from data, so the program computes it of each microbatch in turn.
"""

from __future__ import annotations

from collections.abc import Container, Set

import torch
from torch import fx

from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Input, Kind, Origin, batch_mean
from fxpipe.ir.names import identifier, unused
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.size import Share
from fxpipe.ir.step_invariants import copied, once_values, weight_values
from fxpipe.ir.storage import call_nodes, drop_dead, leading_to, storage_root
from fxpipe.passes.accept_any_strides import accept_any_strides

aten = torch.ops.aten


def computed_weights(graph: fx.Graph, resized: ResizedTraces | None) -> set[fx.Node]:
    """What is made of parameters and is no cast, where one stage alone makes and reads it."""
    casts = _casts(graph)
    return {
        node for node in weight_values(graph, resized) if node not in casts and _is_of_one_stage(node, casts)
    }


def compute_once(graph: fx.Graph, resized: ResizedTraces | None, weights: Set[fx.Node] = frozenset()) -> None:
    """weights: of ``computed_weights``, those to compute once a step, too."""
    casts = _casts(graph)
    of_step = once_values(graph, resized) | casts.keys() | weights
    means = graph.find_nodes(op="call_function", target=batch_mean)
    if not of_step and not means:
        return
    # No microbatch changes a parameter, though the optimizer does: what is made of it is made anew each step.
    once = fx.Graph()
    copies = copied(leading_to(of_step), once, resized)
    counts = copied(leading_to(means), once, resized)
    values = {node: copies[node] for node in sorted(of_step)} | {node: counts[node] for node in means}
    first = next(n for n in graph.nodes if n.op != "placeholder")
    names = set[str]()
    inputs: dict[fx.Node, fx.Node] = {}
    for node, computed in values.items():
        if values.keys() >= node.users.keys():
            continue  # it leads to others alone
        if computed not in inputs:
            name = casts.get(node) or unused(_name(computed), names.__contains__)
            names.add(name)
            with graph.inserting_before(first):
                inputs[computed] = graph.placeholder(identifier(name))
            once_input = Input(Kind.ONCE, name, computed)
            inputs[computed].meta.update(input=once_input, val=node.meta["val"], origin=Origin())
        node.replace_all_uses_with(inputs[computed], lambda user: user not in values)
    once.output([*inputs])
    for each in (once, graph):
        drop_dead(each)
    # Its inputs may lie in memory in other ways than in the trace.
    accept_any_strides(once)


def _name(computed: fx.Node) -> str:
    """The name of a value after the one that it is a view of, or the mean over the batch."""
    if computed.target is batch_mean:
        value = node_arg(computed, 0)
        while value.target is aten._to_copy.default or (value.args and isinstance(value.args[-1], Share)):
            value = node_arg(value, 0)
        return f"mean of {value}"
    return storage_root(computed).name


def _is_of_one_stage(node: fx.Node, casts: Container[fx.Node]) -> bool:
    """Whether the ops that a value comes from, and those that read it, are in one stage: another one may have
    a cast of a parameter of its own, as it gives it a summand of the gradient."""
    ops = [n for n in leading_to([node], lambda n: n not in casts) if n.op == "call_function"]
    return len({n.meta["color"].stage for n in (*ops, *node.users)}) == 1


def _casts(graph: fx.Graph) -> dict[fx.Node, str]:
    return {node: name for node in call_nodes(graph) if (name := _cast(node))}


def _cast(node: fx.Node) -> str:
    """What to call a parameter in fewer bits and the same layout: ``"lm_head.weight as bfloat16"``; "" for
    any other value, and for one that the step gives."""
    source = node.args[0] if node.target is aten._to_copy.default else None
    if (
        not isinstance(source, fx.Node)
        or source.op != "placeholder"
        or node.graph.output_node() in node.users
    ):
        return ""
    parameter, old, new = source.meta["input"], source.meta["val"], node.meta["val"]
    narrower = new.dtype.is_floating_point and new.dtype.itemsize < old.dtype.itemsize
    alike = (old.device, old.layout, old.stride()) == (new.device, new.layout, new.stride())
    is_worth = parameter.kind is Kind.PARAMETER and narrower and alike
    return f"{parameter.name} as {str(new.dtype).removeprefix('torch.')}" if is_worth else ""
