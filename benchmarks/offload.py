"""Activations away on a disk between forward and backward: does memory fall as simulated, what does it cost?

A GPT-2 of Hugging Face with 8 layers, hidden 768, sequence 1024, vocabulary 4096 (embedding and head not
tied, no dropout), microbatches of one sequence, gpipe on 2 ranks (CPU, gloo, one thread a rank).  Forward and
backward, no optimizer.  fxpipe compiles it, with costs measured here, three times: without offload, with
offload=True, and with a memory limit, halfway between what the two take, and offload="auto".  Each is run in
processes of its own, taking turns.

A rank's resident memory is read before every op ("between ops") and its peak is kept by the kernel ("peak",
with what single ops need while they run).  Off both is taken the process's own: what it holds between two
steps, without weights and gradients (Python, torch, libraries, buffers of gloo).
- simulated: the most that a rank saves, MiB; between ops, peak: the same measured, so without weights;
- fall: of the peak resident memory, against no offload; share: of the fall that was simulated.
  Bar: at least 80% on every rank.
- limit: it covers weights, gradients and what is saved between ops, not what a single op needs.
  Bar: between ops no rank holds more than 5% above it.  Peaks are printed beside it.
- ratio: time of a step / time of a step without offload in the same round, and the median of these; the same
  of processor time, of all threads of both ranks, which other work on the machine disturbs less.
Losses and gradients must have the same bits.

glibc by itself keeps memory that was freed and gives out parts of large blocks that were freed, so that
resident memory does not fall as far: fxpipe sets the heap up for pipelines that offload, and leaves it for
others (fxpipe/runtime/ranks/heap.py).  --threshold sets MALLOC_MMAP_THRESHOLD_ for all alike instead.  What
is away lies in files, of which the system keeps pages in memory that is free: they are no process's and are
given up when a process needs room.

    python benchmarks/offload.py --output benchmarks/results/offload.txt
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from launch import run
from offload_worker import MIB, build, example
from report import Report, median_and_spread
from rich.progress import track

import fxpipe
from fxpipe.runtime.program.offload import filesystem

RANKS = 2
FALL_BAR, LIMIT_BAR = 0.80, 1.05
WORKER = "offload_worker.py"
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


@dataclass(frozen=True)
class Contender:
    """A compiled pipeline.  ``saved``: simulated, MiB by rank; ``moved``: in a step, by all ranks."""

    name: str
    directory: Path
    saved: tuple[float, ...]
    moved: float
    limit: float | None = None  # MiB


Runs = dict[Contender, list[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of each run")
    parser.add_argument("--threshold", type=int, help=f"{THRESHOLD} in bytes, for all (fxpipe's own way)")
    parser.add_argument("--directory", type=Path, default=Path("build"), help="on a disk; tmpfs is memory")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    kind = filesystem(options.directory)
    if kind in ("tmpfs", "ramfs"):
        raise SystemExit(f"{options.directory} lies in memory ({kind}): give a --directory on a disk.")
    if options.threshold:
        os.environ[THRESHOLD] = str(options.threshold)
    else:
        os.environ.pop(THRESHOLD, None)
    report = Report("Activations away on a disk")
    report.line(f"  disk      {kind}")
    report.line(f"  malloc    {THRESHOLD}={os.environ.get(THRESHOLD, 'not set: as fxpipe sets it up')}")
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        contenders = compiled(options, Path(folder), report)
        runs: Runs = defaultdict(list)
        turns = [c for i in range(options.rounds) for c in (*contenders[i % 3 :], *contenders[: i % 3])]
        for contender in track(turns, "runs", transient=True):
            case = {
                "pipeline": str(contender.directory.absolute()),
                "directory": folder,
                "microbatches": options.microbatches,
                "steps": options.steps,
            }
            runs[contender].append(run(WORKER, RANKS, case))
    report.line(
        f"\n{options.schedule}, m = {options.microbatches}, {RANKS} ranks; {options.rounds} rounds of "
        f"{options.steps} steps; medians over the rounds, memory in MiB"
    )
    show(report, contenders, runs)
    report.save(options.output)


def compiled(options: argparse.Namespace, folder: Path, report: Report) -> list[Contender]:
    """Without offload, all of it, and as much as a limit halfway between asks for."""
    torch.set_num_threads(1)  # as the ranks have
    model = build()

    def one(name: str, share: bool | str = False, **asked: Any) -> Contender:
        pipe = fxpipe.compile(
            model,
            example(),
            ranks=RANKS,
            microbatches=options.microbatches,
            schedule=options.schedule,
            costs="measured",
            offload=fxpipe.Offload(share, directory=options.directory),
            **asked,
        )
        directory = folder / name.replace(" ", "_")
        pipe.save(directory)
        timeline = pipe.simulate()
        if timeline.costs.link is not None and share is True:
            rate = 1 / timeline.costs.link.seconds / 1e9
            report.line(f"  bandwidth {rate:.1f} GB/s one way, measured (through the system's page cache)")
        saved = tuple(peak / MIB for peak in timeline.peak_memory)
        limit = asked.get("memory_limit")
        return Contender(name, directory, saved, timeline.moved / MIB, None if limit is None else limit / MIB)

    plain, away = one("no offload"), one("all", True)
    weights = [rank_weights(model, plain, rank) for rank in range(RANKS)]
    limit = max(w + (a + b) / 2 for w, a, b in zip(weights, plain.saved, away.saved, strict=True))
    return [plain, away, one("auto", "auto", memory_limit=int(limit * MIB))]


def rank_weights(model: torch.nn.Module, contender: Contender, rank: int) -> float:
    """MiB of a rank's parameters, gradients and buffers."""
    held = fxpipe.load(contender.directory).plan.tensors[rank]
    sizes = {name: t.nbytes / MIB for name, t in (*model.named_parameters(), *model.named_buffers())}
    return sum(sizes[name] for name in (*held.parameters, *held.gradients, *held.buffers))


