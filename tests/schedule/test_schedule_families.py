"""The named schedules: their orders, their bubbles against the papers, their memory."""

import re
from pathlib import Path

import pytest
from marks import slow_except

from fxpipe.errors import LimitError, ScheduleError
from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.engine.arrays import schedule_arrays
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.families.weights import Gap, delay_weights, fill_bubbles
from fxpipe.schedule.ops import RankOps, order_text, parse_order
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.auto import search
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.vocabulary_costs import with_output_shards


def even(ranks: int, stages_per_rank: int = 1, times=(1.0, 1.0, 1.0), comm: float = 0.0) -> Costs:
    """Stages that cost 1/v of ``times``, memory in microbatches of a rank; a B frees nothing."""
    v = stages_per_rank
    forward, backward, weight = (time / v for time in times)
    return chain([StageCost(forward, backward, weight, 1 / v, 1 / v)] * (ranks * v), comm)


def run(name, ranks, microbatches, stages_per_rank=None, placement=None, limit=None, **costs) -> Timeline:
    table = even(ranks, stages_per_rank or FAMILIES[name].stages_per_rank, **costs)
    schedule = build(
        name,
        ranks=ranks,
        microbatches=microbatches,
        costs=table,
        stages_per_rank=stages_per_rank,
        placement=placement,
        memory_limit=limit,
    )
    return simulate(schedule, table)


def text(*arguments, **options) -> str:
    return order_text(run(*arguments, **options).schedule.order)


def lines(expected: str) -> str:
    return "\n".join(line.strip() for line in expected.strip().splitlines())


def test_order_of_gpipe():
    assert text("gpipe", 2, 3) == lines("""
        F0.0 F0.1 F0.2 BW0.0 BW0.1 BW0.2
        F1.0 F1.1 F1.2 BW1.0 BW1.1 BW1.2
    """)
    assert text("gpipe", 2, 2, 2, "v") == lines("""
        F0.0 F0.1 F3.0 F3.1 BW3.0 BW3.1 BW0.0 BW0.1
        F1.0 F1.1 F2.0 F2.1 BW2.0 BW2.1 BW1.0 BW1.1
    """)


def test_order_of_1f1b():
    assert text("1f1b", 3, 4) == lines("""
        F0.0 F0.1 F0.2 BW0.0 F0.3 BW0.1 BW0.2 BW0.3
        F1.0 F1.1 BW1.0 F1.2 BW1.1 F1.3 BW1.2 BW1.3
        F2.0 BW2.0 F2.1 BW2.1 F2.2 BW2.2 F2.3 BW2.3
    """)


def test_order_of_1f1b_with_fewer_microbatches_than_ranks():
    assert text("1f1b", 3, 1) == "F0.0 BW0.0\nF1.0 BW1.0\nF2.0 BW2.0"
    assert text("1f1b", 3, 2) == lines("""
        F0.0 F0.1 BW0.0 BW0.1
        F1.0 F1.1 BW1.0 BW1.1
        F2.0 BW2.0 F2.1 BW2.1
    """)


def test_order_of_interleaved_1f1b():
    assert text("1f1b", 2, 4, 2) == lines("""
        F0.0 F0.1 F2.0 F2.1 F0.2 BW2.0 F0.3 BW2.1 F2.2 BW0.0 F2.3 BW0.1 BW2.2 BW2.3 BW0.2 BW0.3
        F1.0 F1.1 F3.0 BW3.0 F3.1 BW3.1 F1.2 BW1.0 F1.3 BW1.1 F3.2 BW3.2 F3.3 BW3.3 BW1.2 BW1.3
    """)


def test_order_of_zb_h1():
    assert text("zb-h1", 3, 4) == lines("""
        F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3
        F1.0 F1.1 B1.0 F1.2 B1.1 W1.0 F1.3 B1.2 W1.1 B1.3 W1.2 W1.3
        F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 W2.0 F2.3 B2.3 W2.1 W2.2 W2.3
    """)


def test_order_of_zb_h1_in_v_placement():
    assert text("zb-h1", 2, 3, 2, "v") == lines("""
        F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 B3.1 W3.1 B0.0 W0.0 F3.2 B3.2 B0.1 W3.2 B0.2 W0.1 W0.2
        F1.0 F2.0 F1.1 F2.1 B2.0 W2.0 F1.2 B1.0 W1.0 F2.2 B2.1 B1.1 B2.2 B1.2 W2.1 W1.1 W2.2 W1.2
    """)


