"""The compiler, from top to bottom: a model and an example microbatch in, a program for each rank out.

capture ► (vocabulary ► partition ► passes ► extract) ► choose ► lower ► prove ► offload ► codegen ► check

The phases in brackets are run for every candidate: number of stages, barriers, level of recomputation (a
level only where it may give the fastest step).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fxpipe.capture.call import check_call
from fxpipe.capture.capture_options import CaptureOptions
from fxpipe.capture.lanes.joint_graph import capture_lanes, lane_as_text
from fxpipe.capture.lengths import LengthTraces, OtherMasks, agreed_masks, at_other_lengths
from fxpipe.capture.resized import named_lengths, sample, with_other_rows
from fxpipe.capture.rules.length_means import TracesOfMeans, let_factors_be_whole, own_means, weigh_means
from fxpipe.capture.scale import LATER
from fxpipe.capture.trace import Captured, capture
from fxpipe.capture.underflow import warn_of_float16
from fxpipe.codegen.expressions import length_variables
from fxpipe.compiler.choice.candidates import Candidates, candidates
from fxpipe.compiler.choice.choose import choose, with_uses
from fxpipe.compiler.choice.costing import Chosen, Costing
from fxpipe.compiler.choice.cut import Cut, Cuts, Stages
from fxpipe.compiler.choice.stage_counts import all_stages, cluster_of, offload_bandwidth
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.generate import generate
from fxpipe.compiler.interpreter import for_graphs
from fxpipe.compiler.options import Settings
from fxpipe.compiler.passes import StepGraphs
from fxpipe.compiler.progress import Phases
from fxpipe.compiler.tensor_ownership import check_names, check_state_of_replicas
from fxpipe.cost.analytic import work_for_any_size
from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.devices.device import Device
from fxpipe.cost.profile import known_tensors
from fxpipe.cost.rewrites import mask_rewrites, weight_rewrites
from fxpipe.cost.throughput import step_flops
from fxpipe.errors import LimitError, SizeError
from fxpipe.ir.resized import ResizedTraces
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.dtensors import mesh_of
from fxpipe.plan.meshes import TriedMesh
from fxpipe.plan.rewrites import Mask, Rule
from fxpipe.runtime.batch.microbatches import batch_leaves, check_unshared


@dataclass(frozen=True, eq=False)
class Compiled:
    """The artifact, the captured step and the cut that it was made from, and the devices that its costs are
    of."""

    artifact: Artifact
    captured: Captured
    cut: Cut
    cluster: Cluster


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """One graph of the training step, and its traces at other sizes, if its dimensions have names.

    ``lengths``: those at lengths that a program may take, or why it takes the example's alone.
    ``cuts``: those that were made of it so far.
    """

    captured: Captured
    resized: ResizedTraces | None
    lengths: LengthTraces | str = ""
    cuts: Cuts = field(default_factory=Cuts)

    @property
    def graphs(self) -> StepGraphs:
        lengths = self.lengths.traces if isinstance(self.lengths, LengthTraces) else None
        return StepGraphs(self.captured.graph, self.resized, lengths=lengths, lanes=self.captured.lanes)


def capture_step(request: Compilation, phase: Phases) -> CapturedStep:
    """The step for any number of ranks and replicas; the gradient of its loss is 1 / microbatches."""
    model, example, options = request.model, request.example, request.options
    check_call(model, example, request.loss_fn)
    check_names(model)
    phase.expect(1)
    with phase("capture"):
        lengths = None if options.dimensions is None else named_lengths(example, options.dimensions)
        step = captured_at_lengths(request, lengths)
        check_unshared(dict(batch_leaves(example)), step.captured.written, options.mesh.microbatches)
        warn_of_float16(step.captured.graph)
    return step


def captured_at_lengths(
    request: Compilation, lengths: Mapping[str, int] | None, buffers: Collection[str] = ()
) -> CapturedStep:
    """The step, and its traces at lengths that programs may take; what a mask is by value, it has to be in
    all of them.

    lengths: of the example, for traces at other sizes as well.  buffers: ``kept`` of ``capture``.
    """
    agreed: tuple[Mask, ...] | None = None
    while True:
        masks: list[tuple[Mask, ...]] = []

        def capture(example: object) -> Captured:
            of_example = replace(request, example=example)  # this is called in the same round
            judged = example is request.example
            return capture_lanes(
                request.model,
                lambda: traced(of_example, buffers, agreed, judged),  # noqa: B023
            )

        def trace(example: object) -> Captured:
            captured = capture(example)
            masks.append((*captured.masks.needed,))  # noqa: B023
            return captured

        captured = trace(request.example)
        resized: ResizedTraces | None = None
        named: LengthTraces | str = ""
        try:
            if lengths is not None:
                resized = sample(
                    captured.graph, request.example, lengths, lambda example: trace(example).graph
                )
            if request.has_programs and len({*masks}) == 1:
                named = _at_lengths_of_programs(request, captured, capture, resized)
        except OtherMasks as error:
            if agreed is not None:
                return CapturedStep(captured, resized, str(error))
            masks += error.masks
        except SizeError:
            # Where the number of calls depends on the length, no agreement makes the traces alike.
            if len({*masks}) == 1 or len({*map(len, masks)}) > 1:
                raise
        if len({*masks}) == 1:
            # After the means of the step have factors, it has more values.
            whole = None if resized is None else resized.after_rewrite(captured.graph, resized.graphs)
            return CapturedStep(captured, whole, named)
        agreed = agreed_masks(masks)


def _with_weighted_means(
    named: LengthTraces, captured: Sequence[Captured], others: ResizedTraces
) -> LengthTraces:
    """captured: of one row.  others: more traces of the step, which get the same ops."""
    names = [each.name for each in named.lengths]
    points = [dict(zip(others.names, point, strict=True)) for point in others.points]
    here = [points[0] | dict(zip(names, point, strict=True)) for point in named.traces.points]
    graphs = [each.graph for each in named.captured]
    traces = TracesOfMeans(
        (*graphs, *others.graphs),
        (*here, *points[1:]),
        others.leading,
        names,
        tuple(each.graph for each in captured),
    )
    means = own_means(traces)
    for line in weigh_means(traces):
        warnings.warn(
            f"The loss takes a mean over the elements of a microbatch in {line}, which fxpipe cannot take "
            "over those of all: the loss of microbatches of several lengths is the mean of their own means. "
            "Let loss_fn return (sum, count).",
            stacklevel=2,
        )
    if means:
        warnings.warn(
            f"The loss goes on with means over the elements of a microbatch in {', '.join(means)}, as an "
            "auxiliary loss of experts does: of several lengths that part is the mean of their own.",
            stacklevel=2,
        )
    return replace(named, traces=named.traces.after_rewrite(graphs[0], graphs[1:]), one_row=tuple(captured))


def _at_lengths_of_programs(
    request: Compilation,
    captured: Captured,
    trace: Callable[[object], Captured],
    others: ResizedTraces | None,
) -> LengthTraces | str:
    """The step at the lengths that a program may take, or why it takes the example's alone.

    others: traces at other sizes, which are rewritten alike, if there are any.
    """
    options = request.options
    if not options.dimensions:
        return ""
    reasons = {
        "backend='inductor' compiles functions for the example's lengths": bool(options.compiled),
        "a replay of a captured step has the example's lengths": bool(options.replays),
        "all lanes of a rank run ops of the example's lengths": bool(captured.lanes.shared),
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        return why[0]
    try:
        variables = length_variables(options.dimensions)
        named = at_other_lengths(captured, request.example, options.dimensions, variables, trace)
        if options.mean == "microbatch":
            return named
        others = others or with_other_rows(captured.graph, request.example, options.dimensions, trace)
        try:
            return _with_weighted_means(named, named.one_row, others)
        except SizeError:
            if not named.one_row:
                raise
            return _with_weighted_means(named, (), others)
    except SizeError as error:
        return str(error)


_OF_WEIGHTS: Rule = "weights-once"


@for_graphs
def compile_model(
    request: Compilation,
    phase: Phases,
    devices: Sequence[Sequence[Device]] = (),
    step: CapturedStep | None = None,
    meshes: tuple[TriedMesh, ...] = (),
) -> Compiled:
    """Compile for one mesh.  devices: of the processes of each rank, if they differ and the user names none.
    step: if it is captured already.  meshes: those that were compared."""
    model, options, device = request.model, request.options, request.device
    step = step or capture_step(request, phase)
    captured = step.captured
    tried = candidates(options, captured.graph)
    ways = len(tried.heads)
    phase.expect(2 + ways + 4 * len(tried.placements) * ways)
    # Before the cut: nothing that follows could make up for it.
    if options.mesh.replicas > 1:
        check_state_of_replicas(model, captured.graph)

    cluster = cluster_of(options, device, devices, captured.graph)

    def cut_with(variant: Settings) -> tuple[list[Stages], Costing]:
        with_options = replace(request, options=variant)
        return stages_and_costs(with_options, step, candidates(variant, captured.graph), cluster, phase)

    stages, costing = cut_with(options)
    phase.expect(3 + 2 * len(stages))  # two of each cut; schedule, codegen and check

    with phase("schedule"):
        # Rewritten and extracted with each level of recomputation that may be the fastest; the candidate and
        # the schedule with the shortest simulated step.
        def chosen_with(variant: Settings) -> Chosen:
            if (variant.parts, variant.without) == (request.options.parts, request.options.without):
                return choose(variant, stages, costing)
            return choose(variant, *cut_with(variant))

        lanes = step.captured.lanes.number
        try:
            options, chosen = with_uses(options, lanes, chosen_with)
        except LimitError:
            if all(each.rule != _OF_WEIGHTS for of in stages for each in of.step.rewrites):
                raise
            # Ranks that hold none of these weights throughout the step may keep the limit.
            leaner = replace(options, without=(*options.without, _OF_WEIGHTS))
            options, chosen = with_uses(leaner, lanes, chosen_with)
        cut, live, result = chosen.placed.cut, chosen.placed.live, chosen.result
        work = None
        if cut.step.resized is not None:
            placement = result.schedule.placement
            work = work_for_any_size(live, cut.graph, cut.step.resized, cluster, placement, options.compiled)

    def completed(plan: Plan) -> Plan:
        measured = ", sections measured" if options.costs == "measured" else ""
        now = chosen.of_mesh(options.mesh)
        # The chosen mesh was compared with little effort; this is what all effort has given.
        others = (each for each in meshes if each.mesh != options.mesh)
        compared = (now, *others) if meshes else ()
        device = cluster.name + measured
        masks = captured.masks
        causal, without_mask = ((masks.needed.count(m), masks.freed(m)) for m in ("causal", "none"))
        rewrites = (
            *mask_rewrites(captured.graph, causal, without_mask, cluster.first),
            *cut.step.rewrites,
            *weight_rewrites(cut.graph, cluster.node_seconds(), options.compiled),
        )
        plan = replace(
            plan,
            work=work,
            tried=result.tried,
            meshes=compared,
            device=device,
            held=chosen.fixed,
            rewrites=rewrites,
            flops={kind: float(number) for kind, number in step_flops(captured.graph).items()},
        )
        if options.memory_limit is None:
            return plan
        return replace(plan, memory_limit=options.limit_text, limits=result.problem.limits)

    with phase("codegen"):
        request = replace(request, options=options)
        cut, artifact = generate(
            request, captured, cut, live, result.timeline, completed, phase, step.lengths
        )
    return Compiled(artifact, captured, cut, cluster)


def stages_and_costs(
    request: Compilation,
    step: CapturedStep,
    tried: Candidates,
    cluster: Cluster,
    phase: Phases,
    sizes: Mapping[str, int] | None = None,
) -> tuple[list[Stages], Costing]:
    """The step cut into stages, once for each number of them and of barriers (compiler/passes.py has all
    rewrites), and what the cuts cost.  sizes: other lengths than the example's."""
    options, device = request.options, request.device
    stages = all_stages(step.graphs, tried, options, cluster, step.cuts, phase)
    known = known_tensors(request.model, request.example, step.captured.constants)
    bandwidth = offload_bandwidth(options, cluster, device)
    costing = Costing(
        options,
        tried,
        cuts=step.cuts,
        model=request.model,
        cluster=cluster,
        device=device,
        known=known,
        bandwidth=bandwidth,
        phase=phase,
        lanes=step.captured.lanes,
        sizes=sizes,
    )
    return stages, costing


