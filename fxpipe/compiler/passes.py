"""The list of all rewrites of the graph.

A pass belongs to a group by where it stands.  ``choice/cut.py`` runs whole groups, in their order; ``verify``
runs behind each group, and behind the pass of ``print_after``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import fx

from fxpipe.cost.analytic import seconds_of_ops
from fxpipe.cost.nodes import NodeSeconds
from fxpipe.cost.recomputable import recomputable_nodes
from fxpipe.errors import PartitionError
from fxpipe.ir.graph import Free
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.step_invariants import leading_alone, mean_values, once_values, weight_values
from fxpipe.ir.storage import is_view
from fxpipe.ir.text import graph_text
from fxpipe.ir.verify import verify
from fxpipe.partition.chain import Chain, CutChain
from fxpipe.partition.coloring import partition
from fxpipe.partition.parts import EXCHANGES, PartsOfStage
from fxpipe.passes.accept_any_strides import accept_any_strides
from fxpipe.passes.captured.begin_exchanges import begin_exchanges
from fxpipe.passes.captured.compute_marked_values import compute_marked_values
from fxpipe.passes.captured.hoist_updates import hoist_updates
from fxpipe.passes.captured.join_sums_over_lanes import join_sums_over_lanes
from fxpipe.passes.captured.key_random_ops import key_random_ops
from fxpipe.passes.captured.read_once import read_once
from fxpipe.passes.captured.simplify import simplify
from fxpipe.passes.captured.sum_over_lanes_once import sum_over_lanes_once
from fxpipe.passes.captured.tensors_for_numbers import tensors_for_numbers
from fxpipe.passes.chosen.accumulate_together import accumulate_together
from fxpipe.passes.chosen.join_backward import join_backward
from fxpipe.passes.chosen.simplify_views import simplify_views
from fxpipe.passes.chosen.use_inplace_ops import use_inplace_ops
from fxpipe.passes.colored.compute_once import compute_once, computed_weights
from fxpipe.passes.colored.copy_given_results import copy_given_results
from fxpipe.passes.colored.count_beside_loss import count_beside_loss
from fxpipe.passes.colored.join_exchanges import join_exchanges
from fxpipe.passes.colored.merge_equal import merge_equal
from fxpipe.passes.colored.sink_cheap_values import sink_cheap_values
from fxpipe.passes.colored.split_backward import split_backward
from fxpipe.passes.colored.untie import untie
from fxpipe.passes.level.fuse_accumulation import fuse_accumulation
from fxpipe.passes.level.make_contiguous import make_contiguous
from fxpipe.passes.level.mincut_saved_for_weight import mincut_saved_for_weight
from fxpipe.passes.level.move_head_to_backward import move_head_to_backward
from fxpipe.passes.level.recompute import Level, recompute
from fxpipe.passes.level.repeat_in_kernels import repeat_in_kernels
from fxpipe.passes.rewrite import kept_bytes
from fxpipe.passes.scheduled.insert_offload import insert_offload
from fxpipe.plan.lanes import NO_LANES, LanePlan
from fxpipe.plan.rewrites import RULES, Rewrite, Rule
from fxpipe.schedule.ops import Phase
from fxpipe.schedule.parts import Parts
from fxpipe.schedule.stages import Vocabulary

Offloaded = Mapping[tuple[int, Phase], Sequence[fx.Node]]
"""(stage, B or W) -> the saved values that are reloaded there."""


@dataclass(frozen=True)
class CutOptions:
    """The decisions on which a cut depends.

    ``tensors_of``, ``slowness``: see ``partition``.  ``grad_dtype``, ``print_after``, ``head_chunks``,
    ``parts``: see ``fxpipe.compile``.
    """

    stages: int
    """The number of the model's own stages."""
    ranks: int
    seconds: NodeSeconds
    split_points: Sequence[str] | None
    """See ``partition``."""
    barriers: int | None
    """Those of split vocabulary layers, per microbatch; None if these are not split."""
    runnable: bool = False
    """Whether the sections will be run for their costs."""
    recompute: Level | None = None
    """The level of recomputation."""
    tensors_of: tuple[Set[str], ...] | None = None
    slowness: tuple[float, ...] = ()
    balanced: tuple[int, ...] = ()
    """The rank of each stage, where ranks are balanced."""
    cuts: tuple[int, ...] = ()
    """Where to cut, instead of by costs."""
    placements: tuple[str, ...] = ()
    """The names of those that the cut is for."""
    grad_dtype: torch.dtype | None = None
    compiled: frozenset[Phase] = frozenset()
    """The phases of which sections are compiled."""
    print_after: str | None = None
    head_chunks: int = 1
    parts: PartsOfStage = 1
    rules: tuple[Rule, ...] = tuple(RULES)
    """Those that may be applied."""


