"""A name for this attempt at a run, which its ranks agree on, as on the versions of fxpipe and torch.

The attempts of ``torchrun --max-restarts`` share one store, which still has the keys of earlier attempts,
also those with which process groups find their peers: a group that the user's script makes would find the
peers of an earlier attempt.  ``TORCHELASTIC_RESTART_COUNT`` does not tell attempts apart: every machine
counts its own restarts.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from fxpipe.errors import RunError
from fxpipe.plan.version import __version__
from fxpipe.runtime.job.limited_store import LimitedStore
from fxpipe.runtime.program.accelerator import BACKENDS
from fxpipe.runtime.torch_private import Store

POLL = 0.02  # seconds
LAST = 5.0  # seconds that rank 0 waits for others where one has another version
VERSION = f"fxpipe {__version__} and torch {torch.__version__.partition('+')[0]}"
#: The key by which a rank tells the monitors of all ranks' NCCL groups to write what they know, and to end.
NCCL_FAILED = "exception_dump"
#: A key of a process group in the store of the default one: "GROUP//cpu//…", or its own "cpu//…".
OF_A_GROUP = re.compile(rf"(?:[^/]+//)?(?:{'|'.join(['cpu', *BACKENDS])})//")


def agree_on_attempt(
    store: Store,
    rank: int,
    ranks: int,
    timeout: timedelta,
    version: str = VERSION,
    when_joined: Callable[[], None] = lambda: None,
) -> str:
    """Agree on a new name, the same on all ranks, which all call this.

    Every other rank leaves a word of its own, with its versions, and rank 0 answers to that word, which no
    earlier attempt has used.

    when_joined: what rank 0 does when all have joined, before any of them goes on.
    Raises RunError if a rank is late by the time limit, and on all ranks if one has other versions.
    """
    if rank == 0:
        return _lead(store, ranks, timeout, version, when_joined)
    word = f"{uuid.uuid4().hex} {version}"
    store.set(f"word/{rank}", word)
    try:
        store.wait([f"answer/{word}"], timeout)
        attempt, _, first = store.get(f"answer/{word}").decode().partition(" ")
        if first != version:
            raise RunError(_other_version(rank, version, first))
        store.set(f"{attempt}/joined/{rank}", "")
        store.wait([f"{attempt}/begun"], timeout)
        problem = store.get(f"{attempt}/begun").decode()
    except dist.DistStoreError as error:  # late; what else fails is told as it is
        raise RunError(
            f"Rank {rank} waited {timeout} for rank 0 to begin the run. See its output: it has ended, or "
            "waits for another rank or elsewhere."
        ) from error
    except dist.DistError as error:
        raise RunError(f"Rank {rank} lost rank 0 before the run began: {error}") from error
    if problem:
        raise RunError(problem)
    return attempt


def check_no_failure_of_nccl(store: LimitedStore) -> None:
    """Raise RunError if an earlier attempt has left NCCL's signal of a failure in the store.

    The monitor of a group that the script has made has seen it by now: torch then ends the process after
    TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, whatever it does.
    """
    if store.root().check([NCCL_FAILED]):
        raise RunError(
            "An earlier attempt of this run has failed in NCCL, and left its signal in the store that the "
            "attempts of torchrun share. Torch ends a process whose group sees it, after 8 minutes. Start "
            "torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, or leave the process "
            "group to fxpipe (no init_process_group before the first call of fxpipe)."
        )


def forget_failure_of_nccl(store: LimitedStore) -> None:
    """Delete the signal that an earlier attempt may have left, before this one makes a group of NCCL."""
    store.root().delete_key(NCCL_FAILED)


def forget_groups(store: LimitedStore) -> None:
    """Delete the keys by which processes have connected their groups, from the store of the default group.

    All processes call fxpipe, so the groups that they have made so far are connected, and need them no more:
    the next attempt finds none.  Those that an earlier attempt has made later than this go as well, before
    this one makes its own.  Keys of the user's stay.
    """
    if os.environ.get("TORCH_GLOO_LAZY_INIT"):  # gloo connects two processes when they first need it
        return
    for key in store.list_keys():
        if OF_A_GROUP.match(key):
            store.delete_key(key)


def _lead(store: Store, ranks: int, timeout: timedelta, version: str, when_joined: Callable[[], None]) -> str:
    attempt, missing, answered = uuid.uuid4().hex, set(range(1, ranks)), set[str]()
    end, problem = time.monotonic() + timeout.total_seconds(), ""
    while missing:
        for rank in sorted(missing):
            # A word may be that of an earlier attempt: answer until the rank has joined this one.
            word = store.get(f"word/{rank}").decode() if store.check([f"word/{rank}"]) else ""
            theirs = word.partition(" ")[2]
            if word and word not in answered:
                # An older fxpipe writes words without versions, and takes the whole answer for the name.
                store.set(f"answer/{word}", f"{attempt} {version}" if theirs else attempt)
                answered.add(word)
            if word and theirs != version:
                problem = problem or _other_version(rank, theirs, version)
                # Those that join until then raise the error, too; the rest would wait for their time limit.
                end = min(end, time.monotonic() + LAST)
                missing.remove(rank)
            elif store.check([f"{attempt}/joined/{rank}"]):
                missing.remove(rank)
        if missing and time.monotonic() > end:
            late = ", ".join(map(str, sorted(missing)))
            problem = problem or (
                f"Rank 0 waited {timeout} for other ranks to join the run; missing: {late}. See the output "
                "of these: they have ended, or wait elsewhere."
            )
            break
        time.sleep(POLL if missing else 0.0)
    if not problem:
        when_joined()
    # The others wait for this word alone: what ``when_joined`` deletes they cannot have written yet.
    store.set(f"{attempt}/begun", problem)
    if problem:
        raise RunError(problem)
    return attempt


def _other_version(rank: int, theirs: str, first: str) -> str:
    return (
        f"Rank {rank} runs {theirs or 'an older fxpipe'}, and rank 0 {first or 'an older fxpipe'}. Install "
        "the same versions on all machines."
    )
