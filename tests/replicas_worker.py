"""Several replicas of a pipeline, under torchrun, on the rows of one batch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from zoo import EFFORT, LENGTH, WIDTH, WORDS, Block, captured_once, tokens

import fxpipe

RANKS, REPLICAS, MICROBATCHES, ROWS, STEPS = 2, 2, 2, 2, 3
OPTIONS = {"lr": 1e-2, "clip_grad_norm": 0.5}


class Tied(nn.Module):
    """A language model with dropout, whose head is its embedding; the last row of a batch is half ignored."""

    def __init__(self, words: int = WORDS, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))  # no rows to divide

    def logits(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x * self.scale)

    def forward(self, ids, labels):
        return F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten())


class Counted(Tied):
    """Gives the sum and the number of its terms, which differs from microbatch to microbatch."""

    def forward(self, ids, labels):
        labels = torch.where(labels % 3 == 0, -100, labels)
        total = F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return total, (labels != -100).sum()


def as_returned(output, batch):
    return output


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__(10 * WORDS)
        self.head = nn.Linear(WIDTH, 10 * WORDS, bias=False)


class Normed(nn.Module):
    """Batch norm, whose running values are state that each replica would change in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(LENGTH, 8, 3, padding=1, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()


class Even(nn.Module):
    """Layers of one size: with four stages a rank, two that are whole at a time are half of it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)])

    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()


class Frozen(Tied):
    """Trains biases, norms and the scale; the table is frozen, and tied over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() < 2)


class Adapted(nn.Module):
    """Frozen layers of one size with adapters of low rank; the first two have none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]).requires_grad_(False)
        self.down = nn.ModuleList([nn.Linear(32, 2, bias=False) for _ in range(6)])
        self.up = nn.ModuleList([nn.Linear(2, 32, bias=False) for _ in range(6)])

    def forward(self, x, y):
        for layer, down, up in zip(
            self.layers, (None, None, *self.down), (None, None, *self.up), strict=True
        ):
            x = torch.tanh(layer(x) if down is None else layer(x) + up(down(x)))
        return (x - y).square().mean()


def vectors(rows: int, width: int = 32) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, width), "y": torch.randn(rows, width)}


def numbers(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, LENGTH, WIDTH), "y": torch.randn(rows, 4)}


@dataclass(frozen=True)
class Case:
    """``adds``: whether gradients of two steps are added up before the first update."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]] = tokens
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    adds: bool = False

    def made(self) -> nn.Module:
        torch.manual_seed(7)
        return self.model().to(self.dtype)

    def batches(self) -> list[dict[str, torch.Tensor]]:
        torch.manual_seed(11)
        found = [self.batch(ROWS * MICROBATCHES * REPLICAS) for _ in range(STEPS)]
        return [{n: x.to(self.dtype) if x.is_floating_point() else x for n, x in b.items()} for b in found]

    def compiled(self, model: nn.Module, replicas: int) -> fxpipe.Pipeline:
        example = {name: x[:ROWS] for name, x in self.batches()[0].items()}
        options = {"ranks": RANKS, "schedule": "zb-h1", "effort": EFFORT, **self.options}
        microbatches = MICROBATCHES * REPLICAS // replicas
        with captured_once(self.model, self.batch, self.dtype, microbatches):
            return fxpipe.compile(model, example, replicas=replicas, microbatches=microbatches, **options)


#: Whole parameters for the step would break the limit.
EACH_USE, FROZEN_EACH_USE = "parameters, each use", "parameters, frozen, each use"
HALF = {"grad_dtype": torch.float32}
MUON = {"groups": [{"params": ["blocks.*er.weight"], "class": torch.optim.Muon, "lr": 1e-3}]}
COUNTS = {"loss_fn": as_returned, "schedule": "1f1b"}
CASES = {
    "plain": Case(Tied),
    "optimizer": Case(Tied, options={"shard": "optimizer"}),
    "gradients": Case(Tied, options={"shard": "gradients"}),
    "parameters": Case(Tied, options={"shard": "parameters"}),
    "counts": Case(Counted, options=COUNTS, adds=True),
    "counts, optimizer": Case(Counted, options={"shard": "optimizer", **COUNTS}, adds=True),
    "counts, gradients": Case(Counted, options={"shard": "gradients", **COUNTS}, adds=True),
    "counts, parameters": Case(Counted, options={"shard": "parameters", **COUNTS}, adds=True),
    "undivided, optimizer": Case(Tied, options={"shard": "optimizer", "undivided": ["blocks.*er.weight"]},
                                 optimizer=MUON),
    "undivided, parameters": Case(Tied, options={"shard": "parameters", "undivided": ["*"]}, optimizer=MUON),
    "parameters, zb-v": Case(Untied, options={"schedule": "zb-v", "shard": "parameters",
                                              "vocab_parallel": True}),
    "parameters, half": Case(Tied, options={"shard": "parameters", **HALF}, dtype=torch.bfloat16,
                             optimizer={"master_weights": True}),
    "parameters, evaluation": Case(Normed, numbers, options={"shard": "parameters", "evaluation": True}),
    EACH_USE: Case(Even, vectors, options={"shard": "parameters", "schedule": "interleaved",
                                           "stages_per_rank": 4, "memory_limit": 92_000,
                                           "split_points": [f"layers.{k}" for k in range(1, 8)]}),
    "parameters, frozen": Case(Frozen, options={"shard": "parameters", "evaluation": True}),
    FROZEN_EACH_USE: Case(Adapted, vectors, options={"shard": "parameters", "schedule": "interleaved",
                                                     "stages_per_rank": 4, "memory_limit": 60_000,
                                                     "split_points": [f"layers.{k}" for k in range(1, 8)]}),
    "vocabulary": Case(Untied, options={"vocab_parallel": True, "shard": "optimizer"}),
    "recomputed": Case(Tied, options={"schedule": "interleaved", "recompute": "norms", "offload": 0.5}),
    "half": Case(Tied, options={"shard": "optimizer", **HALF}, dtype=torch.bfloat16,
                 optimizer={"master_weights": True}),
    "batch norm": Case(Normed, numbers, options={"evaluation": True}),
}  # fmt: skip


