"""Tokens a second of training steps on one GPU: eager PyTorch, torch.compile, and pipelines of several ranks.

Forward and backward of bfloat16 models of Hugging Face without dropout, no optimizer; with "AdamW" also
clipping and a fused update.  All ranks of a pipeline run on the one GPU, in one process: a row is the sum of
their work.  Eager and torch.compile run the same microbatches and add up their gradients.  A pipeline has
two rows, op by op and replayed (docs/replay.md), the second where the step, and the update, could be
replayed.  Each contender has a process of its own.  All prepare at the same time, then each is measured while
the others wait.

- ms: the median of the steps (``--steps``).  share: of torch.compile's tokens a second, with AdamW or
  without.
- TFLOP/s: of the model, causal attention counted once, no recomputation.  MFU: of the GPU's peak.
- peak: the most that is allocated in a step, with parameters and gradients, GB; of a replay what its graph
  keeps between steps, as reserved.
- kernels, busy: their number and the sum of their times in a step op by op, ms.
- other loss: |loss / eager's - 1|, or torch.compile's; of rows without AdamW.

    python benchmarks/gpu_speed.py --models llama-670m gpt2-124m --output benchmarks/results/gpu_speed.txt

``--cpu`` tries the script with tiny models, where nothing is replayed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import Report

MICROBATCHES = 8
UPDATES, RATE = ", AdamW", 1e-4


@dataclass(frozen=True)
class Shape:
    """A model: rows and tokens of a microbatch, and what its configuration takes."""

    family: str
    rows: int
    tokens: int
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    inner: int = 0
    groups: int = 0
    ranks: int = 4


SHAPES = {
    "gpt2-124m": Shape("gpt2", 4, 1024, 12, 768, 12, 50304, ranks=2),
    "gpt2-355m": Shape("gpt2", 4, 1024, 24, 1024, 16, 50304),
    "gpt2-1.5b": Shape("gpt2", 2, 1024, 48, 1600, 25, 50304),
    "llama-670m": Shape("llama", 1, 2048, 12, 2048, 16, 32000, 8192, 16),
    "llama-1b": Shape("llama", 1, 4096, 16, 2048, 32, 128256, 8192, 8),
    "llama-3b": Shape("llama", 1, 4096, 28, 3072, 24, 128256, 8192, 8),
    "llama-8b, 6 layers": Shape("llama", 1, 4096, 6, 4096, 32, 128256, 14336, 8),
}
TINY = {
    "rows": 1,
    "tokens": 32,
    "layers": 4,
    "hidden": 32,
    "heads": 2,
    "vocabulary": 64,
    "inner": 64,
    "groups": 2,
}
#: Name -> options of ``fxpipe.compile``; None for eager PyTorch and for torch.compile.
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "torch.compile": None,
    "1 rank": {"ranks": 1, "schedule": "1f1b"},
    "torch.compile, AdamW": None,
    "1 rank, AdamW": {"ranks": 1, "schedule": "1f1b"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v, split vocabulary": {"schedule": "zb-v", "vocab_parallel": "1-barrier"},
}


def model_of(shape: Shape, device: torch.device) -> torch.nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if shape.family == "gpt2":
        config = transformers.GPT2Config(
            n_layer=shape.layers,
            n_embd=shape.hidden,
            n_head=shape.heads,
            n_positions=shape.tokens,
            vocab_size=shape.vocabulary,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=shape.layers,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.groups,
            vocab_size=shape.vocabulary,
            max_position_embeddings=shape.tokens,
            use_cache=False,
        )
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(torch.bfloat16).train()


def flops_of(model: torch.nn.Module, shape: Shape) -> float:
    """The FLOPs of a step's forward and backward: a lookup has none, causal attention half of its scores."""
    multiplied = sum(p.numel() for p in model.parameters())
    if model.get_input_embeddings().weight is not model.get_output_embeddings().weight:
        multiplied -= model.get_input_embeddings().weight.numel()
    each = 6 * multiplied + 6 * shape.layers * shape.hidden * shape.tokens
    return each * shape.rows * shape.tokens * MICROBATCHES


