"""Chooses the values that W gets from F and B, by bytes.

after:  fewest bytes live between B and W; the cheap ops in between are recomputed in W

The saved values are a minimum cut between the ops that run once (matrix products, reductions, messages of
other ranks) and W: a view, a cast or an elementwise op may be repeated, which costs the bytes of its inputs
and its time.  Of equally small cuts the one that repeats the least is taken.
"""

from __future__ import annotations

from torch import fx

from fxpipe.ir.ops import is_elementwise
from fxpipe.ir.storage import drop_dead, is_view, node_bytes
from fxpipe.passes.level.mincut import to_repeat_for
from fxpipe.passes.rewrite import by_stage, repeat_for
from fxpipe.schedule.ops import Phase

#: The bytes that repeated ops may read and write for each byte of memory saved.
_SCALE = 4


def mincut_saved_for_weight(graph: fx.Graph) -> None:
    for stage, users in by_stage(graph, (Phase.W,)).items():
        repeat_for(users, _to_repeat(users, stage))
    drop_dead(graph)


def _to_repeat(users: list[fx.Node], stage: int) -> set[fx.Node]:
    """The nodes outside W that W recomputes."""

    def is_cheap(node: fx.Node) -> bool:
        # A matrix product again would cost more time than its memory is worth.
        return node.meta["color"].stage == stage and is_elementwise(node)

    def keep(node: fx.Node) -> int | None:
        # A view keeps its whole storage alive, so only owners of storages are saved.
        return None if is_view(node) and is_cheap(node) else _SCALE * node_bytes(node)

    return to_repeat_for(users, is_cheap, keep)
