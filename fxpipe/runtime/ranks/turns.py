"""Lets several ranks take turns in the caller's thread: each has a stack of its own, and one that must wait
lets the next go on.

So debuggers, profilers and torch's modes, which all belong to a thread, see the ops of all ranks.
"""

from __future__ import annotations

import contextvars
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from greenlet import greenlet

from fxpipe.errors import DeadlockError, FxpipeError, RunError
from fxpipe.runtime.debug.finite import place_of_failure
from fxpipe.runtime.ranks.local import LocalWorld
from fxpipe.runtime.torch_private import ThreadState

_FXPIPE = str(Path(__file__).parents[2])


class _Wait(NamedTuple):
    """A wait of a rank.  ``what``: that comes when ``is_over``, as text."""

    is_over: Callable[[], bool]
    what: str


class _Turns:
    """Whose turn it is, and for what each of the others waits."""

    def __init__(self, mains: Sequence[Callable[[], object]], where: Callable[[int], str], device_type: str):
        self.stacks = [greenlet(main) for main in mains]
        for stack in self.stacks:
            stack.gr_context = contextvars.copy_context()
        self.rank = 0
        self.results: list[object] = [None] * len(mains)
        self._where, self._device_type = where, device_type
        self._waits: dict[int, _Wait] = {}
        self._callers_state = ThreadState.now(device_type)
        self._states = [self._callers_state] * len(mains)

    def wait_until(self, is_over: Callable[[], bool], rank: int, what: str) -> None:
        if not is_over():
            self._waits[rank] = _Wait(is_over, what)
            caller = self.stacks[rank].parent
            assert caller is not None, "a rank has a stack of its own, above the caller's"
            caller.switch()

    def run(self) -> None:
        """Raises DeadlockError if all ranks wait."""
        while running := [rank for rank, stack in enumerate(self.stacks) if not stack.dead]:
            ready = [r for r in running if r not in self._waits or self._waits[r].is_over()]
            if not ready:
                raise DeadlockError("All ranks wait:\n" + "\n".join(map(self._waiting, running)))
            for rank in ready:  # one order in each run: what depends on it has the same bits
                self._waits.pop(rank, None)
                self._turn(rank, self.stacks[rank].switch)

    def end(self) -> None:
        """Let the ranks that wait leave their with-blocks."""
        for rank, stack in enumerate(self.stacks):
            if stack:
                self._turn(rank, stack.throw)

    def _turn(self, rank: int, switch: Callable[[], Any]) -> None:
        self.rank = rank
        self._states[rank].set(self._callers_state)
        try:
            self.results[rank] = switch()
        finally:
            self._states[rank] = ThreadState.now(self._device_type)
            self._callers_state.set(self._states[rank])

    def _waiting(self, rank: int) -> str:
        what, line = self._waits[rank].what, _line(self.stacks[rank].gr_frame)
        return f"  rank {rank} waits for {what}, after {self._where(rank)}{line}"


def run_all(
    world: LocalWorld,
    mains: Sequence[Callable[[], Any]],
    where: Callable[[int], str],
    threads: int,
    device: torch.device,
) -> list[Any]:
    """Run one function per rank of the world, always in the same order; return their results.

    What a rank sets for its thread (modes, autocast, whether gradients are recorded) holds in its own turns.

    where: rank -> the op that it is running, for messages.  threads: number of intra-op threads.
    device: on which all of them compute.

    Raises DeadlockError if all ranks wait, and RunError with the first error of a rank.  Then, and at Ctrl-C,
    the others end where they wait.
    """
    turns = _Turns(mains, where, device.type)
    before, alone = torch.get_num_threads(), world.wait_until
    world.wait_until = turns.wait_until
    torch.set_num_threads(threads)
    try:
        turns.run()
    except (FxpipeError, BdbQuit):  # the latter leaves a debugger
        raise
    except Exception as error:  # an edited program may raise anything
        rank = turns.rank
        place = f"{where(rank)}{place_of_failure(error)}"
        raise RunError(f"Rank {rank} failed in {place}: {type(error).__name__}: {error}") from error
    finally:
        turns.end()
        torch.set_num_threads(before)
        world.wait_until = alone  # a cycle would keep the gradients until Python collects its garbage
    return turns.results


def _line(frame: FrameType | None) -> str:
    """The line of the program that waits, as text."""
    while frame is not None and frame.f_code.co_filename.startswith(_FXPIPE):
        frame = frame.f_back
    if frame is None:
        return ""
    return f" (line {frame.f_lineno} of {Path(frame.f_code.co_filename).name.rstrip('>').split()[-1]})"
