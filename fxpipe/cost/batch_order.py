"""The fastest order of a plan's ops for the microbatches of a batch, each of its own lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxpipe.cost.plan_costs import costs_of
from fxpipe.errors import SizeError
from fxpipe.plan.artifact import Plan
from fxpipe.plan.step import NamedLength, allowed
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.search.uneven import LOOKS_A_SECOND, WORK, Uneven
from fxpipe.schedule.simulation.timeline import Timeline

_Lengths = tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class BatchPlanner:
    """Orders for the stages and the memory of a plan whose dimensions have names."""

    plan: Plan

    def timeline(self, lengths: Sequence[Mapping[str, int]]) -> Timeline:
        """The fastest order for microbatches of these lengths, simulated.

        It holds no more memory for activations than the plan's limits or, without a limit, the plan's own
        order at the example's lengths.
        """
        plan, schedule = self.plan, self.plan.ordered
        problem = Uneven(
            tuple(map(self.costs, lengths)),
            plan.placement,
            plan.limits or plan.prediction.peak_memory,
            schedule.joined,
            in_order=bool(plan.changed),
        )
        static = schedule.order if len(lengths) == plan.step.microbatches else None
        # The search takes no longer than the step: of short ones little can be gained.
        order = problem.best(static, min(WORK, int(problem.bound * LOOKS_A_SECOND)))
        name = schedule.name if order is static else f"{schedule.name} by lengths"
        return problem.timeline(Schedule(name, plan.placement, len(lengths), order), plan.costs)

    def costs(self, lengths: Mapping[str, int]) -> Costs:
        """The costs of a microbatch of these lengths, found once for each."""
        key = tuple(lengths.items())
        if key not in self._costs:
            # Of an evaluation they are those of the example, whatever the lengths.
            self._costs[key] = costs_of(self.plan, None if self.plan.work is None else lengths)
        return self._costs[key]

    @cached_property
    def _costs(self) -> dict[_Lengths, Costs]:
        return {}


def named_lengths(
    names: Sequence[NamedLength], given: Sequence[Mapping[str, int] | int]
) -> list[dict[str, int]]:
    """The lengths of microbatches by name: numbers are those of the one name that there is.

    Raises SizeError for none, for names that programs do not have, and for lengths that they do not take.
    """
    if not names:
        raise SizeError(
            "The programs take microbatches of the example's lengths alone: name a dimension of it when you "
            'compile, for example dimensions={"sequence": 512}.'
        )
    if not given:
        raise SizeError("lengths is empty: give those of each microbatch.")
    each = []
    for m, lengths in enumerate(given):
        named = {names[0].name: lengths} if isinstance(lengths, int) and len(names) == 1 else lengths
        if not isinstance(named, Mapping) or {*named} != {one.name for one in names}:
            known = ", ".join(one.name for one in names)
            raise SizeError(f"lengths[{m}] is {lengths!r} and must give {known}.")
        for one in names:
            if not one.allows(named[one.name]):
                raise SizeError(f"lengths[{m}] has {one.name} {named[one.name]}. {allowed(one)}")
        each.append({one.name: named[one.name] for one in names})
    return each


def filled(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """The samples of as many microbatches as they fill: the longest first, to the fullest with room."""
    places: list[list[int]] = []
    room: list[int] = []
    for k in sorted(range(len(lengths)), key=lambda k: (-lengths[k], k)):
        able = [m for m in range(len(places)) if room[m] >= lengths[k]]
        m = min(able, key=lambda m: (room[m], m), default=len(places))
        if m == len(places):
            places.append([])
            room.append(tokens)
        places[m].append(k)
        room[m] -= lengths[k]
    return [sorted(place) for place in places]
