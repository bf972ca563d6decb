"""The numbers of ranks and replicas of torch's meshes, with and without lanes; meshes that are refused."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpipe.errors import OptionError
from fxpipe.runtime.job.mesh import ranks_and_replicas

WORLD = 12
DIMENSIONS = ("dp", "pp", "tp")


@pytest.fixture(params=[0, 5, 11])
def process(request):
    """The number of this process, of twelve."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=WORLD)
    yield request.param
    dist.destroy_process_group()


def mesh(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return DeviceMesh(
        "cpu", torch.arange(WORLD)[: torch.Size(sizes).numel()].view(sizes), mesh_dim_names=names
    )


def test_every_part_of_a_mesh_with_lanes_that_has_the_ranks(process):
    whole = mesh(2, 3, 2, names=DIMENSIONS)
    assert ranks_and_replicas(whole, None, 2) == (3, 2)
    assert ranks_and_replicas(whole["dp", "pp"], None, 2) == (3, 2)
    assert ranks_and_replicas(whole["pp", "tp"], None, 2) == (3, None)
    assert ranks_and_replicas(whole["pp"], None, 2) == (3, None)
    assert ranks_and_replicas(mesh(2, 3, 2), 2, 2) == (3, 2)
    assert ranks_and_replicas(mesh(6, 2, names=DIMENSIONS[1:]), None, 2) == (6, None)
    assert ranks_and_replicas(mesh(2, 1, 6), None, 6) == (1, 2)
    assert ranks_and_replicas(mesh(4, 3, names=("dp", "pp")), None) == (3, 4)
    assert ranks_and_replicas(3, None, 2) == (3, None)


@pytest.mark.parametrize("process", [0], indirect=True)
@pytest.mark.parametrize(
    ("sizes", "names", "lanes", "message"),
    [
        ((2, 3, 2), ("pp", "dp", "tp"), 2, "with the dimensions pp, dp, tp, .*before the lanes.*ranks, 2"),
        ((2, 2, 3), DIMENSIONS, 2, "needs .*rank. · 2 . lane"),
        ((6, 2), ("dp", "pp"), 3, "needs .*rank. · 3 . lane"),
        ((2, 3, 2), DIMENSIONS, 1, "a model with DTensors, and this model has none"),
        ((2, 2), ("pp", "dp"), 1, "the ranks last, as"),
        ((2,), ("tp",), 2, r"the processes \[0, 1\] with the dimensions tp, and a pipeline needs"),
    ],
)
def test_other_meshes_are_refused(process, sizes, names, lanes, message):
    with pytest.raises(OptionError, match=message):
        ranks_and_replicas(mesh(*sizes, names=names), None, lanes)


@pytest.mark.parametrize("given", [0, -1, "2", 2.0, True])
def test_numbers_that_are_none(given):
    """Found before processes agree on them."""
    for ranks, replicas in ((given, None), (2, given)):
        with pytest.raises(OptionError, match=f"is {given!r} and must be a whole number, at least 1"):
            ranks_and_replicas(ranks, replicas)


@pytest.mark.parametrize("process", [0], indirect=True)
def test_a_mesh_with_other_replicas_than_asked_for(process):
    with pytest.raises(OptionError, match="The mesh has 2 replicas, and replicas is 3"):
        ranks_and_replicas(mesh(2, 3, 2, names=DIMENSIONS), 3, 2)
