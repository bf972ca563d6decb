"""Published training runs beside what fxpipe predicts for them: throughput, utilization, memory, and the gain of
one schedule over another.

``published.toml`` has the runs with their sources.  The models are built on the meta device, and the devices are
those of the table of data sheets: nothing is measured, and nothing is fitted to the runs.

    python benchmarks/published.py --output benchmarks/results/published.txt
    python benchmarks/published.py --only zero-bubble "split"     groups by name or source, or runs by name
"""

from __future__ import annotations

import argparse
import time
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import ROOT, Report
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxpipe
from fxpipe.cost.known_devices import peak_rate
from fxpipe.plan.memory import rank_memory

RUNS = ROOT / "benchmarks" / "published.toml"
RATIO, ABSOLUTE = 0.15, 0.20  # how far a gain, and a rate, may be from the published one
COMPILE = (  # options of fxpipe.compile that the file may have
    "ranks", "replicas", "microbatches", "shard", "schedule", "stages_per_rank", "validation", "backend", "recompute",
    "offload", "optimizer_bytes", "vocab_parallel", "ranks_per_machine",
)  # fmt: skip
MODEL = ("layers", "width", "heads", "kv_heads", "inner", "vocabulary", "length", "llama", "bias", "dropout", "matrices")


# -- the models --------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Tokens to logits.  ``llama``: RMSNorm, rotary positions, SwiGLU, no biases; else as GPT-2.

    ``matrices``: attention as products and a softmax, whose matrices are kept, instead of one kernel.
    ``checkpoint``: "selective": as torchtitan's policy for single ops, a layer computes again what is not a
    product, attention, and every second product.
    """

    def __init__(
        self, *, layers: int, width: int, heads: int, vocabulary: int, length: int, kv_heads: int | None = None,
        inner: int | None = None, llama: bool = False, bias: bool = True, dropout: float = 0.0, matrices: bool = False, checkpoint: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = None if llama else nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        parts = (width, heads, kv_heads or heads, inner or 4 * width, length, llama, bias and not llama, dropout)
        self.layers = nn.ModuleList(Layer(*parts, matrices) for _ in range(layers))
        self.norm = norm_of(width, llama, bias)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpoint = checkpoint

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = self.drop(x)
        for layer in self.layers:
            if self.checkpoint:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=partial(selective_contexts))
            else:
                x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Layer(nn.Module):
    def __init__(
        self, width: int, heads: int, kv_heads: int, inner: int, length: int, llama: bool, bias: bool, dropout: float,
        matrices: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first, self.second = norm_of(width, llama, bias), norm_of(width, llama, bias)
        self.size = width // heads
        self.parts = (width, kv_heads * self.size, kv_heads * self.size)
        self.qkv = nn.Linear(width, sum(self.parts), bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, 2 * inner if llama else inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.shared, self.llama = heads // kv_heads, llama
        self.drop, self.matrices = nn.Dropout(dropout), matrices
        if matrices:
            self.register_buffer("later", torch.zeros(length, length, dtype=torch.bool))
        if llama:
            self.register_buffer("cos", torch.zeros(length, self.size, dtype=torch.float32))
            self.register_buffer("sin", torch.zeros(length, self.size, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads_of(part) for part in self.qkv(self.first(x)).split(self.parts, -1))
        if self.llama:
            q, k = self.turned(q), self.turned(k)
        if self.shared > 1:
            k, v = k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1)
        if self.matrices:
            scores = (q @ k.transpose(-2, -1)) * self.size**-0.5
            mixed = self.drop(scores.masked_fill(self.later, -1e4).softmax(-1)) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        up = self.up(self.second(x))
        gate, linear = up.chunk(2, -1) if self.llama else (up, None)
        inner = F.gelu(gate, approximate="tanh") if linear is None else F.silu(gate) * linear
        result: Tensor = x + self.drop(self.down(inner))
        return result

    def heads_of(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def turned(self, x: Tensor) -> Tensor:
        """With rotary positions, in single precision."""
        single = x.float()
        left, right = single.chunk(2, -1)
        return (single * self.cos + torch.cat((-right, left), -1) * self.sin).to(x.dtype)


def norm_of(width: int, llama: bool, bias: bool) -> nn.Module:
    return nn.RMSNorm(width) if llama else nn.LayerNorm(width, bias=bias)


def loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def selective_contexts() -> Any:
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    counts = {True: 0, False: 0}

    def policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        if op in products:
            counts[context.is_recompute] += 1
            kept = counts[context.is_recompute] % 2 == 1
        else:
            kept = "attention" in str(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)


# -- the arithmetic ----------------------------------------------------------------------------------------


def flops_of_token(model: Mapping[str, Any], products: int) -> float:
    """FLOPs of a token as the sources count them: six for each parameter of a product, and attention as if each
    position saw all others."""
    return float(6 * products + 12 * model["layers"] * model["width"] * model["length"])


def in_products(decoder: nn.Module) -> int:
    """The parameters that are factors of products: all but the tables that are looked up."""
    tables = [p for m in decoder.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    return sum(p.numel() for p in decoder.parameters()) - sum(p.numel() for p in tables)


def layers_of_stages(layers: int, stages: int, ends: int) -> list[int]:
    """The layers of each stage, ``ends`` fewer in the first and the last one."""
    most, rest = divmod(layers + 2 * ends, stages)
    if rest:
        raise ValueError(f"{layers} layers in {stages} stages")
    return [most - ends * (stage in (0, stages - 1)) for stage in range(stages)]


def split_points(counts: Sequence[int]) -> list[str]:
    """The modules with which the second and later stages begin."""
    begins = [sum(counts[:stage]) for stage in range(1, len(counts))]
    return [f"layers.{begin}" if begin < sum(counts) else "norm" for begin in begins]


def is_right(gain: float, published: float) -> bool:
    """Whether both are faster, or both slower."""
    return (gain > 1) == (published > 1)


def within(ratio: float, share: float) -> bool:
    return abs(ratio - 1) <= share


# -- predictions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """Of a run: tokens a second and device, published too; utilization by ``flops_of_token``; GB."""

    group: Mapping[str, Any]
    run: Mapping[str, Any]
    rate: float
    published: float
    mfu: float
    memory: float
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.group['name']}: {self.run['name']}"

    @property
    def ratio(self) -> float:
        return self.rate / self.published

    @property
    def published_memory(self) -> float | None:
        return self.run["memory"] * (2**30 / 1e9 if self.group.get("GiB") else 1) if "memory" in self.run else None


def predicted(runs: Mapping[str, Any], whole: Mapping[str, Any], run: Mapping[str, Any]) -> Predicted:
    """whole: the run's group, with what holds for its source."""
    begun = time.perf_counter()
    given = {"ranks": 1, "replicas": 1, "microbatches": 1, "schedule": "1f1b", **whole, **run}
    shape = {k: v for k, v in {**runs["model"][given["model"]], **run}.items() if k in MODEL}
    with torch.device("meta"):
        model = Decoder(**shape, checkpoint=given.get("checkpoint", "")).bfloat16()
        ids = torch.zeros((given["rows"], shape["length"]), dtype=torch.long)
    options = {name: given[name] for name in COMPILE if name in given}
    if "offload" in options:  # two devices of such a machine share a switch
        options["offload"] = fxpipe.Offload(options["offload"], ranks_per_link=2)
    pipe = fxpipe.compile(
        model, {"tokens": ids, "labels": ids}, loss_fn=loss, costs=given["device"], check=False,
        grad_dtype=getattr(torch, given["grad_dtype"]) if "grad_dtype" in given else None,
        split_points=cut_of(shape["layers"], given), **options,
    )  # fmt: skip
    timeline, step = pipe.simulate(), pipe.simulate_steps()
    ranks = rank_memory(pipe.plan, timeline.peak_memory)
    memory = max(timeline.peak_memory) if given.get("activations") else max(rank.peak for rank in ranks)
    tokens = given["rows"] * shape["length"] * given["microbatches"] / given["ranks"]
    flops = flops_of_token(shape, in_products(model)) / peak_rate(given["device"], "bfloat16")
    rate = tokens / step.period
    published = given["mfu"] / 100 / flops if "mfu" in given else given["rate"]
    published *= shape["length"] if given.get("samples") else 1
    return Predicted(whole, run, rate, published, rate * flops, memory / 1e9, time.perf_counter() - begun)


