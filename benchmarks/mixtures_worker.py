"""One run of ``mixtures.py``: a model on all meshes, and in plain torch."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from worker import Worker

import fxpipe
from fxpipe.integrations.transformers import parallelize

ROWS, LENGTH, WORDS, MICROBATCHES, STEPS, HALF = 2, 8, 64, 4, 4, 2
OPTIONS: dict[str, Any] = {"lr": 1e-3, "clip_grad_norm": 1.0}
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 32, "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
Tokens = Literal["whole", "divided", "sequences"]


class Experts(nn.Module):
    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, inner) / 4)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("tw,ewi->eti", x, self.up)
        counts = x.new_zeros(len(x), len(self.up)).scatter_add(1, index, weights)
        return torch.einsum("te,eti,eiw->tw", counts, F.silu(each), self.down)


class Balanced(nn.Module):
    """A shared expert and a router whose bias moves towards experts that get few tokens, with a z-loss."""

    def __init__(self, width: int = 16, experts: int = 8) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, experts), Experts(experts, width, 8)
        self.shared, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.norm(x).flatten(0, 1)
        logits = self.router(rows)
        scores = logits.sigmoid()
        index = (scores + self.bias).topk(2).indices
        weights = scores.gather(1, index)
        loads = F.one_hot(index, len(self.bias)).sum((0, 1)).to(x.dtype)
        self.bias += 0.01 * (loads.mean() - loads).sign()
        mixed = self.experts(rows, index, weights / weights.sum(-1, keepdim=True))
        return x + (mixed + self.shared(rows)).view_as(x), logits.logsumexp(-1).square().mean()


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS, bias=False)
        self.blocks = nn.ModuleList([Balanced() for _ in range(4)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, extra = self.table(input_ids), torch.zeros(())
        for block in self.blocks:
            x, z = block(x)
            extra = extra + 1e-3 * z
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + extra


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "balanced":
        return Own()
    config: Any = {
        "mixtral": lambda: transformers.MixtralConfig(
            **SMALL, num_local_experts=4, output_router_logits=True
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **SMALL, **EXPERTS, num_experts=4, head_dim=4, decoder_sparse_step=1, output_router_logits=True
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(
            **SMALL, **EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1,
            q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **SMALL, num_local_experts=4, num_experts_per_tok=2, head_dim=4, sliding_window=4,
            output_router_logits=True,
        ),
    }[name]()  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("batched_mm")
    return model.double()


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    ids = [torch.randint(0, WORDS, (ROWS * MICROBATCHES, LENGTH)) for _ in range(STEPS)]
    return [{"input_ids": x, "labels": x} for x in ids]


def loss_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def eager(name: str) -> dict[str, torch.Tensor]:
    model, found = made(name), dict[str, torch.Tensor]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS["lr"])
    for step, batch in enumerate(batches()):
        found[f"loss {step}"] = torch.zeros(())
        for k in range(MICROBATCHES):
            loss = loss_of(model, {n: x[ROWS * k :][:ROWS] for n, x in batch.items()}) / MICROBATCHES
            loss.backward()
            found[f"loss {step}"] += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIONS["clip_grad_norm"])
        found[f"norm {step}"] = norm.detach()
        optimizer.step()
        optimizer.zero_grad()
    return found | {n: x.detach() for n, x in model.state_dict().items()}


class Mesh:
    """A model on one mesh."""

    def __init__(self, name: str, tokens: Tokens, mesh: Any) -> None:
        (replicas, ranks, lanes), shard, options = mesh
        model = made(name)
        sizes = (replicas, ranks, lanes)
        devices = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))
        style = fxpipe.ExpertParallel(tokens="whole" if tokens == "whole" else "divided")
        context = {"input_ids": 1} if tokens == "sequences" else None
        if name == "balanced":
            parallelize_module(model, devices["tp"], {"blocks.*.experts": style})
            if context:
                parallelize_module(model, devices["tp"], fxpipe.ContextParallel(context))
        else:
            parallelize(model, devices["tp"], style, context=context)
        example = {n: x[:ROWS] for n, x in batches()[0].items()}
        given = {"schedule": "1f1b", "effort": 0.05, "check": False} | options
        self.pipe = fxpipe.compile(
            model, example, ranks=devices, shard=shard, microbatches=MICROBATCHES // replicas, **given
        )
        self.optimizer = self.pipe.optimizer(torch.optim.AdamW, **OPTIONS)
        self.found: dict[str, torch.Tensor] = {}

    def until(self, steps: int) -> None:
        pipe, size = self.pipe, ROWS * MICROBATCHES // self.pipe.replicas
        while pipe.step_number < steps:
            step = pipe.step_number
            rows = {n: x[pipe.replica * size :][:size] for n, x in batches()[step].items()}
            self.found[f"loss {step}"] = pipe.step(rows)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.found[f"norm {step}"] = torch.as_tensor(self.optimizer.last_norm)

    def error(self, expected: Mapping[str, torch.Tensor]) -> float:
        self.until(STEPS)
        found = self.found | self.pipe.full_state_dict(rank=None)
        return max(
            float((x - expected[n]).abs().max() / (expected[n].abs().max() + 1e-300))
            for n, x in found.items()
            if x is not None
        )


def main() -> None:
    warnings.simplefilter("ignore")
    worker = Worker.join()
    torch.set_default_dtype(torch.float64)
    name, results = worker.case["model"], []
    expected = eager(name)
    meshes = [mesh for mesh in worker.case["meshes"] if name != "balanced" or mesh[0][0] == 1]
    folder = [tempfile.mkdtemp()] if worker.rank == 0 else [""]
    dist.broadcast_object_list(folder)
    halves: list[Path] = []
    tokens: Tokens
    for tokens in worker.case["tokens"]:
        for mesh in (mesh for mesh in meshes if tokens != "whole" or "parts" not in mesh[2]):
            run = Mesh(name, tokens, mesh)
            run.until(HALF)
            halves.append(Path(folder[0]) / f"{tokens} {len(halves)}")
            with fxpipe.Checkpointer(run.pipe, halves[-1], optimizer=run.optimizer) as checkpoints:
                checkpoints.save()
            error = run.error(expected)
            again = Mesh(name, tokens, mesh)
            with fxpipe.Checkpointer(again.pipe, halves[-2:][0], optimizer=again.optimizer) as checkpoints:
                assert checkpoints.resume()
            results.append((tokens, mesh, error, again.error(expected)))
    worker.finish(results)


if __name__ == "__main__":
    main()
