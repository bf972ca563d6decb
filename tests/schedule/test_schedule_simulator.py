"""Start and end times, bubbles, memory curves and bounds of small schedules, by hand."""

import pytest

from fxpipe.errors import DeadlockError, ScheduleError
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import Costs, Edge, StageCost, chain
from fxpipe.schedule.ops import Color, Phase, Schedule, parse_order
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate


def hand(text: str, placement: tuple[int, ...], microbatches: int = 1) -> Schedule:
    return Schedule("hand", placement, microbatches, parse_order(text))


def spans(timeline) -> list[list[tuple[str, float, float]]]:
    return [[(str(op), start, end) for op, start, end in rank] for rank in timeline.spans]


def test_times_of_two_ranks_with_communication():
    timeline = simulate(
        hand("F0.0 F0.1 BW0.0 BW0.1\nF1.0 BW1.0 F1.1 BW1.1", (0, 1), 2),
        chain([StageCost(1, 2, 1), StageCost(2, 2, 1)], seconds=0.5),
    )
    assert spans(timeline) == [
        [("F0.0", 0, 1), ("F0.1", 1, 2), ("BW0.0", 7, 10), ("BW0.1", 12, 15)],
        [("F1.0", 1.5, 3.5), ("BW1.0", 3.5, 6.5), ("F1.1", 6.5, 8.5), ("BW1.1", 8.5, 11.5)],
    ]
    assert timeline.seconds == 15
    assert timeline.busy == (8, 10)
    assert timeline.span_bubble == pytest.approx(5 / 15)
    assert timeline.makespan_bubble == pytest.approx(5 / 15)
    assert [str(op) for op, _, _ in timeline.critical_path] == (
        ["F0.0", "F1.0", "BW1.0", "F1.1", "BW1.1", "BW0.1"]
    )


def test_split_backward_sends_before_the_weight_gradient():
    costs = chain([StageCost(1, 1, 1)] * 2)
    split = simulate(hand("F0.0 B0.0 W0.0\nF1.0 B1.0 W1.0", (0, 1)), costs)
    assert spans(split)[0] == [("F0.0", 0, 1), ("B0.0", 3, 4), ("W0.0", 4, 5)]
    fused = simulate(hand("F0.0 B0.0 W0.0\nF1.0 BW1.0", (0, 1)), costs)
    assert spans(fused)[0] == [("F0.0", 0, 1), ("B0.0", 4, 5), ("W0.0", 5, 6)]


def test_span_bubble_leaves_the_stagger_of_the_ranks_out():
    timeline = simulate(
        hand("F0.0 B0.0 W0.0\nF1.0 B1.0 W1.0", (0, 1)), chain([StageCost(1, 1, 1), StageCost(1, 0.5, 4)])
    )
    assert timeline.seconds == 6.5
    assert timeline.makespan_bubble == pytest.approx(1 / 6.5)
    assert timeline.span_bubble == 0


def test_an_edge_takes_time_between_ranks_only():
    costs = chain([StageCost(1, 1, 1)] * 2, seconds=5)
    assert simulate(hand("F0.0 F1.0 BW1.0 BW0.0", (0, 0)), costs).seconds == 6


def test_a_skip_connection_delays_the_stage_that_uses_it():
    plain = chain([StageCost(1, 1, 1)] * 3)
    skip = Edge(Color(0, Phase.F), Color(2, Phase.F), seconds=4)
    schedule = build("zb-h1", ranks=3, microbatches=1, costs=plain)
    assert simulate(schedule, plain).spans[2][0].start == 2
    late = simulate(schedule, Costs(plain.stages, (*plain.edges, skip)))
    assert late.spans[2][0].start == 5
    assert late.lower_bound == lower_bound(plain, (0, 1, 2), 1) + 3


