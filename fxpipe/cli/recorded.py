"""The costs of a recorded run (``plan/saved/recorded.py``)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from fxpipe.cost.profile import with_seconds
from fxpipe.plan.artifact import Plan
from fxpipe.plan.saved.recorded import RankSpans, recorded_ops
from fxpipe.schedule.costs import Costs, StageCost
from fxpipe.schedule.ops import PHASES, Color, OpKind, Phase


def recorded_costs(plan: Plan, spans: Sequence[RankSpans]) -> Costs:
    """The plan's costs with each stage's times replaced by the medians of its ops; bytes and edges stay.

    The time of a BW is divided between B and W as in the plan.
    Raises ArtifactError if the spans do not belong to this plan.
    """
    times_of: dict[tuple[int, OpKind], list[float]] = defaultdict(list)
    for ops in recorded_ops(plan, spans):
        for op, start, end in ops:
            times_of[op.stage, op.kind].append(end - start)
    seconds = {}
    for (stage, kind), times in times_of.items():
        for phase, share in _shares(kind, plan.costs.stages[stage]).items():
            seconds[Color(stage, phase)] = share * statistics.median(times)
    return with_seconds(plan.costs, seconds)


def _shares(kind: OpKind, planned: StageCost) -> dict[Phase, float]:
    if kind is not OpKind.BW:
        return {PHASES[kind][0]: 1.0}
    both = planned.backward + planned.weight
    backward = planned.backward / both if both else 1.0
    return {Phase.B: backward, Phase.W: 1 - backward}
