"""All pictures of a compiled pipeline: its graph, its sections and its schedule.

graph.dot, graph.svg            the colored graph, collapsed to modules
stage1_B.dot, stage1_B.svg      one section, node by node
timeline.svg                    the simulated schedule
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import graphviz
from torch import fx

from fxpipe.errors import FxpipeError, number_of, printable
from fxpipe.ir.graph import Section
from fxpipe.plan.artifact import Plan
from fxpipe.schedule.simulation.steps import Steps
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.units import bytes_text, seconds_text
from fxpipe.viz.graph.boxes import collapse
from fxpipe.viz.graph.graph_picture import graph_picture
from fxpipe.viz.graph.section_picture import section_picture
from fxpipe.viz.timeline_picture import timeline_svg


def draw(
    plan: Plan,
    graph: fx.Graph | None,
    sections: tuple[Section, ...],
    shown: Timeline | Steps,
    path: Path,
    expand: tuple[int, str] | None = None,
) -> list[Path]:
    """Write the pictures into a directory, which is made if necessary; return the files.

    graph: None of a loaded pipeline: then only its timeline is drawn.
    shown: the steps of the timeline.
    expand: (stage, phase) of a section that is also drawn node by node.
    Raises FxpipeError for a section that does not exist.
    """
    graphs: dict[str, graphviz.Digraph] = {}
    if graph is not None:
        graphs["graph"] = graph_picture(collapse(graph), _title(plan), _stages(plan))
    if expand is not None:
        section = _section(sections, expand)
        name = f"stage{section.stage}_{section.phase}"
        graphs[name] = section_picture(section, sections, plan.model)
    path.mkdir(parents=True, exist_ok=True)
    files = _rendered(graphs, path)
    timeline = path / "timeline.svg"
    timeline.write_text(timeline_svg(shown, plan.model), encoding="utf-8")
    return [*files, timeline]


def _rendered(graphs: Mapping[str, graphviz.Digraph], directory: Path) -> list[Path]:
    """Write ``NAME.dot`` and ``NAME.svg`` for each graph; return the files.

    If ``dot`` is missing or fails, there are no pictures and one line on stderr says how to get them.
    """
    files, missing, problem = [], [], ""
    for name, graph in graphs.items():
        source = directory / f"{name}.dot"
        source.write_text(graph.source, encoding="utf-8")
        files.append(source)
        try:
            picture = graph.pipe(format="svg", encoding="utf-8", quiet=True)
        except graphviz.ExecutableNotFound:
            problem = "dot is not installed (Debian, Ubuntu: apt install graphviz)"
        except subprocess.CalledProcessError as error:
            problem = f"dot failed: {error.stderr.strip().splitlines()[-1:]}"
        else:
            files.append(directory / f"{name}.svg")
            files[-1].write_text(picture, encoding="utf-8")
            continue
        missing.append(source)
    if missing:
        # By their names alone: ``save`` writes to a draft, and renames it.
        names = shlex.join(source.name for source in missing)
        text = f"fxpipe: {problem}; for pictures run beside the .dot files: dot -Tsvg -O {names}"
        print(printable(text), file=sys.stderr)
    return files


def _title(plan: Plan) -> tuple[str, ...]:
    return (
        f"{plan.model}: one microbatch of a training step",
        f"schedule {plan.schedule}, {number_of(plan.ranks, 'rank')}, "
        f"{number_of(len(plan.stages), 'stage')}, {number_of(plan.step.microbatches, 'microbatch')}",
    )


def _stages(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The lines above each stage.  Times and bytes are of one microbatch."""
    lines: list[tuple[str, ...]] = []
    for stage, cost in zip(plan.stages, plan.costs.stages, strict=True):
        times = zip("FBW", (cost.forward, cost.backward, cost.weight), strict=True)
        texts = [
            f"stage {stage.stage} on rank {stage.rank}{_share(plan, stage.stage)}",
            ", ".join(f"{phase} {seconds_text(seconds)}" for phase, seconds in times),
            f"held: F to B {bytes_text(cost.saved_activations)}, B to W {bytes_text(cost.saved_for_weight)}",
        ]
        if plan.transfers:
            until_b, until_w = bytes_text(cost.offloadable), bytes_text(cost.offloadable_for_weight)
            texts.append(f"offloadable: until B {until_b}, until W {until_w}")
        lines.append(tuple(texts))
    return tuple(lines)


def _share(plan: Plan, stage: int) -> str:
    """The name of the vocabulary layer of which a stage is a shard."""
    vocabulary = plan.vocabulary
    if vocabulary is None or not plan.ordered.is_vocabulary(stage):
        return ""
    return (
        f": its share of the {'input embedding' if stage < vocabulary.embedding_shards else 'output layer'}"
    )


def _section(sections: Sequence[Section], wanted: tuple[int, str]) -> Section:
    for section in sections:
        if (section.stage, section.phase) == wanted:
            return section
    if not sections:
        raise FxpipeError(
            "This pipeline was loaded, or compiled by another rank, so its sections are not available. "
            "Compile the model in one process and draw that pipeline."
        )
    names = ", ".join(f"({s.stage}, {str(s.phase)!r})" for s in sections)
    raise FxpipeError(f"There is no section {wanted!r:.60} to draw. There are: {names}.")
