"""Collectives of a model's own code, which write to tensors, are those of the lanes."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxpipe
from fxpipe.errors import CaptureError

pytestmark = pytest.mark.slow


def all_reduce(x, group):
    dist.all_reduce(x, group=group)
    return x


def product(x, group):
    dist.all_reduce(x, dist.ReduceOp.PRODUCT, group)
    return x


def largest_without_waiting(x, group):
    dist.all_reduce(x, dist.ReduceOp.MAX, group, async_op=True).wait()
    return x


def all_gather(x, group):
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x, group)
    return torch.cat(parts, -1)


def all_gather_into_tensor(x, group):
    stacked = x.new_empty(2, *x.shape)
    dist.all_gather_into_tensor(stacked, x, group)
    return stacked.movedim(0, -2).flatten(-2)


def reduce_scatter_tensor(x, group):
    share = x.new_empty(len(x) // 2, x.shape[1])
    dist.reduce_scatter_tensor(share, x, group=group)
    return all_gather(share, group)


def reduce_scatter(x, group):
    share = x.new_empty(len(x) // 2, x.shape[1])
    dist.reduce_scatter(share, [*x.chunk(2)], group=group)
    return all_gather(share, group)


def all_to_all_single(x, group):
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return all_gather(received, group)


def all_to_all(x, group):
    received = [torch.empty_like(part) for part in x.chunk(2)]
    dist.all_to_all(received, [*x.chunk(2)], group)
    return all_gather(torch.cat(received), group)


def broadcast(x, group):
    dist.broadcast(x, group=group, group_src=1)
    return x


def _halves(a, b):
    return torch.cat([a[:2] + b[:2], a[2:] + b[2:]], -1)


def _exchanged(a, b):
    return torch.cat([torch.cat([a[:2], b[:2]]), torch.cat([a[2:], b[2:]])], -1)


#: collective -> the same of both lanes' tensors
EXPECTED = {
    all_reduce: torch.add,
    largest_without_waiting: torch.maximum,
    all_gather: lambda a, b: torch.cat([a, b], -1),
    all_gather_into_tensor: lambda a, b: torch.cat([a, b], -1),
    reduce_scatter_tensor: _halves,
    reduce_scatter: _halves,
    all_to_all_single: _exchanged,
    all_to_all: _exchanged,
    broadcast: lambda a, b: b,
}


class Net(nn.Module):
    """between: of what the first layer gives, of which each lane has half of the columns."""

    def __init__(self, between):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8).requires_grad_(False), nn.LazyLinear(3)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self.first(x))).square().sum()


def run_on_lanes(between, x):
    with fxpipe.local_lanes(2) as mesh:
        model = Net(lambda share: between(share.clone(), mesh.get_group()))
        model.last = nn.Linear(EXPECTED.get(between, torch.add)(x[:, :1], x[:, :1]).shape[1] * 4, 3)
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        parallelize_module(model, mesh, {"first": ColwiseParallel()})
        pipe = fxpipe.compile(model, (x,), ranks=1, microbatches=1)
    pipe.load_state_dict(whole)
    return pipe.run_local((x,)), whole


@pytest.mark.parametrize("collective", EXPECTED, ids=lambda f: f.__name__)
def test_each_collective(collective):
    x = torch.randn(4, 4)
    found, whole = run_on_lanes(collective, x)
    model = Net(lambda y: EXPECTED[collective](*y.chunk(2, -1)))
    model.last = nn.Linear(whole["last.weight"].shape[1], 3)
    model.load_state_dict(whole)
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(found.grads["last.weight"], model.last.weight.grad)


def test_a_reduction_and_a_collective_that_lanes_do_not_have():
    x = torch.randn(4, 4)
    with pytest.raises(CaptureError, match=r"no all_reduce\(product\)"):
        run_on_lanes(product, x)
    with pytest.raises(CaptureError, match=r"calls barrier of torch\.distributed"):
        run_on_lanes(lambda x, group: dist.barrier(group) or x, x)


def test_the_methods_of_groups_are_as_before():
    before = {name: vars(dist.ProcessGroup)[name] for name in ("allreduce", "broadcast", "barrier")}
    run_on_lanes(all_reduce, torch.randn(4, 4))
    assert before == {name: vars(dist.ProcessGroup)[name] for name in before}
