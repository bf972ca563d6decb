"""The numbers of ranks and replicas that a torch DeviceMesh has."""

from __future__ import annotations

from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import OptionError, at_least_one, number_of

#: The name of the dimension of a pipeline's ranks in torch's own examples.
PIPELINE = "pp"


def ranks_and_replicas(
    size: int | DeviceMesh | None, replicas: int | None, lanes: int = 1
) -> tuple[int | None, int | None]:
    """``ranks`` and ``replicas`` of ``compile``, where ``ranks`` may be a mesh.

    A mesh of two dimensions is (replicas, ranks), and has all processes; one of one dimension is (ranks,),
    also those of this process's replica alone, as ``mesh["pp"]`` gives them.
    lanes: of a model with DTensors.  Then either kind may have them as further dimensions, the last; without
    these the mesh has the processes of one lane, as ``mesh["pp"]`` and ``mesh["dp", "pp"]`` give them.
    Raises OptionError for a mesh of other processes, naming those that are needed.
    """
    for name, number in (("ranks", size), ("replicas", replicas)):
        if number is not None and not isinstance(number, DeviceMesh):
            at_least_one(name, number)
    if not isinstance(size, DeviceMesh):
        return size, replicas
    table, names = _of_one_lane(size, lanes)
    if not table.dim():  # the lanes of one rank alone
        raise OptionError(_refused(size, lanes))
    ranks, first = table.shape[-1], int(table.reshape(-1)[0])
    wanted = first + lanes * torch.arange(table.numel(), device="cpu").view(table.shape)
    several = table.dim() == 2
    begins_well = (first if several else first % (ranks * lanes)) < lanes
    if table.dim() not in (1, 2) or not begins_well or not table.equal(wanted) or PIPELINE in names[:-1]:
        raise OptionError(_refused(size, lanes))
    if several and replicas not in (None, table.shape[0]):
        raise OptionError(f"The mesh has {number_of(table.shape[0], 'replica')}, and replicas is {replicas}.")
    return ranks, table.shape[0] if several else replicas


def _of_one_lane(mesh: DeviceMesh, lanes: int) -> tuple[torch.Tensor, tuple[str, ...]]:
    """The processes of a mesh, and the names of its dimensions, without those of the lanes."""
    processes, names = mesh.mesh, mesh.mesh_dim_names or ()
    last = next((k for k in range(1, mesh.ndim + 1) if prod(mesh.shape[-k:]) == lanes), 0)
    if lanes == 1 or not last:
        return processes, names
    of_lanes = processes.flatten(-last)
    begins = of_lanes[..., :1]
    all_lanes = begins + torch.arange(lanes, device="cpu")
    if of_lanes.equal(all_lanes) and not int(begins.reshape(-1)[0]) % lanes:
        return of_lanes[..., 0], names[:-last]
    return processes, names


def _refused(mesh: DeviceMesh, lanes: int) -> str:
    names = mesh.mesh_dim_names
    named = f" with the dimensions {', '.join(names)}" if names else ""
    number, order, behind = "replica · ranks + rank", "replicas, ranks", ""
    if lanes > 1:
        number, order = f"({number}) · {lanes} + lane", f"{order}, {lanes}"
    elif mesh.ndim == 3:
        behind = (
            " A third dimension is that of the lanes of a model with DTensors, and this model has none: "
            'call parallelize_module with mesh["tp"] before.'
        )
    return (
        f"ranks is a DeviceMesh of the processes {mesh.mesh.tolist()}{named}, and a pipeline needs "
        f"[{number}], the ranks last{', before the lanes' if lanes > 1 else ''}, as "
        f"init_device_mesh(…, ({order})) makes it; or one dimension, the ranks of a replica.{behind}"
    )
