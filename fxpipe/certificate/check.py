"""Proves that the programs of all ranks are the captured step, or says where they are not.

The programs run on terms, all ranks in turns (``world.py``), and what they give at the end is compared with
the captured step's own terms, of every microbatch.  Nothing here is shared with the passes, the lowering and
the code generation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from greenlet import GreenletExit

from fxpipe.certificate.causes import causes
from fxpipe.certificate.compare import compared
from fxpipe.certificate.problems import (
    NAME,
    ORDER,
    Certificate,
    Line,
    Problem,
    RankProof,
    Rejected,
    differs_at,
)
from fxpipe.certificate.programs.calls import Calls
from fxpipe.certificate.programs.program import Lines, loaded
from fxpipe.certificate.programs.sections import Sections
from fxpipe.certificate.programs.values import Held
from fxpipe.certificate.ranks.memory import unlike_plan
from fxpipe.certificate.ranks.runtime import Runtime, TermRuntime
from fxpipe.certificate.ranks.world import World
from fxpipe.certificate.reference import Reference, reference_of
from fxpipe.certificate.terms.identities import RULES
from fxpipe.certificate.terms.layouts import Unknown
from fxpipe.certificate.terms.terms import Term, Terms
from fxpipe.errors import RunError
from fxpipe.plan.artifact import Artifact, Plan
from fxpipe.plan.captured import CapturedStep
from fxpipe.plan.libraries import imported

MOST_PROBLEMS = 100


def check(plan: Plan, programs: Sequence[str], captured: CapturedStep) -> Certificate:
    """Check the programs of all ranks, one text a rank, against the step that was captured.

    Raises ArtifactError if the captured step names ops that do not exist.
    """
    return check_against(reference_of(captured, Terms(RULES)), plan, programs)


def check_against(reference: Reference, plan: Plan, programs: Sequence[str]) -> Certificate:
    """``check``, for a captured step on terms, which may serve for many texts."""
    proof = _checked(reference, plan, programs)
    if not proof.holds or not any(map(_ASSERT.search, programs)):
        return proof
    without = _checked(reference, plan, programs, has_asserts=False)
    text = " (under python -O, which leaves out what an assert does)"
    problems = tuple(replace(problem, text=problem.text + text) for problem in without.problems)
    return replace(proof, problems=problems)


_ASSERT = re.compile(r"\bassert\b")


def _checked(
    reference: Reference, plan: Plan, programs: Sequence[str], has_asserts: bool = True
) -> Certificate:
    reference.terms.forget_programs()
    reference.terms.line, reference.causes = Lines(plan.ranks), {}
    world = World(plan.ranks)
    ranks = [_rank(rank, plan, reference, world) for rank in range(plan.ranks)]
    world.run([_main(rank, source, has_asserts) for rank, source in zip(ranks, programs, strict=True)])
    if all(rank.ended for rank in ranks):
        world.problems += compared(plan, reference, world, ranks)
    return _certificate(plan, reference, ranks, causes(plan, ranks, programs, world.problems))


def check_artifact(artifact: Artifact, where: str = "captured.json") -> Certificate:
    """Check the programs of an artifact that has them all.

    where: the name of the captured step's file, for messages.  Raises RunError where there is none.
    """
    if not artifact.captured:
        raise RunError(
            f"The pipeline does not hold its captured step: {where} is gone, or the pipeline was saved by an "
            "earlier version. Compile it again."
        )
    return check(artifact.plan, artifact.programs, CapturedStep.from_json(artifact.captured, where))


def _rank(rank: int, plan: Plan, reference: Reference, world: World) -> TermRuntime:
    lines, held = Lines(plan.ranks), Held()

    def note(text: str, cause: str = "", *, of: Sequence[Term] = ()) -> None:
        world.problems.append(_blamed(reference, of, lines(), text, cause).problem)

    shapes: dict[str, tuple[int, ...]] = {
        name: plan.layouts[name].shape for name in plan.tensors[rank].gradients
    }
    calls = Calls(reference.terms, lines, lines.of_step, note, shapes)
    return TermRuntime(rank, plan, reference, world, calls, Sections(calls, held=held), held)


def _main(rt: TermRuntime, source: str, has_asserts: bool) -> Callable[[], None]:
    """Runs the program of a rank."""
    lines = Lines(rt.plan.ranks)

    def main() -> None:
        try:
            modules = imported(rt.plan.libraries)
            step = loaded(source, rt.rank, rt.sections, rt.buffer, modules, has_asserts)
            if step(Runtime(rt), rt.batch) is not rt or not rt.ended:
                raise Rejected(Line(rt.rank, 0), "does not end with `return rt.finish()`")
        except Rejected:
            raise
        except Unknown as error:
            raise _blamed(rt.reference, error.of, lines.of(error, rt.rank), str(error)) from error
        except (KeyboardInterrupt, GreenletExit):  # the user's, and that of ranks that are left waiting
            raise
        except KeyError as error:
            text = f"has no value of {error}: an op runs twice, or before what it needs"
            raise _within_op(rt, error, text) from error
        except BaseException as error:  # an edited program may raise anything, also SystemExit
            raise _within_op(rt, error, f"fails: {type(error).__name__}: {error}") from error

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


def _within_op(rt: TermRuntime, error: BaseException, text: str) -> Rejected:
    """An error at the line that fails, with the line that calls the section; at the line of ``step`` that
    calls an op too early, or twice, of an op that lacks a value."""
    *calls, line = Lines(rt.plan.ranks).passed(error, rt.rank) or [Line(rt.rank, 0)]
    lacks = (isinstance(error, KeyError) and type(error.args[0]) is int) or "free variable" in str(error)
    if lacks and len(calls) == 1:
        return Rejected(calls[0], f"{text} (in line {line.number})", ORDER)
    names = re.findall(r"'(\w+)'", str(error)) if isinstance(error, NameError) else ()
    cause = f"{NAME} {names[0]}" if names else ""
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
            RankProof(rt.calls.count, rt.sections.number, rt.sent, rt.held.peak[0], int(predicted[rt.rank]))
            for rt in ranks
        ),
        problems=tuple(problems[:MOST_PROBLEMS]),
        split=reference.split,
        otherwise=tuple(dict.fromkeys(sorted(unlike_plan(plan, ranks))))[:MOST_PROBLEMS],
    )
