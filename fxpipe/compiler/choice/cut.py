"""The cut of the captured step into stages, by the groups of passes of ``passes.py``: for any number of them,
for one, for a level of recomputation, and for the chosen cut alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from fxpipe.capture.lengths import name_sizes
from fxpipe.codegen.expressions import OF_LENGTHS
from fxpipe.compiler.passes import PASSES, CutOptions, Offloaded, StepGraphs, Uncut, run_passes
from fxpipe.compiler.progress import Phases
from fxpipe.cost.nodes import CHEAPER_IN_PLACE
from fxpipe.errors import PartitionError, SizeError
from fxpipe.ir.graph import Section
from fxpipe.ir.nodes import copy_graph
from fxpipe.ir.resized import ResizedTraces
from fxpipe.ir.sections import SectionEdge, edges_between, extract
from fxpipe.partition.parts import EXCHANGES
from fxpipe.passes.level.recompute import Level


@dataclass(frozen=True, eq=False)
class Cut:
    """The step cut into stages.

    ``step``: its graph as the costs need it, in ``sections``.  ``edges``: the values that sections of
    different stages need of each other.  ``before_chosen``: the graph without the passes of the chosen cut.
    """

    options: CutOptions
    step: StepGraphs
    sections: tuple[Section, ...]
    edges: tuple[SectionEdge, ...]
    before_chosen: fx.Graph

    @property
    def graph(self) -> fx.Graph:
        return self.step.graph

    @property
    def recompute(self) -> str:
        """The level of recomputation as a plan has it: "" for none."""
        return self.options.recompute or ""


def split(step: StepGraphs, options: CutOptions) -> StepGraphs:
    """The captured step for any number of stages, with its vocabulary layers split if ``options`` has
    barriers.  The given step stays as it is.

    Raises VocabularyError as ``split_vocabulary`` does.
    """
    whole = replace(
        step,
        graph=copy_graph(step.graph),
        uncut=Uncut(),
        resized=None if step.resized is None else _copied(step.resized),
        lengths=_copied(step.lengths) if isinstance(step.lengths, ResizedTraces) else step.lengths,
    )
    run_passes(PASSES.captured, whole, options)
    if whole.resized is not None:
        whole.resized = whole.resized.after_rewrite(whole.graph, whole.resized.graphs)
    if isinstance(whole.lengths, ResizedTraces):
        # From here on one graph is rewritten, in which each number is a length, or one at all lengths.
        try:
            traces = whole.lengths.after_rewrite(whole.graph, whole.lengths.graphs)
            name_sizes(whole.graph, traces, {*traces.names, *OF_LENGTHS})
            whole.lengths = traces
        except SizeError as error:
            whole.lengths = f"a rewrite of the step fits the example's lengths alone: {error}"
    return whole


def _copied(traces: ResizedTraces) -> ResizedTraces:
    return replace(traces, graphs=tuple(map(copy_graph, traces.graphs)))


@dataclass(frozen=True, eq=False)
class Stages:
    """The step cut into stages, before recomputation.  ``whole``: it, without colors."""

    step: StepGraphs
    options: CutOptions
    whole: StepGraphs


def stages_of(step: StepGraphs, options: CutOptions, phase: Phases) -> Stages:
    """Cut the step into stages; two phases.

    step: the result of ``split``, which stays as it is.
    Raises PartitionError as ``partition`` does.
    """
    colored = replace(step, graph=copy_graph(step.graph))
    with phase("partition"):
        run_passes(PASSES.partition, colored, options)
    with phase("passes"):
        run_passes(PASSES.colored, colored, options)
    return Stages(colored, options, step)


def cut(stages: Stages, level: Level | None, phase: Phases, again: bool = True) -> Cut:
    """A cut with a level of recomputation, up to the passes that its costs need; two phases.

    again: whether there are more levels; if not, the passes rewrite the graph of ``stages`` in place.
    """
    options = replace(stages.options, recompute=level)
    with phase("passes"):
        # A level changes the graph, and the next one begins with the same stages.
        leveled = replace(stages.step, graph=copy_graph(stages.step.graph)) if again else stages.step
        run_passes(PASSES.level, leveled, options)
        before_chosen = leveled.graph
        # In a copy: the chosen cut goes through these passes once more, with its schedule.
        ops = (leveled.graph.find_nodes(op="call_function", target=op) for op in CHEAPER_IN_PLACE)
        if options.runnable or any(ops):
            leveled.graph = copy_graph(leveled.graph)
            run_passes(PASSES.chosen, leveled, replace(options, print_after=None))
    with phase("extract"):
        sections = extract(leveled.graph)
        edges = edges_between(sections)
    return Cut(options, leveled, sections, edges, before_chosen)


class Cuts:
    """The cuts of one captured step, each made once for all numbers of ranks: a cut into stages does not
    depend on the ranks that have them, unless vocabulary layers are split over these."""

    def __init__(self) -> None:
        # By the parts of the output layer, whether exchanges are divided, and the rules.
        self._split: dict[tuple[object, ...], StepGraphs] = {}
        self._stages: dict[tuple[object, ...], Stages | PartitionError] = {}
        self._cuts: dict[tuple[StepGraphs, Level | None], Cut] = {}

    def split(self, step: StepGraphs, options: CutOptions) -> StepGraphs:
        """``split``, of the same step."""
        # Its shards depend on the number of ranks, so other numbers cannot use it.
        if options.barriers is not None:
            return split(step, options)
        key = options.head_chunks, options.parts == EXCHANGES, options.rules
        if key not in self._split:
            self._split[key] = split(step, options)
        return self._split[key]

    def stages_of(self, step: StepGraphs, options: CutOptions, phase: Phases) -> Stages:
        """``stages_of``, of a result of ``split``."""
        cut = options.slowness, options.balanced, options.cuts, options.tensors_of
        key = step, options.stages, options.parts, options.rules, *cut
        if key not in self._stages:
            try:
                self._stages[key] = stages_of(step, options, phase)
            except PartitionError as error:
                # That it cannot be cut is found once, too.
                self._stages[key] = error
        outcome = self._stages[key]
        if isinstance(outcome, PartitionError):
            raise outcome
        return replace(outcome, options=options)

    def cut(self, stages: Stages, level: Level | None, phase: Phases, again: bool) -> Cut:
        """``cut``, of a result of ``stages_of``."""
        key = stages.step, level
        if key not in self._cuts:
            self._cuts[key] = cut(stages, level, phase, again)
        return replace(self._cuts[key], options=replace(stages.options, recompute=level))


def finished(cut: Cut, joined: frozenset[int], offloaded: Offloaded) -> Cut:
    """The cut after all passes; its sections are extracted again.

    joined: the stages whose B and W are one op.  offloaded: values of the cut's graph.
    """
    step = replace(cut.step, graph=cut.before_chosen, joined=joined)
    run_passes(PASSES.chosen, step, cut.options)
    # The passes rewrite a graph in place, so its nodes have the names that the schedule's values have.
    named = {node.name: node for node in step.graph.nodes}
    step.offloaded = {key: [named[root.name] for root in roots] for key, roots in offloaded.items()}
    run_passes(PASSES.scheduled, step, cut.options)
    return replace(cut, step=step, sections=extract(step.graph))
