"""Whether updates ahead of the verdict make steps shorter: measured."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

#: The first updates wait: they take longer than others, as an optimizer makes its state.
FIRST = 2
#: A trial has so many blocks of so many updates, that wait and that go ahead in turns.
BLOCKS, BLOCK = 4, 6
#: A trial comes again after so many updates.
PERIOD = 512


@dataclass(eq=False)
class SpeculationPolicy:
    """Decides for each update whether this rank makes it ahead of the verdict.

    In a trial the ranks wait and go ahead in turns; behind it they do what has made steps shorter.  All ranks
    measure all ranks' seconds, so they decide alike.  Where they go ahead, those ranks do whose waits in the
    trial were longer than copies take: the one that ends last copies nothing.

    ``copies``: the seconds of this rank's last copies.
    """

    copies: float = 0.0
    _updates: int = -FIRST
    _is_better: bool = False  # to go ahead, by the last trial
    _modes: deque[bool] = field(default_factory=lambda: deque([False] * 3, maxlen=3))  # of the last updates
    _steps: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    _waits: list[float] = field(default_factory=list)

    def goes_ahead(self) -> bool:
        """Asked once for each update."""
        place = self._updates % PERIOD if self._updates >= 0 else PERIOD
        if place == 0:
            self._waits.clear()
            for seconds in self._steps.values():
                seconds.clear()
        elif place == BLOCKS * BLOCK:
            self._is_better = median(self._steps[True]) < median(self._steps[False])
        mode = place // BLOCK % 2 == 1 if place < BLOCKS * BLOCK else self._is_better
        self._modes.append(mode)
        self._updates += 1
        return mode and median(self._waits) > self.copies

    def measured(self, step: float) -> None:
        """Told once for each update when its verdict is there.

        step: the seconds between the last two updates, the same on all ranks.
        """
        before, last, _ = self._modes
        if before == last:  # else it has a part of both
            self._steps[last].append(step)

    def waited(self, seconds: float) -> None:
        """This rank has waited so long for the verdict."""
        if not self._modes[-1]:
            self._waits.append(seconds)
