"""Values that no microbatch changes, computed once a step: masks, positions, rotary tables; and those of
parameters alone, as casts are."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence, Set
from enum import Enum

import torch
from torch import fx

from fxpipe.ir.compat import OpOverload
from fxpipe.ir.dims import is_pointwise
from fxpipe.ir.graph import Input, Kind, batch_mean
from fxpipe.ir.nodes import copy_node, input_nodes
from fxpipe.ir.resized import ResizedTraces, value_key
from fxpipe.ir.size import size_names
from fxpipe.ir.storage import (
    call_nodes,
    graph_outputs,
    is_view,
    leading_to,
    may_draw_numbers,
    node_bytes,
    storage_root,
    tensors,
    written,
)

aten = torch.ops.aten

#: What forward or backward uses alone would be freed behind it.  Held for the step, all such values have at
#: most this share of the bytes that the forward of a microbatch computes.
MOST_SHARE = 0.01

#: Ops that write one number everywhere.
_FILLS = {f"{name}{like}" for name in ("empty", "full", "ones", "zeros") for like in ("", "_like")}
_FILLS |= {f"new_{name}" for name in ("empty", "full", "ones", "zeros", "empty_strided")}
_FILLS |= {"empty_strided", "scalar_tensor"}
#: What a rank has without its parameters.
_GIVEN = frozenset([Kind.BUFFER, Kind.CONSTANT])
_COPIES = (aten.clone.default, aten._to_copy.default)


def once_values(graph: fx.Graph, resized: ResizedTraces | None) -> set[fx.Node]:
    """The ops whose results may be held for the step.

    They read buffers that the step does not change, constants, and each other.  Views of what is there anyway
    stay where they are used, and tensors of one number, which take as long to read as to make.

    resized: the traces at other sizes, at which equal values must be equal, too.
    """
    invariant = _invariants(graph, _GIVEN)
    computed = {node for node, how in invariant.items() if how is _Made.COMPUTED}
    copies = copied(leading_to(computed), fx.Graph(), resized)
    while computed:
        sizes = _unshared_bytes(computed, copies)
        if _is_share(sum(sizes.values()), graph, invariant):
            break
        # The largest first, as it leaves room for the most others.
        largest = max(sizes, key=sizes.__getitem__)
        computed -= {node for node in computed if storage_root(copies[node]) is largest}
    return computed


def weight_values(graph: fx.Graph, resized: ResizedTraces | None) -> set[fx.Node]:
    """The ops that make of parameters, and of nothing that a microbatch changes, what is worth holding for a
    step: weights in fewer bits, normalized or quantized ones, their norms.

    It has at most half of its parameters' bytes; or as many, if an op reads a matrix and both forward and
    backward need it, which would compute it for each microbatch, or save it.
    """
    # A gradient that is equal for all microbatches, as that of a sum, is no weight.
    invariant = _invariants(graph, _GIVEN | {Kind.PARAMETER}, lambda node: "gradient" not in node.meta)
    behind: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in invariant:
        is_parameter = node.op == "placeholder" and node.meta["input"].kind is Kind.PARAMETER
        of_operands = frozenset[fx.Node]().union(*(behind[n] for n in input_nodes(node)))
        behind[node] = frozenset([node]) if is_parameter else of_operands
    computed = [node for node, how in invariant.items() if how is _Made.COMPUTED and behind[node]]
    copies = copied(leading_to(computed), fx.Graph(), resized)
    # Views stay where they are used.
    users = defaultdict[fx.Node, list[fx.Node]](list)
    for node in computed:
        users[storage_root(node)] += (user for user in node.users if user not in invariant)
    directions = defaultdict[fx.Node, set[bool]](set)  # in which a value is needed, equal ones together
    for root, readers in users.items():
        directions[copies[root]] |= {user.meta["origin"].backward for user in readers}

    def is_worth(root: fx.Node) -> bool:
        size, whole = node_bytes(root), sum(map(node_bytes, behind[root]))
        is_matrix = any(parameter.meta["val"].dim() > 1 for parameter in behind[root])
        return 2 * size <= whole or (size <= whole and is_matrix and len(directions[copies[root]]) > 1)

    return {root for root, readers in users.items() if readers and is_worth(root)}


def mean_values(graph: fx.Graph) -> set[fx.Node]:
    """The means over the batch, and the ops that lead to them alone: before its first op a program has what
    these give."""
    return leading_alone(graph.find_nodes(op="call_function", target=batch_mean))


def leading_alone(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These ops, and those that lead to them alone."""
    leading = {*nodes}
    # Users first: an op is part of it if all that use it are.
    for node in sorted(leading_to(leading), reverse=True):
        if node.op == "call_function" and leading.issuperset(node.users):
            leading.add(node)
    return leading


