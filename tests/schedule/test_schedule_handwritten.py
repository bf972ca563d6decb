"""Schedules from text: our own format, and the CSV of torch's pipeline schedules."""

import pytest

from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.formats.handwritten import parse_schedule, read_schedule
from fxpipe.schedule.ops import order_text
from fxpipe.schedule.search.build import build

OURS = """
# a note
F0.0 F0.1 BW0.0 BW0.1

F1.0 B1.0 W1.0 F1.1 BW1.1
"""
# What torch's ScheduleDualPipeV of 2 ranks and 4 microbatches dumps, compute_only.
DUALPIPE_V = """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3\r
,1F0,2F0,1F1,2F1,(1F2;2B0)OVERLAP_F_B,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1I2,2I3,1I3,1W2,2W3,1W3\r
"""
COMMS = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1W0,1B1,1SEND_B1,1RESHARD
"""


def test_our_format_with_notes_and_empty_lines():
    schedule = parse_schedule(OURS, "mine")
    assert (schedule.name, schedule.placement, schedule.microbatches) == ("mine", (0, 1), 2)
    assert order_text(schedule.order) == "F0.0 F0.1 BW0.0 BW0.1\nF1.0 B1.0 W1.0 F1.1 BW1.1"


@pytest.mark.parametrize("text", ["0F0,0B0,,\n,,\n\n1F0,\t1B0\r\n", "\t\nF0.0\tBW0.0 \r\n,\nF1.0 BW1.0\n"])
def test_what_spreadsheets_and_editors_put_in_between(text):
    """A byte order mark, rows of commas, empty rows, tabs, line ends of two bytes."""
    order = parse_schedule("\ufeff" + text, "x").order
    assert order_text(order) == "F0.0 BW0.0\nF1.0 BW1.0"


def test_stages_are_where_their_ops_are():
    schedule = parse_schedule("F0.0 F3.0 BW3.0 BW0.0\nF1.0 F2.0 BW2.0 BW1.0", "v")
    assert schedule.placement == (0, 1, 1, 0)


def test_torch_csv_with_pauses_and_overlapped_actions():
    schedule = parse_schedule(DUALPIPE_V, "dualpipe-v")
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.microbatches == 4
    assert order_text(schedule.order) == (
        "F0.0 F0.1 F0.2 F3.0 B3.0 W3.0 F3.1 F0.3 BW3.1 F3.2 BW0.0 BW3.2 F3.3 BW0.1 BW3.3 B0.2 W0.2 B0.3 "
        "W0.3\n"
        "F1.0 F2.0 F1.1 F2.1 F1.2 BW2.0 F2.2 BW1.0 F1.3 BW2.1 F2.3 BW1.1 BW2.2 B1.2 B2.3 B1.3 W1.2 W2.3 W1.3"
    )


def test_torch_csv_with_messages_and_sharding():
    order = parse_schedule(COMMS, "comms").order
    assert order_text(order) == "F0.0 F0.1 BW0.0 BW0.1\nF1.0 B1.0 F1.1 W1.0 BW1.1"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_text_of_an_order_is_read(name):
    costs = chain([StageCost(1, 1, 1)] * 6)
    schedule = build(name, ranks=3, microbatches=5, costs=costs, stages_per_rank=2, placement="v")
    assert parse_schedule(order_text(schedule.order), name) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schedule x has no ops"),
        ("# nothing\n,,\n", "schedule x has no ops"),
        ("F0.0 BW0.0\nF1.0 X1.0", "'X1.0' is no op"),
        ("0F0,0Q0\n", "row 0: '0Q0' is not an action of torch's"),
        ("0F0,(1F0;1Z0)OVERLAP_F_B\n", "row 0: '1Z0' is not an action of torch's"),
        ("0F0,0F\n", "row 0: '0F' is not an action of torch's"),
        ("F0.0 BW0.0 F1.0\nF1.1 BW1.0", "rank 1 runs F1.1, but rank 0 also runs ops of stage 1"),
        ("F0.0 BW0.0\nF2.0 BW2.0", "no rank runs stage 1, but there are ops of stage 2"),
        ("F0.0 BW0.0\nBW1.0", "rank 1 runs BW1.0 before F1.0, which it needs"),
        ("F0.0 BW0.0\nF1.0 B1.0", "rank 1 never runs W1.0"),
        ("F0.0 BW0.0\nF1.0 W1.0 B1.0", "rank 1 runs W1.0 before B1.0, which it needs"),
        ("0F0,0B0,0F0\n1F0,1B0", "rank 0 runs F0.0 a second time, as F0.0"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(ScheduleError) as error:
        parse_schedule(text, "x")
    assert message in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ScheduleError, match=r"schedule file .*none\.csv cannot be read"):
        read_schedule(tmp_path / "none.csv")
