"""The numbers of ranks and replicas that a torch DeviceMesh has."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import OptionError

#: The name of the dimension of a pipeline's ranks in torch's own examples.
PIPELINE = "pp"


def ranks_and_replicas(given: int | DeviceMesh | None, replicas: int | None) -> tuple[int | None, int | None]:
    """``ranks`` and ``replicas`` of ``compile``, where ``ranks`` may be a mesh.

    A mesh of two dimensions is (replicas, ranks), and has all processes; one of one dimension is (ranks,),
    also those of this process's replica alone, as ``mesh["pp"]`` gives them.
    Raises OptionError for a mesh of other processes, naming those that are needed.
    """
    if not isinstance(given, DeviceMesh):
        return given, replicas
    processes = given.mesh
    ranks = processes.shape[-1]
    first = int(processes.reshape(-1)[0])
    wanted = torch.arange(first, first + processes.numel()).view(processes.shape)
    several = processes.dim() == 2
    begins_well = first == 0 if several else first % ranks == 0
    names = given.mesh_dim_names or ()
    if processes.dim() > 2 or not begins_well or not processes.equal(wanted) or PIPELINE in names[:-1]:
        named = f" with the dimensions {', '.join(names)}" if names else ""
        raise OptionError(
            f"ranks is a DeviceMesh of the processes {processes.tolist()}{named}, and a pipeline needs "
            "[replica · ranks + rank], the ranks last, as init_device_mesh(…, (replicas, ranks)) makes it; "
            "or one dimension, the ranks of a replica."
        )
    if several and replicas not in (None, processes.shape[0]):
        raise OptionError(f"The mesh has {processes.shape[0]} replicas, and replicas is {replicas}.")
    return ranks, processes.shape[0] if several else replicas
