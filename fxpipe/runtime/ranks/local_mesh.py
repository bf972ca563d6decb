"""A mesh of lanes for a process that runs all of them, to compile a model with DTensors without torchrun."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fxpipe.errors import OptionError, RunError
from fxpipe.runtime.torch_private import fake_store


@contextlib.contextmanager
def local_lanes(
    number: int | Sequence[int], device_type: str = "cpu", names: Sequence[str] = ("tp",)
) -> Iterator[DeviceMesh]:
    """A mesh of so many lanes, of which this process is the first, for ``parallelize_module``.

    number: for a mesh of several dimensions the lanes along each, with the names of these.

    The others are not there: what it keeps of a tensor that is sharded is the first lane's share, and nothing
    that it sends arrives.  So compile the model within it, give the pipeline the whole values by
    ``pipe.load_state_dict(…)``, and run all lanes by ``pipe.run_local(…)``, within it or after it.

    Raises OptionError for another number of names, and RunError under torchrun, where
    ``init_device_mesh(…, (ranks, lanes), mesh_dim_names=("pp", "tp"))["tp"]`` is the mesh.
    """
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RunError(
            "local_lanes is for a process that runs all lanes, and this one is one of several. Make the mesh "
            'of all: init_device_mesh(…, (ranks, lanes), mesh_dim_names=("pp", "tp"))["tp"].'
        )
    sizes = (number,) if isinstance(number, int) else tuple(number)
    if len(sizes) != len(names):
        raise OptionError(f"local_lanes needs a name for each of {[*sizes]}, and names is {[*names]}.")
    hook = sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=prod(sizes), store=fake_store())
    sys.excepthook = hook  # torch puts "[rank0]:" before each line of a traceback, once more for each group
    try:
        yield init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names))
    finally:
        dist.destroy_process_group()
