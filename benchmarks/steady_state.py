"""The simulated time a step of many: with a barrier behind each step, and with post-validation.

Costs: F 1, B 1, W 0.7 of a rank and microbatch, each stage's between 0.8 and 1.2 times as much, and updates
between 0.3 and 1.5 (even: all 1); a transfer 0.05, a message of a verdict 0.02.  Seeds are fixed.

Families: the makespan and the longest span of a step by itself; the periods; the largest sum of a rank's span
and its update in steps that repeat, a lower bound; how many steps were simulated until they repeated.

Search: the period with post-validation of what auto finds for the makespan, for the span and for the period.

    python benchmarks/steady_state.py --output benchmarks/results/steady_state.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import get_args

from report import Report

from fxpipe.schedule.costs import Costs, StageCost, Update, chain
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.ops import Objective
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.build import build
from fxpipe.schedule.search.fastest import AUTO, fastest, stages_and_placements
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.steps import simulate_steps

NAMES = ("gpipe", "1f1b", "interleaved", "gis", "zb-h1", "zb-h2", "zb-2p", "zb-v", "v-half", "dualpipe-v")
SIZES = ((4, 4), (4, 12), (8, 8), (8, 24))
SEEDS = (None, 1, 2)
SEARCHED = ((4, 8, None), (6, 18, 6.0), (8, 16, 8.0), (8, 24, 12.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--effort", type=float, default=0.5, help="of each search, in seconds of a core")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Steps one behind the other")
    report.line("\nFamilies")
    columns = (
        "schedule",
        "ranks",
        "m",
        "seed",
        "makespan",
        "span",
        "barrier",
        "post",
        "gain",
        "bound",
        "steps",
    )
    rows = [
        family_row(name, *size, seed, options.effort) for size, seed, name in product(SIZES, SEEDS, NAMES)
    ]
    report.table(columns, rows)
    report.line("\nSearch: the period of what is found for each objective")
    report.table(
        ("ranks", "m", "limit", "seed", *get_args(Objective)),
        [search_row(*size, seed, options.effort) for size, seed in product(SEARCHED, SEEDS)],
    )
    report.save(options.output)


def costs(ranks: int, chunks: int, seed: int | None) -> Costs:
    random = Random(seed)

    def share() -> float:
        return (1.0 if seed is None else random.uniform(0.8, 1.2)) / chunks

    updates = tuple(1.0 if seed is None else random.uniform(0.3, 1.5) for _ in range(ranks))
    stages = [
        StageCost(share(), share(), 0.7 * share(), 1 / chunks, 0.5 / chunks) for _ in range(ranks * chunks)
    ]
    return replace(chain(stages, 0.05), update=Update(updates, (), 0.02))


def family_row(name: str, ranks: int, microbatches: int, seed: int | None, effort: float) -> Sequence[str]:
    own = costs(ranks, FAMILIES[name].stages_per_rank, seed)
    schedule = build(name, ranks=ranks, microbatches=microbatches, costs=own, effort=effort)
    timeline = simulate(schedule, own)
    barrier, post = (simulate_steps(schedule, own, validation) for validation in ("barrier", "post"))
    figures = (timeline.seconds, timeline.span, barrier.period, post.period)
    gain = f"{round(barrier.period / post.period - 1, 6) + 0.0:.1%}"  # without a sign of zero
    named = (name, str(ranks), str(microbatches), "even" if seed is None else str(seed))
    return *named, *(f"{x:.2f}" for x in figures), gain, f"{post.longest:.2f}", str(len(post.steps))


def search_row(
    ranks: int, microbatches: int, limit: float | None, seed: int | None, effort: float
) -> Sequence[str]:
    """limit: of memory, in microbatches of a rank."""

    def period(objective: Objective) -> float:
        problems = [
            Problem(
                ranks,
                microbatches,
                chunks,
                shape,
                costs(ranks, chunks, seed),
                per_rank(limit, ranks),
                objective=objective,
            )
            for chunks, shape in stages_and_placements(AUTO)
            if chunks < 4
        ]
        found = fastest(AUTO, problems, effort=3 * effort)
        return simulate_steps(found.schedule, found.timeline.costs, "post").period

    named = (str(ranks), str(microbatches), "none" if limit is None else f"{limit:g}")
    found = (f"{period(objective):.2f}" for objective in get_args(Objective))
    return *named, "even" if seed is None else str(seed), *found


if __name__ == "__main__":
    main()