def show(report: Report, contenders: list[Contender], runs: Runs) -> None:
    plain = contenders[0]
    check_bits(report, runs)
    rows = []
    for c in contenders:
        for rank in range(RANKS):
            weights, own = ranked(runs[c], rank, "weights"), ranked(runs[c], rank, "own")
            between, peak = ranked(runs[c], rank, "between"), ranked(runs[c], rank, "peak")
            figures = (c.saved[rank], between - own - weights, peak - own - weights, peak, own, weights)
            rows.append([f"{c.name}, rank {rank}", *(f"{x:.0f}" for x in figures)])
    report.table(("memory", "simulated", "between ops", "peak", "resident", "its own", "weights"), rows)
    seconds = {c: [statistics.median(r["seconds"]) for r in runs[c]] for c in contenders}
    spent = {c: [sum(rank["spent"] for rank in r["ranks"]) for r in runs[c]] for c in contenders}
    rows = []
    for c in contenders:
        row = [c.name, f"{c.moved:.0f}"]
        for measured in (seconds, spent):
            ratios = [a / b for a, b in zip(measured[c], measured[plain], strict=True)]
            row += [median_and_spread(measured[c], ".2f"), median_and_spread(ratios, ".3f")]
        rows.append(row)
    report.table(("time", "MiB moved", "s a step", "ratio", "CPU s a step", "ratio"), rows)
    for rank in range(RANKS):
        show_fall(report, contenders, runs, rank)
    for rank in range(RANKS):
        show_limit(report, contenders[-1], runs, rank)


def check_bits(report: Report, runs: Runs) -> None:
    """Losses are compared as they are, gradients by a digest of each rank's."""
    found = {(r["loss"], *(rank["bits"] for rank in r["ranks"])) for of_one in runs.values() for r in of_one}
    if len(found) > 1:
        raise SystemExit(f"losses or gradients differ in their bits: {sorted(found)}")
    report.line(f"all have the loss {next(iter(found))[0]!r} and the same gradients, bit for bit")


def show_fall(report: Report, contenders: list[Contender], runs: Runs, rank: int) -> None:
    plain = contenders[0]
    for c in contenders[1:]:
        simulated = plain.saved[rank] - c.saved[rank]
        fall = ranked(runs[plain], rank, "peak") - ranked(runs[c], rank, "peak")
        between = ranked(runs[plain], rank, "between") - ranked(runs[c], rank, "between")
        share = fall / simulated
        verdict = "the bar is met" if share >= FALL_BAR else f"THE BAR OF {FALL_BAR:.0%} IS MISSED"
        report.line(
            f"{c.name}, rank {rank}: simulated to fall by {simulated:.0f} MiB; between ops it falls by "
            f"{between:.0f} ({between / simulated:.0%}), the peak by {fall:.0f} ({share:.0%}): {verdict}"
        )


def show_limit(report: Report, auto: Contender, runs: Runs, rank: int) -> None:
    assert auto.limit is not None
    own, weights = ranked(runs[auto], rank, "own"), ranked(runs[auto], rank, "weights")
    between, peak = (max(r["ranks"][rank][field] for r in runs[auto]) - own for field in ("between", "peak"))
    verdict = "the bar is met" if between <= LIMIT_BAR * auto.limit else f"THE BAR OF {LIMIT_BAR} IS MISSED"
    report.line(
        f"limit {auto.limit:.0f} MiB, rank {rank}: simulated {weights + auto.saved[rank]:.0f}, between ops "
        f"at most {between:.0f} ({between / auto.limit:.3f} of it), with what ops need {peak:.0f} "
        f"({peak / auto.limit:.3f}): {verdict}"
    )


def ranked(results: list[Any], rank: int, field: str) -> float:
    """The median over the rounds."""
    return statistics.median(r["ranks"][rank][field] for r in results)


if __name__ == "__main__":
    main()
