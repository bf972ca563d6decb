"""Finds the recipes of ``fxpipe/schedule/seeds.py``, on random settings and on none that is published.

In each round every setting is searched for long, from the recipes chosen so far.  Of all recipes found, those
are chosen that do best when every setting takes the one that suits it best.  The same options find the same
recipes, on any machine.  There are three kinds of settings: on a few ranks with two stages each; and of so
many ops that the search has no time to improve orders, with one stage and with two.  ``--compare`` shows
what the shipped recipes bring on other settings.

    python benchmarks/recipes.py --output fxpipe/schedule/seeds.py
    python benchmarks/recipes.py --compare
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from math import inf
from multiprocessing import Pool
from multiprocessing.pool import Pool as Processes
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any
from unittest.mock import patch

from report import Report

from fxpipe.schedule import synthesis
from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.evolution import Cooked, Evolution
from fxpipe.schedule.families import build
from fxpipe.schedule.goal import Goal
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.recipe import Recipe
from fxpipe.schedule.seeds import LARGE, LARGE_CHUNKED, SEEDS
from fxpipe.schedule.simulator import simulate

PLAIN = (Recipe(), Recipe(weight_delay=2, patience=(0.5,) * 3), Recipe(period=1.2, patience=(0.5,) * 3))
TRAINING, HELD_OUT = 1, 99  # what the random numbers start from
TURN = 150  # recipes that an evolution may try before it looks at the given ones again
WORST = 10.0  # what an order that breaks the limits counts, in the work of the busiest rank
LINE = 110

MODULE = '''\
"""Recipes that are tried first: found by benchmarks/recipes.py on random settings, none of them published."""

from __future__ import annotations

from fxpipe.schedule.recipe import Recipe

SEEDS = (
{small}
)

LARGE = (
{large}
)
"""For problems of many ops with one stage per rank."""

LARGE_CHUNKED = (
{large_chunked}
)
"""For such with more."""
'''


@dataclass(frozen=True)
class Setting:
    """Two stages a rank in V placement, or one.  F of a rank takes 1; memory is in microbatches of a rank, of
    which W needs the share ``kept``.
    """

    ranks: int
    microbatches: int
    backward: float
    weight: float
    comm: float
    kept: float
    limit: float
    chunks: int = 2

    @property
    def costs(self) -> Costs:
        v = self.chunks
        stage = StageCost(1 / v, self.backward / v, self.weight / v, saved=1 / v, kept=self.kept / v)
        return chain([stage] * (v * self.ranks), self.comm)

    @property
    def problem(self) -> Problem:
        limits, v = (self.limit,) * self.ranks, self.chunks
        return Problem("zb", self.ranks, self.microbatches, v, "v", self.costs, limits)


@dataclass(frozen=True)
class Kind:
    """``setting`` draws one; at most ``count`` recipes are chosen."""

    shipped: tuple[Recipe, ...]
    setting: Callable[[Random], Setting]
    count: int


def small_setting(random: Random) -> Setting:
    """The limit lies between V-Min's memory, (p + 4) / 3, and 60% of the way from there to 1F1B's, p."""
    ranks = random.choice((4, 6, 8, 8, 10, 12))
    least = (ranks + 4) / 3
    return Setting(
        ranks,
        microbatches=random.randrange(2 * ranks, 4 * ranks + 1),
        backward=random.uniform(0.8, 1.3),
        weight=random.uniform(0.35, 1.0),
        comm=random.choice((0, random.uniform(0, 0.06))),
        kept=random.uniform(0.35, 1),
        limit=random.uniform(least, least + 0.6 * (ranks - least)),
    )


def large_setting(chunks: int, random: Random) -> Setting:
    """The limit lies between a fifth of 1F1B's and that.  Every other has F = B = W."""
    ranks, is_unit = random.choice((20, 24, 32, 40)), random.choice((False, True))
    return Setting(
        ranks,
        microbatches=ranks * random.randrange(6, 9),
        backward=1 if is_unit else random.uniform(0.8, 1.3),
        weight=1 if is_unit else random.uniform(0.35, 1.0),
        comm=random.uniform(0, 0.06),
        kept=0.5 if is_unit else random.uniform(0.35, 1),
        limit=ranks * random.uniform(0.2, 1),
        chunks=chunks,
    )


