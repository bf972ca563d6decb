"""Cheap values are computed where they are used, not sent or kept.

needs:  colours
before: mask (F, stage 0) ──► attention (F, stage 1);   t(weight) (F) ──► mm (B)
after:  each section has its own mask and t(weight), made from what the rank has anyway
"""

from __future__ import annotations

from torch import fx

from fxpipe.cost.device import Device
from fxpipe.ir.graph import Colour
from fxpipe.ir.storage import call_nodes, drop_dead
from fxpipe.partition.recomputable import free_nodes
from fxpipe.passes.rewrite import clone_into


def localise(graph: fx.Graph, device: Device) -> None:
    known = free_nodes(graph, device)
    clones: dict[tuple[Colour, fx.Node], fx.Node] = {}
    for user in call_nodes(graph):
        colour = user.meta["colour"]
        for node in user.all_input_nodes:
            if node.op != "call_function" or node.meta["colour"] == colour:
                continue
            within = node.meta["colour"].stage == colour.stage
            free = known.in_stage if within else known.anywhere
            if node in free:
                clone = clone_into(node, colour, user, clones, free)
                user.replace_input_with(node, clone)
    drop_dead(graph)