def copied(
    nodes: Iterable[fx.Node], graph: fx.Graph, resized: ResizedTraces | None
) -> dict[fx.Node, fx.Node]:
    """Append copies of the nodes to another graph; return them by node.  Equal ones are one."""
    first, copies = dict[Hashable, fx.Node](), dict[fx.Node, fx.Node]()
    for node in sorted(nodes):
        args, kwargs = (fx.map_arg(x, copies.__getitem__) for x in (node.args, node.kwargs))
        key = node.meta["input"] if node.op == "placeholder" else value_key(node, args, kwargs, resized)
        # Of equal values, such as the masks of all layers, one is held.
        if key not in first:
            first[key] = copy_node(graph, node, copies.__getitem__)
        copies[node] = first[key]
    return copies


def once_bytes(computed: Iterable[fx.Node]) -> int:
    """The bytes of the storages of values that are held for the step."""
    roots = {storage_root(node) for node in computed}
    return sum(node_bytes(root) for root in roots if root.op == "call_function")


def inputs_behind(step_input: Input) -> tuple[Input, ...]:
    """The inputs of the step that an input comes from, itself if it is one."""
    if step_input.computed is None:
        return (step_input,)
    return tuple(n.meta["input"] for n in sorted(leading_to([step_input.computed])) if n.op == "placeholder")


class _Made(Enum):
    """The way a value comes about: it is an input of the step, one number everywhere, or computed."""

    INPUT, FILLED, COMPUTED = range(3)


def _invariants(
    graph: fx.Graph, given: Set[Kind], may_be: Callable[[fx.Node], bool] = lambda node: True
) -> dict[fx.Node, _Made]:
    """What no microbatch changes.  given: the kinds of inputs that it is made of, if the step leaves them.
    may_be: of ops, those to take and to go on from."""
    changed, results = graph_outputs(graph).buffers, set(graph.output_node().all_input_nodes)
    invariant: dict[fx.Node, _Made] = {}
    for node in graph.nodes:
        inputs = input_nodes(node)
        if node.op == "placeholder":
            kind, name = node.meta["input"].kind, node.meta["input"].name
            if kind in given and not (kind is Kind.BUFFER and name in changed):
                invariant[node] = _Made.INPUT
        elif not all(map(invariant.__contains__, inputs)):
            continue
        elif node not in results and _is_pure(node) and may_be(node):
            invariant[node] = _made(node, [invariant[n] for n in inputs])
    return invariant


def _made(node: fx.Node, inputs: Sequence[_Made]) -> _Made:
    if node.target is operator.getitem or is_view(node):
        return inputs[0]
    by_element = is_pointwise(node) or node.target in _COPIES
    fills = node.target.overloadpacket.__name__ in _FILLS  # type: ignore[union-attr]
    return _Made.FILLED if fills or (by_element and {*inputs} == {_Made.FILLED}) else _Made.COMPUTED


def _is_pure(node: fx.Node) -> bool:
    """Whether the op gives the same tensors for the same arguments, whenever and wherever it runs, and for
    microbatches of all lengths."""
    if node.op != "call_function" or size_names([node]):
        return False
    if node.target is operator.getitem:
        return True
    is_known = isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims")
    return is_known and not may_draw_numbers(node.target) and not written(node.target) and bool(tensors(node))


def _unshared_bytes(computed: Set[fx.Node], copies: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """The bytes of the storages that not both forward and backward need, by the node that makes them."""
    users = defaultdict[fx.Node, list[fx.Node]](list)
    for node in computed:
        # By storage, as a view holds all of it.
        users[storage_root(copies[node])] += (user for user in node.users if user not in computed)
    return {
        root: node_bytes(root)
        for root, readers in users.items()
        if len({user.meta["origin"].backward for user in readers}) == 1
    }


def _is_share(size: int, graph: fx.Graph, invariant: Container[fx.Node]) -> bool:
    """Whether ``size`` is at most the allowed share of what the forward computes of a microbatch."""
    computed = 0
    for node in call_nodes(graph):
        # As soon as it is known: a large graph need not be added up.
        if size <= MOST_SHARE * computed:
            return True
        if node not in invariant and not node.meta["origin"].backward and not is_view(node):
            computed += node_bytes(node)
    return size <= MOST_SHARE * computed