PAPER = [  # 2401.10241: p, m, F, B, W, Tc; 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
]


@pytest.mark.parametrize(("p", "m", "f", "b", "w", "comm", "classical", "h1", "h2", "_1p", "_2p"), PAPER)
def test_span_bubble_is_the_papers_to_four_decimals(p, m, f, b, w, comm, classical, h1, h2, _1p, _2p):
    assert round(run("1f1b", p, m, times=(f, b, w), comm=comm).span_bubble, 4) == classical
    timeline = run("zb-h1", p, m, times=(f, b, w), comm=comm)
    assert round(timeline.span_bubble, 4) == h1
    assert timeline.peak_memory == (p,) * p
    timeline = run("zb-h2", p, m, times=(f, b, w), comm=comm)
    assert round(timeline.span_bubble, 4) == h2
    assert timeline.peak_memory == (2 * p - 1,) * p


@pytest.mark.parametrize(
    ("m", "times", "comm", "bubble"),
    [  # per chunk, 2401.10241
        (48, (14.407, 14.380, 9.676), 1.610, 0.0697),
        (64, (14.412, 14.393, 9.688), 1.621, 0.0533),
        (128, (14.316, 14.306, 9.639), 1.619, 0.0274),
    ],
)
def test_zb_h1_in_v_placement_is_the_papers_zb_v(m, times, comm, bubble):
    timeline = run("zb-h1", 16, m, 2, "v", times=tuple(2 * time for time in times), comm=comm)
    assert round(timeline.span_bubble, 4) == bubble
    assert max(timeline.peak_memory) == 16


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (5, 20), (8, 16)])
def test_published_formulas(p, m):
    f, b, w, comm = 2.0, 1.75, 1.0, 0.0625
    work = m * (f + b + w)
    span = work + (p - 1) * (f + b + w) + 2 * comm * ((p - 1) * m / p + p - 2)
    assert run("1f1b", p, m, times=(f, b, w), comm=comm).span_bubble == pytest.approx(1 - work / span)
    span = work + (p - 1) * (f + b - w) + 4 * (p - 1) * comm
    assert run("zb-h1", p, m, times=(f, b, w), comm=comm).span_bubble == pytest.approx(1 - work / span)
    span = work + (p - 1) * (f + b - 2 * w) + 2 * (p - 1) * comm  # for m >= 2p
    assert run("zb-h2", p, m, times=(f, b, w), comm=comm).span_bubble == pytest.approx(1 - work / span)


@pytest.mark.parametrize("m", [8, 24, 64])
def test_two_chunks_a_rank_without_communication(m):
    """The interleaved bubble is 1/v of 1F1B's; F = B = W in V placement leaves none."""
    assert run("1f1b", 8, m, 2).span_bubble == pytest.approx(10.5 / (10.5 + 3 * m))
    assert run("zb-h1", 8, m, 2).span_bubble == pytest.approx(3.5 / (3.5 + 3 * m))
    if m >= 16:
        assert run("zb-h1", 8, m, 2, "v").span_bubble == pytest.approx(0, abs=1e-12)


def test_peak_memory():
    assert run("gpipe", 4, 6).peak_memory == (6, 6, 6, 6)
    assert run("1f1b", 4, 6).peak_memory == (4, 3, 2, 1)
    assert run("1f1b", 8, 24, 2).peak_memory == (11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5)
    assert max(run("1f1b", 8, 24, 2, "v").peak_memory) == 8
    assert run("zb-h1", 4, 6).peak_memory == (4, 4, 4, 4)
    assert run("zb-h1", 4, 2).peak_memory == (2, 2, 2, 2)
    assert run("zb-h1", 8, 24, 2).peak_memory == (8,) * 8
    assert run("zb-h1", 8, 24, 2, "v").peak_memory == (8,) * 8


NOT_SEARCHED = [name for name, family in FAMILIES.items() if not family.is_searched]
ONE_STAGE = [name for name, family in FAMILIES.items() if 1 in family.chunks_in("plain")]