class Uncut:
    """What is known before a cut, by the names of nodes: each cut is of a copy of the same graph.

    chain: the forward, where a cut by its costs has been found.
    """

    def __init__(self) -> None:
        self.chain: Chain | None = None
        self._names: tuple[frozenset[str], ...] = ()

    def free(
        self, graph: fx.Graph, resized: ResizedTraces | None, seconds: NodeSeconds, weights: bool
    ) -> tuple[set[fx.Node], Free]:
        """The nodes of a copy that are computed once a step, and those that are free."""
        if not self._names:
            once_of, free = once_values(graph, resized), recomputable_nodes(graph, seconds)
            of_weights = leading_alone(weight_values(graph, resized)) if weights else set[fx.Node]()
            self._names = (
                _names(once_of | mean_values(graph)),
                _names(of_weights),
                _names(free.anywhere),
                _names(free.in_stage),
            )
        # By name, as each cut has a copy of the graph with nodes of its own.
        sets = ({n for n in graph.nodes if n.name in names} for names in self._names)
        once, of_weights, anywhere, in_stage = sets
        return once | of_weights, Free(anywhere | once, in_stage, of_weights)


def _names(nodes: Set[fx.Node]) -> frozenset[str]:
    return frozenset(node.name for node in nodes)


@dataclass(eq=False)
class StepGraphs:
    """The graph that the passes rewrite, its traces at other sizes, and the stages that were added to it.

    ``offloaded``, ``joined``: known for the chosen cut alone: see ``Offloaded`` and ``join_backward``.
    """

    graph: fx.Graph
    resized: ResizedTraces | None
    vocabulary: Vocabulary | None = None
    uncut: Uncut = field(default_factory=Uncut)
    """What it has in common with all copies that are cut."""
    cut: CutChain | None = None
    """The forward, if it was cut by its costs."""
    offloaded: Offloaded = field(default_factory=dict)
    joined: frozenset[int] = frozenset()
    rewrites: tuple[Rewrite, ...] = ()
    """Rules that gave it other kernels."""
    lengths: ResizedTraces | str | None = None
    """Its traces at lengths that a program may take, where dimensions have names, or why there are none."""
    parts: Parts = ()
    """Those of each of the model's stages, if they were cut into parts."""
    lanes: LanePlan = NO_LANES
    """Those of each rank."""

    @property
    def lookups(self) -> int:
        """The number of its first stages that are shards of an embedding."""
        return 0 if self.vocabulary is None else self.vocabulary.embedding_shards

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The graph and its traces at other sizes."""
        traces = (each for each in (self.resized, self.lengths) if isinstance(each, ResizedTraces))
        return self.graph, *(graph for each in traces for graph in each.graphs)


@dataclass(frozen=True)
class Pass:
    """One rewrite: ``run`` changes the step in place, if its options ask for it."""

    name: str
    run: Callable[[StepGraphs, CutOptions], None]


class Passes(NamedTuple):
    """The groups of passes, in the order in which they run: how often, what a pass relies on and must keep.

    all        nodes in order, ``Outputs`` as the result, an ``Input`` for each placeholder, ``val`` and
               ``origin`` for each op.  ``val`` has the right shape, dtype and device.  Its strides are those
               that the trace predicted, stale where a pass gave an op other operands; ops still rely on them
               (``view``).
    captured   for each number of barriers, and on the traces at other sizes, which a pass must rewrite alike.
               No op has a color, but those that the vocabulary split adds; none writes to an argument.
    partition  for each number of stages.  Each changed buffer is read once, each random op has a key.  Gives
               each op its color.
    colored    next.  Colors, with the rules that ``verify`` has.
    level      for each level of recomputation.  W is split off, gradients are untied, cheap values are sunk.
               Costs are computed next.
    chosen     for the chosen cut, whose schedule is known; before that for a copy of every cut, if its costs
               depend on it (measured costs, and ops that are cheaper in place).  Accumulation is fused, so
               ops write to accumulators; the ops are those that will run.  ``accept_any_strides`` makes the
               graph valid for any strides, which the passes after it must keep, and those may write over
               dead values.
    scheduled  for the chosen cut.  The offloads of its schedule are known.
    """

    captured: tuple[Pass, ...]
    partition: tuple[Pass, ...]
    colored: tuple[Pass, ...]
    level: tuple[Pass, ...]
    chosen: tuple[Pass, ...]
    scheduled: tuple[Pass, ...]


def _of_graph(rewrite: Callable[[fx.Graph], None]) -> Pass:
    """The pass of a function that needs nothing but the graph."""
    return Pass(rewrite.__name__, lambda step, options: rewrite(step.graph))


def _of_graphs(rewrite: Callable[[fx.Graph], None]) -> Pass:
    """A pass that rewrites the graph and its traces at other sizes alike."""

    def run(step: StepGraphs, options: CutOptions) -> None:
        for graph in step.graphs:
            rewrite(graph)

    return Pass(rewrite.__name__, run)


def _join_sums_over_lanes(step: StepGraphs, options: CutOptions) -> None:
    if "joined-sums" in options.rules:
        joined, *_ = [join_sums_over_lanes(graph) for graph in step.graphs]
        seconds = sum(map(options.seconds, joined))  # of as many that are gone
        step.rewrites += (Rewrite("joined-sums", len(joined), seconds),) if joined else ()


def _sum_over_lanes_once(step: StepGraphs, options: CutOptions) -> None:
    if step.lanes.summed:
        for graph in step.graphs:
            sum_over_lanes_once(graph, step.lanes.summed)


def _prepare_head(step: StepGraphs, options: CutOptions) -> None:
    in_parts = options.head_chunks > 1
    if in_parts or options.barriers is not None:
        from fxpipe.vocabulary.prepare import prepare_head  # imported here, as few models split a head

        for graph in step.graphs:
            prepare_head(graph, in_parts)


def _split_vocabulary(step: StepGraphs, options: CutOptions) -> None:
    if options.barriers is not None:
        from fxpipe.vocabulary.split import split_vocabulary

        # The traces at other sizes are split alike, so all have the same stages.
        step.vocabulary, *_ = [
            split_vocabulary(graph, options.ranks, options.barriers, step.lanes.shared)
            for graph in step.graphs
        ]


def _chunk_head(step: StepGraphs, options: CutOptions) -> None:
    if options.head_chunks > 1:
        from fxpipe.vocabulary.chunks import chunk_head

        split = step.vocabulary is not None
        heads, *_ = (chunk_head(graph, options.head_chunks, split) for graph in step.graphs)
        step.rewrites += (Rewrite("head-chunks", *heads),)


def _begin_exchanges(step: StepGraphs, options: CutOptions) -> None:
    if options.parts == EXCHANGES:
        for graph in step.graphs:
            begin_exchanges(graph)


def _compute_once(step: StepGraphs, options: CutOptions) -> None:
    weights = (
        computed_weights(step.graph, step.resized) if "weights-once" in options.rules else set[fx.Node]()
    )
    if ops := [node for node in leading_alone(weights) if not is_view(node)]:
        step.rewrites += (Rewrite("weights-once", len(ops), sum(map(options.seconds, ops))),)
    compute_once(step.graph, step.resized, weights)


def _sink_cheap_values(step: StepGraphs, options: CutOptions) -> None:
    sink_cheap_values(step.graph, recomputable_nodes(step.graph, options.seconds))


def _partition(step: StepGraphs, options: CutOptions) -> None:
    beside = step.vocabulary or Vocabulary()
    # ``compute_once`` takes ``once`` out of the stages.
    weights = "weights-once" in options.rules
    once, free = step.uncut.free(step.graph, step.resized, options.seconds, weights)
    seconds = cache(lambda: seconds_of_ops(step.graph, options.seconds, options.compiled))
    try:
        made = partition(
            step.graph,
            options.stages,
            # Once a step is nothing beside all microbatches.
            lambda node: 0.0 if node in once else seconds()(node),
            free,
            options.split_points,
            before=beside.embedding_shards,
            behind=beside.output_shards,
            tensors_of=options.tensors_of,
            slowness=options.slowness,
            ranks=options.balanced,
            cuts=options.cuts,
            chain=step.uncut.chain,
            parts=options.parts,
            link=1 / options.seconds.device.intra.bandwidth,
        )
    except PartitionError as error:
        if step.vocabulary is None:
            raise
        raise PartitionError(
            f"{error} With vocab_parallel the stages share what is left of the model without its "
            "vocabulary layers: or leave it out."
        ) from error
    # The next number of stages is cut from the same chain, unless other tensors decide on the ops' order.
    if options.tensors_of is None:
        step.uncut.chain = made.chain
    step.cut, step.parts = made.cut, made.parts


def _recompute(step: StepGraphs, options: CutOptions) -> None:
    if options.recompute is not None:
        recompute(step.graph, options.recompute)
    elif Phase.W in options.compiled and step.vocabulary is not None:
        first = step.vocabulary.embedding_shards + (sum(step.parts) or options.stages)
        shards = range(first, first + step.vocabulary.output_shards)
        _repeat(step, options, lambda graph: recompute(graph, "elementwise", shards))


def _repeat_in_kernels(step: StepGraphs, options: CutOptions) -> None:
    if Phase.B in options.compiled:
        _repeat(step, options, repeat_in_kernels)


def _repeat(step: StepGraphs, options: CutOptions, repeat: Callable[[fx.Graph], int]) -> None:
    """Let compiled functions repeat ops; the step remembers how many, and the bytes that this saves."""
    if "repeat-in-kernels" not in options.rules:
        return
    before = kept_bytes(step.graph)
    if ops := repeat(step.graph):
        saved = max(0, before - kept_bytes(step.graph))
        others = [each for each in step.rewrites if each.rule != "repeat-in-kernels"]
        for each in {*step.rewrites} - {*others}:
            ops, saved = ops + each.ops, saved + each.bytes
        step.rewrites = (*others, Rewrite("repeat-in-kernels", ops, bytes=saved))


def _insert_offload(step: StepGraphs, options: CutOptions) -> None:
    for (stage, user), roots in step.offloaded.items():
        insert_offload(step.graph, stage, user, roots)


PASSES = Passes(
    captured=(
        _of_graphs(compute_marked_values),
        _of_graphs(key_random_ops),
        _of_graphs(tensors_for_numbers),
        _of_graphs(read_once),
        _of_graphs(hoist_updates),
        Pass("simplify", lambda step, options: simplify(step.graphs)),
        Pass("join_sums_over_lanes", _join_sums_over_lanes),
        Pass("sum_over_lanes_once", _sum_over_lanes_once),
        Pass("prepare_head", _prepare_head),
        Pass("split_vocabulary", _split_vocabulary),
        Pass("chunk_head", _chunk_head),
        Pass("begin_exchanges", _begin_exchanges),
    ),
    partition=(Pass("partition", _partition),),
    colored=(
        _of_graph(copy_given_results),
        _of_graph(count_beside_loss),
        _of_graph(untie),
        Pass("split_backward", lambda step, options: split_backward(step.graph, step.lookups)),
        _of_graph(join_exchanges),
        Pass("compute_once", _compute_once),
        Pass("sink_cheap_values", _sink_cheap_values),
        Pass("merge_equal", lambda step, options: merge_equal(step.graph, resized=step.resized)),
    ),
    level=(
        _of_graph(move_head_to_backward),
        Pass("recompute", _recompute),
        Pass("repeat_in_kernels", _repeat_in_kernels),
        _of_graph(mincut_saved_for_weight),
        _of_graph(make_contiguous),
        Pass(
            "fuse_accumulation",
            lambda step, options: fuse_accumulation(step.graph, options.grad_dtype, step.lookups),
        ),
    ),
    chosen=(
        Pass("join_backward", lambda step, options: join_backward(step.graph, step.joined)),
        _of_graph(simplify_views),
        _of_graph(accept_any_strides),
        _of_graph(accumulate_together),  # lets gradients live longer, which no op may overwrite then
        Pass("use_inplace_ops", lambda step, options: use_inplace_ops(step.graph, options.compiled)),
    ),
    scheduled=(Pass("insert_offload", _insert_offload),),
)

PASS_NAMES = tuple(each.name for group in PASSES for each in group)


def run_passes(group: Sequence[Pass], step: StepGraphs, options: CutOptions) -> None:
    """Run a group; print the graph after ``options.print_after``.  It is verified there, and at the end."""
    since = group[0].name
    for each in group:
        each.run(step, options)
        is_printed, is_last = each.name == options.print_after, each is group[-1]
        if is_printed or is_last:
            ran = each.name if since == each.name else f"{since} … {each.name}"
            colored = each not in PASSES.captured
            for graph in (step.graph,) if colored else step.graphs:
                verify(graph, ran, colored)
            # The error names the passes that have run since the last check.
            since = each.name
        if is_printed:
            print(f"After {each.name}, stages: {options.stages}\n{graph_text(step.graph)}\n")
