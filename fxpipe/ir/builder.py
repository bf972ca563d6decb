"""New nodes for a graph: each with its value, its origin and its color."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxpipe.ir.compat import FakeMode, FakeTensor, gives_new_tensors
from fxpipe.ir.fake_op_cache import SameLayouts
from fxpipe.ir.graph import Origin
from fxpipe.ir.names import identifier
from fxpipe.ir.node_names import BACKWARD, op_name, short_paths
from fxpipe.ir.nodes import new_node
from fxpipe.ir.storage import call_nodes, operands_first
from fxpipe.schedule.ops import Color

aten = torch.ops.aten


class Builder:
    """Appends ops to a graph; :func:`in_order` sorts them at the end."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.color: Color | None = None
        self.origin = Origin()

    def call(self, target: Callable[..., object], *args: Any, **kwargs: Any) -> fx.Node:
        """Append an op on nodes and plain values; its value is computed on fake tensors."""
        # On fake tensors, so that shapes and dtypes are torch's own.
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = next((x.fake_mode for x in values if isinstance(x, FakeTensor)), None)
        if isinstance(mode, FakeMode) and gives_new_tensors(target):
            # The ranks' parts of a value have the same ops.
            val, _ = SameLayouts(mode.results).run(target, values, named)
        else:
            val = target(*values, **named)
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.create_node("call_function", target, args, kwargs, name=self._name(target))
        node.meta.update(val=val, origin=self.origin)
        if self.color is not None:
            node.meta["color"] = self.color
        return node

    def _name(self, target: Callable[..., object]) -> str:
        """A name from the module and the op."""
        place = "_".join(self.origin.path.split(".")[-2:]) or "model"
        packet = getattr(target, "overloadpacket", target)
        name = identifier(f"{place}_{packet.__name__.strip('_')}")
        return BACKWARD + name.lstrip("_") if self.origin.backward else name

    def copy(self, node: fx.Node, args: tuple[object, ...], kwargs: Mapping[str, object]) -> fx.Node:
        """Append the same op on other arguments."""
        self.origin = node.meta["origin"]
        return self.call(node.target, *args, **kwargs)  # type: ignore[arg-type]

    def copy_of(self, value: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        """Append a value's own copies of all ops that it is made of, but for those that ``copies`` has."""
        for node in operands_first(value, copies):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
            copies[node] = self.copy(node, args, kwargs) if node.op == "call_function" else node
        return copies[value]


class Calls:
    """Adds ops to a graph where it inserts, with names like those of the captured ops."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph

    @cached_property
    def _short(self) -> dict[str, str]:
        return short_paths({node.meta["origin"].path for node in call_nodes(self.graph)})

    def __call__(
        self,
        target: object,
        args: tuple[object, ...],
        kwargs: Mapping[str, object] | None = None,
        **meta: Any,
    ) -> fx.Node:
        """Add a node.  meta: that of the node, at least its origin."""
        name = op_name(target, meta["origin"], self._short)
        node: fx.Node = new_node(self.graph, "call_function", target, args, dict(kwargs or {}), name)
        node.meta.update(meta)
        return node


def in_order(graph: fx.Graph) -> None:
    """Move every node that comes after one of its users to just before that user."""
    done: set[fx.Node] = set()
    for node in list(graph.nodes):
        for ready in operands_first(node, done):
            if ready is not node:
                node.prepend(ready)
            done.add(ready)


def node_arg(node: fx.Node, position: int) -> fx.Node:
    """An argument that is a node."""
    argument = node.args[position]
    assert isinstance(argument, fx.Node), f"argument {position} of {node} is no node"
    return argument


def cast(build: Builder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if node.meta["val"].dtype == dtype else build.call(aten._to_copy.default, node, dtype=dtype)
