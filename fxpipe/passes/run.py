"""The captured step cut into stages: colored, rewritten, and taken apart into sections.

Every rewrite of the graph stands here, in order; ``verify`` runs after each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from fxpipe.capture.resized import ResizedTraces
from fxpipe.cost.device import Device
from fxpipe.errors import PartitionError
from fxpipe.ir.graph import Section
from fxpipe.ir.sections import Message, extract, messages
from fxpipe.ir.verify import verify
from fxpipe.partition.coloring import partition
from fxpipe.passes.accumulate import fuse_accumulation
from fxpipe.passes.contiguous import make_contiguous
from fxpipe.passes.inplace import use_inplace_ops
from fxpipe.passes.keep_for_weight import mincut_saved_for_weight
from fxpipe.passes.recompute import Level, recompute
from fxpipe.passes.sink_cheap_values import sink_cheap_values
from fxpipe.passes.split_backward import split_backward
from fxpipe.passes.strides import accept_any_strides
from fxpipe.passes.untie import untie
from fxpipe.progress import Phases
from fxpipe.vocabulary.split import split_vocabulary
from fxpipe.vocabulary.stages import Vocabulary


@dataclass(frozen=True, eq=False)
class Cut:
    """``stages`` are the model's own; ``vocabulary``: which others there are.

    ``messages``: what sections give each other, whatever ranks they will lie on.
    """

    stages: int
    vocabulary: Vocabulary | None
    recompute: Level | None
    graph: fx.Graph
    sections: tuple[Section, ...]
    messages: tuple[Message, ...]
    resized: ResizedTraces | None


def cut_phases(levels: int) -> int:
    """How many phases ``cut`` goes through."""
    return 2 + 2 * levels


def cut(
    captured: fx.Graph,
    stages: int,
    device: Device,
    split_points: Sequence[str] | None,
    phase: Phases,
    *,
    ranks: int,
    barriers: int | None = None,
    levels: Sequence[Level | None] = (None,),
    resized: ResizedTraces | None = None,
) -> list[Cut]:
    """One cut for each level, with the same stages.  The captured graph stays as it is.

    resized: of the captured graph at other sizes; the cut gets those of its own.
    levels: what B makes again of the forward.
    barriers: spread the vocabulary layers over the ranks, with one or two barriers a microbatch.
    Raises PartitionError as ``partition`` does, VocabularyError as ``split_vocabulary`` does.
    """
    graph, vocabulary = _copied(captured), None
    with phase("partition"):
        if barriers is not None:
            vocabulary = split_vocabulary(graph, ranks, stages, barriers)
            if resized is not None:
                others = [_copied(other) for other in resized.graphs]
                for other in others:
                    split_vocabulary(other, ranks, stages, barriers)
                resized = resized.after_rewrite(graph, others)
        try:
            partition(graph, stages, device, split_points, vocabulary.lookups if vocabulary else 0)
        except PartitionError as error:
            if vocabulary is None:
                raise
            raise PartitionError(
                f"{error} With vocab_parallel the stages share what is left of the model without its "
                "vocabulary layers: or leave it out."
            ) from error
    with phase("passes"):
        prepare(graph, device)
    cuts = []
    for level in levels:
        own = graph if level == levels[-1] else _copied(graph)
        with phase("passes"):
            finish(own, level)
        with phase("extract"):
            sections = extract(own)
            cuts.append(Cut(stages, vocabulary, level, own, sections, messages(sections), resized))
    return cuts


def _copied(graph: fx.Graph) -> fx.Graph:
    """The same nodes, names and metadata; fake tensors are shared."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    copy.output_node().meta = dict(graph.output_node().meta)
    return copy


def prepare(graph: fx.Graph, device: Device) -> None:
    """The passes that are the same whatever B makes again of the forward."""
    verify(graph, "partition")
    _run(
        graph,
        ("untie", untie),
        ("split_backward", split_backward),
        ("sink_cheap_values", lambda g: sink_cheap_values(g, device)),
    )


def finish(graph: fx.Graph, level: Level | None = None) -> None:
    """The others.  ``level``: what B makes again of the forward; nothing where it is None."""
    _run(
        graph,
        *([("recompute", lambda g: recompute(g, level))] if level is not None else []),
        ("mincut_saved_for_weight", mincut_saved_for_weight),
        ("make_contiguous", make_contiguous),
        ("fuse_accumulation", fuse_accumulation),
        ("accept_any_strides", accept_any_strides),
        ("use_inplace_ops", use_inplace_ops),
    )


def _run(graph: fx.Graph, *passes: tuple[str, Callable[[fx.Graph], None]]) -> None:
    for name, rewrite in passes:
        rewrite(graph)
        verify(graph, name)
