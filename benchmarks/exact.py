"""What exact search proves: the best repeated blocks, and how far the named schedules are from the best.

Blocks: two stages a rank in V placement; times of one chunk; the memory of one microbatch on one rank is 1,
of which W needs a share.  The period is a multiple of F+B+W of a rank; at 1 there is no bubble.

Schedules: seconds of the named one, and of the best that any order can do with the same placement in the
same peak memory.

    python benchmarks/exact.py --output benchmarks/results/exact.txt
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from exact_block import exact_block
from report import Report

from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.exact.order import exact
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.placement import place
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate

#: ranks, (F, B, W) of a chunk, share that W needs, period ÷ work
BLOCKS = (
    (8, (1, 1, 1), 0.43, 1.0),
    (8, (15, 15, 10), 0.43, 1.0),
    (8, (15, 15, 10), 0.43, 1.1),
    (8, (15, 15, 10), 0.43, 1.15),
    (8, (18.5, 18.1, 9.3), 0.5, 1.0),
    (4, (15, 15, 10), 0.43, 1.0),
)
#: ranks, microbatches, (F, B, W) of a rank, one transfer
CASES = ((3, 6, (10, 12, 6), 1), (4, 6, (10, 12, 6), 1), (4, 8, (15, 15, 10), 0))
NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "v-half")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="for each search")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Exact search")
    report.line("\nBlocks: the least memory of the fullest rank, on the average and at its peak")
    columns = ("ranks", "F/B/W", "W needs", "period", "mean", "bound", "peak", "proven", "s")
    report.table(columns, [block_row(*block, options.seconds) for block in BLOCKS])
    report.line("\nSchedules: the named one beside the best in the same memory")
    columns = ("schedule", "ranks", "m", "F/B/W", "peak", "time", "best", "bound", "proven", "s")
    rows = [schedule_row(name, *case, options.seconds) for case in CASES for name in NAMES]
    report.table(columns, rows)
    report.save(options.output)


def block_row(
    ranks: int, times: tuple[float, float, float], kept: float, stretch: float, seconds: float
) -> tuple[str, ...]:
    costs = chain([StageCost(*times, 0.5, kept / 2)] * 2 * ranks)
    before = time.perf_counter()
    block = exact_block(costs, place("v", ranks, 2), period=2 * sum(times) * stretch, seconds=seconds)
    taken = time.perf_counter() - before
    figures = (max(block.mean_memory), block.bound, max(block.peak_memory))
    named = (str(ranks), "/".join(map(str, times)), f"{kept}", f"× {stretch}")
    return *named, *(f"{figure:.3f}" for figure in figures), yes(block.proven), f"{taken:.1f}"


def schedule_row(
    name: str,
    ranks: int,
    microbatches: int,
    times: tuple[float, float, float],
    transfer: float,
    seconds: float,
) -> tuple[str, ...]:
    chunks = FAMILIES[name].stages_per_rank
    stage = StageCost(*(t / chunks for t in times), 1 / chunks, 1 / chunks)
    costs = chain([stage] * ranks * chunks, transfer)
    schedule = build(name, ranks=ranks, microbatches=microbatches, costs=costs)
    timeline = simulate(schedule, costs)
    peak = max(timeline.peak_memory)
    before = time.perf_counter()
    best = exact(costs, schedule.placement, microbatches, memory_limit=peak, seconds=seconds, start=schedule)
    taken = time.perf_counter() - before
    named = (name, str(ranks), str(microbatches), "/".join(map(str, times)), f"{peak:g}")
    found = (f"{number:.6g}" for number in (timeline.seconds, best.value, best.bound))
    return *named, *found, yes(best.proven), f"{taken:.1f}"


def yes(true: bool) -> str:
    return "yes" if true else "no"


if __name__ == "__main__":
    main()
