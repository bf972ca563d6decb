"""The summary of a call of a section: what it gives, as leaves, for any microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.calls import Calls, Effects
from fxpipe.certificate.programs.values import (
    FOLLOWS,
    ON_ITS_WAY,
    Memory,
    Offloaded,
    OpLog,
    Printed,
    Sum,
    Value,
    written,
)
from fxpipe.certificate.terms.layouts import layout_of
from fxpipe.certificate.terms.terms import Term, canonical


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """A value that a section gives: its term, and the memory it is in: that of an argument, by its number, or
    a new one, counted from -1 downwards, made for the value ``root``, of so many bytes and with a keeper.
    ``versions``: how often the section had written to an argument's memory when it made the value."""

    term: Term
    memory: int
    root: Term | None
    bytes: int
    keeper: str
    versions: int


@dataclass(frozen=True, eq=False)
class ListLeaf:
    """A list that a section gives: that of an argument, by its number, or a new one with these items, which
    may stand in several places."""

    argument: int | None
    items: list[object] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Summary:
    """A call, for any microbatch.  ``result``, ``lists``: of leaves: what it returns, and what its list
    arguments hold afterwards.  ``writes``: by the number of a memory, how often it writes to it.
    ``calls``: the microbatches for which it was called, each with the line of the call."""

    name: str
    result: object
    lists: list[Any]
    writes: dict[int, int]
    effects: Effects
    calls: list[tuple[int | None, Line]] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class CallInputs:
    """The arguments of a call, in a form that is equal for calls of other microbatches.  ``memories``: with
    their numbers."""

    microbatch: int | None
    memories: dict[Memory, int] = field(default_factory=dict)
    lists: list[list[object]] = field(default_factory=list)


def plain_form(calls: Calls, value: object, does: str) -> object:
    """Equal for two plain values, ops or functions where no program can tell one from the other: 1, 1.0 and
    True differ, 0.0 and -0.0 too.  Raises Rejected for what else a program may have."""
    if getattr(value, "is_stateless", False):
        return value
    try:
        return canonical(value)
    except TypeError as error:
        why = FOLLOWS if isinstance(value, Printed) else "it can change from call to call"
        text = f"{does} {written(value)}, which is not checked: {why}"
        raise Rejected(calls.line(), text) from error


class AsLeaves:
    """Results as a summary keeps them."""

    def __init__(self, calls: Calls, places: dict[Memory, int], lists: Sequence[list[object]]) -> None:
        """places: the numbers of the arguments' memories.  lists: among the arguments."""
        self._calls, self._places, self._new = calls, places, 0
        # By identity, with the list that has it.
        self._lists = {id(each): (each, ListLeaf(k)) for k, each in enumerate(lists)}
        self._dicts: dict[int, object] = {}

    def of(self, result: object) -> object:
        match result:
            case Value():
                if result.is_stale:
                    text = f"gives {result.term}, whose memory {result.memory.written} has overwritten"
                    self._calls.note(text, f"gives at {self._calls.line()}")
                memory = result.memory
                place = self._places.get(memory)
                if place is None:
                    self._new -= 1
                    place = self._places[memory] = self._new
                # What ``rt`` keeps, as a parameter, is no memory of the section.
                is_new, made_for = place < 0 and memory.keeper in ("", ON_ITS_WAY), memory.root or result.term
                # What is on its way is there with what this lane gives.
                values = (made_for, made_for["x"]) if memory.keeper == ON_ITS_WAY else (made_for,)
                size = sum(layout_of(self._calls.terms, each).bytes for each in values) if is_new else 0
                return Leaf(result.term, place, memory.root, size, memory.keeper, result.version)
            case list():
                if id(result) not in self._lists:
                    self._lists[id(result)] = result, (made := ListLeaf(None))
                    made.items.extend(map(self.of, result))
                return self._lists[id(result)][1]
            case tuple():
                return tuple(self.of(each) for each in result)
            case dict():
                if id(result) in self._dicts:
                    raise Rejected(self._calls.line(), "returns a dict twice, which is not checked")
                self._dicts[id(result)] = result
                return {name: self.of(each) for name, each in result.items()}
            case Sum() | Offloaded():
                return result
        plain_form(self._calls, result, "returns")
        return result


@dataclass(eq=False, repr=False)
class Rebuilt:
    """Results of a summary as values of the microbatch of the call.  ``known``: the memories of the
    arguments, ``before``: how often they had been written to."""

    inputs: CallInputs
    known: list[Memory]
    before: list[int]
    log: OpLog
    memories: dict[int, Memory] = field(default_factory=dict)
    lists: dict[ListLeaf, list[object]] = field(default_factory=dict)

    def of(self, part: object) -> object:
        if type(part) is Leaf:  # almost all are
            return self._value(part)
        match part:
            case ListLeaf(argument=None):
                if part not in self.lists:
                    made = self.lists[part] = list[object]()
                    made += [self.of(each) for each in part.items]
                return self.lists[part]
            case ListLeaf(argument=int(number)):
                return self.inputs.lists[number]
            case tuple():
                return tuple(self.of(each) for each in part)
            case dict():
                return {name: self.of(each) for name, each in part.items()}
        return part

    def _value(self, leaf: Leaf) -> Value:
        if leaf.memory >= 0:
            value = Value(leaf.term, self.inputs.microbatch, self.known[leaf.memory])
            value.version = self.before[leaf.memory] + leaf.versions
            return value
        memory = self.memories.get(leaf.memory)
        if memory is None:
            memory = self.memories[leaf.memory] = Memory(leaf.keeper, root=leaf.root, bytes=leaf.bytes)
            memory.count(self.log)
        return Value(leaf.term, self.inputs.microbatch, memory)
