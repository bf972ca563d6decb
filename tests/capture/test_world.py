"""A model that asks torch.distributed: the answers are those of its replicas, in one process and in many."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradients
from launch import forked
from torch import nn
from torch.distributed import get_world_size

import fxpipe

RANKS, MICROBATCHES, ROWS = 2, 2, 2


class Net(nn.Module):
    """``ask``: what is made of the loss, and of the input."""

    def __init__(self, ask):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.ask = nn.Linear(4, 4), nn.Linear(4, 4), ask

    def forward(self, x):
        return self.ask(self.second(self.first(x).tanh()).square().mean(), x)


def summed(loss, x):
    count = torch.as_tensor([float(len(x))])
    dist.all_reduce(count)
    return loss * ROWS / count[0]


def gated(loss, x):
    if dist.is_initialized() and dist.get_rank() == 0:
        print("loss", loss)
    return loss


def gathered(loss, x):
    all_rows = [torch.empty_like(x) for _ in range(get_world_size())]
    dist.all_gather(all_rows, x)
    return loss + torch.cat(all_rows).mean() - x.mean()


def waits(loss, x):
    dist.barrier()
    return loss


def guarded(loss, x):
    try:
        dist.all_reduce(loss.clone())
    except Exception:  # noqa: BLE001 - as models do
        return loss / 2
    return loss


DIVIDED = (
    lambda loss, x: loss / get_world_size(),
    lambda loss, x: loss / (dist.get_world_size() if dist.is_initialized() else 1),
    lambda loss, x: loss / int(os.environ.get("WORLD_SIZE", "1")),
    lambda loss, x: loss if int(os.getenv("LOCAL_RANK", 0)) < 0 else loss / int(os.getenv("WORLD_SIZE", 1)),
    gated,
)
COMMUNICATES = (
    *(summed, gathered, waits, guarded),
    lambda loss, x: with_gradients.all_reduce(loss),
    lambda loss, x: loss + dist.broadcast(loss.detach(), 0) if dist.get_rank() else loss,
)


def compiled(ask, **options):
    options = {"ranks": RANKS, "schedule": "1f1b", **options}
    return fxpipe.compile(Net(ask), (torch.randn(ROWS, 4),), microbatches=MICROBATCHES, **options)


def loss_of(ask, rows):
    return float(sum(Net(ask)(x).detach() for x in rows.chunk(MICROBATCHES)) / MICROBATCHES)


def rows_of(replica):
    return torch.randn(ROWS * MICROBATCHES, 4, generator=torch.Generator().manual_seed(replica))


@pytest.mark.parametrize("ask", [*DIVIDED, *COMMUNICATES])
def test_one_replica_is_a_world_of_one(ask):
    expected = loss_of(lambda loss, x: loss, rows_of(0))
    assert float(compiled(ask).run_local((rows_of(0),)).loss) == pytest.approx(expected, rel=1e-6)
    assert not dist.is_initialized()


@pytest.mark.parametrize("ask", COMMUNICATES[:-1])
def test_replicas_do_not_communicate_in_the_forward(ask):
    with pytest.raises(fxpipe.CaptureError, match=r"communicates with other processes .*test_world.py:\d+"):
        compiled(ask, replicas=2)


OTHER_OPS = (
    lambda loss, x: loss * (1 + dist.get_rank()),
    lambda loss, x: loss * (1 + int(os.environ["RANK"])),
)


@pytest.mark.parametrize("ask", [*OTHER_OPS, COMMUNICATES[-1]])
def test_replicas_that_would_run_other_ops(ask):
    with pytest.raises(fxpipe.CaptureError, match=r"another replica.*test_world.py:\d+|communicates"):
        compiled(ask, replicas=2)


def test_a_number_of_replicas_that_is_chosen_later():
    with pytest.raises(fxpipe.CaptureError, match=r"test_world.py:\d+.*give replicas="):
        fxpipe.compile(Net(DIVIDED[1]), (torch.randn(ROWS, 4),), ranks=None, devices=2, batch=8)


def test_a_wrapped_model():
    with pytest.raises(fxpipe.CaptureError, match=r"wrapped in DataParallel.*model\.module"):
        fxpipe.compile(
            nn.DataParallel(Net(gated)), (torch.randn(ROWS, 4),), ranks=RANKS, microbatches=MICROBATCHES
        )


#: Of code that holds the group that its script has made.
HELD = {
    "size": lambda group: lambda loss, x: loss / dist.get_world_size(group),
    "sum": lambda group: lambda loss, x: loss + dist.all_reduce(loss.detach(), group=group),
    "functional": lambda group: lambda loss, x: functional.all_reduce(loss, "sum", group),
}


def in_a_rank(directory, shapes, has_group):
    """shapes: the numbers of ranks of the pipelines.  has_group: whether the script makes a process group."""
    if has_group:
        dist.init_process_group("gloo")
    number, group = int(os.environ["RANK"]), dist.group.WORLD
    asks = dict(enumerate(DIVIDED)) | ({name: of(group) for name, of in HELD.items()} if has_group else {})
    if has_group:
        pairs = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
        asks["pair of a replica"] = HELD["size"](pairs[number // 2])
        asks["pair of replicas"] = HELD["size"](pairs[2 + number % 2])
    found = {}
    for name, ask in asks.items():
        for ranks in shapes:
            try:
                pipe = compiled(ask, ranks=ranks, stages_per_rank=1)
                found[f"{name}, {ranks}"] = pipe.step((rows_of(number // ranks),)).item()
            except fxpipe.FxpipeError as error:
                found[f"{name}, {ranks}"] = str(error)
    Path(directory, f"{number}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("processes", "shapes", "has_group"),
    [(4, (2, 4), True), pytest.param(2, (2,), False, marks=pytest.mark.variation)],
)
def test_under_torchrun(double, tmp_path, processes, shapes, has_group):
    """Two replicas of two ranks, and one pipeline of all ranks."""
    arguments = tmp_path, shapes, has_group
    run = forked(processes, in_a_rank, *arguments, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    found = json.loads((tmp_path / f"{processes - 1}.json").read_text())
    for name, value in found.items():
        kind, _, ranks = name.partition(", ")
        replicas = processes // int(ranks)
        if kind in ("sum", "functional"):
            assert "communicates with other processes (all" in value
            continue
        mean = sum(loss_of(lambda loss, x: loss, rows_of(k)) for k in range(replicas)) / replicas
        divisor = 1 if kind in (str(DIVIDED.index(gated)), "pair of a replica") else replicas
        assert value == pytest.approx(mean / divisor, rel=1e-12), name
