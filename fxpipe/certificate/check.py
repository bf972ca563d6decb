"""Proves that the programs of all ranks are the captured step, or says where they are not.

The programs are evaluated on terms, all ranks in turns (``world.py``), and what they give at the end is
compared with the captured step's own terms, of every microbatch.  Nothing here is shared with the passes, the
lowering and the code generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpipe.certificate.causes import causes
from fxpipe.certificate.compare import compared
from fxpipe.certificate.plan_facts import unlike_captured
from fxpipe.certificate.problems import (
    NAME,
    ORDER,
    Certificate,
    Line,
    Problem,
    RankProof,
    Rejected,
    differs_at,
    lengths_text,
)
from fxpipe.certificate.programs.calls import Calls
from fxpipe.certificate.programs.evaluate import Evaluator
from fxpipe.certificate.programs.frames import Stack, Unbound
from fxpipe.certificate.programs.sections import Sections
from fxpipe.certificate.programs.values import OpLog
from fxpipe.certificate.ranks.memory import unlike_plan
from fxpipe.certificate.ranks.runtime import TermRuntime
from fxpipe.certificate.ranks.world import World
from fxpipe.certificate.reference import Reference, reference_of
from fxpipe.certificate.terms.identities import RULES
from fxpipe.certificate.terms.layouts import Unknown
from fxpipe.certificate.terms.parts import Parts
from fxpipe.certificate.terms.terms import Term, Terms
from fxpipe.errors import ArtifactError, RunError
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.captured import CapturedOps, CapturedStep, digest
from fxpipe.plan.libraries import imported
from fxpipe.plan.program.parse import parse
from fxpipe.plan.program.records import Program

MOST_PROBLEMS = 100


def check(plan: Plan, programs: Sequence[str], captured: CapturedStep) -> Certificate:
    """Check the programs of all ranks, one text a rank, against the step that was captured.

    Of programs that take microbatches of several lengths, at all those at which the step was captured.
    Raises ArtifactError if the captured step names ops that do not exist, or lengths that the plan has not.
    """
    certificate = _check(captured, plan, programs)
    names = [each.name for each in plan.step.lengths]
    if names:
        example = {each.name: each.example for each in plan.step.lengths}
        certificate = replace(certificate, lengths=(lengths_text(example),))
    for other in captured.others:
        if [*other.lengths] != names:
            raise ArtifactError(f"The step was captured at {other.lengths}, and the plan has {names}.")
        # Faults at one of the lengths are enough to mend.
        if certificate.holds:
            there = replace(plan, step=plan.step.at(other.lengths))
            certificate = certificate.at_lengths(other.lengths, _check(other.step, there, programs))
    return certificate


def _check(step: CapturedOps, plan: Plan, programs: Sequence[str]) -> Certificate:
    reference = reference_of(step, Terms(RULES))
    certificate = check_against(reference, plan, programs)
    rows = [] if reference.parts is None else reference.parts.rows_of_equal_values()
    if rows and not certificate.holds:
        # What a model computes twice, in two shapes, a program in parts may compute once.
        again = check_against(reference_of(step, Terms(RULES), rows), plan, programs)
        return again if again.holds else certificate
    return certificate


def check_against(reference: Reference, plan: Plan, programs: Sequence[str]) -> Certificate:
    """Check the programs, for a captured step on terms, which may serve for many texts."""
    read = [parse(source) for source in programs]
    world = World(plan.ranks)
    stacks = [Stack(rank) for rank in range(plan.ranks)]
    ranks = [_rank(stack, plan, reference, world) for stack in stacks]
    # A reference may serve for many texts, and a term has the line that was the first to compute it.
    reference.terms.forget_programs()
    reference.parts = parts = Parts(reference.terms) if plan.head_chunks > 1 else None
    reference.terms.whole = None if parts is None else parts.whole
    reference.terms.line, reference.causes = lambda: stacks[world.running](), {}
    # What a program means whose lines are not all known, nobody can say.
    world.problems += [
        Problem(rank, each.lineno, f"is outside of what is checked: {each.what}")
        for rank, program in enumerate(read)
        for each in program.outside
    ]
    world.problems += unlike_captured(plan, reference)
    if not world.problems:
        world.run([_main(*each) for each in zip(ranks, stacks, read, strict=True)])
        if all(rank.ended for rank in ranks):
            world.problems += compared(plan, reference, world, ranks)
    return _certificate(plan, reference, ranks, causes(plan, ranks, read, world.problems))


def check_artifact(artifact: Artifact, where: str = "captured.json") -> Certificate:
    """Check the programs of an artifact that has them all.

    where: the name of the captured step's file, for messages.  Raises RunError where there is none.
    """
    if not artifact.captured:
        raise RunError(
            f"The pipeline does not hold its captured step: {where} is gone, or the pipeline was saved by an "
            "earlier version. Compile it again."
        )
    captured = CapturedStep.from_json(artifact.captured, where)
    certificate = check(artifact.plan, artifact.programs, captured)
    changed = [
        Problem(0, 0, f"the constant {name!r} has other values than in the captured step")
        for name, known in captured.constants.items()
        if name in artifact.constants and digest(artifact.constants[name]) not in (known, "")
    ]
    return replace(certificate, problems=(*changed, *certificate.problems))


def _rank(stack: Stack, plan: Plan, reference: Reference, world: World) -> TermRuntime:
    log = OpLog()

    def note(text: str, cause: str = "", *, of: Sequence[Term] = ()) -> None:
        world.problems.append(_blamed(reference, of, stack(), text, cause).problem)

    shapes: dict[str, tuple[int, ...]] = {
        name: plan.layouts[name].shape for name in plan.tensors[stack.rank].gradients
    }
    calls = Calls(reference.terms, stack, stack.of_step, note, shapes)
    # Functions, since ``rt`` is made of the sections that ask it.
    sections = Sections(calls, lambda name: rt.buffer(name), lambda names: rt.rows.read(names), log=log)
    rt = TermRuntime(stack.rank, plan, reference, world, calls, sections, log)
    return rt


def _main(rt: TermRuntime, stack: Stack, program: Program) -> Callable[[], None]:
    """Evaluates the program of a rank."""

    def main() -> None:
        try:
            evaluator = Evaluator(program, stack, rt.sections, imported(rt.plan.libraries))
            if evaluator.step(rt, rt.batch) is not rt or not rt.ended:
                raise Rejected(Line(rt.rank, 0), "does not end with `return rt.finish()`")
        except Rejected:
            raise
        except Unknown as error:
            raise _blamed(rt.reference, error.of, stack(), str(error)) from error
        except Unbound as error:
            raise _within_op(stack, error, f"fails: {error}") from error
        except KeyError as error:
            text = f"has no value of {error}: an op runs twice, or before what it needs"
            raise _within_op(stack, error, text) from error
        except Exception as error:  # an edited program may do anything with its values
            raise _within_op(stack, error, f"fails: {type(error).__name__}: {error}") from error

    return main


def _blamed(reference: Reference, of: Sequence[Term], line: Line, text: str, cause: str = "") -> Rejected:
    """A problem at a line, or at that of the first value that the captured step does not have, of those that
    some terms are computed from."""
    first = reference.terms.first_alone(of)
    if first is None:
        return Rejected(line, text, cause)
    cause = differs_at(first.line)
    if first.line == line:
        return Rejected(line, text, cause)
    if not text.startswith(first.written()):
        text = f"computes {first.written()}, which the captured step does not have: {line} {text}"
    return Rejected(first.line, text, cause)


def _within_op(stack: Stack, error: Exception, text: str) -> Rejected:
    """An error at the line that fails, with the line that calls the section; at the line of ``step`` that
    calls an op too early, or twice, of an op that lacks a value."""
    *calls, line = stack.lines()
    unbound = error if isinstance(error, Unbound) else None
    lacks = unbound.is_around if unbound else isinstance(error, KeyError) and type(error.args[0]) is int
    if lacks and len(calls) == 1:
        return Rejected(calls[0], f"{text} (in line {line.number})", ORDER)
    cause = f"{NAME} {unbound.name}" if unbound else ""
    return Rejected(line, f"{text} (called in line {calls[-1].number})" if calls else text, cause)


def _certificate(
    plan: Plan, reference: Reference, ranks: Sequence[TermRuntime], problems: list[Problem]
) -> Certificate:
    predicted = plan.prediction.peak_memory
    return Certificate(
        microbatches=plan.step.microbatches,
        values=reference.terms.captured,
        gradients=len(reference.grads),
        buffers=len(reference.buffers),
        outputs=len(reference.outputs),
        ranks=tuple(
            RankProof(rt.calls.count, rt.sections.number, rt.sent, rt.log.peak[0], int(predicted[rt.rank]))
            for rt in ranks
        ),
        problems=tuple(problems[:MOST_PROBLEMS]),
        split=reference.split,
        parts=plan.head_chunks,
        otherwise=tuple(dict.fromkeys(sorted(unlike_plan(plan, ranks))))[:MOST_PROBLEMS],
    )
