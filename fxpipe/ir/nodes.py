"""Nodes of graphs: looked up, made, copied and renamed by what torch.fx keeps to itself.

That takes a fraction of the time of its own functions.  Beside ``compat.py``, what a new torch may break.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection
from typing import Any

from torch import fx
from torch.fx.node import Argument


def input_nodes(node: fx.Node) -> Collection[fx.Node]:
    """``node.all_input_nodes``, without a copy of them."""
    return node._input_nodes


def call_targets(graph: fx.Graph) -> list[Any]:
    """What the graph calls, each once, without a look at its nodes; some of it may have been erased."""
    return [target for op, target in graph._find_nodes_lookup_table.table if op == "call_function"]


def rename(node: fx.Node, name: str) -> None:
    """Give a node this name, or one like it that no other node has."""
    node._rename(name)


def take_name(node: fx.Node, old: fx.Node) -> None:
    """Give a node the name of one that it replaces, and what that says of gradients."""
    name = old.name
    rename(old, f"{name}_replaced")
    node.name = name
    if "gradient" in old.meta:
        node.meta["gradient"] = old.meta["gradient"]


def copy_node(
    graph: fx.Graph, node: fx.Node, copies: Callable[[fx.Node], Argument], name: str = ""
) -> fx.Node:
    """``graph.node_copy(node, copies)`` in a third of its time, for arguments without symbolic numbers.

    name: that of the copy, if it is not the node's.
    """
    args, kwargs = (fx.map_arg(x, copies) for x in (node.args, node.kwargs))
    copy: fx.Node = new_node(graph, node.op, node.target, args, kwargs, name or node.name, node.type)
    copy.meta.update(node.meta)
    return copy


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same nodes, names and metadata, in half of the time of ``copy_node`` for each; fake
    tensors are shared.  New nodes get the names that they would get there: none that an erased node had, by
    which the captured step may know another value."""
    copy = fx.Graph()
    names, copies = copy._graph_namespace, dict[fx.Node, fx.Node]()
    names._used_names |= graph._graph_namespace._used_names
    names._base_count.update(graph._graph_namespace._base_count)
    for node in graph.nodes:
        args, kwargs = (fx.map_arg(x, copies.__getitem__) if x else x for x in (node.args, node.kwargs))
        name = node.name
        new = copies[node] = fx.Node(copy, name, node.op, node.target, args, kwargs, node.type)
        new.meta.update(node.meta)
        copy._insert(new)
        copy._find_nodes_lookup_table.insert(new)
        names._obj_to_name[new] = name
    copy._len = len(copies)
    return copy


def new_node(
    graph: fx.Graph, op: str, target: Any, args: Any, kwargs: Any, name: str, kind: object = None
) -> fx.Node:
    """``graph.create_node`` without a search for symbolic numbers, and with one entry in each table.  A name
    is the same with all versions of torch: before 2.13 one with a number becomes the smallest that is free.
    """
    names = graph._graph_namespace
    if name in names._used_names:
        base = re.sub(r"_\d+$", "", name)
        later = (f"{base}_{number}" for number in itertools.count(names._base_count.get(base, 0) + 1))
        name = next(name for name in later if name not in names._used_names)
    name = names.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs, kind)
    names.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node
