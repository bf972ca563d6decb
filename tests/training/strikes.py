"""Runs of which one rank is killed; all others must end soon, with an error that names it and its place.

    python tests/training/strikes.py --ranks 4 --strikes 200

Every other strike is around the writing of a checkpoint, and every other pair of them in a run that torch's
agent does not watch.  ``--busy`` starts that many processes beside it that take a core each.
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
from dataclasses import dataclass
from pathlib import Path

import torch
from campaign import EVERY, Fault, train
from launch import forked, without_agent
from run_worker import Options, Reader, pipeline

LIMIT = 60.0  # seconds that a run may take in all, beside those of a busy machine
STEPS = 12
AROUND = ("checkpoint", "files", "complete")
ELSEWHERE = ("F", "B", "W", "send", "optimizer", "loader")


@dataclass(frozen=True)
class End:
    """``seconds``: from the strike to the end of the last rank.  ``named``: the ranks whose error names the
    one that was killed, and its place.  ``missing``: what the others said instead."""

    fault: Fault
    agent: bool
    seconds: float
    named: tuple[int, ...]
    missing: tuple[str, ...]


def fault_of(number: int, ranks: int) -> Fault:
    draw = random.Random(number)
    place = draw.choice(AROUND if number % 2 else ELSEWHERE)
    rank = 0 if place in ("files", "complete") else draw.randrange(ranks)  # rank 0 alone does these
    after = EVERY - 1 if place in AROUND else draw.randrange(1, STEPS - 2)
    return Fault(rank, "kill", place, after, delay=draw.choice((0.0, 0.001, 0.005, 0.02, 0.1)))


def run(directory: Path, ranks: int, fault: Fault, agent: bool) -> End:
    """directory: with a saved pipeline."""
    start = forked if agent else without_agent
    given = (ranks, train, directory, fault, 0, STEPS)
    ended = start(*given, dtype=torch.float32, logs=directory / "logs", limit=LIMIT)
    struck = json.loads((directory / "fault.0.json").read_text())["at"]
    names = re.compile(
        rf"Rank {fault.rank} (gives no sign of life any more \(killed.*the last was that it \w+|failed)"
    )
    others = [rank for rank in range(ranks) if rank != fault.rank]
    named = tuple(rank for rank in others if names.search(ended.stderr[rank]))
    missing = tuple(ended.stderr[rank][-600:] for rank in others if rank not in named)
    return End(fault, agent, ended.ended - struck, named, missing)


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
    parser.add_argument("--busy", type=int, default=0, help="processes that take a core each")
    options = parser.parse_args()
    busy = [
        multiprocessing.get_context("fork").Process(target=spin, daemon=True) for _ in range(options.busy)
    ]
    for process in busy:
        process.start()
    ends = []
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        pipeline(Reader(), Options(steps=STEPS), options.ranks).save(saved)
        for number in range(options.first, options.first + options.strikes):
            directory = Path(folder) / str(number)
            directory.mkdir()
            (directory / "saved").symlink_to(saved)
            fault = fault_of(number, options.ranks)
            end = run(directory, options.ranks, fault, agent=number % 4 < 2)
            ends.append(end)
            who = "agent" if end.agent else "alone"
            what = f"{fault.place} of rank {fault.rank}"
            print(f"{number} {who} {what}: {end.seconds:.1f} s, named by {end.named}", flush=True)
            for text in end.missing:
                print(f"    {text!r}")
    for process in busy:
        os.kill(process.pid, signal.SIGKILL)
    for agent in (True, False):
        seconds = sorted(end.seconds for end in ends if end.agent == agent)
        everyone = sum(len(end.named) == options.ranks - 1 for end in ends if end.agent == agent)
        one = sum(len(end.named) > 0 for end in ends if end.agent == agent)
        print(
            f"{'with' if agent else 'without'} agent: {len(seconds)} strikes, longest {seconds[-1]:.1f} s, "
            f"median {seconds[len(seconds) // 2]:.1f} s; named by a rank in {one}, by all in {everyone}"
        )
    sys.exit(any(end.seconds > 8.0 or not end.named for end in ends))


if __name__ == "__main__":
    main()
