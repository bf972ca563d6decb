"""The warm-up of each rank: leading forwards that need no op outside of a warm-up."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import pytest

from fxpipe.codegen.collectives import collectives
from fxpipe.errors import DeadlockError
from fxpipe.ir.sections import SectionEdge
from fxpipe.schedule.costs import Costs, Edge, StageCost, chain
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.lowering.deadlock import prove
from fxpipe.schedule.lowering.instructions import (
    Compute,
    Instruction,
    Message,
    PostRecv,
    Programs,
    Send,
    StartCollective,
    Validate,
    Wait,
    WaitCollective,
)
from fxpipe.schedule.lowering.lower import lower
from fxpipe.schedule.lowering.validation import with_validation
from fxpipe.schedule.ops import Color, OpKind, Phase, Schedule, parse_order
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.steps import warm_up_lengths
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.vocabulary_costs import with_output_shards
from tests.schedule.test_schedule_properties import with_lookups

UNIT = StageCost(1.0, 1.0, 1.0, 1.0, 0.5)


def hand(text: str, placement: tuple[int, ...], microbatches: int) -> Schedule:
    return Schedule("hand", placement, microbatches, parse_order(text))


def test_1f1b_fills():
    """Rank r has p - r forwards before its first backward."""
    schedule = build("1f1b", ranks=4, microbatches=8, costs=chain([UNIT] * 4))
    assert warm_up_lengths(schedule, chain([UNIT] * 4).edges) == (4, 3, 2, 1)


def test_a_forward_behind_a_backward_cuts_those_that_need_it():
    """F1.1 stands behind a backward of rank 1; so F2.1, of rank 0 again, is in no warm-up."""
    text = """
    F0.0 F0.1 F2.0 F2.1 BW2.0 BW2.1 BW0.0 BW0.1
    F1.0 BW1.0 F1.1 BW1.1
    """
    schedule = hand(text, (0, 1, 0), 2)
    assert warm_up_lengths(schedule, chain([UNIT] * 3).edges) == (3, 1)
    # If stage 2 needs nothing of stage 1, all leading forwards are warm-up.
    skip = (Edge(Color(0, Phase.F), Color(2, Phase.F)),)
    assert warm_up_lengths(schedule, skip) == (4, 1)


def test_a_forward_that_needs_a_backward_is_no_warm_up():
    schedule = hand("F0.0 BW0.0\nF1.0 BW1.0", (0, 1), 1)
    edges = (Edge(Color(0, Phase.B), Color(1, Phase.F)),)
    assert warm_up_lengths(schedule, edges) == (1, 0)


def largest_closed(schedule: Schedule, edges: tuple[Edge, ...]) -> tuple[int, ...]:
    """By the definition: shorten the leading forwards until nothing is needed from outside."""
    lengths = [len([*takewhile(lambda op: op.kind is OpKind.F, ops)]) for ops in schedule.order]
    while True:
        inside = {
            (Color(op.stage, Phase.F), op.microbatch)
            for ops, length in zip(schedule.order, lengths, strict=True)
            for op in ops[:length]
        }
        before = list(lengths)
        for rank, ops in enumerate(schedule.order):
            for position, op in enumerate(ops[: lengths[rank]]):
                sources = [edge.source for edge in edges if edge.target == Color(op.stage, Phase.F)]
                if any((source, op.microbatch) not in inside for source in sources):
                    lengths[rank] = position
                    break
        if lengths == before:
            return tuple(lengths)


SPLIT = [(name, barriers) for name in ("1f1b", "zb-h1", "zb-v") for barriers in (1, 2)]


@pytest.mark.parametrize(("name", "barriers"), [*((name, 0) for name in FAMILIES), *SPLIT])
def test_it_is_the_largest_closed_set_in_every_family(name, barriers):
    family, ranks = FAMILIES[name], 4
    costs: Costs = chain([UNIT] * (ranks * family.stages_per_rank), 0.1)
    vocabulary = None
    if barriers:
        costs = with_lookups(with_output_shards(costs, ranks, 1.0, barriers, 0.1), ranks, 0.0, ranks, ranks)
        vocabulary = Vocabulary(ranks, ranks, barriers)
    schedule = build(name, ranks=ranks, microbatches=6, costs=costs, vocabulary=vocabulary, effort=0.01)
    lengths = warm_up_lengths(schedule, costs.edges)
    assert lengths == largest_closed(schedule, costs.edges)
    assert lengths[0] > 0
    assert lengths == in_programs(schedule, costs)


def in_programs(schedule: Schedule, costs: Costs) -> tuple[int, ...]:
    """The number of ops before the programs wait for the verdict; programs that repeat them end, too."""
    named = [(e.source, e.target, f"{e.source}") for e in costs.edges]
    edges = tuple(SectionEdge(a, b, (name,), {name: "sum"}) for a, b, name in named)
    joint = collectives(edges, schedule)
    programs = lower(schedule, costs.edges, joint, simulate(schedule, costs).spans)
    programs = with_validation(programs, schedule.placement)
    prove(programs, schedule.placement)
    prove(tuple(repeated(program, schedule.microbatches) for program in programs), schedule.placement)
    before = warm_ups(programs)
    assert messages_of(before, Send) == messages_of(before, PostRecv)
    return tuple(sum(isinstance(i, Compute) for i in warm_up) for warm_up in before)


def warm_ups(programs: Programs) -> list[list[Instruction]]:
    return [[*takewhile(lambda i: not isinstance(i, Validate), program)] for program in programs]


def messages_of(programs: list[list[Instruction]], kind: type[Send | PostRecv]) -> set[Message]:
    return {message for program in programs for i in program if isinstance(i, kind) for message in i.messages}


def test_a_receive_of_what_a_warm_up_sends_and_what_it_does_not():
    """F1 takes the values of F0 and of B0 as one operation, so F0 sends its own behind the verdict, too."""
    schedule = hand("F0.0 BW0.0\nF1.0 BW1.0", (0, 1), 1)
    edges = tuple(Edge(Color(0, phase), Color(1, Phase.F)) for phase in (Phase.F, Phase.B))
    programs = with_validation(lower(schedule, edges), schedule.placement)
    assert [len(warm_up) for warm_up in warm_ups(programs)] == [0, 0]
    prove(tuple(repeated(program, 1) for program in programs), schedule.placement)


def repeated(program: Sequence[Instruction], microbatches: int) -> tuple[Instruction, ...]:
    """The program of a rank whose last update does not stand: its warm-up, of other microbatches for the
    proof, what it has not taken of that, and the program."""
    begin = [*takewhile(lambda i: not isinstance(i, Validate), program)]
    first: list[Instruction] = []
    posted, joined = dict[PostRecv, None](), dict[WaitCollective, None]()
    for i in begin:
        match i:
            case Compute(op):
                first.append(Compute(replace(op, microbatch=op.microbatch + microbatches)))
            case PostRecv(messages) | Send(messages) | Wait(messages):
                later = tuple(replace(m, microbatch=m.microbatch + microbatches) for m in messages)
                first.append(replace(i, messages=later))
            case StartCollective(_, m) | WaitCollective(_, m):
                first.append(replace(i, microbatch=m + microbatches))
        match first[-1]:
            case PostRecv() as post:
                posted[post] = None
            case Wait(messages):
                del posted[PostRecv(messages)]
            case StartCollective(collective, m):
                if WaitCollective(collective, m - microbatches) in program:
                    joined[WaitCollective(collective, m)] = None
            case WaitCollective() as wait:
                del joined[wait]
    return (*first, Validate(), *(Wait(post.messages) for post in posted), *joined, *program)


def test_a_receive_ahead_of_the_verdict_is_found():
    """What the lowering posts ahead, of the first backward, would be posted twice and sent once."""
    costs = chain([UNIT] * 2)
    schedule = build("1f1b", ranks=2, microbatches=4, costs=costs)
    moved = with_validation(lower(schedule, costs.edges), schedule.placement)
    left = []
    for program in lower(schedule, costs.edges):
        end = next(k for k, i in enumerate(program) if isinstance(i, Compute) and i.op.kind is not OpKind.F)
        end = next(k for k in range(end, 0, -1) if isinstance(program[k - 1], Compute | Send | PostRecv))
        left.append((*program[:end], Validate(), *program[end:]))
    prove(tuple(repeated(program, 4) for program in moved), schedule.placement)
    with pytest.raises(DeadlockError, match=r"message . from rank 1 to rank 0"):
        prove(tuple(repeated(program, 4) for program in left), schedule.placement)