def cut_of(layers: int, given: Mapping[str, Any]) -> list[str] | None:
    if given["ranks"] == 1:
        return None
    stages = given["ranks"] * given.get("stages_per_rank", 2 if "v" in given["schedule"].split("-") else 1)
    ends = given.get("ends", 0)
    return None if (layers + 2 * ends) % stages else split_points(layers_of_stages(layers, stages, ends))


# -- the tables --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups, sources and runs with such names")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    runs, begun = tomllib.loads(RUNS.read_text()), time.perf_counter()
    report, found = Report("Published training runs, and predicted"), list[list[Predicted]]()
    for group in runs["group"]:
        whole = {**runs["source"][group["source"]], **group}
        wanted = [
            run for run in group["runs"]
            if not options.only or any(name == group["source"] or name in f"{group['name']}: {run['name']}" for name in options.only)
        ]
        rows = [predicted(runs, whole, run) for run in wanted]
        for row in rows:
            print(f"{row.name}: {row.ratio:.2f}, {row.seconds:.0f} s", flush=True)
        found.append(rows)
    sources = {group["source"] for group in (row.group for rows in found for row in rows)}
    for name in sources:
        report.line(f"\n{name}: {runs['source'][name]['where']}. {runs['source'][name]['assumed']}")
    tables(report, found)
    report.line(f"\nAll in {time.perf_counter() - begun:.0f} seconds.")
    report.save(options.output)


