"""Numerics on a GPU: ``pytest -m gpu``.  Ranks share one device, in one process or through gloo.

Run as a script under torchrun, this file is a rank: ``test_gpu.py DIRECTORY`` writes what it computed there.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import torchrun
from models import MODELS, in_precision, own_loss
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils import _pytree as pytree
from zoo import Shape, eager, relative_error, too_far

import fxpipe
from fxpipe.runtime.program import offload as offloader_module
from fxpipe.runtime.program.accelerator import on_host, pinned_memory, unowned
from fxpipe.runtime.program.offload import Host, Offloader, aligned
from fxpipe.runtime.ranks.step_memory import step_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MICROBATCHES = 4
NAMES = ["gpt2", "llama", "t5"]
SHAPES = {
    "2-gpipe": Shape(2, "gpipe"),
    "2-1f1b": Shape(2, "1f1b"),
    "2-zb-h1-v": Shape(2, "zb-h1", 2, "v"),
    "4-zb-h1": Shape(4, "zb-h1"),
}
SHARED = {"gpt2": Shape(2, "zb-h1"), "t5": Shape(2, "1f1b")}  # under torchrun


@pytest.fixture(autouse=True)
def _full_precision_products():
    """No TF32: its products have ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def on_gpu(batch: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), batch)


@dataclass(frozen=True)
class Problem:
    """A model and its whole batch on the GPU, and how it is compiled there."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    pipe: fxpipe.Pipeline


def problem(name: str, shape: Shape, dtype: torch.dtype) -> Problem:
    """The same numbers for every precision, before they are rounded to it."""
    case = in_precision(MODELS[name], dtype)
    model = case.build().cuda()
    pipe = fxpipe.compile(
        model,
        on_gpu(case.example()),
        ranks=shape.ranks,
        microbatches=MICROBATCHES,
        schedule=shape.schedule,
        stages_per_rank=shape.stages_per_rank,
        placement=shape.placement,
        grad_dtype=shape.grad_dtype,
    )
    return Problem(model, on_gpu(case.data(MICROBATCHES)), pipe)


def norm_of_difference(grads: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """As a share of the norm of the exact gradients, all parameters together."""
    difference = sum((g.double() - exact[n]).square().sum().item() for n, g in grads.items())
    return (difference / sum(g.square().sum().item() for g in exact.values())) ** 0.5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_single_precision(name, shape):
    given = problem(name, SHAPES[shape], torch.float32)
    expected = eager(given.model, given.batch, MICROBATCHES, own_loss)
    result = given.pipe.run_local(given.batch)
    assert {g.device.type for g in result.grads.values()} == {"cuda"}
    assert relative_error(result.loss.cpu(), expected.loss.cpu()) <= 1e-5
    assert too_far(result.grads, expected.grads, 1e-4) == {}


@pytest.mark.parametrize("name", NAMES)
def test_double_precision(name):
    given = problem(name, Shape(4, "zb-h1"), torch.float64)
    expected = eager(given.model, given.batch, MICROBATCHES, own_loss)
    result = given.pipe.run_local(given.batch)
    assert relative_error(result.loss.cpu(), expected.loss.cpu()) <= 1e-10
    assert too_far(result.grads, expected.grads, 1e-10) == {}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_exact_as_in_one_process(name, shape):
    given = problem(name, SHAPES[shape], torch.bfloat16)
    ours = given.pipe.run_local(given.batch)
    theirs = eager(given.model, given.batch, MICROBATCHES, own_loss)
    exact_batch = {k: t.double() if t.is_floating_point() else t for k, t in given.batch.items()}
    exact = eager(given.model.double(), exact_batch, MICROBATCHES, own_loss)  # of the rounded weights
    assert {g.dtype for g in ours.grads.values()} == {torch.bfloat16}
    assert ours.grads.keys() == exact.grads.keys()
    error = norm_of_difference(theirs.grads, exact.grads)
    assert 0 < error < 0.1
    assert norm_of_difference(ours.grads, exact.grads) <= 2 * error
    # Single parameters may round otherwise; bfloat16 has eight bits.
    limit = {n: 2 * relative_error(g.double(), exact.grads[n]) + 2**-7 for n, g in theirs.grads.items()}
    errors = {n: relative_error(g.double(), exact.grads[n]) for n, g in ours.grads.items()}
    assert {n: e for n, e in errors.items() if not e <= limit[n]} == {}
    assert abs(ours.loss.item() - exact.loss.item()) <= 2 * abs(
        theirs.loss.item() - exact.loss.item()
    ) + 2**-8 * abs(exact.loss.item())


def test_products_of_bfloat16_are_added_in_float32():
    """By cuBLAS, into the accumulator itself; with master weights."""
    given = problem("gpt2", Shape(1, grad_dtype=torch.float32), torch.bfloat16)
    assert "addmm_dtype_out(" in given.pipe.artifact.programs[0]
    ours = given.pipe.run_local(given.batch).grads
    theirs = eager(given.model, given.batch, MICROBATCHES, own_loss).grads
    exact_batch = {k: t.double() if t.is_floating_point() else t for k, t in given.batch.items()}
    optimizer = given.pipe.optimizer(torch.optim.AdamW, lr=1e-3, fused=True, master_weights=True)
    given.pipe.step(given.batch)
    assert all(torch.equal(given.pipe.parameter(name).grad, grad) for name, grad in ours.items())
    exact = eager(copy.deepcopy(given.model).double(), exact_batch, MICROBATCHES, own_loss).grads
    assert {g.dtype for g in ours.values()} == {torch.float32}
    assert norm_of_difference(ours, exact) <= norm_of_difference(theirs, exact)
    before = {name: p.detach().clone() for name, p in given.model.named_parameters()}
    optimizer.step()
    for master, parameter in optimizer.masters.items():
        assert torch.equal(parameter, master.bfloat16())
        assert not torch.equal(master, before[optimizer.names[master]].float())


def test_peak_memory_as_simulated():
    given = problem("gpt2", Shape(2, "zb-h1"), torch.float32)
    result = given.pipe.run_local(given.batch, measure_memory=True)
    assert list(given.pipe.simulate().peak_memory) == pytest.approx(list(result.peak_saved), rel=0.05)


def test_measured_costs_schedule_a_model_on_the_gpu():
    case = MODELS["gpt2"]
    model = case.build().cuda()
    pipe = fxpipe.compile(
        model, on_gpu(case.example()), ranks=2, microbatches=MICROBATCHES, schedule="zb-h1", costs="measured"
    )
    batch = on_gpu(case.data(MICROBATCHES))
    expected = eager(model, batch, MICROBATCHES, own_loss)
    assert too_far(pipe.run_local(batch).grads, expected.grads, 1e-4) == {}
    assert all(stage.costs.forward > 0 for stage in pipe.stages)


class Wide(nn.Module):
    """Products and elementwise ops alone, whose gradients do not depend on the order that threads come in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(8)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return (x - y).square().mean()


