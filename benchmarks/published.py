"""Published training runs beside what fxpipe predicts for them: throughput, utilization, memory, and what one
setting gains over another.

``published.toml`` has the runs with their sources.  The models are built on the meta device, and the devices
are those of the table of data sheets: nothing is measured, and nothing is fitted to the runs.

    python benchmarks/published.py --output benchmarks/results/published.txt
    python benchmarks/published.py --only vocabulary "ZB-2p"     sources, and parts of names
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import ROOT, Report
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxpipe
from fxpipe.cost.devices.device_file import write_device
from fxpipe.cost.devices.known_devices import data_sheets, device_named, peak_rate
from fxpipe.plan.memory import rank_memory

RUNS = ROOT / "benchmarks" / "published.toml"
GAIN, RATE = 0.15, 0.20  # how far a gain, and a rate, may be from the published one
COMPILE = (  # options of fxpipe.compile that the file may have
    "ranks", "replicas", "microbatches", "shard", "schedule", "stages_per_rank", "validation", "backend",
    "recompute", "offload", "optimizer_bytes", "vocab_parallel", "ranks_per_machine",
)  # fmt: skip
MODEL = (
    "layers", "width", "heads", "kv_heads", "inner", "vocabulary", "length", "llama", "bias", "dropout",
    "matrices", "selective",
)  # fmt: skip


# -- the models --------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Tokens to logits.  ``llama``: RMSNorm, rotary positions, SwiGLU, no biases; else as GPT-2.

    ``matrices``: attention as products and a softmax, whose matrices are kept, instead of one kernel.
    ``selective``: layers keep attention and every second product, and recompute the rest, by torchtitan's
    policy, for which q, k, v and the two upper products are products of their own.
    """

    def __init__(
        self, *, layers: int, width: int, heads: int, vocabulary: int, length: int,
        kv_heads: int | None = None, inner: int | None = None, llama: bool = False, bias: bool = True,
        dropout: float = 0.0, matrices: bool = False, selective: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.selective = selective
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = None if llama else nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        parts = (width, heads, kv_heads or heads, inner or 4 * width, length, llama, bias and not llama)
        self.layers = nn.ModuleList(Layer(*parts, dropout, matrices, selective) for _ in range(layers))
        self.norm = norm_of(width, llama, bias)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        x = self.drop(x)
        for layer in self.layers:
            if self.selective:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=kept_of_layer)
            else:
                x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Layer(nn.Module):
    def __init__(
        self, width: int, heads: int, kv_heads: int, inner: int, length: int, llama: bool, bias: bool,
        dropout: float, matrices: bool, apart: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first, self.second = norm_of(width, llama, bias), norm_of(width, llama, bias)
        self.size, self.shared = width // heads, heads // kv_heads
        self.parts = (width, kv_heads * self.size, kv_heads * self.size)
        self.qkv = products(width, self.parts, bias, apart)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = products(width, (inner, inner) if llama else (inner,), bias, apart)
        self.down = nn.Linear(inner, width, bias=bias)
        self.drop, self.llama, self.matrices = nn.Dropout(dropout), llama, matrices
        if matrices:
            self.register_buffer("later", torch.zeros(length, length, dtype=torch.bool))
        if llama:
            self.register_buffer("cos", torch.zeros(length, self.size, dtype=torch.float32))
            self.register_buffer("sin", torch.zeros(length, self.size, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        projected = parts_of(self.qkv, self.first(x), self.parts)
        q, k, v = (one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in projected)
        if self.llama:
            q, k = self.turned(q), self.turned(k)
        if self.shared > 1:
            k, v = k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1)
        x = x + self.drop(self.out(self.mixed(q, k, v).transpose(1, 2).flatten(2)))
        gate, *linear = parts_of(self.up, self.second(x), (1, 1) if self.llama else (1,))
        inner = F.silu(gate) * linear[0] if linear else F.gelu(gate, approximate="tanh")
        result: Tensor = x + self.drop(self.down(inner))
        return result

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.matrices:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q @ k.transpose(-2, -1)) * self.size**-0.5
        result: Tensor = self.drop(scores.masked_fill(self.later, -1e4).softmax(-1)) @ v
        return result

    def turned(self, x: Tensor) -> Tensor:
        """With rotary positions, in single precision."""
        single = x.float()
        left, right = single.chunk(2, -1)
        return (single * self.cos + torch.cat((-right, left), -1) * self.sin).to(x.dtype)


def products(width: int, parts: Sequence[int], bias: bool, apart: bool) -> nn.Module:
    """One product, or one for each of its parts."""
    if apart:
        return nn.ModuleList(nn.Linear(width, part, bias=bias) for part in parts)
    return nn.Linear(width, sum(parts), bias=bias)


def parts_of(product: nn.Module, x: Tensor, parts: Sequence[int]) -> list[Tensor]:
    """Its parts, of these widths or of as many to a lane, which has its share of each."""
    if isinstance(product, nn.ModuleList):
        return [one(x) for one in product]
    whole = product(x)
    return [*whole.split([part * whole.shape[-1] // sum(parts) for part in parts], -1)]


def kept_of_layer() -> Any:
    """What torchtitan keeps of a layer with the option "op" of its selective checkpoints."""
    products = {False: 0, True: 0}  # of the forward, and of its repetition

    def policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        keeps = "scaled_dot_product" in str(op)
        if op is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def norm_of(width: int, llama: bool, bias: bool) -> nn.Module:
    return nn.RMSNorm(width) if llama else nn.LayerNorm(width, bias=bias)


def in_lanes(model: Decoder, lanes: Any) -> nn.Module:
    """The model with tensor and sequence parallelism, as Megatron-LM has them.

    Rows of q, k and v are not on the lanes of their heads: costs, not values, are those of Megatron-LM.
    """
    shares = Shard(1)
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=shares),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=shares),
        **{f"layers.*.{name}": SequenceParallel(use_local_output=True) for name in ("first", "second")},
        **{f"layers.*.{name}": ColwiseParallel(input_layouts=shares) for name in ("qkv", "up")},
        **{f"layers.*.{name}": RowwiseParallel(output_layouts=shares) for name in ("out", "down")},
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=shares, output_layouts=Replicate()),
    }
    return parallelize_module(model, lanes, plan)


def loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


# -- the arithmetic ----------------------------------------------------------------------------------------


def flops_of_token(shape: Mapping[str, Any], products: int) -> float:
    """FLOPs of a token as the sources count them: six for each parameter of a product, and attention as if
    each position saw all others."""
    return float(6 * products + 12 * shape["layers"] * shape["width"] * shape["length"])


def in_products(model: nn.Module) -> int:
    """The parameters that are factors of products: all but the tables that are looked up."""
    tables = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    return sum(parameter.numel() for parameter in model.parameters()) - tables


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


def same_sign(gain: float, published: float) -> bool:
    """Whether both are faster, or both slower."""
    return (gain > 1) == (published > 1)


def within(ratio: float, share: float) -> bool:
    return abs(ratio - 1) <= share


# -- predictions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """A run: tokens a second and device, as predicted and published; the predicted utilization by
    ``flops_of_token``; GB of the fullest device."""

    group: Mapping[str, Any]
    run: Mapping[str, Any]
    rate: float
    published: float
    mfu: float = 0.0
    memory: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.group['name']}: {self.run['name']}"

    @property
    def ratio(self) -> float:
        return self.rate / self.published

    @property
    def published_memory(self) -> float | None:
        unit = 2**30 / 1e9 if self.group.get("GiB") else 1.0
        return self.run["memory"] * unit if "memory" in self.run else None


def predicted(models: Mapping[str, Any], group: Mapping[str, Any], run: Mapping[str, Any]) -> Predicted:
    """group: with what holds for its source."""
    given = {"ranks": 1, "replicas": 1, "microbatches": 1, "schedule": "1f1b", **group, **run}
    if "model" not in given:
        return Predicted(group, run, 1 / seconds_of_equal_stages(given), given["mfu"])
    shape = {key: value for key, value in {**models[given["model"]], **run}.items() if key in MODEL}
    if given.get("each_layer"):
        given["stages_per_rank"] = shape["layers"]
    options = {name: given[name] for name in COMPILE if name in given}
    if "offload" in options:  # two devices of such a machine share a switch
        options["offload"] = fxpipe.Offload(options["offload"], ranks_per_link=2)
    if "grad_dtype" in given:
        options["grad_dtype"] = getattr(torch, given["grad_dtype"])
    with ExitStack() as stack:
        lanes = stack.enter_context(fxpipe.local_lanes(given["lanes"])) if "lanes" in given else None
        with torch.device("meta"):
            model = Decoder(**shape).bfloat16()
            ids = torch.zeros((given["rows"], shape["length"]), dtype=torch.long)
        flops = flops_of_token(shape, in_products(model))
        options |= {"costs": device_of(given, stack), "split_points": cut_of(shape["layers"], given)}
        options["check"] = False
        made, example = model if lanes is None else in_lanes(model, lanes), {"tokens": ids, "labels": ids}
        pipe = fxpipe.compile(made, example, loss_fn=loss, **options)
    timeline = pipe.simulate()
    peaks = [rank.peak for rank in rank_memory(pipe.plan, timeline.peak_memory)]
    memory = max(timeline.peak_memory if given.get("activations") else peaks)
    tokens = given["rows"] * shape["length"] * given["microbatches"] / given["ranks"] / given.get("lanes", 1)
    rate = tokens / pipe.simulate_steps().period
    whole = peak_rate(given["device"], "bfloat16")
    published = given["mfu"] / 100 * whole / flops if "mfu" in given else given["rate"]
    published *= shape["length"] if given.get("samples") else 1
    return Predicted(group, run, rate, published, rate * flops / whole, memory / 1e9)


def device_of(given: Mapping[str, Any], stack: ExitStack) -> str:
    """The device's name, or a file of it with the rates of the cluster's; the stack removes it."""
    if "rates" not in given:
        return str(given["device"])
    (sheet,) = (x for x in data_sheets() if given["device"] in (x.name, *x.also))
    device, rates = device_named(given["device"]), given["rates"]
    flops = {name: rate * rates["bfloat16"] / sheet.peak["bfloat16"] for name, rate in device.flops.items()}
    memory = device.memory_bandwidth * rates["memory"] / sheet.memory_bandwidth
    path = Path(stack.enter_context(TemporaryDirectory()), "device.json")
    write_device(path, replace(device, flops=flops, memory_bandwidth=memory), {})
    return str(path)


def cut_of(layers: int, given: Mapping[str, Any]) -> list[str] | None:
    """Where the stages begin, if the layers go into them evenly."""
    per_rank = 2 if given["schedule"] in ("zb-v", "v-half", "v-min") else 1
    stages, ends = given["ranks"] * given.get("stages_per_rank", per_rank), given.get("ends", 0)
    return None if (layers + 2 * ends) % stages else split_points(layers_of_stages(layers, stages, ends))


def seconds_of_equal_stages(given: Mapping[str, Any]) -> float:
    """A step of ranks whose forward, input and weight gradients take a second of each microbatch."""
    numbers = (
        "--ranks",
        given["ranks"],
        "--microbatches",
        given["microbatches"],
        "--schedule",
        given["schedule"],
    )
    times = ("--forward", 1, "--backward-input", 1, "--backward-weight", 1, "--json")
    command = [sys.executable, "-m", "fxpipe", "simulate", *map(str, (*numbers, *times))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["seconds"])


# -- the tables --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="runs of such sources and names")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    file, begun = tomllib.loads(RUNS.read_text()), time.perf_counter()
    report, found = Report("Published training runs, and predicted"), list[list[Predicted]]()
    for group in file["group"]:
        wanted = [run for run in group["runs"] if is_wanted(options.only, group, run)]
        whole = {**file["source"][group["source"]], **group}
        found.append([predicted(file["model"], whole, run) for run in wanted])
    for name in dict.fromkeys(row.group["source"] for rows in found for row in rows):
        source = file["source"][name]
        report.line(f"\n{name}: {source['where']}\n  {source['assumed'].strip()}")
    rates(report, [row for rows in found for row in rows if row.group.get("judged", True)])
    gains(report, found)
    report.line(f"\nAll in {time.perf_counter() - begun:.0f} seconds")
    report.save(options.output)


def is_wanted(only: Sequence[str] | None, group: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    name = f"{group['name']}: {run['name']}"
    return not only or any(one == group["source"] or one in name for one in only)


def rates(report: Report, found: Sequence[Predicted]) -> None:
    rows = []
    for one in found:
        row = [one.name, f"{one.published:.0f}", f"{one.rate:.0f}", f"{one.ratio:.2f}"]
        row += [f"{100 * one.mfu / one.ratio:.1f}%", f"{100 * one.mfu:.1f}%", _word(within(one.ratio, RATE))]
        memory = one.published_memory
        row += (
            ["", "", ""]
            if memory is None
            else [f"{memory:.1f}", f"{one.memory:.1f}", f"{one.memory / memory:.2f}"]
        )
        rows.append(row)
    report.line("\nTokens a second and device, their utilization, and GB of the fullest device\n")
    columns = [
        "",
        "published",
        "predicted",
        "ratio",
        "MFU",
        "predicted",
        f"in {RATE:.0%}",
        "GB",
        "predicted",
        "ratio",
    ]
    report.table(columns, rows)
    right = sum(within(one.ratio, RATE) for one in found)
    report.line(f"\nMFU: {right} of {len(found)} within {RATE:.0%}")


def gains(report: Report, found: Sequence[Sequence[Predicted]]) -> None:
    rows, right, near = [], 0, 0
    for group in found:
        by_name = {one.run["name"]: one for one in group}
        for one in group:
            base = by_name.get(one.run.get("against", one.group["runs"][0]["name"]))
            if base is None or base is one or one.group.get("apart"):
                continue
            gain, published = one.rate / base.rate, one.published / base.published
            right += same_sign(gain, published)
            near += within(gain / published, GAIN)
            row = [
                f"{one.name} ÷ {base.run['name']}",
                f"{published:.3f}",
                f"{gain:.3f}",
                f"{gain / published:.2f}",
            ]
            row += [_word(same_sign(gain, published)), _word(within(gain / published, GAIN))]
            memory, before = one.published_memory, base.published_memory
            known = memory is not None and before is not None
            rows.append(
                [
                    *row,
                    *([f"{memory / before:.2f}", f"{one.memory / base.memory:.2f}"] if known else ["", ""]),
                ]
            )
    report.line("\nWhat one setting gains over another: throughput, and memory of the fullest device\n")
    columns = ["", "published", "predicted", "ratio", "sign", f"in {GAIN:.0%}", "memory", "predicted"]
    report.table(columns, rows)
    report.line(f"\nGains: {right} of {len(rows)} signs right, {near} of {len(rows)} within {GAIN:.0%}")


def _word(right: bool) -> str:
    return "yes" if right else "no"


if __name__ == "__main__":
    main()
