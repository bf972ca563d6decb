"""The exchanges of a rank with its other replicas, one after the other on their link.

All replicas run the same schedule, so they come to each exchange at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from fxpipe.schedule.bucket_use import BucketUse, once, per_use
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.ops import PHASES, Op, OpKind, Phase
from fxpipe.schedule.simulation.timeline import ExchangeSpan


class Exchanges:
    """Of one rank, as its ops are run in their order from time ``begin`` on.  ``spans``: those so far."""

    def __init__(self, ops: Sequence[Op], costs: Costs, begin: float = 0.0) -> None:
        self.spans: list[ExchangeSpan] = []
        self._costs = costs.exchanges
        self._ready: dict[Op, float] = {}  # when the parameters are there that it needs first
        self._gathers: defaultdict[Op, list[int]] = defaultdict(list)  # by the first op that needs them
        self._sums: defaultdict[Op, list[int]] = defaultdict(list)
        self._next = dict(pairwise(ops))
        stages = dict.fromkeys(op.stage for op in ops) if costs.exchanges else ()
        ahead = []
        for stage in stages:
            use = _use(ops, stage, costs.exchanges[stage].per_use)
            for first, _ in use.spans:
                self._gathers[first].append(stage)
            for op in use.sums:
                self._sums[op].append(stage)
            ahead += [first for first, _ in use.spans if not use.frees or first == ops[0]]
        for op in ahead:
            self._gather(op, begin)

    def begin(self, op: Op, start: float) -> float:
        """Return when an op begins that could begin at ``start``, and ask for what the next one needs."""
        start = max(start, self._ready.get(op, 0.0))
        if op in self._next:
            self._gather(self._next[op], start)
        return start

    def end(self, op: Op, end: float) -> None:
        for stage in self._sums.pop(op, ()):
            self._carry("sum", stage, self._costs[stage].sum, end)

    def _gather(self, op: Op, time: float) -> None:
        for stage in self._gathers.pop(op, ()):
            self._ready[op] = self._carry("gather", stage, self._costs[stage].gather, time)

    def _carry(self, what: str, stage: int, seconds: float, time: float) -> float:
        """Exchange from ``time`` on; return when it is over."""
        start = max(time, self.spans[-1].end) if self.spans else time
        if seconds:
            self.spans.append(ExchangeSpan(what, stage, start, start + seconds))
        return start + seconds


def _use(ops: Sequence[Op], stage: int, each: bool) -> BucketUse:
    """The ops around which a rank needs the parameters of a stage, and behind which it sums its gradients."""
    stage_ops = [op for op in ops if op.stage == stage]
    last = next((op for op in reversed(stage_ops) if Phase.W in PHASES[op.kind]), stage_ops[-1])
    if not each:
        return once(stage_ops[0], last)
    return per_use(
        ops,
        lambda op: op.stage == stage and op.kind is not OpKind.W,
        lambda op: op.stage == stage and Phase.W in PHASES[op.kind],
        last,
    )
