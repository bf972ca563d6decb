"""Makes one graph for all lanes of a rank, from traces of a model with DTensors as some of the lanes run it.

before: all_reduce(x, "sum", "12"), wait_tensor(…)     by the name of a process group
after:  lanes.all_reduce(x, "sum", 2)                  the lanes that run the program

before: sub(index, 0) on lane 0, sub(index, 16) on lane 1
after:  sub(index, lanes.number(0, 16))

DTensors compute with the number of their lane where they mask an embedding and where they take a share of a
replicated value.  Traces that differ in anything else are refused.  A value *varies* if lanes may have
different ones: what is sharded, and what is computed of that up to a collective.  Random ops on values that
vary draw other numbers on each lane; the loss and the gradients of what all lanes hold must not vary.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxpipe.capture.lanes.collectives import functional_collectives
from fxpipe.capture.reads.varying_values import FEW
from fxpipe.capture.trace import Captured
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Input, Kind, Origin, batch_mean, origin_of
from fxpipe.ir.names import identifier
from fxpipe.ir.ops import SUM_OF_LANES
from fxpipe.ir.storage import call_nodes, draws_numbers, drop_dead, graph_outputs
from fxpipe.ir.text import graph_text
from fxpipe.plan.dtensors import lane_plan, mesh_of
from fxpipe.plan.lanes import LanePlan
from fxpipe.runtime.program.lanes import REDUCTIONS
from fxpipe.runtime.program.random import keyed
from fxpipe.runtime.torch_private import members_of, overload_name, schema_of

aten, lanes = torch.ops.aten, torch.ops.lanes
_LOSSES, _MEAN = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), 1
#: Ops that take a shape of a value, and none of its numbers.
_CONSTANTS = (
    aten.full_like.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default,
    aten.ones_like.default, aten.zeros_like.default,
)  # fmt: skip
#: What all lanes get alike, whatever each gives.
_EQUAL = (lanes.all_reduce.default, lanes.all_gather.default)


def capture_lanes(model: nn.Module, capture: Callable[[], Captured]) -> Captured:
    """``capture()``; of a model with DTensors the one graph for all of its lanes.

    Raises CaptureError, naming module path and source line, for a model whose lanes run different ops, and
    for a result that they would not have alike.
    """
    mesh = mesh_of(model)
    if mesh is None:
        return capture()
    number = mesh.size()
    plan, group = lane_plan(model, number), members_of(mesh.get_group().group_name)
    traces: dict[int, Captured] = {}
    # Three lanes tell whether a number grows evenly with the lane; more would only take time.
    for lane in sorted({0, min(1, number - 1), number - 1}):
        with compat.as_lane(type(mesh), number, lane), functional_collectives():
            traces[lane] = capture()
        _use_lanes(traces[lane].graph, group, number)
    joint = traces[0]
    _check_constants(traces)
    _merge({lane: trace.graph for lane, trace in traces.items()}, number)
    plan = replace(plan, summed=_summed(joint.graph))
    varying = key_by_lane(joint.graph, plan)
    _check_results(joint.graph, plan, varying)
    _check_means(joint.graph, varying)
    return replace(joint, lanes=plan)


def lane_as_text(model: nn.Module, capture: Callable[[], Captured], lane: int) -> str:
    """The step that one lane runs, as text, the same on all processes whose models are alike."""
    mesh = mesh_of(model)
    lane_plan(model, mesh.size())
    with compat.as_lane(type(mesh), mesh.size(), lane), functional_collectives():
        trace = capture()
    _use_lanes(trace.graph, members_of(mesh.get_group().group_name), mesh.size())
    constants = {name: value.tolist() for name, value in trace.constants.items() if value.numel() <= FEW}
    return f"{graph_text(trace.graph)}\n{constants}"


def _use_lanes(graph: fx.Graph, group: list[int], number: int) -> None:
    """Let collectives be between the lanes that run the program, and end where they begin."""
    for node in call_nodes(graph):
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            continue
        op, (value, *arguments) = node.target.overloadpacket.__name__, node.args  # type: ignore[union-attr]
        if op == "wait_tensor":
            node.replace_all_uses_with(value)  # type: ignore[arg-type]
            graph.erase_node(node)
            continue
        target, args = _between_lanes(node, op, arguments, group, number)
        node.target, node.args, node.kwargs = target, (value, *args), {}
        val = node.meta["val"]
        node.meta["val"] = val.new_empty(val.shape)  # contiguous
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        # What is written to all of a tensor, as by a collective, does not vary because the tensor has before.
        layouts = [(x.shape, x.dtype, x.stride()) for x in (n.meta["val"] for n in node.args[:2])]
        if layouts[0] == layouts[1]:
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)


def _between_lanes(
    node: fx.Node, op: str, arguments: Sequence[Any], group: list[int], lanes_of_rank: int
) -> tuple[Any, tuple[Any, ...]]:
    # Not by name: where there are equal meshes, torch uses the group of any.
    if (members := members_of(arguments[-1])) != group:
        raise CaptureError(
            f"{op} at {node.meta['origin']} is over the processes {members}, and the mesh of the model's "
            f"DTensors is of {group}. The lanes of a rank are one group."
        )
    match op, arguments:
        case "all_reduce", [how, _] if how in REDUCTIONS:
            return lanes.all_reduce.default, (how, lanes_of_rank)
        case "all_gather_into_tensor", [number, _]:
            return lanes.all_gather.default, (number,)
        case "reduce_scatter_tensor", [how, number, _] if how in REDUCTIONS:
            return lanes.reduce_scatter.default, (how, number)
        case "all_to_all_single", [takes, gives, _] if takes == gives and len({*takes}) == 1:
            return lanes.all_to_all.default, (len(takes),)
    texts = ", ".join(map(str, arguments[:-1]))
    raise CaptureError(
        f"The lanes of a rank have no {op}({texts}), at {node.meta['origin']}. They have all_reduce and "
        f"reduce_scatter ({', '.join(REDUCTIONS)}), all_gather, and all_to_all of even shares."
    )


def _check_constants(traces: Mapping[int, Captured]) -> None:
    first = traces[0].constants
    for lane, other in traces.items():
        for name, value in first.items():
            theirs = other.constants.get(name)
            if theirs is None or theirs.shape != value.shape or not torch.equal(theirs, value):
                inputs = traces[0].graph.find_nodes(op="placeholder")
                node = next((n for n in inputs if n.meta["input"].name == name), None)
                if node is None:  # no op of this lane reads it: if one of another does, the graphs differ
                    continue
                where = next(iter(node.users)).meta["origin"]
                raise CaptureError(
                    f"Lane {lane} makes another constant than lane 0 ({where}). All lanes run one program: "
                    "make what differs a DTensor."
                )


def _merge(graphs: Mapping[int, fx.Graph], number: int) -> None:
    """Change the first lane's graph to that of all lanes."""
    first, others = graphs[0], {lane: graph for lane, graph in graphs.items() if lane}
    same: dict[fx.Node, fx.Node] = {}  # node of another lane -> of the first
    nodes = [list(first.nodes), *(list(graph.nodes) for graph in others.values())]
    for node, *theirs in zip(*nodes, strict=False):
        arguments = {0: _leaves(node, {})}
        for lane, other in zip(others, theirs, strict=True):
            if _kind(other) != _kind(node):
                raise _differ(node, other, lane)
            same[other] = node
            arguments[lane] = _leaves(other, same)
            if len(arguments[lane]) != len(arguments[0]):
                raise _differ(node, other, lane)
        differ = [
            k for k, x in enumerate(arguments[0]) if any(not _equal(y[k], x) for y in arguments.values())
        ]
        if differ and not _vary(node, differ, arguments, number):
            lane = next(lane for lane, y in arguments.items() if y != arguments[0])
            raise _differ(node, theirs[[*others].index(lane)], lane)
    drop_dead(first)


