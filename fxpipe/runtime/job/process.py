"""This process as one of those that torchrun started."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fxpipe.errors import ArtifactError, CallsDifferError, OptionError, RunError, number_of
from fxpipe.plan.number import number
from fxpipe.runtime.job.attempt import (
    agree_on_attempt,
    check_no_failure_of_nccl,
    forget_failure_of_nccl,
    forget_groups,
)
from fxpipe.runtime.job.backend import RankPlace, backend_of, choose, is_gloo_alone
from fxpipe.runtime.job.collectives import Collectives
from fxpipe.runtime.job.failure import Failures, in_short
from fxpipe.runtime.job.interface import connecting, set_interface
from fxpipe.runtime.job.last_works import destroy
from fxpipe.runtime.job.limited_store import LimitedStore
from fxpipe.runtime.job.numbering import Connection
from fxpipe.runtime.job.watch import Watch
from fxpipe.runtime.program.accelerator import is_accelerator, select
from fxpipe.runtime.program.comm import NoAnswer, answered
from fxpipe.runtime.torch_private import PrefixStore, default_store, rendezvous

#: Maximum time that a rank waits for another one, by default.
TIMEOUT = timedelta(minutes=10)


def under_torchrun() -> bool:
    """Whether this process is one of several: a process group or torchrun's variables exist.

    A fake group, under which one process makes a model with DTensors, has no other processes.
    """
    if dist.is_initialized():
        return dist.get_backend() != "fake"
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Process(Collectives):
    """This process; before a pipeline is known, all processes are ranks of one.

    ``timeout``: the longest time that this rank waits for another one.  ``users_group``: the default group if
    the script has made it; else this process made it.  ``tag``: of the messages of a pipeline, which no other
    one's are taken for.  ``groups``: those of connections, by device and numbers of ranks and lanes; None for
    one that this process has no part in.
    """

    timeout: timedelta
    users_group: dist.ProcessGroup | None
    _turns: Iterator[int] = field(default_factory=itertools.count)
    _pipelines: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    tag: int = 0
    groups: dict[tuple[torch.device, int, int, Connection], dist.ProcessGroup | None] = field(
        default_factory=dict
    )
    _dropped: list[dist.ProcessGroup] = field(default_factory=list)
    _backends: dict[torch.device, str] = field(default_factory=dict)
    _places: dict[torch.device, list[RankPlace]] = field(default_factory=dict)

    @staticmethod
    def join(device: torch.device, timeout: timedelta | None = None) -> Process:
        """Join the process group; create it if there is none.  All ranks must call this.

        device: of this rank's pipeline; it becomes the current one.
        timeout: of a process group that is created; TIMEOUT by default.  One that exists keeps its own.
        """
        global _joined
        select(device)
        if _joined is not None and dist.is_initialized() and dist.group.WORLD is _joined[0]:
            return _joined[1]
        set_interface()  # now, as gloo reads it when a group is made
        limit = timeout or TIMEOUT
        users_group = dist.group.WORLD if dist.is_initialized() else None
        with answered():
            if users_group is not None:
                store, rank, ranks = default_store(), dist.get_rank(), dist.get_world_size()
            else:
                store, rank, ranks = next(rendezvous("env://", timeout=limit))
            # A connection of its own, as one that waits for a key answers no other thread.
            limited = LimitedStore(store.clone(), limit)
            if users_group is not None and not is_gloo_alone(users_group):
                check_no_failure_of_nccl(limited)

            def forget() -> None:
                forget_failure_of_nccl(limited)
                if users_group is not None:
                    forget_groups(limited)

            attempt = agree_on_attempt(limited.under("fxpipe"), rank, ranks, limit, when_joined=forget)
        # The agent's store outlives the ranks; else it ends with rank 0.
        host = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True) else 0
        watch = Watch(Failures(limited.under(f"fxpipe/{attempt}"), rank, ranks, host), limit)
        with watch.collective(), connecting():
            if users_group is None:
                own_keys = PrefixStore(attempt, store)
                dist.init_process_group("gloo", store=own_keys, rank=rank, world_size=ranks, timeout=limit)
            # Not the default one, on which the script may communicate: its calls would meet those of steps.
            control = dist.new_group(backend="gloo", timeout=limit)
        watch.report_uncaught()
        process = Process(
            world_rank=rank,
            world_size=ranks,
            ranks=ranks,
            timeout=limit,
            control=control,
            users_group=users_group,
            watch=watch,
        )
        _joined = dist.group.WORLD, process
        if users_group is None:
            atexit.register(process._leave)
        return process

    def with_ranks(self, ranks: int, replicas: int | None = None, lanes: int = 1) -> Process:
        """The same process for pipelines of so many ranks, each with so many lanes.

        replicas: the number that there must be; any by default.
        Raises RunError where the processes are no such number of pipelines.
        """
        process = replace(self, ranks=ranks, lanes=lanes)
        if self.world_size % (ranks * lanes) or replicas not in (None, process.replicas):
            wanted = lanes * (ranks if replicas is None else ranks * replicas)
            several = "" if replicas is not None else ", or a multiple of it for replicas"
            of_lanes = f" of {lanes} lanes" if lanes > 1 else ""
            in_replicas = "" if replicas is None else f" in {number_of(replicas, 'replica')}"
            there = f"there {'is' if self.world_size == 1 else 'are'} {number_of(self.world_size, 'process')}"
            raise RunError(
                f"The pipeline has {number_of(ranks, 'rank')}{of_lanes}{in_replicas} and {there}. "
                f"Start it with torchrun --nproc-per-node {wanted}{several}, or "
                f"compile with ranks={self.world_size // lanes}{'' if replicas is None else ', replicas=1'}."
            )
        if (ranks, lanes) not in self._pipeline_groups and process.world_size > ranks:
            group = process.group_of_each(process.members(0))
            assert group is not None
            self._pipeline_groups[ranks, lanes] = group
        return process

    def group_of_each(
        self, members: Iterable[list[int]], backend: str = "gloo", **options: Any
    ) -> dist.ProcessGroup | None:
        """Make a group for each list of processes, which have none in common; return that of this process.

        All processes must call it alike.
        """
        self.destroy_dropped()
        with self.watch.collective(), connecting():
            made = [dist.new_group(processes, self.timeout, backend, **options) for processes in members]
        return next((group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER), None)

    def drop_with(self, owner: object, groups: Iterable[dist.ProcessGroup]) -> Callable[[], object]:
        """Have groups, each with its threads and sockets, destroyed once their owner is gone, or this
        function's result was called: before this process makes the next ones, since the garbage collector
        may find an owner to be gone within any call of torch."""
        drop = weakref.finalize(owner, self._dropped.extend, [*groups])
        drop.atexit = False
        return drop

    def destroy_dropped(self) -> None:
        while self._dropped:
            destroy(self._dropped.pop())

    def for_pipeline(self, model: str) -> Process:
        """The same process for the calls of a new pipeline, which all ranks make."""
        number = next(self._pipelines)
        # Three tags each: of its steps, and those of ``for_evaluation`` and ``for_assumed``.
        return replace(self, of=f"pipeline {number} ({model})", tag=3 * number)

    def for_evaluation(self) -> Process:
        """The same process for the evaluation of this one's pipeline."""
        return replace(self, of=f"the evaluation of {self.of}", tag=self.tag + 1)

    def for_assumed(self) -> Process:
        """The same process for the programs for some batches of this one's pipeline."""
        return replace(self, tag=self.tag + 2)

    def _leave(self) -> None:
        """Let the communicators of accelerators go, where the run did not fail: others may hang in them."""
        is_ours = _joined is not None and dist.is_initialized() and dist.group.WORLD is _joined[0]
        if is_ours and not self.watch.has_failed and set(self._backends.values()) - {"gloo"}:
            self.watch.connections.clear()
            dist.destroy_process_group()

    def backend(self, device: torch.device) -> str:
        """The backend of torch.distributed that carries the messages of steps on this device.

        All ranks must call it.  Raises RunError as :func:`fxpipe.runtime.job.backend.choose` does.
        """
        if device not in self._backends:
            here = json.dumps(asdict(RankPlace.of(device))).encode()
            places = [RankPlace(**json.loads(row)) for row in self.gather(here)]
            group = self.users_group
            choice = choose(places, None if group is None else backend_of(group, device.type))
            if self.leads:
                for text in choice.warnings:
                    warnings.warn(text, stacklevel=3)
            self._backends[device], self._places[device] = choice.backend, places
        return self._backends[device]

    def has_different_devices(self, device: torch.device) -> bool:
        """Whether the ranks compute on devices of different models.  All ranks must call it."""
        self.backend(device)
        return len({(place.name, place.memory) for place in self._places[device]}) > 1

    def sends_from_host(self, device: torch.device) -> bool:
        """Whether messages of steps on an accelerator pass through the host.  All ranks must call it."""
        is_alone = self.ranks * self.replicas * self.lanes == 1
        return is_accelerator(device) and not is_alone and self.backend(device) == "gloo"

    @contextlib.contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Run a block without communication on all ranks; if it fails on one, all of them raise.

        That rank raises its own error and the others one with its message, an ArtifactError if it is one and
        else a RunError, so that the run can go on.  what: the block as text, for "Rank 1 could not …".
        """
        with agreed_by(self.gather, what):
            yield

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Tell the other ranks of an error that ends the block, for programs that catch it, show it and end.
        Ranks that end after another one do not show it."""
        try:
            yield
        except Exception as error:  # of any kind: it is only told to the other ranks, and raised
            self.watch.ended(error, lambda: None)
            raise

    def check_same(self, value: bytes, what: str) -> None:
        """Raise RunError on all ranks if a value differs between them; ``what``: its name."""
        values = self.gather(value)
        other = [rank for rank, x in enumerate(values) if x != values[0]]
        if other:
            raise RunError(f"Rank {other[0]} has another {what} than rank 0. Give all ranks the same.")

    def check_alike(self, entries: Mapping[str, str], what: str, remedy: str) -> None:
        """Raise RunError on all ranks, naming the first entry that differs, unless all have the same.

        what: the entries together, as text: "Rank 1 has lr=0.2 in ``what``, and rank 0 …".
        """
        text = json.dumps(entries).encode()
        digests = self.gather(str(number(text)).encode())
        if len({*digests}) == 1:
            return
        table = [json.loads(row) for row in self.gather(text)]
        for rank, theirs in enumerate(table):
            for name in table[0] | theirs:
                if table[0].get(name) != theirs.get(name):
                    first, other = _entry(table[0], name), _entry(theirs, name)
                    raise RunError(f"Rank {rank} has {other} in {what}, and rank 0 {first}. {remedy}")

    def first_is_ready(self) -> None:
        """End the wait of the other ranks in ``wait_for_first``."""
        with self.watch.collective():
            self.watch.failures.store.set(f"ready/{next(self._turns)}", "")

    def wait_for_first(self) -> None:
        """Wait until rank 0 calls ``first_is_ready``, as long as it gives heartbeats.

        Raises RunError if it fails, or gives none for the time limit.
        """
        self._wait_for(f"ready/{next(self._turns)}", 0)

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Run a block that takes longer on some ranks than on others: all of them leave it together.

        Raises as ``wait_for_first`` does, of any rank.
        """
        turn = next(self._turns)
        try:
            yield
        finally:  # also after an error, which agreed() then tells all ranks
            with self.watch.collective():
                self.watch.failures.store.set(f"ready/{turn}/{self.world_rank}", "")
            for rank in range(self.world_size):
                self._wait_for(f"ready/{turn}/{rank}", rank)

    def _wait_for(self, key: str, rank: int) -> None:
        """Wait for a key that another rank sets, as long as that gives heartbeats."""
        failures = self.watch.failures
        beat, last = "", time.monotonic()
        with self.watch.collective():
            while not failures.store.check([key]):
                if message := failures.find():
                    raise RunError(f"{message} (Rank {self.world_rank} {self.watch.doing()}.)")
                now, before = time.monotonic(), beat
                beat = failures.seen(rank).beat
                last = now if beat != before else last
                if now - last > self.timeout.total_seconds():
                    raise NoAnswer(f"no sign of life from rank {rank} for {self.timeout}")
                time.sleep(0.1)


#: The default process group, and this process as a member of it.
_joined: tuple[dist.ProcessGroup | None, Process] | None = None


def _entry(entries: Mapping[str, str], name: str) -> str:
    return f"{name}={entries[name]:.100}" if name in entries else f"no {name}"


def own_ranks(process: Process | None, ranks: int) -> Sequence[int]:
    """The ranks that this process runs: one, or all of them if there is no other process."""
    return range(ranks) if process is None else [process.rank]


@contextlib.contextmanager
def agreed_by(gather: Callable[[bytes], list[bytes]], what: str) -> Iterator[None]:
    """``Process.agreed``, by a function that gathers bytes of every rank on every rank."""
    try:
        yield
    except CallsDifferError:
        raise  # as on the other ranks
    except Exception as error:  # of any kind: the other ranks wait for a word of this one
        name = (ArtifactError if isinstance(error, ArtifactError) else RunError).__name__
        with contextlib.suppress(RunError):  # the ranks that are left raise it
            gather(f"{name} {in_short(error)}".encode(errors="backslashreplace"))
        raise
    for rank, message in enumerate(gather(b"")):
        if message:
            name, _, text = message.decode().partition(" ")
            raise _AGREED[name](f"Rank {rank} could not {what}: {text}")


_AGREED = {kind.__name__: kind for kind in (ArtifactError, RunError)}


@contextlib.contextmanager
def agreed(process: Process | None, what: str) -> Iterator[None]:
    """``process.agreed``, where there is a process."""
    with process.agreed(what) if process is not None else contextlib.nullcontext():
        yield


def as_timeout(time_limit: float | timedelta | None) -> timedelta | None:
    """A time limit, given in seconds or as a timedelta.  Raises OptionError unless it is above 0."""
    limit = time_limit
    most = timedelta.max.total_seconds()
    if isinstance(time_limit, int | float) and time_limit is not True and 0 < time_limit <= most:
        limit = timedelta(seconds=time_limit)
    if limit is None or (isinstance(limit, timedelta) and limit > timedelta()):
        return limit
    raise OptionError(f"timeout={time_limit!r} is no time above 0. Give seconds, or a datetime.timedelta.")
