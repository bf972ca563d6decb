"""Simulations and results as HTML, for notebooks: ``_repr_html_`` of what a pipeline gives."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Any, TypeVar

import torch

from fxpipe.errors import number_of, printable
from fxpipe.plan.artifact import Plan
from fxpipe.plan.memory import rank_memory
from fxpipe.schedule.costs import StageCost
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.steps import Steps
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.units import bytes_text, seconds_text, units_of
from fxpipe.training.run.local_result import LocalResult
from fxpipe.viz.summary import memory_rows, summary

#: The most ops of a timeline that is drawn, and the most rows of a table: a notebook keeps what it shows.
MOST_OPS, MOST_ROWS = 8_000, 32

T = TypeVar("T")


@dataclass(frozen=True, repr=False, eq=False)
class ShownTimeline(Timeline):
    """A simulated step that a notebook draws.  ``model``: the title of its picture."""

    model: str = ""

    def _repr_html_(self) -> str:
        return picture_html(self, self.model)


@dataclass(frozen=True, eq=False)
class ShownSteps(Steps):
    """Simulated steps that a notebook draws: the last two, with the updates behind them."""

    model: str = ""

    def _repr_html_(self) -> str:
        return picture_html(self.last(2), self.model)


@dataclass(frozen=True, eq=False, repr=False)
class ShownResult(LocalResult):
    """The result of a step that a notebook shows with its gradients."""

    def _repr_html_(self) -> str:
        rows = [("gradient", "shape", "norm")]
        for name, grad in self.grads.items():
            norm = float(torch.linalg.vector_norm(grad.detach().double()))
            rows.append((name, "×".join(map(str, grad.shape)) or "one number", f"{norm:.4g}"))
        lines = [] if self.loss is None else [f"loss {float(self.loss.detach()):.6g}"]
        lines += [f"{name}: {tuple(value.shape)} {value.dtype}" for name, value in self.outputs.items()]
        if self.peak_saved:
            lines.append(f"saved at most, by rank: {', '.join(map(bytes_text, self.peak_saved))}")
        return lines_html(lines) + (table_html(rows) if self.grads else "")


def shown_as(cls: type[T], value: Any, **more: object) -> T:
    """A frozen record as one of a class that adds ``more``, and the method by which a notebook shows it."""
    known = {field.name: getattr(value, field.name) for field in fields(value)}
    return cls(**known, **more)


def pipeline_html(plan: Plan, *, with_picture: bool) -> str:
    """The text of ``repr`` of a pipeline, the simulated step, and the memory of each rank."""
    memory = memory_rows(rank_memory(plan, plan.prediction.peak_memory), plan.memory_limit)
    picture = picture_html(simulate(plan.ordered, plan.costs), plan.model) if with_picture else ""
    return lines_html(summary(plan)) + picture + table_html(memory)


def stage_html(title: str, costs: StageCost, shapes: Mapping[str, Sequence[int]]) -> str:
    """The costs of a stage for one microbatch, and its parameters with their shapes."""
    text = units_of("").memory
    head = ("forward", "input gradients", "weight gradients", "saved", "saved for weight gradients")
    seconds = map(seconds_text, (costs.forward, costs.backward, costs.weight))
    row = (*seconds, text(costs.saved_activations), text(costs.saved_for_weight))
    parameters = [("parameter", "shape"), *((n, "×".join(map(str, s)) or "1") for n, s in shapes.items())]
    return lines_html([title]) + table_html([head, row]) + table_html(parameters)


def picture_html(shown: Timeline | Steps, title: str) -> str:
    """The picture of a timeline as an image, whose style is for itself; a line of text for a large one."""
    timelines = [step.timeline for step in shown.steps] if isinstance(shown, Steps) else [shown]
    ops = sum(len(spans) for each in timelines for spans in each.spans)
    if ops > MOST_OPS:
        return lines_html([f"{number_of(ops, 'op')}, too many to show here: pipe.draw(directory) draws them"])
    from fxpipe.viz.timeline_picture import timeline_svg  # imported here, as few scripts draw

    source = base64.b64encode(timeline_svg(shown, title).encode()).decode()
    name = escape(f"timeline of {printable(title)}")
    return f'<img alt="{name}" style="max-width:100%" src="data:image/svg+xml;base64,{source}">'


def lines_html(lines: Sequence[str]) -> str:
    return f"<div>{'<br>'.join(escape(printable(line)) for line in lines)}</div>"


def table_html(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row has the names of its columns."""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    cells = ("".join(f"<td>{escape(printable(x))}</td>" for x in row) for row in rows[1 : 1 + MOST_ROWS])
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    left = len(rows) - 1 - MOST_ROWS
    return f"<table><tr>{head}</tr>{body}</table>" + (f"<div>… and {left} more</div>" if left > 0 else "")
