"""One contender of ``vocab.py``: trains a GPT-2 for some steps, and measures processor time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpt2_worker import CONTENDERS, WARM_UP
from worker import Worker, resident, start_counting_memory

PAUSE = 2.0  # seconds that rank 0 lets the others wait


def main() -> None:
    worker = Worker.join()
    if worker.case["contender"] == "waiting":
        worker.finish({"waiting": worker.gather(waiting(worker.rank))})
        return
    step, reset = CONTENDERS[worker.case["contender"]](worker)
    before = start_counting_memory()
    spent, loss = count_steps(step, reset, worker.case["steps"])
    gathered = worker.gather((spent, before, resident(), loss))
    worker.finish(
        {
            "process": [[process for process, _ in spent] for spent, *_ in gathered],
            "main": [[main for _, main in spent] for spent, *_ in gathered],
            "before": [before for _, before, *_ in gathered],
            "peak": [peak for *_, peak, _ in gathered],
            "loss": next(loss for *_, loss in gathered if loss is not None),
        }
    )


def count_steps(
    step: Callable[[], float | None], reset: Callable[[], None], count: int
) -> tuple[list[tuple[float, float]], float | None]:
    """Seconds of processor time of each of ``count`` steps, of the process and of its main thread; the loss.

    step: gives the loss, at least on one rank.  reset: what is done between steps, and not counted.
    """
    spent, loss = [], None
    for _ in range(WARM_UP + count):
        reset()
        dist.barrier()
        process, main = time.process_time(), time.thread_time()
        loss = step()
        spent.append((time.process_time() - process, time.thread_time() - main))
    return spent[WARM_UP:], loss


def waiting(rank: int) -> float:
    """Processor time that a rank spends in a second of waiting for a message: of one rank, then of all."""
    message = torch.zeros(1)
    dist.barrier()
    before = time.process_time()
    for collective in (False, True):
        if rank == 0:
            time.sleep(PAUSE)
        if collective:
            dist.broadcast(message, 0)
        elif rank == 0:
            for other in range(1, dist.get_world_size()):
                dist.send(message, other)
        else:
            dist.recv(message, 0)
    return (time.process_time() - before) / (2 * PAUSE)


if __name__ == "__main__":
    main()
