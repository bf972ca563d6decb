"""Does fxpipe work, and well, on the GPUs of this machine?  Fifteen minutes; a table and a file.

    make gpu-check                                    (ARGS="--only speed": a part of it)

- gradients: a small decoder in every kind of schedule, with a split vocabulary, offload, recomputation; all
  ranks in one process, then as processes over nccl (as many as there are GPUs, up to four) and over gloo.
  With one GPU the ranks share it, and nccl is told that they lie on different machines.
  Bar: the largest difference from eager is 1e-5 of the largest element (float32 without TF32).
- mesh: the same of replicas with every level of ``shard``, and of lanes; parameters behind 30 clipped steps
  with post-validation, whose updates may be taken back.  Bar: the same.
- memory of steps: how often steps 1 to 4 with AdamW ask the driver for memory.  Bar: never.  Then with .6 of
  the memory that this took, for zb-v and for split vocabularies: it may not suffice, and must not hang.
- one batch: on the GPU of rank 0 alone, on the CPU or nowhere on the others.  Two ranks on one GPU.
- a random op: the time that seeding its device's generator adds.  Bar: 15 µs.
- memory: torch's peak of a step beside the simulated one.  Bar: 5%.
- speed: the step of a Llama of four stages in one process beside eager with the same microbatches.
  Bar: 0.97 of eager's speed.

Each row is printed as soon as it is known, and what a failing run printed beside it.  Runs of several
processes are of small models and most of their time is start-up: ``--jobs`` of them run at once.  ``--cpu``
runs the same, tiny, on the CPU, to try the script; it has no bars for speed and memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_check_worker import batch, eager_gradients, error, in_full_precision, model, strictly
from launch import run
from report import Report
from rich.progress import track

import fxpipe
from fxpipe.runtime.program.accelerator import default_device, is_accelerator, synchronize
from fxpipe.runtime.program.random import keyed

GRADIENT_BAR, KEYED_BAR, MEMORY_BAR, SPEED_BAR = 1e-5, 15e-6, 0.05, 0.97
MIB = 2**20
WORKER = "gpu_check_worker.py"
#: Seconds after which a run of a small model hangs.
SOON = 180.0
#: Steps with post-validation; the first that go ahead of a verdict are behind two and six
#: (``training/optimizer/speculation_policy.py``).
POST_STEPS = 30
IN_LITTLE_MEMORY = ("1f1b", "gpipe", "zb-v", "1f1b, vocabulary", "zb-v, vocabulary")
PARTS = ("local", "processes", "mesh", "memory", "speed")
VERDICTS = {True: "ok", False: "NOT MET", None: ""}
#: The first GPU that this process may use.
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
SETTINGS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "stages_per_rank": 2},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h2": {"schedule": "zb-h2"},
    "zb-v": {"schedule": "zb-v"},
    "dualpipe-v": {"schedule": "dualpipe-v"},
    "1f1b, vocabulary": {"schedule": "1f1b", "vocab_parallel": "1-barrier"},
    "zb-v, vocabulary": {"schedule": "zb-v", "vocab_parallel": "2-barrier"},
    "1f1b, recompute": {"schedule": "1f1b", "recompute": "full"},
    "gpipe, offload": {"schedule": "gpipe", "offload": 0.5},
}
#: Whose compilation takes a minute.
INDUCTOR = {"zb-v, inductor": {"schedule": "zb-v", "backend": "inductor"}}
#: Lengths of the Llama: of 1B parameters, and of one to try the script.
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32000}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}


@dataclass(frozen=True)
class Row:
    """``met``: whether the bar is; None where there is none."""

    what: str
    found: str
    met: bool | None


def in_one_process(device: torch.device, ranks: int) -> Iterator[Row]:
    """Gradients of all settings with ``run_local``."""
    for name, options in track({**SETTINGS, **INDUCTOR}.items(), "in one process"):
        own = model(device)
        whole = batch(8, device)
        expected = eager_gradients(own, whole, 4)
        pipe = fxpipe.compile(own, batch(2, device), ranks=ranks, microbatches=4, effort=0.1, **options)
        grads = pipe.run_local(whole).grads
        largest = max(error(grads[parameter], grad) for parameter, grad in expected.items())
        yield Row(f"run_local, {ranks} ranks, {name}", f"{largest:.1e}", largest <= GRADIENT_BAR)


#: A run of processes, which waits for them.
Run = Callable[[], list[Row]]


def as_processes(ranks: int, apart: bool, microbatches: int) -> Iterator[Run]:
    """Gradients of all settings under torchrun."""
    for name in SETTINGS:
        what = f"torchrun, {ranks} ranks, m = {microbatches}, {name}"
        yield partial(gradients, what, ranks, case_of(name, ranks, microbatches, apart))


def case_of(name: str, ranks: int, microbatches: int, apart: bool, **more: Any) -> dict[str, Any]:
    options = {**SETTINGS[name], "ranks": ranks, "microbatches": microbatches}
    return {"options": options, "nccl": "apart" if apart else "", **more}


def gradients(
    what: str,
    processes: int,
    case: dict[str, Any],
    environment: dict[str, str] | None = None,
) -> list[Row]:
    try:
        found = run(WORKER, processes, case, environment=environment, limit=SOON)
    except (RuntimeError, subprocess.TimeoutExpired) as failure:
        return [failed(what, failure)]
    return [Row(f"{what}, {found['backend']}", f"{found['error']:.1e}", found["error"] <= GRADIENT_BAR)]


def failed(what: str, failure: RuntimeError | subprocess.TimeoutExpired) -> Row:
    printed = failure.output.decode() if isinstance(failure, subprocess.TimeoutExpired) else ""
    print(f"{what}: {failure}\n{printed}", file=sys.stderr)
    said = [line for line in str(failure).splitlines() if "Error: " in line] or [str(failure)]
    return Row(what, said[0].strip()[:80], False)


def batches_and_sharing(ranks: int, apart: bool) -> Iterator[Run]:
    one = case_of("1f1b", ranks, 4, apart, batch="one")
    yield partial(gradients, "a batch on the GPU of rank 0 alone", ranks, one)
    shared = case_of("1f1b", 2, 4, False)
    yield partial(gradients, "two ranks on one GPU", 2, shared, {"CUDA_VISIBLE_DEVICES": VISIBLE})


def meshes(apart: bool) -> Iterator[Run]:
    """Two replicas, two lanes, and steps without a barrier, of two ranks."""
    for shard in (None, "optimizer", "gradients", "parameters"):
        case = case_of("1f1b", 2, 4, apart)
        case["options"] |= {"replicas": 2, "shard": shard}
        yield partial(gradients, f"2 ranks, 2 replicas, shard={shard}", 4, case)
    for name in ("1f1b", "zb-v"):
        yield partial(gradients, f"2 ranks of 2 lanes, {name}", 4, case_of(name, 2, 4, apart, lanes=2))
        steps = case_of(name, 2, 4, apart, post=POST_STEPS)
        yield partial(gradients, f"{POST_STEPS} steps with post-validation, {name}", 2, steps)


def memory_of_steps(name: str, ranks: int, apart: bool) -> list[Row]:
    """Whether steps ask the driver for memory, and whether they hang where it does not suffice."""
    case = case_of(name, ranks, 8, apart, train=4)
    what = f"{name}: how often steps 1 to 4 ask for memory"
    try:
        found = run(WORKER, ranks, case, limit=SOON)
    except (RuntimeError, subprocess.TimeoutExpired) as failure:
        return [failed(what, failure)]
    asked = Row(f"{what}, {found['backend']}", str(found["asked"]), not any(found["asked"]))
    what = f"{name}: with .6 of the memory"
    try:
        run(WORKER, ranks, {**case, "bytes": int(0.6 * found["reserved"])}, limit=SOON)
    except subprocess.TimeoutExpired as failure:
        return [asked, failed(what, failure)]
    except RuntimeError as failure:
        if "out of memory" not in str(failure):
            return [asked, failed(what, failure)]
        return [asked, Row(what, "out of memory", True)]
    return [asked, Row(what, "suffices", True)]


def at_once(runs: Iterable[Run], jobs: int) -> Iterator[Row]:
    """The rows of all runs, ``jobs`` of which run at a time."""
    runs = list(runs)
    with ThreadPoolExecutor(jobs) as pool:
        for rows in track(pool.map(lambda run: run(), runs), "as processes", total=len(runs)):
            yield from rows


def random_op(device: torch.device) -> Row:
    x, op = torch.zeros(64, device=device), torch.ops.aten.bernoulli.p
    bare, seeded = (
        seconds_of(call, device, 2000) for call in (lambda: op(x, 0.5), lambda: keyed(1, 2, op, x, 0.5))
    )
    more = seeded - bare
    met = more <= KEYED_BAR if is_accelerator(device) else None
    return Row("a random op takes longer by", f"{more * 1e6:.0f} µs", met)


def seconds_of(call: Callable[[], object], device: torch.device, times: int) -> float:
    """The time of one call, with what it starts on the device."""
    for _ in range(3):
        call()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return (time.perf_counter() - begun) / times


def llama(device: torch.device, tiny: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
    """The model in bfloat16, a microbatch, and their number."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lengths, length = (TINY, 16) if tiny else (LLAMA, 2048)
    config = LlamaConfig(**lengths, num_attention_heads=8, num_key_value_heads=8, use_cache=False)
    torch.manual_seed(0)
    with device:
        own = LlamaForCausalLM(config).to(torch.float32 if tiny else torch.bfloat16)
    ids = torch.randint(config.vocab_size, (1, length), device=device)
    return own, {"input_ids": ids, "labels": ids}, 8


