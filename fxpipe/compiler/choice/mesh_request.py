"""The choice of a mesh that a user leaves to the compiler, and the meshes that are possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.errors import OptionError, at_least_one, number_of
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.plan.step import Shard
from fxpipe.runtime.batch.microbatches import batch_leaves
from fxpipe.schedule.search.fastest import AUTO

#: What replicas may divide.  "gradients" takes the time and, within a step, the memory of "optimizer", which
#: comes first, as it leaves the most memory for activations: with less, its schedule may do.
LEVELS: tuple[Shard, ...] = ("optimizer", "", "parameters")


@dataclass(frozen=True)
class MeshRequest:
    """What is known of a mesh.

    devices: ranks times replicas.  ranks, replicas: None to choose them.  rows: of a step, over all replicas;
    None where the number of microbatches of each replica is given instead.  shards: that are compared.
    """

    devices: int
    ranks: int | None
    replicas: int | None
    rows: int | None
    microbatches: int | None
    shards: tuple[Shard, ...]

    def meshes(self, rows: int, lanes: int = 1) -> Iterator[TriedMesh]:
        """All that are possible, few ranks first.  rows: of a microbatch.  lanes: of each rank."""
        for ranks in range(1, self.devices + 1):
            replicas, rest = divmod(self.devices, ranks)
            if rest or self.ranks not in (None, ranks) or self.replicas not in (None, replicas):
                continue
            microbatches, rest = self.microbatches or 0, 0
            if self.rows is not None:
                microbatches, rest = divmod(self.rows, rows * replicas)
            shards = self.shards if replicas * lanes > 1 or len(self.shards) == 1 else ("",)
            for shard in shards:
                why = ""
                if rest or not microbatches:
                    each = f"{number_of(replicas, 'replica')} of {number_of(rows, 'row')}"
                    why = f"{self.rows} rows are no multiple of {each}"
                yield TriedMesh(Mesh(ranks, replicas, max(1, microbatches), shard), why=why)


def request_of(
    devices: int | None,
    ranks: int | None,
    replicas: int | None,
    microbatches: int | None,
    batch: int | None,
    shard: str | None,
    world: int | None,
) -> MeshRequest | None:
    """The choice that is left to the compiler; None if there is none.

    world: the number of processes that torchrun started, a lane of each rank.
    Raises OptionError for numbers that are no mesh.
    """
    if (microbatches is None) == (batch is None):
        which = "neither is given" if batch is None else "both are given"
        raise OptionError(
            "Give microbatches, of each replica, or batch, the rows of a step over all replicas: one of the "
            f"two, and {which}."
        )
    if ranks is not None and shard != AUTO and devices is None and batch is None:
        return None
    for name, value in {"devices": devices, "batch": batch, "ranks": ranks, "replicas": replicas}.items():
        if value is not None:
            at_least_one(name, value)
    number = devices if devices is not None else world
    if number is None and ranks is not None:
        number = ranks * (replicas or 1)
    if number is None:
        raise OptionError("Give ranks, or devices, the number of processes, for which they are chosen.")
    if world is not None and number != world:
        raise OptionError(f"devices is {number}, and torchrun started {world} processes: leave out devices.")
    if ranks is None and batch is None:
        raise OptionError(
            "microbatches are of each replica, and their number is to be chosen: give batch, the rows of a "
            "step over all replicas, instead."
        )
    shards: tuple[Any, ...] = LEVELS if shard == AUTO else (shard or "",)
    request = MeshRequest(number, ranks, replicas, batch, microbatches, shards)
    if next(request.meshes(1), None) is None:
        of = f"ranks={ranks}" if replicas is None else f"ranks={ranks}, replicas={replicas}"
        raise OptionError(f"{of} is no mesh of {number} devices: these are ranks times replicas.")
    return request


def rows_of(example: object) -> int:
    """The rows of a microbatch."""
    shapes = (x.shape for _, x in batch_leaves(example) if isinstance(x, torch.Tensor) and x.dim())
    return int(next(shapes, (1,))[0])
