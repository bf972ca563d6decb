"""Executions of lowered programs on hosts and devices: they end, and no two accesses race."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from executions_campaign import SHARES, VOCABULARIES, cases, check
from on_device import OnDevice
from races import DividesAtOnce, last_gradients, races
from test_schedule_lowering import HEADS, hand, head_edges

from fxpipe.schedule.bucket_use import once
from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.lowering.channels import in_rounds
from fxpipe.schedule.lowering.deadlock import connections_of, prove, stuck_at
from fxpipe.schedule.lowering.execution import Rank
from fxpipe.schedule.lowering.instructions import (
    AllReduceGradient,
    Compute,
    Programs,
    ReduceGradients,
    Wait,
    WaitCollective,
    WaitGradients,
)
from fxpipe.schedule.lowering.lower import lower, with_gradients
from fxpipe.schedule.offload.memory_pool import pools
from fxpipe.schedule.ops import Direction, Phase, Schedule, Transfer
from fxpipe.schedule.search.build import build

MICROBATCHES = (1, 2, 3, 4, 8, 16)
RANKS = (2, 3, 4, 8)
#: Ranks and microbatches: m < p, m = p and m > p.
SIZES = [(3, 2), (2, 4), (4, 3), (3, 8)]


def programs_of(name, ranks, microbatches):
    """The lowered programs of a family with its default stages and placement."""
    costs = chain([StageCost(1, 1, 1, 1, 0.5)] * (ranks * FAMILIES[name].stages_per_rank), 0.1, 1)
    schedule = build(name, ranks=ranks, microbatches=microbatches, costs=costs, effort=0.01)
    return lower(schedule, costs.edges), schedule.placement


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [pytest.param(k, id=str(each), marks=[pytest.mark.variation] * (k < 3)) for k, each in enumerate(SIZES)],
)
def test_every_family_and_placement_ends_without_races(size):
    """Of every second one another choice of what else there is; ``executions_campaign.py`` runs all."""
    ranks, microbatches = SIZES[size]
    choices = len(VOCABULARIES) * 2 * len(SHARES)
    every = list(cases([ranks], [microbatches]))
    taken = every[size % 2 * choices + size :: 2 * choices + 1]
    found = {case: check(case) for case in taken}
    assert {case: races for case, races in found.items() if races} == {}
    assert len([races for races in found.values() if races is not None]) >= 15


def test_collectives_end_without_races():
    schedule = hand(HEADS, (0, 1, 0, 1), 2)
    edges, collectives = head_edges()
    programs = lower(schedule, edges, collectives)
    prove(programs, schedule.placement)
    assert races(programs, schedule.placement) == []


@pytest.mark.parametrize("kind", [Wait, WaitCollective])
def test_what_is_read_without_a_wait_races(kind):
    schedule = hand(HEADS, (0, 1, 0, 1), 2)
    programs = lower(schedule, *head_edges())
    for rank, program in enumerate(programs):
        for at, wait in enumerate(program):
            if isinstance(wait, kind):
                changed = (*programs[:rank], program[:at] + program[at + 1 :], *programs[rank + 1 :])
                found = races(changed, schedule.placement)
                assert {a.rank for a, _ in found} == {rank}, str(wait)


def test_what_ends_on_cpus_ends_on_devices():
    """The proof tries CPUs alone.  Of programs with instructions out of order."""
    draw, found = random.Random(5), Counter()
    for name, ranks, microbatches in product(("1f1b", "zb-h1", "zb-v"), (2, 3), (2, 3)):
        programs, placement = programs_of(name, ranks, microbatches)
        connections = connections_of(programs, placement)
        for _ in range(12):
            edited = list(map(list, programs))
            for own in edited:
                for _ in range(draw.randint(0, 2)):
                    own.insert(draw.randrange(len(own)), own.pop(draw.randrange(len(own))))
            ends = [stuck_at(edited, placement, connections, rank) is None for rank in (Rank, OnDevice)]
            found[tuple(ends)] += 1
    assert found[True, False] == 0
    assert min(found[True, True], found[False, False]) > 5, found


# -- faults of backends, each put back ----------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("ranks", RANKS)
def test_channels_that_connect_at_their_first_use_block_gpipe(ranks, microbatches):
    programs, placement = programs_of("gpipe", ranks, microbatches)
    assert stuck_at(programs, placement, [[]] * ranks, OnDevice) is not None
    assert stuck_at(programs, placement, connections_of(programs, placement), OnDevice) is None


def test_collectives_that_connect_at_their_first_use_block():
    schedule = hand(HEADS, (0, 1, 0, 1), 2)
    programs = lower(schedule, *head_edges())
    connections = connections_of(programs, schedule.placement)
    channels = [[what for what in own if isinstance(what, tuple)] for own in connections]
    assert stuck_at(programs, schedule.placement, channels, OnDevice) is not None
    assert stuck_at(programs, schedule.placement, connections, OnDevice) is None


def test_ranks_that_connect_in_different_orders_block():
    programs, placement = programs_of("1f1b", 3, 2)
    connections = [list(own) for own in connections_of(programs, placement)]
    connections[1].reverse()
    assert stuck_at(programs, placement, connections, OnDevice) is not None


class SendsWait(OnDevice):
    """Ops wait for the sends before them."""

    def message(self, channel, sends, number=1):
        over = super().message(channel, sends, number)
        if sends:
            self.wait(over)
        return over


def test_ops_that_wait_for_the_sends_before_them_block():
    """What a thread that waits for sends does on a GPU, whose compute stream is that of all threads."""
    programs, placement = programs_of("zb-v", 4, 8)
    assert stuck_at(programs, placement, rank=SendsWait) is not None
    assert stuck_at(programs, placement, rank=OnDevice) is None


class Loads(OnDevice):
    """The kernels of a section are loaded when it first runs, for which the driver waits until all that was
    started on the device is over."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.loaded = set()

    def run(self, position, instruction):
        if isinstance(instruction, Compute):
            section = instruction.op.stage, instruction.op.kind
            if section not in self.loaded:
                self.loaded.add(section)
                self.position = position
                self.host = self.host_node([self.host, *self.tails.values()])
        super().run(position, instruction)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("1f1b", 4, 1), ("dualpipe-v", 4, 4)])
