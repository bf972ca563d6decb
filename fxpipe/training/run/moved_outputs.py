"""The outputs of a step on the ranks that are to have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

import torch

from fxpipe.plan.step import OutputSpec
from fxpipe.plan.tensors import dtype_of
from fxpipe.runtime.batch.outputs import Collected, Listed, On, empty, joined
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.rank import Runtime

_Where = int | Literal["all"]


def outputs_of(rt: Runtime, on: On, process: Process | None) -> tuple[dict[str, torch.Tensor], Listed]:
    """The outputs of the last step that this rank is to have, of its replica's rows, and those of the
    microbatches of a list.  Unless ``on`` is None, all ranks call it alike."""
    asked, microbatches = rt.collected, rt.spec.microbatches
    computed, listed = asked.joined(rt.rank, microbatches), asked.in_order(rt.rank)
    rt.collected = Collected()  # the caller alone keeps them
    if on is None or process is None:
        return computed, listed
    if asked.any_length:
        lists = listed if asked.is_list else {name: [value] for name, value in computed.items()}
        there = _listed_on(asked.wanted, lists, on, process, rt.device)
        return ({}, there) if asked.is_list else ({name: value for name, (value,) in there.items()}, {})
    moved = {}
    for name, spec in asked.wanted.items():
        value = computed.get(name)
        if value is None:
            value = joined(empty(spec, microbatches, rt.device))
        _move(value, spec, on, process)
        if on in ("all", process.rank):
            moved[name] = value
    return moved, {}


def _listed_on(
    wanted: Mapping[str, OutputSpec],
    listed: Listed,
    on: _Where,
    process: Process,
    device: torch.device | None,
) -> Listed:
    """The values of lists on the ranks that are to have them, whose shapes are known where they were
    computed."""
    computed = {name: [tuple(x.shape) for x in each] for name, each in listed.items()}
    shapes = [json.loads(each) for each in process.gather_in_replica(json.dumps(computed).encode())]
    moved: Listed = {}
    for name, spec in wanted.items():
        dtype = dtype_of(spec.dtype)
        values = listed.get(name) or [
            torch.empty(shape, dtype=dtype, device=device) for shape in shapes[spec.rank][name]
        ]
        for value in values:
            _move(value, spec, on, process)
        if on in ("all", process.rank):
            moved[name] = values
    return moved


def _move(value: torch.Tensor, spec: OutputSpec, on: _Where, process: Process) -> None:
    """Give a value of an output to the ranks that are to have it, in place; all ranks call it."""
    data = value.view(-1).view(torch.uint8)  # gloo does not know all dtypes
    if on == "all":
        process.broadcast_in_replica_(data, spec.rank)
    elif spec.rank != on and process.rank in (spec.rank, on):
        ranks = process.of_replica(process.replica)
        process.send_to(data, ranks[spec.rank], ranks[on])
