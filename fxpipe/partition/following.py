"""Cuts a forward where another step of the same model was cut: every tensor is used by a stage that has it.

The two steps may have different ops between the uses of the tensors (dropout in one of them alone), and may
use the same tensors more often (a discriminator, of real data and of made ones).  Of the cuts of the order in
which the forward ran those that send the fewest bytes are taken, by dynamic programming.  Where there are
none, ops that do not need each other's results are exchanged first.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
from torch import fx

from fxpipe.errors import PartitionError
from fxpipe.ir.graph import Kind
from fxpipe.partition.chain import crossing


def following_cuts(
    graph: fx.Graph, forward: Sequence[fx.Node], free: Set[fx.Node], tensors_of: Sequence[Set[str]]
) -> tuple[list[fx.Node], tuple[int, ...]]:
    """Return the ops of the forward in an order in which they can run, and the positions (ascending) after
    which to cut it into one stage for each of ``tensors_of``.

    free: ops that move to their users' stages.  tensors_of: the names of each stage's parameters and buffers.
    Raises PartitionError, naming the op, where no cuts leave each tensor with a stage that has it.
    """
    forward = list(forward)
    cuts = _fewest_bytes(graph, forward, free, tensors_of)
    if cuts is None:
        first = _first_stages(forward, free, tensors_of)
        forward.sort(key=first.__getitem__)
        cuts = _fewest_bytes(graph, forward, free, tensors_of)
    if cuts is None:
        raise PartitionError(
            "The forward cannot be cut such that each rank uses what it has in the other step: the last of "
            f"{len(tensors_of)} stages would be empty, as no cut leaves them what this step uses. (Of what "
            "the other step does not use, parameters may be used on any rank, and buffers on rank 0 alone.) "
            f"{_REMEDY}"
        )
    return forward, cuts


def _fewest_bytes(
    graph: fx.Graph, forward: Sequence[fx.Node], free: Set[fx.Node], tensors_of: Sequence[Set[str]]
) -> tuple[int, ...] | None:
    """The cuts of this order that send the fewest bytes; None if there are none."""
    position = {node: i for i, node in enumerate(forward)}
    bytes = crossing(graph, position, dict(position), free).bytes
    best = np.full(len(tensors_of), np.inf)  # per stage the fewest bytes, if the position is in it
    best[0] = 0.0
    begins: list[np.ndarray] = []  # per position the stages that begin there then
    for i, node in enumerate(forward):
        arriving = bytes[i - 1] if i else np.inf
        before = np.concatenate([[np.inf], best[:-1]]) + arriving
        begins.append(before < best)
        best = np.minimum(before, best)
        best[[not has for has in _may_be_in(node, free, tensors_of)]] = np.inf
    if np.isinf(best[-1]):
        return None
    cuts, stage = [], len(tensors_of) - 1
    for i in range(len(forward) - 1, 0, -1):
        if begins[i][stage]:
            cuts.append(i - 1)
            stage -= 1
    return tuple(reversed(cuts))


def _first_stages(
    forward: Sequence[fx.Node], free: Set[fx.Node], tensors_of: Sequence[Set[str]]
) -> dict[fx.Node, int]:
    """The first stage of each op that has its tensors and comes no earlier than what it is computed from."""
    first: dict[fx.Node, int] = {}
    for node in forward:
        earliest = max((first[source] for source in node.all_input_nodes if source in first), default=0)
        has = _may_be_in(node, free, tensors_of)
        stage = next((stage for stage in range(earliest, len(tensors_of)) if has[stage]), None)
        if stage is None:
            raise _no_stage(node, _tensors(node, free))
        first[node] = stage
    return first


def _may_be_in(node: fx.Node, free: Set[fx.Node], tensors_of: Sequence[Set[str]]) -> list[bool]:
    """Whether each stage has the tensors that an op uses."""
    names = () if node in free else _tensors(node, free)
    return [tensors >= {*names} for tensors in tensors_of]


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


def _no_stage(node: fx.Node, names: Sequence[str]) -> PartitionError:
    uses = f", which uses {', '.join(names)}" if names else ""
    return PartitionError(
        "The forward cannot be cut such that each rank uses what it has in the other step: no stage that has "
        f"its tensors is left for {node.name}{uses} ({node.meta['origin']}). {_REMEDY}"
    )


_REMEDY = (
    "Compile this pipeline first, and the other one like=this; or let a rank have several stages "
    "(schedule='auto', no stages_per_rank); or give the pipeline that was compiled first split_points= that "
    "cut the model in the order in which this one uses its parts."
)
