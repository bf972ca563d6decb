"""The storages of a graph's values: views, roots, bytes, last uses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Outputs, offload, read_buffer, reload
from fxpipe.plan.tensors import storage_bytes
from fxpipe.runtime.torch_private import schema_of
from fxpipe.schedule.ops import Phase

aten = torch.ops.aten

# Returns its input's storage, which its schema does not mark.
_SILENT_VIEWS = {
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    offload,
    reload,
}


def is_view(node: fx.Node) -> bool:
    """Whether the node's value lives in the storage of its first argument."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    # A trace replaces tensors that it knows by numbers: conj(1j).
    return _returns_view(node.target) and bool(node.args) and isinstance(node.args[0], fx.Node)


@cache
def _returns_view(target: fx.node.Target) -> bool:
    if target in _SILENT_VIEWS:
        return True
    schema = schema_of(target)
    return schema is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )


@cache
def written(target: fx.node.Target) -> tuple[str, ...]:
    """The arguments that an op writes to."""
    schema = schema_of(target)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


#: Arguments that switch off the randomness of an op.
_STILL = {"dropout_p": 0.0, "p": 0.0, "train": False}
_MISSING = object()


def draws_numbers(node: fx.Node) -> bool:
    """Whether the op draws random numbers: it has the tag, and no argument switches randomness off."""
    if not may_draw_numbers(node.target):
        return False
    return not any(argument(node, name, _MISSING) == still for name, still in _STILL.items())


def argument(node: fx.Node, name: str, default: object = None) -> object:
    """An op's argument by its name; ``default`` for an op that takes none of this name."""
    schema = schema_of(node.target)
    for place, parameter in enumerate(() if schema is None else schema.arguments):
        if parameter.name == name:
            # A trace leaves out arguments that have their default.
            positional = node.args[place] if place < len(node.args) else parameter.default_value
            return node.kwargs.get(name, positional)
    return default


def place_of(node: fx.Node, name: str) -> int:
    """The place of an argument that an op takes among all of them."""
    return [parameter.name for parameter in schema_of(node.target).arguments].index(name)


@cache
def may_draw_numbers(target: fx.node.Target) -> bool:
    """Whether an op draws random numbers with some of its arguments."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def written_arguments(target: object, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an op writes to: tensors, or nodes."""
    names = written(target)
    if not names:
        return []
    by_name = dict(zip((a.name for a in schema_of(target).arguments), args, strict=False)) | dict(kwargs)
    return [x for name in names for x in pytree.tree_leaves(by_name.get(name))]


def storage_root(node: fx.Node) -> fx.Node:
    """The node that allocated the storage of this node's value."""
    # A view of a view lies in the same storage.
    while node.op == "call_function" and is_view(node):
        node = _viewed(node)
    return node


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """``storage_root`` of every node, in time linear in their number."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        roots[node] = roots[_viewed(node)] if node.op == "call_function" and is_view(node) else node
    return roots


def _viewed(view: fx.Node) -> fx.Node:
    """The node whose storage a view is of: of an item, the op that returned it among others has the same."""
    return view.args[0].args[0] if view.target is operator.getitem else view.args[0]  # type: ignore


def root_within(node: fx.Node, stage: int) -> fx.Node:
    """The owner of the node's storage on the rank of ``stage``; a value from another stage owns its own."""
    while node.op == "call_function" and node.meta["color"].stage == stage and is_view(node):
        node = node.all_input_nodes[0]
    return node


def last_uses(graph: fx.Graph, roots: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node | None]:
    """Per storage that an op allocates the op that uses it last; None if another stage uses it too.

    roots: the result of ``storage_roots``.  For one microbatch a stage runs F, then B, then W; within them
    ops run in graph order.
    """
    last: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        for root in {roots[n] for n in node.all_input_nodes}:
            if root.op != "call_function" or root.target is read_buffer:  # the buffer is the model's
                continue
            before = last.setdefault(root, root)
            # Stages run in any order, so a use in another one has no place among the others.
            if before is None or node.op == "output" or node.meta["color"].stage != root.meta["color"].stage:
                last[root] = None
            # The graph has W's ops between those of B.
            elif _TURNS[node.meta["color"].phase] >= _TURNS[before.meta["color"].phase]:
                last[root] = node
    return last


_TURNS = {phase: turn for turn, phase in enumerate(Phase)}


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors of the node's value (several for an op with a tuple of results)."""
    val = node.meta.get("val")
    values = val if isinstance(val, (tuple, list)) else [val]
    return [v for v in values if isinstance(v, torch.Tensor)]


def node_bytes(node: fx.Node) -> int:
    return sum(storage_bytes(t) for t in tensors(node))


def call_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def leading_to(
    nodes: Iterable[fx.Node], through: Callable[[fx.Node], bool] = lambda node: True
) -> set[fx.Node]:
    """Find all that these nodes come from, and these.  through: which of them to take, and to go on from."""
    nodes_before, todo = set[fx.Node](), [*nodes]
    while todo:
        node = todo.pop()
        if node not in nodes_before and through(node):
            nodes_before.add(node)
            todo += node.all_input_nodes
    return nodes_before


def operands_first(
    value: fx.Node,
    made: Container[fx.Node],
    operands: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> Iterator[fx.Node]:
    """What a value is made of and ``made`` lacks, each behind its operands, and the value last.  Who iterates
    puts each into ``made``.  operands: those of a node to look at."""
    todo = [value]
    while todo:
        # Depth first without recursion: chains of a deep model are longer than Python's stack.
        missing = next((n for n in operands(todo[-1]) if n not in made), None)
        if missing is not None and todo[-1] not in made:
            todo.append(missing)
        elif (node := todo.pop()) not in made:
            yield node


def graph_outputs(graph: fx.Graph) -> Outputs:
    return graph.output_node().args[0]  # type: ignore[return-value]


def set_outputs(graph: fx.Graph, **changed: Any) -> None:
    """Replace some fields of the graph's outputs."""
    graph.output_node().args = (graph_outputs(graph)._replace(**changed),)


def drop_dead(graph: fx.Graph) -> None:
    """Erase ops and placeholders without users.  Every op is pure until accumulation is fused."""
    # Users first: an op whose last user goes is dead then, too.
    for node in reversed(list(graph.nodes)):
        if node.op != "output" and not node.users:
            graph.erase_node(node)
