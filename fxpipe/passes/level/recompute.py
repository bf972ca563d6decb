"""Lets B recompute forward values instead of reading saved ones.

before: norm (F) ──► mm (F), norm_backward (B), addmm_ (W)
after:  norm (F) ──► mm (F);  norm' (B) ──► norm_backward (B), addmm_ (W)

The saved values are a minimum cut between a stage's inputs and its backward: saving a value costs its bytes,
recomputing it next to nothing, since the user asked for it.  "norms" recomputes all but matrix products,
convolutions and attention (norms, activations, dropout with its key, casts: 2503.01328), "full" any value if
fewer bytes are saved then.  B hands recomputed values to W like other values.

"elementwise" is for stages whose B and W are compiled and whose values are large, those of the vocabulary:
elementwise ops, casts and views are repeated inside the kernels that use them, which read logits of 16 bits
instead of exponentials of 32.
"""

from __future__ import annotations

from collections.abc import Container
from functools import cache
from typing import Literal

from torch import fx

from fxpipe.ir.graph import read_buffer
from fxpipe.ir.ops import has_flops, is_between_lanes, is_elementwise
from fxpipe.ir.storage import call_nodes, drop_dead, is_view, leading_to, node_bytes
from fxpipe.passes.level.mincut import to_repeat_for
from fxpipe.passes.rewrite import by_stage, repeat_for
from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.schedule.ops import Color, Phase

Level = Literal["norms", "full"]
LEVELS: tuple[Level, ...] = ("norms", "full")
Repeats = Level | Literal["elementwise"]

#: The bytes that recomputed ops may read and write for each byte of memory saved.
_SCALE = 1000


def recompute(graph: fx.Graph, level: Repeats, stages: Container[int] | None = None) -> int:
    """Recompute values of these stages; by default of all.  Returns the number of recomputed ops."""
    repeated = 0
    for stage, backward in sorted(by_stage(graph, (Phase.B, Phase.W)).items()):
        if stages is not None and stage not in stages:
            continue
        again = _made_again(backward, stage, level)
        # B recomputes what it needs itself, and hands that to W, which recomputes the rest.
        of_b = (user for user in backward if user.meta["color"].phase is Phase.B)
        in_b = leading_to((node for user in of_b for node in user.all_input_nodes), again.__contains__)
        # What follows from that by elementwise ops may be fewer bytes: the cut between B and W decides.
        for node in call_nodes(graph):
            inputs = {*node.all_input_nodes}
            again_inputs = again & inputs
            is_joined = bool(again_inputs) or len(inputs) > 1
            if node in again and is_joined and is_elementwise(node) and in_b.issuperset(again_inputs):
                in_b.add(node)
        clones = repeat_for(backward, again, in_b)
        repeated += sum(not is_view(clone) for clone in clones)
        if level == "elementwise":
            for clone in clones:
                clone.meta["fused"] = True
    drop_dead(graph)
    return repeated


def _made_again(backward: list[fx.Node], stage: int, level: Repeats) -> set[fx.Node]:
    forward = Color(stage, Phase.F)

    @cache
    def may(node: fx.Node) -> bool:
        if node.meta["color"] != forward or node.target in (read_buffer, sum_over_ranks):
            return False
        if is_between_lanes(node.target):  # to communicate again costs more than to recompute
            return False
        if level == "elementwise":
            return is_elementwise(node)
        # What is no matrix product takes little time.
        return level == "full" or not has_flops(node)

    def keep(node: fx.Node) -> int | None:
        is_tuple = isinstance(node.meta["val"], (tuple, list))
        # A tuple cannot be saved, and a view keeps its base alive.
        free = may(node) and (is_tuple or is_view(node))
        return None if free else _SCALE * node_bytes(node)

    return to_repeat_for(backward, may, keep)
