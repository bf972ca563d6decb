"""Computes cheap values where they are used, instead of sending or saving them.

before: mask (F, stage 0) ──► attention (F, stage 1);   t(weight) (F) ──► mm (B)
after:  each section has its own mask and t(weight), computed from inputs that every rank has
"""

from __future__ import annotations

from torch import fx

from fxpipe.ir.graph import Free
from fxpipe.ir.storage import call_nodes, drop_dead
from fxpipe.passes.rewrite import clone_into
from fxpipe.schedule.ops import Color


def sink_cheap_values(graph: fx.Graph, free: Free) -> None:
    clones: dict[tuple[Color, fx.Node], fx.Node] = {}
    for user in call_nodes(graph):
        color = user.meta["color"]
        for node in user.all_input_nodes:
            if node.op != "call_function" or node.meta["color"] == color:
                continue
            within = node.meta["color"].stage == color.stage
            # From a stage to another one, only what every rank can compute.
            movable = free.in_stage if within else free.anywhere
            if node in movable:
                clone = clone_into(node, color, user, clones, movable)
                user.replace_input_with(node, clone)
    drop_dead(graph)
