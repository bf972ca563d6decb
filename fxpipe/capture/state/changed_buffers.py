"""Refuses steps that use the buffers that they change in ways that no pipeline can."""

from __future__ import annotations

from torch import fx

from fxpipe.capture.failures import ONE_OP
from fxpipe.errors import CaptureError
from fxpipe.ir.graph import Kind
from fxpipe.ir.storage import graph_outputs
from fxpipe.runtime.program.checks import expect


def check_buffers(graph: fx.Graph) -> None:
    """Raise CaptureError if the backward writes to a buffer that the forward reads, or if a Python branch
    depends only on buffers that the step changes, as it would later differ.

    A value that also depends on the microbatch is checked at run time.
    """
    changed = graph_outputs(graph).buffers
    moving: dict[fx.Node, str] = {}  # -> the buffer that it depends on
    of_batch: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            leaf = node.meta["input"]
            if leaf.kind is Kind.BATCH:
                of_batch.add(node)
            if leaf.kind is Kind.BUFFER and leaf.name in changed:
                moving[node] = leaf.name
                _check_order(node, changed[leaf.name])
            continue
        if not of_batch.isdisjoint(node.all_input_nodes):
            of_batch.add(node)
        if name := next((moving[n] for n in node.all_input_nodes if n in moving), ""):
            moving[node] = name
            if node.target is expect and node not in of_batch:
                raise CaptureError(
                    f"The model's code reads a number from the buffer {name!r}, which the step changes "
                    f"({node.meta['origin']}). It is another one at the next step: compute with the buffer "
                    "as a tensor (an index needs a dimension for that: x[i.reshape(1)]), or do what it "
                    "decides (a redraw every so many steps) between steps; if the first batch alone sets it, "
                    f"run the model on one batch before you compile it; {ONE_OP}."
                )


def _check_order(buffer: fx.Node, value: fx.Node) -> None:
    """Raise CaptureError if the backward gives a new ``value`` to a buffer that the forward reads."""
    readers = [n.meta["origin"] for n in buffer.users if n.op == "call_function"]
    before = next((origin for origin in readers if not origin.backward), None)
    if before is not None and value.op == "call_function" and value.meta["origin"].backward:
        raise CaptureError(
            f"The backward writes to the buffer {buffer.meta['input'].name!r} ({value.meta['origin']}), "
            f"which the forward reads ({before}). A pipeline runs the forward of later microbatches before "
            "that backward. Where activation checkpointing runs a batch norm a second time, give recompute= "
            "instead of it; else write to the buffer in the forward."
        )