def test_kernels_that_are_loaded_in_the_step_block(name, ranks, microbatches):
    """The driver waits for the receives that are posted ahead; a dry run loads them before."""
    programs, placement = programs_of(name, ranks, microbatches)
    assert stuck_at(programs, placement, rank=Loads) is not None
    assert stuck_at(programs, placement, rank=OnDevice) is None


class OneQueue(OnDevice):
    """The streams of a rank share one queue of the device, in the order in which its host started kernels;
    the first that may not begin holds up those behind it."""

    queue = ()

    def kernel(self, stream, **options):
        over = super().kernel(stream, **options)
        begun, *_ = self.graph.before[over]
        self.graph.before[begun] += self.queue
        self.queue = (begun,)
        return over


class TwoKernels(OneQueue):
    """Each message has two kernels."""

    def message(self, channel, sends, number=1):
        return [super(TwoKernels, self).message(channel, sends) for _ in range(2 * number)][-1]


def test_two_kernels_a_message_block_in_one_queue():
    programs, placement = programs_of("1f1b", 4, 8)
    assert stuck_at(programs, placement, rank=OneQueue) is None
    assert stuck_at(programs, placement, rank=TwoKernels) is not None


def test_gradients_that_are_divided_while_they_are_sent_race():
    """Three ranks hold the parameter: the first sends its sum to two others."""
    programs, placement = programs_of("1f1b", 3, 2)
    programs = with_gradients(programs, [[]] * 3, [AllReduceGradient("weight", (0, 1, 2))], True)
    assert races(programs, placement) == []
    found = races(programs, placement, rank=DividesAtOnce)
    assert {(a.rank, a.storage) for a, _ in found} == {(0, ("gradient", "weight"))}
    assert {str(b.what) for _, b in found} == {"divide the gradients"}


def with_sums(programs: Programs) -> Programs:
    """Programs that sum their gradients over replicas."""
    ops = ([i.op for i in program if isinstance(i, Compute)] for program in programs)
    buckets = [[once(None, op) for op in last_gradients(own)] for own in ops]
    return with_gradients(programs, buckets, [], False)


