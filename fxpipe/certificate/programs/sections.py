"""The functions of a program, run once for the same inputs, whatever the microbatch.

A section is a function of its arguments.  Its first call runs its lines on terms; a later call with equal
terms, of another microbatch, has the same results, of that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.calls import Calls, Effects
from fxpipe.certificate.programs.summaries import AsLeaves, CallInputs, Rebuilt, Summary, plain_form
from fxpipe.certificate.programs.values import (
    Container,
    Leaves,
    Length,
    Memory,
    Offloaded,
    OpLog,
    Pending,
    Sum,
    Value,
    Within,
)
from fxpipe.certificate.terms.terms import Term


class Called(Protocol):
    """An op, or a function of the program: what it does, its arguments say."""

    @property
    def name(self) -> str: ...

    @property
    def run(self) -> Callable[..., object]: ...


@dataclass(eq=False, repr=False)
class Sections:
    """The summaries of one rank.  ``buffer``: gives the value that a buffer has by now.  ``reads``: is
    told of the parameters that a call reads that is not run again.  ``microbatch``, ``at``: the
    microbatch of the last call, and its line."""

    calls: Calls
    buffer: Callable[[str], Value]
    reads: Callable[[Iterable[str]], None]
    known: dict[object, Summary] = field(default_factory=dict)
    log: OpLog = field(default_factory=OpLog)
    running: bool = False
    microbatch: int | None = None
    at: Line | None = None
    number: int = 0
    read_buffers: dict[object, set[str]] = field(default_factory=dict)

    def call(self, function: Called, args: Sequence[object], names: tuple[str, ...] = ()) -> Any:
        """Call a function, the last arguments by their names."""
        inputs = CallInputs(_microbatch(args))
        self.microbatch, self.at = inputs.microbatch, self.calls.line()
        form = function, names, tuple(self._form(inputs, each) for each in args)
        key = self._with_buffers(form, inputs)
        summary = self.known.get(key)
        if summary is None:
            summary = self._run(function, args, names, inputs, form)
            # A buffer that the function was not known to read is a part of the key of later calls.
            inputs = CallInputs(inputs.microbatch)
            form = function, names, tuple(self._form(inputs, each) for each in args)
            self.known[self._with_buffers(form, inputs)] = summary
        else:
            self.reads(summary.effects.read)
        summary.calls.append((inputs.microbatch, self.at))
        return self._applied(summary, inputs)

    def _with_buffers(self, form: object, inputs: CallInputs) -> object:
        changed = sorted(self.read_buffers.get(form, ()))
        return form, tuple(self._form(inputs, self.buffer(name)) for name in changed)

    def _form(self, inputs: CallInputs, argument: object) -> object:
        """An argument for comparison; its values, memories and lists are entered into ``inputs``."""
        match argument:
            case Value():
                memory = argument.memory
                # Numbered as they are met: which arguments share memory is part of the form.
                number, version = inputs.memories.setdefault(memory, len(inputs.memories)), memory.version
                term = self._own_term(argument, inputs.microbatch)
                # The difference of the versions: how stale it is, however often others wrote before.
                return term, number, argument.version - version, memory.keeper, memory.root
            case Leaves():
                return (
                    "leaves",
                    None if inputs.microbatch is None else argument.microbatch - inputs.microbatch,
                )
            case Length():
                if inputs.microbatch is not None and argument.microbatch != inputs.microbatch:
                    text = (
                        f"gives a section of microbatch {inputs.microbatch} a length of {argument.microbatch}"
                    )
                    raise Rejected(self.calls.line(), text)
                return int(argument)
            case Container():
                return argument.kind
            case Within():
                return "within", argument.container.kind, argument.module
            case list():
                # A list that stands in two places is one: what is popped from it is gone from both.
                known = [k for k, each in enumerate(inputs.lists) if each is argument]
                if known:
                    return "list", known[0]
                inputs.lists.append(argument)
                return (list, *(self._form(inputs, each) for each in argument))
            case tuple():
                return (tuple, *(self._form(inputs, each) for each in argument))
            case Offloaded():
                return "offloaded", self._own_term(argument.value, inputs.microbatch)
            case Sum():
                return "sum", argument.name, argument.transposed
            case Pending():
                raise Rejected(self.calls.line(), "reads a message before it has waited for it")
        return plain_form(self.calls, argument, "gives a section")

    def _own_term(self, value: Value, microbatch: int | None) -> Term:
        """The term of a value, marked if it is of another microbatch."""
        if value.microbatch is None or value.microbatch == microbatch or microbatch is None:
            return value.term
        by = value.microbatch - microbatch
        term = self.calls.terms.plain("shifted", {"self": value.term, "by": by}, self.at)
        term.layout = term.layout or value.term.layout
        return term

    def _run(
        self,
        function: Called,
        args: Sequence[object],
        names: tuple[str, ...],
        inputs: CallInputs,
        form: object,
    ) -> Summary:
        """Run the function on copies of its arguments."""
        # Memories of their own, whose versions count the writes of this call alone.
        memories = {memory: Memory(memory.keeper, root=memory.root) for memory in inputs.memories}
        for old, new in memories.items():
            new.written = old.written
        copied = _Copies(self, inputs, memories, self.read_buffers.setdefault(form, set()))
        copies = [copied.of(each) for each in args]
        self.calls.effects, self.running = Effects(), True
        positional = len(copies) - len(names)
        try:
            result = function.run(*copies[:positional], **dict(zip(names, copies[positional:], strict=True)))
        finally:
            self.running = False
        places = {memories[memory]: k for k, memory in enumerate(inputs.memories)}
        leaves = AsLeaves(self.calls, places, copied.lists)
        kept_lists = {id(each) for each in _lists_within([*copies, result])}
        return Summary(
            function.name,
            leaves.of(result),
            [[leaves.of(item) for item in each] if id(each) in kept_lists else [] for each in copied.lists],
            {k: memory.version for memory, k in places.items() if memory.version},
            self.calls.effects,
        )

    def _applied(self, summary: Summary, inputs: CallInputs) -> object:
        """The results for the microbatch of this call, and what it does to its arguments."""
        line = str(self.calls.line()) if summary.writes else ""
        memories = [*inputs.memories]
        before = [memory.version for memory in memories]
        for memory in memories:
            memory.count(self.log)
        for k, times in summary.writes.items():
            if k >= 0:
                memories[k].version += times
                memories[k].written = f"{summary.name} at {line}"
        new = Rebuilt(inputs, memories, before, self.log)
        for values, after in zip(inputs.lists, summary.lists, strict=True):
            values[:] = [new.of(each) for each in after]
        return new.of(summary.result)


def _lists_within(values: Any) -> Iterator[list[object]]:
    """The lists that arguments still hold, or that are returned; one that was popped from another is free
    with all its values."""
    known, todo = dict[int, object](), [values]
    for each in todo:
        if id(each) not in known:
            known[id(each)] = each
            inside = each.values() if isinstance(each, dict) else each
            todo += [inner for inner in inside if isinstance(inner, list | tuple | dict)]
    return (each for each in known.values() if isinstance(each, list))


def _microbatch(args: Sequence[object]) -> int | None:
    """The microbatch that most of the arguments are of."""
    count, todo = Counter[int](), [*args]
    for each in todo:
        if isinstance(each, list | tuple):
            todo += each
        elif isinstance(each, Offloaded):
            todo.append(each.value)
        elif isinstance(each, Value | Leaves | Length) and each.microbatch is not None:
            count[each.microbatch] += 1
    # One argument of another microbatch, by mistake, is then the one that is marked as shifted.
    return count.most_common(1)[0][0] if count else None


class _Copies:
    """The arguments of a call as its function gets them: of no microbatch, in memories of their own."""

    def __init__(
        self,
        sections: Sections,
        inputs: CallInputs,
        memories: dict[Memory, Memory],
        read: set[str],
    ) -> None:
        self._sections, self._inputs, self._memories, self._read = sections, inputs, memories, read
        self._lists: list[list[object]] = []
        self.lists: list[list[object]] = []

    def of(self, argument: object) -> object:
        match argument:
            case Value():
                return self._value(argument)
            case Leaves():
                return Container("leaves", lambda name: self._value(argument[name]))
            case Container(kind="buffers"):
                return Container("buffers", self._of_buffers)
            case list():
                return self._list(argument)
            case tuple():
                return tuple(self.of(each) for each in argument)
            case Length():
                return int(argument)
        return argument

    def _list(self, items: list[object]) -> list[object]:
        known = [k for k, each in enumerate(self._lists) if each is items]
        if known:
            return self.lists[known[0]]
        copy: list[object] = []
        self._lists.append(items)
        self.lists.append(copy)
        copy += [self.of(each) for each in items]
        return copy

    def _value(self, value: Value) -> Value:
        term = self._sections._own_term(value, self._inputs.microbatch)
        memory = self._memories.setdefault(value.memory, Memory(value.memory.keeper, root=value.memory.root))
        copy = Value(term, 0, memory)
        copy.version = memory.version + value.version - value.memory.version
        return copy

    def _of_buffers(self, name: str) -> Value:
        value = self._sections.buffer(name)
        if value.term.varies:
            self._read.add(name)
        return self._value(value)
