"""Lets the ranks take turns, one at a time and always in the same order, and carries what they send.

A rank runs until it waits for something that has not been sent; then a rank goes on whose messages are there.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fxpipe.certificate.problems import Line, Problem, Rejected


class Message(NamedTuple):
    """``content``: a Value, or a sum of gradients.  ``line``: that sent it.  ``ahead``: whether it was sent
    in a warm-up, which may run again."""

    content: Any
    layout: Any
    line: Line
    ahead: bool = False


class _Stopped(BaseException):
    """Ends a rank after another one was rejected; no program catches it."""


@dataclass(eq=False)
class World:
    """``sent``: what was sent and not taken yet, by its key: (from, to, number), or of a collective
    (COLLECTIVE, group, number, from).  ``joined``: per collective what each rank took it for."""

    ranks: int
    sent: dict[Any, Message] = field(default_factory=dict)
    numbers: Counter[Any] = field(default_factory=Counter)
    joined: dict[Any, list[Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _gates: list[threading.Lock] = field(default_factory=list)
    _ready: deque[int] = field(default_factory=deque)
    _wanted: dict[Any, list[int]] = field(default_factory=dict)  # key -> the ranks that wait for it
    _waits: dict[int, tuple[Line, str]] = field(default_factory=dict)
    _failed: bool = False
    _error: BaseException | None = None

    def next_key(self, *channel: Any) -> Any:
        """The key of the next message of a channel, as one of its ends counts them."""
        self.numbers[channel] += 1
        return (*channel[1:], self.numbers[channel] - 1)

    def send(self, key: Any, message: Message) -> None:
        self.sent[key] = message
        self._ready.extend(self._wanted.pop(key, ()))

    def take(self, key: Any, rank: int, line: Line, what: str) -> Message:
        """Wait for a message.  Raises Rejected, on one rank, if all ranks wait."""
        while key not in self.sent:
            self._wanted.setdefault(key, []).append(rank)
            self._waits[rank] = line, what
            self._pass_on()
            self._pause(rank)
        self._waits.pop(rank, None)
        return self.sent.pop(key)

    def look(self, key: Any, rank: int, line: Line, what: str) -> Message:
        """Wait for a message that others take as well."""
        found = self.take(key, rank, line, what)
        self.sent[key] = found
        return found

    def _pause(self, rank: int) -> None:
        self._gates[rank].acquire()
        if self._failed:
            raise _Stopped

    def _pass_on(self) -> None:
        """Let another rank go on; if none can, all of them end."""
        if self._ready:
            self._gates[self._ready.popleft()].release()
            return
        if self._waits and not self._failed:
            for rank, (line, what) in sorted(self._waits.items()):
                self.problems.append(Problem(rank, line.number, f"waits forever for {what}"))
        self._stop()

    def _stop(self) -> None:
        self._failed = True
        for gate in self._gates:
            if gate.locked():
                gate.release()

    def run(self, mains: list[Callable[[], None]]) -> None:
        """Run one function a rank, to its end or to the first that is rejected."""
        self._gates = [threading.Lock() for _ in mains]
        for gate in self._gates:
            gate.acquire()
        self._ready.extend(range(len(mains)))
        running = len(mains)

        def main(rank: int) -> None:
            nonlocal running
            try:
                self._pause(rank)
                mains[rank]()
                running -= 1
                if running:
                    self._pass_on()
            except _Stopped:
                pass
            except Rejected as error:
                self.problems.append(error.problem)
                self._stop()
            except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
                self._error = error
                self._stop()

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(len(mains))]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
