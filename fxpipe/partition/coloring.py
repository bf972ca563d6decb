"""Assigns forward nodes to stages, and from them a color to every node.

The forward is cut in the order in which it ran.  A backward node belongs to the stage of the forward
op that it differentiates (autograd's sequence number), whatever its operands are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cache
from itertools import accumulate, islice
from typing import NamedTuple

from torch import fx

from fxpipe.errors import PartitionError, number_of
from fxpipe.ir.graph import Color, Free, Phase, read_buffer
from fxpipe.ir.storage import call_nodes, graph_outputs
from fxpipe.partition.chain import Chain, CutChain, chain_of, without_color
from fxpipe.partition.cuts import choose_cuts
from fxpipe.partition.exchanges import begin_where_operands_are
from fxpipe.partition.following import following_cuts
from fxpipe.partition.parts import PartsOfStage, inner_cuts, parts_of

_MODULE = 2.0**-10  # bytes


class Partition(NamedTuple):
    """What a graph was cut by.  ``chain``: None if its costs did not matter.  ``cut``: it, where the stages
    were cut by their costs, and not into parts.  ``parts``: of each stage, if they were."""

    chain: Chain | None
    cut: CutChain | None
    parts: tuple[int, ...]


def partition(
    graph: fx.Graph,
    stages: int,
    node_seconds: Callable[[fx.Node], float],
    free: Free,
    split_points: Sequence[str] | None = None,
    before: int = 0,
    behind: int = 0,
    tensors_of: Sequence[Set[str]] | None = None,
    slowness: Sequence[float] = (),
    ranks: Sequence[int] = (),
    cuts: tuple[int, ...] = (),
    chain: Chain | None = None,
    parts: PartsOfStage = 1,
    link: float = 0.0,
) -> Partition:
    """Give every op without a color its stage, and phase F or B; negative stages count from the last one.

    free: the ops that move to their uses, or are copied there.
    split_points: module paths; each begins a new stage (None: cuts are chosen by cost).
    before, behind: the numbers of stages beside the model's own, whose ops have colors.
    tensors_of: per stage the names of its parameters and buffers, of a forward that follows another step's
        stages.
    slowness: per stage its time relative to that of ``node_seconds``; by default all are alike.
    ranks: of each stage; if given, ranks are balanced instead of stages.
    cuts: positions in a chain that was returned for the same graph, to cut there instead.
    chain: that was returned for the same graph and the same costs.
    parts: of each stage; the stages of colors are then parts.
    link: the seconds in which a byte passes from a rank to the next one.
    Raises PartitionError for a split point that is no module of the graph and for more stages than
    there are places to cut.
    """
    forward = [n for n in without_color(graph) if not n.meta["origin"].backward]
    differentiated: dict[int, fx.Node] = {}
    for node in forward:  # as they ran: an op that autograd does not record has the number of one before it
        if node.meta["origin"].seq is not None:  # as of a view of labels, which a pass made
            differentiated.setdefault(node.meta["origin"].seq, node)
    if tensors_of is not None:
        forward, cuts = following_cuts(graph, forward, free.in_stage | free.anywhere, tensors_of)
    position = {n: i for i, n in enumerate(forward)}
    by_seq = {seq: position[node] for seq, node in differentiated.items()}
    by_cost = tensors_of is None and split_points is None and not cuts
    if chain is None and (by_cost or parts != 1):
        chain = chain_of(graph, position, by_seq, node_seconds, free)
    cut_chain: CutChain | None = None
    if tensors_of is None and split_points is not None:
        cuts = _cuts_by_path(forward, stages, split_points)
    elif by_cost:
        assert chain is not None, "it was made"
        cuts = _cuts_by_cost(chain, stages, slowness, ranks, link)
        cut_chain = CutChain(chain, cuts)
    of_stages: tuple[int, ...] = ()
    if parts != 1:
        assert chain is not None, "it was made"
        inner, cut_chain = inner_cuts(chain, cuts, parts), None
        of_stages = parts_of(cuts, inner)
        cuts, stages = tuple(sorted((*cuts, *inner))), stages + len(inner)
    starts = {c + 1 for c in cuts}
    stage_at = list(accumulate((int(i in starts) for i in range(len(forward))), operator.add))
    stage = {n: stage_at[i] for n, i in position.items()}
    # A cast or a view of a parameter moves to its use, so that no weight is sent.
    for node in reversed(forward):
        users = [stage[u] for u in node.users if u in stage]
        if node in free.in_stage and users and node.target is not operator.getitem:
            stage[node] = min(users)
    filled = {stage[node] for node in forward if node not in free.anywhere}
    # Ops that may be anywhere move to their uses, so they alone make no stage.
    if len(filled) < stages:
        raise PartitionError(
            f"Stage {min(set(range(stages)) - filled)} would be empty: all that it could hold belongs to the "
            "stages beside it. Use fewer ranks or fewer stages per rank, or other split points."
        )
    _color(graph, stage, {s: stage[forward[i]] for s, i in by_seq.items()}, before)
    for node in call_nodes(graph):
        color = node.meta["color"]
        # Only now is their number known: stages behind the model's were counted from the last one.
        if color.stage < 0:
            node.meta["color"] = Color(before + stages + behind + color.stage, color.phase)
    if of_stages:
        stage_of_part = [stage for stage, number in enumerate(of_stages) for _ in range(number)]
        beside = iter(range(len(of_stages), len(of_stages) + before + behind))  # stages of one part
        stage_of_part = [*islice(beside, before), *stage_of_part, *beside]
        begin_where_operands_are(graph, stage_of_part)
    _check_buffers(graph)
    _check_head(graph, forward)
    return Partition(chain, cut_chain, of_stages)


def _check_buffers(graph: fx.Graph) -> None:
    """Check that each changed buffer is read and written in one stage, where the next microbatch reads it."""
    for read in graph.find_nodes(op="call_function", target=read_buffer):
        name = read.args[0].meta["input"].name
        value = graph_outputs(graph).buffers[name]
        a, b = read.meta["color"].stage, value.meta["color"].stage
        if a != b:
            raise PartitionError(
                f"The buffer {name!r} is read in stage {a} ({read.meta['origin']}) and gets its new value in "
                f"stage {b} ({value.meta['origin']}): the next microbatch would read the old one. Use split "
                "points that leave both in one stage."
            )


def _check_head(graph: fx.Graph, forward: Iterable[fx.Node]) -> None:
    """Check that a head in parts is in the stage of the loss: it gives that in the backward."""
    loss = graph_outputs(graph).loss
    for node in forward:
        if "chunk" in node.meta and loss is not None and node.meta["color"].stage != loss.meta["color"].stage:
            raise PartitionError(
                "With head_chunks the output layer is in the stage of the loss, and the split points leave "
                f"{node.meta['origin']} in another one. Take split points before it, or no head_chunks."
            )


def _cuts_by_cost(
    chain: Chain,
    stages: int,
    slowness: Sequence[float],
    ranks: Sequence[int],
    link: float,
) -> tuple[int, ...]:
    # Of cuts with equal bytes first those that divide fewer modules: these count as less than a byte.
    pairs = zip(chain.crossing.bytes, chain.crossing.modules, strict=True)
    weights = [size + _MODULE * modules for size, modules in pairs]
    try:
        messages = [link * size for size in chain.crossing.bytes]
        return choose_cuts(chain.seconds, weights, stages, slowness, ranks, messages)
    except PartitionError as error:
        long = len(chain.forward) // 4
        wide = [name for name, (first, last) in chain.buffers.items() if last - first > long]
        if not wide:
            raise
        raise PartitionError(
            f"{error} No cut can fall between the first reading and the last writing of a buffer, and that "
            f"is much of the model for {', '.join(wide[:3])}: a module that is called all along it, or a "
            "value that is read early and written late."
        ) from error


def _cuts_by_path(forward: list[fx.Node], stages: int, split_points: Sequence[str]) -> tuple[int, ...]:
    if len(split_points) != stages - 1:
        raise PartitionError(
            f"{number_of(len(split_points), 'split point')} make "
            f"{number_of(len(split_points) + 1, 'stage')}, and {stages} are needed (ranks × stages per rank)."
        )
    paths = [n.meta["origin"].path for n in forward]
    cuts = []
    for point in split_points:
        at = next((i for i, p in enumerate(paths) if point and f"{p}.".startswith(f"{point}.")), None)
        if at is None:
            modules = sorted({".".join(p.split(".")[: point.count(".") + 1]) for p in paths if p})
            raise PartitionError(
                f"The split point {point!r} is no module that the forward calls. "
                f"Modules at that depth: {', '.join(modules[:20])}."
            )
        if at == 0:
            raise PartitionError(f"The split point {point!r} would leave the first stage empty.")
        cuts.append(at - 1)
    if sorted(set(cuts)) != cuts:
        raise PartitionError(
            f"Split points must be different and in the order of the forward: {list(split_points)}."
        )
    return tuple(cuts)


def _color(graph: fx.Graph, stage_of: dict[fx.Node, int], stage_of_seq: dict[int, int], first: int) -> None:
    """Write the colors.

    Backward nodes that autograd's engine made itself (sums of gradients, first gradients) have no forward op.
    A sum runs where its last summand is ready; an op without gradients among its inputs runs where it is
    needed first.
    """
    ops = without_color(graph)
    stage = dict(stage_of)
    for node in ops:
        if node in stage:
            continue
        at = stage_of_seq.get(node.meta["origin"].seq)
        if at is None:
            inputs = [n for n in node.all_input_nodes if n in stage and n.meta["origin"].backward]
            # The backward goes down the stages, so the lowest comes last.
            at = min((stage[n] for n in inputs), default=None)
        if at is not None:
            stage[node] = at
    for node in reversed(ops):
        if node not in stage:
            stage[node] = max((stage[u] for u in node.users if u in stage), default=max(stage.values()))
    color = cache(Color)  # one object a section: most nodes have it in common with their arguments
    for node in ops:
        phase = Phase.B if node.meta["origin"].backward else Phase.F
        node.meta["color"] = color(first + stage[node], phase)
