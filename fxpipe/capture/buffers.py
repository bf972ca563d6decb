"""Gives each buffer that the step changes one read, and a new value that an op computes.

before: k ──► mul, exp, outputs.buffers["k"] = add
after:  k ──► read_buffer ──► mul, exp;   outputs.buffers["k"] = add

The result of the read is an ordinary value: saved for B and W, sent to other stages, never read again after a
later microbatch has written the buffer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from fxpipe.errors import CaptureError
from fxpipe.ir.compat import pytree
from fxpipe.ir.graph import Input, Kind, read_buffer
from fxpipe.ir.storage import graph_outputs, set_outputs, storage_root
from fxpipe.runtime.program.checks import expect

aten = torch.ops.aten


def read_once(graph: fx.Graph) -> None:
    """Insert one read of each buffer that the step changes, and give it a new value that an op computes."""
    inputs = {n.meta["input"]: n for n in graph.find_nodes(op="placeholder")}
    old = {name: inputs.get(Input(Kind.BUFFER, name)) for name in graph_outputs(graph).buffers}
    set_outputs(graph, buffers={n: v for n, v in graph_outputs(graph).buffers.items() if v is not old[n]})
    position: dict[fx.Node, float] = {node: k for k, node in enumerate(graph.nodes)}
    reads: dict[str, fx.Node] = {}
    for name in graph_outputs(graph).buffers:
        placeholder = old[name]
        if placeholder is None:
            continue
        users = [n for n in placeholder.users if n is not graph.output_node()]
        value = graph_outputs(graph).buffers[name]
        if value.op == "call_function":
            users.append(value)
        first = min(users, key=position.__getitem__, default=_first_op(graph))
        if (
            value.op == "call_function"
            and value.meta["origin"].backward
            and not first.meta["origin"].backward
        ):
            raise CaptureError(
                f"The backward writes to the buffer {name!r} ({value.meta['origin']}), which the forward "
                f"reads ({first.meta['origin']}). A pipeline runs the forward of later microbatches before "
                "that backward. Where activation checkpointing runs a batch norm a second time, give "
                "recompute= instead of it; else write to the buffer in the forward."
            )
        with graph.inserting_before(first):
            read = graph.create_node(
                "call_function", read_buffer, (placeholder,), name=f"{placeholder.name}_now"
            )
        read.meta.update(val=placeholder.meta["val"], origin=first.meta["origin"])
        placeholder.replace_all_uses_with(read, lambda user, read=read: user is not read)
        reads[name], position[read] = read, position[first] - 0.5
    copied = {}
    for name, value in graph_outputs(graph).buffers.items():
        copied[name] = value
        root = storage_root(value)
        if root.op == "placeholder" or root.target is read_buffer:
            copied[name] = _copy(graph, value, reads.get(name))
    set_outputs(graph, buffers=copied)
    _hoist(graph)


def _hoist(graph: fx.Graph) -> None:
    """Move the forward ops that compute new values of buffers alone up to their last operand.

    A model that updates the memories of all its layers at its end leaves room for cuts then, as each is read
    and written in one stage.
    """
    named = graph_outputs(graph)
    others = {*pytree.tree_leaves(tuple(named._replace(buffers={})))}
    alone: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_forward = node.op == "call_function" and not node.meta["origin"].backward
        if is_forward and node not in others and all(u in alone or u.op == "output" for u in node.users):
            alone.add(node)
    for node in [n for n in graph.nodes if n in alone]:
        last = max(node.all_input_nodes, default=node)  # in the graph's order
        if last.op == "call_function" and last is not node:
            last.append(node)
            # A later op with its number would be taken to belong there as well.
            node.meta["origin"] = replace(node.meta["origin"], seq=last.meta["origin"].seq)


def _copy(graph: fx.Graph, value: fx.Node, read: fx.Node | None) -> fx.Node:
    """A copy of an input or of another buffer, next to the read of the buffer that gets it."""
    places = [n for n in (read, value) if n is not None and n.op != "placeholder"]
    at = next((n for n in reversed(graph.nodes) if n in places), None)
    with graph.inserting_after(at) if at is not None else graph.inserting_before(_first_op(graph)):
        copy = graph.call_function(aten.clone.default, (value,))
    copy.meta.update(val=value.meta["val"], origin=(at or _first_op(graph)).meta["origin"])
    return copy


def _first_op(graph: fx.Graph) -> fx.Node:
    first: fx.Node = next(n for n in graph.nodes if n.op == "call_function")
    return first


def check_branches(graph: fx.Graph) -> None:
    """Raise CaptureError if a Python branch depends only on buffers that the step changes, as it would later
    differ.

    A value that also depends on the microbatch is checked at run time.
    """
    moving: dict[fx.Node, str] = {}  # -> the buffer that it depends on
    of_batch: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["input"].kind is Kind.BATCH:
            of_batch.add(node)
        if not of_batch.isdisjoint(node.all_input_nodes):
            of_batch.add(node)
        if node.target is read_buffer:
            moving[node] = node.args[0].meta["input"].name
        elif name := next((moving[n] for n in node.all_input_nodes if n in moving), ""):
            moving[node] = name
            if node.target is expect and node not in of_batch:
                raise CaptureError(
                    f"The model's code reads a number from the buffer {name!r}, which the step changes "
                    f"({node.meta['origin']}). It is another one at the next step: compute with the buffer "
                    "as a tensor (an index needs a dimension for that: x[i.reshape(1)]), or, if the first "
                    "batch alone sets it, run the model on one batch before you compile it."
                )
