"""Finds buffers from which a loss is computed, and which a forward of the whole batch would change otherwise.

    self.calls += 1                      as often as there are microbatches, instead of once
    center.lerp_(x.mean(0), 0.1)         likewise, each time by the rows of one microbatch
    self.hidden = gru(x, self.hidden)    rows of a microbatch continue those of the one before it, instead of
                                         the same rows of the batch before

What the loss does not read is not told, such as the statistics that a batch norm keeps for evaluation.
"""

from __future__ import annotations

import warnings

import torch
from torch import fx

from fxpipe.capture.rows.analysis import RowAnalysis
from fxpipe.capture.rows.forms import Form
from fxpipe.errors import printable
from fxpipe.ir.storage import argument, graph_outputs

_MEANT = 'mean="microbatch" of compile says that it is meant.'
#: Arguments of norms that normalize by the rows and do not read these.
_KEPT = "running_mean", "running_var"


def warn_of_updates(graph: fx.Graph, analysis: RowAnalysis) -> None:
    """Warn of such buffers of a captured step, and of such states in attributes."""
    named = graph_outputs(graph)
    if named.loss is None or not named.buffers:
        return
    analysis.follow()
    of_loss = _read_by(named.loss)
    inputs = {n.meta["input"].name: n for n in graph.find_nodes(op="placeholder")}
    by_rows: list[str] = []
    by_turns: list[str] = []
    for name, value in named.buffers.items():
        before = inputs.get(name)  # none where nothing reads it
        if (
            before is not None
            and value is not before
            and before in _read_by(value)
            and not of_loss.isdisjoint((before, value))
        ):
            (by_rows if analysis.of[value].form is Form.EACH else by_turns).append(
                f"{printable(name)} ({value.meta['origin']})"
            )
    if by_rows:
        warnings.warn(
            f"The forward keeps a part for each row in {_all(by_rows)}. The rows of a microbatch continue "
            "those of the microbatch before it, where a forward of the whole batch continues the same rows "
            "of the batch before. Give that with the batch, as a leaf, and ask for the next one with "
            f"outputs=; {_MEANT}",
            stacklevel=2,
        )
    if by_turns:
        warnings.warn(
            f"The loss depends on {_all(by_turns)}, which the forward changes. A step runs the forward once "
            "for each microbatch: each reads what the one before it left, and a step changes it as often, "
            "where a forward of the whole batch does once. What is to change once a step, change in the loop "
            "(a buffer: on all ranks; an average of weights: pipe.average), or give it with the batch; "
            f"{_MEANT}",
            stacklevel=2,
        )


def _read_by(value: fx.Node) -> set[fx.Node]:
    """All that a value is computed from."""
    nodes, todo = set[fx.Node](), [value]
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            is_norm = node.op == "call_function" and argument(node, "training") is True
            unread = [argument(node, name) for name in _KEPT] if is_norm else []
            unread += node.args[:1] if node.target is torch.ops.aten.copy.default else []
            todo += (x for x in node.all_input_nodes if x not in unread)
    return nodes


def _all(texts: list[str]) -> str:
    return texts[0] + (f" and {len(texts) - 1} more" if len(texts) > 1 else "")
