"""Lets the ranks take turns, always in the same order, and carries what they send.

Each rank has a stack of its own.  It runs until it waits for something that has not been sent; then a rank
goes on whose messages are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from greenlet import getcurrent, greenlet

from fxpipe.certificate.problems import ORDER, Line, Problem, Rejected

#: What a message begins with, of a rank that waits at the end.
WAITS = "waits forever for"


Key = tuple[object, ...]


class Message(NamedTuple):
    """``content``: a Value, or a sum of gradients.  ``line``: that sent it.  ``ahead``: whether it was sent
    in a warm-up, which may run again."""

    content: object
    layout: object
    line: Line
    ahead: bool = False


class _Wait(NamedTuple):
    """A rank's wait for the message with a key, at a line; ``what``: the message as text."""

    key: Key
    line: Line
    what: str


@dataclass(eq=False, repr=False)
class World:
    """``sent``: what was sent and not taken yet, by its key: (from, to, number), or of a collective
    (COLLECTIVE, group, number, from).  ``joined``: per collective what each rank took it for.  ``running``:
    the rank whose turn it is."""

    ranks: int
    running: int = 0
    sent: dict[Key, Message] = field(default_factory=dict)
    numbers: Counter[object] = field(default_factory=Counter)
    joined: dict[tuple[int, object], list[tuple[str, int, Line]]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _waits: dict[int, _Wait] = field(default_factory=dict)

    def next_key(self, *channel: object) -> Key:
        """The key of the next message of a channel, as one of its ends counts them."""
        self.numbers[channel] += 1
        return (*channel[1:], self.numbers[channel] - 1)

    def send(self, key: Key, message: Message) -> None:
        self.sent[key] = message

    def take(self, key: Key, rank: int, line: Line, what: str) -> Message:
        """Wait for a message."""
        if key not in self.sent:
            self._waits[rank] = _Wait(key, line, what)
            # The others run now; it goes on when the message is there (``_take_turns``).
            caller = getcurrent().parent
            assert caller is not None, "a rank has a stack of its own, above the caller's"
            caller.switch()
        return self.sent.pop(key)

    def look(self, key: Key, rank: int, line: Line, what: str) -> Message:
        """Wait for a message that others take as well."""
        message = self.sent[key] = self.take(key, rank, line, what)
        return message

    def run(self, mains: list[Callable[[], None]]) -> None:
        """Run one function a rank, to its end or to the first that is rejected."""
        stacks = [greenlet(main) for main in mains]
        try:
            self._take_turns(stacks)
        except Rejected as error:
            self.problems.append(error.problem)
        finally:
            for stack in stacks:
                if stack:  # it waits, and ends there
                    stack.throw()

    def _take_turns(self, stacks: list[greenlet]) -> None:
        while running := [rank for rank, stack in enumerate(stacks) if not stack.dead]:
            # In the order of ranks, so that a fault is told of the same rank and line each time.
            ready = [r for r in running if r not in self._waits or self._waits[r].key in self.sent]
            for rank in ready:
                self._waits.pop(rank, None)
                self.running = rank
                stacks[rank].switch()
            if not ready:  # all wait, and who waits sends nothing: none will ever go on
                for rank in running:
                    _, line, what = self._waits[rank]
                    self.problems.append(Problem(rank, line.number, f"{WAITS} {what}", ORDER))
                return
