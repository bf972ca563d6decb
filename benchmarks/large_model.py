"""A model of 70 billion parameters on 64 ranks: compiling, the bytes that ranks receive, the memory of one.

The shapes are those of Llama 3 70B, in bfloat16 on the meta device, one sequence of 8192 tokens a microbatch.
Every number is of a fresh process.  The checkpoint is one of Hugging Face in 30 files without blocks on the
disk (all weights are zero): what a rank reads costs time and memory as ever.  A rank is a process that has
the plan, as after ``compile`` under torchrun, without the 63 others; its memory is the growth of the largest
resident set, pages of files included.  Last, two ranks under torchrun with a model that fits here.

    python benchmarks/large_model.py --output benchmarks/results/large_model.txt
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launch import FOLDER
from report import ROOT, Report

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
RANKS, MICROBATCHES, LENGTH = 64, 256, 8192
CASES: dict[str, dict[str, Any]] = {
    "zb-h1": {"schedule": "zb-h1"},
    "zb-h1, 4 replicas, ZeRO-1": {"schedule": "zb-h1", "replicas": 4, "shard": "optimizer"},
    "zb-h1, split vocabulary": {"schedule": "zb-h1", "vocab_parallel": True},
}
SECONDS, MEMORY = 60, 1.10  # the bars: of a compilation, and of peak memory / share
LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": LENGTH,
}
SMALL = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
}
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    parser.add_argument("--once", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        name, *arguments = options.once
        {"compile": compiles, "rank": rank_alone, "torchrun": under_torchrun}[name](*arguments)
    else:
        measure(options.output)


def measure(output: Path | None) -> None:
    report = Report("A model of 70 billion parameters")
    with tempfile.TemporaryDirectory() as folder:
        found = {name: _once("compile", name, f"{folder}/{k}.json") for k, name in enumerate(CASES)}
        _compilations(report, found)
        _received(report, found)
        write_checkpoint(_llama(LARGE), Path(folder) / "large", 30)
        _memory(report, Path(folder))
        write_checkpoint(_llama(SMALL), Path(folder) / "small", 3)
        _both_ranks(report, Path(folder) / "small")
    report.save(output)


def _once(name: str, *arguments: str, launcher: Iterable[str] = ()) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *launcher, FOLDER / "large_model.py", "--once", name, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{FOLDER}", "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout.splitlines()[-1])


# -- compiling ---------------------------------------------------------------------------------------------


def _compilations(report: Report, found: dict[str, dict[str, Any]]) -> None:
    report.line(
        f"\nfxpipe.compile, {RANKS} ranks, {MICROBATCHES} microbatches, with the check of the programs"
    )
    rows = []
    for name, case in found.items():
        phases = sorted(case["phases"].items(), key=lambda item: -item[1])[:3]
        where = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in phases)
        rows.append([name, f"{case['wall']:.0f}", f"{case['processor']:.0f}", f"{case['rss']:.2f}", where])
    report.table(["case", "seconds", "processor", "process, GiB", "most of it"], rows)
    report.line(f"bar: {SECONDS} seconds of the processor")


def _received(report: Report, found: dict[str, dict[str, Any]]) -> None:
    report.line(
        f"\nbytes that a rank receives before the first step ({RANKS} ranks, {MICROBATCHES} microbatches)"
    )
    columns = ["programs of all", "order of all", "own program", "plan", "constants", "messages compared"]
    rows = [[name, *(f"{case['bytes'][column]:,}" for column in columns)] for name, case in found.items()]
    report.table(["case", *columns], rows)
    report.line(
        "not received: the first two.  Own program: the largest.  Ranks receive all but the first two."
    )


def compiles(name: str, file: str) -> None:
    import torch

    import fxpipe
    from fxpipe.compiler import progress

    model, phases = _llama(LARGE), []
    begin = progress.Phases.__init__
    progress.Phases.__init__ = lambda self, title: (begin(self, title), phases.append(self))[0]
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    wall, processor = time.perf_counter(), time.process_time()
    pipe = fxpipe.compile(
        model,
        {"input_ids": ids, "labels": ids},
        ranks=RANKS,
        microbatches=MICROBATCHES,
        costs="H100",
        **CASES[name],
    )
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    Path(file).write_text(pipe.plan.to_json())
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    found = {"wall": wall, "processor": processor, "rss": rss, "phases": phases[0].seconds}
    print(json.dumps({**found, "bytes": bytes_of(pipe.artifact)}))


def bytes_of(artifact: Any) -> dict[str, int]:
    """What ``send_artifacts`` and the check of messages send, as they send it."""
    from fxpipe.runtime.program.load_program import load_program
    from fxpipe.runtime.ranks.agreement import check_agreement
    from fxpipe.training.model.parts import send_artifacts

    kept, broadcast, scattered, gathered = [], [], [], []
    send_artifacts(
        [artifact],
        SimpleNamespace(  # type: ignore[arg-type]
            of_each=lambda parts: parts,
            keep=lambda key, text: kept.append(len(text)),
            broadcast_bytes=lambda data: broadcast.append(len(data)),
            scatter=lambda parts: scattered.append(max(map(len, parts))),
        ),
    )
    traffic = {r: load_program(text, f"rank{r}.py").traffic for r, text in enumerate(artifact.programs)}
    check_agreement(traffic, lambda own: (gathered.append(sum(map(len, own))), own)[1])
    return {
        "programs of all": sum(map(len, artifact.programs)),
        "order of all": sum(kept),
        "own program": scattered[0],
        "plan": sum(broadcast),
        "constants": scattered[1],
        "messages compared": sum(gathered),
    }


# -- memory ------------------------------------------------------------------------------------------------


def _memory(report: Report, folder: Path) -> None:
    report.line(
        "\none rank of 64 in a process of its own: its share of the model, and the growth of its memory"
    )
    rows = []
    for k, rank, way in ((0, 21, "load"), (0, 21, "initialize"), (2, 21, "load"), (2, 21, "initialize")):
        given = _once("rank", f"{folder}/{k}.json", f"{folder}/large", str(rank), way)
        rows.append([f"{[*CASES][k]}, rank {rank}, {way}", *_cells(given)])
    report.table(["case", "share, GiB", "peak, GiB", "peak / share", "seconds"], rows)
    report.line(f"bar: {MEMORY}")


def _both_ranks(report: Report, directory: Path) -> None:
    report.line("\ntwo ranks under torchrun, a split vocabulary: the growth of each from before compile")
    rows = []
    for way in ("load", "initialize"):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        given = _once("torchrun", str(directory), way, launcher=launcher)
        rows += [[f"rank {rank}, {way}", *_cells(own)] for rank, own in enumerate(given["ranks"])]
    report.table(["case", "share, GiB", "peak, GiB", "peak / share", "seconds"], rows)
    report.line(f"bar: {MEMORY}")


def _cells(given: dict[str, float]) -> list[str]:
    share, peak = given["share"] / GIB, given["peak"] / GIB
    return [f"{share:.3f}", f"{peak:.3f}", f"{peak / share:.3f}", f"{given['seconds']:.1f}"]


def rank_alone(plan_file: str, directory: str, rank: str, way: str) -> None:
    import torch

    from fxpipe.api.rank_tensors import held_of
    from fxpipe.plan.saved.check import plan_of
    from fxpipe.training.model.initialize import initialize_model
    from fxpipe.training.model.model_state import ModelState
    from fxpipe.training.model.state_dict import load_state_dict
    from fxpipe.training.weights.pretrained import Pretrained

    model, plan = _llama(LARGE), plan_of(Path(plan_file).read_text(), plan_file)
    alone = {"world_rank": int(rank), "lane": 0, "lanes": 1, "replica": 0, "replicas": 1}
    process = SimpleNamespace(rank=int(rank), ranks=plan.ranks, **alone)
    held = held_of(model, plan, int(rank))
    state = ModelState(plan, *held, torch.device("cpu"), process, lambda: model)  # type: ignore[arg-type]
    before, begun = _reset_peak(), time.perf_counter()
    if way == "load":
        load_state_dict(state, Pretrained(Path(directory)), strict=True)
    else:
        initialize_model(state, None, 0)
    print(json.dumps(_grown(state, before, begun)))


def under_torchrun(directory: str, way: str) -> None:
    import torch
    import torch.distributed as dist

    import fxpipe

    dist.init_process_group("gloo")
    model = _llama(SMALL)
    ids = torch.zeros(1, 128, dtype=torch.long)
    example = {"input_ids": ids, "labels": ids}
    pipe = fxpipe.compile(model, example, ranks=2, microbatches=4, schedule="1f1b", vocab_parallel=True)
    before, begun = _reset_peak(), time.perf_counter()
    if way == "load":
        pipe.load_state_dict(directory)
    else:
        pipe.initialize()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, _grown(pipe.model_state, before, begun))
    if dist.get_rank() == 0:
        print(json.dumps({"ranks": found}), flush=True)
    dist.barrier()


def _reset_peak() -> int:
    """Begin to look for the peak; return the bytes that are resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _grown(state: Any, before: int, begun: float) -> dict[str, float]:
    seconds = time.perf_counter() - begun
    held = state.plan.tensors[state.process.rank].state
    assert not any(state.value(name).is_meta for name in held)
    share = sum(state.value(name).nbytes for name in held)
    return {"share": share, "peak": _resident("VmHWM") - before, "seconds": seconds}


# -- the model ---------------------------------------------------------------------------------------------


def _llama(shapes: dict[str, int]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shapes, rope_theta=500000.0, use_cache=False)
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def write_checkpoint(model: Any, directory: Path, files: int) -> None:
    """Files of safetensors with an index, each without blocks on the disk behind its header."""
    directory.mkdir()
    tensors = list(model.state_dict().items())
    most, index = sum(t.nbytes for _, t in tensors) / files, {}
    parts: list[list[tuple[str, Any]]] = [[]]
    for name, tensor in tensors:
        if sum(t.nbytes for _, t in parts[-1]) > most:
            parts.append([])
        parts[-1].append((name, tensor))
        index[name] = f"model-{len(parts):05}.safetensors"
    for k, part in enumerate(parts, 1):
        header, end = {}, 0
        for name, tensor in part:
            header[name] = {
                "dtype": "BF16",
                "shape": [*tensor.shape],
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(header).encode()
        with open(directory / f"model-{k:05}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


if __name__ == "__main__":
    main()
