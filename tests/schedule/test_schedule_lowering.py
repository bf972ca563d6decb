"""Instructions of small schedules, and the proof that they end."""

import pytest

from fxpipe.errors import DeadlockError, ScheduleError
from fxpipe.schedule.bucket_use import BucketUse, once
from fxpipe.schedule.costs import Edge, StageCost, chain
from fxpipe.schedule.lowering.deadlock import prove
from fxpipe.schedule.lowering.instructions import Collective, CollectiveKind, Message, PostRecv, Wait
from fxpipe.schedule.lowering.lower import lower, with_gradients
from fxpipe.schedule.ops import Color, Phase, Schedule, parse_ops, parse_order
from fxpipe.schedule.vocabulary_costs import with_output_shards

F, B, W = Phase.F, Phase.B, Phase.W


def edge(source: tuple[Phase, int], target: tuple[Phase, int]) -> Edge:
    return Edge(Color(source[1], source[0]), Color(target[1], target[0]))


def hand(text: str, placement: tuple[int, ...], microbatches: int = 1) -> Schedule:
    return Schedule("hand", placement, microbatches, parse_order(text))


def text(program) -> list[str]:
    return [str(instruction) for instruction in program]


CHAIN = chain([StageCost(1, 1, 1)] * 2).edges


def test_receives_are_posted_one_compute_ahead():
    schedule = hand("F0.0 F0.1 B0.0 W0.0 B0.1 W0.1\nF1.0 B1.0 F1.1 B1.1 W1.0 W1.1", (0, 1), 2)
    programs = lower(schedule, CHAIN)
    assert text(programs[0]) == [
        "compute F0.0",
        "send F0 -> F1, microbatch 0",
        "post B1 -> B0, microbatch 0",
        "compute F0.1",
        "send F0 -> F1, microbatch 1",
        "wait B1 -> B0, microbatch 0",
        "compute B0.0",
        "post B1 -> B0, microbatch 1",
        "compute W0.0",
        "wait B1 -> B0, microbatch 1",
        "compute B0.1",
        "compute W0.1",
    ]
    assert text(programs[1]) == [
        "post F0 -> F1, microbatch 0",
        "wait F0 -> F1, microbatch 0",
        "compute F1.0",
        "post F0 -> F1, microbatch 1",
        "compute B1.0",
        "send B1 -> B0, microbatch 0",
        "wait F0 -> F1, microbatch 1",
        "compute F1.1",
        "compute B1.1",
        "send B1 -> B0, microbatch 1",
        "compute W1.0",
        "compute W1.1",
    ]
    prove(programs, schedule.placement)


def test_a_step_waits_for_sums_where_something_is_summed():
    program = lower(hand("F0.0 BW0.0", (0,)), ())
    forward, backward = parse_ops("F0.0 BW0.0")
    frozen = BucketUse(((forward, backward),), ())
    assert text(with_gradients(program, [[frozen]], [], False)[0])[-1] == "compute BW0.0"
    summed = text(with_gradients(program, [[frozen, once(None, backward)]], [], False)[0])
    assert summed[-2:] == ["sum over the replicas bucket 1", "wait for the sums over the replicas"]


def test_edges_within_a_rank_are_no_messages():
    schedule = hand("F0.0 F1.0 BW1.0 BW0.0", (0, 0))
    assert text(lower(schedule, CHAIN)[0]) == [
        "compute F0.0",
        "compute F1.0",
        "compute BW1.0",
        "compute BW0.0",
    ]


def test_a_fused_backward_takes_and_gives_the_edges_of_both_its_sections():
    edges = (*CHAIN, edge((F, 0), (W, 1)), edge((W, 1), (W, 0)))
    schedule = hand("F0.0 BW0.0\nF1.0 BW1.0", (0, 1))
    programs = lower(schedule, edges)
    assert text(programs[1]) == [
        "post F0 -> F1, microbatch 0",
        "post F0 -> W1, microbatch 0",
        "wait F0 -> F1, microbatch 0",
        "compute F1.0",
        "wait F0 -> W1, microbatch 0",
        "compute BW1.0",
        "send B1 -> B0, microbatch 0 and W1 -> W0, microbatch 0",
    ]
    prove(programs, schedule.placement)


def test_receives_are_posted_earlier_where_the_channel_is_used_in_another_order():
    """Rank 0 sends microbatch 0, then 1; rank 1 needs 1 first."""
    schedule = hand("F0.0 F0.1 BW0.1 BW0.0\nF1.1 BW1.1 F1.0 BW1.0", (0, 1), 2)
    programs = lower(schedule, CHAIN)
    assert text(programs[1])[:5] == [
        "post F0 -> F1, microbatch 0",
        "post F0 -> F1, microbatch 1",
        "wait F0 -> F1, microbatch 1",
        "compute F1.1",
        "compute BW1.1",
    ]
    prove(programs, schedule.placement)


