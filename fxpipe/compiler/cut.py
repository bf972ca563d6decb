"""The cut of the captured step into stages, by the groups of passes of ``passes.py``: for any number of them,
for one, for a level of recomputation, and for the chosen cut alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from fxpipe.compiler.passes import PASSES, CutOptions, Offloaded, Step, run_passes
from fxpipe.compiler.progress import Phases
from fxpipe.cost.nodes import CHEAPER_IN_PLACE
from fxpipe.ir.compat import copy_node
from fxpipe.ir.graph import Section
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.sections import SectionEdge, edges_between, extract
from fxpipe.passes.recompute import Level
from fxpipe.schedule.stages import Vocabulary


@dataclass(frozen=True, eq=False)
class Cut:
    """The step cut into stages; ``vocabulary``: the stages beside the model's own.

    ``edges``: the values that sections of different stages need of each other.
    ``is_final``: whether the passes of the chosen cut have run.
    """

    options: CutOptions
    vocabulary: Vocabulary | None
    graph: fx.Graph
    sections: tuple[Section, ...]
    edges: tuple[SectionEdge, ...]
    resized: ResizedTraces | None
    is_final: bool

    @property
    def stages(self) -> int:
        return self.options.stages

    @property
    def recompute(self) -> Level | None:
        return self.options.recompute


def split(step: Step, options: CutOptions) -> Step:
    """The captured step for any number of stages, with its vocabulary layers split if ``options`` has
    barriers.  The given step stays as it is.

    Raises VocabularyError as ``split_vocabulary`` does.
    """
    own = replace(step, graph=copied(step.graph))
    run_passes(PASSES.captured, own, options)
    if step.resized is not None:
        others = [Step(copied(other), None) for other in step.resized.graphs]
        for other in others:
            run_passes(PASSES.captured, other, replace(options, print_after=None))
        own.resized = step.resized.after_rewrite(own.graph, [other.graph for other in others])
    return own


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
    own = replace(step, graph=copied(step.graph))
    with phase("partition"):
        run_passes(PASSES.partition, own, options)
    with phase("passes"):
        run_passes(PASSES.colored, own, options)
    return Stages(own, options)


def cut(stages: Stages, level: Level | None, phase: Phases) -> Cut:
    """A cut with a level of recomputation, up to the passes that its costs need; two phases."""
    options = replace(stages.options, recompute=level)
    with phase("passes"):
        own = replace(stages.step, graph=copied(stages.step.graph))
        run_passes(PASSES.level, own, options)
        is_final = options.runnable or _is_costed(own.graph)
        if is_final:
            run_passes(PASSES.chosen, own, options)
    with phase("extract"):
        sections = extract(own.graph)
        found = edges_between(sections)
    return Cut(options, own.vocabulary, own.graph, sections, found, own.resized, is_final)


def _is_costed(graph: fx.Graph) -> bool:
    """Whether the cost of an op depends on ``use_inplace_ops``."""
    return any(graph.find_nodes(op="call_function", target=op) for op in CHEAPER_IN_PLACE)


def finished(cut: Cut, offloaded: Offloaded) -> Cut:
    """The cut after all passes; its graph is rewritten in place, its sections are extracted again."""
    step = Step(cut.graph, cut.resized, cut.vocabulary, offloaded)
    if not cut.is_final:
        run_passes(PASSES.chosen, step, cut.options)
    run_passes(PASSES.scheduled, step, cut.options)
    return replace(cut, sections=extract(cut.graph), is_final=True)


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy with the same nodes, names and metadata; fake tensors are shared."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copy_node(copy, node, copies.__getitem__)
    return copy
