"""The summary of a call of a section: what it gives, as leaves, for any microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NoReturn

from fxpipe.certificate.problems import Line, Rejected
from fxpipe.certificate.programs.calls import Calls, Effects
from fxpipe.certificate.programs.plain import NotPlain, form_of
from fxpipe.certificate.programs.values import Held, Memory, Offloaded, Printed, Sum, Value
from fxpipe.certificate.terms.layouts import layout_of
from fxpipe.certificate.terms.terms import Term


@dataclass(frozen=True, eq=False)
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

    given: int | None
    items: list[Any] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Summary:
    """A call, for any microbatch.  ``result``, ``lists``: of leaves: what it returns, and what its list
    arguments hold afterwards.  ``writes``: by the number of a memory, how often it writes to it.
    ``calls``: the microbatches for which it was called, each with the line of the call."""

    name: str
    result: Any
    lists: list[Any]
    writes: dict[int, int]
    effects: Effects
    calls: list[tuple[int | None, Line]] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Given:
    """The arguments of a call, in a form that is equal for calls of other microbatches."""

    own: int | None
    memories: list[Memory] = field(default_factory=list)
    lists: list[list[Any]] = field(default_factory=list)


def is_stateless(value: Any) -> bool:
    """Whether a value is an op, or a section: what a call of it does, its arguments say."""
    return getattr(value if isinstance(value, FunctionType) else type(value), "is_stateless", False) is True


def refuse(calls: Calls, what: str) -> NoReturn:
    raise Rejected(calls.line(), f"{what}, which can change from call to call and is not checked")


class AsLeaves:
    """Results as a summary keeps them."""

    def __init__(
        self,
        calls: Calls,
        places: dict[Memory, int],
        lists: Sequence[list[Any]],
        dicts: Iterable[dict[Any, Any]],
    ) -> None:
        """places: the numbers of the arguments' memories.  lists, dicts: among the arguments."""
        self._calls, self._places, self._new = calls, places, 0
        # By identity, with the lists and dicts that have it.
        self._lists = {id(each): (each, ListLeaf(k)) for k, each in enumerate(lists)}
        self._dicts = {id(each): each for each in dicts}

    def of(self, result: Any) -> Any:
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
                size = 0 if place >= 0 or memory.keeper else self._bytes(result)
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
                    refuse(self._calls, "returns a dict twice, or one that it was given")
                self._dicts[id(result)] = result
                return {name: self.of(each) for name, each in result.items()}
            case Printed() | Sum() | Offloaded():
                return result
        if not is_stateless(result):
            try:
                form_of(result)
            except NotPlain as error:
                refuse(self._calls, f"returns {error}")
        return result

    def _bytes(self, value: Value) -> int:
        return layout_of(self._calls.terms, value.memory.root or value.term).bytes


@dataclass(eq=False, repr=False)
class Rebuilt:
    """Results of a summary as values of the microbatch of the call.  ``before``: how often the memories of
    the arguments had been written to."""

    given: Given
    before: list[int]
    held: Held
    memories: dict[int, Memory] = field(default_factory=dict)
    lists: dict[ListLeaf, list[Any]] = field(default_factory=dict)

    def of(self, part: Any) -> Any:
        match part:
            case Leaf():
                return self._value(part)
            case ListLeaf(given=None):
                if part not in self.lists:
                    made = self.lists[part] = list[Any]()
                    made += [self.of(each) for each in part.items]
                return self.lists[part]
            case ListLeaf(given=int(number)):
                return self.given.lists[number]
            case tuple():
                return tuple(self.of(each) for each in part)
            case dict():
                return {name: self.of(each) for name, each in part.items()}
        return part

    def _value(self, leaf: Leaf) -> Value:
        if leaf.memory >= 0:
            value = Value(leaf.term, self.given.own, self.given.memories[leaf.memory])
            value.version = self.before[leaf.memory] + leaf.versions
            return value
        memory = self.memories.get(leaf.memory)
        if memory is None:
            memory = self.memories[leaf.memory] = Memory(leaf.keeper, root=leaf.root, bytes=leaf.bytes)
            memory.count(self.held)
        return Value(leaf.term, self.given.own, memory)
