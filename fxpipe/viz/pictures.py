"""All pictures of a compiled pipeline: its graph, its sections and its schedule.

graph.dot, graph.svg            the colored graph, collapsed to modules
stage1_B.dot, stage1_B.svg      one section, node by node
timeline.svg                    the simulated schedule
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import graphviz
from torch import fx

from fxpipe.errors import FxpipeError
from fxpipe.ir.graph import Section
from fxpipe.units import bytes_text, seconds_text
from fxpipe.viz.boxes import collapse
from fxpipe.viz.graph_picture import graph_picture
from fxpipe.viz.render import render
from fxpipe.viz.section_picture import section_picture
from fxpipe.viz.timeline_picture import timeline_svg

if TYPE_CHECKING:
    from fxpipe.api.views import Views


def draw(
    pipe: Views,
    path: Path,
    flops: Callable[[fx.Node], int],
    expand: tuple[int, str] | None = None,
    steps: int = 1,
) -> list[Path]:
    """Write the pictures into a directory, which is made if necessary; return the files.

    flops: of an op.
    expand: (stage, phase) of a section that is also drawn node by node.
    steps: that the timeline shows.
    A loaded pipeline has no graph, so only its timeline is drawn.
    Raises FxpipeError for a section that does not exist.
    """
    graphs: dict[str, graphviz.Digraph] = {}
    if pipe.graph is not None:
        graphs["graph"] = graph_picture(collapse(pipe.graph, flops), _title(pipe), _stages(pipe))
    if expand is not None:
        section = _section(pipe, *expand)
        name = f"stage{section.stage}_{section.phase}"
        graphs[name] = section_picture(section, pipe.sections, pipe.plan.model)
    path.mkdir(parents=True, exist_ok=True)
    files = render(graphs, path)
    timeline = path / "timeline.svg"
    shown = pipe.simulate() if steps == 1 else pipe.simulate_steps(steps + 1).last(steps)
    timeline.write_text(timeline_svg(shown, pipe.plan.model), encoding="utf-8")
    return [*files, timeline]


def _title(pipe: Views) -> tuple[str, ...]:
    plan = pipe.plan
    return (
        f"{plan.model}: one microbatch of a training step",
        f"schedule {plan.schedule}, {plan.ranks} ranks, {len(plan.stages)} stages, "
        f"{plan.step.microbatches} microbatches",
    )


def _stages(pipe: Views) -> tuple[tuple[str, ...], ...]:
    """The lines above each stage.  Times and bytes are of one microbatch."""
    lines: list[tuple[str, ...]] = []
    for stage, cost in zip(pipe.plan.stages, pipe.plan.costs.stages, strict=True):
        times = zip("FBW", (cost.forward, cost.backward, cost.weight), strict=True)
        own = [
            f"stage {stage.stage} on rank {stage.rank}{_share(pipe, stage.stage)}",
            ", ".join(f"{phase} {seconds_text(seconds)}" for phase, seconds in times),
            f"held: F to B {bytes_text(cost.saved_activations)}, B to W {bytes_text(cost.saved_for_weight)}",
        ]
        if pipe.plan.transfers:
            until_b, until_w = bytes_text(cost.offloadable), bytes_text(cost.offloadable_for_weight)
            own.append(f"offloadable: until B {until_b}, until W {until_w}")
        lines.append(tuple(own))
    return tuple(lines)


def _share(pipe: Views, stage: int) -> str:
    """The name of the vocabulary layer of which a stage is a shard."""
    vocabulary = pipe.plan.vocabulary
    if vocabulary is None or not pipe.schedule.is_vocabulary(stage):
        return ""
    return (
        f": its share of the {'input embedding' if stage < vocabulary.embedding_shards else 'output layer'}"
    )


def _section(pipe: Views, stage: int, phase: str) -> Section:
    for section in pipe.sections:
        if (section.stage, section.phase) == (stage, phase):
            return section
    if not pipe.sections:
        raise FxpipeError(
            "This pipeline was loaded, or compiled by another rank, so its sections are not available. "
            "Compile the model in one process and draw that pipeline."
        )
    known = ", ".join(f"({s.stage}, {str(s.phase)!r})" for s in pipe.sections)
    raise FxpipeError(f"There is no section ({stage}, {phase!r}) to draw. There are: {known}.")