def speed_and_memory(device: torch.device, tiny: bool) -> Iterator[Row]:
    own, example, microbatches = llama(device, tiny)
    whole = {name: t.repeat(microbatches, 1) for name, t in example.items()}

    def eager() -> None:
        for k in range(microbatches):
            (own(**{name: t[k : k + 1] for name, t in whole.items()}).loss / microbatches).backward()
        own.zero_grad(set_to_none=True)

    four = fxpipe.compile(own, example, ranks=4, microbatches=microbatches, schedule="1f1b")
    one = fxpipe.compile(own, example, ranks=1, microbatches=microbatches, schedule="gpipe")
    pairs = []
    for _ in track(range(2 if tiny else 10), "a Llama in four stages, and eager"):
        pairs.append((seconds_of(eager, device, 1), seconds_of(lambda: four.run_local(whole), device, 1)))
    ratio = statistics.median(before / after for before, after in pairs)
    yield Row(
        "Llama, four stages in one process: speed as a share of eager's",
        f"{ratio:.3f}",
        None if tiny else ratio >= SPEED_BAR,
    )
    if is_accelerator(device):
        one.step(whole)
        synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        one.step(whole)
        measured = torch.accelerator.max_memory_allocated(device) - before
        simulated = one.simulate().peak_memory[0]
        yield Row(
            "Llama, all microbatches on one rank: peak, and simulated, MiB",
            f"{measured / MIB:.0f}, {simulated / MIB:.0f}",
            abs(measured - simulated) <= MEMORY_BAR * simulated,
        )


