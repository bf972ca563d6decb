"""A name for this attempt at a run, which its ranks agree on.

The attempts of ``torchrun --max-restarts`` share one store, which still has the keys of earlier attempts,
also those with which process groups find their peers.  ``TORCHELASTIC_RESTART_COUNT`` does not tell attempts
apart: every machine counts its own restarts.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.runtime.torch_private import Store

POLL = 0.02  # seconds


def agree_on_attempt(store: Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """The same new name on all ranks, which all call this.  Raises RunError if one is late by the time limit.

    Every other rank leaves a word of its own, and rank 0 answers to that word, which no earlier attempt has
    used.
    """
    if rank == 0:
        return _lead(store, ranks, timeout)
    word = uuid.uuid4().hex
    store.set(f"word/{rank}", word)
    try:
        store.wait([f"answer/{word}"], timeout)
    except dist.DistError as error:
        raise RunError(f"Rank {rank} waited {timeout} for rank 0 to join the run: {error}") from error
    attempt: str = store.get(f"answer/{word}").decode()
    store.set(f"{attempt}/joined/{rank}", "")
    return attempt


def _lead(store: Store, ranks: int, timeout: timedelta) -> str:
    attempt, missing, answered = uuid.uuid4().hex, set(range(1, ranks)), set[str]()
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in sorted(missing):
            # A word may be that of an earlier attempt: answer until the rank has joined this one.
            word = store.get(f"word/{rank}").decode() if store.check([f"word/{rank}"]) else ""
            if word and word not in answered:
                store.set(f"answer/{word}", attempt)
                answered.add(word)
            if store.check([f"{attempt}/joined/{rank}"]):
                missing.remove(rank)
        if missing and time.monotonic() > end:
            late = ", ".join(map(str, sorted(missing)))
            raise RunError(f"Rank 0 waited {timeout} for other ranks to join the run; missing: {late}.")
        time.sleep(POLL if missing else 0.0)
    return attempt
