"""How long compiling takes, and how it grows with the depth of the model.

A line a size: a GPT-2 of Hugging Face on the meta device, hidden 256, vocabulary 8192, one microbatch
of one sequence of 128, for 4 ranks and 16 microbatches; seconds in total and in each phase of
``fxpipe.compiler.compile.compile_model``.  Every compilation runs in a fresh process, as a user's does; the
time to import torch, transformers and fxpipe is not counted.  Then what takes the longest: GPT-2 with
every option that looks at more plans, and a transformer of many small ops; here the processor's seconds
are shown too, as they depend less on what else the machine does, and beside them those of torch's own trace
of the same step: ``make_fx`` of loss and gradients on fake tensors.

    python benchmarks/compile_time.py --output benchmarks/results/compile_time.txt
    python benchmarks/compile_time.py --hard --beside ../older    # in turns with another checkout
    python benchmarks/compile_time.py --against ../older    # large models, by phase
    python benchmarks/compile_time.py --layers 24 --schedules zb-h1 --profile build/compile.prof
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from report import ROOT, Report, revision

LAYERS = (12, 24, 48)
SCHEDULES = ("1f1b", "zb-h1", "auto")
RANKS, MICROBATCHES = 4, 16
#: Seconds that compiling so many layers may take, on 2 cores.
BARS = {12: 15.0, 48: 60.0}
PHASES = ("capture", "vocabulary", "partition", "passes", "extract", "schedule", "codegen")
COLUMNS = ("total", "processor", *PHASES)
ALL_OPTIONS = {"vocab_parallel": "auto", "recompute": "auto", "offload": True}
WITHIN_MEMORY = {**ALL_OPTIONS, "offload": "auto", "memory_limit": 60e6}


@dataclass(frozen=True)
class Hard:
    """A case that takes long, and the seconds that it may take."""

    name: str
    model: str
    layers: int
    schedule: str
    options: dict[str, Any]
    bar: float


HARD = (
    Hard("GPT-2, all options", "gpt2", 12, "auto", ALL_OPTIONS, 8.0),
    Hard("GPT-2, all options, 60 MB", "gpt2", 12, "auto", WITHIN_MEMORY, 15.0),
    Hard("GPT-2, all options but the search", "gpt2", 12, "1f1b", ALL_OPTIONS, 8.0),
    Hard("12,000 nodes", "small ops", 43, "zb-h1", {}, 15.0),
    Hard("12,000 nodes, recompute", "small ops", 43, "zb-h1", {"recompute": "full"}, 15.0),
)


@dataclass(frozen=True)
class Large:
    """A case that is compared with another revision, and the share of its time that it may take."""

    layers: int
    width: int
    ranks: int
    microbatches: int
    schedule: str
    bar: float

    def __str__(self) -> str:
        return f"{self.layers} × {self.width}, {self.ranks} ranks, m = {self.microbatches}, {self.schedule}"


LARGE = (
    Large(48, 256, 4, 16, "zb-h1", 0.75),
    Large(48, 256, 4, 16, "auto", 0.75),
    Large(96, 12288, 64, 256, "zb-h1", 0.6),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--dropout", type=float, default=0.1, help="GPT-2's own is 0.1")
    parser.add_argument("--rounds", type=int, default=3, help="compilations of each; the median is shown")
    parser.add_argument("--hard", action="store_true", help="only the cases that take long")
    parser.add_argument("--beside", type=Path, help="a checkout of another revision, for what takes long")
    parser.add_argument("--against", type=Path, help="another checkout, for large models in turns with it")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    parser.add_argument("--profile", type=Path, help="compile once and keep where the time goes")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once is not None:
        given = json.loads(options.once)
        print(json.dumps(compile_large(**given) if "width" in given else compile_once(**given)))
    elif options.against is not None:
        against(options.against, options.rounds, options.output)
    elif options.profile is not None:
        profile(options.layers[0], options.schedules[0], options.dropout, options.profile)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    report = Report("Compile time")
    if not options.hard:
        _depths(report, options)
    _hard(report, options.rounds, options.beside)
    report.save(options.output)


def against(other: Path, rounds: int, output: Path | None) -> None:
    """The processor's seconds by phase of the large cases, of two revisions in turns."""
    report = Report("Compile time, in turns")
    report.line(f"\nGPT-2 on the meta device: the processor's seconds, medians of {rounds}")
    checkouts = {revision(other): other, revision(ROOT): ROOT}
    columns, rows = ("total", *PHASES), []
    for case in LARGE:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for _ in range(rounds):
            for name, root in checkouts.items():
                runs[name].append(_in_fresh_process(root, script=Path(__file__), **_settings(case)))
        medians = {
            name: [statistics.median(run.get(column, 0.0) for run in found) for column in columns]
            for name, found in runs.items()
        }
        rows += [[str(case), name, *(f"{s:.2f}" for s in found), ""] for name, found in medians.items()]
        before, after = medians.values()
        ratios = [f"{b / a:.2f}" if a else "" for a, b in zip(before, after, strict=True)]
        rows.append(["", "ratio", *ratios, f"{case.bar}"])
    report.table(["case", "fxpipe", *columns, "bar"], rows)
    report.save(output)


