"""The reasons for the choice of a schedule: the candidates of ``auto``, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fxpipe.errors import number_of
from fxpipe.plan.artifact import Plan
from fxpipe.plan.memory import rank_memory
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.plan.rewrites import RULES, Rewrite
from fxpipe.plan.step import StepSpec
from fxpipe.schedule.candidate_row import Tried
from fxpipe.schedule.ops import Direction
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline
from fxpipe.schedule.simulation.transfers import offload_bytes
from fxpipe.schedule.units import bubble_text, bytes_text, seconds_text, units_of
from fxpipe.viz.gap import gap_texts
from fxpipe.viz.seam_marks import NAME, many_steps
from fxpipe.viz.summary import memory_rows
from fxpipe.viz.terminal import add_ends, say, terminal

NEAREST = 3  # of the candidates that do not fit, those that are named
_COSTLY = 0.1


def explain(plan: Plan, console: Console) -> None:
    """Print the choice and the other candidates, the fastest first, why the rest were excluded, how far the
    choice is from what is possible, and the memory of each rank."""
    say(console, _reason(plan), *_loss(plan), *_lengths(plan.step))
    if plan.device:
        say(console, f"Costs of the device {plan.device}{_machines(plan)}.")
    say(console, *(_rewritten(rewrite, plan) for rewrite in plan.rewrites))
    # Simulated again: a plan has the costs and the order, and no times of ops.
    timeline = simulate(plan.ordered, plan.costs)
    if any(timeline.exchanges):
        say(console, _exchanged(plan, timeline))
    if any(timeline.lane_exchanges):
        say(console, _between_lanes(timeline))
    limits = plan.limits if len(plan.limits) == plan.ranks else None
    bounds, gains = gap_texts(timeline, limits, units_of(plan.memory_limit))
    say(console, f"{plan.schedule}: {bounds}; {gains}.")
    if plan.costs.update.seconds:
        many = many_steps(plan.ordered, plan.costs, units_of(plan.memory_limit))
        say(console, f"Many steps: {many}; it was made for {NAME[plan.validation]}.")
    if plan.meshes:
        console.print(mesh_table(plan.meshes, _chosen(plan)))
        say(console, *reasons(plan.meshes), style="dim")
    if plan.tried:
        console.print(_table(plan))
    say(console, *_left_out(plan), style="dim")
    console.print(_memory(plan))
    if plan.memory_limit:
        say(console, f"The memory limit is {plan.memory_limit} on each rank.{_with_less(plan, timeline)}")


def _with_less(plan: Plan, timeline: Timeline) -> str:
    """What else can be compared, where a limit of memory may cost a tenth of the step or more."""
    again = plan.recompute or any(candidate.recompute for candidate in plan.tried)
    if again or timeline.lower_bound > (1 - _COSTLY) * timeline.seconds:
        return ""
    return ' It may cost time: recompute="auto" also tries steps that recompute activations.'


def _loss(plan: Plan) -> Iterator[str]:
    """What the loss of a step is the mean of, where microbatches have numbers of their own."""
    if plan.batch_means:
        yield (
            "The loss is the whole batch's: all microbatches divide by their share of the batch's "
            f"{', '.join(plan.batch_means)}."
        )
    if plan.own_means:
        yield (
            f"The loss of each microbatch is by its own {', '.join(plan.own_means)}; the mean of these "
            "losses is another one than the whole batch's, where these numbers differ."
        )


def _lengths(step: StepSpec) -> Iterator[str]:
    """Which lengths microbatches may have, where dimensions have names, and what their order is by."""
    for each in step.lengths:
        by = f" by {each.step}" if each.step > 1 else ""
        more = " (more where they are shorter)" if each.leading and len(step.lengths) > 1 else ""
        yield f"Microbatches have {each.name} from {each.least} to {each.example}{by}{more}."
    if step.one_length:
        yield f"Microbatches have the example's lengths alone: {step.one_length.rstrip('.')}."
    if step.documents is not None:
        yield f"The order of a batch knows packed samples by {step.documents.leaf!r}."


def _rewritten(rewrite: Rewrite, plan: Plan) -> str:
    less = [seconds_text(rewrite.seconds)] if rewrite.seconds else []
    less += [bytes_text(rewrite.bytes)] if rewrite.bytes else []
    saved = f": {' and '.join(less)} less for a microbatch" if less else ""
    noun, does = RULES[rewrite.rule]
    head = "in the backward" if plan.vocabulary is None else "whose logits every rank computes twice"
    return f"{rewrite.rule}: {number_of(rewrite.ops, noun)} {does.format(plan=plan, head=head)}{saved}."


def _left_out(plan: Plan) -> Iterator[str]:
    """The reasons that candidates were left out; of those that need more memory or time, the nearest."""
    left, units = [candidate for candidate in plan.tried if candidate.why], units_of(plan.memory_limit)
    # By what they need: the nearest to the limit is the one to make room for.
    for offloads, what in ((False, ""), (True, " with as much offload as the links carry")):
        unfit = [(c.peak_memory, c) for c in left if c.peak_memory is not None and c.offloads == offloads]
        yield from _nearest(f"Do not fit the memory limit{what}", unfit, units.memory)
    beaten = [(candidate.least, candidate) for candidate in left if candidate.least is not None]
    yield from _nearest("Left out, as they take longer by a bound or an estimate", beaten, units.time)
    others = [candidate for candidate in left if candidate.peak_memory is None and candidate.least is None]
    yield from _alike((_name(candidate), candidate.why) for candidate in others)


def _nearest(what: str, candidates: list[tuple[float, Tried]], text: Callable[[float], str]) -> Iterator[str]:
    """A line of the candidates that need the least, and the number of the others; none without any."""
    needs = sorted((least, _name(candidate)) for least, candidate in candidates)
    near = "; ".join(f"{name} from {text(least)} on" for least, name in needs[:NEAREST])
    rest = f"; {number_of(len(needs) - NEAREST, 'other')} from more on" if len(needs) > NEAREST else ""
    if needs:
        yield f"{what}: {near}{rest}."


def _reason(plan: Plan) -> str:
    step = seconds_text(plan.prediction.seconds)
    size = f"{number_of(plan.ranks, 'rank')}, {number_of(plan.step.microbatches, 'microbatch')}"
    what = f"{plan.model} on {size}: {plan.schedule}"
    if not plan.tried:
        return f"{what}, as it was asked for; a step is simulated to take {step}{_moved(plan)}."
    # The plan has them in the order in which they were tried.
    best, *others = _sorted(plan.tried)
    if plan.validation == "post" and best.compared is not None:
        step = f"{seconds_text(best.compared)}, one of many,"
    ahead = ""
    if others and others[0].compared is not None:
        ahead = f"; the next one takes {_longer(others[0], plan)} longer"
    within = " within the memory limit" if plan.memory_limit else ""
    chosen = f"{what}, as its simulated step of {step} is the shortest{within}{ahead}"
    return f"{chosen}{_moved(plan)}."


def _sorted(tried: tuple[Tried, ...]) -> list[Tried]:
    """The fastest first; among equals in the order in which they were tried."""
    return sorted(tried, key=lambda a: inf if a.compared is None else a.compared)


def _longer(candidate: Tried, plan: Plan) -> str:
    """The share by which a candidate's step is longer than the fastest."""
    assert candidate.compared is not None
    best = _sorted(plan.tried)[0].compared
    return f"{candidate.compared / best - 1:.1%}" if best else "–"


