"""Half of the activations beside the GPU, in pinned memory: what does it cost, and is memory as simulated?

A GPT-2 of Hugging Face (4 layers, hidden 4096, 32 heads, sequence 4096, vocabulary 8192, bfloat16, no
dropout), microbatches of one sequence, gpipe with two stages on one GPU, in one process: the first stage's
activations stay the longest.  Forward and backward, no optimizer.  fxpipe compiles it twice, with costs
measured here: without offload, and with offload=0.5.  Both work on the same weights and take turns, step by
step.  The microbatches are 8, or 6 or 4 where a GPU has no room for more.

- ratio: time of a step with offload / time of the step without it before; the median.
  Bar: at most 1.03.
- simulated: the most that is saved, MiB.  Beside it what torch.cuda counts, without what it holds before the
  step (weights, gradients, batch): between ops, and at most at all (max_memory_allocated), which is with
  what single ops need while they run.
  Bar: max_memory_allocated within 5% of what was simulated.
The loss must have the same bits.  (Gradients of fused attention on a GPU differ from run to run by
themselves.)

    python benchmarks/gpu_offload.py --output benchmarks/results/gpu_offload.txt

``--cpu`` runs the same on the CPU, tiny and with a disk, to try the script; it has no bars.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from offload_worker import MIB, build, example
from report import Report, median_and_spread
from rich.progress import track
from torch import nn

import fxpipe

SLOWER_BAR, MEMORY_BAR = 1.03, 0.05
ROOM = 0.85  # of the free memory, for weights, gradients and what is saved
FALLBACKS = (8, 6, 4)  # microbatches
WARM_UP = 2
#: Lengths for --cpu.
TINY = {"layers": 2, "hidden": 64, "heads": 2, "sequence": 64, "vocabulary": 128}


@dataclass(eq=False)
class Contender:
    """``saved``: simulated, MiB.  ``between``, ``peak``: measured, MiB."""

    name: str
    pipe: fxpipe.Pipeline
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    between: float = 0.0
    peak: float = 0.0

    @property
    def saved(self) -> float:
        return self.pipe.simulate().peak_memory[0] / MIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, help="without it 8, 6 or 4, as there is room")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--schedule", default="gpipe")
    parser.add_argument("--share", type=float, default=0.5, help="of the activations")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each contender")
    parser.add_argument("--cpu", action="store_true", help="tiny, on the CPU: to try the script")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA GPU, and torch finds none here (--cpu tries the script).")
    if options.cpu:
        vars(options).update(TINY)
    device = torch.device("cpu" if options.cpu else "cuda")
    report = Report("Half of the activations beside a GPU")
    report.line(f"  GPU       {name_of(device)}")
    with torch.device(device):
        lengths = {name: getattr(options, name) for name in TINY}
        model = build(**lengths).to(torch.float32 if options.cpu else torch.bfloat16)
    contenders = compiled(model, options, device)
    plain, away = contenders
    microbatches = plain.pipe.plan.step.microbatches
    batch = {k: x.to(device) for k, x in one_batch(options, microbatches).items()}
    for turn in track(range(WARM_UP + options.steps), "steps", transient=True):
        for contender in contenders:
            seconds, loss = run_step(contender.pipe, model, batch, device)
            contender.losses.append(loss)
            if turn >= WARM_UP:
                contender.seconds.append(seconds)
    for contender in contenders:
        measure_memory(contender, model, batch, device)
    timeline = away.pipe.simulate()
    report.line(
        f"\n{options.schedule}, {options.stages} stages, m = {microbatches}, {options.layers} layers, hidden "
        f"{options.hidden}, sequence {options.sequence}; {options.steps} steps of each, taking turns"
    )
    assert timeline.costs.link is not None
    report.line(
        f"of a step {timeline.moved / MIB:.0f} MiB go away and come back, simulated at "
        f"{1 / timeline.costs.link.seconds / 1e9:.1f} GB/s each way (measured); a step is simulated to take "
        f"{1000 * timeline.seconds:.0f} ms, {1000 * timeline.stalled[0]:.1f} of them waiting for transfers"
    )
    show(report, plain, away, bars=not options.cpu)
    report.save(options.output)


def name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "none: this run only tries the script"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def one_batch(options: argparse.Namespace, microbatches: int) -> dict[str, torch.Tensor]:
    return example(microbatches, options.sequence, options.vocabulary)


def compiled(model: nn.Module, options: argparse.Namespace, device: torch.device) -> list[Contender]:
    """Without offload and with it, for as many microbatches as there is room for."""
    given = {k: x.to(device) for k, x in one_batch(options, 1).items()}

    def one(microbatches: int, share: bool | float) -> fxpipe.Pipeline:
        return fxpipe.compile(
            model,
            given,
            ranks=1,
            microbatches=microbatches,
            schedule=options.schedule,
            stages_per_rank=options.stages,
            offload=share,
            costs="measured",
        )

    for microbatches in possible(options):
        plain = one(microbatches, False)
        gradients = sum(p.nbytes for p in model.parameters())
        if device.type == "cpu" or fits(gradients + plain.simulate().peak_memory[0], device):
            name = f"offload {options.share:g}"
            return [Contender("no offload", plain), Contender(name, one(microbatches, options.share))]
    sys.exit("There is no room on this GPU: give fewer --layers, or a shorter --sequence.")


def possible(options: argparse.Namespace) -> Iterator[int]:
    if options.microbatches is not None:
        yield options.microbatches
    else:
        yield from FALLBACKS


def fits(bytes: float, device: torch.device) -> bool:
    """Beside the weights, which are on the device."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return bytes < ROOM * free


