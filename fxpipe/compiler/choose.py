"""The choice of a cut and a schedule: the candidates with their costs, and the fastest of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import torch
from torch import nn

from fxpipe.compiler.cut import Cut, Stages
from fxpipe.compiler.cut import cut as cut_at_level
from fxpipe.compiler.options import Candidates, Options
from fxpipe.compiler.progress import Phases
from fxpipe.compiler.tensor_ownership import (
    activation_budget,
    copy_bytes,
    gradient_bytes,
    result_bytes,
    tensor_ownership,
    trained_parameters,
    weight_bytes,
    with_replicas,
)
from fxpipe.cost.analytic import SecondsOfRanks, seconds_on, section_costs
from fxpipe.cost.cluster import Cluster
from fxpipe.cost.exchange import exchanges
from fxpipe.cost.profile import Known, measured_seconds
from fxpipe.cost.update import update_costs
from fxpipe.errors import LimitError, ScheduleError
from fxpipe.ir.liveness import Liveness, liveness
from fxpipe.passes.recompute import Level
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.costs import Link
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.search.fastest import fastest


def choose(
    options: Options,
    stages: Sequence[Stages],
    tried: Candidates,
    model: nn.Module,
    cluster: Cluster,
    device: torch.device,
    known: Known,
    bandwidth: float,
    phase: Phases,
) -> tuple[Cut, Liveness, SearchResult]:
    """The cut with the shortest simulated step, its liveness on its ranks, and its schedule.

    device, known: where sections are timed, and with which tensors, if the costs are measured.
    bandwidth: bytes a second to the offload store, one way.
    Raises ScheduleError where no schedule keeps the memory limit.
    """
    first, *levels = tried.levels
    cuts: dict[tuple[int, str, int, str], tuple[Cut, Liveness]] = {}  # by the problem's setting
    bounds: dict[Stages, float] = {}  # seconds, at the first level
    too_heavy: list[LimitError] = []
    held_always: list[int] = []  # bytes, of any rank in any problem

    def at_level(of: Stages, level: Level | None) -> Iterator[Problem]:
        cut = cut_at_level(of, level, phase)
        if options.costs == "measured":
            overhead = cluster.first.stage_overhead
            measured = measured_seconds(cut.sections, device, overhead, known, options.backend)
            seconds: SecondsOfRanks = (measured,) * options.ranks
        else:
            seconds = seconds_on(cluster, cut.graph)
        for name in of.options.placements:
            rank_of_stage = tried.placements[of.options.stages][name]
            if cut.vocabulary is not None:
                rank_of_stage = cut.vocabulary.placement(rank_of_stage)
            held = tensor_ownership(model, cut.sections, rank_of_stage, options.ranks)
            trained = trained_parameters(model, held, options.grad_dtype)
            divided = options.replicas if options.shard else 1
            sizes = {}
            if options.replicas > 1:
                sizes = gradient_bytes(model, held, cut.sections, options.grad_dtype)
            limits = None
            if options.memory_limit is not None:
                try:
                    weights = weight_bytes(model, held, options.grad_dtype)
                    if options.replicas > 1:
                        asked = options.replicas, options.shard, options.per_use
                        weights = with_replicas(weights, sizes, rank_of_stage, *asked)
                    results = result_bytes(cut.graph, rank_of_stage, options.ranks, options.microbatches)
                    both = [a + b for a, b in zip(weights, results, strict=True)]
                    if options.validation == "post":
                        both = [a + b for a, b in zip(both, copy_bytes(trained, divided), strict=True)]
                    limits = activation_budget(options.memory_limit, both)
                    held_always.extend(both)
                except LimitError as error:
                    too_heavy.append(error)
                    continue
            live = liveness(cut.graph, cut.sections, cut.edges, rank_of_stage)
            costs = section_costs(live, seconds, cluster, rank_of_stage, options.ranks_per_machine)
            costs = replace(costs, update=update_costs(cluster, trained, divided))
            if options.replicas > 1:
                mesh = options.replicas, options.shard or "", options.per_use, options.ranks_per_machine
                costs = replace(costs, exchanges=exchanges(cluster, rank_of_stage, sizes, *mesh))
            if options.offload.share is not None:
                costs = replace(costs, link=Link(1 / bandwidth, options.offload.ranks_per_link))
            problem = Problem(
                options.ranks,
                options.microbatches,
                cut.stages // options.ranks,
                name,
                costs,
                per_rank(limits, options.ranks),
                cut.vocabulary,
                offload=options.offload.share,
                recompute=cut.recompute or "",
                objective="period" if options.validation == "post" else "makespan",
            )
            if level == first:
                if options.validation == "post":
                    bound = problem.work
                else:
                    bound = lower_bound(costs, rank_of_stage, options.microbatches)
                bounds[of] = min(bound, bounds.get(of, inf))
            cuts[problem.setting] = cut, live
            yield problem

    def recomputing(beat: float) -> list[Problem]:
        """The other levels, of stages that can be as fast: recomputation adds to the work of each."""
        able = [of for of, bound in bounds.items() if bound <= beat]
        phase.expect(2 + 2 * len(able) * len(levels))
        return [problem for of in able for level in levels for problem in at_level(of, level)]

    without = [problem for of in stages for problem in at_level(of, first)]
    if not without:
        raise min(too_heavy, key=lambda error: error.smallest)
    try:
        found = fastest(
            options.schedule,
            without,
            effort=options.effort,
            more=recomputing if levels else None,
        )
    except ScheduleError as error:
        if options.memory_limit is None:
            raise
        raise _with_weights(error, options.memory_limit, held_always) from error
    return *cuts[found.problem.setting], found


def _with_weights(error: ScheduleError, limit: float, weights: Sequence[int]) -> ScheduleError:
    """The error of a search, whose limits are of activations, with what a rank holds beside them."""
    most = max(weights)
    text = (
        f"{str(error).removesuffix('.')}. These bytes are of activations: of memory_limit={limit:.0f}, "
        f"parameters, gradients, buffers and outputs take {min(weights)} to {most} on each rank."
    )
    if not isinstance(error, LimitError):
        return ScheduleError(text)
    enough = error.smallest + most
    return LimitError(f"{text} memory_limit={enough:.0f} is enough.", enough)
