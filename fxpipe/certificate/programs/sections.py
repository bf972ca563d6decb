"""The functions of a program, run once for the same inputs, whatever the microbatch.

A section is a function of its arguments.  Its first call runs its lines on terms; a later call with equal
terms, of another microbatch, has the same results, of that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.calls import Calls, Effects
from fxpipe.certificate.programs.plain import NotPlain, form_of
from fxpipe.certificate.programs.summaries import AsLeaves, Given, Rebuilt, Summary, is_stateless, refuse
from fxpipe.certificate.programs.values import (
    Announced,
    Container,
    Held,
    Leaves,
    Memory,
    Offloaded,
    Pending,
    Printed,
    Sum,
    Value,
    Within,
)
from fxpipe.certificate.terms.terms import Term


@dataclass(eq=False, repr=False)
class Sections:
    """The summaries of one rank.  ``own``, ``at``: the microbatch of the last call, and its line."""

    calls: Calls
    known: dict[Any, Summary] = field(default_factory=dict)
    held: Held = field(default_factory=Held)
    running: bool = False
    own: int | None = None
    at: Line | None = None
    number: int = 0
    read_buffers: dict[Any, set[str]] = field(default_factory=dict)

    def wrapped(self, function: Callable[..., Any], buffer: Callable[[str], Value]) -> Callable[..., Any]:
        """The function as its program calls it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.running:  # of another section
                return function(*args, **kwargs)
            self.number += 1
            result = self.call(function, [*args, *kwargs.values()], tuple(kwargs), buffer)
            self.held.runs(function.__name__, self.own, self.calls.line())
            return result

        call.__name__ = function.__name__
        call.section = function  # type: ignore[attr-defined]
        call.is_stateless = True  # type: ignore[attr-defined]
        return call

    def call(
        self,
        function: Callable[..., Any],
        args: list[Any],
        names: tuple[str, ...],
        buffer: Callable[[str], Value],
    ) -> Any:
        """Call a function, the last arguments by their names."""
        given = Given(_microbatch(args))
        self.own, self.at = given.own, self.calls.line()
        form = function, names, tuple(self._form(given, each) for each in args)
        changed = sorted(self.read_buffers.get(form, ()))
        key = form, tuple(self._form(given, buffer(name)) for name in changed)
        found = self.known.get(key)
        if found is None:
            found = self._run(function, args, names, given, form, buffer)
            # A buffer that the function was not known to read is a part of the key of later calls.
            changed = sorted(self.read_buffers.get(form, ()))
            given = Given(given.own)
            form = function, names, tuple(self._form(given, each) for each in args)
            self.known[form, tuple(self._form(given, buffer(name)) for name in changed)] = found
        found.calls.append((given.own, self.at))
        return self._applied(found, given)

    def _form(self, given: Given, argument: Any) -> Any:
        """An argument for comparison; its values, memories and lists are entered into ``given``."""
        match argument:
            case Value():
                memory = argument.memory
                if memory not in given.memories:
                    given.memories.append(memory)
                place = given.memories.index(memory), argument.version - memory.version
                return self._own_term(argument, given.own), *place, memory.keeper, memory.root
            case Leaves():
                return "leaves", None if given.own is None else argument.microbatch - given.own
            case Container():
                return argument.kind
            case Within():
                return "within", argument.container.kind, argument.module
            case list():
                known = [k for k, each in enumerate(given.lists) if each is argument]
                if known:
                    return "list", known[0]
                given.lists.append(argument)
                return (list, *(self._form(given, each) for each in argument))
            case Announced():
                return Announced, argument.name, form_of(tuple(argument))
            case tuple():
                return (type(argument), *(self._form(given, each) for each in argument))
            case dict() | MappingProxyType():
                items = (
                    (self._form(given, name), self._form(given, each)) for name, each in argument.items()
                )
                return ("dict", *items)
            case Offloaded():
                return "offloaded", self._own_term(argument.value, given.own)
            case Sum():
                return "sum", argument.name, argument.transposed
            case Printed():
                return "printed", argument.text
            case Pending():
                raise Rejected(self.calls.line(), "reads a message before it has waited for it")
        if is_stateless(argument):
            return argument
        try:
            return form_of(argument)
        except NotPlain as error:
            self._refuse(f"gives a section {error}")

    def _refuse(self, what: str) -> NoReturn:
        refuse(self.calls, what)

    def _own_term(self, value: Value, own: int | None) -> Term:
        """The term of a value, marked if it is of another microbatch than ``own``."""
        if value.microbatch is None or value.microbatch == own or own is None:
            return value.term
        by = value.microbatch - own
        found = self.calls.terms.plain("shifted", {"self": value.term, "by": by}, self.at)
        found.layout = found.layout or value.term.layout
        return found

    def _run(
        self,
        function: Callable[..., Any],
        args: list[Any],
        names: tuple[str, ...],
        given: Given,
        form: Any,
        buffer: Callable[[str], Value],
    ) -> Summary:
        """Run the function on copies of its arguments."""
        memories = {memory: Memory(memory.keeper, root=memory.root) for memory in given.memories}
        for old, new in memories.items():
            new.written = old.written
        copied = _Copies(self, given, memories, buffer, self.read_buffers.setdefault(form, set()))
        own = [copied.of(each) for each in args]
        self.calls.effects, self.running = Effects(), True
        positional = len(own) - len(names)
        try:
            result = function(*own[:positional], **dict(zip(names, own[positional:], strict=True)))
        finally:
            self.running = False
        if any(_differ(before, after) for before, after in copied.dicts):
            self._refuse(f"changes a dict that {function.__name__} was given")
        places = {memories[memory]: k for k, memory in enumerate(given.memories)}
        leaves = AsLeaves(self.calls, places, copied.lists, (each for _, each in copied.dicts))
        held = {id(each) for each in _lists_within([*own, result])}
        return Summary(
            function.__name__,
            leaves.of(result),
            [[leaves.of(item) for item in each] if id(each) in held else [] for each in copied.lists],
            {k: memory.version for memory, k in places.items() if memory.version},
            self.calls.effects,
        )

    def _applied(self, found: Summary, given: Given) -> Any:
        """The results for the microbatch of this call, and what it does to its arguments."""
        line = str(self.calls.line()) if found.writes else ""
        before = [memory.version for memory in given.memories]
        for memory in given.memories:
            memory.count(self.held)
        for k, times in found.writes.items():
            if k >= 0:
                given.memories[k].version += times
                given.memories[k].written = f"{found.name} at {line}"
        new = Rebuilt(given, before, self.held)
        for values, after in zip(given.lists, found.lists, strict=True):
            values[:] = [new.of(each) for each in after]
        return new.of(found.result)


