"""Runs that end well, whose processes must as well: no message, and exit code 0.

    python tests/training/clean_ends.py --ends 600 --busy 4

What is left of the last messages goes while the interpreter ends, beside threads of torch's backends.  The
ranks are forked from this process, which has all imports, and end as scripts do.  ``--busy`` starts that many
processes beside them that take a core each.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import first_step
import torch
from run_worker import Options, Reader, batch_of, pipeline
from strikes import spin

import fxpipe

STEPS = 2
#: What the ranks do last, in turn.
LAST = ("step", "norm", "state", "checkpoint", "save", "barrier")


def begin(folder: Path, number: int, ranks: int) -> list[int]:
    """Fork the ranks of a run, which print into files; return their processes, or nothing in a rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            own = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in own.items()})
            with (folder / f"{number}.{rank}").open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            return []
        processes.append(process)
    return processes


def run(folder: Path, number: int) -> None:
    """What each rank does."""
    last = LAST[number % len(LAST)]
    pipe = fxpipe.load(folder / "saved")
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05, clip_grad_norm=0.5)
    for step in range(STEPS):
        pipe.step(batch_of(step))
        if last == "norm":
            optimizer.grad_norm()
        optimizer.step()
        optimizer.zero_grad()
    match last:
        case "state":
            pipe.full_state_dict()
        case "checkpoint":
            with fxpipe.Checkpointer(pipe, folder / f"checkpoints {number}", optimizer=optimizer) as saved:
                saved.save()
        case "save":
            pipe.save(folder / f"saved {number}")
        case "barrier":
            torch.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ends", type=int, default=600)
    parser.add_argument("--busy", type=int, default=0, help="processes that take a core each")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    pipeline(Reader(), Options(steps=STEPS), options.ranks).save(folder / "saved")
    busy: list[int] = []
    for _ in range(options.busy):
        busy.append(os.fork())
        if not busy[-1]:
            spin()
            return
    failed: dict[str, int] = {}
    for number in range(options.ends // options.ranks):
        processes = begin(folder, number, options.ranks)
        if not processes:
            run(folder, number)
            return
        for rank, process in enumerate(processes):
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            said = (folder / f"{number}.{rank}").read_text(errors="replace").strip()
            if code or said:
                what = f"{LAST[number % len(LAST)]}: {code}, {said[-300:]!r}"
                print(f"run {number}, rank {rank}, {what}", flush=True)
                failed[what] = failed.get(what, 0) + 1
        if number % 10 == 9:
            print(f"{number + 1} runs, load {os.getloadavg()[0]:.1f}", flush=True)
    for process in busy:
        os.kill(process, signal.SIGKILL)
    ends = f"{options.ends} ends of {options.ranks} ranks, {options.busy} busy processes"
    print(f"{ends}: {sum(failed.values())} not clean")
    sys.exit(bool(failed))


if __name__ == "__main__":
    first_step  # noqa: B018 - its imports
    main()
