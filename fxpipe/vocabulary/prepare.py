"""Writes losses, and what is chosen of their logits, in the forms by which a head is split."""

from __future__ import annotations

from torch import fx

from fxpipe.vocabulary.losses import means_as_sums, picks_as_losses
from fxpipe.vocabulary.shifted import shift_hidden_states


def prepare_head(graph: fx.Graph, in_parts: bool) -> None:
    """Rewrite a captured step.  in_parts: whether a head is computed for some of its tokens at a time."""
    if in_parts:
        shift_hidden_states(graph)
        means_as_sums(graph)
    picks_as_losses(graph)
