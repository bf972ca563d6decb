"""Times of ops, of a device that is behind its host."""

import pytest
import torch

from fxpipe.runtime.program import record
from fxpipe.runtime.program.record import RUN_AHEAD, DeviceClock, Record


class Device:
    """Marks are over where the host waits for them; each op takes a second, each wait three."""

    def __init__(self):
        self.now, self.waited = 0.0, []

    def mark(self):
        return self.now

    def wait(self, mark):
        self.waited.append(mark)

    def seconds(self, marks):
        return marks


def run(device: Device, ops: int) -> Record:
    found = Record(device)
    for k in range(ops):
        found.keep_up()
        found.begin(f"F0.{k}")
        device.now += 1
        if k % 2:
            found.pause()
            device.now += 3
    found.end()
    return found


def test_waits_between_ops_do_not_count():
    spans = run(Device(), 4).spans
    assert spans == [("F0.0", 0, 1), ("F0.1", 1, 2), ("F0.2", 5, 6), ("F0.3", 6, 7)]


def test_the_host_waits_for_the_end_of_the_op_that_many_before():
    device = Device()
    found = run(device, RUN_AHEAD + 2)
    ends = [end for _, _, end in found.spans]
    assert device.waited == ends[:2]


def test_a_step_begins_anew():
    device = Device()
    found = run(device, 2)
    found.keep_up()
    found.begin("F0.0")
    device.now += 1
    found.end()
    assert [name for name, *_ in found.spans] == ["F0.0"]
    assert device.waited == []


class Event:
    """As torch's: recorded on a stream, at the device's time in milliseconds."""

    times = iter([10.0, 12.0, 20.0, 21.5])

    def record(self, stream):
        self.at = next(self.times)

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


def test_events_are_told_in_seconds_of_the_host(monkeypatch):
    monkeypatch.setattr(record, "event", lambda device, timing: Event())
    monkeypatch.setattr(record, "current_stream", lambda device: None)
    monkeypatch.setattr(record.time, "perf_counter", lambda: 5.0)
    found = Record(DeviceClock("cuda"))
    for op in ("F0.0", "B0.0"):
        found.keep_up()
        found.begin(op)
    found.end()
    (_, *first), (_, *second) = found.spans
    assert first == pytest.approx([5.0, 5.002])
    assert second == pytest.approx([5.010, 5.0115])


def test_ops_are_ranges_of_the_profiler():
    """From their begin to their end, without the waits between them; nothing while no profiler runs."""
    found, x = Record(), torch.ones(3)
    found.begin("F0.0")
    assert found._range is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found.keep_up()
        found.begin("F1.3")
        x.add(1)
        found.pause()
        x.mul(2)
        found.keep_up()
        found.begin("B1.3")
        x.sub(1)
        found.end()
        x.div(2)
    parents = {event.name: event.cpu_parent and event.cpu_parent.name for event in profile.events()}
    assert {"F1.3", "B1.3"} <= parents.keys()
    assert parents["aten::add"] == "F1.3"
    assert parents["aten::sub"] == "B1.3"
    assert parents["aten::mul"] is parents["aten::div"] is None
    assert [name for name, *_ in found.spans] == ["F1.3", "B1.3"]
