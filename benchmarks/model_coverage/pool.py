"""Cases in processes of their own, so many at a time, each with a limit of time and of memory.

A process that hangs or crashes is a row of its option; a new process goes on with the options after it.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from benchmarks.model_coverage.case import Case
from benchmarks.model_coverage.examine import EAGER, FAILED, Row, examine

SECONDS, EAGER_SECONDS = 300.0, 100.0  # of one option; of building a model and training it in eager
BYTES = 6 * 2**30  # of private memory


@dataclass
class Task:
    case: Case
    options: list[str]  # still to do, the first is under way
    process: BaseProcess
    end: float


def run(cases: list[tuple[Case, list[str]]], processes: int) -> Iterator[Row]:
    """The rows of all cases, each with its options (``eager`` first, or not at all), as they come."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.model_coverage.preload"])
    waiting = cases[::-1]
    running: dict[Connection, Task] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            case, left = waiting.pop()
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(case.key, left, theirs), daemon=True)
            process.start()
            theirs.close()
            limit = EAGER_SECONDS if left[0] == EAGER else SECONDS
            running[mine] = Task(case, left, process, time.monotonic() + limit)
        soonest = min(task.end for task in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        for connection in [c for c in running if c in ready or running[c].end <= time.monotonic()]:
            task = running[connection]
            died = ""
            if connection in ready:
                try:
                    row: Row | None = connection.recv()
                except EOFError:
                    row = None
                if row is not None:
                    yield row
                    failed = row.option == EAGER and row.outcome == FAILED
                    task.end = time.monotonic() + SECONDS
                    task.options = [] if failed else task.options[task.options.index(row.option) + 1 :]
                    continue
                task.process.join()
                died = f"the process ended with exit code {task.process.exitcode}"
            else:
                task.process.kill()
                task.process.join()
                died = "the process took too long"
            del running[connection]
            connection.close()
            if not task.options:
                continue
            yield Row(task.case.key, task.options[0], FAILED, "process", died)
            left = task.options[1:]
            if left and task.options[0] != EAGER:
                waiting.append((task.case, left))


def _main(key: str, options: list[str], connection: Connection) -> None:
    """In the child: examine a case, and send each row when it is there."""
    from benchmarks.model_coverage.sources import find

    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    wanted = [option for option in options if option != EAGER]
    for row in examine(find(key), wanted):
        if row.option != EAGER or EAGER in options:
            connection.send(row)
    connection.close()
