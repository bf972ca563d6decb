"""What a step that is captured does in place of ops in which the host takes part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch


class Captured(Protocol):
    """A capture of a step.  Each replay draws by new keys, and tells what it would have checked."""

    def key(self, now: Callable[[], int]) -> int:
        """The key of the step at hand.  now: gives it, also in later steps."""
        ...

    def draw(self, key: int, position: int, op: Callable[[], object], device: torch.device) -> object:
        """Run a random op of a device, which draws by the key and the position."""
        ...

    def expect(self, value: torch.Tensor, expected: list[bool | int], where: str) -> None:
        """Check the value of each replay, behind it."""
        ...


#: The capture, while there is one.
captured: ContextVar[Captured | None] = ContextVar("captured", default=None)


def key_of_step(now: Callable[[], int]) -> int:
    """The key that a function gives, which a capture asks again in each step."""
    capture = captured.get()
    return now() if capture is None else capture.key(now)


@contextmanager
def capturing(capture: Captured) -> Iterator[None]:
    """Capture a step in the block."""
    before = captured.set(capture)
    try:
        yield
    finally:
        captured.reset(before)
