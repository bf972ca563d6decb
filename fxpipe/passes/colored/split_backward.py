"""Splits the backward into B, the gradients of activations, and W, the gradients of parameters.

needs:  colors F and B, sequence numbers
after:  W holds exactly the backward nodes that no gradient of an activation needs

B runs back to the first activation of every stage, the first stage included: a gradient that enters
the backward of an op on activations is B's, even if all that comes after it are weight gradients.
Ops that work on parameters alone (a cast, a norm of a weight, a learned position table) are no
activations: their backward is W's.  (Zero bubble pipeline parallelism, arXiv 2401.10241.)  Shards of an
embedding have no other gradient, which B computes as soon as it arrives, so that no rank holds it for a W.
"""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import fx

from fxpipe.ir.graph import Kind, read_buffer
from fxpipe.ir.nodes import copy_node
from fxpipe.ir.storage import call_nodes, graph_outputs
from fxpipe.schedule.ops import Color, Phase

aten = torch.ops.aten


def split_backward(graph: fx.Graph, lookups: int) -> None:
    """lookups: the first stages, which are shards of an embedding."""
    _split_convolutions(graph)
    on_data = _ops_on_data(graph)
    items = graph.find_nodes(op="call_function", target=operator.getitem)
    # New values of buffers belong to B, which runs in microbatch order.
    in_b = {*graph_outputs(graph).buffers.values()}
    in_b.update(graph.find_nodes(op="call_function", target=read_buffer))
    color = cache(Color)  # one object a section, as from the partition
    # Users first: an op belongs to B if anything of B needs it, and to W else.
    for node in reversed(call_nodes(graph)):
        stage, phase = node.meta["color"].stage, node.meta["color"].phase
        if phase is Phase.F or stage < lookups:
            continue
        seq = node.meta["origin"].seq
        if node in in_b:
            continue
        for user in node.users:
            if user.op == "output":
                continue
            # Such a user is the backward of an op on data: its gradient goes on to the layers before it.
            enters = user.meta["origin"].seq in on_data and user.meta["origin"].seq != seq
            if user in in_b or enters or user.meta["color"].stage != stage:
                in_b.add(node)
                break
        else:
            node.meta["color"] = color(stage, Phase.W)
    for item in items:  # a tuple is unpacked in the section that computes it
        item.meta["color"] = item.args[0].meta["color"]


def _ops_on_data(graph: fx.Graph) -> set[int]:
    """The sequence numbers of the forward ops whose inputs depend on the batch."""
    data: set[fx.Node] = set()
    ops: set[int] = set()
    parameters_only: set[int] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.meta["input"].kind is Kind.BATCH:
                data.add(node)
        elif node.op == "call_function" and not node.meta["origin"].backward:
            seq = node.meta["origin"].seq
            if any(n in data for n in node.all_input_nodes):
                data.add(node)
                # An op of several nodes has one number; its first node tells whether it is on data.
                if seq not in parameters_only:
                    ops.add(seq)
            elif seq not in ops:
                parameters_only.add(seq)
    return ops - {None}  # autograd has no number for ops of passes, nor for its own sums


def _split_convolutions(graph: fx.Graph) -> None:
    """Replace the op for all gradients of a convolution by one for the input and one for the weight."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        mask = node.args[-1]
        if not (mask[0] and any(mask[1:])):
            continue
        with graph.inserting_before(node):
            for_input, for_weight = (copy_node(graph, node, lambda same: same) for _ in range(2))
        for_input.args = (*node.args[:-1], [True, False, False])
        for_weight.args = (*node.args[:-1], [False, *mask[1:]])
        val = node.meta["val"]
        for_input.meta = {**node.meta, "val": (val[0], None, None)}
        for_weight.meta = {**node.meta, "val": (None, *val[1:])}
        for item in list(node.users):
            item.args = (for_input if item.args[1] == 0 else for_weight, item.args[1])
        graph.erase_node(node)
