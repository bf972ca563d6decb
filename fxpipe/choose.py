"""Which schedule: the one that was given, a family by name, or the fastest of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxpipe.costing import Ledger, analytic_costs, ledger
from fxpipe.cut import Cut
from fxpipe.errors import ScheduleError
from fxpipe.limit import room
from fxpipe.measure import measured_seconds, with_seconds
from fxpipe.options import AUTO, Options
from fxpipe.partition.device import Device
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.families import FAMILIES, build
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.placement import PLACEMENTS, place
from fxpipe.schedule.search import Setting, Tried, search
from fxpipe.schedule.simulator import simulate

Weights = Callable[[Cut, tuple[int, ...]], tuple[int, ...]]
"""What parameters, gradients and buffers take on each rank, given which rank holds which stage."""


@dataclass(frozen=True, eq=False)
class Choice:
    """``tried``: what the search for the fastest schedule looked at, with its cut; empty where a schedule was
    named."""

    cut: Cut
    ledger: Ledger
    costs: Costs
    schedule: Schedule
    tried: tuple[tuple[Tried, Cut], ...]


def choose(
    options: Options, cuts: Sequence[Cut], hardware: Device, device: torch.device, weights: Weights
) -> Choice:
    """Raises ScheduleError where no schedule keeps the memory limit."""
    candidates: list[tuple[Cut, Ledger]] = []
    settings: list[Setting] = []
    for cut in cuts:
        measured = measured_seconds(cut.sections, device) if options.costs == "measured" else {}
        for shape, homes in _placements(options, cut.stages):
            if cut.vocabulary is not None:
                homes = cut.vocabulary.placement(homes)
            entries = ledger(cut.graph, cut.sections, cut.messages, homes)
            costs = with_seconds(analytic_costs(entries, hardware), measured)
            if isinstance(options.schedule, Schedule):
                return Choice(cut, entries, costs, options.schedule, ())
            limits = None if options.memory_limit is None else room(options.memory_limit, weights(cut, homes))
            settings.append(Setting(cut.stages // options.ranks, shape, costs, limits, cut.vocabulary))
            candidates.append((cut, entries))
    if options.schedule == AUTO:
        found = search(settings, ranks=options.ranks, microbatches=options.microbatches)
        chosen, schedule = found.setting, found.schedule
        tried = tuple((t, candidates[_position(settings, t.setting)][0]) for t in found.tried)
    else:
        chosen, schedule = _fastest(options, settings)
        tried = ()
    cut, entries = candidates[_position(settings, chosen)]
    return Choice(cut, entries, chosen.costs, schedule, tried)


def _position(settings: Sequence[Setting], chosen: Setting) -> int:
    return next(k for k, setting in enumerate(settings) if setting is chosen)


def _fastest(options: Options, settings: Sequence[Setting]) -> tuple[Setting, Schedule]:
    """The setting in which the family that was asked for is the fastest; raises the first's error where it
    fits in none."""
    made: list[tuple[float, int, Schedule]] = []
    errors: list[ScheduleError] = []
    for k, setting in enumerate(settings):
        try:
            schedule = build(
                str(options.schedule),
                ranks=options.ranks,
                microbatches=options.microbatches,
                costs=setting.costs,
                stages_per_rank=setting.stages_per_rank,
                placement=setting.placement,
                memory_limit=setting.limits,
                vocabulary=setting.vocabulary,
            )
        except ScheduleError as error:
            errors.append(error)
            continue
        seconds = simulate(schedule, setting.costs).seconds if len(settings) > 1 else 0.0
        made.append((seconds, k, schedule))
    if not made:
        raise errors[0]
    _, k, schedule = min(made, key=lambda entry: entry[:2])
    return settings[k], schedule


def _placements(options: Options, stages: int) -> list[tuple[str, tuple[int, ...]]]:
    """The names of the placements that come into question, and the rank of each stage in them."""
    if isinstance(options.schedule, Schedule):
        return [("", options.schedule.placement)]
    stages_per_rank = stages // options.ranks
    if options.placement is not None:
        names = [options.placement]
    elif options.schedule != AUTO:
        names = [FAMILIES[options.schedule].placement]
    else:
        names = [*PLACEMENTS] if stages_per_rank > 1 else ["plain"]
    return [(name, place(name, options.ranks, stages_per_rank)) for name in names]
