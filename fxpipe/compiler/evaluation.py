"""The forward in eval mode alone, compiled for the ranks and the tensors of a training pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from fxpipe.compiler.choice.cut import cut as cut_at_level
from fxpipe.compiler.choice.cut import split, stages_of
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.compile import Compiled, captured_at_lengths
from fxpipe.compiler.generate import generate
from fxpipe.compiler.interpreter import for_graphs
from fxpipe.compiler.make_plan import with_tensors_of
from fxpipe.compiler.options import Offload
from fxpipe.compiler.passes import CutOptions
from fxpipe.compiler.progress import Phases
from fxpipe.compiler.tensor_ownership import tensors_in_stages
from fxpipe.cost.analytic import seconds_on, section_costs
from fxpipe.errors import PartitionError
from fxpipe.ir.liveness import liveness
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.schedule.costs import Costs
from fxpipe.schedule.ops import Schedule
from fxpipe.schedule.parts import by_stage
from fxpipe.schedule.placement import name_of
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate


@for_graphs
def compile_evaluation(request: Compilation, phase: Phases, trained: Compiled) -> Artifact:
    """The forward in eval mode for the ranks of a training pipeline: each tensor is used where that has it.

    Raises PartitionError where the forward cannot be cut as the training step was.
    """
    cluster, plan = trained.cluster, trained.artifact.plan
    options = replace(
        request.options,
        gradients=False,
        grad_dtype=None,
        undivided=(),
        mesh=replace(request.options.mesh, shard=""),
        offload=Offload(share=None),
        recompute=False,
        validation="barrier",
    )
    request, model = replace(request, options=options), request.model
    model_stages = plan.ordered.model_stages
    tensors_of = tensors_in_stages(trained.cut.sections, model_stages)
    placement = tuple(plan.placement[stage] for stage in model_stages)
    parts = trained.cut.step.parts
    if parts:
        # Whole stages: each part would need an op of this forward, in the order of training.
        tensors_of = tuple(frozenset[str]().union(*each) for each in by_stage(tensors_of, parts))
        placement = tuple(rank for rank, *_ in by_stage(placement, parts))
    cut_options = CutOptions(
        len(tensors_of),
        options.mesh.ranks,
        cluster.node_seconds(),
        None,
        # The shards of the vocabulary are those of training, and so are their stages.
        plan.vocabulary.barriers if plan.vocabulary is not None else None,
        tensors_of=tensors_of,
        compiled=options.compiled,
        print_after=options.print_after,
        head_chunks=plan.head_chunks,
    )
    phase.expect(6)  # the trace, the cut in four, the check
    with phase("evaluation"), _in_eval_mode(model):
        buffers = {name for rank_tensors in plan.tensors for name in rank_tensors.buffers}
        forward = captured_at_lengths(request, None, buffers)
    try:
        step = split(forward.graphs, cut_options)
        stages = stages_of(step, cut_options, phase)
    except PartitionError as error:
        raise PartitionError(
            f"In eval mode: {error} Or compile model.eval() by itself, with gradients=False."
        ) from error
    cut = cut_at_level(stages, None, phase)
    ranks = placement if step.vocabulary is None else step.vocabulary.placement(placement)
    live = liveness(cut.graph, cut.sections, cut.edges, ranks)
    seconds = seconds_on(cluster, cut.graph, options.compiled)
    costs = section_costs(live, seconds, cluster, ranks, options.ranks_per_machine)
    # Without a backward, the order of training leaves gaps where that would be.
    timelines = [simulate(schedule, costs) for schedule in _schedules(plan.ordered, placement, costs)]
    timeline = min(timelines, key=lambda one: one.seconds)

    def of_training(plan_made: Plan) -> Plan:
        plan_made = replace(plan_made, model=f"{plan_made.model}, evaluation", device=cluster.name)
        return with_tensors_of(plan_made, cut.sections, plan)

    return generate(request, forward.captured, cut, live, timeline, of_training, phase, forward.lengths)[1]


def _schedules(trained: Schedule, placement: tuple[int, ...], costs: Costs) -> Iterator[Schedule]:
    """Schedules for a step without a backward: the training step's, if it has the same stages, and all
    microbatches stage by stage.  placement: of the model's stages."""
    if len(placement) == len(trained.model_stages):
        yield replace(trained, transfers=())
    if name := name_of(placement, trained.ranks):
        yield build(
            "gpipe",
            ranks=trained.ranks,
            microbatches=trained.microbatches,
            costs=costs,
            stages_per_rank=len(placement) // trained.ranks,
            placement=name,
            vocabulary=trained.vocabulary,
        )


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
