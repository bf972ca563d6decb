"""Schedules as text, and what makes one whole."""

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule.check import check
from fxpipe.schedule.ops import Op, OpKind, Schedule, order_text, parse_op, parse_order
from fxpipe.schedule.placement import place, stages_of


def hand(text: str, placement: tuple[int, ...] = (0, 1), microbatches: int = 1) -> Schedule:
    return Schedule("hand", placement, microbatches, parse_order(text))


def test_text_of_an_op():
    assert parse_op("BW2.15") == Op(OpKind.BW, 2, 15)
    assert str(Op(OpKind.F, 2, 5)) == "F2.5"


@pytest.mark.parametrize("text", ["", "F2", "X1.0", "F-1.0", "F1.0.0", "WB1.0"])
def test_text_that_is_no_op(text):
    with pytest.raises(ScheduleError, match="is no op"):
        parse_op(text)


def test_text_of_an_order_and_back():
    text = "F0.0 B0.0 W0.0\nF1.0 BW1.0"
    assert order_text(parse_order(text)) == text


@pytest.mark.parametrize("text", ["F0.0 BW0.0\nF1.0 BW1.0", "F0.0 B0.0 W0.0\nF1.0 BW1.0"])
def test_a_whole_schedule(text):
    check(hand(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 BW0.0\nF1.0 B1.0", "rank 1 never runs W1.0"),
        ("F0.0 BW0.0\n B1.0 F1.0 W1.0", "rank 1 runs B1.0 before F1.0, which it needs"),
        ("F0.0 W0.0 B0.0\nF1.0 BW1.0", "rank 0 runs W0.0 before B0.0, which it needs"),
        ("F0.0 F0.0 BW0.0\nF1.0 BW1.0", "rank 0 runs F0.0 a second time, as F0.0"),
        ("F0.0 B0.0 BW0.0\nF1.0 BW1.0", "rank 0 runs B0.0 a second time, as BW0.0"),
        ("F0.0 BW0.0 F1.0 BW1.0\nF1.0", "rank 0 runs F1.0, but stage 1 is placed on rank 1"),
        ("F0.0 BW0.0\nF1.0 BW1.0 F2.0", "rank 1 runs F2.0, but the schedule has 2 stages and 1 microbatch"),
        ("F0.0 BW0.0 F0.1\nF1.0 BW1.0", "rank 0 runs F0.1, but the schedule has 2 stages and 1 microbatch"),
        ("F0.0 BW0.0", "stage 1 is placed on rank 1, but the schedule has 1 rank"),
    ],
)
def test_a_schedule_that_is_not_whole(text, message):
    with pytest.raises(ScheduleError, match=f"schedule hand: {message}"):
        check(hand(text))


def test_placements():
    assert place("plain", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert place("v", 3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    assert stages_of(place("v", 3, 2)) == ((0, 5), (1, 4), (2, 3))
    with pytest.raises(ScheduleError, match="unknown placement 'w'; known: plain, v"):
        place("w", 2, 2)