def _lists_within(values: Any) -> Iterator[list[Any]]:
    """The lists that arguments still hold, or that are returned; one that was popped from another is free
    with all its values."""
    found, todo = dict[int, Any](), [values]
    for each in todo:
        if id(each) not in found:
            found[id(each)] = each
            inside = each.values() if isinstance(each, dict) else each
            todo += [inner for inner in inside if isinstance(inner, list | tuple | dict)]
    return (each for each in found.values() if isinstance(each, list))


def _differ(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    return [*before] != [*after] or any(value is not after[name] for name, value in before.items())


def _microbatch(args: Any) -> int | None:
    """The microbatch that most of the arguments are of."""
    count: Counter[int] = Counter(_microbatches(args))
    return count.most_common(1)[0][0] if count else None


def _microbatches(argument: Any) -> Any:
    match argument:
        case Value():
            if argument.microbatch is not None:
                yield argument.microbatch
        case Leaves():
            yield argument.microbatch
        case Offloaded():
            yield from _microbatches(argument.value)
        case list() | tuple():
            for each in argument:
                yield from _microbatches(each)
        case dict():
            yield from _microbatches([*argument.values()])


class _Copies:
    """The arguments of a call as its function gets them: of no microbatch, in memories of their own."""

    def __init__(
        self,
        sections: Sections,
        given: Given,
        memories: dict[Memory, Memory],
        buffer: Callable[[str], Value],
        read: set[str],
    ) -> None:
        self._sections, self._given, self._memories = sections, given, memories
        self._buffer, self._read = buffer, read
        self._lists: list[list[Any]] = []
        self.lists: list[list[Any]] = []
        self.dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # as they are given, and as they are

    def of(self, argument: Any) -> Any:
        match argument:
            case Value():
                return self._value(argument)
            case Leaves():
                return Container("leaves", lambda name: self._value(argument[name]))
            case Container(kind="buffers"):
                return Container("buffers", self._of_buffers)
            case list():
                return self._list(argument)
            case Announced():
                return argument
            case tuple():
                return type(argument)(self.of(each) for each in argument)
            case dict():
                found = {name: self.of(each) for name, each in argument.items()}
                self.dicts.append(({**found}, found))
                return found
        return argument

    def _list(self, given: list[Any]) -> list[Any]:
        known = [k for k, each in enumerate(self._lists) if each is given]
        if known:
            return self.lists[known[0]]
        copy: list[Any] = []
        self._lists.append(given)
        self.lists.append(copy)
        copy += [self.of(each) for each in given]
        return copy

    def _value(self, value: Value) -> Value:
        term = self._sections._own_term(value, self._given.own)
        memory = self._memories.setdefault(value.memory, Memory(value.memory.keeper, root=value.memory.root))
        copy = Value(term, 0, memory)
        copy.version = memory.version + value.version - value.memory.version
        return copy

    def _of_buffers(self, name: str) -> Value:
        value = self._buffer(name)
        if value.term.varies:
            self._read.add(name)
        return self._value(value)
