"""The trace: each event against the format that Perfetto reads, and against the simulated step."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.cli import main
from fxpipe.plan.saved.recorded import write_spans
from fxpipe.schedule.costs import Exchange, Link
from fxpipe.schedule.ops import Direction, Phase, Transfer
from fxpipe.viz.report.write import ReportSource
from fxpipe.viz.trace import trace_events

#: Phase -> the fields that its events have, beside ph, name and pid, with their types.
FIELDS = {
    "M": {"args": dict},
    "X": {"cat": str, "tid": int, "ts": float, "dur": float, "args": dict},
    "C": {"ts": float, "args": dict},
    "s": {"cat": str, "tid": int, "ts": float, "id": int, "args": dict},
    "f": {"cat": str, "tid": int, "ts": float, "id": int, "args": dict, "bp": str},
}


@pytest.fixture(scope="module")
def pipe():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    options = {"ranks": 2, "microbatches": 3, "schedule": "1f1b", "split_points": ["2"], "check": False}
    return fxpipe.compile(
        model, (torch.zeros(8, 16),), loss_fn=lambda out, batch: out.pow(2).mean(), **options
    )


@pytest.fixture(scope="module")
def saved(pipe, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trace") / "pipe"
    pipe.save(directory)
    for rank, spans in enumerate(pipe.simulate().spans):
        write_spans(
            directory, rank, [(str(op), 5 + s + 1e-3 * rank, 5 + e + 1e-3 * rank) for op, s, e in spans]
        )
    return directory


@pytest.fixture(scope="module")
def events(saved):
    assert main(["trace", str(saved), "-o", str(saved / "t.json")]) == 0
    found = json.loads((saved / "t.json").read_text())
    assert found.keys() == {"displayTimeUnit", "traceEvents"}
    return found["traceEvents"]


def spans(events, process, thread):
    return [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, thread)]


def test_events_have_the_fields_of_the_format(events):
    for event in events:
        fields = FIELDS[event["ph"]]
        assert isinstance(event["name"], str)
        assert event["pid"] in (1, 2)
        for field, kind in fields.items():
            assert isinstance(event[field], (int, float) if kind is float else kind), event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    assert {event["ph"] for event in events} == FIELDS.keys()


def test_spans_of_a_thread_do_not_overlap(events):
    """Perfetto nests spans of one thread by their times, and drops those that cross."""
    for process in (1, 2):
        for thread in (1, 2):
            own = spans(events, process, thread)
            assert len(own) >= 6
            for before, after in pairwise(own):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_ops_have_their_times(pipe, events):
    for rank, own in enumerate(pipe.simulate().spans):
        found = {e["name"]: e for e in spans(events, 1, rank + 1) if e["cat"] != "idle"}
        assert [*found] == [str(span.op) for span in own]
        for op, start, end in own:
            event = found[str(op)]
            assert event["ts"] == pytest.approx(start * 1e6, abs=2e-3)
            assert event["dur"] == pytest.approx((end - start) * 1e6, abs=2e-3)
            assert (event["args"]["stage"], event["args"]["microbatch"]) == (op.stage, op.microbatch)


def test_idle_spans_say_what_they_wait_for(events):
    idle = [e["name"] for e in spans(events, 1, 1) if e["cat"] == "idle"]
    assert idle == [f"waits for BW1.{m} of rank 1" for m in range(3)]
    assert next(e["name"] for e in spans(events, 1, 2) if e["cat"] == "idle") == "waits for F0.0 of rank 0"


def test_flows_begin_and_end_in_the_spans_of_their_ops(events):
    ends = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event
    assert len(ends) == 2 * 2 * 3  # F and B, predicted and measured, of three microbatches
    around = defaultdict(list)
    for flow in ends.values():
        for event in flow.values():
            (span,) = [
                s
                for s in spans(events, event["pid"], event["tid"])
                if s["cat"] != "idle" and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            ]
            near = span["ts"] + span["dur"] if event["ph"] == "s" else span["ts"]
            assert event["ts"] == pytest.approx(near, abs=0.01 * span["dur"])
            around[flow["s"]["id"]].append(span["name"])
        assert flow["f"]["bp"] == "e"
        assert flow["s"]["args"]["bytes"] == 8 * 16 * 4
        assert flow["s"]["args"]["tensors"].endswith("f32[8, 16]")
    expected = [[f"F0.{m}", f"F1.{m}"] for m in range(3)] + [[f"BW1.{m}", f"BW0.{m}"] for m in range(3)]
    assert sorted(around.values()) == sorted(expected * 2)


def test_counters_are_the_memory(pipe, events):
    weights = 2 * (16 * 16 + 16) * 4
    for rank, peak in enumerate(pipe.simulate().peak_memory):
        own = [e for e in events if e["ph"] == "C" and e["name"] == f"memory of rank {rank}"]
        assert all(e["args"]["weights"] == e["args"]["gradients"] == weights for e in own)
        assert max(e["args"]["saved activations"] for e in own) == peak
        assert own[0]["ts"] == 0
        assert own[-1]["args"]["saved activations"] == 0


def test_the_measured_step_is_a_process_of_its_own(pipe, events):
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "predicted: Sequential, 1f1b", 2: "measured: Sequential, 1f1b"}
    first = spans(events, 2, 1)[0]
    assert (first["name"], first["ts"]) == ("F0.0", 0)


def test_links_and_replicas_have_threads(pipe):
    """The thread of a transfer and of an exchange, and what the rank waits for meanwhile."""
    plan = pipe.plan
    cost = replace(plan.costs.stages[0], offloadable=plan.costs.stages[0].saved_activations)
    slow = Link(seconds=2 * plan.prediction.seconds / cost.offloadable)
    costs = replace(
        plan.costs, stages=(cost, plan.costs.stages[1]), link=slow, exchanges=(Exchange(1.0, 0.5),) * 2
    )
    moves = (Transfer(Direction.OUT, 0, 1, Phase.B, 2, 3), Transfer(Direction.IN, 0, 1, Phase.B, 3, 4))
    order = ("F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2", "F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2")
    moving = replace(plan, costs=costs, transfers=moves, order=order, tier="host")
    events = trace_events(ReportSource(moving, ("", ""), None, None))
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert threads == {
        "rank 0": 1, "rank 1": 2, "rank 0, offloads": 3, "rank 0, reloads": 5,
        "rank 0, other replicas": 7, "rank 1, other replicas": 8,
    }  # fmt: skip
    assert [e["name"] for e in spans(events, 1, 3) + spans(events, 1, 5)] == ["offload B0.1", "reload B0.1"]
    assert [e["name"] for e in spans(events, 1, 7)] == ["gather, stage 0", "sum, stage 0"]
    idle = [e["name"] for e in spans(events, 1, 1) if e["cat"] == "idle"]
    assert idle[0] == "waits for the other replicas"
    assert {"waits for offload B0.1", "waits for reload B0.1"} & {*idle}


def test_a_live_pipeline(pipe, tmp_path):
    assert pipe.trace(tmp_path / "t.json") == tmp_path / "t.json"
    found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["pid"] for e in found} == {1}
