"""Loads the source of a program as a function for running, debugging and tracebacks."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpipe.errors import ArtifactError, RunError
from fxpipe.plan.program import records as r
from fxpipe.plan.program.parse import code_of, compiled
from fxpipe.plan.program.performed import Performed
from fxpipe.runtime.program.comm import Collective, Layout
from fxpipe.runtime.program.program_text import ProgramTraffic, layouts_of_lengths, traffic

PROGRAM = "fxpipe_program_"  # the names of programs, as modules, begin so


@dataclass(frozen=True)
class CollectiveCall:
    """An operation of all ranks.  ``verb``: the method of ``rt``.  ``root``: -1 of an all-gather."""

    group: int
    verb: Collective
    root: int
    layout: Layout


@dataclass(frozen=True)
class Program:
    """The function ``step(rt, batch)``, the messages that it sends and receives with their layouts at any
    lengths, and its ops in order.  ``has_warm_up``: whether it asks itself for the verdict on the last
    update.  ``text``: of a step that stands in the place of the program's own; ``traffic`` is that of its
    own.  ``bubble``: see OrderedStep; None of the plan's step."""

    step: Callable[[object, object], Any]
    traffic: ProgramTraffic
    layouts: Callable[..., Mapping[str, Layout]]
    ops: tuple[str, ...]
    has_warm_up: bool
    text: str = ""
    bubble: float | None = None

    def with_step(self, text: str, ops: tuple[str, ...]) -> Program:
        """The program with another function ``step`` of its sections, which calls these ops."""
        program = self.step.__code__.co_filename.removesuffix(".py").removesuffix(".py>")
        filename = f"{program}, {abs(hash(text)):x}.py{'>' if program.startswith('<') else ''}"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        namespace = dict(self.step.__globals__)
        exec(code_of(text, filename), namespace)
        return replace(self, step=namespace["step"], ops=ops, text=text)

    def ops_of(self, places: Sequence[int]) -> Sequence[str]:
        """Its ops where a replica has these microbatches in the places of its order."""
        if not self.text:
            return self.ops
        each = ((name, int(place)) for name, _, place in (op.rpartition(".") for op in self.ops))
        return [f"{name}.{places[place]}" for name, place in each if place < len(places)]

    def forget(self) -> None:
        """Let the text of a step go that does not run again."""
        if self.text:
            linecache.cache.pop(self.step.__code__.co_filename, None)

    def collectives(self, lengths: Sequence[Mapping[str, int]]) -> list[CollectiveCall]:
        """The collectives of its step for microbatches of each of these lengths, each once, in the same order
        on all ranks; its traffic is known."""
        calls = [call for call in self.traffic.calls or () if call.group >= 0]
        known = [self.layouts(*each.values()) for each in lengths]
        # Only these verbs have a group.
        once = {CollectiveCall(c.group, c.verb, c.peer, each[c.names[0]]) for each in known for c in calls}  # type: ignore[arg-type]
        return sorted(once, key=str)


def load_program(source: str, filename: str) -> Program:
    """Run the top level of a program.  ``filename``: the file of the source, or a name for it.

    Raises ArtifactError if the source is not a program with a ``step``, RunError if its top level fails.
    """
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    # The name of a module that is nowhere imported: ``is_of_program`` tells the program's functions by it.
    namespace: dict[str, Any] = {"__name__": f"{PROGRAM}{abs(hash(filename))}", "__file__": filename}
    try:
        code, program = compiled(source, filename)
    except SyntaxError as error:
        raise ArtifactError(
            f"{filename} is no Python program (line {error.lineno}: {error.msg}). Mend it, or save again."
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"{filename} is no Python program ({error}). Mend it, or save again.") from error
    step = program.step
    if step is None or not isinstance(step.body[-1], ast.Return | r.Outside):
        raise ArtifactError(f"{filename} is cut short: no step(rt, batch) that ends in a return. Save again.")
    try:
        exec(code, namespace)
    except Exception as error:  # an edited head may raise anything
        is_op = isinstance(error, AttributeError) and "_OpNamespace" in str(error)
        remedy = "Import the library that registers this op first" if is_op else "Mend it, or save again"
        raise RunError(
            f"{filename} fails before its step: {type(error).__name__}: {error}. {remedy}."
        ) from error
    performed, messages = Performed(step), namespace.get("MESSAGES", {})
    of_lengths = layouts_of_lengths(program)
    known = traffic(performed, of_lengths or messages)
    layouts = namespace["messages"] if of_lengths else lambda *_: messages
    return Program(namespace["step"], known, layouts, performed.ops, performed.has_warm_up)
