"""One rank looks at the signs of life of all ranks, for all that want to know of them at the same time.

Ranks that wait for each other lose an answer, or patience, all at once.  If each looked at all others, the
store would be asked ranks² times.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import astuple

from fxpipe.runtime.job.failure import BEAT, SILENCE, Failures, Sign


def shared_survey(failures: Failures, reason: str, show: Callable[[], None] | None = None) -> list[Sign]:
    """``failures.survey(show)`` by this rank, or by one that has begun it for the same reason.

    Empty if a rank fails meanwhile: its message says more.
    """
    slot = f"survey/{reason}"  # the key of the result that is awaited; empty if there is none
    store, own = failures.store, f"{slot}/{uuid.uuid4().hex}"
    current = store.compare_set(slot, "", own).decode()
    if current != own:
        found = _received(failures, current, show)
        if found is not None:
            return found
        # The rank that began it is gone, or another one takes its place.
        taken = store.compare_set(slot, current, own).decode()
        if taken != own:
            return _received(failures, taken, show) or failures.survey(show)
    result = failures.survey(show)
    store.set(own, json.dumps([astuple(sign) for sign in result]))
    store.compare_set(slot, own, "")
    return result


def _received(failures: Failures, key: str, show: Callable[[], None] | None) -> list[Sign] | None:
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
    return [Sign(*sign) for sign in json.loads(failures.store.get(key))]
