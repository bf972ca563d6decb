"""The choice of cuts in a chain of costs: balance first, then few bytes."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import fxpipe
from fxpipe.errors import PartitionError
from fxpipe.partition.cuts import SLACK, choose_cuts


def parts(seconds: Sequence[float], cuts: Sequence[int]) -> list[float]:
    bounds = [0, *(c + 1 for c in cuts), len(seconds)]
    return [sum(seconds[a:b]) for a, b in itertools.pairwise(bounds)]


def brute_force(seconds: Sequence[float], bytes: Sequence[float], stages: int) -> list[tuple[int, ...]]:
    """All ways to cut where it is allowed."""
    places = [i for i in range(len(seconds) - 1) if bytes[i] != math.inf]
    return list(itertools.combinations(places, stages - 1))


COSTS = st.one_of(st.integers(0, 6).map(float), st.floats(0.01, 10).map(lambda x: round(x, 3)))
SIZES = st.one_of(st.integers(0, 8).map(float), st.just(math.inf))


@st.composite
def chains(draw) -> tuple[list[float], list[float], int]:
    length = draw(st.integers(1, 11))
    seconds = draw(st.lists(COSTS, min_size=length, max_size=length))
    return seconds, draw(st.lists(SIZES, min_size=length, max_size=length)), draw(st.integers(1, 5))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(chains())
@example(([1.0, 1.0, 1.0, 1.0], [5.0, math.inf, 5.0, 0.0], 3))
@example(([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], 2))  # nothing costs anything
@example(([0.0, 5.0, 0.0], [1.0, 2.0, 1.0], 3))
@example(([1.0, 9.0, 1.0, 1.0], [3.0, 1.0, 0.0, 0.0], 4))  # one position decides the largest stage
@example(([0.0, 0.0, 0.0, 4.0], [1.0, 1.0, 1.0, 0.0], 3))
def test_cuts_are_balanced_and_then_light(chain):
    seconds, bytes, stages = chain
    allowed = brute_force(seconds, bytes, stages)
    if not allowed:
        with pytest.raises(PartitionError, match="stages"):
            choose_cuts(seconds, bytes, stages)
        return
    cuts = choose_cuts(seconds, bytes, stages)
    assert cuts in allowed
    smallest = min(max(parts(seconds, c)) for c in allowed)
    rounding = 1e-5 * smallest + 1e-12
    assert max(parts(seconds, cuts)) <= smallest * (1 + SLACK) + rounding

    def moved(cuts):
        return sum(bytes[c] for c in cuts)

    # Just below the limit, so that what lies on it may count either way.
    limit = max(smallest, smallest * (1 + SLACK) - rounding)
    within = [c for c in allowed if max(parts(seconds, c)) <= limit]
    assert moved(cuts) <= min(map(moved, within))

    def squares(cuts):
        return sum((2 - k / stages) * part**2 for k, part in enumerate(parts(seconds, cuts)))

    alike = [c for c in within if math.isclose(moved(c), moved(cuts), rel_tol=1e-13)]
    assert not alike or squares(cuts) <= min(map(squares, alike)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("layers", "head", "even"), [(16, 6.0, [2, 2, 3, 3, 3, 3]), (18, 9.0, [2, 3, 3, 3, 3, 4])]
)
def test_the_layers_before_a_large_head_are_on_all_ranks_alike(layers: int, head: float, even: list[int]):
    """Many cuts have no stage larger than the head; the first ranks hold more microbatches than the last."""
    seconds, bytes = [*[0.2, 0.3, 0.5] * layers, head, 0.4], [*[2.0, 3.0, 1.0] * layers, 64.0, 0.0]
    assert parts(seconds, choose_cuts(seconds, bytes, 8)) == pytest.approx([*even, head, 0.4])
    first, *_, last = parts(seconds, choose_cuts(seconds, bytes, 8, ranks=[0, 1, 2, 3, 3, 2, 1, 0]))
    assert first + last <= head * (1 + SLACK)


def test_within_the_slack_fewer_bytes_win():
    assert choose_cuts([1.0] * 100 + [0.5] + [1.0] * 100, [9.0] * 101 + [1.0] + [9.0] * 99, 2) == (101,)
    assert choose_cuts([1.0] * 100 + [0.5] + [1.0] * 100, [9.0] * 110 + [1.0] + [9.0] * 90, 2) != (110,)


def test_one_stage_is_not_cut():
    assert choose_cuts([1.0, 2.0], [math.inf, math.inf], 1) == ()
    assert choose_cuts([1.0], [0.0], 1) == ()


def test_the_end_is_no_place_to_cut():
    with pytest.raises(PartitionError, match="into 1 stage at most, and 2 are asked for"):
        choose_cuts([1.0, 1.0], [math.inf, 0.0], 2)


def test_many_positions_are_cut_quickly():
    """48 layers have some ten thousand ops; quadratic work would take minutes."""
    generator = torch.Generator().manual_seed(0)
    seconds = torch.rand(40_000, generator=generator).tolist()
    bytes = torch.randint(1, 9, (40_000,), generator=generator).tolist()
    cuts = choose_cuts(seconds, bytes, 16)
    assert max(parts(seconds, cuts)) <= sum(seconds) / 16 * (1 + SLACK) * 1.001
    assert all(bytes[c] == 1 for c in cuts)


def best_largest_part(seconds: Sequence[float], stages: int) -> float:
    """Of all contiguous partitions, by dynamic programming over every position."""
    total = [0.0, *itertools.accumulate(seconds)]
    best = total[1:]  # of the first i + 1 positions in one part
    for _ in range(1, stages):
        best = [
            min((max(best[j], total[i + 1] - total[j + 1]) for j in range(i)), default=math.inf)
            for i in range(len(seconds))
        ]
    return best[-1]


def test_dynamic_programming_agrees_with_brute_force():
    seconds = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    for stages in (1, 2, 3, 4):
        everywhere = brute_force(seconds, [0.0] * len(seconds), stages)
        assert best_largest_part(seconds, stages) == min(max(parts(seconds, c)) for c in everywhere)


V = (0, 1, 1, 0)


def loads(seconds: Sequence[float], cuts: Sequence[int], ranks: Sequence[int]) -> list[float]:
    costs = parts(seconds, cuts)
    return [sum(c for c, rank in zip(costs, ranks, strict=True) if rank == own) for own in set(ranks)]


def test_a_rank_with_an_op_larger_than_other_stages_gets_less_of_the_rest():
    seconds = [1.0] * 10 + [6.0]
    assert loads(seconds, choose_cuts(seconds, [1.0] * 11, 4, ranks=V), V) == [8.0, 8.0]


@settings(max_examples=50, deadline=None)
@given(chains())
@example(([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], 4))
def test_balanced_ranks_are_no_larger_than_those_of_balanced_stages(chain):
    seconds, bytes, _ = chain
    if len(brute_force(seconds, bytes, 4)) == 0:
        return
    before, after = (choose_cuts(seconds, bytes, 4, ranks=ranks) for ranks in ((), V))
    assert after in brute_force(seconds, bytes, 4)
    rounding = 1e-5 * sum(seconds) + 1e-12
    assert max(loads(seconds, after, V)) <= max(loads(seconds, before, V)) * (1 + SLACK) ** 2 + rounding


class Constant(nn.Module):
    """Its loss is made of a parameter alone, by ops that stand at no place of their own in the chain."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.weight, self.loss = nn.Parameter(torch.tensor(2.0)), loss

    def forward(self, x):
        return self.loss(self.weight)