def _settings(case: Large) -> dict[str, Any]:
    return {name: value for name, value in asdict(case).items() if name != "bar"}


def _hard(report: Report, rounds: int, beside: Path | None) -> None:
    report.line(f"\nwhat takes long, {RANKS} ranks, {MICROBATCHES} microbatches: median seconds of {rounds}")
    checkouts = {revision(root): root for root in (ROOT, beside) if root is not None}
    rows = []
    for case in HARD:
        step = {"model": case.model, "layers": case.layers}
        settings = {**step, "schedule": case.schedule, **case.options}
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        traces = []
        for _ in range(rounds):
            for name, root in checkouts.items():
                runs[name].append(_in_fresh_process(root, **settings))
            traces.append(_in_fresh_process(trace_alone=True, **step)["processor"])
        for name, found in runs.items():
            medians = [statistics.median(run.get(column, 0.0) for run in found) for column in COLUMNS]
            cells = [*medians, statistics.median(traces)]
            rows.append([case.name, name, *(f"{seconds:.2f}" for seconds in cells), f"{case.bar:.0f}"])
    report.table(["case", "fxpipe", *COLUMNS, "torch's trace", "bar"], rows)


def _depths(report: Report, options: argparse.Namespace) -> None:
    report.line(
        f"\nGPT-2, hidden 256, dropout {options.dropout}, {RANKS} ranks, {MICROBATCHES} microbatches: "
        f"median seconds of {options.rounds}"
    )
    rows, totals = [], {}
    for schedule in options.schedules:
        for layers in options.layers:
            settings = {"layers": layers, "schedule": schedule, "dropout": options.dropout}
            runs = [_in_fresh_process(**settings) for _ in range(options.rounds)]
            medians = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
            totals[schedule, layers] = total = medians["total"]
            bar = f"{BARS[layers]:.0f}" if layers in BARS else ""
            cells = [f"{seconds:.2f}" for seconds in medians.values()]
            rows.append([schedule, str(layers), *cells, f"{1000 * total / layers:.0f}", bar])
    report.table(["schedule", "layers", *medians, "ms a layer", "bar"], rows)
    missed = [key for key, total in totals.items() if total > BARS.get(key[1], float("inf"))]
    report.line(f"over the bar: {missed}" if missed else "none is over its bar")
    first, last = min(options.layers), max(options.layers)
    if first < last:
        growth = max(totals[s, last] / totals[s, first] for s in options.schedules)
        report.line(f"{last / first:.1f} times the layers take {growth:.1f} times as long, at most")


