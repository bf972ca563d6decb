"""Steps of samples of many lengths: padded, packed, and in an order of their own.

Samples of three distributions (log-normal, a heavy tail, short and long ones) in the microbatches of a step
on 8 ranks, each with memory for the activations of so many tokens as 4 samples of the most, 8,192, have.  F
of L tokens on a stage takes L · (1 + .167 · L / 8192) units, of which the second part is attention, B as much
with twice the attention, W L units.

Part simulated, in microseconds a token:
  longest        each sample a microbatch, padded to the longest of the step
  buckets        each padded to 512, 1024, … 8192
  packed         microbatches of up to 8,192 tokens, in the order for equal microbatches
  packed, order  the same microbatches in the order for their lengths
  order 2048     microbatches of up to 2,048 tokens, a longer sample alone, in the order for their lengths
  static / order the latter microbatches in the order for equal ones, relative to theirs
  bound          of order 2048 within the memory (``lower_bound_of_each``)
  / bound        order 2048 relative to it; and without a limit of memory, relative to the bound of that

Part run: 8 processes whose stages only sleep, 10 us a unit; "packed" and "order 2048" in turns, medians of
the steps' times, beside the time that was simulated; and the milliseconds that ``step`` waits for an order
that ``prepare`` has begun to look for one step before.

Part long: the orders of "order 2048" relative to the best that a search of 12 times the work finds (the best
of two, in some seconds each), and that relative to the bound; with the memory and without a limit.

Part exact: the same on 4 ranks with 5 or 6 samples, each a microbatch, and memory for 3 of the longest, and
for 2; the shortest step of all orders by OR-tools, which need not let microbatches come in one order on all
ranks, relative to the one that is found.

    python benchmarks/lengths.py --part run --output benchmarks/results/lengths.txt
    python benchmarks/lengths.py --part simulated --part long --output benchmarks/results/lengths_bound.txt
    python benchmarks/lengths.py --part exact --output benchmarks/results/lengths_exact.txt
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

import numpy as np
from launch import run
from report import Report

from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.exact.order import exact
from fxpipe.schedule.ops import Color, Op, Schedule
from fxpipe.schedule.placement import place
from fxpipe.schedule.search.build import build
from fxpipe.schedule.search.uneven import WORK, Uneven

RANKS, LONGEST, MEMORY, SAMPLES, UNIT = 8, 8192, 4, 64, 1e-5
DISTRIBUTIONS = ("log-normal", "heavy tail", "short and long")
LATENCY, PER_TOKEN = 2e-4, 2e-8  # seconds of a message


def samples(name: str, seed: int, number: int = SAMPLES) -> list[int]:
    random = np.random.default_rng(seed)
    drawn = {
        "log-normal": lambda: random.lognormal(np.log(600) - 0.5, 1, number),
        "heavy tail": lambda: 50 + 200 * random.pareto(1.2, number),
        "short and long": lambda: np.where(
            random.random(number) < 0.85, random.normal(300, 80, number), random.normal(5000, 1500, number)
        ),
    }[name]()
    return [int(n) for n in np.clip(drawn, 32, LONGEST)]


def packed(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The samples of each microbatch: the longest first, to the fullest with room for it."""
    microbatches: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        able = [each for each in microbatches if sum(each) + length <= tokens]
        if able:
            max(able, key=sum).append(length)
        else:
            microbatches.append([length])
    return microbatches


def stage_cost(microbatch: Sequence[int]) -> StageCost:
    """Of a microbatch with samples of these lengths."""
    tokens, squares = sum(microbatch), sum(n * n for n in microbatch)
    attention = 0.167 * squares / LONGEST
    times = (tokens + attention, tokens + 2 * attention, tokens)
    return StageCost(*(UNIT * time for time in times), 1.0 * tokens, 0.4 * tokens)


def costs_of(microbatch: Sequence[int]) -> Costs:
    return chain([stage_cost(microbatch)] * RANKS, seconds=LATENCY + PER_TOKEN * sum(microbatch))


def uneven(microbatches: Sequence[Sequence[int]]) -> Uneven:
    costs = {tuple(each): costs_of(each) for each in microbatches}
    limits = (1.0 * MEMORY * LONGEST,) * RANKS
    return Uneven(tuple(costs[tuple(each)] for each in microbatches), place("plain", RANKS, 1), limits)


def in_fixed_order(microbatches: Sequence[Sequence[int]]) -> float:
    """Seconds in the order for as many microbatches of the most tokens."""
    schedule = build(
        "zb",
        ranks=RANKS,
        microbatches=len(microbatches),
        costs=costs_of([LONGEST]),
        memory_limit=1.0 * MEMORY * LONGEST,
    )
    return uneven(microbatches).times(schedule.order).makespan


def in_own_order(microbatches: Sequence[Sequence[int]], has_limit: bool = True) -> float:
    problem = uneven(microbatches)
    problem = problem if has_limit else replace(problem, limits=(inf,) * RANKS)
    return problem.times(problem.best()).makespan


