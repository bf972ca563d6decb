"""The choice of a cut and a schedule: the candidates with their costs, and the fastest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from fxpipe.cost.analytic import analytic_seconds, section_costs
from fxpipe.cost.nodes import NodeSeconds
from fxpipe.cost.profile import Known, measured_seconds
from fxpipe.errors import LimitError
from fxpipe.ir.liveness import Liveness, liveness
from fxpipe.options import Options
from fxpipe.passes.run import Cut
from fxpipe.plan.tensor_ownership import (
    activation_budget,
    output_bytes,
    tensor_ownership,
    weight_bytes,
)
from fxpipe.schedule.costs import Link
from fxpipe.schedule.search.auto import SearchResult, Setting
from fxpipe.schedule.search.fastest import fastest


def choose(
    options: Options,
    cuts: Sequence[Cut],
    placements: Mapping[int, Mapping[str, tuple[int, ...]]],
    model: nn.Module,
    node_seconds: NodeSeconds,
    device: torch.device,
    known: Known,
    bandwidth: float,
) -> tuple[Cut, Liveness, SearchResult]:
    """The cut with the shortest simulated step, its liveness on its ranks, and its schedule.

    placements: of so many stages, the candidates: the rank of each stage.
    device, known: where sections are timed, and with which tensors, if the costs are measured.
    bandwidth: bytes a second to the offload store, one way.
    Raises ScheduleError where no schedule keeps the memory limit.
    """
    hardware = node_seconds.device
    settings: dict[Setting, tuple[Cut, Liveness]] = {}
    too_heavy: list[LimitError] = []
    for cut in cuts:
        if options.costs == "measured":
            seconds = measured_seconds(cut.sections, device, hardware.stage_overhead, known)
        else:
            seconds = analytic_seconds(cut.graph, node_seconds)
        for name, rank_of_stage in placements[cut.stages].items():
            if cut.vocabulary is not None:
                rank_of_stage = cut.vocabulary.placement(rank_of_stage)
            limits = None
            if options.memory_limit is not None:
                try:
                    held = tensor_ownership(model, cut.sections, rank_of_stage, options.ranks)
                    weights = weight_bytes(model, held)
                    outputs = output_bytes(cut.graph, rank_of_stage, options.ranks, options.microbatches)
                    both = [a + b for a, b in zip(weights, outputs, strict=True)]
                    limits = activation_budget(options.memory_limit, both)
                except LimitError as error:
                    too_heavy.append(error)
                    continue
            live = liveness(cut.graph, cut.sections, cut.messages, rank_of_stage)
            costs = section_costs(live, seconds, hardware, options.ranks_per_machine)
            if options.offload.share is not None:
                costs = replace(costs, link=Link(1 / bandwidth, options.offload.ranks_per_link))
            setting = Setting(
                stages_per_rank=cut.stages // options.ranks,
                placement=name,
                costs=costs,
                limits=limits,
                vocabulary=cut.vocabulary,
                offload=options.offload.share,
                recompute=cut.recompute or "",
            )
            settings[setting] = cut, live
    if not settings:
        raise min(too_heavy, key=lambda error: error.smallest)
    found = fastest(
        options.schedule,
        [*settings],
        ranks=options.ranks,
        microbatches=options.microbatches,
        effort=options.effort,
    )
    return *settings[found.setting], found
