"""Lets one rank look at the heartbeats of all ranks, for all that want to know of them at the same time.

Ranks that wait for each other lose an answer, or patience, all at once.  If each looked at all others, the
store would be asked ranks² times.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple

from fxpipe.runtime.job.failure import BEAT, SILENCE, Failures, Heartbeat
from fxpipe.runtime.job.numbering import MOST_NAMED, ranks_named


def shared_survey(failures: Failures, reason: str, show: Callable[[], None] | None) -> list[Heartbeat]:
    """``failures.survey(show)`` by this rank, or by one that has begun it for the same reason.

    Empty if a rank fails meanwhile: its message says more.
    """
    slot = f"survey/{reason}"  # the key of the result that is awaited; empty if there is none
    store, key = failures.store, f"{slot}/{uuid.uuid4().hex}"
    current = store.compare_set(slot, "", key).decode()
    if current != key:
        survey = _received(failures, current, show)
        if survey is not None:
            return survey
        # The rank that began it is gone, or another one takes its place.
        owner = store.compare_set(slot, current, key).decode()
        if owner != key:
            survey = _received(failures, owner, show)
            return failures.survey(show) if survey is None else survey
    result = failures.survey(show)
    store.set(key, json.dumps([astuple(heartbeat) for heartbeat in result]))
    store.compare_set(slot, key, "")
    return result


def _received(failures: Failures, key: str, show: Callable[[], None] | None) -> list[Heartbeat] | None:
    """The result of another rank; None if it takes longer than a survey does."""
    begun = shown = time.monotonic()
    while not failures.store.check([key]):
        now = time.monotonic()
        if failures.find() is not None:
            return []
        if now > begun + SILENCE + BEAT:
            return None
        if show is not None and now > shown + BEAT:
            show()
            shown = now
        time.sleep(0.05)
    return [Heartbeat(*heartbeat) for heartbeat in json.loads(failures.store.get(key))]


def with_others(heartbeats: Iterable[tuple[int, Heartbeat]], rank: int, what: str) -> str:
    """What this rank tells, behind sentences about ranks that are gone, by their heartbeats, and before those
    about the others."""
    gone: list[str] = []
    rest: dict[str, list[int]] = {}  # what a rank does, or its silence -> the ranks
    for other, heartbeat in heartbeats:
        last = f"the last was that it {heartbeat.doing}. "
        if other == rank:
            continue
        if heartbeat.has_ended:
            gone.append(f"Rank {other} {heartbeat.doing}. ")
        elif heartbeat.runs is False:
            gone.append(f"Rank {other} gives no sign of life any more (killed, or out of memory); {last}")
        elif heartbeat.beats:
            rest.setdefault(heartbeat.doing, []).append(other)
        elif heartbeat.runs:
            silent = f"gives no sign of life (stopped, or in a long call); {last}".rstrip(" .")
            rest.setdefault(silent, []).append(other)
        else:
            gone.append(
                f"Rank {other} gives no sign of life any more (killed, out of memory, or stopped); {last}"
            )
    told = [_told(doing, ranks) for doing, ranks in rest.items()]
    return "".join([*gone[:MOST_NAMED], what, *told[:MOST_NAMED]])


def _told(doing: str, ranks: Sequence[int]) -> str:
    """A sentence about ranks that all do the same."""
    first, *others = ranks
    if not others:
        return f" Rank {first} {doing}."
    return f" Rank {first} {doing}; so {'does' if len(others) == 1 else 'do'} {ranks_named(others)}."
