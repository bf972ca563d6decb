"""The run loop: actors that advance until each has ended or waits for another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class RunLoop(Generic[Key]):
    """Actors, by number, and the keys of the events that they wait for."""

    def __init__(self, actors: int) -> None:
        self._runnable = list(range(actors))
        self._waiting: defaultdict[Key, list[int]] = defaultdict(list)

    def run(self, advance: Callable[[int], Key | None]) -> dict[int, Key]:
        """Run until no actor can advance; the actors that are blocked, with the event that each waits for.

        ``advance`` runs an actor until it has ended (None) or needs an event that has not happened yet, and
        calls ``happened`` for each event on the way.  Linear in the number of events.
        """
        while self._runnable:
            actor = self._runnable.pop()
            missing = advance(actor)
            if missing is not None:
                self._waiting[missing].append(actor)
        return {actor: key for key, actors in self._waiting.items() for actor in actors}

    def happened(self, key: Key) -> None:
        """Wake the actors that wait for the event."""
        if key in self._waiting:
            self._runnable += self._waiting.pop(key)
