"""Gives each buffer that the step changes one read, and a new value that an op computes.

before: k ──► mul, exp;                   outputs.buffers["k"] = add
after:  k ──► read_buffer ──► mul, exp;   outputs.buffers["k"] = add

The result of the read is an ordinary value: saved for B and W, sent to other stages, never read again after a
later microbatch has written the buffer.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import Calls
from fxpipe.ir.graph import Input, Kind, read_buffer
from fxpipe.ir.storage import call_nodes, graph_outputs, set_outputs, storage_root

aten = torch.ops.aten


def read_once(graph: fx.Graph) -> None:
    if not graph_outputs(graph).buffers:
        return
    inputs = {n.meta["input"]: n for n in graph.find_nodes(op="placeholder")}
    position: dict[fx.Node, float] = {node: k for k, node in enumerate(graph.nodes)}
    first_op = call_nodes(graph)[0]
    reads: dict[str, fx.Node] = {}
    for name in graph_outputs(graph).buffers:
        buffer = inputs.get(Input(Kind.BUFFER, name))
        if buffer is None:  # no op reads it
            continue
        users = [n for n in (*buffer.users, graph_outputs(graph).buffers[name]) if n.op == "call_function"]
        # At the first use, so that the read is in the stage that has it; later ones get the value sent.
        first = min(users, key=position.__getitem__, default=first_op)
        with graph.inserting_before(first):
            read = graph.create_node("call_function", read_buffer, (buffer,), name=f"{buffer.name}_now")
        read.meta.update(val=buffer.meta["val"], origin=first.meta["origin"])
        buffer.replace_all_uses_with(read, lambda user, read=read: user is not read)
        # Between two whole numbers, so that the others need not be numbered again.
        reads[name], position[read] = read, position[first] - 0.5
    values = {}
    for name, value in graph_outputs(graph).buffers.items():
        root = storage_root(value)
        # Else the new value would be the memory of an input, or of another buffer.
        computed = root.op != "placeholder" and root.target is not read_buffer
        values[name] = value if computed else _copy(graph, value, reads.get(name), first_op)
    set_outputs(graph, buffers=values)


def _copy(graph: fx.Graph, value: fx.Node, read: fx.Node | None, first_op: fx.Node) -> fx.Node:
    """A copy of an input or of another buffer, next to the read of the buffer that gets it."""
    places = [n for n in (read, value) if n is not None and n.op != "placeholder"]
    at = next((n for n in reversed(graph.nodes) if n in places), None)
    with graph.inserting_after(at) if at is not None else graph.inserting_before(first_op):
        return Calls(graph)(
            aten.clone.default, (value,), val=value.meta["val"], origin=(at or first_op).meta["origin"]
        )
