"""``fxpipe plan``: what a model would cost on devices that are not here, for each mesh."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

import torch
from rich.console import Console

from fxpipe.cli.lengths import drawn
from fxpipe.cli.option_of_compile import options_of
from fxpipe.cli.run.functions import called
from fxpipe.cli.run.model_function import model_from
from fxpipe.cli.ways import large, print_ways, ways_as_json
from fxpipe.compiler.choice.mesh import checked, compare_meshes, fastest_mesh, planned_step, planner_of
from fxpipe.compiler.choice.mesh_request import MeshRequest, request_of, rows_of
from fxpipe.compiler.compilation import Compilation
from fxpipe.compiler.compile import CapturedStep
from fxpipe.compiler.options import Options, Settings, settle
from fxpipe.compiler.progress import Phases
from fxpipe.cost.devices.known_devices import device_named, is_cpu
from fxpipe.cost.samples import Packer, Way
from fxpipe.cost.throughput import Throughput, throughputs
from fxpipe.errors import OptionError, number_of
from fxpipe.plan.meshes import Mesh, TriedMesh
from fxpipe.plan.step import NamedLength
from fxpipe.runtime.ranks.local_mesh import local_lanes
from fxpipe.schedule.units import PHYSICAL, bytes_text, number_text
from fxpipe.viz.explanation import mesh_table, reasons
from fxpipe.viz.terminal import say, terminal


@dataclass(eq=False)
class _Compared:
    """The meshes at some lengths of named dimensions.  ``at``: the throughput of each number of lanes."""

    at: dict[int, Throughput] = field(default_factory=dict)
    tried: list[TriedMesh] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min((one.seconds for one in self.tried if one.seconds is not None), default=inf)

    def per_second(self, one: TriedMesh) -> float:
        return self.at[one.mesh.lanes].per_second(one)

    def utilization(self, one: TriedMesh) -> float:
        return self.at[one.mesh.lanes].utilization(one)


def plan_meshes(options: argparse.Namespace) -> None:
    hardware = device_named(options.device)  # before the model is made
    _check_samples(options)
    _check_lanes(options)
    sizes = [{}, *({name: length} for name, length in options.size)]
    compared = [_Compared() for _ in sizes]
    drawn_ones, ways = list[list[int]](), list[Way]()
    for lanes, way in ((n, way) for n in options.lanes for way in (options.parallelize if n > 1 else [""])):
        with local_lanes(lanes) if lanes > 1 else nullcontext() as mesh:
            planned = _planned(compared, options, lanes, way, mesh, sizes)
            name = type(planned.compilation.model).__name__
            if options.lengths is not None:
                drawn_ones, ways = _of_lengths(options, planned, compared[0])
            planned.phase.finish("planned")
    of_lengths = options.lengths, options.seed, drawn_ones, ways
    if options.json:
        entries = [_as_json(each) for each in compared]
        if ways:
            entries[0] |= ways_as_json(*of_lengths)
        print(json.dumps(entries))
        return
    console = Console()
    request = _request(options, options.lanes[0])
    devices = request.devices * options.lanes[0]
    each_machine = f", {devices // options.nodes} on each machine" if options.nodes > 1 else ""
    say(
        console,
        f"{name} on {devices} x {hardware.name}{each_machine}; {_batch(request)}; optimizer state "
        f"{number_text(options.optimizer_bytes)} B an element",
    )
    for each in compared:
        at, tried = each.at[options.lanes[0]], each.tried
        if len(compared) > 1:
            console.print(terminal("\n" + ", ".join(f"{name} {n}" for name, n in at.lengths.items())))
        fits = any(one.seconds is not None for one in tried)
        columns: dict[str, Callable[[TriedMesh], str]] = {
            f"{at.unit}/s": lambda one, each=each: large(each.per_second(one)),  # type: ignore[misc]
            "MFU": lambda one, each=each: f"{each.utilization(one):.1%}",  # type: ignore[misc]
        }
        console.print(mesh_table(tried, fastest_mesh(tried).mesh if fits else None, columns))
        say(console, *reasons(tried), style="dim")
        needed = (fastest_mesh(tried).memory if fits else None) or 0.0
        if not hardware.holds(needed):
            has = f"{hardware.memory_size / 1e9:.0f} GB"
            text = f"No {hardware.name} holds {bytes_text(needed)}: it has {has}. Give --memory-limit."
            say(console, text)
    if ways:
        print_ways(console, *of_lengths, PHYSICAL)
    for each in compared:
        fastest_mesh(each.tried)  # raises where none fits, now that the table has told why


class _Planned(NamedTuple):
    """A step that was captured for a number of lanes."""

    compilation: Compilation
    step: CapturedStep
    phase: Phases


def _planned(
    compared: Sequence[_Compared],
    options: argparse.Namespace,
    lanes: int,
    way: str,
    mesh: object,
    sizes: Sequence[Mapping[str, int]],
) -> _Planned:
    """Compare all meshes of so many lanes.  way: the function that distributes the model over their mesh, if
    they are several."""
    request = _request(options, lanes)
    settings = _settings(options, request, lanes)
    model, example, loss_fn = model_from(options.model, torch.device("meta"))
    if lanes > 1:
        called(way, "nothing, or the model.", OptionError, {"model": model, "mesh": mesh})
    of_lanes = f", {lanes} lanes" if lanes > 1 else ""
    phase = Phases(f"fxpipe plan {type(model).__name__}{of_lanes}", ends=False)
    checked(settings, request.meshes(rows_of(example), lanes))
    compilation = Compilation(
        model,
        example,
        loss_fn,
        settings,
        torch.device("cpu"),
        has_programs=False,
        fused_attention=not is_cpu(options.device),
    )
    step = planned_step(compilation, phase)
    if options.lengths is not None:
        _of_samples(options, step)
    captured = step.captured.graph, step.resized, example, options.device
    for each, at, size in zip(compared, throughputs(*captured, sizes), sizes, strict=True):
        wanted = checked(settings, request.meshes(at.rows, lanes))
        tried = compare_meshes(compilation, step, wanted, phase, size or None, each.best)
        each.at[lanes] = at
        name = _named(way, options.parallelize)
        each.tried += (replace(one, mesh=replace(one.mesh, lanes=lanes, way=name)) for one in tried)
    return _Planned(compilation, step, phase)


def _named(way: str, ways: Sequence[str]) -> str:
    """The name of a function among several: without its module, where no other has that name."""
    short = [each.rpartition(":")[2] for each in ways]
    if len(ways) == 1 or not way:
        return ""
    return way.rpartition(":")[2] if len({*short}) == len(short) else way


def _of_lengths(
    options: argparse.Namespace, planned: _Planned, compared: _Compared
) -> tuple[list[list[int]], list[Way]]:
    """Samples of the lengths that were given, of some steps, and what these take on the fastest mesh."""
    mesh, at = fastest_mesh(compared.tried).mesh, compared.at[1]
    planner = planner_of(*planned[:2], mesh, planned.phase)
    number = mesh.microbatches * at.rows * mesh.replicas
    length, leading = _of_samples(options, planned.step)
    steps = drawn(options.lengths, length.example, number, options.seed)
    tokens = () if options.tokens is None else (options.tokens,)
    return steps, Packer(planner, length, at.rows, mesh.replicas, leading).ways(steps, tokens)


def _check_samples(options: argparse.Namespace) -> None:
    if options.lengths is None and options.tokens is not None:
        raise OptionError("--tokens needs --lengths")
    if options.lengths is not None and max(options.lanes) > 1:
        raise OptionError("--lengths takes no --lanes.")


def _of_samples(options: argparse.Namespace, step: CapturedStep) -> tuple[NamedLength, str | None]:
    """The dimension in which samples have the lengths that were given, and the name of the rows, if any."""
    rows = "" if step.resized is None else step.resized.leading
    others = [each for each in options.dimension if each[0] != rows]
    if len(others) != 1:
        raise OptionError(
            "--lengths needs one --dimension NAME=N, of the example, and takes another one of its rows."
        )
    name, length = others[0]
    return NamedLength(name, length, 1, 1), rows if rows in dict(options.dimension) else None


def _check_lanes(options: argparse.Namespace) -> None:
    if (not options.parallelize) != (max(options.lanes) == 1):
        raise OptionError(
            "--lanes of several numbers and --parallelize go together: the function that distributes the "
            "model over the mesh of the lanes, by parallelize_module."
        )


def _request(options: argparse.Namespace, lanes: int) -> MeshRequest:
    """The meshes of ranks that have so many lanes."""
    shard = None if options.shard == "none" else options.shard
    devices = options.devices
    if devices is not None:
        if lanes > 1 and devices % (options.nodes * lanes):
            raise OptionError(
                f"{lanes} lanes share a machine: {devices} devices on {number_of(options.nodes, 'node')} "
                "are no multiple of them."
            )
        devices = devices // lanes
    numbers = devices, options.ranks, options.replicas, options.microbatches, options.batch
    return request_of(*numbers, shard, None) or _by_hand(options, shard)


def _as_json(compared: _Compared) -> dict[str, object]:
    rows = []
    first = next(iter(compared.at.values()))
    for one in compared.tried:
        row = {
            "ranks": one.mesh.ranks,
            "replicas": one.mesh.replicas,
            "lanes": one.mesh.lanes,
            "way": one.mesh.way,
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
            per_second = compared.per_second(one)
            row |= {f"{first.unit}_per_second": per_second, "mfu": compared.utilization(one)}
        rows.append(row)
    return {"sizes": dict(first.lengths), "meshes": rows}


def _settings(options: argparse.Namespace, request: MeshRequest, lanes: int) -> Settings:
    if request.devices % options.nodes:
        raise OptionError(f"{request.devices * lanes} devices are no multiple of {options.nodes} nodes.")
    asked = Options(
        costs=options.device,
        dimensions=dict(options.dimension) if options.dimension or options.size else None,
        ranks_per_machine=request.devices // options.nodes,
        **options_of(options, Options),
    )
    return settle(asked, Mesh(1, 1, 1), torch.device("cpu"))


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
