"""``fxpipe plan``: what a model would cost on devices that are not here, for each mesh."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console

from fxpipe.cli.arguments import memory, non_negative, positive, positive_int
from fxpipe.cli.lengths import add_lengths, drawn
from fxpipe.cli.option_of_compile import add_option
from fxpipe.cli.run.model_function import model_from
from fxpipe.cli.ways import large, print_ways, ways_as_json
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.mesh import checked, compare_meshes, fastest_mesh, planned_step, planner_of
from fxpipe.compiler.mesh_request import MeshRequest, request_of, rows_of
from fxpipe.compiler.options import Options, Settings, settle
from fxpipe.compiler.progress import Phases
from fxpipe.cost.known_devices import device_named, device_names, is_cpu
from fxpipe.cost.samples import Packer
from fxpipe.cost.throughput import Throughput, throughputs
from fxpipe.errors import OptionError, number_of
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.plan.step import SHARDS, NamedLength
from fxpipe.schedule.ops import VALIDATIONS
from fxpipe.schedule.units import PHYSICAL, bytes_text, number_text
from fxpipe.viz.explanation import mesh_table, reasons
from fxpipe.viz.terminal import terminal

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares meshes of ranks and replicas for a model on devices that need not be here. Nothing is "
        "allocated: the function runs with tensors on the meta device."
    )
    parser.set_defaults(command=_plan)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="MODULE:FUNCTION",
        help="a Python function that returns (model, example), or (model, example, loss_fn)",
    )
    add("--device", required=True, metavar="NAME", help=f"one of: {', '.join(device_names())}")
    add_option(parser, "devices", type=positive_int, metavar="N")
    add_option(parser, "ranks", type=positive_int, metavar="P")
    add_option(parser, "replicas", type=positive_int, metavar="D")
    add("--nodes", type=positive_int, default=1, metavar="N", help="machines that have the devices (1)")
    add_option(parser, "batch", type=positive_int, metavar="ROWS")
    add_option(parser, "microbatches", type=positive_int, metavar="M")
    add_option(parser, "memory_limit", type=memory, metavar="BYTES")
    add_option(parser, "optimizer_bytes", type=non_negative, default=8.0, metavar="X")
    add_option(parser, "shard", choices=("auto", "none", *SHARDS), default="auto")
    add_option(parser, "grad_dtype", choices=DTYPES)
    add_option(parser, "schedule", default="auto", metavar="NAME")
    add_option(parser, "recompute", choices=("norms", "full", "auto"))
    add_option(parser, "vocab_parallel", choices=("1-barrier", "2-barrier", "auto"))
    add_option(parser, "backend", choices=("eager", "inductor"), default="eager")
    add_option(parser, "validation", choices=VALIDATIONS, default="barrier")
    add_option(parser, "effort", type=positive, metavar="S")
    add(
        "--dimension",
        type=_length,
        action="append",
        default=[],
        metavar="NAME=N",
        help="a name for the dimensions of the example that are N long",
    )
    add(
        "--size",
        type=_length,
        action="append",
        default=[],
        metavar="NAME=N",
        help="also plan for this length of a named dimension, or for so many rows (microbatch=N), without "
        "tracing again",
    )
    add_lengths(parser, "of samples, of which steps are drawn for the fastest mesh: padded, and packed")
    add("--json", action="store_true", help="print one JSON object")


def _plan(options: argparse.Namespace) -> None:
    hardware, length = device_named(options.device), _of_samples(options)  # before the model is made
    shard = None if options.shard == "none" else options.shard
    numbers = options.devices, options.ranks, options.replicas, options.microbatches, options.batch
    request = request_of(*numbers, shard, None) or _by_hand(options, shard)
    settings = _settings(options, request)
    model, example, loss_fn = model_from(options.model, torch.device("meta"))
    device, phase = torch.device("cpu"), Phases(f"fxpipe plan {type(model).__name__}", ends=False)
    checked(settings, request.meshes(rows_of(example)))
    compilation = Compilation(
        model,
        example,
        loss_fn,
        settings,
        device,
        has_programs=False,
        fused_attention=not is_cpu(options.device),
    )
    step = planned_step(compilation, phase)
    sizes = [{}, *({name: length} for name, length in options.size)]
    captured = step.captured.graph, step.resized, example, options.device
    compared = []
    for at, size in zip(throughputs(*captured, sizes), sizes, strict=True):
        wanted = checked(settings, request.meshes(at.rows))
        compared.append((at, compare_meshes(compilation, step, wanted, phase, size or None)))
    at, tried = compared[0]
    packed, drawn_ones = [], list[list[int]]()
    if length is not None:
        mesh = fastest_mesh(tried).mesh
        planner, tail = planner_of(compilation, step, mesh, phase)
        number = mesh.microbatches * at.rows * mesh.replicas
        drawn_ones = drawn(options.lengths, length.example, number, options.seed)
        tokens = () if options.tokens is None else (options.tokens,)
        packed = Packer(planner, length, at.rows, mesh.replicas, tail).ways(drawn_ones, tokens)
    phase.finish("planned")
    of_lengths = options.lengths, options.seed, drawn_ones, packed
    if options.json:
        entries = [_as_json(at, tried) for at, tried in compared]
        if packed:
            entries[0] |= ways_as_json(*of_lengths)
        print(json.dumps(entries))
        return
    console = Console()
    devices, per_node = request.devices, settings.ranks_per_machine
    console.print(
        terminal(
            f"{type(model).__name__} on {devices} x {hardware.name}"
            f"{f', {per_node} on each machine' if options.nodes > 1 else ''}; "
            f"{_batch(request)}; optimizer state {number_text(options.optimizer_bytes)} B an element"
        ),
        soft_wrap=True,
    )
    for at, tried in compared:
        if len(compared) > 1:
            console.print(terminal("\n" + ", ".join(f"{name} {n}" for name, n in at.lengths.items())))
        fits = any(one.seconds is not None for one in tried)
        columns: dict[str, Callable[[TriedMesh], str]] = {
            f"{at.unit}/s": lambda one, at=at: large(at.per_second(one)),  # type: ignore[misc]
            "MFU": lambda one, at=at: f"{at.utilization(one):.1%}",  # type: ignore[misc]
        }
        console.print(mesh_table(tried, fastest_mesh(tried).mesh if fits else None, columns))
        for line in reasons(tried):
            console.print(terminal(line), soft_wrap=True, style="dim")
        needed = (fastest_mesh(tried).memory if fits else None) or 0.0
        if needed > hardware.memory_size:
            has = f"{hardware.memory_size / 1e9:.0f} GB"
            text = f"No {hardware.name} holds {bytes_text(needed)}: it has {has}. Give --memory-limit."
            console.print(terminal(text), soft_wrap=True)
    if packed:
        print_ways(console, *of_lengths, PHYSICAL)
    for _, tried in compared:
        fastest_mesh(tried)


def _of_samples(options: argparse.Namespace) -> NamedLength | None:
    """The dimension in which samples have the lengths that were given."""
    if options.lengths is None and options.tokens is not None:
        raise OptionError("--tokens needs --lengths")
    if options.lengths is None:
        return None
    if len(options.dimension) != 1 or options.vocab_parallel:
        raise OptionError("--lengths needs one --dimension NAME=N, of the example, and no --vocab-parallel.")
    name, example = options.dimension[0]
    return NamedLength(name, example, 1, 1)


def _as_json(at: Throughput, tried: Sequence[TriedMesh]) -> dict[str, object]:
    rows = []
    for one in tried:
        row = {
            "ranks": one.mesh.ranks,
            "replicas": one.mesh.replicas,
            "microbatches": one.mesh.microbatches,
            "shard": one.mesh.shard,
            "schedule": one.schedule,
            "stages_per_rank": one.stages_per_rank,
            "recompute": one.recompute,
            "seconds": one.seconds,
            "memory": one.memory,
            "bound": one.bound,
            "why_not": one.why,
        }
        if one.seconds is not None:
            row |= {f"{at.unit}_per_second": at.per_second(one), "mfu": at.utilization(one)}
        rows.append(row)
    return {"sizes": dict(at.lengths), "meshes": rows}


def _settings(options: argparse.Namespace, request: MeshRequest) -> Settings:
    if request.devices % options.nodes:
        raise OptionError(f"{request.devices} devices are no multiple of {options.nodes} nodes.")
    asked = Options(
        schedule=options.schedule,
        memory_limit=options.memory_limit,
        costs=options.device,
        optimizer_bytes=options.optimizer_bytes,
        grad_dtype=DTYPES.get(options.grad_dtype),
        recompute=options.recompute or False,
        vocab_parallel=options.vocab_parallel or False,
        backend=options.backend,
        validation=options.validation,
        dimensions=dict(options.dimension) if options.dimension or options.size else None,
        effort=options.effort,
        ranks_per_machine=request.devices // options.nodes,
    )
    settings = settle(asked, Mesh(1, 1, 1), torch.device("cpu"))
    return replace(settings, limit_text="" if options.memory_limit is None else options.memory_limit.unit)


def _by_hand(options: argparse.Namespace, shard: str | None) -> MeshRequest:
    """A mesh that leaves no choice."""
    replicas = options.replicas or 1
    numbers = options.ranks * replicas, options.ranks, replicas, None, options.microbatches
    return MeshRequest(*numbers, (shard or "",))  # type: ignore[arg-type]


def _batch(request: MeshRequest) -> str:
    if request.rows is not None:
        return f"batch of {number_of(request.rows, 'row')}"
    assert request.microbatches is not None, "one of both is given"
    return f"{number_of(request.microbatches, 'microbatch')} a replica"


def _length(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=N, as sequence=4096 is")
    return name, int(number)
