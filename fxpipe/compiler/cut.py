"""The list of all rewrites of the graph, and the cut of the captured step into stages by them.

``PASSES`` is the list.  ``verify`` runs after each pass, once the partition has given every op its color.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from fxpipe.compiler.progress import Phases
from fxpipe.cost.nodes import CHEAPER_IN_PLACE, NodeSeconds
from fxpipe.errors import PartitionError
from fxpipe.ir.compat import copy_node
from fxpipe.ir.graph import Section
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.sections import SectionEdge, edges_between, extract
from fxpipe.ir.verify import verify
from fxpipe.partition.coloring import partition
from fxpipe.passes.accumulate import fuse_accumulation
from fxpipe.passes.accumulate_together import accumulate_together
from fxpipe.passes.cast_once import cast_once
from fxpipe.passes.contiguous import make_contiguous
from fxpipe.passes.copy_given_results import copy_given_results
from fxpipe.passes.count_beside_loss import count_beside_loss
from fxpipe.passes.inplace import use_inplace_ops
from fxpipe.passes.insert_offload import insert_offload
from fxpipe.passes.keep_for_weight import mincut_saved_for_weight
from fxpipe.passes.recompute import Level, recompute
from fxpipe.passes.sink_cheap_values import sink_cheap_values
from fxpipe.passes.split_backward import split_backward
from fxpipe.passes.strides import accept_any_strides
from fxpipe.passes.untie import untie
from fxpipe.schedule.ops import Phase
from fxpipe.schedule.stages import Vocabulary
from fxpipe.vocabulary.split import split_vocabulary

Offloaded = Mapping[tuple[int, Phase], Sequence[fx.Node]]
"""(stage, B or W) -> the saved values that are reloaded there."""


@dataclass(frozen=True)
class CutOptions:
    """The decisions on which a cut depends.

    ``stages``: the number of the model's own stages.  ``split_points``: see ``partition``.  ``barriers``: per
    microbatch, of split vocabulary layers; None if they are not split.  ``runnable``: the sections will be
    run for their costs.  ``recompute``: the level of recomputation.  ``held``, ``slowness``: see
    ``partition``.  ``placements``: the names of those that the cut is for.  ``grad_dtype``: see
    ``fxpipe.compile``.  ``backend``: that runs the sections.
    """

    stages: int
    ranks: int
    seconds: NodeSeconds
    split_points: Sequence[str] | None
    barriers: int | None
    runnable: bool = False
    recompute: Level | None = None
    held: Sequence[Set[str]] | None = None
    slowness: tuple[float, ...] = ()
    placements: tuple[str, ...] = ()
    grad_dtype: torch.dtype | None = None
    backend: str = "eager"


@dataclass(eq=False)
class Step:
    """The graph that the passes rewrite, its traces at other sizes, and the stages that were added to it."""

    graph: fx.Graph
    resized: ResizedTraces | None
    vocabulary: Vocabulary | None = None
    offloaded: Offloaded = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """One rewrite: ``run`` changes the step in place if the pass is ``enabled``."""

    name: str
    run: Callable[[Step, CutOptions], None]
    enabled: Callable[[Step, CutOptions], bool] = lambda step, options: True


def _split_vocabulary(step: Step, options: CutOptions) -> None:
    """Split the vocabulary layers in the graph and in its traces at other sizes."""
    assert options.barriers is not None, "the pass is disabled without barriers"
    step.vocabulary = split_vocabulary(step.graph, options.ranks, options.barriers)
    if step.resized is not None:
        others = [_copied(other) for other in step.resized.graphs]
        for other in others:
            split_vocabulary(other, options.ranks, options.barriers)
        step.resized = step.resized.after_rewrite(step.graph, others)


def _partition(step: Step, options: CutOptions) -> None:
    beside = step.vocabulary or Vocabulary()
    try:
        partition(
            step.graph,
            options.stages,
            options.seconds,
            options.split_points,
            before=beside.embedding_shards,
            behind=beside.output_shards,
            held=options.held,
            slowness=options.slowness,
        )
    except PartitionError as error:
        if step.vocabulary is None:
            raise
        raise PartitionError(
            f"{error} With vocab_parallel the stages share what is left of the model without its "
            "vocabulary layers: or leave it out."
        ) from error


def _recompute(step: Step, options: CutOptions) -> None:
    assert options.recompute is not None, "the pass is disabled without a level"
    recompute(step.graph, options.recompute)


def _insert_offload(step: Step, options: CutOptions) -> None:
    for (stage, user), roots in step.offloaded.items():
        insert_offload(step.graph, stage, user, roots)


PASSES = (
    # for every number of stages: the output layer and the input embedding as stages of their own
    Pass("vocabulary", _split_vocabulary, lambda step, options: options.barriers is not None),
    Pass("partition", _partition),
    Pass("copy_given_results", lambda step, options: copy_given_results(step.graph)),
    Pass("count_beside_loss", lambda step, options: count_beside_loss(step.graph)),
    Pass("untie", lambda step, options: untie(step.graph)),
    Pass("split_backward", lambda step, options: split_backward(step.graph)),
    Pass("cast_once", lambda step, options: cast_once(step.graph)),
    Pass("sink_cheap_values", lambda step, options: sink_cheap_values(step.graph, options.seconds)),
    # once for each level of recomputation
    Pass("recompute", _recompute, lambda step, options: options.recompute is not None),
    Pass("mincut_saved_for_weight", lambda step, options: mincut_saved_for_weight(step.graph)),
    Pass("make_contiguous", lambda step, options: make_contiguous(step.graph)),
    Pass("fuse_accumulation", lambda step, options: fuse_accumulation(step.graph, options.grad_dtype)),
    # of the chosen cut alone, as costs do not depend on them (but see ``_is_costed``)
    Pass("accept_any_strides", lambda step, options: accept_any_strides(step.graph)),
    Pass("use_inplace_ops", lambda step, options: use_inplace_ops(step.graph, options.backend)),
    Pass("accumulate_together", lambda step, options: accumulate_together(step.graph)),
    Pass("offload", _insert_offload, lambda step, options: bool(step.offloaded)),
)


def run_passes(step: Step, options: CutOptions, first: str, last: str) -> None:
    """Run the enabled passes from ``first`` to ``last``, both included."""
    names = [each.name for each in PASSES]
    for each in PASSES[names.index(first) : names.index(last) + 1]:
        if each.enabled(step, options):
            each.run(step, options)
            if each.name != "vocabulary":  # most ops have no color yet
                verify(step.graph, each.name)


@dataclass(frozen=True, eq=False)
class Cut:
    """The step cut into stages; ``vocabulary``: the stages beside the model's own.

    ``edges``: the values that sections of different stages need of each other.
    ``last_pass``: the last one that has run.
    """

    options: CutOptions
    vocabulary: Vocabulary | None
    graph: fx.Graph
    sections: tuple[Section, ...]
    edges: tuple[SectionEdge, ...]
    resized: ResizedTraces | None
    last_pass: str

    @property
    def stages(self) -> int:
        return self.options.stages

    @property
    def recompute(self) -> Level | None:
        return self.options.recompute


def split(step: Step, options: CutOptions) -> Step:
    """The captured step with its vocabulary layers split, if ``options`` has barriers; for any number of
    stages.  The given step stays as it is.

    Raises VocabularyError as ``split_vocabulary`` does.
    """
    if options.barriers is None:
        return step
    step = replace(step, graph=_copied(step.graph))
    run_passes(step, options, "vocabulary", "vocabulary")
    return step


@dataclass(frozen=True, eq=False)
class Stages:
    """The step cut into stages, before recomputation."""

    step: Step
    options: CutOptions


def stages_of(step: Step, options: CutOptions, phase: Phases) -> Stages:
    """Cut the step into stages; two phases.

    step: the result of ``split``, which stays as it is.
    Raises PartitionError as ``partition`` does.
    """
    own = replace(step, graph=_copied(step.graph))
    with phase("partition"):
        run_passes(own, options, "partition", "count_beside_loss")
    with phase("passes"):
        run_passes(own, options, "untie", "sink_cheap_values")
    return Stages(own, options)


def cut(stages: Stages, level: Level | None, phase: Phases) -> Cut:
    """A cut with a level of recomputation, up to the passes that its costs need; two phases."""
    options = replace(stages.options, recompute=level)
    with phase("passes"):
        own = replace(stages.step, graph=_copied(stages.step.graph))
        last = "use_inplace_ops" if options.runnable or _is_costed(own.graph) else "fuse_accumulation"
        run_passes(own, options, "recompute", last)
    with phase("extract"):
        sections = extract(own.graph)
        found = edges_between(sections)
    return Cut(options, own.vocabulary, own.graph, sections, found, own.resized, last)


def _is_costed(graph: fx.Graph) -> bool:
    """Whether the cost of an op depends on ``use_inplace_ops``."""
    return any(graph.find_nodes(op="call_function", target=op) for op in CHEAPER_IN_PLACE)


def finished(cut: Cut, offloaded: Offloaded) -> Cut:
    """The cut after all passes; its graph is rewritten in place, its sections are extracted again."""
    step = Step(cut.graph, cut.resized, cut.vocabulary, offloaded)
    names = [each.name for each in PASSES]
    run_passes(step, cut.options, names[names.index(cut.last_pass) + 1], names[-1])
    return replace(cut, sections=extract(cut.graph), last_pass=names[-1])


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy with the same nodes, names and metadata; fake tensors are shared."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copy_node(copy, node, copies.__getitem__)
    return copy
