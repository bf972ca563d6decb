"""From a repeated block to due dates: how the block is entered, kept up and left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import numpy as np

from fxpipe.schedule.blocks import Block, find_block, flow
from fxpipe.schedule.kernel import Floats
from fxpipe.schedule.shop import Shop


@dataclass(frozen=True)
class Recipe:
    """``period`` is in the shortest that work and memory allow, ``waits`` (per quarter of a microbatch's way)
    in the mean time of an F, what says delay or lead in periods.

    The first ``head`` and the last ``tail`` microbatches (of a step on eight ranks; in proportion on more)
    follow each other at ``pace`` periods and wait less: ``stretch`` is 1 for the block's waits, 0 for none.
    """

    period: float = 1.0
    waits: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    head: int = 0
    head_pace: float = 1.0
    head_stretch: float = 1.0
    tail: int = 0
    tail_pace: float = 1.0
    tail_stretch: float = 1.0
    weight_delay: float = 0.0
    late_weights: int = 0  # microbatches at the end whose W are due after all else
    forward_lead: float = 0.0  # of the first chunk's F
    patience: tuple[float, float, float] = (1.0, 1.0, 1.0)
    memory: float = 2.0  # that it uses at most, in ranks · M_B; a limit may be lower
    spare: float = 0.0  # M_B of the limit that it leaves: a B may make room for an F before its W has run


def random_recipe(random: Random) -> Recipe:
    """Every field as those recipes have it that did best for many different costs and limits."""

    def wait() -> float:
        most = random.choice((0.0, 0.0, 0.5, 0.5, 1.5))
        return random.uniform(0, most)

    return Recipe(
        period=random.choice((1, 1, 1, 1.005, 1.01, 1.02, 1.05, 1.1, 1.15, 1.2)),
        waits=(wait(), wait(), wait(), random.choice((0.0, wait()))),
        head=random.choice((0, 0, random.randrange(2, 7))),
        head_pace=random.uniform(0.25, 1.05),
        head_stretch=random.uniform(0, 1),
        tail=random.choice((0, 1, random.randrange(1, 6))),
        tail_pace=random.uniform(0.25, 1.05),
        tail_stretch=random.uniform(-0.2, 1),
        weight_delay=random.choice((0, 0.5, 1, 2, 3)),
        late_weights=random.choice((0, 0, 3, 6, 9)),
        forward_lead=random.choice((0.0, random.gauss(0, 0.15))),
        patience=(
            random.choice((1, 1.001, 1.001, 1.001, 1.5)),
            random.choice((0, 0.3, 0.3, 0.5, 0.5, 0.7)),
            random.choice((0.3, 0.5, 0.5, 0.7, 1.001)),
        ),
        memory=random.choice((2.0, 2.0, 2.0, 1.5, 1.25, 1.1, 1.0, 0.75)),
        spare=random.choice((0.0, 0.0, 0.0, 0.25, 0.5, 0.75)),
    )


def mutate(recipe: Recipe, random: Random) -> Recipe:
    """A few fields changed, mostly by little."""
    other = random_recipe(random)
    changes: dict[str, Any] = {}
    for field in fields(Recipe):
        if random.random() > 0.15:
            continue
        value = getattr(recipe, field.name)
        if field.name == "waits":
            k = random.randrange(len(value))
            near = max(0.0, value[k] + random.gauss(0, 0.15))
            changed = near if random.random() < 0.7 else other.waits[k]
            changes["waits"] = (*value[:k], changed, *value[k + 1 :])
        elif field.name == "patience":
            k = random.randrange(len(value))
            changes["patience"] = (*value[:k], other.patience[k], *value[k + 1 :])
        elif field.name in ("head", "tail"):
            changes[field.name] = max(0, value + random.choice((-1, 1)))
        elif field.name in ("late_weights", "weight_delay", "memory", "spare") or random.random() < 0.2:
            changes[field.name] = getattr(other, field.name)
        elif field.name == "period":
            changes["period"] = max(1.0, value + random.gauss(0, 0.02))
        else:
            changes[field.name] = value + random.gauss(0, 0.1)
    return Recipe(
        **{field.name: changes.get(field.name, getattr(recipe, field.name)) for field in fields(Recipe)}
    )


def cross(one: Recipe, other: Recipe, random: Random) -> Recipe:
    """Every field of one or of the other."""
    return Recipe(**{f.name: getattr(random.choice((one, other)), f.name) for f in fields(Recipe)})


class Kitchen:
    """Due dates of recipes for one shop; blocks that were found are kept."""

    def __init__(self, shop: Shop, width: int) -> None:
        self.shop, self.width = shop, width
        self.flow = flow(shop)
        self.unit = sum(shop.seconds[::3]) / shop.stages
        self.first = [3 * own[0] for own in shop.own]  # the F of each rank's first chunk
        self.spent = [self._spent(rank) for rank in range(shop.ranks)]
        self.blocks: dict[tuple[float, float, tuple[float, ...]], Block] = {}

    def due(self, recipe: Recipe, microbatches: int, limits: Sequence[float]) -> Floats:
        """Per op (see :mod:`fxpipe.schedule.shop`) when it should be run."""
        m, block = microbatches, self._block(recipe, limits)
        period, scale = block.period, max(1.0, self.shop.ranks / 8)
        head, tail = round(recipe.head * scale), round(recipe.tail * scale)
        j = np.arange(m)
        ends, begins = j >= m - tail, j < head
        pace = np.where(begins, recipe.head_pace, np.where(ends, recipe.tail_pace, 1.0))
        late = 1 - (1 - recipe.tail_stretch) * (j - m + tail + 1) / max(1, tail)
        early = recipe.head_stretch + (1 - recipe.head_stretch) * j / max(1, head)
        stretch = np.where(begins, early, np.where(ends, late, 1.0))
        pace[0] = 0.0
        begin = period * np.cumsum(pace)
        alone, start = np.array(self.flow), np.array(block.start)
        waits = start - alone
        alone[2::3] += recipe.weight_delay * period
        alone[self.first] -= recipe.forward_lead * period
        due = begin + alone[:, None] + waits[:, None] * stretch
        on_time = max(0, m - round(recipe.late_weights * scale))
        due[2::3, on_time:] += begin[-1] + 2 * max(start.max(), max(self.flow)) + m * period
        return due.ravel()

    def _spent(self, rank: int) -> float:
        """Memory times seconds that a microbatch takes which nothing delays."""
        shop, spent = self.shop, 0.0
        for stage in shop.own[rank]:
            back = self.flow[3 * stage + 1] + shop.seconds[3 * stage + 1]
            spent += shop.hold[stage] * (back - self.flow[3 * stage])
            spent += shop.kept[stage] * shop.seconds[3 * stage + 2]
        return spent

    def _block(self, recipe: Recipe, limits: Sequence[float]) -> Block:
        slow = (spent / limit for spent, limit in zip(self.spent, limits, strict=True) if spent)
        shortest = max(self.shop.period, *slow, 0.0)
        key = shortest, round(recipe.period, 3), tuple(round(wait, 2) for wait in recipe.waits)
        if key not in self.blocks:
            period, waits = key[1] * shortest, tuple(wait * self.unit for wait in key[2])
            found = find_block(self.shop, period, waits, self.width)
            self.blocks[key] = found or Block(period, self._slow_flow(waits))
        return self.blocks[key]

    def _slow_flow(self, waits: tuple[float, ...]) -> tuple[float, ...]:
        """The flow of a lone microbatch with half an F of wait, and what is asked, before every op."""
        steps = 2 * self.shop.stages
        late, total = [0.0] * steps, 0.0
        for k in range(steps):
            total += waits[k * len(waits) // steps] + self.unit / 2
            late[k] = total
        start = list(self.flow)
        for stage in range(self.shop.stages):
            start[3 * stage] += late[stage]
            start[3 * stage + 1] += late[steps - 1 - stage]
            start[3 * stage + 2] += late[steps - 1 - stage]
        return tuple(start)
