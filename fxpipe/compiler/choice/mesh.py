"""The choice of a mesh: how many ranks and replicas, and what replicas divide, for some devices and a batch.

The step is captured once.  Each number of ranks is cut once, and each mesh of it is searched with its own
exchanges and memory, with little effort; one that cannot be faster than the best so far is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from fxpipe.capture.scale import LATER, choose_numbers
from fxpipe.compiler.check_options import check
from fxpipe.compiler.choice.candidates import candidates
from fxpipe.compiler.choice.choose import choose_below, with_uses
from fxpipe.compiler.choice.costing import Chosen, Costing, held_bytes
from fxpipe.compiler.choice.cut import Cuts, Stages
from fxpipe.compiler.choice.stage_counts import cluster_of
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.compile import CapturedStep, capture_step, stages_and_costs
from fxpipe.compiler.interpreter import for_graphs
from fxpipe.compiler.options import Settings
from fxpipe.compiler.progress import Phases
from fxpipe.compiler.tensor_ownership import check_state_of_replicas
from fxpipe.cost.analytic import work_for_any_size
from fxpipe.cost.batch_order import BatchPlanner, own_limits
from fxpipe.errors import (
    CaptureError,
    LimitError,
    OptionError,
    PartitionError,
    ScheduleError,
    VocabularyError,
    number_of,
)
from fxpipe.ir.storage import graph_outputs
from fxpipe.partition.parts import PartsOfStage
from fxpipe.plan.dtensors import local
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.plan.step import SHARDS
from fxpipe.plan.tensors import gradient_dtype
from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.search.fastest import AUTO
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.units import bytes_text

#: A mesh that can save a smaller part of the step than this is not searched.
GAIN = 0.01
#: Seconds of one core for each search; the chosen mesh is searched with all effort.
EFFORT = 0.2


@dataclass(frozen=True, eq=False)
class MeshChoice:
    """The fastest mesh, the step that was captured for it, if one was, and all meshes."""

    mesh: Mesh
    step: CapturedStep | None
    tried: tuple[TriedMesh, ...]


def checked(options: Settings, wanted: Iterable[TriedMesh]) -> list[TriedMesh]:
    """The meshes, those that do not go with other options with the reason.

    Raises that of the first if no mesh is left.
    """
    meshes, errors = list[TriedMesh](), list[Exception]()
    for tried in wanted:
        try:
            check(replace(options, mesh=tried.mesh))
        except ScheduleError as error:
            errors.append(error)
            tried = replace(tried, why=tried.why or str(error))
        meshes.append(tried)
    if len(errors) == len(meshes):
        raise errors[0]
    if all(tried.why for tried in meshes):
        raise OptionError(f"No mesh is possible: {meshes[-1].why}.")
    return meshes


def planned_step(request: Compilation, phase: Phases) -> CapturedStep:
    """The step, captured for a number of microbatches that is chosen later."""
    # One capture for all meshes: their numbers of microbatches differ in one factor of the loss.
    options = request.options
    later = replace(request, options=replace(options, mesh=replace(options.mesh, microbatches=LATER)))
    return capture_step(later, phase)


@for_graphs
def choose_mesh(request: Compilation, wanted: Sequence[TriedMesh], phase: Phases) -> MeshChoice:
    """The fastest of the meshes.  Raises ScheduleError, with the reason against each, where none fits."""
    step = planned_step(request, phase)
    tried = compare_meshes(request, step, wanted, phase)
    phase.finish("chosen")
    mesh = fastest_mesh(tried).mesh
    choose_numbers(step.graphs.graphs, mesh.microbatches, mesh.replicas)
    # Its cuts were made before the number of microbatches was known.
    return MeshChoice(mesh, replace(step, cuts=Cuts()), tried)


@for_graphs
def compare_meshes(
    request: Compilation,
    step: CapturedStep,
    wanted: Sequence[TriedMesh],
    phase: Phases,
    sizes: Mapping[str, int] | None = None,
    best: float = inf,
) -> tuple[TriedMesh, ...]:
    """The meshes, each with what it costs; those that have a reason against them stay as they are.

    step: of ``planned_step``.  wanted: few ranks first; of equal ranks the shards in the order of LEVELS.
    sizes: other lengths than the example's, of a step whose dimensions have names.  best: seconds of the
        fastest of other meshes.
    """
    # By number of ranks: meshes of the same number have their cuts in common.
    numbers = dict.fromkeys(tried.mesh.ranks for tried in wanted)
    results = list[TriedMesh]()
    phase.expect(len(numbers))
    for ranks in numbers:
        with phase(number_of(ranks, "rank")):
            search = _Search(request, step, phase, sizes)
            for candidate in (tried for tried in wanted if tried.mesh.ranks == ranks):
                results.append(candidate if candidate.why else search.tried(candidate.mesh, best))
                # What has been found leaves out meshes that cannot be faster.
                best = min(best, inf if results[-1].seconds is None else results[-1].seconds)
    return tuple(results)


def fastest_mesh(tried: Sequence[TriedMesh]) -> TriedMesh:
    """The fastest mesh; of equally fast ones the one that divides the least.

    Raises ScheduleError, with the reason against each, where there is none.
    """
    possible = [mesh for mesh in tried if mesh.seconds is not None]
    if not possible:
        # The one that needs the least tells how far the limit is.
        needs = [(mesh.memory, mesh.mesh) for mesh in tried if mesh.memory is not None]
        reasons = [f"{mesh.mesh}: {mesh.why}" for mesh in tried if mesh.memory is None]
        if needs:
            least, at = min(needs, key=lambda need: need[0])
            reasons.insert(0, f"the least memory is needed by {at}, {bytes_text(least)} or more a rank")
        raise ScheduleError(
            f"No mesh (ranks x replicas) fits: {'; '.join(reasons)}. Take more devices, raise memory_limit, "
            "make microbatches smaller, or let activations be recomputed (recompute) or offloaded (offload)."
        )
    levels = ("", *SHARDS)
    return min(possible, key=lambda one: (float(f"{one.seconds:.9g}"), levels.index(one.mesh.shard)))


def planner_of(request: Compilation, step: CapturedStep, mesh: Mesh, phase: Phases) -> BatchPlanner:
    """Orders for microbatches of any lengths on a mesh that fits.

    step: of ``planned_step``, with names for dimensions.
    """
    search = _Search(request, step, phase, None)
    tried = search.tried(mesh, inf)
    if not search.choices:
        raise ScheduleError(f"The mesh {mesh} does not fit: {tried.why or 'it needs more memory'}.")
    placed, problem = search.choices[0].placed, search.choices[0].result.problem
    timeline, options = search.choices[0].result.timeline, request.options
    assert placed.cut.step.resized is not None, "dimensions have names"
    cluster = cluster_of(replace(options, mesh=mesh), request.device, (), step.captured.graph)
    work = work_for_any_size(
        placed.live, placed.cut.graph, placed.cut.step.resized, cluster, placed.ranks, options.compiled
    )
    limits: Sequence[float] = problem.limits
    if not problem.is_limited:
        limits = own_limits(timeline.schedule, problem.costs, timeline.peak_memory)
    changes = bool(graph_outputs(placed.cut.graph).buffers)
    return BatchPlanner(timeline.schedule, problem.costs, work, tuple(limits), changes)


@dataclass(eq=False)
class _Search:
    """The meshes of one number of ranks."""

    request: Compilation
    step: CapturedStep
    phase: Phases
    sizes: Mapping[str, int] | None
    cuts: dict[PartsOfStage | str, tuple[list[Stages], Costing]] = field(default_factory=dict)
    choices: list[Chosen] = field(default_factory=list)

    def tried(self, mesh: Mesh, best: float) -> TriedMesh:
        """Search one mesh.  best: seconds of the fastest mesh so far."""
        effort = self.request.options.effort
        # A search with all effort for each would take minutes.
        effort = EFFORT if effort is None else min(effort, EFFORT)
        options = replace(self.request.options, mesh=mesh, effort=effort)
        try:
            if mesh.replicas > 1:
                check_state_of_replicas(self.request.model, self.step.captured.graph)
            self._check_bytes(options)
            self._cut(options)
            # Most meshes with as many ranks differ in exchanges alone, so their orders are the same.
            chosen: Chosen | float | None = self._as_before(options)
            if chosen is None:
                # Another level of a mesh with a schedule by name is as good as known.
                beat = inf if self.choices and options.schedule != AUTO else (1 - GAIN) * best
                chosen = with_uses(options, self.step.captured.lanes.number, partial(self._below, beat))[1]
        except LimitError as error:
            return TriedMesh(mesh, memory=error.smallest)
        except (ScheduleError, PartitionError, VocabularyError, CaptureError) as error:
            return TriedMesh(mesh, why=str(error))
        if isinstance(chosen, float):
            return TriedMesh(mesh, bound=chosen)
        self.choices.append(chosen)
        return chosen.of_mesh(mesh)

    def _below(self, beat: float, options: Settings) -> Chosen | float:
        return choose_below(options, *self._cut(options), beat)

    def _cut(self, options: Settings) -> tuple[list[Stages], Costing]:
        """The step cut into stages, and their costs; once for all meshes of these ranks."""
        if options.parts not in self.cuts:
            self.cuts[options.parts] = self._made(options)
        return self.cuts[options.parts]

    def _made(self, options: Settings) -> tuple[list[Stages], Costing]:
        step, phase = self.step, self.phase
        tried = candidates(options, step.captured.graph)
        cluster = cluster_of(options, self.request.device, (), step.captured.graph)
        ways = len(tried.heads)
        phase.expect(ways + 2 * ways * len(tried.placements))  # at most: others were made for fewer ranks
        request = replace(self.request, options=options)
        stages, costing = stages_and_costs(request, step, tried, cluster, phase, self.sizes)
        phase.expect(2 * len(stages) * len(tried.levels))
        return stages, costing

    def _check_bytes(self, options: Settings) -> None:
        """Raise LimitError, before the step is cut, where some rank has too many bytes of the model: its
        share of all, or two of its stages, where parameters are gathered for single ops."""
        tried = candidates(options, self.step.captured.graph)
        # A split vocabulary is on all ranks, so no share of the model is known before the cut.
        if options.memory_limit is None or any(head.barriers is not None for head in tried.heads):
            return
        trained = graph_outputs(self.step.captured.graph).grads
        whole = sum(
            p.nbytes + (name in trained) * p.numel() * gradient_dtype(p.dtype, options.grad_dtype).itemsize
            for name, p in ((name, local(p)) for name, p in self.request.model.named_parameters())
        )
        mesh, least = options.mesh, whole / options.mesh.ranks
        if mesh.divides_parameters and options.parts == AUTO:
            # Of as many parts of a stage as it takes, the two that are gathered at once may be small.
            least /= mesh.replicas * self.step.captured.lanes.number
        elif mesh.divides_parameters:
            least *= min(1.0, 2 * mesh.ranks / max(tried.placements))
        if least > options.memory_limit:
            raise LimitError("Parameters and gradients alone need more than the memory limit.", least)

    def _as_before(self, options: Settings) -> Chosen | None:
        """The schedule of a mesh that had no less memory for it, if it keeps the limits of this one."""
        for before in self.choices:
            try:
                problem = self._cut(options)[1].problem(before.placed, options)
            except LimitError:
                continue
            had, least = before.result.problem.limits, problem.arrays.smallest_limits
            fits = all(a >= b >= c for a, b, c in zip(had, problem.limits, least, strict=True))
            if fits and not problem.is_extended and before.result.timeline.fits(problem.limits):
                timeline = simulate(before.result.timeline.schedule, problem.costs)
                result = SearchResult(problem, timeline)
                return Chosen(before.placed, result, held_bytes(before.placed, options))
        return None
