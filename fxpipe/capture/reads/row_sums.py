"""Finds what of a microbatch's data is a sum, or a mean, over its rows, as the number of its labels is.

Of such a value, and of no other, the mean over all microbatches says what it is for their rows together.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import fx

from fxpipe.ir.compat import OpOverload
from fxpipe.ir.dims import COPIES, RESHAPES, Lost, through
from fxpipe.ir.graph import Kind
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import graph_outputs, may_draw_numbers

aten = torch.ops.aten


class Rows(Enum):
    """The rows of a microbatch in a value: none; a part for each, in its first dimension, one behind the
    other; their sum or mean; anything else."""

    NONE, FIRST, SUMMED, MIXED = range(4)


_VIEWS = RESHAPES | {aten.expand, aten.squeeze, aten.unsqueeze}
#: A number that is added to a count, so that nothing is divided by zero, is at most this.
LARGEST_EPSILON = 1e-3


def rows_in(graph: fx.Graph) -> dict[fx.Node, Rows]:
    """The rows in each value that follows from the batch, constants and buffers that stay."""
    changed = graph_outputs(graph).buffers
    rows: dict[fx.Node, Rows] = {}
    leaves = [n for n in graph.find_nodes(op="placeholder") if n.meta["input"].kind is Kind.BATCH]
    number = min((n.meta["val"].shape[0] for n in leaves if n.meta["val"].dim()), default=1)
    for node in graph.nodes:
        if node.op == "placeholder":
            source = node.meta["input"]
            if source.kind is Kind.BATCH:
                rows[node] = Rows.FIRST if node.meta["val"].dim() else Rows.NONE
            elif source.kind is Kind.CONSTANT or (source.kind is Kind.BUFFER and source.name not in changed):
                rows[node] = Rows.NONE
        elif node.op != "call_function" or may_draw_numbers(node.target):
            continue
        elif all(n in rows for n in input_nodes(node)):
            rows[node] = _rows_of(node, rows, number)
    return rows


def _rows_of(node: fx.Node, rows: Mapping[fx.Node, Rows], number: int) -> Rows:
    """The rows in the result of an op.  number: of the rows of a microbatch."""
    states = {rows[n] for n in input_nodes(node)}
    if states <= {Rows.NONE}:
        return Rows.NONE
    if Rows.MIXED in states or not isinstance(node.target, OpOverload):
        return next(iter(states)) if len(states) == 1 else Rows.MIXED  # an item of several results
    if Rows.SUMMED in states:
        return Rows.SUMMED if _is_linear(node, rows) else Rows.MIXED
    return _of_rows(node, rows, number)


def _is_linear(node: fx.Node, rows: Mapping[fx.Node, Rows]) -> bool:
    """Whether an op on sums over rows gives one."""
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    summed = [isinstance(x, fx.Node) and rows[x] is Rows.SUMMED for x in node.args]
    match packet:
        case aten._to_copy:
            dtype = node.meta["val"].dtype
            return bool(dtype.is_floating_point or not node.args[0].meta["val"].is_floating_point())  # type: ignore
        case _ if packet in COPIES | _VIEWS | {aten.neg, aten.sum, aten.mean, aten.select}:
            return True
        case _ if is_sum_of_lanes(node):
            return True
        case aten.add:
            number = node.args[1] if isinstance(node.args[1], int | float) else 1
            return all(summed[:2]) or (summed[0] and abs(number) <= LARGEST_EPSILON)
        case aten.sub | aten.rsub:  # also what is left of the number of all
            return all(summed[:2]) or summed[1 if packet is aten.sub else 0]
        case aten.mul:
            return sum(summed[:2]) == 1 and all(
                rows[x] in (Rows.NONE, Rows.SUMMED) for x in input_nodes(node)
            )
        case aten.div:
            return "rounding_mode" not in node.kwargs and summed[0] and not any(summed[1:])
        case aten.stack | aten.cat:
            return all(rows[x] is Rows.SUMMED for x in input_nodes(node))
    return False


def is_sum_of_lanes(node: fx.Node) -> bool:
    """Whether an op adds what lanes have, or waits for that."""
    op: OpOverload = node.target  # type: ignore[assignment]
    if getattr(op, "namespace", "") != "_c10d_functional":
        return False
    name = op.overloadpacket.__name__
    return name == "wait_tensor" or (name == "all_reduce" and node.args[1] in ("sum", "avg"))


def _of_rows(node: fx.Node, rows: Mapping[fx.Node, Rows], number: int) -> Rows:
    """The rows in the result of an op on values with a part for each row, and on others without rows."""
    packet, value = node.target.overloadpacket, node.meta["val"]  # type: ignore[union-attr]
    rowed = [n for n in input_nodes(node) if rows[n] is Rows.FIRST]
    operands = [n.meta["val"] for n in rowed]
    if not all(isinstance(x, torch.Tensor) for x in operands):
        return Rows.MIXED
    places = {through(node, n, 0) for n in rowed}
    if places in ({0}, {Lost.SUMMED}):
        return Rows.FIRST if 0 in places else Rows.SUMMED
    match packet:
        case aten.slice:
            stays = value.shape == operands[0].shape
        case aten.embedding | aten.index:  # of a table
            stays = rows[node.args[0]] is Rows.NONE and value.shape[:1] == operands[0].shape[:1]  # type: ignore
        case _:  # rows of several entries; of one row alone all is its own
            stays = packet in RESHAPES | {aten.squeeze} and value.shape[:1].numel() % number == 0
    return Rows.FIRST if stays else Rows.MIXED
