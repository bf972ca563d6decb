"""Failures as all ranks see them: the message of the first that failed, and the heartbeats of each."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from fxpipe.errors import FxpipeError
from fxpipe.runtime.job.limited_store import LimitedStore
from fxpipe.runtime.job.liveness import own_process, runs
from fxpipe.runtime.job.tracebacks import users_part
from fxpipe.runtime.torch_private import Store

FAILURE = "failure"  # the key of the message

#: Seconds between two heartbeats of a rank, and after which a rank without one counts as silent.
BEAT, SILENCE = 0.5, 1.3
FIRST = 1  # the number of a rank's first heartbeat
HURRY = 5.0  # seconds that a run which fails waits for answers of the store
WATCHED = 4  # ranks that each rank looks at
ENDED = "has ended"  # the last thing that a rank does

log = logging.getLogger("fxpipe")


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat of a rank: its number as text, and what the rank did.

    ``runs``: whether its process still runs; None if that cannot be seen from here.  ``beats``: whether it is
    new.
    """

    beat: str
    doing: str
    runs: bool | None
    beats: bool = True

    @property
    def has_ended(self) -> bool:
        """Whether the rank has ended by itself, as far as it could tell."""
        return self.doing.startswith(ENDED)


@dataclass(frozen=True, eq=False)
class Failures:
    """The failures of one attempt at a run, in a store that its ranks share.

    ``host``: the rank whose process has the store; None if that is none of theirs.
    """

    store: Store
    rank: int
    ranks: int
    host: int | None = None
    _messages: list[str] = field(default_factory=list)
    _left: list[str] = field(default_factory=list)
    _processes: dict[int, str] = field(default_factory=dict)
    _heartbeats: dict[int, Heartbeat] = field(default_factory=dict)

    def hurry(self) -> None:
        """Wait for answers of the store for seconds, now that the run fails."""
        if isinstance(self.store, LimitedStore):
            self.store.hurry(timedelta(seconds=HURRY))

    def leave(self, message: str) -> str:
        """Tell the other ranks why this one fails; return the message of the first rank that failed."""
        text = message.encode(errors="backslashreplace").decode()
        first = text
        with contextlib.suppress(dist.DistError):  # the store is gone with the others
            # Atomic: of ranks that fail together, all take the message of the same one for the cause.
            stored: bytes = self.store.compare_set(FAILURE, "", text)
            first = stored.decode()
        if first == text:
            self._left.append(text)
        if not self._messages:
            self._messages.append(first)
        return first

    @property
    def began_here(self) -> bool:
        """Whether this rank is the first that failed."""
        return bool(self._left)

    @property
    def are_known(self) -> bool:
        """Whether this rank has told or heard of a failure."""
        return bool(self._messages)

    def find(self) -> str | None:
        """The message of the rank that failed, if one did."""
        if not self._messages and self.store.check([FAILURE]):
            self._messages.append(self.store.get(FAILURE).decode())
        return next(iter(self._messages), None)

    def show(self, beat: int, doing: str) -> None:
        """Give a heartbeat, with what this rank does."""
        if beat == FIRST:
            self.store.set(f"process/{self.rank}", own_process())
        text = f"{beat} {doing}".encode(errors="backslashreplace")
        self.store.set(f"rank/{self.rank}", text.decode())

    def seen(self, rank: int) -> Heartbeat:
        """The last heartbeat of a rank."""
        beat, _, doing = self._text(f"rank/{rank}").partition(" ")
        if rank not in self._processes and (process := self._text(f"process/{rank}")):
            self._processes[rank] = process
        is_running = runs(self._processes.get(rank, ""))
        self._heartbeats[rank] = Heartbeat(beat, doing or "has not begun", is_running)
        return self._heartbeats[rank]

    def others(self) -> list[int]:
        """The other ranks, from the next one on."""
        return [rank % self.ranks for rank in range(self.rank + 1, self.rank + self.ranks)]

    def look(self) -> None:
        """Remember the heartbeats of rank 0, and the processes of the next ranks: the store may be gone with
        it.  The process that has the store remembers all."""
        others = self.others()
        for rank in others if self.host == self.rank else {0, *others[:WATCHED]}:
            if rank == 0 or rank not in self._processes:
                self.seen(rank)

    def remembered(self) -> list[Heartbeat]:
        """The last heartbeat that was read of each rank, where the store is gone, and whether it runs now."""
        none = Heartbeat("", "has not been looked at", None)
        known = (self._heartbeats.get(rank, none) for rank in range(self.ranks))
        return [replace(s, runs=runs(self._processes.get(rank, ""))) for rank, s in enumerate(known)]

    def missing(self) -> dict[int, Heartbeat]:
        """The ranks that have ended or are gone, where the store is, and the one that has it.  That one alone
        if it is gone: the others end as it does not answer."""
        heartbeats = self.remembered()
        silent = {} if self.host is None else {self.host: replace(heartbeats[self.host], beats=False)}
        if any(heartbeat.runs is False for heartbeat in silent.values()):
            return silent
        return {r: h for r, h in enumerate(heartbeats) if h.runs is False or h.has_ended} | silent

    def survey(self, show: Callable[[], None] | None = None) -> list[Heartbeat]:
        """The last heartbeat of each rank, and whether it gives any.

        Takes SILENCE seconds; those of one beat, in which the others tell where they are, if a rank is known
        to be gone; less if a message of a failed rank is there before.
        show: gives a heartbeat of this rank, where the thread that calls this would otherwise do so.
        """
        before = [self.seen(rank) for rank in range(self.ranks)]
        begun = shown = time.monotonic()
        while (now := time.monotonic()) < begun + SILENCE and self.find() is None:
            if show is not None and now > shown + BEAT:
                show()
                shown = now
            time.sleep(0.05)
            left = [rank for rank, process in self._processes.items() if runs(process) is False]
            if now > begun + BEAT and any(not self.seen(rank).has_ended for rank in left):
                return [self.seen(rank) for rank in range(self.ranks)]
        after = [self.seen(rank) for rank in range(self.ranks)]
        return [replace(s, beats=s.beat != old.beat) for old, s in zip(before, after, strict=True)]

    def have_ended(self) -> bool:
        """Whether the processes of all other ranks have, as far as that can be seen from here."""
        others = (heartbeat for rank, heartbeat in enumerate(self.remembered()) if rank != self.rank)
        return all(heartbeat.runs is False for heartbeat in others)

    def _text(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


def record(error: BaseException) -> None:
    """Write an error to the file from which torchrun takes its summary: as a whole, or, on a full disk, not
    at all, as a file that is cut short ends torchrun.

    The first one of a process counts: nobody writes to the file after this.  Torch's decorator ``record`` of
    the user's code may have done so before.
    """
    file = os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
    if file is None or _is_whole(file):
        return
    # The rank prints the rest before the summary of all, which ends with this.
    trace = None if isinstance(error, FxpipeError) else users_part(error.__traceback__)
    lines = traceback.TracebackException(type(error), error, trace).format(chain=False)
    text = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": "".join(lines), "timestamp": str(int(time.time()))},
    }
    draft = f"{file}.draft"
    try:
        with open(draft, "w") as opened:
            json.dump({"message": text}, opened)
            opened.flush()
            os.fsync(opened.fileno())
        os.rename(draft, file)
    except OSError as wrong:
        log.warning("the summary of torchrun will lack an error: %s cannot be written: %s", file, wrong)
        for left in (draft, file):
            with contextlib.suppress(OSError):
                os.remove(left)


def _is_whole(file: str) -> bool:
    try:
        with open(file) as opened:
            json.load(opened)
    except (OSError, ValueError):
        return False
    return True


def in_short(error: BaseException) -> str:
    """An error as text for the other ranks, and for the terminal."""
    return str(error) if isinstance(error, FxpipeError) else f"{type(error).__name__}: {error}"
