"""Vocabulary stages woven into a schedule of the model's own stages (2411.05288).

Beside its stages of the model every rank has a *head*, its share of the output layer: F is pass S (before
the barrier), B what follows the barrier, W pass T; and, if they are spread too, a *lookup*, its share of the
input embedding.  The model's schedule says what is due when; list scheduling under the memory limits finds
the places for the rest, and moves the backward behind the barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf

from fxpipe.graph import Colour, Phase
from fxpipe.schedule.blocks import flow
from fxpipe.schedule.costs import Costs, Edge
from fxpipe.schedule.dispatch import dispatch
from fxpipe.schedule.goal import Goal, Objective
from fxpipe.schedule.improve import improve
from fxpipe.schedule.ops import Order
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.shop import Coded, Shop, decode, encode, fits, peaks, run, shop
from fxpipe.vocabulary.stages import Vocabulary

_PATIENCE = ((0.0, 0.0, 0.0), (0.3, 0.3, 0.3), (1.0, 1.0, 0.5), (1.001, 0.3, 0.7))
_DELAYS = (0.0, 1.0, 3.0)  # periods that T is put off
_TRIES = 2_000_000  # ops that the improvement may run


def body_costs(costs: Costs, vocabulary: Vocabulary) -> Costs:
    """What the model's own stages cost."""
    first, last = vocabulary.lookups, len(costs.stages) - vocabulary.heads

    def moved(colour: Colour) -> Colour:
        return Colour(colour.stage - first, colour.phase)

    edges = tuple(
        replace(edge, source=moved(edge.source), target=moved(edge.target))
        for edge in costs.edges
        if first <= edge.source.stage < last and first <= edge.target.stage < last
    )
    return Costs(costs.stages[first:last], edges)


def room_for_body(costs: Costs, vocabulary: Vocabulary, limits: Sequence[float]) -> tuple[float, ...]:
    """What the vocabulary stages leave of each rank's memory: they hold one microbatch at least."""
    taken = [0.0] * len(limits)
    count = len(costs.stages)
    for stage in (*range(vocabulary.lookups), *range(count - vocabulary.heads, count)):
        rank = stage if stage < vocabulary.lookups else stage - (count - vocabulary.heads)
        taken[rank] += max(costs.stages[stage].saved, costs.stages[stage].kept)
    return tuple(limit - own for limit, own in zip(limits, taken, strict=True))


def weave(
    body: Problem,
    order: Order,
    costs: Costs,
    vocabulary: Vocabulary,
    limits: Sequence[float],
    objective: Objective = "span",
) -> Order:
    """The model's order with the vocabulary stages' ops in it.

    ``costs`` are of all stages.  A rank without a limit holds at most ``ahead`` microbatches more of the
    model's stages than it does in ``order``.
    """
    m = body.microbatches
    flat = shop(costs, vocabulary.placement(body.placement))
    goal = Goal("span" if objective == "span" else "makespan", m * flat.period)
    coded = encode(order, m)
    dates = _Dates(body, coded, flat, vocabulary)
    caps = _caps(body, coded, flat, vocabulary, limits)
    best: tuple[float, Coded] | None = None
    for delay, patience in product(_DELAYS, _PATIENCE):
        found = dispatch(flat, m, dates.due(delay), caps, patience)
        done = run(flat, found, m)
        assert done is not None, "an order that was made by running it cannot block"
        value = goal.value(done) if fits(flat, found, m, caps) else inf
        if best is None or value < best[0]:
            best = value, found
    assert best is not None, "there is at least one way to weave"
    tries = min(300, _TRIES // (flat.sections * m))
    return decode(improve(flat, best[1], m, caps, goal, tries), m)


def _caps(
    body: Problem, coded: Coded, flat: Shop, vocabulary: Vocabulary, limits: Sequence[float]
) -> list[float]:
    """Per rank what it may hold."""
    caps = []
    most = peaks(body.shop, coded, body.microbatches)
    for rank, limit in enumerate(limits):
        own = body.shop.smallest_limit(rank)
        beside = (1 + vocabulary.ahead) * (flat.smallest_limit(rank) - own)
        caps.append(min(limit, most[rank] + vocabulary.ahead * own + beside))
    return caps


class _Dates:
    """When ops are due, from when the model's own schedule runs them."""

    def __init__(self, body: Problem, coded: Coded, flat: Shop, vocabulary: Vocabulary) -> None:
        self.microbatches, self.flat = body.microbatches, flat
        self.lookups, self.heads = vocabulary.lookups, vocabulary.heads
        self.body = body.shop
        done = run(self.body, coded, body.microbatches)
        assert done is not None, "the order to weave into can progress"
        self.end = done.end
        self.scale = flat.period / self.body.period if self.body.period else 1.0
        self.start = flow(flat)

    def due(self, delay: float) -> list[float]:
        m, flat, body = self.microbatches, self.flat, self.body
        first, last = 3 * self.lookups, flat.sections - 3 * self.heads
        bottom = 3 * (body.stages - 1)  # the last F of the model
        alone = self.start
        late = alone[first + bottom + 1] - alone[first + bottom] - flat.seconds[first + bottom]
        dates: list[float] = []
        for section in range(flat.sections):
            own = section - first
            if first <= section < last:
                shift = late if section % 3 else 0.0
                dates += [self.scale * (self.end[own * m + j] - body.seconds[own]) + shift for j in range(m)]
                continue
            # Beside a lone microbatch's way: as far from the model's nearest op as there.
            anchor = first if section < first else first + bottom
            if section < first and section % 3:
                anchor = first + 1
            gap = alone[section] - alone[anchor]
            if section >= last and section % 3 == 2:
                gap += delay * flat.period
            dates += [
                self.scale * (self.end[(anchor - first) * m + j] - body.seconds[anchor - first]) + gap
                for j in range(m)
            ]
        return dates


def vocabulary_costs(
    costs: Costs, ranks: int, seconds: float, barriers: int, transfer: float, saved: float = 0.0
) -> tuple[Costs, Vocabulary]:
    """The costs of a model with an output layer that takes ``seconds`` a microbatch on one rank, a third each
    for its forward and both gradients, spread over all ranks."""
    third = seconds / 3 / ranks
    body, last = len(costs.stages), len(costs.stages) - 1
    one = replace(
        costs.stages[0],
        forward=third * (2 if barriers == 1 else 1),
        backward=third * (0 if barriers == 1 else 1),
        weight=third,
        saved=saved,
        kept=saved,
    )
    edges = list(costs.edges)
    heads = range(body, body + ranks)
    for head in heads:
        edges.append(Edge(Colour(last, Phase.F), Colour(head, Phase.F), seconds=transfer))
        edges += [Edge(Colour(head, Phase.F), Colour(other, Phase.B), seconds=transfer) for other in heads]
        edges.append(Edge(Colour(head, Phase.B), Colour(last, Phase.B), seconds=transfer))
    return Costs((*costs.stages, *(one,) * ranks), tuple(edges)), Vocabulary(0, ranks, barriers)
