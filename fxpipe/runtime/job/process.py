"""This process as one of those that torchrun started, and their collectives outside of steps."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from fxpipe.errors import ArtifactError, OptionError, RunError
from fxpipe.plan.number import number
from fxpipe.runtime.job.attempt import agree_on_attempt
from fxpipe.runtime.job.backend import Place, backend_of, choose, is_gloo_alone
from fxpipe.runtime.job.calls import CALL, SPACE, CallsDifferError, different_calls, with_call
from fxpipe.runtime.job.failure import Failures, in_short
from fxpipe.runtime.job.interface import connecting, set_interface
from fxpipe.runtime.job.place import called_function
from fxpipe.runtime.job.watch import Watch
from fxpipe.runtime.program.accelerator import select
from fxpipe.runtime.program.comm import NoAnswer, answered
from fxpipe.runtime.torch_private import PrefixStore, default_store, rendezvous

T = TypeVar("T")
Connection = tuple[int, int] | int | Literal["replicas", "lanes"]
"""A channel, the number of a collective of all ranks, or the group of a rank of all replicas, or of its
lanes."""

#: Maximum time that a rank waits for another one, by default.
TIMEOUT = timedelta(minutes=10)

#: The most characters of one value in a store: torch's ends the connection of a rank that sends it 8 MiB.
MOST_STORED = 1 << 20
_SHORT = 8 * (SPACE - 1)  # bytes that come along with their number


def under_torchrun() -> bool:
    """Whether this process is one of several: a process group or torchrun's variables exist.

    A fake group, under which one process makes a model with DTensors, has no other processes.
    """
    if dist.is_initialized():
        return dist.get_backend() != "fake"
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@dataclass(frozen=True, eq=False)
class Process:
    """The processes are replicas of a pipeline of ``ranks``, each with ``lanes`` processes: that of number
    ``world_rank`` is (replica * ranks + rank) * lanes + lane.  Before a pipeline is known, all are of one.
    Outside of steps, and in messages, processes have the numbers of torchrun: "rank 5" of ``world_size``.

    ``timeout``: the longest time that this rank waits for another one.

    ``control``: a group of all ranks over gloo alone, for whatever is not a message of a step: no backend of
    an accelerator ever carries it, wherever its tensors are.  ``pipeline``: the same for the ranks of this
    replica and lane alone.  ``given``: the default group if it was there before; else this process made it.
    ``groups``: those of connections, by device and numbers of ranks and lanes; None for one that this process
    has no part in.  ``of``: the pipeline whose calls these are, as text; "" for those of none yet.  ``tag``:
    of its messages, which no other pipeline's are taken for.

    What ranks exchange begins with the call that they make (:mod:`fxpipe.runtime.job.calls`): that of
    ``begin_gather``, ``gather``, ``broadcast_bytes`` and ``all_reduce_``, which raise CallsDifferError on all
    ranks where they make different calls.  ``scatter``, ``broadcast_`` and ``send_to`` follow one of those.
    """

    world_rank: int
    world_size: int
    ranks: int
    timeout: timedelta
    control: dist.ProcessGroup
    given: dist.ProcessGroup | None
    watch: Watch
    _turns: Iterator[int] = field(default_factory=itertools.count)
    _pipelines: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    of: str = ""
    tag: int = 0
    lanes: int = 1
    groups: dict[tuple[torch.device, int, int, Connection], dist.ProcessGroup | None] = field(
        default_factory=dict
    )
    _pipeline_groups: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    _backends: dict[torch.device, str] = field(default_factory=dict)
    _places: dict[torch.device, list[Place]] = field(default_factory=dict)

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
        set_interface()
        limit = timeout or TIMEOUT
        given = dist.group.WORLD if dist.is_initialized() else None
        if given is not None:
            rank, ranks, store = dist.get_rank(), dist.get_world_size(), default_store()
            attempt = agree_on_attempt(PrefixStore("fxpipe", store), rank, ranks, limit)
            with connecting():
                control = given if is_gloo_alone(given) else dist.new_group(backend="gloo", timeout=limit)
        else:
            with answered():
                store, rank, ranks = next(rendezvous("env://", timeout=limit))
                attempt = agree_on_attempt(PrefixStore("fxpipe", store), rank, ranks, limit)
                own = PrefixStore(attempt, store)
                with connecting():
                    dist.init_process_group("gloo", store=own, rank=rank, world_size=ranks, timeout=limit)
            assert dist.group.WORLD is not None
            control = dist.group.WORLD
        # A store of its own, as one that waits for a key answers no other thread.
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        failures = Failures(PrefixStore(f"fxpipe/{attempt}", store.clone()), rank, ranks, hosts)
        process = Process(rank, ranks, ranks, limit, control, given, Watch(failures, limit))
        _joined = dist.group.WORLD, process
        if given is None:
            atexit.register(process._leave)
        return process

    @property
    def rank(self) -> int:
        """Of this process in its pipeline."""
        return self.world_rank // self.lanes % self.ranks

    @property
    def lane(self) -> int:
        return self.world_rank % self.lanes

    @property
    def replica(self) -> int:
        return self.world_rank // (self.ranks * self.lanes)

    @property
    def replicas(self) -> int:
        return self.world_size // (self.ranks * self.lanes)

    @property
    def leads(self) -> bool:
        """Whether it is the first of all processes."""
        return self.world_rank == 0

    def number(self, replica: int, rank: int, lane: int) -> int:
        """The number of a process in the world."""
        return (replica * self.ranks + rank) * self.lanes + lane

    def of_replica(self, replica: int, lane: int | None = None) -> list[int]:
        """The processes of a replica, in the order of their ranks; of one lane, by default this one's."""
        own = self.lane if lane is None else lane
        return [self.number(replica, rank, own) for rank in range(self.ranks)]

    def of_rank(self, rank: int, lane: int) -> list[int]:
        """The processes that have this rank and lane of their pipelines, in the order of the replicas."""
        return [self.number(replica, rank, lane) for replica in range(self.replicas)]

    def that_run(self, rank: int) -> list[int]:
        """All processes that run the program of a rank."""
        return [k for replica in range(self.replicas) for k in self.of_lanes(replica, rank)]

    def of_each(self, parts: Sequence[T]) -> list[T]:
        """What each process gets of the parts of the ranks, in the order of the processes."""
        return [part for _ in range(self.replicas) for part in parts for _ in range(self.lanes)]

    def of_lanes(self, replica: int, rank: int) -> list[int]:
        """The lanes of a rank, in their order."""
        return [self.number(replica, rank, lane) for lane in range(self.lanes)]

    def with_ranks(self, ranks: int, replicas: int | None = None, lanes: int = 1) -> Process:
        """The same process for pipelines of so many ranks, each with so many lanes.

        replicas: the number that there must be; any by default.
        Raises RunError where the processes are no such number of pipelines.
        """
        found = replace(self, ranks=ranks, lanes=lanes)
        if self.world_size % (ranks * lanes) or replicas not in (None, found.replicas):
            wanted = lanes * (ranks if replicas is None else ranks * replicas)
            several = "" if replicas is not None else ", or a multiple of it for replicas"
            of_lanes = f" of {lanes} lanes" if lanes > 1 else ""
            raise RunError(
                f"The pipeline has {ranks} ranks{of_lanes}{_replicas(replicas)} and there are "
                f"{self.world_size} processes. Start it with torchrun --nproc-per-node {wanted}{several}, or "
                f"compile with ranks={self.world_size // lanes}{'' if replicas is None else ', replicas=1'}."
            )
        if (ranks, lanes) not in self._pipeline_groups and found.world_size > ranks:
            own = found.group_of_each(found.members(0))
            assert own is not None
            self._pipeline_groups[ranks, lanes] = own
        return found

    def check_mesh(self, mesh: Any) -> None:
        """Raise RunError unless the mesh of this process's DTensors, if there is one, is the lanes of its
        rank."""
        wanted = self.of_lanes(self.replica, self.rank)
        if mesh is not None and mesh.mesh.tolist() != wanted:
            raise RunError(
                f"The mesh of the model's DTensors has the processes {mesh.mesh.tolist()}, and the lanes of "
                f"rank {self.rank} are the processes {wanted}. Lanes are the last dimension: "
                f'init_device_mesh(…, ({self.world_size // self.lanes}, {self.lanes}), mesh_dim_names=("pp", '
                '"tp"))["tp"].'
            )

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """The processes of this replica, for whatever ``control`` is for."""
        return self._pipeline_groups.get((self.ranks, self.lanes), self.control)

    def group_of_each(
        self, members: Iterable[list[int]], backend: str = "gloo", **options: Any
    ) -> dist.ProcessGroup | None:
        """Make a group for each list of processes, which have none in common; return that of this process.

        All processes must call it alike.
        """
        made = [dist.new_group(own, self.timeout, backend, **options) for own in members]
        return next((group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER), None)

    def members(self, what: Connection) -> list[list[int]]:
        """The processes of a connection, for each replica and lane; of one of replicas or lanes, for each of
        the others."""
        lanes, ranks, replicas = range(self.lanes), range(self.ranks), range(self.replicas)
        if what == "replicas":
            return [self.of_rank(rank, lane) for rank in ranks for lane in lanes]
        if what == "lanes":
            return [self.of_lanes(replica, rank) for replica in replicas for rank in ranks]
        pipelines = [self.of_replica(replica, lane) for replica in replicas for lane in lanes]
        return pipelines if isinstance(what, int) else [[own[rank] for rank in what] for own in pipelines]

    def for_pipeline(self, model: str) -> Process:
        """The same process for the calls of a new pipeline, which all ranks make."""
        number = next(self._pipelines)
        return replace(self, of=f"pipeline {number} ({model})", tag=2 * number)

    def for_evaluation(self) -> Process:
        """The same process for the evaluation of this one's pipeline."""
        return replace(self, of=f"the evaluation of {self.of}", tag=self.tag + 1)

    def _leave(self) -> None:
        """Let the communicators of accelerators go, where the run did not fail: others may hang in them."""
        own = dist.is_initialized() and dist.group.WORLD is self.control
        if own and not self.watch.has_failed and set(self._backends.values()) - {"gloo"}:
            self.watch.connections.clear()
            dist.destroy_process_group()

    def backend(self, device: torch.device) -> str:
        """The backend of torch.distributed that carries the messages of steps on this device.

        All ranks must call it.  Raises RunError as :func:`fxpipe.runtime.job.backend.choose` does.
        """
        if device not in self._backends:
            places = [Place(**json.loads(given)) for given in self.gather(_as_json(Place.of(device)))]
            choice = choose(places, None if self.given is None else backend_of(self.given, device.type))
            if self.leads:
                for text in choice.warnings:
                    warnings.warn(text, stacklevel=3)
            self._backends[device], self._places[device] = choice.backend, places
        return self._backends[device]

    def has_different_devices(self, device: torch.device) -> bool:
        """Whether the ranks compute on devices of different models.  All ranks must call it."""
        self.backend(device)
        return len({(place.name, place.memory) for place in self._places[device]}) > 1

    @contextlib.contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Run a block without communication on all ranks; if it fails on one, all of them raise.

        That rank raises its own error and the others one with its message, an ArtifactError if it is one and
        else a RunError, so that the run can go on.  what: the block as text, for "Rank 1 could not …".
        """
        with agreed_by(self.gather, what):
            yield

    def check_same(self, value: bytes, what: str) -> None:
        """Raise RunError on all ranks if a value differs between them; ``what``: its name."""
        values = self.gather(value)
        other = [rank for rank, found in enumerate(values) if found != values[0]]
        if other:
            raise RunError(f"Rank {other[0]} has another {what} than rank 0. Give all ranks the same.")

    def check_alike(self, own: Mapping[str, str], what: str, remedy: str) -> None:
        """Raise RunError on all ranks, naming the first entry that differs, unless all have the same.

        what: the entries together, as text: "Rank 1 has lr=0.2 in ``what``, and rank 0 …".
        """
        text = json.dumps(own).encode()
        digests = self.gather(str(number(text)).encode())
        if len({*digests}) == 1:
            return
        table = [json.loads(given) for given in self.gather(text)]
        for rank, theirs in enumerate(table):
            for name in table[0] | theirs:
                if table[0].get(name) != theirs.get(name):
                    first, other = _entry(table[0], name), _entry(theirs, name)
                    raise RunError(f"Rank {rank} has {other} in {what}, and rank 0 {first}. {remedy}")

    def first_is_ready(self) -> None:
        """End the wait of the other ranks in ``wait_for_first``."""
        self.watch.failures.store.set(f"ready/{next(self._turns)}", "")

    def wait_for_first(self) -> None:
        """Wait until rank 0 calls ``first_is_ready``, as long as it gives signs of life.

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
        finally:
            self.watch.failures.store.set(f"ready/{turn}/{self.world_rank}", "")
            for rank in range(self.world_size):
                self._wait_for(f"ready/{turn}/{rank}", rank)

    def _wait_for(self, key: str, rank: int) -> None:
        """Wait for a key that another rank sets, as long as that gives signs of life."""
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

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Broadcast bytes from rank 0; the other ranks pass None."""
        own = data or b""
        (size, short), *_ = self._exchange(own)
        if size <= _SHORT:
            return short
        payload = torch.empty(size, dtype=torch.uint8)
        if own:
            payload = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        with self.watch.collective():
            dist.broadcast(payload, 0, self.control)
        return payload.numpy().tobytes()

    def scatter(self, parts: Iterable[bytes] | None) -> bytes:
        """Give each rank its part; rank 0 has those of all ranks in order, and the others pass None."""
        if parts is None:
            with self.watch.collective():
                size = torch.empty(1, dtype=torch.int64)
                dist.recv(size, 0, self.control)
                received = torch.empty(int(size), dtype=torch.uint8)
                if len(received):
                    dist.recv(received, 0, self.control)
            return received.numpy().tobytes()
        own = b""
        for rank, part in enumerate(parts):
            if rank == 0:
                own = part
                continue
            with self.watch.collective():
                dist.send(torch.tensor([len(part)]), rank, self.control)
                if part:
                    dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), rank, self.control)
        return own

    def keep(self, key: str, text: str) -> None:
        """Keep a text where each rank can read it, as long as the run lasts."""
        store = self.watch.failures.store
        for begin in range(0, len(text), MOST_STORED):
            store.set(f"{key}/{begin}", text[begin : begin + MOST_STORED])
        store.set(key, str(len(text)))

    def kept(self, key: str) -> str:
        """A text that a rank has kept."""
        with self.watch.collective():
            store = self.watch.failures.store
            begins = range(0, int(store.get(key)), MOST_STORED)
            return b"".join(store.get(f"{key}/{begin}") for begin in begins).decode()

    def gather(self, data: bytes) -> list[bytes]:
        """Gather the bytes of every rank on every rank."""
        found = self._exchange(data)
        longest = max(size for size, _ in found)
        if longest <= _SHORT:
            return [short for _, short in found]
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
        padded = [torch.empty_like(own) for _ in range(self.world_size)]
        with self.watch.collective():
            dist.all_gather(padded, own, self.control)
        return [p[:size].numpy().tobytes() for p, (size, _) in zip(padded, found, strict=True)]

    def gather_in_replica(self, data: bytes) -> list[bytes]:
        """Gather the bytes of every rank of this replica on its ranks.  All processes call it."""
        found = self.gather(data)
        return [found[rank] for rank in self.of_replica(self.replica)]

    def _exchange(self, data: bytes) -> list[tuple[int, bytes]]:
        """The number of bytes of every rank, and the bytes where they are short enough to come along."""
        words = torch.zeros(SPACE, dtype=torch.int64)
        words[0] = len(data)
        if 0 < len(data) <= _SHORT:
            words[1:].view(torch.uint8)[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = self.begin_gather(words, called_function())()
        texts = [row[1:].contiguous().numpy().tobytes() for row in found]
        return [(size, text[:size]) for size, text in zip(found[:, 0].tolist(), texts, strict=True)]

    def begin_gather(self, words: torch.Tensor, call: str) -> Callable[[], torch.Tensor]:
        """Start to gather a vector of every rank on every rank; return the function that waits for them.

        words: int64, on the CPU, at most SPACE; the rows of the result have SPACE.  call: the one that all
        ranks make, as text.
        """
        own = with_call(f"{call} of {self.of}" if self.of else call, words)
        found = torch.empty((self.world_size, len(own)), dtype=own.dtype)
        work = dist.all_gather([*found], own, self.control, async_op=True)

        def compared() -> str | None:
            """For the watch: the rank may wait for a message that no rank sends, as they make other calls."""
            arrived = work.get_future()
            if not arrived.done():
                return None
            with contextlib.suppress(RuntimeError):  # ``gathered`` raises it
                arrived.wait()
                return different_calls(found)
            return None

        self.watch.comparisons.append(compared)

        def gathered() -> torch.Tensor:
            try:
                with self.watch.collective():
                    work.wait()
            finally:
                self.watch.comparisons.remove(compared)
            if problem := different_calls(found):
                raise CallsDifferError(problem)
            return found[:, CALL:]

        return gathered

    def broadcast_(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a tensor with its values on rank ``source``."""
        self._broadcast(tensor, source, self.control)

    def broadcast_in_replica_(self, tensor: torch.Tensor, rank: int) -> None:
        """Overwrite a tensor with its values on a rank of this replica; all of its ranks call it."""
        self._broadcast(tensor, self.of_replica(self.replica)[rank], self.pipeline)

    def _broadcast(self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
        value = tensor.contiguous().cpu()
        with self.watch.collective():
            dist.broadcast(value, source, group)
        if value is not tensor:
            tensor.copy_(value)

    def send_to(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Overwrite a tensor on rank ``target`` with its values on rank ``source``; both call it."""
        value = tensor.contiguous().cpu()
        flat = value.reshape(-1).view(torch.uint8)  # gloo does not take all dtypes
        with self.watch.collective():
            if self.world_rank == source:
                dist.send(flat, target, self.control)
                return
            dist.recv(flat, source, self.control)
        if value is not tensor:
            tensor.copy_(value)

    def all_reduce_(self, value: torch.Tensor, *, largest: bool = False) -> None:
        """Replace a number, a 0-d tensor of dtype float64, by the sum over all ranks, or by the largest."""
        own = value.cpu().reshape(1).view(torch.int64)
        found = self.begin_gather(own, called_function())()[:, 0].contiguous().view(torch.float64)
        value.copy_(found.amax() if largest else found.sum())


#: The default process group, and this process as a member of it.
_joined: tuple[dist.ProcessGroup | None, Process] | None = None


def _replicas(number: int | None) -> str:
    return "" if number is None else f" in {number} replica{'s' * (number > 1)}"


def _entry(entries: Mapping[str, str], name: str) -> str:
    return f"{name}={entries[name]:.100}" if name in entries else f"no {name}"


def _as_json(place: Place) -> bytes:
    return json.dumps(asdict(place)).encode()


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
    except Exception as error:
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


@contextlib.contextmanager
def reported(process: Process | None) -> Iterator[None]:
    """Tell the other ranks of an error that ends the block, for programs that catch it and end."""
    try:
        yield
    except Exception as error:
        if process is not None:
            process.watch.report(error)
        raise


def as_timeout(given: float | timedelta | None) -> timedelta | None:
    """A time limit, given in seconds or as a timedelta.  Raises OptionError unless it is above 0."""
    limit = given
    if isinstance(given, int | float) and 0 < given <= timedelta.max.total_seconds():
        limit = timedelta(seconds=given)
    if limit is None or (isinstance(limit, timedelta) and limit > timedelta()):
        return limit
    raise OptionError(f"timeout={given!r} is no time above 0. Give seconds, or a datetime.timedelta.")
