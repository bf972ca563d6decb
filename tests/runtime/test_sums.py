"""Sums over ranks: the bits of one process, for any size, in memory that does not grow with the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import forked
from marks import with_variations
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.plan.tensors import sum_over_ranks
from fxpipe.runtime.program.comm import add_up
from fxpipe.runtime.ranks import distributed
from fxpipe.runtime.ranks.distributed import DistributedComm
from fxpipe.runtime.ranks.send_buffers import SentByThread

CPU = torch.device("cpu")
#: Some with fewer elements than ranks, with none, and with others than a multiple of them.
SHAPES = [(4, 6), (7,), (1,), (0,), (3, 0), (5, 3, 2)]
LARGE = 6 << 14  # bytes


class Held(TorchDispatchMode):
    """``peak``: the most bytes of tensors that this thread has seen, and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._live = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def joined() -> DistributedComm:
    dist.init_process_group("gloo")
    groups = [dist.new_group() for _ in range(2)]
    own = dist.get_rank(), dist.get_world_size()
    return DistributedComm(CPU, CPU, *own, range(own[1]), {}, groups, dist.group.WORLD, SentByThread())


def parts_of(shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> list[torch.Tensor]:
    """The same on all ranks; those of three dimensions lie in memory in another order."""
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(ranks)]
    return [part.transpose(0, 2) if part.dim() == 3 else part for part in parts]


def sums() -> None:
    comm = joined()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape in SHAPES:
            parts = parts_of(shape, dtype, comm.ranks)
            layout = tuple(parts[0].shape), parts[0].stride(), dtype
            for to in range(comm.ranks):
                part = parts[comm.rank]
                pending = comm.collective("reduce", part, layout, to, 1)
                gathered = comm.collective("gather", part, layout, to, 0)  # as in programs of before
                assert (pending is None) == (gathered is None) == (comm.rank != to)
                if pending is not None and gathered is not None:
                    (found,), expected = comm.wait(pending), sum_over_ranks(*parts)
                    assert torch.equal(found, expected), (dtype, shape)
                    assert found.stride() == expected.stride()
                    assert all(map(torch.equal, comm.wait(gathered), parts))
    comm.flush()


def peak(limit: float) -> None:
    """The most that a rank holds, in tensors of its own size."""
    comm, meter = joined(), Held()

    def measured(*given: Any) -> None:
        with meter:
            add_up(*given)

    distributed.add_up = measured
    part = torch.ones(LARGE // 4)
    pending = comm.collective("reduce", part, ((LARGE // 4,), (1,), part.dtype), 0, 1)
    if pending is not None:
        comm.wait(pending)
    comm.flush()
    assert 2 * LARGE <= meter.peak <= limit * LARGE, meter.peak / LARGE


def run(ranks: int, function: Callable[..., None], *arguments: object, logs: Any) -> None:
    found = forked(ranks, function, *arguments, dtype=torch.float32, logs=logs / "logs")
    assert found.code == 0, found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", with_variations([2, 3, 4], [4]))
def test_a_sum_has_the_bits_of_one_process(ranks, tmp_path):
    run(ranks, sums, logs=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 6])
def test_a_rank_holds_no_more_with_more_ranks(ranks, tmp_path):
    """Its own, the slices of all, which are as large as one, and their sum; the result takes their place."""
    run(ranks, peak, 2 + 1 / ranks, logs=tmp_path)
