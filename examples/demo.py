"""Compile a GPT-2 into four rank programs and train it with torchrun on this machine, on real text.

    python examples/demo.py        # what `make demo` runs; leaves build/demo/

The same model is then trained in one process on the same batches, and the losses are set side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file, save_file
from text import batches, standard_library, tokenize, train_tokenizer

import fxpipe

BUILD = Path("build/demo")
RANKS, MICROBATCHES, ROWS, SEQUENCE, VOCABULARY = 4, 8, 2, 128, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--schedule", default="zb-h1")
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        train_this_rank(options.steps)
    else:
        run_demo(options.steps, options.schedule)


def make_model() -> torch.nn.Module:
    """A GPT-2 with random weights; without dropout, so that losses can be compared."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import GPT2Config, GPT2LMHeadModel  # the ranks run without it

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=192, n_head=6, n_positions=SEQUENCE, vocab_size=VOCABULARY,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_batches() -> Iterator[dict[str, torch.Tensor]]:
    tokens = load_file(BUILD.parent / "demo-tokens.safetensors")["tokens"]
    return batches(tokens, batch=MICROBATCHES * ROWS, sequence=SEQUENCE, seed=0)


OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.95)}


def warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))


def run_demo(steps: int, schedule: str) -> None:
    console = Console()
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.parent.mkdir(parents=True, exist_ok=True)

    console.rule("text: the standard library of this Python")
    documents = standard_library()
    tokens = tokenize(documents, train_tokenizer(documents, VOCABULARY))
    save_file({"tokens": tokens}, BUILD.parent / "demo-tokens.safetensors")
    rows = next(batches(tokens, batch=100 * MICROBATCHES * ROWS, sequence=SEQUENCE, seed=1))
    save_file(rows, BUILD.parent / "demo-data.safetensors")  # for fxpipe run
    console.print(f"{len(documents)} files, {len(tokens):,} tokens, vocabulary {VOCABULARY}")

    console.rule("compile")
    model = make_model()
    example = {name: t[:ROWS] for name, t in next(make_batches()).items()}
    pipe = fxpipe.compile(model, example, ranks=RANKS, microbatches=MICROBATCHES, schedule=schedule)
    check = pipe.run_local(next(make_batches()), measure_memory=True)
    pipe.save(BUILD)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {RANKS} programs: {BUILD}/")

    console.rule(f"train: torchrun, {RANKS} processes")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, __file__, "--steps", str(steps)], check=True, env=environment)
    ranks = [json.loads((BUILD / f"measured{rank}.json").read_text()) for rank in range(RANKS)]

    console.rule("train: the same model in one process")
    single = train_in_one_process(model, steps)
    show_losses(console, ranks[0]["losses"], single)
    show_ranks(console, pipe, ranks, check.peak_saved)
    report = fxpipe.load(BUILD).report(BUILD / "report.html")
    console.print(f"Look at {report}, rank1.py, plan.json, graph.svg.")


def train_this_rank(steps: int) -> None:
    """What each of torchrun's processes does: load the programs, train, leave what was measured."""
    pipe = fxpipe.load(BUILD)
    rank = pipe.runtime.rank
    optimizer = pipe.optimizer(torch.optim.AdamW, clip_grad_norm=1.0, **OPTIMIZER)
    rate = warm_up(optimizer)
    losses, seconds = [], []
    data = make_batches()
    console = Console(stderr=True, quiet=rank != 0)
    for number in track(range(steps), "steps", console=console, disable=not console.is_terminal):
        before = time.perf_counter()
        losses.append(float(pipe.step(next(data))))
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - before)
        if not console.is_terminal and number % 10 == 0:
            console.print(f"step {number:3d}  loss {losses[-1]:.4f}")
    spans = pipe.runtime.record.spans
    measured = {
        "losses": losses,
        "seconds": sorted(seconds)[len(seconds) // 2],
        "busy": sum(end - start for _, start, end in spans),
        "span": spans[-1][2] - spans[0][1],
        "resident": peak_resident_bytes(),
        "spans": spans,
    }
    (BUILD / f"measured{rank}.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def train_in_one_process(model: torch.nn.Module, steps: int) -> list[float]:
    torch.set_num_threads(1)  # as each rank has
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    rate = warm_up(optimizer)
    losses = []
    data = make_batches()
    console = Console(stderr=True)
    for _ in track(range(steps), "steps", console=console, disable=not console.is_terminal):
        batch, total = next(data), 0.0
        for rows in range(0, MICROBATCHES * ROWS, ROWS):
            loss = model(**{name: t[rows : rows + ROWS] for name, t in batch.items()}).loss / MICROBATCHES
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def show_losses(console: Console, pipeline: list[float], single: list[float]) -> None:
    table = Table("step", "loss, pipeline", "loss, one process", "difference")
    shown = sorted({*range(0, len(single), max(1, len(single) // 8)), len(single) - 1})
    for step in shown:
        a, b = pipeline[step], single[step]
        table.add_row(str(step), f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}")
    console.print(table)


def show_ranks(console: Console, pipe: fxpipe.Pipeline, ranks: list[dict], saved: tuple[int, ...]) -> None:
    timeline = pipe.simulate()
    table = Table("rank", "saved MB, predicted", "saved MB, measured", "resident MB, peak", "idle, measured")
    for rank, (measured, peak) in enumerate(zip(ranks, saved, strict=True)):
        idle = 1 - measured["busy"] / measured["span"]
        table.add_row(
            str(rank), f"{timeline.peak_memory[rank] / 1e6:.1f}", f"{peak / 1e6:.1f}",
            f"{measured['resident'] / 1e6:.0f}", f"{idle:.0%}",
        )  # fmt: skip
    console.print(table)
    bubble = max(1 - r["busy"] / r["span"] for r in ranks)
    console.print(
        f"span bubble predicted {timeline.span_bubble:.1%} for {RANKS} processors; idle measured at most "
        f"{bubble:.1%} with {os.cpu_count()} cores, {ranks[0]['seconds']:.2f} s a step"
    )


if __name__ == "__main__":
    main()
