"""Compares what the programs of all ranks give at the end with the captured step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fxpipe.certificate.problems import ORDER, Line, Problem, differs_at, named
from fxpipe.certificate.programs.values import Value
from fxpipe.certificate.ranks.memory import Ranks, out_of_order, planned_ops
from fxpipe.certificate.ranks.runtime import TermRuntime
from fxpipe.certificate.ranks.traffic import COLLECTIVE
from fxpipe.certificate.ranks.world import World
from fxpipe.certificate.reference import Reference
from fxpipe.certificate.terms.difference import likeness
from fxpipe.certificate.terms.sums import Foreign, GradientSum, Missing
from fxpipe.certificate.terms.terms import Term
from fxpipe.plan.artifact import Plan, holders
from fxpipe.plan.rows import ShardName
from fxpipe.plan.tensors import dtype_of


def compared(plan: Plan, reference: Reference, world: World, ranks: Ranks) -> list[Problem]:
    """All problems of steps that ran to their ends, first the values that they compute otherwise."""
    others = [
        *_losses(plan, reference, ranks),
        *_gradients(plan, reference, ranks),
        *_buffers(plan, reference, ranks),
        *_outputs(plan, reference, ranks),
        *_checks(plan, reference, ranks),
        *_messages(world, ranks),
    ]
    return [*reference.problems(), *others]


def _times(microbatches: Iterable[int], count: int) -> tuple[list[int], list[int]]:
    """The microbatches that are missing, and those that are there twice."""
    counts = Counter(microbatches)
    return [m for m in range(count) if not counts[m]], [m for m, times in counts.items() if times > 1]


def _once(
    what: str, places: Sequence[tuple[int | None, Line]], plan: Plan, end: Line | None
) -> Iterator[Problem]:
    """A value must be given once for each microbatch; None: of a value that is the same for all."""
    count = plan.step.microbatches
    if any(m is None for m, _ in places):
        if len(places) != count:
            yield Problem.at(places[-1][1], f"gives {what} {len(places)} times for {count} microbatches")
        return
    missing, twice = _times((m for m, _ in places if m is not None), count)
    if missing:
        yield Problem.at(places[-1][1] if places else end, f"{what} is missing for {named(missing)}")
    for m in twice:
        yield Problem.at(
            [line for other, line in places if other == m][-1], f"gives {what} of microbatch {m} again"
        )


def _losses(plan: Plan, reference: Reference, ranks: Ranks) -> Iterator[Problem]:
    for rt in ranks:
        has_loss = rt.rank == plan.step.loss_rank and reference.loss is not None
        if not has_loss:
            for _, _, line in rt.losses:
                yield Problem.at(line, "adds a loss, which is another rank's")
            continue
        assert reference.loss is not None
        for loss, count, line in rt.losses:
            _result(reference, "the loss", loss, reference.loss, line)
            if reference.count is not None and count is not None:
                _result(reference, "the count", count, reference.count, line)
                if count.microbatch not in (None, loss.microbatch):
                    yield Problem.at(line, "adds the loss and the count of different microbatches")
            elif (count is None) != (reference.count is None):
                yield Problem.at(line, "adds a loss without its count" if count is None else "adds a count")
        yield from _once("the loss", [(loss.microbatch, line) for loss, _, line in rt.losses], plan, rt.last)


def _result(reference: Reference, what: str, value: Value, expected: Term, line: Line) -> None:
    if value.term is not expected:
        reference.note_difference(what, line, value.term, expected)


def _gradients(plan: Plan, reference: Reference, ranks: Ranks) -> Iterator[Problem]:
    owners = holders(each.gradients for each in plan.tensors)
    known = {name.tensor for name in owners}
    for name in reference.grads:
        if name not in owners and ShardName(name).tensor not in known:
            yield Problem.at(None, f"no rank has the gradient of {name}")
    if plan.step.has_count != (reference.count is not None):
        has = "a" if plan.step.has_count else "no"
        yield Problem.at(
            None, f"the plan has {has} count beside the loss (step.has_count), unlike the captured step"
        )
    divides = reference.count is not None and bool(reference.grads)
    for rt in ranks:
        if rt.divided is None and divides:
            yield Problem.at(rt.last, "the gradients are not divided by the count")
        elif rt.divided is not None and not divides:
            yield Problem.at(rt.divided, "divides the gradients, and the loss has no count")
        yield from _sums_over_replicas(plan, rt)
    missing: dict[tuple[int, int | None], list[Missing]] = {}
    foreign: list[Foreign] = []
    # On each rank that holds it: the runtime updates every copy.
    for name, sharing in owners.items():
        dtype = plan.gradient_dtype(dtype_of(plan.layouts[name].dtype))
        expected = GradientSum.of(reference.terms, reference.grads.get(name, ()), dtype)
        for rank in sharing:
            rt = ranks[rank]
            # Without it each rank would update its own copy by its own part of the gradient.
            if len(sharing) > 1 and name not in rt.totals:
                yield Problem.at(rt.last, f"the gradient of {name} is not summed over the ranks {sharing}")
                continue
            total = rt.totals[name] if name in rt.totals else rt.summands(name)
            for problem in expected.problems(reference, plan.step.microbatches, name, total, rt.last):
                # By rank and microbatch: an op that does not run leaves summands of many gradients out.
                if isinstance(problem, Missing):  # of a sum over ranks, on the one that adds it
                    at = rank if problem.line is None else problem.line.rank
                    missing.setdefault((at, problem.microbatch), []).append(problem)
                elif isinstance(problem, Foreign):
                    foreign.append(problem)
                else:
                    yield problem
    for summand in foreign:
        yield _foreign(summand, missing)
    for (rank, microbatch), summands in missing.items():
        if summands:
            yield _missing(ranks[rank], planned_ops(plan, rank), microbatch, summands)


def _missing(
    rt: TermRuntime, planned: Sequence[str], microbatch: int | None, summands: Sequence[Missing]
) -> Problem:
    """The summands that gradients lack of a microbatch, with the ops of it that do not run."""
    first = summands[0]
    ops = [op for op in planned if op not in rt.log.ops and op.endswith(f".{microbatch}")]
    at = first.line
    if ops and (number := out_of_order(rt, planned)) is not None:
        at = rt.log.calls[number]
    text = f"{gradients([each.name for each in summands])} missing "
    text += str(first.term) if len(summands) == 1 else f"summands, as {first.term}"
    if microbatch is not None:
        text += f" of microbatch {microbatch}"
    if ops:
        text = f"{', '.join(ops)} {'do' if len(ops) > 1 else 'does'} not run: {text}"
    return Problem.at(at, text, ORDER if ops else "")


def _foreign(summand: Foreign, missing: Mapping[tuple[int, int | None], list[Missing]]) -> Problem:
    """A summand that the captured step does not add there; it may be another gradient's, which lacks it."""
    for each in missing.get((summand.line.rank, None), ()):
        if likeness(summand.term, each.term):
            missing[summand.line.rank, None].remove(each)
            text = f"adds {each.term} to the gradient of {summand.name}, where the captured step adds it to "
            return Problem.at(summand.line, f"{text}that of {each.name}", differs_at(summand.line))
    text = (
        f"the gradient of {summand.name} has {summand.term.written()}, which the captured step does not add"
    )
    return Problem.at(summand.line, text, differs_at(summand.line))


