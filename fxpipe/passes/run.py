"""The list of all rewrites of the graph, and the cut of the captured step into stages by them.

``PASSES`` is the list.  ``verify`` runs after each pass, once the partition has given every op its color.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from torch import fx

from fxpipe.capture.resized import ResizedTraces
from fxpipe.cost.device import Device
from fxpipe.errors import PartitionError
from fxpipe.ir.graph import Phase, Section
from fxpipe.ir.sections import Message, extract, messages
from fxpipe.ir.verify import verify
from fxpipe.partition.coloring import partition
from fxpipe.passes.accumulate import fuse_accumulation
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
from fxpipe.progress import Phases
from fxpipe.vocabulary.split import split_vocabulary
from fxpipe.vocabulary.stages import Vocabulary

Offloaded = Mapping[tuple[int, Phase], Sequence[fx.Node]]
"""(stage, B or W) -> the saved values that are reloaded there."""


@dataclass(frozen=True)
class CutOptions:
    """The decisions on which a cut depends.

    ``stages``: the number of the model's own stages.  ``split_points``: see ``partition``.  ``barriers``: per
    microbatch, of split vocabulary layers; None if they are not split.  ``recompute``: the level of
    recomputation.  ``held``: see ``partition``.
    """

    stages: int
    ranks: int
    device: Device
    split_points: Sequence[str] | None
    barriers: int | None
    recompute: Level | None = None
    held: Sequence[Set[str]] | None = None


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
    step.vocabulary = split_vocabulary(step.graph, options.ranks, options.stages, options.barriers)
    if step.resized is not None:
        others = [_copied(other) for other in step.resized.graphs]
        for other in others:
            split_vocabulary(other, options.ranks, options.stages, options.barriers)
        step.resized = step.resized.after_rewrite(step.graph, others)


def _partition(step: Step, options: CutOptions) -> None:
    first = step.vocabulary.embedding_shards if step.vocabulary else 0
    try:
        partition(step.graph, options.stages, options.device, options.split_points, first, options.held)
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
    # before partition: the output layer and the input embedding as stages of their own
    Pass("vocabulary", _split_vocabulary, lambda step, options: options.barriers is not None),
    Pass("partition", _partition),
    Pass("copy_given_results", lambda step, options: copy_given_results(step.graph)),
    Pass("count_beside_loss", lambda step, options: count_beside_loss(step.graph)),
    Pass("untie", lambda step, options: untie(step.graph)),
    Pass("split_backward", lambda step, options: split_backward(step.graph)),
    Pass("sink_cheap_values", lambda step, options: sink_cheap_values(step.graph, options.device)),
    # once for each level of recomputation
    Pass("recompute", _recompute, lambda step, options: options.recompute is not None),
    Pass("mincut_saved_for_weight", lambda step, options: mincut_saved_for_weight(step.graph)),
    Pass("make_contiguous", lambda step, options: make_contiguous(step.graph)),
    Pass("fuse_accumulation", lambda step, options: fuse_accumulation(step.graph)),
    Pass("accept_any_strides", lambda step, options: accept_any_strides(step.graph)),
    Pass("use_inplace_ops", lambda step, options: use_inplace_ops(step.graph)),
    # once the schedule is known
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

    ``messages``: the values that sections send each other, whichever ranks they will run on.
    """

    options: CutOptions
    vocabulary: Vocabulary | None
    graph: fx.Graph
    sections: tuple[Section, ...]
    messages: tuple[Message, ...]
    resized: ResizedTraces | None

    @property
    def stages(self) -> int:
        return self.options.stages

    @property
    def recompute(self) -> Level | None:
        return self.options.recompute


def cut_phases(levels: int) -> int:
    """How many phases ``cut`` goes through."""
    return 2 + 2 * levels


def cut(
    captured: fx.Graph,
    resized: ResizedTraces | None,
    options: CutOptions,
    levels: Sequence[Level | None],
    phase: Phases,
) -> list[Cut]:
    """One cut for each level of recomputation, with the same stages.  The captured graph stays as it is.

    resized: the traces of the captured graph at other sizes; each cut gets its own.
    Raises PartitionError as ``partition`` does, VocabularyError as ``split_vocabulary`` does.
    """
    shared = Step(_copied(captured), resized)
    with phase("partition"):
        run_passes(shared, options, "vocabulary", "count_beside_loss")
    with phase("passes"):
        run_passes(shared, options, "untie", "sink_cheap_values")
    cuts = []
    for level in levels:
        own = shared if level == levels[-1] else replace(shared, graph=_copied(shared.graph))
        at_level = replace(options, recompute=level)
        with phase("passes"):
            run_passes(own, at_level, "recompute", "use_inplace_ops")
        with phase("extract"):
            sections = extract(own.graph)
            cuts.append(Cut(at_level, own.vocabulary, own.graph, sections, messages(sections), own.resized))
    return cuts


def with_offload(cut: Cut, offloaded: Offloaded) -> Cut:
    """The cut with these values offloaded; its graph is rewritten in place, its sections extracted again."""
    if not offloaded:
        return cut
    step = Step(cut.graph, cut.resized, cut.vocabulary, offloaded)
    run_passes(step, cut.options, "offload", "offload")
    return replace(cut, sections=extract(cut.graph))


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy with the same nodes, names and metadata; fake tensors are shared."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    copy.output_node().meta = dict(graph.output_node().meta)
    return copy
