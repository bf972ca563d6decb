"""A rank of gpu_check.py: one step over the given backend, its gradients beside those of eager; or training.

``batch`` is "one" where rank 0 alone has its batch on a GPU, and a rank that needs none of it gets none.
``train``: that many steps with AdamW, and how often each asks the device for memory from its first op on.
``post``: that many steps with post-validation, each of them clipped, and their parameters beside eager's.
``lanes``: how many share each rank, and with it the inner products of the model's blocks.
``bytes``: the most that torch may take of the device's memory.
``nccl`` is "apart" where ranks share a GPU and nccl is told that they are on different machines: it works
as between machines then, over loopback, which tests paths and not speed.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxpipe
from fxpipe.plan.rows import ShardName
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.accelerator import default_device, device_allocations, is_accelerator, memory_size

#: Of a rank with another one, which then says which op of which rank it waits for.
PATIENCE = timedelta(seconds=90)
WIDTH, HEADS, WORDS, LENGTH, LAYERS = 64, 4, 96, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (t.reshape(heads).transpose(1, 2) for t in self.attention(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.output(mixed.reshape(x.shape))
        return x + self.outer(F.gelu(self.inner(self.behind(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def in_full_precision() -> None:
    """No TF32, whose products have ten bits."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def strictly() -> None:
    """A program that cannot be checked against the captured step is an error here."""
    warnings.filterwarnings("error", "The programs cannot be checked")


def model(device: torch.device) -> Model:
    torch.manual_seed(0)
    return Model().to(device)


def batch(rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(WORDS, (rows, LENGTH))
    return {"ids": ids.to(device), "labels": ids.roll(-1, 1).to(device)}


def parallelized(own: Model, ranks: int, lanes: int) -> Model:
    mesh = init_device_mesh(next(own.parameters()).device.type, (ranks, lanes), mesh_dim_names=("pp", "tp"))
    plan = {"blocks.*.inner": ColwiseParallel(), "blocks.*.outer": RowwiseParallel()}
    parallelize_module(own, mesh["tp"], plan)
    return own


def of_this_lane(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this lane has of the parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local()


def eager_gradients(own: Model, whole: dict[str, torch.Tensor], microbatches: int) -> dict[str, torch.Tensor]:
    """Of the mean over microbatches; the model's are zeroed after it."""
    for ids, labels in zip(*(t.chunk(microbatches) for t in whole.values()), strict=True):
        (own(ids, labels) / microbatches).backward()
    grads = {name: p.grad.clone() for name, p in own.named_parameters()}
    own.zero_grad(set_to_none=True)
    return grads


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest element."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def of_one_gpu(pipe: fxpipe.Pipeline, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    rank = pipe.process.rank
    return {
        name: (t if rank == 0 else t.cpu()) if name in pipe.leaves(rank) else None
        for name, t in whole.items()
    }


def train(pipe: fxpipe.Pipeline, whole: dict[str, torch.Tensor], steps: int) -> dict[str, Any]:
    """``asked``: for each step how often all ranks asked their devices for memory from their first op on.
    ``reserved``: the most bytes that torch took from a device."""
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
    device, begun, asked = pipe.device, [], []
    pipe.runtime.record.at_op = lambda _: begun.append(device_allocations(device))
    for _ in range(steps):
        begun.clear()
        pipe.step(whole)
        asked.append(device_allocations(device) - begun[0])
        optimizer.step()
        optimizer.zero_grad()
    on_gpu = is_accelerator(device)
    reserved = torch.tensor(torch.accelerator.max_memory_reserved(device) if on_gpu else 0)
    total = torch.tensor(asked)
    dist.all_reduce(total, group=pipe.process.control)
    dist.all_reduce(reserved, dist.ReduceOp.MAX, pipe.process.control)
    backend = pipe.process.backend(device)
    return {"asked": total.tolist(), "reserved": reserved.item(), "backend": backend}


def clipped(pipe: fxpipe.Pipeline, own: Model, whole: dict[str, torch.Tensor], steps: int) -> float:
    """The largest error of this rank's parameters behind steps with post-validation."""
    rules = {"lr": 0.1, "momentum": 0.9}
    optimizer = pipe.optimizer(torch.optim.SGD, clip_grad_norm=0.1, validation="post", **rules)
    plain = torch.optim.SGD(own.parameters(), **rules)
    for _ in range(steps):
        for name, grad in eager_gradients(own, whole, len(whole["ids"]) // 2).items():
            own.get_parameter(name).grad = grad
        assert torch.nn.utils.clip_grad_norm_(own.parameters(), 0.1) > 0.1
        plain.step()
        plain.zero_grad()
        pipe.step(whole)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.last_norm  # of the last verdict, which may take an update back  # noqa: B018
    largest = 0.0
    for shard in map(ShardName, pipe.model_state.owned_by(pipe.process.rank).gradients):
        wanted = shard.part_of(own.get_parameter(shard.tensor))
        largest = max(largest, error(pipe.parameter(shard), wanted))
    return largest


def gradients(case: dict[str, Any], own: Model, whole: dict[str, torch.Tensor]) -> float:
    """The largest error of this process's gradients; the rows of ``whole`` are all replicas'."""
    options, device = case["options"], whole["ids"].device
    replicas, lanes = options.get("replicas", 1), case.get("lanes", 1)
    expected = eager_gradients(own, whole, replicas * options["microbatches"])
    if lanes > 1:
        own = parallelized(own, options["ranks"], lanes)
    pipe = fxpipe.compile(own, batch(2, device), effort=0.1, timeout=PATIENCE, **options)
    rows = {name: t.chunk(replicas)[pipe.replica] for name, t in whole.items()}
    pipe.step(of_one_gpu(pipe, rows) if case.get("batch") == "one" else rows)
    largest = 0.0
    for shard in map(ShardName, pipe.model_state.owned_by(pipe.process.rank).gradients):
        wanted = of_this_lane(expected[shard.tensor], own.get_parameter(shard.tensor))
        largest = max(largest, error(pipe.parameter(shard).grad, shard.part_of(wanted)))
    return largest


def main() -> None:
    case, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    options, device = case["options"], default_device()
    in_full_precision()
    strictly()
    if case["nccl"] == "apart":
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=PATIENCE)
    if case.get("bytes") and is_accelerator(device):
        torch.cuda.set_per_process_memory_fraction(case["bytes"] / memory_size(device))
    own = model(device)
    microbatches = options["microbatches"]
    whole = batch(2 * microbatches * options.get("replicas", 1), device)
    if case.get("train"):
        pipe = fxpipe.compile(own, batch(2, device), effort=0.1, timeout=PATIENCE, **options)
        found = train(pipe, whole, case["train"])
        if pipe.process.rank == 0:
            result.write_text(json.dumps(found))
        return
    if case.get("post"):
        pipe = fxpipe.compile(copy.deepcopy(own), batch(2, device), effort=0.1, timeout=PATIENCE, **options)
        largest = clipped(pipe, own, whole, case["post"])
    else:
        largest = gradients(case, own, whole)
    total = torch.tensor([largest], dtype=torch.float64)
    process = Process.join(device)
    dist.all_reduce(total, dist.ReduceOp.MAX, process.control)
    if process.rank == 0:
        result.write_text(json.dumps({"error": total.item(), "backend": process.backend(device)}))


if __name__ == "__main__":
    main()