def plain(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], rows: int, compiled: bool, updates: bool
) -> Callable[[], Any]:
    forward, is_gpu = torch.compile(model) if compiled else model, batch["labels"].is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=is_gpu) if updates else None

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=optimizer is None)
        total = torch.zeros((), device=batch["labels"].device)
        for k in range(MICROBATCHES):
            part = {name: x[k * rows : (k + 1) * rows] for name, x in batch.items()}
            loss = forward(**part).loss / MICROBATCHES
            loss.backward()
            total = total + loss.detach()
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return total

    return step


def pipelined(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    shape: Shape,
    options: dict[str, Any],
    backend: str,
    updates: bool,
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A step op by op, and one that is replayed."""
    import fxpipe

    example = {name: x[: shape.rows] for name, x in batch.items()}
    given = {"ranks": shape.ranks, "microbatches": MICROBATCHES, "backend": backend, "effort": 0.1, **options}
    if updates:
        pipes = [fxpipe.compile(model, example, replay=replay, **given) for replay in (False, True)]
        return trained(pipes[0], batch), trained(pipes[1], batch)
    pipe = fxpipe.compile(model, example, **given)
    return lambda: pipe.run_local(batch).loss, lambda: pipe.run_local(batch, replay=True).loss


def trained(pipe: Any, batch: dict[str, torch.Tensor]) -> Callable[[], Any]:
    is_gpu = batch["labels"].is_cuda
    how = (
        {"lr": torch.tensor(RATE, device="cuda"), "fused": True, "capturable": True}
        if is_gpu
        else {"lr": RATE}
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, clip_grad_norm=1.0, **how)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = pipe.step(batch)
        optimizer.step()
        return loss

    return step


def work(name: str, contender: str, backend: str, count: int, cpu: bool) -> None:
    """A contender's process: prepare, wait for a line, measure."""
    device = torch.device("cpu" if cpu else "cuda")
    shape = Shape(**{**vars(SHAPES[name]), **TINY}) if cpu else SHAPES[name]
    synchronize = (lambda: None) if cpu else torch.cuda.synchronize
    model, options = model_of(shape, device), CONTENDERS[contender]
    generator = torch.Generator().manual_seed(1)
    size = shape.rows * MICROBATCHES, shape.tokens
    ids = torch.randint(shape.vocabulary, size, generator=generator).to(device)
    batch = {"input_ids": ids, "labels": ids}
    steps: dict[str, Callable[[], Any]] = {}
    updates = contender.endswith(UPDATES)
    if options is None:
        steps["op by op"] = plain(model, batch, shape.rows, "torch.compile" in contender, updates)
    else:
        steps["op by op"], replayed = pipelined(model, batch, shape, options, backend, updates)
        if not cpu:
            steps["replayed"] = replayed
    steps["op by op"]()
    synchronize()
    if not cpu:
        torch.cuda.empty_cache()  # others are measured first
    print("ready", flush=True)
    sys.stdin.readline()
    rows = []
    for how, step in steps.items():
        row: dict[str, Any] = {"name": f"{contender}, {how}" if options is not None else contender}
        with warnings.catch_warnings(record=True) as told:
            for _ in range(7 if how == "replayed" else 1):
                row["loss"] = float(step())
        if why := [str(each.message) for each in told if "not replayed" in str(each.message)]:
            print(f"{name}, {contender}: {why[0]}", file=sys.stderr)
            continue
        if not cpu:
            torch.cuda.reset_peak_memory_stats()
        row["seconds"] = []
        for _ in range(count):
            synchronize()
            begin = time.perf_counter()
            step()
            synchronize()
            row["seconds"].append(time.perf_counter() - begin)
        if not cpu:
            kept = torch.cuda.memory_reserved if how == "replayed" else torch.cuda.max_memory_allocated
            row["peak"] = kept() / 1e9
        row["flops"], row["tokens"] = flops_of(model, shape), ids.numel()
        if not cpu and how == "op by op":
            row |= kernels(step)
        rows.append(row)
    print(json.dumps(rows), flush=True)


def kernels(step: Callable[[], Any]) -> dict[str, Any]:
    """The number of a step's kernels, and the sum of their times in ms."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    times = [e.self_device_time_total for e in profile.events() if e.device_type == on_device]
    return {"kernels": len(times), "busy": sum(times) / 1e3}


def started(options: argparse.Namespace) -> dict[str, dict[str, subprocess.Popen[str]]]:
    """The processes of all contenders, by model."""
    script = [sys.executable, __file__, "--backend", options.backend, "--steps", str(options.steps)]
    script += ["--cpu"] if options.cpu else []
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return {
        name: {one: subprocess.Popen([*script, "--work", name, one], **pipes) for one in options.contenders}
        for name in options.models
    }


def is_ready(process: subprocess.Popen[str]) -> bool:
    return process.stdout is not None and process.stdout.readline() == "ready\n"


def measured(processes: dict[str, subprocess.Popen[str]], failed: set[str]) -> list[dict[str, Any]]:
    """The rows of a model."""
    rows = []
    for contender, process in processes.items():
        if contender in failed:
            process.kill()
            continue
        output, _ = process.communicate("go\n")
        rows += json.loads(output.splitlines()[-1]) if process.returncode == 0 else []
    return rows


def table(report: Report, name: str, rows: list[dict[str, Any]], peak_rate: float | None) -> None:
    known = {row["name"]: row for row in rows}
    plain_rows = [row for row in rows if UPDATES not in row["name"]]
    beside = known.get("torch.compile") or known.get("eager") or rows[0]
    of_updates = known.get(f"torch.compile{UPDATES}", beside)
    first = known.get("eager", beside)
    columns = [name, "ms", "tokens/s", "share", "TFLOP/s", "MFU", "peak", "kernels", "busy", "other loss"]
    lines = []
    for row in rows:
        seconds = statistics.median(row["seconds"])
        rate = row["flops"] / seconds
        lines.append([
            row["name"],
            f"{seconds * 1e3:.1f}",
            f"{row['tokens'] / seconds:,.0f}",
            f"{statistics.median((beside if row in plain_rows else of_updates)['seconds']) / seconds:.3f}",
            f"{rate / 1e12:.1f}",
            "" if peak_rate is None else f"{rate / peak_rate:.3f}",
            f"{row['peak']:.2f}" if "peak" in row else "",
            str(row.get("kernels", "")),
            f"{row['busy']:.1f}" if "busy" in row else "",
            f"{abs(row['loss'] / first['loss'] - 1):.1e}" if row in plain_rows else "",
        ])  # fmt: skip
    report.table(columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=SHAPES, default=["gpt2-124m", "llama-670m", "llama-8b, 6 layers"]
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--backend", choices=["eager", "inductor"], default="inductor")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work, options.backend, options.steps, options.cpu)
        return
    report, peak_rate = Report("Training steps on one GPU"), None
    if not options.cpu:
        from fxpipe.cost.devices.known_devices import data_sheets

        properties = torch.cuda.get_device_properties(0)
        sheets = [s for s in data_sheets() if s.is_reported_as(properties.name, properties.total_memory)]
        peak_rate = sheets[0].peak["bfloat16"] if sheets else None
        report.line(f"  GPU       {properties.name}, CUDA {torch.version.cuda}")
    processes = started(options)
    failed = {name: {c for c, p in of.items() if not is_ready(p)} for name, of in processes.items()}
    for name, of_model in processes.items():
        report.line()
        table(report, name, measured(of_model, failed[name]), peak_rate)
        for contender in sorted(failed[name]):
            report.line(f"{contender}: failed")
        report.save(options.output)


if __name__ == "__main__":
    main()
