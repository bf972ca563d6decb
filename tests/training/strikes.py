"""Runs of which one rank is struck; all others must end soon, with an error that names it and its place.

    python tests/training/strikes.py --ranks 4 --strikes 200
    python tests/training/strikes.py --meshes --strikes 64

Ranks of one pipeline are killed, every other one around the writing of a checkpoint.  Those of 2 x 2 replicas
and lanes are killed, stopped (SIGSTOP), fail or hang, each process in each way.  Half of the runs are watched
by torch's agent.  ``--busy`` starts that many processes beside them that take a core each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from campaign import EVERY, Fault, save_lanes, train, words
from launch import forked, without_agent
from run_worker import Options, Reader, batch_of, pipeline

from fxpipe.runtime.job.liveness import runs

LIMIT = 90.0  # seconds that a run may take in all, beside those of a busy machine
STEPS = 12
AROUND = ("checkpoint", "files", "complete")
ELSEWHERE = ("F", "B", "W", "send", "optimizer", "loader")


#: What a strike of a kind is called by those that it leaves.
NAMES = {
    "kill": r"Rank {} (gives no sign of life any more \(killed.*the last was that it \w+|failed)",
    "stop": r"Rank {} gives no sign of life \(stopped, or in a long call\); the last was that it \w+",
    "raise": r"Rank {} failed (at|in) .*: Raised: ",
    "hang": r"Rank {} runs \w+",
}
WAITING = 4.0  # the time limit of ranks that wait for one that is stopped, or hangs


@dataclass(frozen=True)
class End:
    """``late``: seconds from the strike, or the end of the time limit behind it, to the end of the last rank.
    ``named``: the ranks whose error names the one that was struck, and its place.  ``missing``: what the
    others said instead.  ``wrong``: what those said whose error says this of another one."""

    fault: Fault
    mesh: str
    agent: bool
    late: float
    named: tuple[int, ...]
    missing: tuple[str, ...]
    wrong: tuple[str, ...]


def fault_of(number: int, ranks: int) -> Fault:
    draw = random.Random(number)
    place = draw.choice(AROUND if number % 2 else ELSEWHERE)
    rank = 0 if place in ("files", "complete") else draw.randrange(ranks)  # rank 0 alone does these
    after = EVERY - 1 if place in AROUND else draw.randrange(1, STEPS - 2)
    return Fault(rank, "kill", place, after, delay=draw.choice((0.0, 0.001, 0.005, 0.02, 0.1)))


def faults_of_meshes() -> list[tuple[str, Fault, bool]]:
    """Each process of each mesh in each way, with an agent and without, in a random order."""
    draw, places = random.Random(0), ("F", "B", "W", "optimizer", "loader")
    found = [
        (mesh, Fault(rank, kind, draw.choice(places), draw.randrange(1, 4)), agent)
        for mesh in MESHES
        for kind in NAMES
        for rank in range(4)
        for agent in (True, False)
    ]
    return draw.sample(found, len(found))


def tokens(step: int) -> dict[str, torch.Tensor]:
    """Of each replica its own rows."""
    return batch_of(2 * step + int(os.environ["RANK"]) // 2)


#: Mesh -> the batch of a step.
MESHES = {"2 x 2 replicas": tokens, "2 x 2 lanes": words}


def run(directory: Path, ranks: int, mesh: str, fault: Fault, agent: bool) -> End:
    """directory: with a saved pipeline."""
    start = forked if agent else without_agent
    waits = fault.kind in ("stop", "hang")
    given = (ranks, train, directory, fault, 0, STEPS)
    if mesh in MESHES:
        given = (*given, MESHES[mesh], WAITING if waits else None)
    with ThreadPoolExecutor(1) as beside:
        over = beside.submit(end_of_others, directory, ranks, fault.rank)
        ended = start(*given, dtype=torch.float32, logs=directory / "logs", limit=LIMIT)
    struck = json.loads((directory / "fault.0.json").read_text())["at"]
    others = [rank for rank in range(ranks) if rank != fault.rank]
    name = NAMES[fault.kind]
    named = tuple(rank for rank in others if re.search(name.format(fault.rank), ended.stderr[rank]))
    missing = tuple(ended.stderr[rank][-600:] for rank in others if rank not in named)
    other = rf"(?!{fault.rank}\b)\d+"
    wrong = tuple(
        ended.stderr[rank][-600:] for rank in others if re.search(name.format(other), ended.stderr[rank])
    )
    return End(fault, mesh, agent, over.result() - struck - waits * WAITING, named, missing, wrong)


def end_of_others(directory: Path, ranks: int, struck: int) -> float:
    """When the last of the ranks that were not struck was over; the one that was is killed then."""
    while not all((directory / f"process.{rank}").exists() for rank in range(ranks)):
        time.sleep(0.1)
    time.sleep(0.1)
    processes = [(directory / f"process.{rank}").read_text() for rank in range(ranks)]
    end = time.monotonic() + LIMIT
    while any(runs(process) for rank, process in enumerate(processes) if rank != struck):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    if runs(processes[struck]):
        os.kill(int(processes[struck].split("/")[1]), signal.SIGKILL)
    return time.time()


def spin() -> None:
    """Take a core, until the process that has started this one is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--strikes", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the number of the first strike")
    parser.add_argument("--meshes", action="store_true", help="strike 2 x 2 replicas and lanes")
    parser.add_argument("--busy", type=int, default=0, help="processes that take a core each")
    options = parser.parse_args()
    busy = [
        multiprocessing.get_context("fork").Process(target=spin, daemon=True) for _ in range(options.busy)
    ]
    for process in busy:
        process.start()
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        saved = {mesh: Path(folder) / mesh for mesh in ("", *(MESHES if options.meshes else ()))}
        ranks = 2 if options.meshes else options.ranks
        pipeline(Reader(), Options(steps=STEPS), ranks).save(saved[""])
        if options.meshes:
            saved["2 x 2 replicas"] = saved[""]
            made = forked(
                4, save_lanes, saved["2 x 2 lanes"], dtype=torch.float32, logs=Path(folder) / "logs"
            )
            assert made.code == 0, made
        strikes = faults_of_meshes() if options.meshes else None
        for number in range(options.first, options.first + options.strikes):
            directory = Path(folder) / str(number)
            directory.mkdir()
            mesh, fault, agent = (
                ("", fault_of(number, ranks), number % 4 < 2) if strikes is None else strikes[number]
            )
            (directory / "saved").symlink_to(saved[mesh])
            end = run(directory, 4 if options.meshes else ranks, mesh, fault, agent)
            ends.append(end)
            who = "agent" if end.agent else "alone"
            what = f"{mesh} {fault.kind} {fault.place} of rank {fault.rank}".strip()
            print(f"{number} {who} {what}: {end.late:.1f} s, named by {end.named}", flush=True)
            for text in end.missing:
                print(f"    {text!r}")
            for text in end.wrong:
                print(f"    another one is named: {text!r}")
    for process in busy:
        os.kill(process.pid, signal.SIGKILL)
    for agent in (True, False):
        seconds = sorted(end.late for end in ends if end.agent == agent)
        everyone = sum(not end.missing for end in ends if end.agent == agent)
        one = sum(len(end.named) > 0 for end in ends if end.agent == agent)
        wrong = sum(len(end.wrong) > 0 for end in ends if end.agent == agent)
        print(
            f"{'with' if agent else 'without'} agent: {len(seconds)} strikes, longest {seconds[-1]:.1f} s, "
            f"median {seconds[len(seconds) // 2]:.1f} s; named by a rank in {one}, by all in {everyone}; "
            f"another one in {wrong}"
        )
    most = 10.0 if options.meshes else 8.0
    sys.exit(any(end.late > most or not end.named or end.wrong for end in ends))


if __name__ == "__main__":
    main()
