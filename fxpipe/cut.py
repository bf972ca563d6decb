"""The captured step cut into so many stages: coloured, rewritten, and taken apart into sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fxpipe.graph import Section
from fxpipe.partition.device import Device
from fxpipe.partition.stages import partition
from fxpipe.passes.run import run_passes
from fxpipe.progress import Phases
from fxpipe.sections import Message, extract, messages

#: How many phases ``cut`` goes through.
CUT_PHASES = 3


@dataclass(frozen=True, eq=False)
class Cut:
    """``messages``: what sections give each other, whatever ranks they will lie on."""

    stages: int
    graph: fx.Graph
    sections: tuple[Section, ...]
    messages: tuple[Message, ...]


def cut(
    captured: fx.Graph, stages: int, device: Device, split_points: Sequence[str] | None, phase: Phases
) -> Cut:
    """The captured graph stays as it is.  Raises PartitionError as ``partition`` does."""
    graph = _copied(captured)
    with phase("partition"):
        partition(graph, stages, device, split_points)
    with phase("passes"):
        run_passes(graph, device)
    with phase("extract"):
        sections = extract(graph)
        return Cut(stages, graph, sections, messages(sections))


def _copied(graph: fx.Graph) -> fx.Graph:
    """The same nodes, names and metadata; fake tensors are shared."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    copy.output_node().meta = dict(graph.output_node().meta)
    return copy