def test_a_skip_connection_shares_the_channel():
    """Stage 2 lies on stage 1's rank, and its skip value is sent before the next microbatch's."""
    edges = (*chain([StageCost(1, 1, 1)] * 3).edges, edge((F, 0), (F, 2)))
    schedule = hand("F0.0 F0.1 BW0.0 BW0.1\nF1.0 F1.1 F2.0 BW2.0 F2.1 BW2.1 BW1.0 BW1.1", (0, 1, 1), 2)
    programs = lower(schedule, edges)
    posts = [str(i).removeprefix("post ") for i in programs[1] if isinstance(i, PostRecv)]
    assert posts == [f"F0 -> F{stage}, microbatch {j}" for j in (0, 1) for stage in (1, 2)]
    prove(programs, schedule.placement)


def test_two_edges_between_the_same_sections():
    with pytest.raises(ScheduleError, match="two edges from F0 to F1"):
        lower(hand("F0.0 BW0.0\nF1.0 BW1.0", (0, 1)), (*CHAIN, CHAIN[0]))


def test_lowering_checks_the_schedule():
    with pytest.raises(ScheduleError, match=r"rank 1 never runs B1\.0"):
        lower(hand("F0.0 BW0.0\nF1.0", (0, 1)), CHAIN)


def test_ranks_that_wait_for_each_other():
    schedule = hand("F0.0 BW0.0 F0.1 BW0.1\nF1.0 F1.1 BW1.0 BW1.1\nF2.0 F2.1 BW2.0 BW2.1", (0, 1, 2), 2)
    with pytest.raises(DeadlockError) as error:
        prove(lower(schedule, chain([StageCost(1, 1, 1)] * 3).edges), schedule.placement)
    assert str(error.value).splitlines() == [
        "the programs of the ranks block each other:",
        "  rank 0, before BW0.0: wait B1 -> B0, microbatch 0, from rank 1",
        "  rank 1, before F1.1: wait F0 -> F1, microbatch 1, from rank 0",
        "  rank 2, before F2.1: wait F1 -> F2, microbatch 1, from rank 1",
    ]


def test_a_rank_that_has_finished_is_said_to_have():
    programs = lower(hand("F0.0 BW0.0\nF1.0 BW1.0", (0, 1)), CHAIN)
    orphan = (*programs[1], Wait((Message(CHAIN[0], 9),)))
    with pytest.raises(DeadlockError) as error:
        prove((programs[0], orphan), (0, 1))
    assert str(error.value).splitlines()[1:] == [
        "  rank 0 has finished",
        "  rank 1, before its end: wait F0 -> F1, microbatch 9, from rank 0",
    ]


def test_a_receive_that_is_posted_too_late():
    """Waited for before it is posted: the rank blocks itself."""
    programs = lower(hand("F0.0 BW0.0\nF1.0 BW1.0", (0, 1)), CHAIN)
    post, wait, *rest = programs[1]
    with pytest.raises(
        DeadlockError, match=r"rank 1, before F1\.0: wait F0 -> F1, microbatch 0, from rank 0"
    ):
        prove((programs[0], (wait, post, *rest)), (0, 1))


def test_channels_whose_ends_disagree():
    schedule = hand("F0.0 F0.1 BW0.0 BW0.1\nF1.0 F1.1 BW1.0 BW1.1", (0, 1), 2)
    first, second = lower(schedule, CHAIN)
    posts = [position for position, i in enumerate(second) if isinstance(i, PostRecv)]
    swapped = list(second)
    swapped[posts[0]], swapped[posts[1]] = swapped[posts[1]], swapped[posts[0]]
    with pytest.raises(DeadlockError, match="message 0 from rank 0 to rank 1") as error:
        prove((first, tuple(swapped)), (0, 1))
    assert "rank 0 has 'send F0 -> F1, microbatch 0', rank 1 has 'post F0 -> F1, microbatch 1'" in str(
        error.value
    )
    with pytest.raises(DeadlockError, match="rank 1 has 'no post'"):
        prove((first, second[:1]), (0, 1))


# -- collectives --------------------------------------------------------------------------------------------

HEADS = """
F0.0 F2.0 F0.1 B2.0 W2.0 F2.1 BW0.0 B2.1 W2.1 BW0.1
F1.0 F3.0 B3.0 W3.0 BW1.0 F1.1 F3.1 B3.1 W3.1 BW1.1
"""


def head_edges() -> tuple[tuple[Edge, ...], tuple[Collective, ...]]:
    """Stages 0 and 1, and a head on each of the ranks 0 and 1."""
    f, b, heads = Phase.F, Phase.B, (2, 3)
    pairs = [((1, f), (h, f)) for h in heads] + [((h, b), (1, b)) for h in heads]
    pairs += [((2, f), (3, b)), ((3, f), (2, b))]
    edges = [Edge(Color(*one), Color(*other), seconds=0.1) for one, other in pairs]
    ends = {phase: tuple(Color(h, phase) for h in heads) for phase in (f, b)}
    return (*chain([StageCost(1, 1, 1)] * 2).edges, *edges), (
        Collective(CollectiveKind.BROADCAST, 0, (Color(1, f),), ends[f]),
        Collective(CollectiveKind.ALL_GATHER, 1, ends[f], ends[b]),
        Collective(CollectiveKind.REDUCE, 2, ends[b], (Color(1, b),)),
    )