@pytest.mark.parametrize("name", slow_except(ONE_STAGE, *NOT_SEARCHED))
def test_one_stage_a_rank_is_the_same_in_v_placement(name):
    assert run(name, 3, 4, 1, "v").schedule.order == run(name, 3, 4, 1).schedule.order


@pytest.mark.parametrize("name", slow_except(FAMILIES, *NOT_SEARCHED))
def test_one_rank_has_no_bubble(name):
    for stages_per_rank in (1, 2):
        for placement in ("plain", "v"):
            if stages_per_rank in FAMILIES[name].chunks_in(placement):
                assert run(name, 1, 3, stages_per_rank, placement).makespan_bubble == pytest.approx(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"name": "zb-h9"},
            r"unknown schedule 'zb-h9'\. Did you mean 'zb-h2'\? Known: gpipe, 1f1b, ",
        ),
        ({"ranks": 0}, "ranks is 0; it must be at least 1"),
        ({"microbatches": 0}, "microbatches is 0; it must be at least 1"),
        ({"stages_per_rank": -1}, "stages_per_rank is -1; it must be at least 1"),
        ({"ranks": 3}, "3 ranks of 1 stage each need the costs of 3 stages, not 2"),
        ({"placement": "x"}, "unknown placement 'x'; known: plain, v"),
        ({"name": "zb-v", "stages_per_rank": 1}, "zb-v has 2 stages per rank in v placement, not 1"),
        (
            {"name": "interleaved", "stages_per_rank": 1},
            "interleaved has at least 2 stages per rank in plain ",
        ),
        ({"memory_limit": 0}, "the memory limit of rank 0 is 0; it must be above 0"),
        ({"memory_limit": (2, 2, 2)}, "3 memory limits for 2 ranks"),
        (
            {"memory_limit": 0.9},
            "one microbatch needs 1 of memory on rank 0, and the limit is 0.9; .* keep is 1",
        ),
        ({"memory_limit": (2, 1)}, "zb-h1 needs 2 of memory on rank 1, and the limit is 1; .* keep is 2"),
    ],
)
def test_bad_input(changes, message):
    good = {"name": "zb-h1", "ranks": 2, "microbatches": 2, "costs": even(2)}
    with pytest.raises(ScheduleError, match=message):
        build(**{**good, **changes})


def test_order_of_dualpipe_v():
    assert text("dualpipe-v", 2, 4) == lines("""
        F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 F0.3 BW3.1 F3.2 BW0.0 BW3.2 F3.3 BW0.1 BW3.3 B0.2 W0.2 B0.3 W0.3
        F1.0 F2.0 F1.1 F2.1 F1.2 BW2.0 F2.2 BW1.0 F1.3 BW2.1 F2.3 BW1.1 BW2.2 BW1.2 B2.3 B1.3 W2.3 W1.3
    """)


def test_groups_of_gis():
    """Peaks of g(v - 1) + p chunks; fewer microbatches in a group hold less and wait longer."""
    large, small = run("gis", 8, 24, 2), run("gis", 8, 24, 2, limit=6)
    assert max(large.peak_memory) == 8
    assert large.span_bubble == pytest.approx(3.5 / 75.5)
    assert max(small.peak_memory) == 6
    assert small.span_bubble < 0.1111
    with pytest.raises(ScheduleError, match="the smallest limit that it can keep is 6"):
        run("gis", 8, 24, 2, limit=5)
    costs = even(8, 2)
    asked = build("gis", ranks=8, microbatches=24, costs=costs, group=6)
    assert max(simulate(asked, costs).peak_memory) == 7
    with pytest.raises(ScheduleError, match="gis: on 8 ranks it has groups of 4 to 8 microbatches, not 3"):
        build("gis", ranks=8, microbatches=24, costs=costs, group=3)


