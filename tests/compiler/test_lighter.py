"""Cuts that move to where fewer values cross, on a chain by hand."""

import pytest

from fxpipe.compiler.choice.refine_cuts import LighterCuts
from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.devices.known_devices import device_named
from fxpipe.partition.chain import Chain, Crossing, CutChain
from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.build import schedule_of

CLUSTER = Cluster((device_named("H100 SXM"),) * 2)
MILLI = 1e-3
SECONDS = [1 * MILLI, 2 * MILLI, 2 * MILLI, 1 * MILLI]
VALUES = [1.0, 2.0, 1.0, 1.0]  # the second op is inside a module
MODULES = [0.0, 1.0, 0.0, 0.0]


def moved(
    cut: int, bytes: list[float], head: float = 0.0, values: list[float] = VALUES
) -> tuple[int, ...] | None:
    """head: more seconds of the last op, in each phase."""
    forward = [*SECONDS[:-1], SECONDS[-1] + head]
    crossing = Crossing(values, bytes, MODULES)
    found = CutChain(Chain(forward, [2 * f for f in forward], crossing, {}, crossing.bytes, {}), (cut,))
    own = [sum(forward[: cut + 1]), sum(forward[cut + 1 :])]
    seconds, _ = CLUSTER.message_seconds(bytes[cut], 0, 1)
    costs = chain([StageCost(f, f, f) for f in own], seconds, bytes[cut])
    problem = Problem(2, 4, 1, "plain", costs, per_rank(None, 2))
    ops = schedule_of("zb-h1", problem, None).order
    return LighterCuts(found, 0, problem, ops, CLUSTER).moved()


def test_a_cut_stays_where_no_fewer_values_cross():
    assert moved(0, [1e6] * 4) is None


def test_a_cut_stays_where_a_stage_would_delay_the_step():
    assert moved(1, [1e3, 2e3, 1e3, 1e3]) is None


@pytest.mark.parametrize("heavy", [1e10, 1e12])
def test_a_cut_moves_where_its_message_takes_longer_than_what_moves(heavy):
    assert moved(1, [1e3, heavy, 1e3, 1e3]) in [(0,), (2,)]


def test_a_cut_moves_into_the_idle_time_of_the_shorter_stage():
    assert moved(1, [1e3, 2e3, 1e3, 1e3], head=9 * MILLI) == (2,)


def test_a_cut_of_as_many_bytes_moves_to_a_module_s_border():
    """Also where that is the only gain: the programs get shorter."""
    assert moved(1, [1e3] * 4, head=9 * MILLI, values=[1.0] * 4) == (2,)
    assert moved(1, [1e3] * 4, values=[1.0] * 4) is None  # it would delay the step
