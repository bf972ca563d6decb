"""What varies between lanes: random ops of it have keys of their own, and results may not be of it.

A value *varies* along a dimension of the mesh if lanes along that may have different ones: what is sharded,
and what is computed of that up to a collective.  Random ops on values that vary draw other numbers on each of
these lanes; the loss must not vary, and the gradient of a parameter only as the parameter does.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxpipe.errors import CaptureError
from fxpipe.ir.graph import Input, Kind, Origin, batch_mean
from fxpipe.ir.names import identifier
from fxpipe.ir.ops import lane_group
from fxpipe.ir.storage import argument, call_nodes, draws_numbers, graph_outputs
from fxpipe.plan.lanes import LaneGroup, LanePlan
from fxpipe.runtime.program.random import keyed

aten, lanes = torch.ops.aten, torch.ops.lanes
_LOSSES, _MEAN = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), 1
#: Ops that take a shape of a value, and none of its numbers.
_CONSTANTS = (
    aten.full_like.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default,
    aten.ones_like.default, aten.zeros_like.default,
)  # fmt: skip
#: What all lanes get alike, whatever each gives.
_EQUAL = (lanes.all_reduce.default, lanes.all_gather.default)

Varying = dict[fx.Node, frozenset[LaneGroup]]
"""Value -> the dimensions of the mesh along which it varies, of those that do."""
_NOWHERE: frozenset[LaneGroup] = frozenset()


def key_by_lane(graph: fx.Graph, plan: LanePlan) -> Varying:
    """Give random ops on values that vary the key of their lane; return all values that vary."""
    varying: Varying = {}
    shaped: Varying = {}  # constants of the shape of values that vary
    keys: dict[LaneGroup, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if node.meta["input"].kind is not Kind.BATCH:
                groups = frozenset(group for _, group in plan.shares(node.meta["input"].name))
                varying |= {node: groups} if groups else {}
            continue
        if node.op != "call_function":
            continue
        along = _along(node, plan) if getattr(node.target, "namespace", "") == "lanes" else _NOWHERE
        read = [varying.get(x, _NOWHERE) for x in _read(node)]
        if draws_numbers(node):  # numbers that are drawn for a share are those of its lane
            read += [shaped.get(x, _NOWHERE) for x in node.all_input_nodes]
        groups = _NOWHERE.union(*read)
        groups = groups - along if node.target in _EQUAL else groups | along
        if not groups:
            continue
        if node.target in _CONSTANTS:
            shaped[node] = groups
            continue
        varying[node] = groups
        if draws_numbers(node):
            group = _as_one_group(node, groups, plan)
            key = keys[group] = keys.get(group) or _lane_key(graph, group, plan)
            node.args = (key, node.meta["random_position"], node.target, *node.args)
            node.target = keyed
    return varying


def _along(node: fx.Node, plan: LanePlan) -> frozenset[LaneGroup]:
    """The dimensions of the mesh along which the lanes of an op are."""
    group = lane_group(node)
    return frozenset(plan.groups if group.number in (0, plan.number) else [group])


def _as_one_group(node: fx.Node, groups: frozenset[LaneGroup], plan: LanePlan) -> LaneGroup:
    """The lanes that draw different numbers."""
    if groups >= {group for group in plan.groups if group.number > 1}:
        return LaneGroup(plan.number)
    if len(groups) > 1:
        raise CaptureError(
            f"{node.target} at {node.meta['origin']} draws numbers for a value that is shared out "
            "over several dimensions of a mesh of more. Give all lanes the whole value there, or share it "
            "out over one."
        )
    (group,) = groups
    return group


def _read(node: fx.Node) -> Sequence[fx.Node]:
    """The operands whose values an op takes: of a slice of a concatenation, those that it is of."""
    joined: Any = node.args[0] if node.target is aten.slice.Tensor else None
    if joined is None or joined.target is not aten.cat.default:
        return node.all_input_nodes
    arguments: Any = (*node.args[1:], *(0, None, None)[len(node.args) - 1 :])
    dim, first, last = arguments[:3]
    parts, *of = joined.args
    dims = len(joined.meta["val"].shape)
    if dim % dims != (of[0] if of else 0) % dims:
        return node.all_input_nodes
    lengths: list[int] = [part.meta["val"].shape[dim] for part in parts]
    begin, end, _ = slice(first, last).indices(sum(lengths))
    ends = [*itertools.accumulate(lengths)]
    return [x for x, n, at in zip(parts, lengths, ends, strict=True) if at > begin and at - n < end]


def _lane_key(graph: fx.Graph, group: LaneGroup, plan: LanePlan) -> fx.Node:
    of_some = [str(group.number), str(group.stride)] if group.number < plan.number else []
    name = "_".join(["lane_key", *of_some])
    with graph.inserting_before(call_nodes(graph)[0]):
        key = graph.placeholder(identifier(name))
    key.meta.update(input=Input(Kind.KEY, name), val=None, origin=Origin())
    return key


def check_results(graph: fx.Graph, plan: LanePlan, varying: Varying) -> None:
    """Raise CaptureError for a result that all lanes must have alike and that varies."""
    named = graph_outputs(graph)
    results = [("the loss", named.loss, _NOWHERE), ("the count", named.count, _NOWHERE)]
    results += [(f"the output {name!r}", value, _NOWHERE) for name, value in named.outputs.items()]
    results += [(f"the new value of the buffer {name!r}", x, _NOWHERE) for name, x in named.buffers.items()]
    for name in named.buffers.keys() & plan.shared:
        raise CaptureError(
            f"The forward changes the buffer {name!r}, of which each lane has a share, at "
            f"{named.buffers[name].meta['origin']}. Let all lanes hold it whole: Replicate()."
        )
    for name, parts in named.grads.items():
        groups = frozenset(group for _, group in plan.shares(name))
        results += [(f"the gradient of {name!r}", part, groups) for part in parts]
    for what, value, groups in results:
        if value is not None and varying.get(value, _NOWHERE) - groups:
            raise CaptureError(
                f"On each lane {what} is another one, a share or a part of a sum, at "
                f"{_source(value, varying).meta['origin']}. All lanes must have it alike: gather what is "
                "sharded by the plan of parallelize_module (output_layouts=Replicate()), compute the loss in "
                "loss_parallel(), or let the plan name the module (SequenceParallel() for a norm)."
            )


def check_means(graph: fx.Graph, varying: Varying) -> None:
    """Raise CaptureError for the mean of a loss over what one lane has: lanes have different numbers of
    labels, and torch gives a DTensor the gradient of the lane's own mean."""
    for node in call_nodes(graph):
        of_labels, is_mean = node.target in _LOSSES, _is_mean(node)
        if is_mean and not of_labels and not varying.keys().isdisjoint(node.all_input_nodes):
            raise CaptureError(
                f"The loss at {node.meta['origin']} is a mean over the elements of one lane, whose gradient "
                "is not that of the mean over all. Take the mean as an op of its own: reduction='none', and "
                ".mean() of that."
            )
        if ((is_mean and of_labels) or node.target is batch_mean) and node.args[of_labels] in varying:
            raise CaptureError(
                f"The loss at {node.meta['origin']} is a mean over the labels of one lane. Lanes have other "
                "numbers of labels that count, so the mean of their means is another loss. Divide the sum of "
                "all lanes by the count of all, let all lanes have all labels (loss_parallel()), or divide "
                "the sequence by fxpipe.ContextParallel."
            )


def _is_mean(node: fx.Node) -> bool:
    """Whether an op of the forward is a loss with the reduction "mean"."""
    reduction = argument(node, "reduction")
    return not node.meta["origin"].backward and type(reduction) is int and reduction == _MEAN


def _source(value: Any, varying: Varying) -> fx.Node:
    """The op of the forward that a value that varies comes from, for messages."""
    node: fx.Node = value
    while node.op == "call_function" and not node.meta["origin"].source:
        before = [n for n in node.all_input_nodes if n in varying and n.op == "call_function"]
        if not before:
            break
        node = before[0]
    return node
