"""Which schedule: the one that was given, a family by name, or the fastest of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fxpipe.cost.analytic import analytic_costs
from fxpipe.cost.device import Device
from fxpipe.cost.profile import measured_seconds, with_seconds
from fxpipe.errors import LimitError, ScheduleError
from fxpipe.ir.liveness import Liveness as Ledger
from fxpipe.ir.liveness import liveness as ledger
from fxpipe.options import AUTO, Options
from fxpipe.passes.run import Cut
from fxpipe.plan.tensor_ownership import activation_budget as room
from fxpipe.schedule.costs import Costs, Link
from fxpipe.schedule.families.registry import FAMILIES, build
from fxpipe.schedule.offload.planner import Share, with_offload
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.placement import PLACEMENTS, place
from fxpipe.schedule.problem import Limit, per_rank
from fxpipe.schedule.search.auto import Setting, Tried, search
from fxpipe.schedule.simulation.simulator import simulate

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
    options: Options,
    cuts: Sequence[Cut],
    hardware: Device,
    device: torch.device,
    weights: Weights,
    link_seconds: float,
) -> Choice:
    """Raises ScheduleError where no schedule keeps the memory limit.

    link_seconds: for a byte to leave a rank, or to come back.
    """
    candidates: list[tuple[Cut, Ledger]] = []
    settings: list[Setting] = []
    too_heavy: list[LimitError] = []
    for cut in cuts:
        measured = measured_seconds(cut.sections, device) if options.costs == "measured" else {}
        for shape, homes in _placements(options, cut.stages):
            if cut.vocabulary is not None:
                homes = cut.vocabulary.placement(homes)
            entries = ledger(cut.graph, cut.sections, cut.messages, homes)
            costs = with_seconds(analytic_costs(entries, hardware), measured)
            if options.offload is not None:
                costs = replace(costs, link=Link(link_seconds, options.ranks_per_link))
            try:
                limits = _room(options, weights, cut, homes)
            except LimitError as error:
                too_heavy.append(error)
                continue
            if isinstance(options.schedule, Schedule):
                schedule = _lightened(options.schedule, costs, options.offload, limits)
                return Choice(cut, entries, costs, schedule, ())
            settings.append(
                Setting(cut.stages // options.ranks, shape, costs, limits, cut.vocabulary, options.offload)
            )
            candidates.append((cut, entries))
    if not settings:
        raise min(too_heavy, key=lambda error: error.smallest)
    if options.schedule == AUTO:
        found = search(
            settings, ranks=options.ranks, microbatches=options.microbatches, effort=options.effort
        )
        chosen, schedule = found.setting, found.schedule
        tried = tuple((t, candidates[_position(settings, t.setting)][0]) for t in found.tried)
    else:
        chosen, schedule = _fastest(options, settings)
        tried = ()
    cut, entries = candidates[_position(settings, chosen)]
    return Choice(cut, entries, chosen.costs, schedule, tried)


def _room(options: Options, weights: Weights, cut: Cut, homes: tuple[int, ...]) -> Limit:
    return None if options.memory_limit is None else room(options.memory_limit, weights(cut, homes))


def _position(settings: Sequence[Setting], chosen: Setting) -> int:
    return next(k for k, setting in enumerate(settings) if setting is chosen)


def _fastest(options: Options, settings: Sequence[Setting]) -> tuple[Setting, Schedule]:
    """The setting in which the family that was asked for is the fastest; raises the first's error where it
    fits in none."""
    made: list[tuple[float, int, int, Schedule]] = []
    errors: list[ScheduleError] = []
    for k, setting in enumerate(settings):
        # Within the limits as it is, or as much away as it then takes.
        ways: list[tuple[Limit, Share]] = []
        if options.offload in (None, AUTO):
            ways.append((setting.limits, None))
        if options.offload is not None:
            ways.append((None, options.offload))
        for limits, share in ways:
            try:
                schedule = build(
                    str(options.schedule),
                    ranks=options.ranks,
                    microbatches=options.microbatches,
                    costs=setting.costs,
                    stages_per_rank=setting.stages_per_rank,
                    placement=setting.placement,
                    memory_limit=limits,
                    effort=options.effort,
                    vocabulary=setting.vocabulary,
                )
                schedule = _lightened(schedule, setting.costs, share, setting.limits)
            except ScheduleError as error:
                errors.append(error)
                continue
            made.append((simulate(schedule, setting.costs).seconds, k, len(made), schedule))
    if not made:
        raise errors[-1]
    _, k, _, schedule = min(made, key=lambda entry: entry[:3])
    return settings[k], schedule


def _lightened(schedule: Schedule, costs: Costs, share: Share, limits: Limit) -> Schedule:
    """With transfers, where there are to be any."""
    if share is None:
        return schedule
    timeline = simulate(schedule, costs)
    return with_offload(timeline, share, per_rank(limits, schedule.ranks)).schedule


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