def test_collectives_take_the_place_of_messages_and_are_joined_ahead():
    schedule = hand(HEADS, (0, 1, 0, 1), 2)
    edges, collectives = head_edges()
    programs = lower(schedule, edges, collectives)
    assert text(programs[0])[:12] == [
        "join broadcast F1 … -> F2 …, microbatch 0",
        "compute F0.0",
        "send F0 -> F1, microbatch 0",
        "collect broadcast F1 … -> F2 …, microbatch 0",
        "compute F2.0",
        "join all-gather F2 … -> B2 …, microbatch 0",
        "join broadcast F1 … -> F2 …, microbatch 1",
        "compute F0.1",
        "send F0 -> F1, microbatch 1",
        "collect all-gather F2 … -> B2 …, microbatch 0",
        "compute B2.0",
        "join reduce B2 … -> B1 …, microbatch 0",
    ]
    assert "collect reduce B2 … -> B1 …, microbatch 1" in text(programs[1])
    assert not any("broadcast" in line for line in text(programs[1]) if line.startswith("collect"))
    prove(programs, schedule.placement)


def test_a_collective_that_a_rank_joins_too_late():
    """Rank 1 wants the sum of a microbatch whose head rank 0 runs only behind what rank 1 gives later."""
    late = HEADS.replace("F2.0 F0.1 B2.0 W2.0 F2.1 BW0.0", "F0.1 BW0.0 F2.0 B2.0 W2.0 F2.1")
    schedule = hand(late, (0, 1, 0, 1), 2)
    with pytest.raises(
        DeadlockError, match=r"rank 1, before B3\.0: collect all-gather .* rank 0 has not joined"
    ):
        prove(lower(schedule, *head_edges()), schedule.placement)


def test_collectives_in_another_order_on_each_rank():
    """Of different kinds: they share a communicator."""
    schedule = hand(HEADS, (0, 1, 0, 1), 2)
    first, second = lower(schedule, *head_edges())
    joins = [at for at, i in enumerate(second) if "join broadcast" in str(i) or "join all-gather" in str(i)]
    changed = list(second)
    changed[joins[1]], changed[joins[2]] = second[joins[2]], second[joins[1]]
    with pytest.raises(DeadlockError, match=r"rank 0 has 'join all-gather .*rank 1 has 'join broadcast"):
        prove((first, tuple(changed)), schedule.placement)


#: Rank 1 computes F7.2 before B4.0, and rank 2 waits for that B before it gets to F8.1.
LATE = """
F0.0 F0.1 F0.2 F5.0 F6.0 F5.1 F6.1 F5.2 B6.0 W6.0 F6.2 B5.0 W5.0 B0.0 W0.0 B6.1 W6.1 B5.1 W5.1 B0.1 W0.1 B6.2 W6.2 B5.2 W5.2 B0.2 W0.2
F1.0 F1.1 F1.2 F4.0 F7.0 F4.1 F7.1 F4.2 F7.2 B7.0 W7.0 B4.0 W4.0 B1.0 W1.0 B7.1 W7.1 B4.1 W4.1 B1.1 W1.1 B7.2 B4.2 W7.2 W4.2 B1.2 W1.2
F2.0 F2.1 F2.2 F3.0 F3.1 F3.2 F8.0 B8.0 B3.0 B2.0 W3.0 W8.0 W2.0 F8.1 B8.1 B3.1 B2.1 W8.1 W3.1 F8.2 B8.2 W8.2 W2.1 B3.2 B2.2 W3.2 W2.2
"""  # noqa: E501


def test_a_broadcast_is_joined_before_an_op_that_waits_for_one_who_waits_for_it():
    schedule = hand(LATE, (0, 1, 2, 2, 1, 0, 0, 1, 2), 3)
    edges = with_output_shards(chain([StageCost(1, 1, 1)] * 6), 3, 1.0, 1, 0.0).edges
    f, b, heads = Phase.F, Phase.B, (6, 7, 8)
    ends = {phase: tuple(Color(h, phase) for h in heads) for phase in (f, b)}
    collectives = (
        Collective(CollectiveKind.BROADCAST, 0, (Color(5, f),), ends[f]),
        Collective(CollectiveKind.ALL_GATHER, 1, ends[f], ends[b]),
        Collective(CollectiveKind.REDUCE, 2, ends[b], (Color(5, b),)),
    )
    programs = lower(schedule, edges, collectives)
    prove(programs, schedule.placement)
    lines = text(programs[2])
    assert lines.index("join broadcast F5 … -> F6 …, microbatch 2") < lines.index(
        "wait B4 -> B3, microbatch 0"
    )
