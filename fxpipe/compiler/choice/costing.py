"""Cuts on their ranks, with what they cost: what a schedule is searched for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add

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
    computed_once,
    copy_bytes,
    result_bytes,
    stage_tensors,
    tensor_ownership,
    tensors_of,
    trained_parameters,
    weight_bytes,
    with_replicas,
)
from fxpipe.cost.analytic import (
    SecondsOfRanks,
    function_seconds,
    seconds_on,
    section_costs,
    work_for_any_size,
)
from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.exchange import StageTensors, exchanges
from fxpipe.cost.profile import Known, measured_seconds
from fxpipe.cost.update import Trained, update_costs
from fxpipe.errors import PartitionError
from fxpipe.ir.liveness import Liveness, liveness
from fxpipe.ir.storage import leading_to
from fxpipe.partition.cuts import SLACK
from fxpipe.passes.level.recompute import Level
from fxpipe.plan.artifact import HeldBytes
from fxpipe.plan.lanes import LanePlan
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.costs import Costs, Link
from fxpipe.schedule.memory_text import MemoryText
from fxpipe.schedule.ops import Phase
from fxpipe.schedule.parts import placement_of_parts
from fxpipe.schedule.problem import Problem, per_rank
from fxpipe.schedule.units import units_of


@dataclass(frozen=True, eq=False)
class Placed:
    """A cut on its ranks, with its costs and bytes in one replica.

    ``ranks``: of each stage.  ``weights``: of each rank, its parameters, gradients and buffers.
    ``exchanged``: of what the replicas of each stage may exchange.  ``trained``: the parameters that
    each rank updates.  ``once``: the seconds of each rank for what it computes once a step.
    """

    cut: Cut
    live: Liveness
    shape: str
    ranks: tuple[int, ...]
    costs: Costs
    weights: tuple[HeldBytes, ...]
    exchanged: Mapping[int, StageTensors]
    trained: tuple[tuple[Trained, ...], ...]
    once: tuple[float, ...]

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
                tuple(
                    function_seconds(
                        sorted(n for n in leading_to(values) if n.op == "call_function"),
                        Phase.F,
                        of.options.seconds,
                        options.compiled,
                    )
                    for values in computed_once(cut.graph, ranks, options.mesh.ranks)
                ),
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
            update = update_costs(self.cluster, placed.updated(mesh))
            seconds = tuple(map(add, update.seconds, placed.once))
            costs = replace(costs, update=replace(update, seconds=seconds))
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
