"""The reasons for the choice of a schedule: the candidates of ``auto``, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fxpipe.plan.artifact import Plan
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.schedule.offload.transfers import offload_bytes
from fxpipe.schedule.ops import Direction
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.tried import Tried
from fxpipe.units import PHYSICAL, bytes_text, seconds_text
from fxpipe.viz.seam_marks import NAME, many_steps
from fxpipe.viz.terminal import terminal


def explain(plan: Plan, console: Console) -> None:
    """Print the choice and the other candidates, the fastest first, and why the rest were excluded."""
    console.print(terminal(_reason(plan)), soft_wrap=True)
    if plan.device:
        console.print(terminal(f"Costs of the device {plan.device}{_machines(plan)}."), soft_wrap=True)
    if plan.replicas > 1:
        console.print(terminal(_exchanged(plan)), soft_wrap=True)
    if plan.costs.update.seconds:
        console.print(terminal(f"Many steps: {_many_steps(plan)}."), soft_wrap=True)
    if plan.meshes:
        own = Mesh(plan.ranks, plan.replicas, plan.step.microbatches, plan.shard)
        console.print(mesh_table(plan.meshes, own))
        for line in reasons(plan.meshes):
            console.print(terminal(line), soft_wrap=True, style="dim")
    if plan.tried:
        console.print(_table(plan.tried))
    for candidate in plan.tried:
        if candidate.why:
            console.print(terminal(f"{_name(candidate)}: {candidate.why}"), soft_wrap=True, style="dim")


def _reason(plan: Plan) -> str:
    step = seconds_text(plan.prediction.seconds)
    what = f"{plan.model} on {plan.ranks} ranks, {plan.step.microbatches} microbatches: {plan.schedule}"
    if not plan.tried:
        return f"{what}, as it was asked for; a step is simulated to take {step}{_moved(plan)}."
    known = [(a.compared, a.schedule) for a in plan.tried if a.compared is not None]
    others = sorted({seconds for seconds, schedule in known if schedule != plan.schedule})
    own = plan.prediction.seconds
    if plan.validation == "post":
        own = min(seconds for seconds, _ in known)
        step = f"{seconds_text(own)}, one of many,"
    ahead = f"; the next other takes {others[0] / own - 1:.1%} longer" if others else ""
    chosen = f"{what}, as its simulated step of {step} is the shortest within the memory limit{ahead}"
    return f"{chosen}{_moved(plan)}."


def _many_steps(plan: Plan) -> str:
    chosen = f"; it was made for {NAME[plan.validation]}"
    return f"{many_steps(plan.ordered, plan.costs, PHYSICAL)}{chosen}"


def _exchanged(plan: Plan) -> str:
    timeline = simulate(plan.ordered, plan.costs)
    longest = max(sum(end - start for *_, start, end in own) for own in timeline.exchanges)
    what = {"": "sum gradients", "optimizer": "sum gradients and gather parameters"}
    does = what.get(plan.shard, what["optimizer"])
    return (
        f"{plan.replicas} replicas, which {does} for {seconds_text(longest)} of a step on the busiest rank; "
        f"{seconds_text(timeline.exposed_exchange)} of it come behind the last op."
    )


def _machines(plan: Plan) -> str:
    size = plan.costs.ranks_per_machine
    return "" if size is None or size >= plan.ranks else f", {size} ranks on each machine"


def _moved(plan: Plan) -> str:
    if plan.costs.link is None:
        return ""
    stages = plan.costs.stages
    most = bytes_text(
        plan.step.microbatches * sum(cost.offloadable + cost.offloadable_for_weight for cost in stages)
    )
    out = [t for t in plan.transfers if t.direction is Direction.OUT]
    if not out:
        return f"; nothing of the {most} that might leave the ranks in a step does"
    moved = bytes_text(sum(offload_bytes(stages[t.stage], t.user) for t in out))
    transfers = f"{len(out)} transfers to {plan.tier}"
    return f"; {moved} of the {most} that might leave the ranks in a step do, in {transfers}"


def _table(tried: tuple[Tried, ...]) -> Table:
    spread = any(candidate.barriers for candidate in tried)
    again = any(candidate.recompute for candidate in tried)
    moved = any(candidate.offloaded for candidate in tried)
    many = any(candidate.period is not None for candidate in tried)
    names = ["schedule", "stages a rank", "placement", *["vocabulary"] * spread, *["recomputed"] * again]
    table = Table(*names, *["offloaded"] * moved, "step", *["of many"] * many, "span bubble", "peak memory")
    for column in (*table.columns[1:2], *table.columns[len(names) :]):
        column.justify = "right"
    for a in sorted(tried, key=lambda a: inf if a.compared is None else a.compared):
        if a.seconds is None or a.span_bubble is None or a.peak_memory is None:
            figures = ["left out", *[""] * (many + 2)]
        else:
            figures = [seconds_text(a.seconds), *[seconds_text(a.period or 0.0)] * many]
            figures += [f"{a.span_bubble:.4f}", bytes_text(a.peak_memory)]
        beside = [*[_vocabulary(a)] * spread, *[a.recompute or "nothing"] * again]
        beside += [bytes_text(a.offloaded) if a.offloaded else "nothing"] * moved
        row = (a.schedule, str(a.stages_per_rank), a.placement, *beside, *figures)
        table.add_row(*map(terminal, row))
    return table


def mesh_table(
    tried: Sequence[TriedMesh],
    chosen: Mesh | None,
    more: Mapping[str, Callable[[TriedMesh], str]] | None = None,
) -> Table:
    """The meshes, the fastest first; ``*``: the chosen one.

    more: further columns, of what a mesh with a simulated step has.
    """
    names = "mesh", "divided", "schedule", "step", "memory", *(more or {})
    table = Table(*names, box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.caption = "mesh: ranks x replicas; *: chosen; ≥: left out, it takes at least"
    if any(one.recompute for one in tried):
        table.caption += "\nnorms, full: what is recomputed"
    table.caption_justify = "left"
    for column in table.columns[3:]:
        column.justify = "right"
        column.no_wrap = True
    for one in sorted(tried, key=lambda one: (one.seconds or one.bound or inf, one.seconds is None)):
        mesh, least = one.mesh, "" if one.seconds is not None else "≥ "
        seconds, memory = one.bound if one.seconds is None else one.seconds, one.memory
        figures = ["" if seconds is None else least + seconds_text(seconds)]
        figures.append("" if memory is None else least + bytes_text(memory))
        figures += [figure(one) for figure in (more or {}).values() if one.seconds is not None]
        several = f" x {one.stages_per_rank}" if one.stages_per_rank > 1 else ""
        name = f"{mesh.ranks} x {mesh.replicas}{' *' * (mesh == chosen)}"
        schedule = f"{one.schedule}{several} {one.recompute}".rstrip()
        row = name, mesh.shard or "nothing", schedule, *figures
        table.add_row(*map(terminal, row), style="dim" if least else None)
    return table


def reasons(tried: Sequence[TriedMesh]) -> list[str]:
    """Why meshes were left out, those with one reason together."""
    alike: dict[str, list[str]] = {}
    for one in tried:
        if one.why:
            alike.setdefault(one.why, []).append(str(one.mesh))
    return [f"{', '.join(meshes)}: {why}" for why, meshes in alike.items()]


def _vocabulary(candidate: Tried) -> str:
    return f"spread, {candidate.barriers}-barrier" if candidate.barriers else "whole"


def _name(candidate: Tried) -> str:
    vocabulary = f", vocabulary {_vocabulary(candidate)}" if candidate.barriers else ""
    again = f", recompute {candidate.recompute}" if candidate.recompute else ""
    return (
        f"{candidate.schedule}, {candidate.stages_per_rank} a rank, {candidate.placement}{vocabulary}{again}"
    )