def tables(report: Report, found: Sequence[Sequence[Predicted]]) -> None:
    report.line("\nThroughput of a device, and memory of the fullest one\n")
    rows, judged = [], []
    for row in (row for group in found for row in group):
        absolute = row.group.get("judged", True)
        unit = row.group["length"] if False else 1
        memory = row.published_memory
        rows.append([
            row.name, f"{row.published / unit:.0f}", f"{row.rate:.0f}", f"{row.ratio:.2f}" if absolute else "",
            f"{100 * row.mfu / row.ratio:.1f}", f"{100 * row.mfu:.1f}",
            "" if not absolute else "yes" if within(row.ratio, ABSOLUTE) else "no",
            "" if memory is None else f"{memory:.1f}", "" if memory is None else f"{row.memory:.1f}",
            "" if memory is None else f"{row.memory / memory:.2f}",
        ])  # fmt: skip
        judged += [within(row.ratio, ABSOLUTE)] * absolute
    report.table(
        ["tokens a second and device", "published", "predicted", "ratio", "MFU %, published", "predicted", "within 20%",
         "GB, published", "predicted", "ratio"], rows)  # fmt: skip
    report.line("\nGains over the first run of a group\n")
    rows, signs, near = [], [], []
    for first, *others in (group for group in found if group and not group[0].group.get("apart")):
        for row in others:
            gain, published = row.rate / first.rate, row.published / first.published
            signs.append(is_right(gain, published))
            near.append(within(gain / published, RATIO))
            cells = [f"{published:.3f}", f"{gain:.3f}", f"{gain / published:.2f}", *("yes" if x else "no" for x in (signs[-1], near[-1]))]
            both = None not in (first.published_memory, row.published_memory)
            memory = [f"{row.published_memory / first.published_memory:.2f}", f"{row.memory / first.memory:.2f}"] if both else ["", ""]
            rows.append([row.name, *cells, *memory])
    report.table(["gain", "published", "predicted", "ratio", "sign right", "within 15%", "memory, published", "predicted"], rows)
    report.line(f"\nGains: {sum(signs)} of {len(signs)} signs right, {sum(near)} of {len(near)} within {RATIO:.0%}")
    report.line(f"MFU: {sum(judged)} of {len(judged)} within {ABSOLUTE:.0%}")


if __name__ == "__main__":
    main()
