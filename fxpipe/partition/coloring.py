"""Assigns forward nodes to stages, and from them a color to every node.

The forward is cut in the order in which it ran.  A backward node belongs to the stage of the forward
op that it differentiates (autograd's sequence number), whatever its operands are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache
from itertools import accumulate
from typing import TypeVar

import torch
from torch import fx

from fxpipe.cost.nodes import NodeSeconds
from fxpipe.cost.recomputable import Free, recomputable_nodes
from fxpipe.errors import PartitionError
from fxpipe.ir.graph import Color, Phase, read_buffer, sum_over_ranks
from fxpipe.ir.storage import call_nodes, graph_outputs, is_view, node_bytes, storage_root
from fxpipe.partition.cuts import choose_cuts
from fxpipe.partition.following import following_cuts

aten = torch.ops.aten
_Amount = TypeVar("_Amount", int, float)


def partition(
    graph: fx.Graph,
    stages: int,
    node_seconds: NodeSeconds,
    split_points: Sequence[str] | None = None,
    before: int = 0,
    behind: int = 0,
    held: Sequence[Set[str]] | None = None,
    slowness: Sequence[float] = (),
    ranks: Sequence[int] = (),
) -> None:
    """Give every op without a color its stage, and phase F or B; negative stages count from the last one.

    split_points: module paths; each begins a new stage (None: cuts are chosen by cost).
    before, behind: the numbers of stages beside the model's own, whose ops have colors.
    held: per stage the names of its parameters and buffers, of a forward that follows another step's stages.
    slowness: per stage its time relative to that of ``node_seconds``; by default all are alike.
    ranks: of each stage; if given, ranks are balanced instead of stages.
    Raises PartitionError for a split point that is no module of the graph and for more stages than
    there are places to cut.
    """
    forward = [n for n in _without_color(graph) if not n.meta["origin"].backward]
    position = {n: i for i, n in enumerate(forward)}
    by_seq: dict[int, int] = {}
    for node in forward:
        by_seq.setdefault(node.meta["origin"].seq, position[node])
    free = recomputable_nodes(graph, node_seconds)
    if held is not None:
        bytes = _crossing_bytes(graph, position, dict(position), free.in_stage | free.anywhere)
        cuts = following_cuts(forward, bytes, free.in_stage | free.anywhere, held)
    elif split_points is None:
        cuts = _cuts_by_cost(graph, position, by_seq, stages, node_seconds, free, slowness, ranks)
    else:
        cuts = _cuts_by_path(forward, stages, split_points)
    starts = {c + 1 for c in cuts}
    stage_at = list(accumulate((int(i in starts) for i in range(len(forward))), operator.add))
    stage = {n: stage_at[i] for n, i in position.items()}
    # A cast or a view of a parameter moves to its use, so that no weight is sent.
    for node in reversed(forward):
        users = [stage[u] for u in node.users if u in stage]
        if node in free.in_stage and users and node.target is not operator.getitem:
            stage[node] = min(users)
    filled = {stage[node] for node in forward if node not in free.anywhere}
    if len(filled) < stages:
        raise PartitionError(
            f"Stage {min(set(range(stages)) - filled)} would be empty: all that it could hold belongs to the "
            "stages beside it. Use fewer ranks or fewer stages per rank, or other split points."
        )
    _color(graph, stage, {s: stage[forward[i]] for s, i in by_seq.items()}, before)
    for node in call_nodes(graph):
        color = node.meta["color"]
        if color.stage < 0:
            node.meta["color"] = Color(before + stages + behind + color.stage, color.phase)
    _check_buffers(graph)


def _without_color(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in call_nodes(graph) if "color" not in n.meta]


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


def _cuts_by_cost(
    graph: fx.Graph,
    position: dict[fx.Node, int],
    by_seq: dict[int, int],
    stages: int,
    node_seconds: NodeSeconds,
    free: Free,
    slowness: Sequence[float],
    ranks: Sequence[int],
) -> tuple[int, ...]:
    seconds = [0.0] * len(position)
    home = dict(position)  # forward and backward ops alike: the position whose stage they go with
    accumulated = {node for parts in graph_outputs(graph).grads.values() for node in parts}
    for node in _without_color(graph):
        if node.meta["origin"].backward:
            at = by_seq.get(node.meta["origin"].seq)
            if at is None and node not in accumulated:  # a sum that autograd's engine made
                at = min((home[n] for n in node.all_input_nodes if n in home), default=None)
            if at is None:
                continue
            home[node] = at
        seconds[home[node]] += node_seconds(node)
    whole = _trained_spans(graph, position, by_seq, free.in_stage)
    bytes = _crossing_bytes(graph, position, home, free.in_stage | free.anywhere, whole)
    try:
        return choose_cuts(seconds, bytes, stages, slowness, ranks)
    except PartitionError as error:
        spans = _buffer_spans(graph, home)
        wide = [name for name, (first, last) in spans.items() if last - first > len(position) // 4]
        if not wide:
            raise
        raise PartitionError(
            f"{error} No cut can fall between the first reading and the last writing of a buffer, and that "
            f"is much of the model for {', '.join(wide[:3])}: a module that is called all along it, or a "
            "value that is read early and written late."
        ) from error


def _crossing_bytes(
    graph: fx.Graph,
    position: dict[fx.Node, int],
    home: dict[fx.Node, int],
    free: Set[fx.Node],
    whole: Iterable[tuple[int, int]] = (),
) -> list[float]:
    """For every position the bytes that a cut after it would send, or inf if no cut is allowed.

    whole: the first and last positions between which no cut may be.
    """
    steps = [0.0] * (len(position) + 1)
    barred = [0] * (len(position) + 1)
    last_use: dict[fx.Node, int] = {}
    for node, at in position.items():
        uses = [home[u] for u in node.users if u in home]
        if isinstance(node.meta.get("val"), (tuple, list)):
            _add(barred, at, max([*uses, at]), 1)
        elif node not in free:
            root = storage_root(node)
            last_use[root] = max([last_use.get(root, at), *uses])
    for root, last in last_use.items():
        if root in position:
            _add(steps, position[root], last, node_bytes(root))
    for first, last in (*_buffer_spans(graph, home).values(), *whole):
        _add(barred, first, last, 1)
    crossing, closed = list(accumulate(steps)), list(accumulate(barred))
    last = max((i for node, i in position.items() if node not in free), default=0)
    # Behind a view, a sum over ranks or a free value there is nothing to gain, and the stage in between might
    # be empty; so would be a last stage of free values alone, which each stage that needs them computes for
    # itself.
    return [
        math.inf
        if closed[i] or i == last or node in free or is_view(node) or node.target is sum_over_ranks
        else crossing[i]
        for node, i in position.items()
    ]


def _trained_spans(
    graph: fx.Graph, position: dict[fx.Node, int], by_seq: dict[int, int], of_parameters: Set[fx.Node]
) -> Iterator[tuple[int, int]]:
    """From the first node of each forward op to its node that reads a trained parameter.

    An op on DTensors is several nodes.  Its backward goes with the first: a cut between the two would put the
    parameter on two ranks.  of_parameters: values of parameters alone, which are computed at their uses.
    """
    grads = graph_outputs(graph).grads
    trained = {n for n in graph.find_nodes(op="placeholder") if n.meta["input"].name in grads}
    for node, at in position.items():
        if trained.isdisjoint(node.all_input_nodes):
            continue
        if node in of_parameters:
            trained.add(node)
        else:
            yield by_seq.get(node.meta["origin"].seq, at), at


def _buffer_spans(graph: fx.Graph, home: dict[fx.Node, int]) -> dict[str, tuple[int, int]]:
    """The first and last positions at which the forward reads or writes each changed buffer."""
    spans = {}
    reads = {
        n.args[0].meta["input"].name: n for n in graph.find_nodes(op="call_function", target=read_buffer)
    }
    for name, value in graph_outputs(graph).buffers.items():
        touched = [home[n] for n in (reads.get(name), value) if n in home]
        if touched:
            spans[name] = (min(touched), max(touched))
    return spans


def _add(steps: list[_Amount], first: int, last: int, amount: _Amount) -> None:
    """Add ``amount`` to every cut between positions ``first`` and ``last``."""
    if last > first:
        steps[first] += amount
        steps[last] -= amount


def _cuts_by_path(forward: list[fx.Node], stages: int, split_points: Sequence[str]) -> tuple[int, ...]:
    if len(split_points) != stages - 1:
        raise PartitionError(
            f"{len(split_points)} split points make {len(split_points) + 1} stages, and {stages} are needed "
            "(ranks × stages per rank)."
        )
    paths = [n.meta["origin"].path for n in forward]
    cuts = []
    for point in split_points:
        at = next((i for i, p in enumerate(paths) if p == point or p.startswith(point + ".")), None)
        if at is None:
            known = sorted({".".join(p.split(".")[: point.count(".") + 1]) for p in paths if p})
            raise PartitionError(
                f"The split point {point!r} is no module that the forward calls. "
                f"Modules at that depth: {', '.join(known[:20])}."
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
    ops = _without_color(graph)
    stage = dict(stage_of)
    for node in ops:
        if node in stage:
            continue
        known = stage_of_seq.get(node.meta["origin"].seq)
        if known is None:
            inputs = [n for n in node.all_input_nodes if n in stage and n.meta["origin"].backward]
            known = min((stage[n] for n in inputs), default=None)
        if known is not None:
            stage[node] = known
    for node in reversed(ops):
        if node not in stage:
            stage[node] = max((stage[u] for u in node.users if u in stage), default=max(stage.values()))
    color = cache(Color)  # one object a section: most nodes have it in common with their arguments
    for node in ops:
        phase = Phase.B if node.meta["origin"].backward else Phase.F
        node.meta["color"] = color(first + stage[node], phase)