def _memory(plan: Plan) -> Table:
    """The memory of each rank: of many, the first and the last."""
    head, *rows = memory_rows(rank_memory(plan, plan.prediction.peak_memory), plan.memory_limit)
    table = plain_table(*head)
    for column in table.columns:
        column.justify = "right"
    add_ends(table, rows)
    return table


def _between_lanes(timeline: Timeline) -> str:
    rank, waits = max(enumerate(timeline.exposed_communication), key=lambda each: each[1])
    longest = max(sum(end - start for *_, start, end in spans) for spans in timeline.lane_exchanges)
    return (
        f"Lanes exchange rows for {seconds_text(longest)} of a step, while other ops run; rank {rank} waits "
        f"{seconds_text(waits)} for what is on its way to it, the longest of all."
    )


def _exchanged(plan: Plan, timeline: Timeline) -> str:
    longest = max(sum(end - start for *_, start, end in rank_spans) for rank_spans in timeline.exchanges)
    what = {"": "sum gradients", "optimizer": "sum gradients and gather parameters"}
    does = what.get(plan.shard, what["optimizer"])
    who = [number_of(plan.replicas, "replica")] if plan.replicas > 1 else []
    who += [f"{plan.lanes.number} lanes"] if plan.lanes.number > 1 else []
    return (
        f"{' of '.join(who)}, which {does} for {seconds_text(longest)} of a step on the busiest rank; "
        f"{seconds_text(timeline.exposed_exchange)} of it come behind the last op."
    )


def _machines(plan: Plan) -> str:
    size = plan.costs.ranks_per_machine
    return "" if size is None or size >= plan.ranks else f", {number_of(size, 'rank')} on each machine"


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
    transfers = f"{number_of(len(out), 'transfer')} to {plan.tier}"
    return f"; {moved} of the {most} that might leave the ranks in a step do, in {transfers}"