@pytest.mark.parametrize("share", [True, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_offloaded_to_the_host_the_same_bits(shape, share):
    torch.manual_seed(0)
    model = Wide().cuda()
    batch = on_gpu({name: torch.randn(MICROBATCHES * 512, 256) for name in "xy"})
    example = {name: value[:512] for name, value in batch.items()}

    def compiled(offload: bool | float) -> fxpipe.Pipeline:
        return fxpipe.compile(
            model,
            example,
            ranks=SHAPES[shape].ranks,
            microbatches=MICROBATCHES,
            schedule=SHAPES[shape].schedule,
            stages_per_rank=SHAPES[shape].stages_per_rank,
            placement=SHAPES[shape].placement,
            offload=fxpipe.Offload(offload, bandwidth=1e12),
        )

    expected = compiled(False).run_local(batch)
    pipe = compiled(share)
    assert pipe.simulate().moved > 0
    for _ in range(3):
        found = pipe.run_local(batch)
        assert torch.equal(found.loss, expected.loss)
        assert found.grads.keys() == expected.grads.keys()
        assert [n for n, g in found.grads.items() if not torch.equal(g, expected.grads[n])] == []


#: Of an activation's tensors, one of which is transposed.
LAYOUTS = (((1 << 18,), torch.uint8), ((257, 1023), torch.float32), ((3, 5, 7), torch.bfloat16))
FILLED_WITH = 0xFF  # a NaN, of any floating type


def pattern(number: int, device: str) -> list[torch.Tensor]:
    """The tensors of an activation, other bits for every number, none of them aligned."""
    tensors = []
    for k, (shape, dtype) in enumerate(LAYOUTS):
        size = torch.Size(shape).numel() * dtype.itemsize
        bits = (torch.arange(size + 4, device=device) * (2 * number + 1) + k + number).to(torch.uint8)
        tensor = bits[4:].view(dtype).view(shape)
        tensors.append(tensor.mT if len(shape) == 2 else tensor)
    return tensors


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """On the device, so that nothing waits."""
    assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    a, b = (x.mT if x.ndim == 2 else x for x in (a, b))
    return (a.view(torch.uint8) == b.view(torch.uint8)).all()


def write_over_what_is_free(tensors: list[torch.Tensor]) -> None:
    """Let go of the tensors and fill, on the device's own stream, memory of the same sizes."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    device = tensors[0].device
    tensors.clear()
    kept = [torch.full((size,), FILLED_WITH, dtype=torch.uint8, device=device) for size in sizes * 2]
    del kept


def move_at_random(
    offloader: Offloader, device: str, rng: random.Random, moves: int, late: Callable[[], None]
) -> bool:
    """Activations go and come back in any order, many at a time; whether all came back as they went.

    Places are given to others as soon as their activation is back, and memory is written over as soon as
    it is let go of.
    """
    size = sum(aligned(t.numel() * t.element_size()) for t in pattern(0, device))
    places = [k * size for k in range(PLACES)]
    flows: list[tuple[int, int, list, str]] = []  # number, place, values, what was done last
    right: list[torch.Tensor] = []
    number = 0
    while number < moves or flows:
        late()
        if number < moves and places and (not flows or rng.random() < 0.4):
            place = places.pop(rng.randrange(len(places)))
            values: list = pattern(number, device)
            offloader.offload(values, at=place)
            flows.append((number, place, values, "offload"))
            number += 1
            continue
        which, place, values, done = flows.pop(rng.randrange(len(flows)))
        if done == "offload":
            offloader.wait_offload(values)
            write_over_what_is_free(pattern(which + 1, device))
            flows.append((which, place, values, "offloaded"))
        elif done == "offloaded":
            offloader.reload(values)
            flows.append((which, place, values, "reload"))
        else:
            offloader.wait_reload(values)
            right += map(same_bits, values, pattern(which, device))
            write_over_what_is_free(values)
            places.append(place)
    return bool(torch.stack(right).all()) and len(right) == moves * len(LAYOUTS)


PLACES, MOVES = 6, 200


@pytest.mark.parametrize("seed", range(4))
def test_copies_beside_the_device_keep_their_order(monkeypatch, seed):
    """However late each of the streams is."""
    made = [torch.accelerator.current_stream()]
    with monkeypatch.context() as patch:
        patch.setattr(
            offloader_module, "stream", lambda device: made.append(torch.Stream(device)) or made[-1]
        )
        host = Host(PLACES << 21, torch.device("cuda"))
    assert len(made) == 3
    rng = random.Random(seed)

    def late() -> None:
        with rng.choice(made):
            torch.cuda._sleep(rng.choice((0, 10_000, 1_000_000)))

    offloader = Offloader(host, torch.device("cuda"))
    assert move_at_random(offloader, "cuda", rng, MOVES, late)


SIZE = 1 << 22  # bytes


def freed_on_a_busy_stream(hidden: bool) -> bool:
    """Whether memory is used again while a stream that was told to use it is busy."""
    side, tensor = torch.cuda.Stream(), torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
    (unowned(tensor) if hidden else tensor).record_stream(side)
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    return again.data_ptr() == address


def test_the_memory_of_a_message_is_hidden_from_the_allocator():
    assert not freed_on_a_busy_stream(hidden=False)
    torch.cuda.synchronize()
    assert freed_on_a_busy_stream(hidden=True)


def test_nothing_else_takes_the_memory_of_steps():
    device = torch.device("cuda", torch.cuda.current_device())
    memory = step_memory(device)

    def address() -> int:
        return torch.empty(3 * SIZE, dtype=torch.uint8, device=device).data_ptr()

    with memory.use():
        first = address()
    grown = memory.grown
    assert grown > 0
    outside = address()
    with memory.use():
        again = address()
    assert (first, memory.grown) == (again, grown)
    assert outside != first


def test_the_loss_does_not_wait_behind_activations_on_their_way_to_the_cpu():
    """Its copy does, and the ops that come next do not."""
    device = torch.device("cuda", torch.cuda.current_device())
    size, side = 1 << 29, torch.Stream(device)
    activations, pool = torch.empty(size, dtype=torch.uint8, device=device), pinned_memory(size)
    on_host(device, lambda: torch.ones(2, device=device))()  # what a first time needs
    with side:
        for _ in range(16):  # some 150 ms
            pool.copy_(activations, non_blocking=True)
        copied = side.record_event()
    known = on_host(device, lambda: torch.full((2,), 3.0, device=device))
    torch.ones(1, device=device).add_(1)
    torch.cuda.current_stream(device).synchronize()
    assert not copied.query()
    assert known().tolist() == [3.0, 3.0]


def test_pinned_memory_of_any_size_is_copied_in_the_background():
    pool = pinned_memory((1 << 20) + 3)
    assert pool.is_pinned()
    pool.fill_(7)
    assert (pool.to("cuda", non_blocking=True) == 7).all()


def test_two_processes_share_the_gpu_through_gloo(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run = torchrun(2, __file__, tmp_path, logs=tmp_path / "logs", limit=300)
    assert run.code == 0, run
    for name, shape in SHARED.items():
        given = problem(name, shape, torch.float32)
        expected = eager(given.model, given.batch, MICROBATCHES, own_loss)
        found: dict[str, torch.Tensor] = {}
        for rank in range(2):
            held = load_file(tmp_path / f"{name}.{rank}.safetensors")
            assert relative_error(held.pop("loss"), expected.loss.cpu()) <= 1e-5
            for parameter, grad in held.items():  # tied weights are on both ranks, with the same bits
                assert torch.equal(found.setdefault(parameter, grad), grad)
        assert too_far(found, {n: g.cpu() for n, g in expected.grads.items()}, 1e-4) == {}


def main(directory: Path) -> None:
    """One rank of two."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for name, shape in SHARED.items():
        given = problem(name, shape, torch.float32)
        assert dist.get_backend() == "gloo"
        loss = given.pipe.step(given.batch)
        rank = dist.get_rank()
        held = given.pipe.plan.tensors[rank].gradients
        grads = {n: given.pipe.parameters[n].grad.cpu().contiguous() for n in held}
        save_file({"loss": loss.cpu(), **grads}, directory / f"{name}.{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
