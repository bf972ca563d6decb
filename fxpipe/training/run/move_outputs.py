"""Moves the outputs of a step between ranks, on request."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxpipe.plan.step import OutputSpec
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.outputs import On, empty, joined


def move_outputs(
    computed: dict[str, torch.Tensor],
    wanted: Mapping[str, OutputSpec],
    on: On,
    process: Process | None,
    microbatches: int,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The outputs that this rank is to have, of its replica's rows; unless ``on`` is None, all ranks call it
    alike.

    computed: those that this rank computed.
    """
    if on is None or process is None:
        return computed
    moved = {}
    for name, spec in wanted.items():
        value = computed.get(name)
        if value is None:
            value = joined(empty(spec, microbatches, device))
        data = value.view(-1).view(torch.uint8)  # gloo does not know all dtypes
        if on == "all":
            process.broadcast_in_replica_(data, spec.rank)
        elif spec.rank != on and process.rank in (spec.rank, on):
            ranks = process.of_replica(process.replica)
            process.send_to(data, ranks[spec.rank], ranks[on])
        if on in ("all", process.rank):
            moved[name] = value
    return moved