def runs_of(part: str, count: int) -> Iterator[Run]:
    """Those of several processes, on so many GPUs."""
    ranks, apart = max(2, min(count, 4)), count == 1
    if part == "processes":
        for m in (1, 4):
            yield from as_processes(ranks, apart, m)
        if count == 1:
            yield from as_processes(ranks, False, 4)  # over gloo
        yield from batches_and_sharing(ranks, apart)
    if part == "mesh":
        yield from meshes(0 < count < 4)
    if part == "memory":
        for name in IN_LITTLE_MEMORY:
            yield partial(memory_of_steps, name, ranks, apart)


def rows_of(part: str, device: torch.device, count: int, options: argparse.Namespace) -> Iterator[Row]:
    if part == "local":
        yield from in_one_process(device, 4)
    elif part == "speed":
        yield random_op(device)
        yield from speed_and_memory(device, options.cpu)
    else:
        yield from at_once(runs_of(part, count), options.jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny, on the CPU, to try the script")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="some of its parts")
    jobs = max(1, len(os.sched_getaffinity(0)) // 4)
    parser.add_argument("--jobs", type=int, default=jobs, help="runs of processes at once (%(default)s)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    device = torch.device("cpu") if options.cpu else default_device()
    if not (options.cpu or is_accelerator(device)):
        sys.exit("torch sees no GPU here: torch.accelerator.is_available() is False. --cpu tries the script.")
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    in_full_precision()
    strictly()
    report = Report("fxpipe on the GPUs of this machine")
    count = torch.accelerator.device_count() if is_accelerator(device) else 0
    report.line(f"  devices   {count} x {torch.cuda.get_device_name(device) if count else 'CPU'}")
    if count:
        report.line(f"  nccl      {json.dumps(torch.cuda.nccl.version())}")
    rows = []
    for part in options.only:
        for row in rows_of(part, device, count, options):
            rows.append(row)
            print(f"{VERDICTS[row.met]:7}  {row.what}: {row.found}", file=sys.stderr, flush=True)
    report.line()
    report.table(["what", "found", "bar"], [[row.what, row.found, VERDICTS[row.met]] for row in rows])
    missed = sum(row.met is False for row in rows)
    report.line(f"\n{missed} of {len(rows)} are not met." if missed else f"\nAll {len(rows)} are met.")
    report.save(options.output)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
