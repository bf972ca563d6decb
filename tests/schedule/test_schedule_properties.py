"""What holds for every family, whatever the ranks, microbatches, chunks, costs and skip connections."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.codegen.collectives import collectives
from fxpipe.ir import sections
from fxpipe.schedule.costs import Costs, Edge, StageCost, chain
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.lowering.deadlock import prove
from fxpipe.schedule.lowering.instructions import Compute, Message, PostRecv, Send, Wait
from fxpipe.schedule.lowering.lower import lower
from fxpipe.schedule.ops import PHASES, Color, Phase, Schedule
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import with_output_shards

pytestmark = pytest.mark.slow

TIMES = st.floats(0, 4).map(lambda time: round(time, 2))


@st.composite
def problems(draw, names=tuple(FAMILIES), limited=False) -> tuple[Schedule, Costs, float | None]:
    """A schedule, its costs and the memory limit that it was made for."""
    family = FAMILIES[draw(st.sampled_from(names))]
    kinds = [(v, shape) for v in (1, 2) for shape in ("plain", "v") if v in family.chunks_in(shape)]
    chunks, shape = draw(st.sampled_from(kinds))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    stages = ranks * chunks
    saved, kept = draw(st.sampled_from([(1.0, 1.0), (1.0, 0.5), (1.0, 0.0), (0.0, 0.0)]))
    costs = chain(
        [StageCost(draw(TIMES), draw(TIMES), draw(TIMES), saved, kept) for _ in range(stages)],
        draw(TIMES),
        draw(st.sampled_from([0.0, 0.25])),
    )
    reach = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1))
    skips = {tuple(sorted(pair)) for pair in draw(st.lists(reach, max_size=3)) if abs(pair[0] - pair[1]) > 1}
    extra = [Edge(Color(a, Phase.F), Color(b, Phase.F), seconds=draw(TIMES)) for a, b in skips]
    extra += [Edge(Color(b, Phase.B), Color(a, Phase.B), seconds=draw(TIMES)) for a, b in skips]
    extra += [Edge(Color(a, Phase.F), Color(b, Phase.W), seconds=draw(TIMES)) for a, b in skips]
    costs = Costs(costs.stages, (*costs.edges, *extra))
    # Two hand-overs of 0.25 within a rank for each of its stages are the most that there can be.
    least = chunks * (saved + 0.5)
    limit = draw(st.floats(least, least + 6)) if limited else None
    schedule = build(
        family.name,
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        stages_per_rank=chunks,
        placement=shape,
        memory_limit=limit,
        effort=0.01,
    )
    return schedule, costs, limit


@settings(max_examples=40, deadline=None)
@given(problems())
def test_any_schedule(problem):
    schedule, costs, _ = problem
    check_times(schedule, costs)
    check_order(schedule)
    check_programs(schedule, costs)


def check_times(schedule: Schedule, costs: Costs) -> None:
    """Complete, and not below the bound."""
    timeline = simulate(schedule, costs)
    rounding = 1e-9 * (1 + timeline.seconds)
    assert timeline.seconds >= timeline.lower_bound - rounding
    assert 0 <= timeline.span_bubble <= timeline.makespan_bubble + 1e-9
    for spans in timeline.spans:
        assert all(before.end <= after.start for before, after in pairwise(spans))
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == max(spans[-1].end for spans in timeline.spans)


def check_order(schedule: Schedule) -> None:
    """The ops of a stage run in the order of the microbatches."""
    seen: dict[tuple[Phase, int], list[int]] = defaultdict(list)
    for ops in schedule.order:
        for op in ops:
            for phase in PHASES[op.kind]:
                seen[phase, op.stage].append(op.microbatch)
    assert all(order == list(range(schedule.microbatches)) for order in seen.values())


FIXED = tuple(name for name, family in FAMILIES.items() if not family.is_searched)
SEARCHED = tuple(name for name, family in FAMILIES.items() if family.is_searched)


@pytest.mark.parametrize("name", FIXED)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_memory_stays_within_what_the_family_claims(name, data):
    schedule, costs, _ = data.draw(problems((name,)))
    p, m, v = schedule.ranks, schedule.microbatches, schedule.stages // schedule.ranks
    shape = "plain" if schedule.placement == tuple(range(p)) * v else "v"
    problem = Problem(p, m, v, shape, costs, per_rank(None, p))
    timeline, most = simulate(schedule, costs), FAMILIES[name].most
    chunk = costs.stages[0].saved_activations
    handed = 2 * v * m * max((edge.bytes for edge in costs.edges), default=0.0)
    for rank, (peak, steps) in enumerate(zip(timeline.peak_memory, timeline.memory, strict=True)):
        assert peak <= min(most(problem, rank), m * v) * chunk + handed
        assert not steps or abs(steps[-1][1]) < 1e-9


@settings(max_examples=26, deadline=None)
@given(problems(SEARCHED, limited=True))
def test_searched_families_keep_any_limit(problem):
    schedule, costs, limit = problem
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_memory) <= limit * (1 + 1e-9)


def check_programs(schedule: Schedule, costs: Costs) -> None:
    """They end, and have what they compute with."""
    programs = lower(schedule, costs.edges)
    prove(programs, schedule.placement)
    crossing = [
        e for e in costs.edges if schedule.placement[e.source.stage] != schedule.placement[e.target.stage]
    ]
    for ops, program in zip(schedule.order, programs, strict=True):
        assert tuple(i.op for i in program if isinstance(i, Compute)) == ops
        posted, arrived, sent, done = set(), set(), set(), set()
        for instruction in program:
            match instruction:
                case PostRecv(messages):
                    assert posted.isdisjoint(messages)
                    posted.update(messages)
                case Wait(messages):
                    assert posted - arrived >= set(messages)
                    arrived.update(messages)
                case Send(messages):
                    assert done >= {(m.edge.source, m.microbatch) for m in messages}
                    assert sent.isdisjoint(messages)
                    sent.update(messages)
                case Compute(op):
                    own = {Color(op.stage, phase) for phase in PHASES[op.kind]}
                    assert all(Message(e, op.microbatch) in arrived for e in crossing if e.target in own)
                    done |= {(color, op.microbatch) for color in own}
        assert posted == arrived
        assert sent == {Message(e, j) for e in crossing for color, j in done if e.source == color}


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20), st.sampled_from(["1f1b", "zb-h1"]))
def test_receive_buffers_live_for_two_ops_at_most_in_a_plain_chain(ranks, microbatches, name):
    costs = chain([StageCost(1, 1, 1)] * ranks)
    schedule = build(name, ranks=ranks, microbatches=microbatches, costs=costs)
    for program in lower(schedule, costs.edges):
        age: dict[Message, int] = {}
        for instruction in program:
            match instruction:
                case PostRecv(messages):
                    age |= dict.fromkeys(messages, 0)
                case Wait(messages):
                    assert max(age.pop(message) for message in messages) <= 1
                case Compute():
                    age = {message: ops + 1 for message, ops in age.items()}


@st.composite
def problems_with_vocabulary(draw) -> tuple[Schedule, Costs, float | None]:
    """With heads, and at times lookups, of any costs; the limit is for the activations of all stages."""
    family = FAMILIES[draw(st.sampled_from(tuple(FAMILIES)))]
    kinds = [(v, shape) for v in (1, 2) for shape in ("plain", "v") if v in family.chunks_in(shape)]
    chunks, shape = draw(st.sampled_from(kinds))
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    body = chain([StageCost(draw(TIMES), draw(TIMES), draw(TIMES), 1.0, 0.5)] * ranks * chunks, draw(TIMES))
    barriers, lookups = draw(st.integers(1, 2)), draw(st.booleans())
    costs = with_output_shards(body, ranks, draw(TIMES), barriers, draw(TIMES), saved=0.25)
    if lookups:
        user, maker = (draw(st.integers(0, ranks * chunks - 1)) for _ in range(2))
        costs = with_lookups(costs, ranks, draw(TIMES), ranks + user, ranks + maker)
    vocabulary = Vocabulary(ranks if lookups else 0, ranks, barriers)
    least = chunks + 0.25 + 0.2
    limit = draw(st.one_of(st.none(), st.floats(least, least + 6)))
    schedule = build(
        family.name,
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        stages_per_rank=chunks,
        placement=shape,
        memory_limit=limit if family.is_searched else None,  # others may refuse it
        effort=0.01,
        vocabulary=vocabulary,
    )
    return schedule, costs, limit


def with_lookups(
    costs: Costs, ranks: int, seconds: float, user: int, maker: int, saved: float = 0.0
) -> Costs:
    """A stage on every rank before all others, which hands 0.1 to one of them and is given by one; it holds
    ``saved`` until then."""

    def moved(color: Color) -> Color:
        return Color(color.stage + ranks, color.phase)

    edges = [replace(e, source=moved(e.source), target=moved(e.target)) for e in costs.edges]
    for own in range(ranks):
        edges.append(Edge(Color(own, Phase.F), Color(user, Phase.F), 0.1, seconds))
        edges.append(Edge(Color(maker, Phase.B), Color(own, Phase.W), 0.0, seconds))
    return Costs((*(StageCost(0.05, 0, 0.05, saved, saved),) * ranks, *costs.stages), tuple(edges))


@settings(max_examples=13, deadline=None)
@given(problems_with_vocabulary())
def test_vocabulary_stages_are_inserted_into_every_family(problem):
    """Whole, not below the bound, within memory, and proved to end with its exchanges."""
    schedule, costs, limit = problem
    timeline = simulate(schedule, costs)
    assert timeline.seconds >= timeline.lower_bound - 1e-9 * (1 + timeline.seconds)
    if limit is not None and FAMILIES[schedule.name].is_searched:
        assert max(timeline.peak_memory) <= limit * (1 + 1e-9)
    edges = tuple(
        sections.SectionEdge(e.source, e.target, (f"{e.source}",), {f"{e.source}": "sum"})
        for e in costs.edges
    )
    joint = collectives(edges, schedule)
    prove(lower(schedule, costs.edges, joint), schedule.placement)
    if schedule.ranks > 1:
        assert len(joint) == (5 if schedule.vocabulary.embedding_shards else 3)


@pytest.mark.in_ci(
    "3.5-1-zb-v-2-v",
    "3.5-2-zb-v-2-v",
    "4.5-1-zb-v-2-v",
    "6.0-1-zb-1-plain",
    "6.0-1-zb-2p-1-plain",
    "6.0-1-zb-v-2-v",
)
@pytest.mark.parametrize(
    ("name", "chunks", "shape"), [("zb", 1, "plain"), ("zb-2p", 1, "plain"), ("zb-v", 2, "v")]
)
@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("limit", [3.5, 4.5, 6.0])
def test_embedding_shards_that_hold_their_values_keep_the_limit(name, chunks, shape, barriers, limit):
    """They hold what they save of each microbatch for as long as the model's stages take."""
    ranks, microbatches = 3, 9
    body = chain([StageCost(1 / chunks, 1 / chunks, 1 / chunks, 1 / chunks, 0.5 / chunks)] * ranks * chunks)
    costs = with_output_shards(body, ranks, 0.6, barriers, 0.05, saved=0.25)
    costs = with_lookups(costs, ranks, 0.05, ranks, ranks, saved=0.2)
    schedule = build(
        name,
        ranks=ranks,
        microbatches=microbatches,
        costs=costs,
        stages_per_rank=chunks,
        placement=shape,
        memory_limit=limit,
        effort=0.1,
        vocabulary=Vocabulary(ranks, ranks, barriers),
    )
    assert max(simulate(schedule, costs).peak_memory) <= limit * (1 + 1e-9)
