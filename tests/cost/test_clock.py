"""The clock of measured costs: on the CPU, and with the events of an accelerator that is not there."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from fxpipe.cost.calibration import clock
from fxpipe.cost.calibration.clock import Timed, median_seconds, medians_in_turns

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def host(monkeypatch):
    """The time of the host, which passes where a test says so."""
    now = SimpleNamespace(seconds=0.0)
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(clock.time, name, lambda: now.seconds)
    return now


def test_the_median_of_ten_runs(host):
    calls, lasts = list[str](), iter([9.0, *[1.0, 2.0, 3.0, 4.0, 5.0] * 2])

    def run() -> None:
        calls.append("run")
        host.seconds += next(lasts)

    def before() -> None:
        calls.append("before")
        host.seconds += 100.0

    assert median_seconds(run, CPU, before, seconds=10.0) == 3.0
    assert calls == ["before", "run"] * 11  # the first is not counted


@pytest.mark.parametrize(("last", "runs"), [(0.05, 10), (0.1, 10), (0.125, 8), (0.25, 4), (2.0, 3)])
def test_fewer_runs_of_what_takes_long(host, last, runs):
    """As many as fit into a second."""
    calls = list[float]()

    def run() -> None:
        calls.append(last)
        host.seconds += last

    assert median_seconds(run, CPU) == pytest.approx(last)
    assert len(calls) == 1 + runs


@pytest.mark.parametrize(("waits", "seconds"), [(0, 0.25), (1, 1.0)])
def test_time_of_other_programs_does_not_count_and_that_of_own_waits_does(monkeypatch, waits, seconds):
    now = SimpleNamespace(wall=0.0, thread=0.0, waits=0)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now.wall)
    monkeypatch.setattr(clock.time, "thread_time", lambda: now.thread)
    monkeypatch.setattr(clock.resource, "getrusage", lambda who: SimpleNamespace(ru_nvcsw=now.waits))

    def run() -> None:
        now.wall, now.thread, now.waits = now.wall + 1.0, now.thread + 0.25, now.waits + waits

    assert median_seconds(run, CPU) == seconds


def test_functions_in_turns(host):
    calls = list[str]()

    def timed(name: str, seconds: float) -> Timed:
        def run() -> None:
            calls.append(name)
            host.seconds += seconds

        return Timed(run)

    found = medians_in_turns([timed("F", 0.25), timed("B", 0.375)], CPU)
    assert found == [0.25, 0.375]
    assert calls == ["F", "B"] * (1 + 3)  # of two seconds


@dataclass
class Stream:
    """A device that runs behind its host: ``now`` is the time at which its work so far will be over."""

    now: float = 0.0
    waits: list[float] = field(default_factory=list)

    def event(self, device: torch.device, enable_timing: bool) -> "Event":
        assert device == GPU
        assert enable_timing
        return Event(self)


@dataclass
class Event:
    stream: Stream
    at: float | None = None

    def record(self, stream: Stream) -> None:
        assert stream is self.stream
        self.at = stream.now

    def elapsed_time(self, end: "Event") -> float:
        assert self.stream.waits, "the device has not reached the end"
        return (end.at - self.at) * 1e3


def test_an_accelerator_is_timed_by_its_events(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch, "Event", stream.event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: stream.waits.append(stream.now))
    lasts = iter([5.0, 0.25, 0.25, 0.75, 0.5, 0.25])

    def run() -> None:
        stream.now += next(lasts)

    def before() -> None:
        stream.now += 100.0

    assert median_seconds(run, GPU, before, runs=5, seconds=2.0) == pytest.approx(0.25)
    assert len(stream.waits) == 3  # after the first run, the second, and all others together
    assert next(lasts, None) is None