def _table(plan: Plan) -> Table:
    tried, memory = plan.tried, units_of(plan.memory_limit).memory
    heads = any(candidate.barriers or candidate.head_chunks > 1 for candidate in tried)
    again = any(candidate.recompute for candidate in tried)
    moved = any(candidate.offloaded for candidate in tried)
    many = any(candidate.period is not None for candidate in tried)
    names = ["schedule", *["vocabulary"] * heads, *["recomputed"] * again]
    figures_of = ("step", *["of many"] * many, "longer", "span bubble", "activations")
    table = plain_table(*names, *["offloaded"] * moved, *figures_of)
    table.caption = "x 2: two stages a rank; v: placed down the ranks and back"
    table.columns[0].no_wrap = True
    for column in table.columns[len(names) :]:
        column.justify = "right"
    rows: dict[tuple[str, ...], None] = {}  # without what two candidates have alike
    for a in _sorted(tried):
        if a.seconds is None or a.span_bubble is None or a.peak_memory is None:
            continue  # the reasons below name it
        figures = [seconds_text(a.seconds), *[seconds_text(a.period or 0.0)] * many, _longer(a, plan)]
        figures += [bubble_text(a.span_bubble), memory(a.peak_memory)]
        beside = [*[_vocabulary(a)] * heads, *[a.recompute or "nothing"] * again]
        beside += [memory(a.offloaded) if a.offloaded else "nothing"] * moved
        rows[_setting(a), *beside, *figures] = None
    for row in rows:
        table.add_row(*map(terminal, row))
    return table


def plain_table(*names: str) -> Table:
    """A table with a line below its head alone, which leaves more of 80 columns."""
    table = Table(*names, box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.caption_justify = "left"
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
    table = plain_table(*names)
    has_lanes = any(one.mesh.lanes > 1 for one in tried)
    sizes = "ranks x replicas x lanes" if has_lanes else "ranks x replicas"
    table.caption = f"mesh: {sizes}; *: chosen; ≥: left out, it takes at least"
    if any(one.recompute for one in tried):
        table.caption += "\nnorms, full: what is recomputed"
    for column in table.columns[3:]:
        column.justify = "right"
        column.no_wrap = True
    # One that was left out stands at what it takes at least, behind a mesh that takes as long.
    for one in sorted(tried, key=lambda one: (one.seconds or one.bound or inf, one.seconds is None)):
        mesh, least = one.mesh, "" if one.seconds is not None else "≥ "
        seconds, memory = one.bound if one.seconds is None else one.seconds, one.memory
        figures = ["" if seconds is None else least + seconds_text(seconds)]
        figures.append("" if memory is None else least + bytes_text(memory))
        figures += [figure(one) for figure in (more or {}).values() if one.seconds is not None]
        several = f" x {one.stages_per_rank}" if one.stages_per_rank > 1 else ""
        name = f"{mesh.size}{' *' * (mesh == chosen)}"
        schedule = f"{one.schedule}{several} {one.recompute}".rstrip()
        row = name, mesh.shard or "nothing", schedule, *figures
        table.add_row(*map(terminal, row), style="dim" if least else None)
    return table


def _chosen(plan: Plan) -> Mesh | None:
    """The mesh of a plan: the first of those that are like it."""
    like = plan.ranks, plan.replicas, plan.step.microbatches, plan.shard
    meshes = (one.mesh for one in plan.meshes)
    return next((m for m in meshes if (m.ranks, m.replicas, m.microbatches, m.shard) == like), None)


def reasons(tried: Sequence[TriedMesh]) -> list[str]:
    """The reasons that meshes were left out, those with one reason together."""
    return _alike((str(one.mesh), one.why) for one in tried if one.why)


def _alike(named: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason, with the names of all that have it."""
    names: dict[str, list[str]] = {}
    for name, why in named:
        names.setdefault(why, []).append(name)
    return [f"{'; '.join(alike)}: {why}" for why, alike in names.items()]


def _vocabulary(candidate: Tried) -> str:
    chunks = f"in {candidate.head_chunks} parts" if candidate.head_chunks > 1 else ""
    if not candidate.barriers:
        return chunks or "whole"
    return f"spread, {candidate.barriers}-barrier{f', {chunks}' if chunks else ''}"


def _setting(candidate: Tried) -> str:
    placed = "" if candidate.placement == "plain" else f", {candidate.placement}"
    parts = f", {candidate.parts} parts" if candidate.parts > 1 else ""
    return f"{candidate.schedule} x {candidate.stages_per_rank}{placed}{parts}"


def _name(candidate: Tried) -> str:
    vocabulary = _vocabulary(candidate)
    vocabulary = "" if vocabulary == "whole" else f", vocabulary {vocabulary}"
    again = f", recompute {candidate.recompute}" if candidate.recompute else ""
    return f"{_setting(candidate)}{vocabulary}{again}"
