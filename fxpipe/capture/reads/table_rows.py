"""Checks that tables have the rows that a step takes whatever its data are, as those of positions.

A trace looks at shapes alone, so a table that is too short would fail in a step, amidst its messages.
"""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.capture.reads.example import Example
from fxpipe.errors import CaptureError, number_of
from fxpipe.ir.graph import Origin
from fxpipe.ir.storage import call_nodes


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
