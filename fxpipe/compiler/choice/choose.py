"""The choice of a cut and a schedule: the candidates with their costs, and the fastest of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import TypeVar

import torch
from torch import nn

from fxpipe.compiler.choice.candidates import Candidates
from fxpipe.compiler.choice.cut import Cut, Cuts, Stages
from fxpipe.compiler.choice.refine_cuts import LighterCuts
from fxpipe.compiler.options import Settings
from fxpipe.compiler.passes import CutOptions
from fxpipe.compiler.progress import Phases
from fxpipe.compiler.tensor_ownership import (
    activation_budget,
    copy_bytes,
    result_bytes,
    stage_tensors,
    tensor_ownership,
    tensors_of,
    trained_parameters,
    weight_bytes,
    with_replicas,
)
from fxpipe.cost.analytic import SecondsOfRanks, seconds_on, section_costs, work_for_any_size
from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.exchange import StageTensors, exchanges
from fxpipe.cost.profile import Known, measured_seconds
from fxpipe.cost.update import Trained, update_costs
from fxpipe.errors import DeadlockError, LimitError, PartitionError, ScheduleError
from fxpipe.ir.liveness import Liveness, liveness
from fxpipe.partition.cuts import SLACK
from fxpipe.passes.level.recompute import Level
from fxpipe.plan.artifact import HeldBytes
from fxpipe.plan.lanes import LanePlan
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.costs import Costs, Link
from fxpipe.schedule.memory_text import MemoryText
from fxpipe.schedule.offload.planner import keeps
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.parts import placement_of_parts
from fxpipe.schedule.problem import Problem, Setting, per_rank
from fxpipe.schedule.search.comparison import row_of
from fxpipe.schedule.search.fastest import fastest
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.units import units_of

_T = TypeVar("_T")

_WORTH = 0.97  # of the memory that is needed: with twice the parts it has to be less, or more are not tried


@dataclass(frozen=True, eq=False)
class Placed:
    """A cut on its ranks, with its costs and bytes in one replica.

    ``ranks``: of each stage.  ``weights``: of each rank, its parameters, gradients and buffers.
    ``exchanged``: of what the replicas of each stage may exchange.  ``trained``: the parameters that
    each rank updates.
    """

    cut: Cut
    live: Liveness
    shape: str
    ranks: tuple[int, ...]
    costs: Costs
    weights: tuple[HeldBytes, ...]
    exchanged: Mapping[int, StageTensors]
    trained: tuple[tuple[Trained, ...], ...]

    def updated(self, mesh: Mesh) -> Sequence[Sequence[Trained]]:
        """What a process of each rank updates."""
        if not mesh.shard:
            return self.trained
        return [[one.of_owner(mesh.replicas) for one in each] for each in self.trained]


@dataclass(frozen=True, eq=False)
class Costing:
    """The cuts of a step at each level of recomputation on their ranks, each with its costs, made once.

    device, known: where sections are timed, and with which tensors, if the costs are measured.
    bandwidth: bytes a second to the offload store, one way.  sizes: of the costs, where these are other
    lengths than the example's.
    """

    options: Settings
    tried: Candidates
    cuts: Cuts
    model: nn.Module
    cluster: Cluster
    device: torch.device
    known: Known
    bandwidth: float
    phase: Phases
    lanes: LanePlan
    sizes: Mapping[str, int] | None = None
    _placed: dict[tuple[Stages, Level | None], list[Placed]] = field(default_factory=dict)

    def __call__(self, of: Stages, level: Level | None) -> list[Placed]:
        if (of, level) not in self._placed:
            cut = self.cuts.cut(of, level, self.phase, again=len(self.tried.levels) > 1)
            self._placed[of, level] = list(self._all(of, cut))
        return self._placed[of, level]

    def _all(self, of: Stages, cut: Cut) -> Iterator[Placed]:
        options, cluster, model = self.options, self.cluster, self.model
        if options.costs == "measured":
            # On this device alone: the others are taken to be as fast.
            measured = measured_seconds(
                cut.sections,
                cut.graph,
                self.device,
                cluster.first,
                self.known,
                options.compiled,
                options.ranks_per_machine or options.mesh.ranks,
            )
            seconds: SecondsOfRanks = (measured,) * options.mesh.ranks
        else:
            seconds = seconds_on(cluster, cut.graph, options.compiled)
        for name in of.options.placements:
            ranks = self.tried.placements[of.options.stages][name]
            if cut.step.parts:
                ranks = placement_of_parts(ranks, cut.step.parts)
            if cut.step.vocabulary is not None:
                ranks = cut.step.vocabulary.placement(ranks)
            ownership = tensor_ownership(
                model, cut.sections, ranks, options.mesh.ranks, options.on_ranks, options.has_on_ranks
            )
            tensors = tensors_of(model, ownership)
            # By placement, as what two stages of a rank share is in memory once.
            live = liveness(cut.graph, cut.sections, cut.edges, ranks)
            costs = section_costs(live, seconds, cluster, ranks, options.ranks_per_machine)
            if self.sizes is not None and cut.step.resized is not None:
                work = work_for_any_size(live, cut.graph, cut.step.resized, cluster, ranks, options.compiled)
                costs = work.costs(costs, self.sizes)
            yield Placed(
                cut,
                live,
                name,
                ranks,
                costs,
                weight_bytes(tensors, ownership, options.grad_dtype),
                stage_tensors(tensors, ownership, cut.sections, options.grad_dtype, self.lanes),
                trained_parameters(tensors, ownership, options.grad_dtype, self.lanes),
            )

    def balanced(self, of: Stages, chosen: Chosen) -> Stages | None:
        """Cut the step such that the ranks are balanced, where those of a V placement are uneven."""
        problem = chosen.result.problem
        work = [problem.arrays.work(rank) for rank in range(problem.ranks)]
        # In plain placement, balanced stages are balanced ranks.
        if not problem.is_v or max(work) <= (1 + SLACK) * sum(work) / len(work):
            return None
        ranks = self.tried.placements[of.options.stages][problem.shape]
        return self._cut_again(of, replace(of.options, placements=(problem.shape,), balanced=ranks))

    def lighter(self, of: Stages, chosen: Chosen) -> Stages | None:
        """Cut the step in as many stages where fewer values cross."""
        result = chosen.result
        assert of.step.cut is not None, "it was cut by its costs"
        vocabulary = result.problem.vocabulary
        first = 0 if vocabulary is None else vocabulary.embedding_shards
        cuts = LighterCuts(of.step.cut, first, result.problem, result.schedule.order, self.cluster).moved()
        if cuts is None:
            return None
        return self._cut_again(of, replace(of.options, placements=(result.problem.shape,), cuts=cuts))

    def _cut_again(self, of: Stages, options: CutOptions) -> Stages | None:
        try:
            return self.cuts.stages_of(of.whole, options, self.phase)
        except PartitionError:
            return None

    def problem(self, placed: Placed, options: Settings) -> Problem:
        """What a schedule has to do; ``options`` say how many replicas there are, and what they divide.

        Raises LimitError where the memory limit leaves nothing for activations.
        """
        units = units_of(options.limit_text)
        limits, text = None, MemoryText(units)
        if options.memory_limit is not None:
            fixed = tuple(each.total for each in held_bytes(placed, options))
            limits, text = activation_budget(options.memory_limit, fixed, units), MemoryText(units, fixed)
        cut, costs, mesh = placed.cut, placed.costs, options.mesh
        if options.gradients:
            costs = replace(costs, update=update_costs(self.cluster, placed.updated(mesh)))
        if mesh.replicas > 1 or self.lanes.summed or (mesh.shard and self.lanes.number > 1):
            exchanged = exchanges(
                self.cluster,
                placed.ranks,
                placed.exchanged,
                self.lanes.number,
                mesh.replicas,
                mesh.shard,
                options.per_use,
                options.ranks_per_machine,
            )
            costs = replace(costs, exchanges=exchanged)
        if options.offload.share is not None:
            costs = replace(costs, link=Link(1 / self.bandwidth, options.offload.ranks_per_link))
        return Problem(
            mesh.ranks,
            mesh.microbatches,
            cut.options.stages // mesh.ranks,
            placed.shape,
            costs,
            per_rank(limits, mesh.ranks),
            cut.step.vocabulary,
            offload=options.offload.share,
            recompute=cut.recompute,
            text=text,
            objective=options.objective,
            head_chunks=cut.options.head_chunks,
            parts=cut.step.parts,
        )


@dataclass(frozen=True, eq=False)
class Chosen:
    """A cut on its ranks, its schedule, and the bytes that each rank always holds beside activations."""

    placed: Placed
    result: SearchResult
    fixed: tuple[HeldBytes, ...]

    @property
    def memory(self) -> float:
        """Bytes of the rank that needs the most."""
        return max(a.total + b for a, b in zip(self.fixed, self.result.timeline.peak_memory, strict=True))

    def of_mesh(self, mesh: Mesh) -> TriedMesh:
        """What the mesh costs with it."""
        result, recomputed = self.result, self.placed.cut.recompute
        name, stages = result.schedule.name, result.problem.stages_per_rank
        return TriedMesh(mesh, result.seconds, self.memory, name, stages, recomputed)


def held_bytes(placed: Placed, options: Settings) -> tuple[HeldBytes, ...]:
    """Per rank the bytes that it holds throughout a step."""
    mesh, updated = options.mesh, placed.updated(options.mesh)
    weights = with_replicas(
        placed.weights, placed.exchanged, placed.ranks, mesh.replicas, mesh.shard, options.per_use
    )
    results = result_bytes(placed.cut.graph, placed.ranks, mesh.ranks, mesh.microbatches)
    states = [int(options.optimizer_bytes * sum(one.elements for one in each)) for each in updated]
    copies = copy_bytes(updated) if options.updates_ahead else [0] * mesh.ranks
    return tuple(
        replace(each, results=result, optimizer=state, copies=copied)
        for each, result, state, copied in zip(weights, results, states, copies, strict=True)
    )


def choose(options: Settings, stages: Sequence[Stages], costing: Costing) -> Chosen:
    """The cut with the shortest simulated step on its ranks, and its schedule.

    Raises ScheduleError where no schedule keeps the memory limit.
    """
    first, *levels = costing.tried.levels
    by_setting: dict[Setting, tuple[Stages, Placed]] = {}  # by the problem's setting
    bounds: dict[Stages, float] = {}  # seconds, at the first level
    too_heavy: list[LimitError] = []

    def at_level(of: Stages, level: Level | None) -> list[Problem]:
        placed_problems, errors = _problems(options, of, costing, level)
        by_setting.update((problem.setting, (of, placed)) for placed, problem in placed_problems)
        too_heavy.extend(errors)
        if level == first and placed_problems:
            bounds[of] = _bound(placed_problems)
        return [problem for _, problem in placed_problems]

    def recomputing(beat: float) -> list[Problem]:
        """The other levels, of stages that can be as fast: recomputation adds to the work of each."""
        able = [of for of, bound in bounds.items() if bound <= beat]
        # Known only now; the display counts them in.
        costing.phase.expect(2 + 2 * len(able) * len(levels))
        return [problem for of in able for level in levels for problem in at_level(of, level)]

    without = [problem for of in stages for problem in at_level(of, first)]
    if not without:
        raise min(too_heavy, key=lambda error: error.smallest)
    result = fastest(options.schedule, without, effort=options.effort, more=recomputing if levels else None)
    of, placed = by_setting[result.problem.setting]
    chosen = Chosen(placed, result, held_bytes(placed, options))
    is_given = isinstance(options.schedule, Schedule)
    # The sections of other cuts would have to be measured, too.
    is_able = of.step.cut is not None and options.costs != "measured"
    return _with_other_cuts(options, of, costing, chosen) if is_able and not is_given else chosen


def _with_other_cuts(options: Settings, of: Stages, costing: Costing, chosen: Chosen) -> Chosen:
    """What was chosen, with other cuts where a step takes no longer with them."""
    # With balanced ranks other orders are fast; with lighter messages costs hardly change.
    for cut_again, searches in ((costing.balanced, True), (costing.lighter, False)):
        other = cut_again(of, chosen)
        if other is not None:
            better = _if_no_slower(options, other, costing, chosen, searches)
            of, chosen = (of, chosen) if better is None else (other, better)
    return chosen


def _if_no_slower(
    options: Settings, other: Stages, costing: Costing, chosen: Chosen, searches: bool
) -> Chosen | None:
    """The schedule on another cut; None if it takes longer, or as long with more memory.

    searches: also where the same order is no slower there, for one that is faster yet.
    """
    result = chosen.result
    for placed, problem in _problems(options, other, costing, chosen.placed.cut.options.recompute)[0]:
        others = _on_other_costs(result, problem, options.effort)
        able = (one for one in others if keeps(one.timeline, problem.limits) and one.key < result.key)
        best = min(able, key=lambda one: one.key, default=None) if searches else next(able, None)
        if best is not None:
            # The table of candidates shows what is run, not what it was found with.
            row, before = row_of(best), row_of(result)
            tried = tuple(row if each == before else each for each in result.tried)
            return Chosen(placed, replace(best, tried=tried), held_bytes(placed, options))
    return None


def _on_other_costs(result: SearchResult, problem: Problem, effort: float | None) -> Iterator[SearchResult]:
    """Yield the order on these costs, if it moves nothing to the host, and that of its family for them."""
    if problem.offload is None:
        with suppress(DeadlockError):  # a value that skips stages goes another way in another cut
            yield SearchResult(problem, simulate(result.schedule, problem.costs))
    with suppress(ScheduleError):  # then the family has none within the limits
        yield fastest(result.schedule.name, [problem], effort=effort)


def with_uses(options: Settings, lanes: int, choose: Callable[[Settings], _T]) -> tuple[Settings, _T]:
    """What ``choose`` gives.  Parameters that replicas, or lanes, divide are gathered once a step if that
    keeps the limit, else for each use: of whole stages, or of 4, 8, … parts of each.  The options say which.
    """
    try:
        return options, choose(options)
    except ScheduleError:
        mesh = options.mesh
        if not mesh.divides_parameters or options.memory_limit is None or mesh.replicas * lanes == 1:
            raise
    options = replace(options, per_use=True)
    try:
        return options, choose(options)
    except LimitError as error:
        if options.parts != "auto":
            raise
        errors, smallest = [error], {error.is_least: error.smallest}
    for parts in (1 << k for k in count(2)):  # of two parts both would be there at once
        variant = replace(options, parts=parts)
        try:
            return variant, choose(variant)
        except PartitionError:
            break  # there are fewer places to cut
        except LimitError as error:
            errors.append(error)
            if error.smallest > _WORTH * smallest.get(error.is_least, inf):
                break  # what does not fit are not the parameters
            smallest[error.is_least] = error.smallest
    raise min(errors, key=lambda error: (error.is_least, error.smallest))


def choose_below(
    options: Settings, stages: Sequence[Stages], costing: Costing, beat: float
) -> Chosen | float:
    """``choose``, or seconds that no schedule beats, where these are not below ``beat``.

    Raises LimitError where not one microbatch fits, and ScheduleError as ``choose``.
    """
    if isinstance(options.schedule, Schedule):
        return choose(options, stages, costing)
    first, *levels = costing.tried.levels
    placed_problems, too_heavy = list[tuple[Placed, Problem]](), list[LimitError]()
    bounds = []  # of cuts that are as slow without a limit; recomputation adds to their work
    for of in stages:
        here, errors = _problems(options, of, costing, first)
        too_heavy += errors
        # More work cannot make it faster, so its other levels need not be made.
        if here and levels and _bound(here) >= beat:
            bounds.append(_bound(here))
            continue
        placed_problems += here
        for level in levels:
            placed_problems += _problems(options, of, costing, level)[0]
    able: dict[Problem, Placed] = {}
    for placed, problem in placed_problems:
        least = problem.arrays.smallest_joined
        # Known without a search, which would fail on it.
        if not problem.is_extended and any(a > b for a, b in zip(least, problem.limits, strict=True)):
            need = max(fixed.total + a for fixed, a in zip(held_bytes(placed, options), least, strict=True))
            too_heavy.append(LimitError("One microbatch needs more than the memory limit.", need))
        elif problem.bound >= beat:
            bounds.append(problem.bound)
        else:
            able[problem] = placed
    if not able and not bounds:
        raise min(too_heavy, key=lambda error: error.smallest)
    if not able:
        return min(bounds)
    best = fastest(options.schedule, [*able], effort=options.effort)
    placed = next(placed for problem, placed in able.items() if problem.setting == best.problem.setting)
    return Chosen(placed, best, held_bytes(placed, options))


def _bound(placed_problems: Sequence[tuple[Placed, Problem]]) -> float:
    """Seconds that no schedule beats, whatever memory it has."""
    return min(
        p.work if p.objective == "period" else lower_bound(p.costs, placed.ranks, p.microbatches)
        for placed, p in placed_problems
    )


def _problems(
    options: Settings, stages: Stages, costing: Costing, level: Level | None
) -> tuple[list[tuple[Placed, Problem]], list[LimitError]]:
    """The problems of a cut on all placements, and the reasons that others cannot keep the limit."""
    placed_problems, too_heavy = [], []
    for placed in costing(stages, level):
        try:
            placed_problems.append((placed, costing.problem(placed, options)))
        except LimitError as error:
            too_heavy.append(error)
    return placed_problems, too_heavy