def run_step(
    pipe: fxpipe.Pipeline, model: nn.Module, batch: Any, device: torch.device
) -> tuple[float, float]:
    """Seconds of a step, and the loss."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    synchronize(device)
    start = time.perf_counter()
    loss = pipe.step(batch)
    synchronize(device)
    return time.perf_counter() - start, float(loss)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_memory(contender: Contender, model: nn.Module, batch: Any, device: torch.device) -> None:
    """One more step of a contender, whose memory is watched."""
    pipe = contender.pipe
    if device.type == "cpu":
        saved = pipe.run_local(batch, measure_memory=True).peak_saved[0]
        contender.between = contender.peak = saved / MIB
        return
    between: list[int] = []
    record = pipe.runtime.record
    record.at_op = lambda _: between.append(torch.cuda.memory_allocated(device))
    record.at_free = lambda: between.append(torch.cuda.memory_allocated(device))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_step(pipe, model, batch, device)
    record.at_op = record.at_free = None
    contender.between = (max(between) - before) / MIB
    contender.peak = (torch.cuda.max_memory_allocated(device) - before) / MIB


def show(report: Report, plain: Contender, away: Contender, bars: bool) -> None:
    if len({*plain.losses, *away.losses}) > 1:
        raise SystemExit(f"losses differ in their bits: {sorted({*plain.losses, *away.losses})}")
    report.line(f"all have the loss {plain.losses[0]!r}, bit for bit")
    rows = []
    for c in (plain, away):
        milliseconds = [1000 * s for s in c.seconds]
        memory = (c.saved, c.between, c.peak)
        rows.append([c.name, median_and_spread(milliseconds, ".1f"), *(f"{x:.1f}" for x in memory)])
    report.table(("", "ms a step", "MiB simulated", "between ops", "at most"), rows)
    ratios = [a / b for a, b in zip(away.seconds, plain.seconds, strict=True)]
    ratio = statistics.median(ratios)
    report.line(f"ratio {median_and_spread(ratios, '.3f')}{verdict(ratio <= SLOWER_BAR, bars)}")
    for c in (plain, away):
        off = c.peak / c.saved - 1
        met = abs(off) <= MEMORY_BAR
        report.line(
            f"{c.name}: at most {off:+.1%} of what was simulated, between ops {c.between / c.saved - 1:+.1%}"
            f"{verdict(met, bars)}"
        )


def verdict(met: bool, bars: bool) -> str:
    if not bars:
        return ""
    return ": the bar is met" if met else ": THE BAR IS MISSED"


if __name__ == "__main__":
    main()
