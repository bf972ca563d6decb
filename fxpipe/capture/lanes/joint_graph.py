"""Makes one graph for all lanes of a rank, from traces of a model with DTensors as some of the lanes run it.

before: all_reduce(x, "sum", "12"), wait_tensor(…)     by the name of a process group
after:  lanes.all_reduce(x, "sum", 2)                  the lanes that run the program

before: sub(index, 0) on lane 0, sub(index, 16) on lane 1
after:  sub(index, lanes.number(0, 16))

DTensors compute with the number of their lane where they mask an embedding and where they take a share of a
replicated value.  Traces that differ in anything else are refused.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx, nn

from fxpipe.capture.lanes.collectives import functional_collectives
from fxpipe.capture.lanes.varying import check_means, check_results, key_by_lane
from fxpipe.capture.reads.varying_values import FEW
from fxpipe.capture.trace import Captured
from fxpipe.errors import CaptureError
from fxpipe.ir import compat, patches
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import origin_of
from fxpipe.ir.ops import SUM_OF_LANES, lane_group
from fxpipe.ir.storage import call_nodes, drop_dead, graph_outputs
from fxpipe.ir.text import graph_text
from fxpipe.plan.dtensors import lane_plan, mesh_of
from fxpipe.plan.lanes import LaneGroup, LanePlan
from fxpipe.runtime.program.lanes import REDUCTIONS
from fxpipe.runtime.torch_private import members_of, overload_name, schema_of

aten, lanes = torch.ops.aten, torch.ops.lanes
#: Processes of a group -> the lanes that they are.
_Groups = dict[tuple[int, ...], LaneGroup]


def capture_lanes(model: nn.Module, capture: Callable[[], Captured]) -> Captured:
    """``capture()``; of a model with DTensors the one graph for all of its lanes.

    Raises CaptureError, naming module path and source line, for a model whose lanes run different ops, and
    for a result that they would not have alike.
    """
    mesh = mesh_of(model)
    if mesh is None:
        return capture()
    plan = lane_plan(model, mesh)
    groups = _groups_of_processes(mesh, plan)
    traces: dict[int, Captured] = {}
    # Three lanes along each dimension tell whether a number grows evenly with the lane; more would only take
    # time.
    ends = {last for each in plan.groups for last in (each.stride, (each.number - 1) * each.stride)}
    for lane in sorted({0, plan.number - 1} | {lane for lane in ends if lane < plan.number}):
        traces[lane] = _as_lane(mesh, groups, plan.number, lane, capture)
    joint = traces[0]
    _check_constants(traces)
    _merge({lane: trace.graph for lane, trace in traces.items()}, plan)
    plan = _with_sums(joint.graph, plan)
    varying = key_by_lane(joint.graph, plan)
    check_results(joint.graph, plan, varying)
    check_means(joint.graph, varying)
    return replace(joint, lanes=plan)


def lane_as_text(model: nn.Module, capture: Callable[[], Captured], lane: int) -> str:
    """The step that one lane runs, as text, the same on all processes whose models are alike."""
    mesh = mesh_of(model)
    groups = _groups_of_processes(mesh, lane_plan(model, mesh))
    trace = _as_lane(mesh, groups, mesh.size(), lane, capture)
    constants = {name: value.tolist() for name, value in trace.constants.items() if value.numel() <= FEW}
    return f"{graph_text(trace.graph)}\n{constants}"


def _groups_of_processes(mesh: Any, plan: LanePlan) -> _Groups:
    groups = {tuple(mesh.mesh.flatten().tolist()): LaneGroup(plan.number)}
    for dim, group in enumerate(plan.groups):
        groups.setdefault(tuple(members_of(mesh.get_group(dim).group_name)), group)
    return groups


def _as_lane(mesh: Any, groups: _Groups, number: int, lane: int, capture: Callable[[], Captured]) -> Captured:
    """What ``capture`` gives on one of so many lanes, with ops between lanes."""

    def place(name: str) -> int | None:
        group = groups.get(tuple(members_of(name)))
        return None if group is None else group.index(lane)

    with patches.as_lane(type(mesh), number, lane, place), functional_collectives():
        trace = capture()
    _use_lanes(trace.graph, groups)
    return trace


def _use_lanes(graph: fx.Graph, groups: _Groups) -> None:
    """Let collectives be between the lanes that run the program, and end where they begin."""
    for node in call_nodes(graph):
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            continue
        op, (value, *arguments) = node.target.overloadpacket.__name__, node.args  # type: ignore[union-attr]
        if op == "wait_tensor":
            node.replace_all_uses_with(value)  # type: ignore[arg-type]
            graph.erase_node(node)
            continue
        # Not by name: where there are equal meshes, torch uses the group of any.
        group = groups.get(members := tuple(members_of(cast(str, arguments[-1]))))
        if group is None:
            raise CaptureError(
                f"{op} at {node.meta['origin']} is over the processes {[*members]}, and the mesh of the "
                f"model's DTensors is of {_text_of(groups)}."
            )
        if group.number == 1:  # of a dimension of one lane
            node.replace_all_uses_with(value)  # type: ignore[arg-type]
            graph.erase_node(node)
            continue
        target, args = _between_lanes(node, op, arguments, group)
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
    node: fx.Node, op: str, arguments: Sequence[Any], group: LaneGroup
) -> tuple[Any, tuple[Any, ...]]:
    match op, arguments:
        case "all_reduce", [how, _] if how in REDUCTIONS:
            return lanes.all_reduce.default, (how, *group.arguments)
        case "all_gather_into_tensor", _:
            return lanes.all_gather.default, group.arguments
        case "reduce_scatter_tensor", [how, *_] if how in REDUCTIONS:
            return lanes.reduce_scatter.default, (how, *group.arguments)
        case "all_to_all_single", [takes, gives, _] if takes == gives and len({*takes}) == 1:
            return lanes.all_to_all.default, group.arguments
    texts = ", ".join(map(str, arguments[:-1]))
    raise CaptureError(
        f"The lanes of a rank have no {op}({texts}), at {node.meta['origin']}. They have all_reduce and "
        f"reduce_scatter ({', '.join(REDUCTIONS)}), all_gather, and all_to_all of even shares."
    )


def _text_of(groups: _Groups) -> str:
    every, *along = sorted(map(list, groups), key=len, reverse=True)
    return f"{every}" + (f", with {' and '.join(map(str, along))} along its dimensions" if along else "")


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


def _merge(graphs: Mapping[int, fx.Graph], plan: LanePlan) -> None:
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
        if differ and not _vary(node, differ, arguments, plan):
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


def _vary(node: fx.Node, differ: list[int], arguments: Mapping[int, list[Any]], plan: LanePlan) -> bool:
    """Give an op the number of its lane where its argument follows from that; whether it does."""
    if node.target is operator.getitem and _is_share(node, arguments, plan):
        return True
    leaves = arguments[0]
    ints = len(differ) == 1 and all(type(x[differ[0]]) is int for x in arguments.values())
    if not ints or not isinstance(node.target, compat.OpOverload) or list(node.args) != leaves:
        return False  # a number among other arguments: in a list, or by name
    (k,) = differ
    numbers = _numbers({lane: x[k] for lane, x in arguments.items()}, plan)
    target = _taking_a_tensor(node.target, k)
    tensors = [x for x in node.all_input_nodes if isinstance(x.meta["val"], torch.Tensor)]
    if target is None or not tensors or numbers is None:
        return False
    like = tensors[0].meta["val"]

    def call(op: object, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        made: fx.Node = node.graph.create_node("call_function", op, args, kwargs, name="lane_number")  # type: ignore[arg-type]
        made.meta.update(origin=node.meta["origin"], val=like.new_empty((), dtype=torch.int64))
        return made

    with node.graph.inserting_before(node):
        device = torch.device(like.device)
        along = [call(lanes.number.default, each, device=device) for each in numbers]
        lane_number = functools.reduce(lambda a, b: call(aten.add.Tensor, (a, b)), along)
    node.target, node.args = target, (*node.args[:k], lane_number, *node.args[k + 1 :])
    return True


def _numbers(values: Mapping[int, int], plan: LanePlan) -> list[tuple[int, ...]] | None:
    """The arguments of ``lanes.number`` whose sum is the number that each lane has; None if that does not
    grow evenly along each dimension of the mesh."""
    first, groups = values[0], [group for group in plan.groups if group.number > 1]
    steps = {group: values[group.stride] - first for group in groups}
    of_neighbor = steps[groups[-1]]  # whose stride is 1
    expected = {lane: first + sum(s * g.index(lane) for g, s in steps.items()) for lane in values}
    if values != expected:
        return None
    if all(step == of_neighbor * group.stride for group, step in steps.items()):
        return [(first, of_neighbor)]
    (group, step), *others = ((group, step) for group, step in steps.items() if step)
    return [(first, step, *group.arguments), *((0, step, *group.arguments) for group, step in others)]


def _taking_a_tensor(op: compat.OpOverload, k: int) -> compat.OpOverload | None:
    """The overload of an op that takes a tensor in the place of a number."""
    if isinstance(schema_of(op).arguments[k].type, torch.TensorType):
        return op
    other: compat.OpOverload | None = getattr(op.overloadpacket, "Tensor", None)
    if overload_name(op) != "Scalar" or other is None:
        return None
    return other if isinstance(schema_of(other).arguments[k].type, torch.TensorType) else None


def _is_share(item: fx.Node, arguments: Mapping[int, list[object]], plan: LanePlan) -> bool:
    """Let an item of an even split, that of its own lane, be the lane's share."""
    split: Any = item.args[0]
    items = {lane: leaves[1] for lane, leaves in arguments.items()}
    if split.target is not aten.split.Tensor or len({x.shape for x in split.meta["val"]}) > 1:
        return False
    number, (value, _, *dim) = len(split.meta["val"]), split.args
    of_group = (group for group in (LaneGroup(plan.number), *plan.groups) if group.number == number)
    group = next((g for g in of_group if all(k == g.index(lane) for lane, k in items.items())), None)
    if group is None:
        return False
    item.target, item.args = lanes.part.default, (value, dim[0] if dim else 0, *group.arguments)
    item.meta["val"] = item.meta["val"].new_empty(item.meta["val"].shape)
    return True


def _with_sums(graph: fx.Graph, plan: LanePlan) -> LanePlan:
    """The plan with the parameters of which each summand of the gradient is a sum over lanes, the same."""
    sums: dict[LaneGroup, list[str]] = {}
    for name, parts in graph_outputs(graph).grads.items():
        groups = {lane_group(x) if x.target is SUM_OF_LANES and x.args[1] == "sum" else None for x in parts}
        if len(groups) == 1 and (group := groups.pop()) is not None:
            sums.setdefault(group, []).append(name)
    along = zip(plan.axes, plan.groups, strict=True)
    axes = tuple(replace(axis, summed=tuple(sums.pop(group, ()))) for axis, group in along)
    return replace(plan, axes=axes)