def test_what_a_weight_gradient_needs_arrives_with_b():
    plain = chain([StageCost(1, 1, 1)] * 2)
    edge = Edge(Color(1, Phase.B), Color(0, Phase.W), seconds=2)
    costs = Costs(plain.stages, (edge, *plain.edges))
    split = simulate(hand("F0.0 B0.0 W0.0\nF1.0 B1.0 W1.0", (0, 1)), costs)
    assert [span.start for span in split.spans[0]] == [0, 5, 6]
    fused = simulate(hand("F0.0 BW0.0\nF1.0 B1.0 W1.0", (0, 1)), costs)
    assert [span.start for span in fused.spans[0]] == [0, 5]


def test_memory_steps():
    costs = chain([StageCost(1, 1, 1, saved_activations=10, saved_for_weight=4)])
    timeline = simulate(hand("F0.0 F0.1 B0.0 B0.1 W0.0 W0.1", (0,), 2), costs)
    assert timeline.memory == (((0, 10), (1, 20), (3, 14), (4, 8), (5, 4), (6, 0)),)
    assert timeline.peak_memory == (20,)
    fused = simulate(hand("F0.0 BW0.0 F0.1 BW0.1", (0,), 2), costs)
    assert fused.memory == (((0, 10), (3, 0), (3, 10), (6, 0)),)


def test_lower_bound():
    costs = chain([StageCost(1, 1, 1), StageCost(2, 2, 2)], seconds=0.5)
    # One microbatch: F0 F1 B1 B0 W0 (or W1) with two transfers.
    assert lower_bound(costs, (0, 1), 1) == 1 + 2 + 2 + 1 + 1 + 1
    # Rank 1 starts after F0 and its transfer; after its last op, a W, nothing need follow.
    assert lower_bound(costs, (0, 1), 10) == 1.5 + 60


def test_edges_in_a_cycle():
    costs = chain([StageCost(1, 1, 1)] * 2)
    back = Edge(Color(1, Phase.B), Color(0, Phase.F))
    with pytest.raises(ScheduleError, match=r"form a cycle: .*F0"):
        lower_bound(Costs(costs.stages, (*costs.edges, back)), (0, 1), 1)


def test_an_order_that_cannot_progress():
    with pytest.raises(DeadlockError) as error:
        simulate(
            hand("F0.0 BW0.0 F0.1 BW0.1\nF1.0 F1.1 BW1.0 BW1.1\nF2.0 BW2.0 F2.1 BW2.1", (0, 1, 2), 2),
            chain([StageCost(1, 1, 1)] * 3),
        )
    assert str(error.value).splitlines() == [
        "schedule hand cannot progress:",
        "  rank 0, at BW0.0, waits for B1.0 of rank 1",
        "  rank 1, at F1.1, waits for F0.1 of rank 0",
        "  rank 2, at F2.1, waits for F1.1 of rank 1",
    ]


def test_a_schedule_that_misses_an_op():
    with pytest.raises(ScheduleError, match=r"schedule hand: rank 1 never runs B1\.0"):
        simulate(hand("F0.0 BW0.0\nF1.0", (0, 1)), chain([StageCost(1, 1, 1)] * 2))


def test_costs_of_another_number_of_stages():
    with pytest.raises(ScheduleError, match="costs of 3 stages given for 2 placed stages"):
        simulate(hand("F0.0 BW0.0\nF1.0 BW1.0", (0, 1)), chain([StageCost(1, 1, 1)] * 3))


def test_an_edge_of_a_stage_that_is_not_there():
    costs = Costs((StageCost(1, 1, 1),) * 2, (Edge(Color(0, Phase.F), Color(7, Phase.F)),))
    with pytest.raises(ScheduleError, match="an edge names stage 7, but there are 2 stages"):
        simulate(hand("F0.0 BW0.0\nF1.0 BW1.0", (0, 1)), costs)


@pytest.mark.slow
def test_64_ranks_with_1024_microbatches():
    costs = chain([StageCost(1, 1, 1, 1, 1)] * 64, seconds=0.1)
    schedule = build("1f1b", ranks=64, microbatches=1024, costs=costs)
    timeline = simulate(schedule, costs)
    assert timeline.peak_memory[0] == 64