def test_gis_takes_the_best_group_that_fits():
    """A larger group need not be the faster one: more memory must not cost time."""
    table = chain([StageCost(1.0, 1.3, 0.6, 0.5, 0.25)] * 10, 0.2)
    make = {"ranks": 5, "microbatches": 11, "costs": table}
    spans = [simulate(build("gis", memory_limit=limit / 4, **make), table).span for limit in range(16, 24)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[-1]
    assert spans[-1] < simulate(build("gis", group=5, **make), table).span


def test_v_placement_has_two_stages_a_rank():
    with pytest.raises(ScheduleError, match="zb-h1 has 1 or 2 stages per rank in v placement, not 3"):
        run("zb-h1", 2, 2, 3, "v")


FB_ORDER = parse_order("F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1")


def test_lag():
    assert order_text(delay_weights(FB_ORDER, lambda rank: rank)) == lines("""
        F0.0 F0.1 B0.0 W0.0 B0.1 W0.1
        F1.0 B1.0 F1.1 B1.1 W1.0 W1.1
    """)


def filled(fb_order: RankOps, costs: Costs, chunks: int, gap: Gap) -> list[str]:
    """Per rank, for two microbatches in two stages."""
    orders = fill_bubbles(fb_order, schedule_arrays(costs, (0, 1), 2), chunks)
    order = dict(zip(Gap, orders, strict=True))[gap]
    return order_text(order.ops).splitlines()


@pytest.mark.parametrize(
    ("gap", "first"),
    [  # rank 0 waits a half for B0.1, where a W is 1 long
        (Gap.ANY, "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1"),
        (Gap.WHOLE, "F0.0 F0.1 B0.0 B0.1 W0.0 W0.1"),
        (Gap.BALANCED, "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1"),
    ],
)
def test_fill_by_gap(gap, first):
    costs = chain([StageCost(1.0, 1.5, 1.0, 1, 1), StageCost(1.0, 1.0, 1.0, 1, 1)])
    assert filled(FB_ORDER, costs, 2, gap)[0] == first


@pytest.mark.parametrize(
    ("chunks", "first"), [(1, "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1"), (2, "F0.0 B0.0 F0.1 W0.0 B0.1 W0.1")]
)
def test_fill_runs_w_before_the_next_f_where_a_rank_holds_enough(chunks, first):
    """Rank 0 has a bubble for W0.0 only after F0.1."""
    fb_order = parse_order("F0.0 B0.0 F0.1 B0.1\nF1.0 B1.0 F1.1 B1.1")
    costs = chain([StageCost(1, 1, 1)] * 2)
    assert filled(fb_order, costs, chunks, Gap.WHOLE)[0] == first


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "1f1b-v"])
def test_joined_backward_asks_for_no_more_memory_than_it_takes(name):
    """Between B and W such a stage would hold more than from F to B; a BW holds nothing between them."""
    chunks = FAMILIES[name].stages_per_rank
    costs = chain([StageCost(1, 1, 1, 4, 9)] * (2 * chunks), 0.0)

    def made(limit):
        return build(name, ranks=2, microbatches=4, costs=costs, memory_limit=limit)

    peak = max(simulate(made(None), costs).peak_memory)
    assert max(simulate(made(peak), costs).peak_memory) == peak
    with pytest.raises(ScheduleError, match=f"the smallest limit that it can keep is {peak:g}"):
        made(0.99 * peak)


def test_auto_names_the_limit_of_a_joined_backward():
    costs = chain([StageCost(1, 1, 1, 4, 9)] * 2, 0.0)  # 1f1b holds 8, and one B apart from its W 9
    problem = Problem(2, 4, 1, "plain", costs, per_rank(7.0, 2))
    with pytest.raises(LimitError, match="the smallest that one can keep is 8,"):
        search([problem])
    assert max(search([problem.limited((8.0, 8.0))], effort=0.01).timeline.peak_memory) == 8


def test_the_table_of_the_page_has_each_family():
    page = (Path(__file__).parents[2] / "docs/schedules.md").read_text()
    rows = "".join(re.findall(r"^\| .*", page, re.MULTILINE))
    assert [name for name in FAMILIES if f"`{name}`" not in rows] == []


@pytest.mark.parametrize(("barriers", "times"), [(1, (4.0, 0.0, 2.0)), (2, (2.0, 2.0, 2.0))])
def test_a_shard_of_the_output_layer_spends_its_time_in_thirds(barriers, times):
    """Logits, and the gradients of x and of the table: with one barrier the second is made with the first."""
    costs = with_output_shards(even(2), 2, 6.0, barriers, 0.0)
    assert [(c.forward, c.backward, c.weight) for c in costs.stages[2:]] == [times] * 2