def gradients(names: Sequence[str]) -> str:
    """Name gradients in messages: "the gradient of a is", "the gradients of a, b and 3 others are"."""
    names = list(dict.fromkeys(names))
    if len(names) == 1:
        return f"the gradient of {names[0]} is"
    others = f" and {len(names) - 2} others" if len(names) > 2 else ""
    return f"the gradients of {', '.join(names[:2])}{others} are"


def _sums_over_replicas(plan: Plan, rt: TermRuntime) -> Iterator[Problem]:
    """Each gradient must be summed over the replicas once, behind all that is added to it."""
    names = [name for bucket in plan.tensors[rt.rank].buckets for name in bucket.gradients]
    if left := [name for name in names if name not in rt.summed]:
        yield Problem.at(rt.last, f"{gradients(left)} not summed over the replicas")
    for name in (name for name in names if name in rt.summed):
        line, number = rt.summed[name]
        if number < rt.number_of_summands(name):
            yield Problem.at(line, f"sums the gradient of {name} over the replicas before all is added to it")
    for each, (line, number, _) in rt.of_lanes.items():
        if number < rt.number_of_summands(each):
            yield Problem.at(line, f"sums the gradient of {each} over the lanes before all is added to it")
    if names and rt.waited is None:
        yield Problem.at(rt.last, "does not wait for the sums over the replicas")
    yield from rt.rows.left()


