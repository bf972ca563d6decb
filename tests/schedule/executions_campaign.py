"""Executions of lowered schedules on hosts and devices: every family and placement, with a vocabulary split
over the ranks, activations offloaded, tied gradients and edges beside the chain, alone and together.

    python tests/schedule/executions_campaign.py --ranks 2 3 4 8 --microbatches 1 2 4 6 8 16 --seconds 3600

prints what blocks or races.  All 26 000 of these take some hours of a core; they come in random order.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import inf

from races import Access, Places, last_gradients, races

from fxpipe.codegen.collectives import collectives
from fxpipe.errors import ScheduleError
from fxpipe.ir.sections import SectionEdge
from fxpipe.schedule.bucket_use import once
from fxpipe.schedule.costs import Costs, Edge, StageCost, chain
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.lowering.deadlock import prove
from fxpipe.schedule.lowering.instructions import AllReduceGradient, Programs
from fxpipe.schedule.lowering.lower import lower, with_gradients
from fxpipe.schedule.offload.memory_pool import pools
from fxpipe.schedule.offload.planner import FULL, HALF, offload, with_link
from fxpipe.schedule.ops import Color, Phase, Schedule
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import with_output_shards

STAGES = [(1, "plain"), (2, "plain"), (2, "v"), (4, "plain")]
#: Output shards with so many barriers, and embedding shards beside them.
VOCABULARIES = [None, (1, False), (2, False), (1, True), (2, True)]
SHARES = [None, HALF, FULL]
TIMES = 0.1, 0.02  # of a message, and of the offload of a rank's activations, as a share of its work


@dataclass(frozen=True)
class Case:
    """``skips``: whether stages send to others than their neighbors, and values for W alone."""

    family: str
    stages: int
    placement: str
    vocabulary: tuple[int, bool] | None
    skips: bool
    ranks: int
    microbatches: int
    share: float | None


def cases(ranks: Sequence[int], microbatches: Sequence[int]) -> Iterator[Case]:
    """All that families have."""
    for family, (stages, placement) in product(FAMILIES, STAGES):
        if stages in FAMILIES[family].chunks_in(placement):
            yield from (
                Case(family, stages, placement, *others, share)
                for *others, share in product(VOCABULARIES, (False, True), ranks, microbatches, SHARES)
            )


def costs_of(case: Case) -> tuple[Costs, Vocabulary | None]:
    """Stages of different lengths, whose activations W needs in part."""
    stages, seconds = case.ranks * case.stages, TIMES[0]
    costs = chain([StageCost(1 + s % 2 / 2, 1, 0.5, 2, 1) for s in range(stages)], seconds, 1)
    if case.skips:
        last = stages - 1
        skipped = [Edge(Color(0, Phase.F), Color(s, Phase.F), 1, seconds) for s in range(2, stages)]
        skipped += [Edge(Color(s, Phase.B), Color(0, Phase.B), 1, seconds) for s in range(2, stages)]
        skipped += [Edge(Color(s, Phase.F), Color(s - 1, Phase.B), 1, seconds) for s in range(1, stages)]
        if last > 1:
            skipped.append(Edge(Color(last, Phase.B), Color(0, Phase.W), 1, seconds))
        costs = replace(costs, edges=_merged([*costs.edges, *skipped]))
    if case.vocabulary is None:
        return costs, None
    barriers, embeds = case.vocabulary
    costs = with_output_shards(costs, case.ranks, 0.6, barriers, seconds, 1)
    if embeds:
        costs = _with_embedding_shards(costs, case.ranks, seconds)
    return costs, Vocabulary(case.ranks if embeds else 0, case.ranks, barriers)


def _merged(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """One edge for two sections."""
    return tuple({(edge.source, edge.target): edge for edge in edges}.values())


def _with_embedding_shards(costs: Costs, ranks: int, seconds: float) -> Costs:
    """A stage on every rank before all others, which hands its part to the first of them."""

    def moved(color: Color) -> Color:
        return Color(color.stage + ranks, color.phase)

    edges = [replace(e, source=moved(e.source), target=moved(e.target)) for e in costs.edges]
    for own in range(ranks):
        edges.append(Edge(Color(own, Phase.F), Color(ranks, Phase.F), 0.1, seconds))
        edges.append(Edge(Color(ranks, Phase.B), Color(own, Phase.W), 0.0, seconds))
    return replace(
        costs, stages=(*(StageCost(0.05, 0, 0.05, 1, 1),) * ranks, *costs.stages), edges=tuple(edges)
    )


@lru_cache(1)
def _schedule_of(case: Case) -> tuple[Schedule, Costs] | None:
    """Without transfers; None where the family has none."""
    costs, vocabulary = costs_of(case)
    try:
        schedule = build(
            case.family,
            ranks=case.ranks,
            microbatches=case.microbatches,
            costs=costs,
            stages_per_rank=case.stages,
            placement=case.placement,
            effort=0.01,
            vocabulary=vocabulary,
        )
    except ScheduleError:
        return None
    return schedule, costs


def lowered(case: Case) -> tuple[Programs, Schedule, Places] | None:
    """The programs with what they do at the end, and per rank the parts of the pool of each activation."""
    found = _schedule_of(replace(case, share=None))
    if found is None:
        return None
    schedule, costs = found
    places: Places = [{}] * case.ranks
    if case.share is not None:
        timeline = simulate(schedule, with_link(costs, TIMES[1]))
        schedule = offload(timeline, case.share).timeline.schedule
        places = pool_parts(schedule, timeline.costs)
    edges = tuple(SectionEdge(e.source, e.target, (f"{e.source}",)) for e in costs.edges)
    programs = lower(schedule, costs.edges, collectives(edges, schedule))
    tied = [AllReduceGradient("tied", tuple(range(case.ranks)))] if case.ranks > 1 else []
    if case.ranks > 2:
        tied.append(AllReduceGradient("ends", (0, case.ranks - 1)))
    buckets = [[once(None, op) for op in last_gradients(ops)] for ops in schedule.order]
    return with_gradients(programs, buckets, tied, divides=True), schedule, places


def pool_parts(schedule: Schedule, costs: Costs) -> Places:
    """Of each rank's pool the parts between any two beginnings and ends."""
    sizes: dict[tuple[int, Phase], int] = {}
    for transfer in schedule.transfers:
        stage = costs.stages[transfer.stage]
        size = stage.offloadable if transfer.user is Phase.B else stage.offloadable_for_weight
        sizes[transfer.stage, transfer.user] = round(512 * size) * (1 + transfer.stage % 3)
    found = []
    for pool in pools(schedule, lambda t: sizes[t.stage, t.user]):
        spans = {own: (at, at + sizes[own[0], own[2]]) for own, at in pool.offsets.items()}
        parts = list(pairwise(sorted({edge for span in spans.values() for edge in span})))
        found.append({own: [p for p in parts if at <= p[0] < end] for own, (at, end) in spans.items()})
    return found


def check(case: Case) -> list[tuple[Access, Access]] | None:
    """The races of a case, whose programs are proved to end; None where there is no such schedule."""
    found = lowered(case)
    if found is None:
        return None
    programs, schedule, places = found
    prove(programs, schedule.placement)
    return races(programs, schedule.placement, places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--seconds", type=float, default=inf, help="about, for all cases")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the cases")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    order = [case for case in cases(asked.ranks, asked.microbatches) if case.family in asked.families]
    random.Random(asked.seed).shuffle(order)
    for case in order:
        if time.monotonic() > begun + asked.seconds:
            break
        try:
            found = check(case)
        except ScheduleError as error:
            counts["blocked"] += 1
            print(f"{case}: {error}", flush=True)
            continue
        counts["none" if found is None else "races" if found else "ok"] += 1
        for one, other in found or ():
            print(f"{case}: {one.what} and {other.what} on {one.storage} of rank {one.rank}", flush=True)
    print(f"{counts.total()} of {len(order)} cases: {dict(counts)}, {time.monotonic() - begun:.0f} s")
    sys.exit(bool(counts["blocked"] or counts["races"]))


if __name__ == "__main__":
    main()
