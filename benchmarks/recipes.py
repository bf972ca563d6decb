"""Finds the recipes of ``fxpipe/schedule/seeds.py``, on random settings and on none that is published.

In each round every setting is searched for long, from the recipes chosen so far.  Of all recipes found, those
are chosen that do best when every setting takes the one that suits it best.  The same options find the same
recipes, on any machine.  ``--compare`` shows what the shipped ones bring on other settings of the same kind.

    python benchmarks/recipes.py --output fxpipe/schedule/seeds.py
    python benchmarks/recipes.py --compare
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
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
from fxpipe.schedule.families import build
from fxpipe.schedule.goal import Goal
from fxpipe.schedule.problem import Problem
from fxpipe.schedule.recipe import Recipe
from fxpipe.schedule.seeds import SEEDS
from fxpipe.schedule.simulator import simulate
from fxpipe.schedule.synthesis import Cooked, Evolution

PLAIN = (Recipe(), Recipe(weight_delay=2, patience=(0.5,) * 3), Recipe(period=1.2, patience=(0.5,) * 3))
CHOSEN = 24
TRAINING, HELD_OUT = 1, 99  # what the random numbers start from
TURN = 200_000  # ops that an evolution may schedule before it looks at the given recipes again
WORST = 10.0  # what an order that breaks the limits counts, in the work of the busiest rank
LINE = 110

MODULE = '''\
"""Recipes that are tried first: found by benchmarks/recipes.py on random settings, none of them published."""

from __future__ import annotations

from fxpipe.schedule.recipe import Recipe

SEEDS = (
{recipes}
)
'''


@dataclass(frozen=True)
class Setting:
    """Two stages a rank in V placement.  F of a rank takes 1; memory is in microbatches of a rank, of which W
    needs the share ``kept``.
    """

    ranks: int
    microbatches: int
    backward: float
    weight: float
    comm: float
    kept: float
    limit: float

    @property
    def costs(self) -> Costs:
        stage = StageCost(1 / 2, self.backward / 2, self.weight / 2, saved=1 / 2, kept=self.kept / 2)
        return chain([stage] * (2 * self.ranks), self.comm)

    @property
    def problem(self) -> Problem:
        return Problem("zb", self.ranks, self.microbatches, 2, "v", self.costs, (self.limit,) * self.ranks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    with Pool(options.processes) as processes:
        if options.compare:
            compare(random_settings(HELD_OUT, options.settings), processes, report)
            return
        settings = random_settings(TRAINING, options.settings)
        recipes = evolve(settings, options.rounds, int(options.ops), processes, report)
    if options.output:
        options.output.write_text(source(recipes))


def random_settings(seed: int, count: int) -> list[Setting]:
    random = Random(seed)
    return [random_setting(random) for _ in range(count)]


def random_setting(random: Random) -> Setting:
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


def evolve(
    settings: Sequence[Setting], rounds: int, ops: int, processes: Processes, report: Report
) -> tuple[Recipe, ...]:
    """The recipes chosen after the last round, those first that bring the most."""
    report.line(f"\nSpan of {len(settings)} settings, on the average, in the work of the busiest rank")
    chosen: tuple[Recipe, ...] = PLAIN
    for number in range(1, rounds + 1):
        tasks = [(setting, chosen, ops) for setting in settings]
        found = processes.starmap(search, tasks, chunksize=1)
        candidates = tuple(dict.fromkeys([*(recipe for best in found for recipe in best), *chosen]))
        matrix = processes.starmap(worths, [(setting, candidates) for setting in settings], chunksize=1)
        picked = choose(matrix)
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
    for _ in range(ops // TURN):
        best = evolution.under(setting.problem.limits, TURN)
    return [cooked.recipe for cooked in best[:3]]


def worths(setting: Setting, recipes: Sequence[Recipe]) -> list[float]:
    """What each recipe's order is worth, at least 1."""
    evolution = _evolution(setting, ())
    worth = (evolution.cooked(recipe, setting.problem).value for recipe in recipes)
    return [min(WORST, value / evolution.goal.bound) for value in worth]


def _evolution(setting: Setting, recipes: Sequence[Recipe]) -> Evolution:
    problem = setting.problem
    return Evolution(problem, Goal.of(problem, "span"), seeds=recipes)


def choose(matrix: Sequence[Sequence[float]], count: int = CHOSEN) -> list[int]:
    """Columns, picked one by one so that the sum of each row's least is the least; only those that help."""
    least, total, chosen = [WORST] * len(matrix), inf, list[int]()
    for _ in range(count):
        sums = [sum(map(min, least, column)) for column in zip(*matrix, strict=True)]
        k = min(range(len(sums)), key=sums.__getitem__)
        if sums[k] >= total:
            break
        total = sums[k]
        least = [min(value, row[k]) for value, row in zip(least, matrix, strict=True)]
        chosen.append(k)
    return chosen


def source(recipes: Sequence[Recipe]) -> str:
    """The text of the module that ships the recipes, and the plain ones after them."""
    shipped = dict.fromkeys([*map(_rounded, recipes), *PLAIN])
    return MODULE.format(recipes="\n".join(map(_written, shipped)))


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


def compare(settings: Sequence[Setting], processes: Processes, report: Report) -> None:
    report.line("\nSpan bubble of v-half on random settings that no recipe was found on")
    tasks = [(setting, recipes) for setting in settings for recipes in (SEEDS, ())]
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


def bubble(setting: Setting, recipes: tuple[Recipe, ...]) -> float:
    costs = setting.costs
    with patch.object(synthesis, "SEEDS", recipes):
        schedule = build(
            "v-half",
            ranks=setting.ranks,
            microbatches=setting.microbatches,
            costs=costs,
            memory_limit=setting.limit,
        )
    return simulate(schedule, costs).span_bubble


def _named(setting: Setting) -> str:
    return (
        f"p={setting.ranks} m={setting.microbatches} B={setting.backward:.2f} W={setting.weight:.2f} "
        f"transfer={setting.comm:.3f} kept={setting.kept:.2f} limit={setting.limit:.2f}"
    )


if __name__ == "__main__":
    main()
