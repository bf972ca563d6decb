"""One contender of ``replicas.py``, part torch: replicas of a pipeline train a GPT-2 for some steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpt2_worker import LAYERS, VOCABULARY, Part, build, example
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_pipeline import SCHEDULES, TorchPipeline
from worker import Worker, resident, start_counting_memory

import fxpipe

RANKS, REPLICAS, LEARNING_RATE = 2, 2, 1e-4
Contender = tuple[Callable[[], float | None], Callable[[], None]]
"""A step with its update, and what is done between steps."""


def fxpipe_contender(worker: Worker) -> Contender:
    case = worker.case
    pipe = fxpipe.compile(
        build(),
        example(),
        ranks=RANKS,
        replicas=REPLICAS,
        microbatches=case["microbatches"],
        schedule=case["schedule"],
        shard=case["level"] or None,
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, clip_grad_norm=1.0)
    batch = example(case["microbatches"])

    def step() -> float:
        loss = float(pipe.step(batch))
        optimizer.step()
        return loss

    return step, optimizer.zero_grad


def torch_contender(worker: Worker) -> Contender:
    """Clips by the norm of its own rank: torch's pipelines leave the rest to the user."""
    case = worker.case
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "pp"))
    name, microbatches = case["schedule"], case["microbatches"]
    model, batch = build(), example(microbatches)
    each = LAYERS // (RANKS * SCHEDULES[name].stages_per_rank)

    def part(stage: int) -> nn.Module:
        return divided(Part(model, range(stage * each, (stage + 1) * each)), case["level"], mesh["dp"])

    def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)

    rank = mesh.get_local_rank("pp")
    pipeline = TorchPipeline(name, rank, RANKS, microbatches, part, loss_fn, mesh.get_group("pp"))
    optimizer = torch.optim.AdamW(pipeline.parts.parameters(), lr=LEARNING_RATE)

    def step() -> float | None:
        loss = pipeline.step(batch["input_ids"], batch["labels"])
        nn.utils.clip_grad_norm_(pipeline.parts.parameters(), 1.0)
        optimizer.step()
        return loss

    return step, partial(optimizer.zero_grad, set_to_none=False)


def divided(part: nn.Module, level: str, mesh: DeviceMesh) -> nn.Module:
    if level == "DDP":
        return DistributedDataParallel(part, process_group=mesh.get_group())
    for block in part.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(part, mesh=mesh, reshard_after_forward=False)


CONTENDERS = {"fxpipe": fxpipe_contender, "torch": torch_contender}


def main() -> None:
    worker = Worker.join()
    before = start_counting_memory()
    step, reset = CONTENDERS[worker.case["contender"]](worker)
    seconds, loss = worker.time_steps(step, reset, 1, worker.case["steps"])
    memory = worker.gather((before, resident()))
    worker.finish({"seconds": seconds, "loss": loss, "peak": [peak - first for first, peak in memory]})


if __name__ == "__main__":
    main()
