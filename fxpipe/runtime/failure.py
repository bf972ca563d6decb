"""Failures as all ranks see them: the message of the first that failed, and the signs of life of each."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from fxpipe.errors import FxpipeError
from fxpipe.runtime.torch_private import Store

FAILURE = "failure"  # the key of the message

#: Seconds between two signs of life of a rank, and after which a rank without one counts as silent.
BEAT, SILENCE = 0.5, 1.3


@dataclass(frozen=True, eq=False)
class Failures:
    """The failures of one attempt at a run, in a store that its ranks share."""

    store: Store
    rank: int
    ranks: int

    def leave(self, message: str) -> str:
        """Tell the other ranks why this one fails; return the message of the first rank that failed."""
        text = message.encode(errors="backslashreplace").decode()
        with contextlib.suppress(dist.DistError):  # the store is gone with the others
            first: bytes = self.store.compare_set(FAILURE, "", text)
            return first.decode()
        return message

    def find(self) -> str | None:
        """The message of the rank that failed, if one did."""
        if not self.store.check([FAILURE]):
            return None
        message: bytes = self.store.get(FAILURE)
        return message.decode()

    def show(self, beat: int, doing: str) -> None:
        """Give a sign of life, with what this rank does."""
        text = f"{beat} {doing}".encode(errors="backslashreplace")
        self.store.set(f"rank/{self.rank}", text.decode())

    def seen(self, rank: int) -> tuple[str, str]:
        """The last sign of life of a rank: its number, and what the rank did."""
        key = f"rank/{rank}"
        beat, _, doing = (self.store.get(key).decode() if self.store.check([key]) else "").partition(" ")
        return beat, doing or "has not begun"

    def survey(self, show: Callable[[], None] | None = None) -> list[tuple[bool, str]]:
        """Per rank: whether it gives signs of life, and what it was last seen to do.

        Takes SILENCE seconds, less if a message of a failed rank is there before.  show: gives a sign of life
        of this rank, where the thread that calls this would otherwise do so.
        """
        before = [self.seen(rank)[0] for rank in range(self.ranks)]
        begun = shown = time.monotonic()
        while (now := time.monotonic()) < begun + SILENCE and self.find() is None:
            if show is not None and now > shown + BEAT:
                show()
                shown = now
            time.sleep(0.05)
        after = [self.seen(rank) for rank in range(self.ranks)]
        return [(beat != old, doing) for old, (beat, doing) in zip(before, after, strict=True)]


def record(error: BaseException) -> None:
    """Write an error to the file from which torchrun takes its summary."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or os.path.exists(file):
        return
    trace = error.__traceback__
    try:
        raise error  # the handler takes the traceback from the exception that is being handled
    except type(error) as raised:
        get_error_handler().record_exception(raised)
    error.__traceback__ = trace


def in_short(error: Exception) -> str:
    """An error as text for the other ranks."""
    return str(error) if isinstance(error, FxpipeError) else f"{type(error).__name__}: {error}"
