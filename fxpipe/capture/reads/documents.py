"""What a step knows of the documents that are packed in its microbatches, and by which leaf."""

from __future__ import annotations

import torch
from torch import fx

from fxpipe.ir.graph import Kind
from fxpipe.ir.ops import boundaries_of_documents
from fxpipe.ir.storage import call_nodes, is_view, leading_to
from fxpipe.plan.step import POSITIONS, Documents

_CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


def documents_of(graph: fx.Graph) -> Documents | None:
    """None without such attention, and where boundaries come from no leaf or from several.

    A leaf that is only looked at has boundaries; of another one they are computed, from the positions of
    tokens.
    """
    boundaries = [ends for node in call_nodes(graph) for _, ends in boundaries_of_documents(node)[:1]]
    before = leading_to(boundaries)
    inputs = {node.meta["input"] for node in before if node.op == "placeholder"}
    leaves = {each.name for each in inputs if each.kind is Kind.BATCH}
    if len(leaves) != 1:
        return None
    ops = (node for node in before if node.op == "call_function")
    return Documents(leaves.pop(), not all(is_view(node) or node.target in _CASTS for node in ops))


def mixes_documents(graph: fx.Graph) -> bool:
    """Whether positions decide nothing: masks and boundaries come from comparisons of whole numbers, where
    embeddings and rotations are computed from them as they are."""
    positions = {
        node
        for node in graph.find_nodes(op="placeholder")
        if (node.meta["input"].kind, node.meta["input"].name) == (Kind.BATCH, POSITIONS)
    }
    for node in call_nodes(graph):
        value = node.meta["val"]
        is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
        if is_whole and not positions.isdisjoint(node.all_input_nodes):
            positions.add(node)
    return not any(node.meta["val"].dtype == torch.bool for node in positions)
