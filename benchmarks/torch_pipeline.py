"""torch.distributed.pipelining as its documentation shows it: hand-made stages and a schedule over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.ops import Op, OpKind, Schedule
from fxpipe.schedule.placement import place
from fxpipe.schedule.search.build import build


@dataclass(frozen=True)
class Entry:
    """A schedule of torch's: how many stages a rank holds, and how they are placed.

    ``family``: fxpipe's name for the same order, where torch has one stage a rank (the order that torch
    lists for these schedules is for drawings, and is not the one that it runs).
    """

    cls: type
    stages_per_rank: int
    placement: str
    family: str | None = None


SCHEDULES = {
    "GPipe": Entry(pipelining.ScheduleGPipe, 1, "plain", "gpipe"),
    "1F1B": Entry(pipelining.Schedule1F1B, 1, "plain", "1f1b"),
    "Interleaved1F1B": Entry(pipelining.ScheduleInterleaved1F1B, 2, "plain"),
    "InterleavedZeroBubble": Entry(pipelining.ScheduleInterleavedZeroBubble, 2, "plain"),
    "ZBVZeroBubble": Entry(pipelining.ScheduleZBVZeroBubble, 2, "v"),
}


class TorchPipeline:
    """One rank of it.

    part: stage -> the module of that stage.  loss_fn: (output of the last stage, its target) -> loss.
    group: of its ranks; by default all processes.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: int,
        microbatches: int,
        part: Callable[[int], nn.Module],
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.name, self.entry = name, SCHEDULES[name]
        self.placement = place(self.entry.placement, ranks, self.entry.stages_per_rank)
        self.microbatches = microbatches
        held = [stage for stage, home in enumerate(self.placement) if home == rank]
        self.is_first, self.is_last = 0 in held, len(self.placement) - 1 in held
        self.parts = nn.ModuleList(part(stage) for stage in held)
        cpu = torch.device("cpu")
        stages = [
            PipelineStage(p, s, len(self.placement), cpu, group=group)
            for p, s in zip(self.parts, held, strict=True)
        ]
        given = stages if self.entry.stages_per_rank > 1 else stages[0]
        self.schedule = self.entry.cls(given, microbatches, loss_fn=loss_fn)

    def step(self, inputs: torch.Tensor, target: torch.Tensor) -> float | None:
        """Forward and backward of a whole batch; the mean loss on the rank that has it."""
        losses: list[torch.Tensor] = []
        given = (inputs,) if self.is_first else ()
        if self.is_last:
            self.schedule.step(*given, target=target, losses=losses)
            return float(torch.stack(losses).mean())
        self.schedule.step(*given)
        return None

    def zero_grad(self) -> None:
        self.parts.zero_grad(set_to_none=False)

    def as_schedule(self) -> Schedule:
        """What every rank runs, in fxpipe's words."""
        if self.entry.family is not None:
            costs = chain([StageCost(1.0, 1.0, 1.0)] * len(self.placement))
            return build(
                self.entry.family, ranks=len(self.placement), microbatches=self.microbatches, costs=costs
            )
        listed = self.schedule.pipeline_order
        order = tuple(tuple(_op(a) for a in listed[rank] if a is not None) for rank in sorted(listed))
        return Schedule(self.name, self.placement, self.microbatches, order)


_KINDS = {"F": OpKind.F, "I": OpKind.B, "W": OpKind.W, "B": OpKind.BW}


def _op(action: pipelining.schedules._Action) -> Op:
    return Op(_KINDS[action.computation_type.value], action.stage_index, action.microbatch_index)
