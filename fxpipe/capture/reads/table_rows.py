"""Checks that tables have the rows that a step takes whatever its data are, as those of positions; and finds
what data take as they are, for a check of each batch.

A trace looks at shapes alone, so a table that is too short would fail in a step, amidst its messages.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.capture.reads.example import Example
from fxpipe.errors import CaptureError, number_of
from fxpipe.ir.builder import node_arg
from fxpipe.ir.graph import Kind, Origin
from fxpipe.ir.storage import call_nodes, is_view
from fxpipe.plan.step import Table

_CASTS = torch.ops.aten._to_copy.default, torch.ops.aten.clone.default


def check_table_rows(graph: fx.Graph, root: torch.nn.Module) -> None:
    """Raise CaptureError, naming module and line, for rows that the example takes and a table lacks.

    root: the module with the graph's constants.
    """
    example = Example(())
    for node in call_nodes(graph):
        if node.target is not torch.ops.aten.embedding.default:
            continue
        table, rows = node.args[:2]
        if not (isinstance(table, fx.Node) and isinstance(rows, fx.Node)) or not rows.meta["val"].numel():
            continue
        if example.is_made_from_nothing(rows):
            origin, number = node.meta.get("origin", Origin()), table.meta["val"].shape[0]
            last = int(example.value(rows, root, origin.source)[0].max())
            if last >= number:
                raise CaptureError(
                    f"The example takes row {last} of a table with {number_of(number, 'row')}, in "
                    f"{origin.module} ({origin.source}): give a shorter example, or a longer table."
                )


def tables_of(graph: fx.Graph) -> tuple[Table, ...]:
    """The leaves of the batch whose every value is a row of a table, with the rows of the shortest."""
    rows_of: dict[str, int] = {}
    for node in call_nodes(graph):
        if node.target is not torch.ops.aten.embedding.default:
            continue
        table, rows = node_arg(node, 0), node_arg(node, 1)
        taken = rows.meta["val"].numel()
        while rows.op == "call_function" and (is_view(rows) or rows.target in _CASTS):
            rows = node_arg(rows, 0)
        is_leaf = rows.op == "placeholder" and rows.meta["input"].kind is Kind.BATCH
        if is_leaf and taken >= rows.meta["val"].numel():
            name, most = rows.meta["input"].name, table.meta["val"].shape[0]
            rows_of[name] = min(most, rows_of.get(name, most))
    return tuple(Table(name, most) for name, most in rows_of.items())