def _buffers(plan: Plan, reference: Reference, ranks: Ranks) -> Iterator[Problem]:
    for name in reference.buffers:
        for rt in ranks:
            times = rt.versions[name]
            if name in plan.tensors[rt.rank].buffers and times != plan.step.microbatches:
                text = (
                    f"gives the buffer {name!r} {times} new values for {plan.step.microbatches} microbatches"
                )
                yield Problem.at(rt.last, text)
        if not any(name in each.buffers for each in plan.tensors):
            yield Problem.at(None, f"no rank has the buffer {name!r}")


def _outputs(plan: Plan, reference: Reference, ranks: Ranks) -> Iterator[Problem]:
    for rt in ranks:
        names = {output.name for output in plan.step.outputs if output.rank == rt.rank}
        for name, value, microbatch, line in rt.outputs:
            if name not in names:
                yield Problem.at(line, f"gives the output {name!r}, which is not this rank's")
                continue
            _result(reference, f"the output {name!r}", value, reference.outputs[name], line)
            if value.microbatch not in (None, microbatch):
                yield Problem.at(
                    line, f"gives the output {name!r} of microbatch {value.microbatch} for {microbatch}"
                )
        for name in sorted(names):
            places = [(m, line) for other, _, m, line in rt.outputs if other == name]
            yield from _once(f"the output {name!r}", places, plan, rt.last)


def _checks(plan: Plan, reference: Reference, ranks: Ranks) -> Iterator[Problem]:
    """Each check of the captured step must run, with each microbatch."""
    calls_by_check: dict[object, list[tuple[int | None, Line]]] = {}
    for rt in ranks:
        for summary in rt.sections.known.values():
            for checked in summary.effects.checked:
                calls_by_check.setdefault((checked.term, checked.says), []).extend(summary.calls)
    for term, says in dict.fromkeys(reference.checks):  # one that is made twice has to run once
        calls = calls_by_check.pop((term, says), [])
        missing = _times((m for m, _ in calls if m is not None), plan.step.microbatches)[0]
        if missing and not (calls and not term.varies):
            line = calls[-1][1] if calls else ranks[0].last
            yield Problem.at(line, f"the check of {term} is missing for {named(missing)}")
    for calls in calls_by_check.values():
        yield Problem.at(calls[-1][1], "makes a check that the captured step does not have")


def _messages(world: World, ranks: Ranks) -> Iterator[Problem]:
    for key, message in world.sent.items():
        # Parts of a collective stay there, as each rank looks at them.
        if key[0] != COLLECTIVE:
            text = f"sends message {key[2]} to rank {key[1]}, which does not take it"
            yield Problem.at(message.line, text, ORDER)
    for rt in ranks:
        for pending in rt.pending:
            yield Problem.at(pending.line, "posts a message that it never waits for", ORDER)
    for (group, number), joined in world.joined.items():
        if len(joined) != len(ranks):
            yield Problem.at(
                joined[0][2], f"{len(joined)} ranks take part in collective {number} of group {group}"
            )
