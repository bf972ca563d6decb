"""Where a rank can be sure that its messages are taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.runtime.ranks.send_release import Event, as_bytes, events_from, releases


def sends(source: int, target: int, number: int) -> Event:
    return "keep", ((source, target, number),)


def waits(source: int, target: int, number: int) -> Event:
    return "take", ((source, target, number),)


def test_an_answer_proves_what_came_before_it():
    """Of two messages that rank 1 takes, it has only the first when it answers."""
    first = [sends(0, 1, 1), sends(0, 1, 2), waits(1, 0, 1)]
    second = [waits(0, 1, 1), sends(1, 0, 1), waits(0, 1, 2)]
    assert releases([first, second]) == [[[0]], [[], []]]


def test_a_proof_goes_over_other_ranks():
    ring = [
        [sends(0, 1, 1), waits(2, 0, 1)],
        [waits(0, 1, 1), sends(1, 2, 1)],
        [waits(1, 2, 1), sends(2, 0, 1)],
    ]
    assert releases(ring) == [[[0]], [[]], [[]]]


def test_a_gather_proves_that_its_root_has_taken_nothing_yet():
    """The others start it, and the root waits: only a later message of the root proves that."""
    root = [("give", ((0, 1),)), ("take", ((0, 1),)), sends(0, 1, 1)]
    other = [("keep", ((0, 1),)), waits(0, 1, 1)]
    assert releases([root, other]) == [[[]], [[0]]]


def test_a_broadcast_is_taken_when_all_others_have_it():
    source = [("keep", ((0, 1),)), waits(1, 0, 1), waits(2, 0, 1)]
    others = [[("take", ((0, 1),)), sends(rank, 0, 1)] for rank in (1, 2)]
    assert releases([source, *others])[0] == [[], [0]]


def test_ranks_that_would_wait_for_ever_prove_nothing():
    crossed = [[waits(1, 0, 1), sends(0, 1, 1)], [waits(0, 1, 1), sends(1, 0, 1)]]
    assert releases(crossed) == [[], []]


@pytest.mark.variation
@pytest.mark.slow
@given(st.data())
def test_what_is_let_go_has_been_taken_whatever_the_ranks_pace(data):
    """Random programs that end, run at random paces: no release comes before the wait of the other rank."""
    number, ranks = data.draw(st.integers(2, 4)), []
    ranks = [[] for _ in range(number)]
    sent: dict[tuple[int, int], int] = {}
    due: list[tuple[int, int, int]] = []
    for _ in range(data.draw(st.integers(1, 30))):  # in one order that can happen
        if due and data.draw(st.booleans()):
            ways = {key[:2]: key for key in reversed(due)}  # messages of a channel are taken in order
            key = ways[data.draw(st.sampled_from(sorted(ways)))]
            due.remove(key)
            ranks[key[1]].append(("take", (key,)))
        else:
            source = data.draw(st.integers(0, number - 1))
            target = data.draw(st.integers(0, number - 1).filter(lambda r, s=source: r != s))
            sent[source, target] = count = sent.get((source, target), 0) + 1
            ranks[source].append(sends(source, target, count))
            due.append((source, target, count))
    found = releases(ranks)
    at, over, began = [0] * number, set(), set()
    kept = [[keys[0] for verb, keys in own if verb == "keep"] for own in ranks]
    done = [0] * number
    while True:
        able = [
            rank
            for rank, own in enumerate(ranks)
            if at[rank] < len(own) and (own[at[rank]][0] == "keep" or own[at[rank]][1][0] in began)
        ]
        if not able:
            break
        rank = data.draw(st.sampled_from(able))
        verb, (key,) = ranks[rank][at[rank]]
        at[rank] += 1
        if verb == "keep":
            began.add(key)
        else:
            over.add(key)
            assert {kept[rank][k] for k in found[rank][done[rank]]} <= over
            done[rank] += 1


@pytest.mark.parametrize("events", [None, [], [sends(0, 1, 1), ("give", ((3, 1),))]])
def test_events_go_to_other_ranks_as_bytes(events):
    assert events_from(as_bytes(events)) == events