def traced(
    request: Compilation,
    buffers: Collection[str] = (),
    masks: tuple[Mask, ...] | None = None,
    judged: bool = True,
) -> Captured:
    """Capture the step in this process.  buffers: ``kept`` of ``capture``.  masks, judged: see
    ``CaptureOptions``."""
    options = request.options
    capture_options = CaptureOptions(
        gradients=options.gradients,
        fixed=options.fixed,
        assumed=options.assumed,
        branch=options.branch,
        outputs=options.outputs,
        over_batch=options.mean == "batch",
        judged=judged,
        rules=options.rules,
        masks=masks,
        lengths=bool(options.dimensions),
        fused_attention=request.fused_attention,
        replicas=None if options.mesh.microbatches == LATER else options.mesh.replicas,
        has_group=request.has_group,
    )
    captured = capture(
        request.model,
        request.example,
        request.loss_fn,
        1 / options.mesh.microbatches,
        request.device,
        capture_options,
        buffers,
        request.walked,
    )
    if options.dimensions:
        let_factors_be_whole(captured.graph)
    return captured


@for_graphs
def last_lane_as_text(request: Compilation) -> str:
    """What the last lane runs of a model with DTensors, on this process."""
    number = mesh_of(request.model).size()
    return lane_as_text(request.model, lambda: traced(request), number - 1)
