"""Lets a program compute once a step what no microbatch changes.

needs:  W split off
before: where(le(arange, unsqueeze(arange, 1)), …)      in F, for each microbatch, which keeps it for B
        mm(x, _to_copy(w, bfloat16))
        div(sum, batch_mean(count))
after:  once["where"], mm(x, once["w as bfloat16"])     inputs of each section
        div(sum, once["mean of count"])

Masks, positions and rotary tables are such values (``ir/step_invariants.py``), and the parameters that
autocast casts for products.  A cast to more bits than the parameter has stays where it is.  What a mean
over the batch is of comes from data, so the program computes it of each microbatch in turn.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Input, Kind, Origin, batch_mean
from fxpipe.ir.names import identifier, unused
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.size import Share
from fxpipe.ir.step_invariants import copied, once_values
from fxpipe.ir.storage import call_nodes, drop_dead, leading_to, storage_root
from fxpipe.passes.accept_any_strides import accept_any_strides

aten = torch.ops.aten


def compute_once(graph: fx.Graph, resized: ResizedTraces | None) -> None:
    values = once_values(graph, resized)
    casts = {node: name for node in call_nodes(graph) if (name := _cast(node))}
    means = graph.find_nodes(op="call_function", target=batch_mean)
    if not values and not casts and not means:
        return
    once = next(iter(values.values())).graph if values else fx.Graph()
    # A cast reads a parameter, which no microbatch changes, though the optimizer does: it is made anew each
    # step.
    values |= copied(leading_to(casts), once, resized)
    counts = copied(leading_to(means), once, resized)
    values |= {node: counts[node] for node in means}
    first = next(n for n in graph.nodes if n.op != "placeholder")
    names = set[str]()
    inputs: dict[fx.Node, fx.Node] = {}
    for node, computed in values.items():
        if node.op == "placeholder" or values.keys() >= node.users.keys():
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
