"""Writes losses, and what is chosen of their logits, in the forms by which a head is split."""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.builder import node_arg
from fxpipe.vocabulary.layouts import rows_at_once, words_last
from fxpipe.vocabulary.losses import logits_as_logs, means_as_sums, picks_as_losses
from fxpipe.vocabulary.shifted import shift_hidden_states


def prepare_head(graph: fx.Graph, in_parts: bool) -> None:
    """Rewrite a captured step.  in_parts: whether a head is computed for some of its tokens at a time."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.expand.default):
        whole = node_arg(node, 0)  # as take_along_dim expands logits to their own shape
        if whole.meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(whole)
    rows_at_once(graph)
    words_last(graph)
    if in_parts:
        shift_hidden_states(graph)
        means_as_sums(graph)
    logits_as_logs(graph)
    picks_as_losses(graph)