def rows_of(batch: dict[str, torch.Tensor], pipe: fxpipe.Pipeline) -> dict[str, torch.Tensor]:
    size = ROWS * MICROBATCHES * REPLICAS // pipe.replicas
    return {name: x[pipe.replica * size : (pipe.replica + 1) * size] for name, x in batch.items()}


def trained(case: Case, pipe: fxpipe.Pipeline) -> dict[str, torch.Tensor]:
    """The losses and norms of some steps, and the state after them."""
    optimizer = pipe.optimizer(torch.optim.AdamW, **OPTIONS, **case.optimizer)
    found: dict[str, torch.Tensor] = {}
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step, batch in enumerate(case.batches()):
        found[f"loss {step}"] = pipe.step(rows_of(batch, pipe))
        if case.model is Normed and step == 0:
            found["first mean"] = pipe.full_state_dict(rank=None)["layers.1.running_mean"]
        if case.adds and step == 0:
            continue
        optimizer.step()
        found[f"norm {step}"] = optimizer.last_norm
        if step % 2 == 1:  # what a script has of a gradient that is set to None stays
            kept = [(p.grad, p.grad.clone()) for p in pipe.parameters.values() if p.grad is not None]
        optimizer.zero_grad(set_to_none=step % 2 == 1)
    assert kept
    assert all(grad.equal(before) for grad, before in kept)
    if pipe.replicas > 1 and pipe.plan.shard == "parameters":
        whole = sum(
            pipe.plan.layouts[name].elements for name in pipe.plan.tensors[pipe.process.rank].parameters
        )
        # Whole tensors are no even shares.
        share = 0.75 if pipe.plan.undivided else 0.6
        owned = sum(p.numel() for p in pipe.parameters.values())
        assert owned < share * whole, owned / whole
    if pipe.evaluation is not None:
        found["evaluated"] = pipe.evaluate(rows_of(case.batches()[0], pipe))
    pipe.check_alike()
    return found | pipe.full_state_dict(rank=None)


def train(cases: list[str], directory: Path) -> None:
    """Train each case; each process writes what it has."""
    for name in cases:
        case = CASES[name]
        pipe = case.compiled(case.made(), REPLICAS)
        assert pipe.plan.step.has_count == (case.model is Counted)
        assert (name in (EACH_USE, FROZEN_EACH_USE)) == any(
            exchange.per_use for exchange in pipe.plan.costs.exchanges
        )
        found = trained(case, pipe)
        assert pipe.process is not None
        save_file({n: x.clone() for n, x in found.items()}, directory / f"{name} {pipe.process.world_rank}")


WIDE = 128
WHOLE = 4 * 8 * (WIDE + 1) * WIDE
#: Bytes between steps with AdamW, relative to those of all parameters, on each of two replicas.
RESIDENT = {
    "": 1 + 1 + 2,
    "optimizer": 1 + 1 + 1,
    "gradients": 1 + 1 / 2 + 1,
    "parameters": 1 / 2 + 1 / 2 + 1,
}


def measure_resident(levels: list[str], on_lanes: bool) -> None:
    """Compare the bytes of all tensors behind an update, on one of two processes, with what is documented.
    on_lanes: of two lanes of one replica, which divide sequences."""
    for level in levels:
        earlier = tensors_here()  # which are kept, so that no new tensor has their memory
        found = resident(level, on_lanes) - bytes_of(earlier)
        assert RESIDENT[level] <= found / WHOLE < RESIDENT[level] + 0.2, (level, found / WHOLE)


def resident(level: str, on_lanes: bool) -> int:
    """The bytes of all tensors of this process behind two updates of a new model."""
    torch.manual_seed(3)
    model, batch = Even(WIDE), vectors(4, WIDE)
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "effort": EFFORT}
    if on_lanes:
        options["ranks"] = mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "cp"))
        batch = {name: x.view(4, 1, WIDE).expand(4, 2, WIDE) for name, x in batch.items()}
        parallelize_module(model, mesh["cp"], fxpipe.ContextParallel({"x": 1, "y": 1}))
    example = {name: x[:2] for name, x in batch.items()}
    with contextlib.nullcontext() if on_lanes else captured_once("wide"):
        pipe = fxpipe.compile(model, example, shard=level or None, **options)
    del model
    optimizer = pipe.optimizer(torch.optim.AdamW)
    for _ in range(2):
        pipe.step(batch)
        optimizer.step()
        optimizer.zero_grad()
    return bytes_of(tensors_here())


def tensors_here() -> list[torch.Tensor]:
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter) and x.device.type == "cpu"]


def bytes_of(tensors: list[torch.Tensor]) -> int:
    memory = {x.untyped_storage() for x in tensors if x.layout is torch.strided}
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def of_one_rank(case: Case) -> Case:
    """The case on one rank, which divides nothing, with as many microbatches as all replicas have."""
    of_model = {key: x for key, x in case.options.items() if key in ("evaluation", "grad_dtype", "loss_fn")}
    return replace(case, options={"ranks": 1, "schedule": "1f1b", **of_model})


def trained_on_one_rank(case: Case) -> dict[str, torch.Tensor]:
    return trained(case, case.compiled(case.made(), 1))