def test_a_forward_without_an_op_that_costs():
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b"}
    pipe = fxpipe.compile(Constant(lambda weight: weight.view(())), (torch.zeros(2),), **options)
    found = pipe.run_local((torch.zeros(4),))
    assert (float(found.loss), float(found.grads["weight"])) == (2.0, 1.0)
    with pytest.raises(PartitionError, match="Stage 0 would be empty"):
        fxpipe.compile(Constant(lambda weight: weight), (torch.zeros(2),), **options)


@pytest.mark.parametrize(
    ("message", "cut"), [(7.0, 1), (10.0, 1), (20.0, 0)], ids=["short", "shorter than other cuts", "too long"]
)
def test_no_message_takes_longer_than_stages_of_another_cut(message, cut):
    """Eight seconds on each side of the middle, or four and twelve."""
    seconds, sizes = [4.0, 4.0, 6.0, 2.0], [5.0, 1.0, 5.0, 0.0]
    assert choose_cuts(seconds, sizes, 2, messages=[1.0, message, 1.0, 0.0]) == (cut,)


def test_stages_are_balanced_where_all_messages_are_long():
    assert choose_cuts([4.0, 4.0, 6.0, 2.0], [5.0, 5.0, 1.0, 0.0], 2, messages=[40.0, 40.0, 40.0, 0.0]) == (
        1,
    )