KINDS = {
    "small": Kind(SEEDS, small_setting, 24),
    "large": Kind(LARGE, partial(large_setting, 1), 12),
    "large_chunked": Kind(LARGE_CHUNKED, partial(large_setting, 2), 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--compare", action="store_true", help="with and without the shipped recipes")
    parser.add_argument("--settings", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ops", type=float, default=15e6, help="that one search may schedule")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="write the recipes found into this module")
    options = parser.parse_args()
    if options.compare and options.output:
        parser.error("--compare finds no recipes that --output could write")
    report = Report("Recipes")
    recipes = {name: kind.shipped for name, kind in KINDS.items()}
    with Pool(options.processes) as processes:
        for name in options.kinds:
            kind, random = KINDS[name], Random(HELD_OUT if options.compare else TRAINING)
            settings = [kind.setting(random) for _ in range(options.settings)]
            if options.compare:
                compare(name, settings, processes, report)
            else:
                recipes[name] = evolve(
                    settings, kind.count, options.rounds, int(options.ops), processes, report
                )
    if options.output:
        texts = {name: source(found) for name, found in recipes.items()}
        options.output.write_text(MODULE.format(**texts))


def evolve(
    settings: Sequence[Setting], count: int, rounds: int, ops: int, processes: Processes, report: Report
) -> tuple[Recipe, ...]:
    """The recipes chosen after the last round, those first that bring the most."""
    report.line(f"\nSpan of {len(settings)} settings, on the average, in the work of the busiest rank")
    chosen: tuple[Recipe, ...] = PLAIN
    for number in range(1, rounds + 1):
        tasks = [(setting, chosen, ops) for setting in settings]
        found = processes.starmap(search, tasks, chunksize=1)
        candidates = tuple(dict.fromkeys([*(recipe for best in found for recipe in best), *chosen]))
        matrix = processes.starmap(worths, [(setting, candidates) for setting in settings], chunksize=1)
        picked = choose(matrix, count)
        chosen = tuple(candidates[k] for k in picked)
        best = mean(min(row) for row in matrix)
        kept = mean(min(row[k] for k in picked) for row in matrix)
        report.line(
            f"round {number}: {best:.4f} with the best of {len(candidates)} recipes, "
            f"{kept:.4f} with the best of {len(chosen)}"
        )
    return chosen


def search(setting: Setting, recipes: tuple[Recipe, ...], ops: int) -> list[Recipe]:
    """The three best recipes of one long search that tries the given ones first."""
    evolution = _evolution(setting, recipes)
    best: list[Cooked] = []
    turn = TURN * setting.problem.ops
    for _ in range(max(2, ops // turn)):
        best = evolution.under(setting.problem.limits, turn)
    return [cooked.recipe for cooked in best[:3]]


def worths(setting: Setting, recipes: Sequence[Recipe]) -> list[float]:
    """What each recipe's order is worth, at least 1."""
    evolution = _evolution(setting, ())
    worth = (evolution.cooked(recipe, setting.problem).worth for recipe in recipes)
    return [min(WORST, value / evolution.goal.bound) for value in worth]


def _evolution(setting: Setting, recipes: Sequence[Recipe]) -> Evolution:
    problem = setting.problem
    return Evolution(problem, Goal.of(problem, "span"), recipes)


def choose(matrix: Sequence[Sequence[float]], count: int) -> list[int]:
    """Columns, picked one by one so that the mean of each row's least, in the row's best, is the least; only
    those that help."""
    rows = [[value / min(row) for value in row] for row in matrix]
    least, total, chosen = [WORST] * len(rows), inf, list[int]()
    for _ in range(count):
        sums = [sum(map(min, least, column)) for column in zip(*rows, strict=True)]
        k = min(range(len(sums)), key=sums.__getitem__)
        if sums[k] >= total:
            break
        total = sums[k]
        least = [min(value, row[k]) for value, row in zip(least, rows, strict=True)]
        chosen.append(k)
    return chosen


def source(recipes: Sequence[Recipe]) -> str:
    """The recipes as they are shipped, and the plain ones after them."""
    return "\n".join(map(_written, dict.fromkeys([*map(_rounded, recipes), *PLAIN])))


def _rounded(recipe: Recipe) -> Recipe:
    values: dict[str, Any] = {}
    for field in fields(Recipe):
        value = getattr(recipe, field.name)
        values[field.name] = (
            tuple(round(x, 3) for x in value) if isinstance(value, tuple) else round(value, 3)
        )
    return Recipe(**values)


def _written(recipe: Recipe) -> str:
    """As the formatter would have it: on one line where that is not too long."""
    values = ((field.name, getattr(recipe, field.name), field.default) for field in fields(Recipe))
    words = [f"{name}={value!r}" for name, value, default in values if value != default]
    line = f"    Recipe({', '.join(words)}),"
    if len(line) <= LINE:
        return line
    return "\n".join(["    Recipe(", *(f"        {word}," for word in words), "    ),"])


def compare(name: str, settings: Sequence[Setting], processes: Processes, report: Report) -> None:
    report.line(f"\nSpan bubble of zb on random {name} settings that no recipe was found on")
    tasks = [(setting, is_bare) for setting in settings for is_bare in (False, True)]
    bubbles = processes.starmap(bubble, tasks, chunksize=1)
    ours, bare = bubbles[::2], bubbles[1::2]
    rows = [
        [_named(setting), f"{one:.4f}", f"{other:.4f}"]
        for setting, one, other in zip(settings, ours, bare, strict=True)
    ]
    rows.append(["mean", f"{mean(ours):.4f}", f"{mean(bare):.4f}"])
    report.table(["F=1", "with recipes", "without"], rows)
    gains = [round(other - one, 4) for one, other in zip(ours, bare, strict=True)]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    report.line(f"better with recipes: {better}, worse: {worse}, equal: {len(gains) - better - worse}")


def bubble(setting: Setting, is_bare: bool) -> float:
    problem, bare = setting.problem, {"SEEDS": (), "LARGE": (), "LARGE_CHUNKED": ()}
    with patch.multiple(synthesis, **bare) if is_bare else nullcontext():
        schedule = build(
            problem.name,
            ranks=problem.ranks,
            microbatches=problem.microbatches,
            costs=problem.costs,
            stages_per_rank=problem.stages_per_rank,
            placement=problem.shape,
            memory_limit=setting.limit,
        )
    return simulate(schedule, problem.costs).span_bubble


def _named(setting: Setting) -> str:
    s = setting
    return (
        f"p={s.ranks} m={s.microbatches} v={s.chunks} B={s.backward:.2f} W={s.weight:.2f} "
        f"transfer={s.comm:.3f} kept={s.kept:.2f} limit={s.limit:.2f}"
    )


if __name__ == "__main__":
    main()
