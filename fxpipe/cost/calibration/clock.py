"""The seconds that a function takes on a device, by the clock of the device.

An accelerator runs behind its host: events on its stream mark when the work itself begins and ends.  Of a CPU
with one thread it is the time in which that ran: what other programs take of the machine meanwhile would
count where they do not run.  An op that waits by itself, for a disk or another thread, takes all of its time.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxpipe.runtime.program import accelerator

#: Median of so many runs, or of as many as fit into so many seconds, but of three at least.
RUNS, SECONDS, FEWEST = 10, 1.0, 3


@dataclass(frozen=True)
class Timed:
    """``before`` is called before each run, and not timed."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


def median_seconds(
    run: Callable[[], object],
    device: torch.device,
    before: Callable[[], object] = lambda: None,
    runs: int = RUNS,
    seconds: float = SECONDS,
) -> float:
    """The median seconds of ``run``; otherwise as ``medians_in_turns``."""
    (median,) = medians_in_turns([Timed(run, before)], device, runs, seconds)
    return median


def medians_in_turns(
    timed: Sequence[Timed], device: torch.device, runs: int = RUNS, seconds: float = SECONDS
) -> list[float]:
    """The median seconds of each of some functions that run in turns, as the ops of a step do.

    runs: at most, of each; fewer if they would take more than ``seconds`` for each of the functions.  One
    more run comes first and is not counted: it compiles kernels and gets memory.
    """
    times = _times_on_accelerator if accelerator.is_accelerator(device) else _times_on_cpu
    times(timed, device, 1)
    first = times(timed, device, 1)
    fitting = int(len(timed) * seconds / max(sum(first), 1e-9))
    more = min(runs, max(FEWEST, fitting)) - 1
    rest = times(timed, device, more)
    return [statistics.median([once, *rest[k :: len(timed)]]) for k, once in enumerate(first)]


def seconds_until_done(run: Callable[[], object], device: torch.device) -> float:
    """The seconds of the host until all work of ``run`` is over, on all streams."""
    accelerator.synchronize(device)
    begin = time.perf_counter()
    run()
    accelerator.synchronize(device)
    return time.perf_counter() - begin


def _times_on_cpu(timed: Sequence[Timed], device: torch.device, rounds: int) -> list[float]:
    """The seconds of each run, in the order of the runs."""
    times, is_alone = [], torch.get_num_threads() == 1
    for one in rounds * [*timed]:
        one.before()
        waited, begin, ran = _waits(), time.perf_counter(), time.thread_time()
        one.run()
        ran, took = time.thread_time() - ran, time.perf_counter() - begin
        times.append(ran if is_alone and _waits() == waited else took)
    return times


def _waits() -> int:
    """The number of times that this thread has given its core away by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _times_on_accelerator(timed: Sequence[Timed], device: torch.device, rounds: int) -> list[float]:
    """The host does not wait between the runs, as it does not between the ops of a step."""
    marks = []
    for one in rounds * [*timed]:
        one.before()
        begin = _mark(device)
        one.run()
        marks.append((begin, _mark(device)))
    accelerator.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]  # milliseconds


def _mark(device: torch.device) -> torch.Event:
    """An event on the device's current stream."""
    event = accelerator.event(device, timing=True)
    event.record(accelerator.current_stream(device))
    return event