def simulated(report: Report, seeds: int) -> None:
    heads = ("us a token", "longest", "buckets", "packed", "packed, order", "order 2048", "bound")
    rows_shown = []
    for name in DISTRIBUTIONS:
        rows = []
        for seed in range(seeds):
            lengths = samples(name, seed)
            buckets = [[min(b for b in (512, 1024, 2048, 4096, LONGEST) if b >= n)] for n in lengths]
            large, small = packed(lengths, LONGEST), packed(lengths, 2048)
            seconds = (
                in_fixed_order([[max(lengths)]] * len(lengths)),
                in_fixed_order(buckets),
                in_fixed_order(large),
                in_own_order(large),
                in_own_order(small),
                uneven(small).bound,
                in_own_order(small, has_limit=False),
                replace(uneven(small), limits=(inf,) * RANKS).bound,
                in_fixed_order(small),
            )
            rows.append([1e6 * s / sum(lengths) for s in seconds])
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        shown = [f"{value:.1f}" for value in medians[:6]]
        ratios = ([row[a] / row[b] for row in rows] for a, b in ((2, 4), (8, 4), (4, 5), (6, 7)))
        shown += [f"{statistics.median(each):.2f} ({min(each):.2f} … {max(each):.2f})" for each in ratios]
        rows_shown.append([name, *shown])
    report.line(f"\nPart simulated: medians of {seeds} steps of {SAMPLES} samples")
    report.table(
        [*heads, "packed / order 2048", "static / order", "/ bound", "/ bound, any memory"], rows_shown
    )


def beside_long(report: Report, seeds: int) -> None:
    rows = []
    for name in DISTRIBUTIONS:
        ratios: list[list[float]] = []
        for seed in range(seeds):
            memory = uneven(packed(samples(name, seed), 2048))
            ratios.append([])
            for problem in (memory, replace(memory, limits=(inf,) * RANKS)):
                short = problem.times(problem.best()).makespan
                longs = [problem.times(problem.best(12 * WORK, seed)).makespan for seed in (0, 100)]
                best = min(short, *longs)
                ratios[-1] += [short / best, best / problem.bound]
        columns = [sorted(column) for column in zip(*ratios, strict=True)]
        shown = [f"{statistics.median(each):.3f} ({each[0]:.3f} … {each[-1]:.3f})" for each in columns]
        rows.append([name, *shown])
    heads = "found / best", "best / bound", "found / best, any memory", "best / bound, any memory"
    report.line(f"\nPart long: medians of {seeds} steps of {SAMPLES} samples")
    report.table(["", *heads], rows)


def measured(report: Report, seeds: int) -> None:
    batches = []
    for name in DISTRIBUTIONS:
        for seed in range(seeds):
            lengths = samples(name, seed, SAMPLES // 2)
            large, small = packed(lengths, LONGEST), packed(lengths, 2048)
            batches.append({"name": name, "packed": [*map(sum, large)], "order 2048": [*map(sum, small)]})
    results = run("lengths_worker.py", RANKS, {"batches": batches, "rounds": 3})
    rows = []
    for batch, result in zip(batches, results, strict=True):
        before, now = (statistics.median(result[key]) for key in ("packed", "order 2048"))
        simulated, waits = result["simulated"], statistics.median(result["waits"])
        figures = f"{1e3 * before:.0f}", f"{1e3 * now:.0f}", f"{before / now:.2f}", f"{now / simulated:.3f}"
        rows.append([batch["name"], *figures, f"{1e3 * waits:.1f}"])
    report.line(f"\nPart run: {RANKS} processes, {SAMPLES // 2} samples a step")
    report.table(["ms a step", "packed", "order 2048", "ratio", "order / simulated", "waits, ms"], rows)


def beside_exact(report: Report, seeds: int) -> None:
    rows, ranks = [], 4
    for name, seed, room in product(DISTRIBUTIONS, range(seeds), (3, 2)):
        lengths = samples(name, seed, 5 + seed % 2)
        each = [chain([stage_cost([n])] * ranks, seconds=LATENCY) for n in lengths]
        limit, placement = 1.0 * room * max(lengths), tuple(range(ranks))
        problem = Uneven(tuple(each), placement, (limit,) * ranks)
        found = problem.best()
        # As one microbatch that runs through the stages of all.
        stages = tuple(stage for costs in each for stage in costs.stages)
        edges = [
            replace(edge, source=shifted(edge.source, k * ranks), target=shifted(edge.target, k * ranks))
            for k, costs in enumerate(each)
            for edge in costs.edges
        ]
        order = tuple(tuple(Op(op.kind, op.stage + op.microbatch * ranks, 0) for op in ops) for ops in found)
        start = Schedule("found", placement * len(each), 1, order)
        best = exact(
            Costs(stages, tuple(edges)), start.placement, 1, memory_limit=limit, seconds=60, start=start
        )
        ours = problem.times(found).makespan
        proven = "optimal" if best.proven else f"bound {best.bound / ours:.4f}"
        shown = f"{problem.bound / ours:.3f}", f"{best.value / ours:.4f}", proven
        rows.append([name, " ".join(map(str, lengths)), str(room), *shown])
    report.line("\nPart exact: relative to the step that is found")
    report.table(["", "lengths", "memory", "bound", "exact", ""], rows)


def shifted(color: Color, stages: int) -> Color:
    return Color(color.stage + stages, color.phase)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parts = "simulated", "run", "long", "exact"
    parser.add_argument("--part", choices=parts, action="append", help="some of them (the first two)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report = Report("Steps of samples of many lengths")
    chosen = options.part or parts[:2]
    if "simulated" in chosen:
        simulated(report, options.seeds)
    if "run" in chosen:
        measured(report, 1)
    if "long" in chosen:
        beside_long(report, options.seeds)
    if "exact" in chosen:
        beside_exact(report, options.seeds)
    report.save(options.output)


if __name__ == "__main__":
    main()