def test_sums_over_replicas_race_with_nothing():
    programs, placement = programs_of("interleaved", 2, 4)
    programs = with_sums(programs)
    assert [sum(isinstance(i, ReduceGradients) for i in program) for program in programs] == [2, 2]
    assert races(programs, placement) == []


def test_a_bucket_summed_before_its_last_gradient_races():
    programs, placement = programs_of("interleaved", 2, 4)
    first, second = with_sums(programs)
    at = first.index(ReduceGradients(1))
    last = max(k for k, i in enumerate(first[:at]) if isinstance(i, Compute))
    early = (*first[:last], first[at], *first[last:at], *first[at + 1 :])
    found = races((early, second), placement)
    assert {(a.rank, a.storage) for a, _ in found} == {(0, ("bucket", 1))}


def test_an_optimizer_that_does_not_wait_for_the_sums_races():
    programs, placement = programs_of("1f1b", 2, 4)
    first, second = with_sums(programs)
    found = races((first, tuple(i for i in second if i != WaitGradients())), placement)
    assert {(a.rank, a.storage) for a, _ in found} == {(1, ("bucket", 0))}


# -- transfers ----------------------------------------------------------------------------------------------


def offloading() -> Schedule:
    """Two microbatches one after the other, whose activations may take the same place of the pool."""
    out, back = Direction.OUT, Direction.IN
    transfers = (
        Transfer(out, 0, 0, Phase.B, 1, 2),
        Transfer(back, 0, 0, Phase.B, 3, 4),
        Transfer(out, 0, 1, Phase.B, 6, 7),
        Transfer(back, 0, 1, Phase.B, 8, 9),
    )
    order = (
        "F0.0 F1.0 F1.1 BW1.0 BW0.0 F0.1 F2.0 F2.1 BW2.0 BW0.1 BW1.1 BW2.1 F0.2 F1.2 F2.2 BW2.2 BW1.2 BW0.2"
    )
    return replace(hand(order, (0, 0, 0), 3), transfers=transfers)


def places(schedule: Schedule, offsets) -> list[dict]:
    """Per rank and activation the parts of the pool between all beginnings and ends."""
    cuts = sorted({edge for at, size in offsets.values() for edge in (at, at + size)})
    parts = list(pairwise(cuts))
    return [
        {name: [p for p in parts if at <= p[0] < at + size] for name, (at, size) in offsets.items()}
    ] * schedule.ranks


def test_places_of_the_pool_are_used_again_without_races():
    schedule = offloading()
    programs = lower(schedule, chain([StageCost(1, 1, 1)] * 3).edges)
    (pool,) = pools(schedule, lambda _: 512)
    offsets = {activation: (at, 512) for activation, at in pool.offsets.items()}
    assert len({at for at, _ in offsets.values()}) == 1, "the second is offloaded after the first is back"
    assert races(programs, schedule.placement, places(schedule, offsets)) == []


def test_one_place_for_two_activations_at_a_time_is_a_race():
    schedule = offloading()
    early = replace(schedule.transfers[2], begin=schedule.transfers[1].begin, end=9)
    moved = replace(schedule, transfers=(*schedule.transfers[:2], early, schedule.transfers[3]))
    programs = lower(schedule, chain([StageCost(1, 1, 1)] * 3).edges)
    offsets = {t.activation: (0, 512) for t in moved.transfers}
    first, *rest = programs[0]
    begins = [i for i in rest if str(i).startswith("begin")]
    # The second goes out right behind the first, and takes its place before it is back.
    order = [i for i in rest if i is not begins[2]]
    at = order.index(begins[1])
    swapped = ((first, *order[:at], begins[2], *order[at:]),)
    found = races(swapped, schedule.placement, places(schedule, offsets))
    assert {a.storage for a, _ in found} == {("pool", (0, 512))}


def test_channels_connect_in_rounds():
    """Each channel in the first round in which neither of its ranks has another one."""
    both_ways = [(a, b) for a in range(8) for b in (a - 1, a + 1) if 0 <= b < 8]
    order = in_rounds(both_ways)
    assert sorted(order) == sorted(both_ways)
    rounds, busy = 1, set()
    for channel in order:
        if busy.intersection(channel):
            rounds, busy = rounds + 1, set()
        busy.update(channel)
    assert rounds <= 5
