"""The numbers of the processes of a job: replica, rank and lane of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fxpipe.errors import RunError
from fxpipe.plan.lanes import LaneGroup
from fxpipe.runtime.program.comm import Wait

#: Most processes that a message names at once.
MOST_NAMED = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Summing:
    """Lanes once more, for sums and gathers that run beside the ops, and so beside what these exchange."""

    lanes: LaneGroup


Connection = tuple[int, int] | int | Literal["replicas"] | LaneGroup | Summing
"""A channel, the number of a collective of all ranks, or the group of a rank of all replicas, or of lanes of
it."""


def ranks_named(numbers: Sequence[int]) -> str:
    """ "rank 3", or "ranks 3, 5", as text."""
    named = ", ".join(map(str, numbers[:MOST_NAMED]))
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {named}{more}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Numbering:
    """The processes are replicas of a pipeline of ``ranks``, each with ``lanes`` processes: that of number
    ``world_rank`` is (replica * ranks + rank) * lanes + lane.  Outside of steps, and in messages, processes
    have the numbers of torchrun: "rank 5" of ``world_size``.
    """

    world_rank: int
    world_size: int
    ranks: int
    lanes: int = 1

    @property
    def rank(self) -> int:
        """The rank of this process in its pipeline."""
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
        of_lane = self.lane if lane is None else lane
        return [self.number(replica, rank, of_lane) for rank in range(self.ranks)]

    def of_rank(self, rank: int, lane: int) -> list[int]:
        """The processes that have this rank and lane of their pipelines, in the order of the replicas."""
        return [self.number(replica, rank, lane) for replica in range(self.replicas)]

    def that_run(self, rank: int) -> list[int]:
        """All processes that run the program of a rank."""
        return [k for replica in range(self.replicas) for k in self.of_lanes(replica, rank)]

    def of_each(self, parts: Sequence[T]) -> list[T]:
        """The part that each process gets of those of the ranks, in the order of the processes."""
        return [part for _ in range(self.replicas) for part in parts for _ in range(self.lanes)]

    def of_lanes(self, replica: int, rank: int) -> list[int]:
        """The lanes of a rank, in their order."""
        return [self.number(replica, rank, lane) for lane in range(self.lanes)]

    def awaited(self, wait: Wait) -> list[int]:
        """The other processes that this one waits for."""
        match wait.peers:
            case "ranks":
                processes = self.of_replica(self.replica)
            case "replicas":
                processes = self.of_rank(self.rank, self.lane)
            case "lanes":
                processes = self.of_lanes(self.replica, self.rank)
            case "alike":
                processes = self.that_run(self.rank)
            case None:
                processes = []
            case rank:
                processes = [self.number(self.replica, rank, self.lane)]
        return [number for number in processes if number != self.world_rank]

    def described(self, wait: Wait) -> str:
        """Describe in text what this process waits for, with the numbers of processes."""
        if isinstance(wait.peers, int):
            return wait.what.format(self.number(self.replica, wait.peers, self.lane))
        processes = self.awaited(wait)
        if not processes or self.world_size == self.ranks:
            return wait.what
        return f"{wait.what} ({ranks_named(processes)})"

    def members(self, what: Connection) -> list[list[int]]:
        """The processes of a connection, for each replica and lane; of one of replicas, for each rank and
        lane; of lanes, for each rank of each replica all groups."""
        lanes, ranks, replicas = range(self.lanes), range(self.ranks), range(self.replicas)
        if what == "replicas":
            return [self.of_rank(rank, lane) for rank in ranks for lane in lanes]
        if isinstance(what, Summing):
            return self.members(what.lanes)
        if isinstance(what, LaneGroup):
            groups = [what.members(lane) for lane in lanes if lane == what.first(lane)]
            each = [self.of_lanes(replica, rank) for replica in replicas for rank in ranks]
            return [[processes[lane] for lane in group] for processes in each for group in groups]
        pipelines = [self.of_replica(replica, lane) for replica in replicas for lane in lanes]
        return pipelines if isinstance(what, int) else [[row[rank] for rank in what] for row in pipelines]

    def check_mesh(self, mesh: Any) -> None:
        """Raise RunError unless the mesh of this process's DTensors, if any, is the lanes of its rank."""
        wanted = self.of_lanes(self.replica, self.rank)
        if mesh is not None and mesh.mesh.flatten().tolist() != wanted:
            raise RunError(
                f"The mesh of the model's DTensors has the processes {mesh.mesh.tolist()}, and the lanes of "
                f"rank {self.rank} are the processes {wanted}. Lanes are the last dimensions: "
                f'init_device_mesh(…, ({self.world_size // self.lanes}, {self.lanes}), mesh_dim_names=("pp", '
                '"tp"))["tp"].'
            )
