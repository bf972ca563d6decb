"""Cuts a forward where another step of the same model was cut: every tensor is used by a stage that has it.

The two steps may have different ops between the uses of the tensors (dropout in one of them alone): of all
such cuts those that send the fewest bytes are taken, by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from torch import fx

from fxpipe.errors import PartitionError
from fxpipe.ir.graph import Kind


def following_cuts(
    forward: Sequence[fx.Node], bytes: Sequence[float], free: Set[fx.Node], held: Sequence[Set[str]]
) -> tuple[int, ...]:
    """Return the positions (ascending) after which to cut ``forward`` into one stage for each of ``held``.

    bytes: sent across a cut after each position; ``inf`` where no cut may be.  free: ops that move to their
    users' stages.  held: per stage the names of its parameters and buffers.
    Raises PartitionError, naming the op, where no cuts leave each tensor with a stage that has it.
    """
    best = np.full(len(held), np.inf)  # per stage the fewest bytes, if the position is in it
    best[0] = 0.0
    begins: list[np.ndarray] = []  # per position the stages that begin there then
    for position, node in enumerate(forward):
        names = () if node in free else _tensors(node, free)
        sent = bytes[position - 1] if position else np.inf
        before = np.concatenate([[np.inf], best[:-1]]) + sent
        begins.append(before < best)
        best = np.minimum(before, best)
        best[[any(name not in own for name in names) for own in held]] = np.inf
        if np.isinf(best).all():
            raise _no_cuts(node, names)
    if np.isinf(best[-1]):
        raise _no_cuts(forward[-1], ())
    cuts, stage = [], len(held) - 1
    for position in range(len(forward) - 1, 0, -1):
        if begins[position][stage]:
            cuts.append(position - 1)
            stage -= 1
    return tuple(reversed(cuts))


def _tensors(node: fx.Node, free: Set[fx.Node]) -> tuple[str, ...]:
    """The parameters and buffers that an op uses, as they are or by free ops."""
    names: dict[str, None] = {}
    todo = list(node.all_input_nodes)
    while todo:
        source = todo.pop()
        if source in free:
            todo += source.all_input_nodes
        elif source.op == "placeholder" and source.meta["input"].kind in (Kind.PARAMETER, Kind.BUFFER):
            names[source.meta["input"].name] = None
    return tuple(names)


def _no_cuts(node: fx.Node, names: Sequence[str]) -> PartitionError:
    uses = f", which uses {', '.join(names)}" if names else ""
    return PartitionError(
        "The forward cannot be cut such that each rank uses what it has in the other step: no stage that has "
        f"its tensors is left for {node.name}{uses} ({node.meta['origin']}). Cut the other step so that its "
        "stages use the tensors in this order too, by split_points."
    )