def _kind(node: fx.Node) -> object:
    """The parts of a node that must be equal on all lanes; arguments are compared one by one."""
    values = pytree.tree_leaves(node.meta.get("val"))
    layouts = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in values]
    return node.op, str(node.target), node.meta.get("input"), node.meta.get("random_position"), layouts


def _leaves(node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> list[object]:
    mapped = fx.map_arg((node.args, node.kwargs), lambda n: same.get(n, n))
    return pytree.tree_leaves(mapped)


def _equal(a: object, b: object) -> bool:
    """Whether two arguments are the same; NaN is the same as NaN."""
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _differ(node: fx.Node, other: fx.Node, lane: int) -> CaptureError:
    return CaptureError(
        f"Lane 0 runs {_text(node)} and lane {lane} runs {_text(other)} ({origin_of(node)}). All lanes of a "
        "rank run one program: let the model's code not depend on the number of its process."
    )


def _text(node: fx.Node) -> str:
    arguments = ", ".join("…" if isinstance(x, fx.Node) else str(x) for x in node.args)
    return f"{node.target}({arguments})"


def _vary(node: fx.Node, differ: list[int], arguments: Mapping[int, list[Any]], number: int) -> bool:
    """Give an op the number of its lane where its argument follows from that; whether it does."""
    if node.target is operator.getitem and _is_share(node, arguments, number):
        return True
    leaves = arguments[0]
    ints = len(differ) == 1 and all(type(x[differ[0]]) is int for x in arguments.values())
    if not ints or not isinstance(node.target, compat.OpOverload) or list(node.args) != leaves:
        return False  # a number among other arguments: in a list, or by name
    (k,) = differ
    values = {lane: x[k] for lane, x in arguments.items()}
    last = max(values)
    step, rest = divmod(values[last] - values[0], last)
    if rest or any(value != values[0] + lane * step for lane, value in values.items()):
        return False
    target = _taking_a_tensor(node.target, k)
    tensors = [x for x in node.all_input_nodes if isinstance(x.meta["val"], torch.Tensor)]
    if target is None or not tensors:
        return False
    like = tensors[0].meta["val"]
    with node.graph.inserting_before(node):
        lane_number = node.graph.create_node(
            "call_function",
            lanes.number.default,
            (values[0], step),
            {"device": torch.device(like.device)},
            name="lane_number",
        )
    lane_number.meta.update(origin=node.meta["origin"], val=like.new_empty((), dtype=torch.int64))
    node.target, node.args = target, (*node.args[:k], lane_number, *node.args[k + 1 :])
    return True


def _taking_a_tensor(op: compat.OpOverload, k: int) -> compat.OpOverload | None:
    """The overload of an op that takes a tensor in the place of a number."""
    if isinstance(schema_of(op).arguments[k].type, torch.TensorType):
        return op
    other: compat.OpOverload | None = getattr(op.overloadpacket, "Tensor", None)
    if overload_name(op) != "Scalar" or other is None:
        return None
    return other if isinstance(schema_of(other).arguments[k].type, torch.TensorType) else None


def _is_share(item: fx.Node, arguments: Mapping[int, list[object]], number: int) -> bool:
    """Let an item of an even split, that of its own lane, be the lane's share."""
    split: Any = item.args[0]
    items = {lane: leaves[1] for lane, leaves in arguments.items()}
    if split.target is not aten.split.Tensor or any(k != lane for lane, k in items.items()):
        return False
    value, _, *dim = split.args
    if len(split.meta["val"]) != number or len({x.shape for x in split.meta["val"]}) > 1:
        return False
    item.target, item.args = lanes.part.default, (value, dim[0] if dim else 0, number)
    item.meta["val"] = item.meta["val"].new_empty(item.meta["val"].shape)
    return True


def key_by_lane(graph: fx.Graph, plan: LanePlan) -> set[fx.Node]:
    """Give random ops on values that vary the key of their lane; return all values that vary."""
    varying: set[fx.Node] = set()
    shaped: set[fx.Node] = set()  # constants of the shape of values that vary
    key: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if node.meta["input"].name in plan.shards and node.meta["input"].kind is not Kind.BATCH:
                varying.add(node)
            continue
        if node.op != "call_function" or node.target in _EQUAL:
            continue
        is_of_lanes = getattr(node.target, "namespace", "") == "lanes"
        # Numbers that are drawn for a share are those of its lane.
        is_drawn = draws_numbers(node) and not shaped.isdisjoint(node.all_input_nodes)
        if not (is_of_lanes or is_drawn) and varying.isdisjoint(_read(node)):
            continue
        if node.target in _CONSTANTS:
            shaped.add(node)
            continue
        varying.add(node)
        if draws_numbers(node):
            key = key or _lane_key(graph)
            node.args = (key, node.meta["random_position"], node.target, *node.args)
            node.target = keyed
    return varying


def _read(node: fx.Node) -> Sequence[fx.Node]:
    """The operands whose values an op takes: of a slice of a concatenation, those that it is of."""
    joined: Any = node.args[0] if node.target is aten.slice.Tensor else None
    if joined is None or joined.target is not aten.cat.default:
        return node.all_input_nodes
    given: Any = (*node.args[1:], *(0, None, None)[len(node.args) - 1 :])
    dim, first, last = given[:3]
    parts, *of = joined.args
    dims = len(joined.meta["val"].shape)
    if dim % dims != (of[0] if of else 0) % dims:
        return node.all_input_nodes
    lengths: list[int] = [part.meta["val"].shape[dim] for part in parts]
    begin, end, _ = slice(first, last).indices(sum(lengths))
    ends = [*itertools.accumulate(lengths)]
    return [x for x, n, at in zip(parts, lengths, ends, strict=True) if at > begin and at - n < end]


def _lane_key(graph: fx.Graph) -> fx.Node:
    with graph.inserting_before(call_nodes(graph)[0]):
        key = graph.placeholder(identifier("lane_key"))
    key.meta.update(input=Input(Kind.KEY, "lane_key"), val=None, origin=Origin())
    return key


def _check_results(graph: fx.Graph, plan: LanePlan, varying: set[fx.Node]) -> None:
    """Raise CaptureError for a result that all lanes must have alike and that varies."""
    named = graph_outputs(graph)
    results = {"the loss": named.loss, "the count": named.count}
    results |= {f"the output {name!r}": value for name, value in named.outputs.items()}
    results |= {f"the new value of the buffer {name!r}": x for name, x in named.buffers.items()}
    for name in named.buffers.keys() & plan.shards.keys():
        raise CaptureError(
            f"The forward changes the buffer {name!r}, of which each lane has a share, at "
            f"{named.buffers[name].meta['origin']}. Let all lanes hold it whole: Replicate()."
        )
    for name, parts in named.grads.items():
        if name not in plan.shards:
            results |= {f"the gradient of {name!r}": part for part in parts}
    for what, value in results.items():
        if value in varying:
            raise CaptureError(
                f"On each lane {what} is another one, a share or a part of a sum, at "
                f"{_source(value, varying).meta['origin']}. All lanes must have it alike: gather what is "
                "sharded by the plan of parallelize_module (output_layouts=Replicate()), compute the loss in "
                "loss_parallel(), or let the plan name the module (SequenceParallel() for a norm)."
            )


def _summed(graph: fx.Graph) -> tuple[str, ...]:
    """The parameters of which each summand of the gradient is a sum over the lanes."""

    def is_sum(node: fx.Node) -> bool:
        return node.target is SUM_OF_LANES and node.args[1] == "sum"

    return tuple(name for name, parts in graph_outputs(graph).grads.items() if all(map(is_sum, parts)))


def _check_means(graph: fx.Graph, varying: set[fx.Node]) -> None:
    """Raise CaptureError for the mean of a loss over what one lane has: lanes have different numbers of
    labels, and torch gives a DTensor the gradient of the lane's own mean."""
    for node in call_nodes(graph):
        of_labels, is_mean = node.target in _LOSSES, _is_mean(node)
        if is_mean and not of_labels and not varying.isdisjoint(node.all_input_nodes):
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
    if not isinstance(node.target, compat.OpOverload) or node.meta["origin"].backward:
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    if "reduction" not in names:
        return False
    at = names.index("reduction")
    reduction = node.args[at] if at < len(node.args) else node.kwargs.get("reduction", _MEAN)
    return type(reduction) is int and reduction == _MEAN


def _source(value: Any, varying: set[fx.Node]) -> fx.Node:
    """The op of the forward that a value that varies comes from, for messages."""
    node: fx.Node = value
    while node.op == "call_function" and not node.meta["origin"].source:
        before = [n for n in node.all_input_nodes if n in varying and n.op == "call_function"]
        if not before:
            break
        node = before[0]
    return node