def _in_fresh_process(root: Path = ROOT, script: Path | None = None, **settings: Any) -> dict[str, float]:
    """The result of ``compile_once`` of a checkout, or of this script with the checkout's fxpipe."""
    script = script or root / "benchmarks" / "compile_time.py"
    done = subprocess.run(
        [sys.executable, script, "--once", json.dumps(settings)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
    )
    return json.loads(done.stdout.splitlines()[-1])


def compile_once(
    layers: int,
    schedule: str = "1f1b",
    dropout: float = 0.1,
    model: str = "gpt2",
    offload: bool | float | str = False,
    memory_limit: float | None = None,
    trace_alone: bool = False,
    **settings: Any,
) -> dict[str, float]:
    """Seconds in total, of them the processor's, and in each phase; or those of torch's trace alone."""
    import torch

    from fxpipe.compiler.compile import compile_model
    from fxpipe.compiler.options import Options, settle
    from fxpipe.compiler.progress import Phases
    from fxpipe.plan.meshes import Mesh

    made, example = _gpt2(layers, dropout) if model == "gpt2" else _small_ops(layers)
    if trace_alone:
        return {"processor": _torch_trace(made, example)}
    options = Options(schedule=schedule, memory_limit=memory_limit, offload=offload, **settings)
    settled = settle(options, Mesh(RANKS, 1, MICROBATCHES), torch.device("cpu"))
    phase = Phases("")
    before, processor = time.perf_counter(), time.process_time()
    given = made, example, None, settled, torch.device("cpu")
    try:
        from fxpipe.compiler.compilation import Compilation

        compile_model(Compilation(*given), phase)
    except ImportError:  # of an earlier revision
        compile_model(*given, phase)
    total, processor = time.perf_counter() - before, time.process_time() - processor
    return {"total": total, "processor": processor, **phase.seconds}


def compile_large(layers: int, width: int, ranks: int, microbatches: int, schedule: str) -> dict[str, float]:
    """The processor's seconds of ``fxpipe.compile``, in total without the check of the programs, and in each
    phase, whatever the revision."""
    import fxpipe

    try:
        from fxpipe.compiler import progress
    except ImportError:  # of 1eb9f1b
        from fxpipe import progress  # type: ignore[attr-defined, no-redef]

    made, example = _gpt2(layers, 0.1, width)
    compiled = fxpipe.compile  # which loads it
    noted: list[Any] = []
    begin = progress.Phases.__init__

    def noting(self: Any, title: str) -> None:
        begin(self, title)
        noted.append(self)

    with (
        patch.object(progress.Phases, "__init__", noting),
        patch.object(progress, "time", SimpleNamespace(perf_counter=time.process_time)),
    ):
        before = time.process_time()
        compiled(made, example, ranks=ranks, microbatches=microbatches, schedule=schedule)
        total = time.process_time() - before
    seconds = noted[0].seconds
    return {"total": total - seconds.get("check", 0.0), **seconds}


def _torch_trace(model: Any, example: dict[str, Any]) -> float:
    """The processor's seconds of a trace of loss and gradients, with Python's garbage collector paused."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()

    def fake(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).requires_grad_(x.requires_grad)

    def step(state: dict[str, Any], example: dict[str, Any]) -> Any:
        output = torch.func.functional_call(model, state, kwargs=example)
        trained = [x for x in state.values() if x.requires_grad]
        return torch.autograd.grad(getattr(output, "loss", output), trained)

    gc.disable()
    before = time.process_time()
    with mode:
        state = {name: fake(x) for name, x in (*model.named_parameters(), *model.named_buffers())}
        example = {name: fake(x) for name, x in example.items()}
        make_fx(step, _allow_non_fake_inputs=True)(state, example)
    return time.process_time() - before


def _gpt2(layers: int, dropout: float, width: int = 256) -> tuple[Any, dict[str, Any]]:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        vocab_size=8192,
        n_positions=256,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
    ids = torch.zeros(1, 128, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def _small_ops(layers: int) -> tuple[Any, dict[str, Any]]:
    """A transformer with its norms, attention and gates written out: about 280 nodes a layer."""
    import torch
    from torch import nn

    width, heads, length = 64, 4, 64

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(7))
            self.scales = nn.ParameterList(torch.ones(width) for _ in range(2))

        def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
            def norm(x: Any, scale: Any) -> Any:
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale

            def turned(x: Any) -> Any:
                left, right = x.chunk(2, -1)
                return x * cosine + torch.cat((-right, left), -1) * sine

            query, key, value, out, gate, up, down = self.projections
            y = norm(x, self.scales[0])
            q, k, v = (p(y).view(*x.shape[:2], heads, -1).transpose(1, 2) for p in (query, key, value))
            attention = (turned(q) @ turned(k).transpose(-1, -2) / 4).softmax(-1)
            x = x + out((attention @ v).transpose(1, 2).reshape(x.shape))
            y = norm(x, self.scales[1])
            g = gate(y)
            return x + down(g * torch.sigmoid(g) * up(y))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, x: Any, y: Any) -> Any:
            angle = torch.arange(length)[:, None] * torch.arange(width // heads)[None]
            for layer in self.layers:
                x = layer(x, angle.cos(), angle.sin())
            return (x - y).square().mean()

    with torch.device("meta"):
        model = Net()
    x = torch.zeros(1, length, width)
    return model, {"x": x, "y": x}


def profile(layers: int, schedule: str, dropout: float, path: Path) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(compile_once, layers, schedule, dropout)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.dump_stats(path)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats("fxpipe/", 30)
    print(f"all functions: python -m pstats {path}")


if __name__ == "__main__":
    main()
