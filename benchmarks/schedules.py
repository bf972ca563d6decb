"""Schedules beside what is published: bubbles at the same peak memory, and how long it takes to make them.

Marks of 2401.10241 are of its paper.  Marks under a memory limit (†) are what the published schedulers of
2401.10241, 2405.15362 and 2503.01328 gave when they were run on the same times; a mark is the best of them
at that peak; what ``auto`` aims at for 6.2B is below it.  Families have their own stages per rank;
``auto`` tries one, two and four.  Times of a model are per microbatch and rank; memory is in microbatches
of a rank.

    python benchmarks/schedules.py --output benchmarks/results/schedules.txt
    python benchmarks/schedules.py --only limits uneven
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from report import Report

from fxpipe.cli.planning import CHUNKS
from fxpipe.errors import ScheduleError
from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.families.registry import FAMILIES, build
from fxpipe.schedule.offload.planner import FULL, HALF, offload, with_link
from fxpipe.schedule.placement import place
from fxpipe.schedule.search.auto import Choice, Objective, Setting, search
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline


@dataclass(frozen=True)
class Model:
    """Times of one microbatch on one rank, and the share of its activations that W still needs."""

    name: str
    ranks: int
    microbatches: int
    forward: float
    backward: float
    weight: float
    comm: float
    kept: float = 1.0

    def costs(self, chunks: int) -> Costs:
        times = (time / chunks for time in (self.forward, self.backward, self.weight))
        stage = StageCost(*times, saved=1 / chunks, kept=self.kept / chunks)
        return chain([stage] * (self.ranks * chunks), self.comm)


SMALL, LARGE = 0.5, 1 - (2 * 4096 + 5 * 32 * 1024) / (34 * 4096 + 5 * 32 * 1024)  # what W needs

PAPER = {  # 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p
    Model("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, SMALL): (0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    Model("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, SMALL): (0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    Model("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, SMALL): (0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
    Model("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, LARGE): (0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    Model("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, LARGE): (0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    Model("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, LARGE): (0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
}
PAPER_V = {  # ZB-V
    Model("14.6B", 16, 48, 28.814, 28.760, 19.352, 1.610): 0.0697,
    Model("14.6B", 16, 64, 28.824, 28.786, 19.376, 1.621): 0.0533,
    Model("14.6B", 16, 128, 28.632, 28.612, 19.278, 1.619): 0.0274,
}

B15, _, _, B62, _, B62_64 = PAPER
UNIT, UNIT_64 = (Model("F=B=W", 8, m, 1.0, 1.0, 1.0, 0.0, 0.5) for m in (24, 64))

LIMITS: dict[tuple[str, float], dict[Model, float]] = {  # family, limit; the mark of each model
    ("v-min", 4): {B15: 0.2993, B62: 0.2410, B62_64: 0.1843, UNIT: 0.1377, UNIT_64: 0.0565},
    ("v-half", 5): {B15: 0.1695, B62: 0.1447, B62_64: 0.0607, UNIT: 0.1056, UNIT_64: 0.0424},
    ("v-half", 6): {B15: 0.1398, B62: 0.1132, UNIT: 0.0710, UNIT_64: 0.0278},
    ("zb-v", 8): {B15: 0.0703, B62: 0.0403, B62_64: 0.0166, UNIT: 0.0, UNIT_64: 0.0},
    ("gis", 8): {B15: 0.1136, B62: 0.1033, B62_64: 0.0418, UNIT: 0.0886, UNIT_64: 0.0352},
    ("gis", 6): {UNIT: 0.1111, UNIT_64: 0.0448},
    ("interleaved", 11.5): {B15: 0.1396, B62: 0.1336, B62_64: 0.0547, UNIT: 0.1273, UNIT_64: 0.0519},
    ("zb", 8): {B15: 0.1585, B62: 0.1323, B62_64: 0.0554, UNIT: 0.0886, UNIT_64: 0.0352},
    ("zb", 12): {B15: 0.0719, B62: 0.0475, B62_64: 0.0185, UNIT: 0.0400, UNIT_64: 0.0154},
    ("zb", 16): {B15: 0.0433, B62: 0.0029, B62_64: 0.0010, UNIT: 0.0, UNIT_64: 0.0},
}

AIM = {4: {B62: 0.2400, B62_64: 0.1750}, 5: {B62: 0.1440, B62_64: 0.0600}, 6: {B62: 0.1110}}  # below †
LIMITS |= {
    ("auto", limit): marks | AIM.get(limit, {})
    for (name, limit), marks in LIMITS.items()
    if name.startswith(("v-", "zb-v"))
}
FRONTIER = {8: [1.5 + 0.31 * k for k in range(25)], 32: [5 + 1.7 * k for k in range(22)]}  # most no rungs
UNEVEN = (("1f1b", None), ("zb-h1", None), ("zb", 8), ("zb-v", None), ("v-half", 5), ("v-min", 4), ("gis", 8))
LONG = Model("F=B=W", 32, 256, 1.0, 1.0, 1.0, 0.01, 0.5)
TORCH = Model("1 / 1.2 / 0.6", 8, 16, 1.0, 1.2, 0.6, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[[Report], None]] = {
        "paper": paper,
        "limits": limits,
        "frontier": frontier,
        "uneven": uneven,
        "torch": torch_orders,
        "times": times,
        "offload": away,
        "huge": huge,
    }
    parser.add_argument("--only", nargs="+", choices=parts, default=[p for p in parts if p != "huge"])
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Schedules")
    for part in options.only:
        parts[part](report)
    report.save(options.output)


def made(
    name: str, model: Model, limit: float | None = None, costs: Costs | None = None
) -> tuple[Timeline, float]:
    """The simulated schedule, and the seconds that it took to make it."""
    began = time.perf_counter()
    if name == "auto":
        return found(model, limit, "span").timeline, time.perf_counter() - began
    costs = costs or model.costs(FAMILIES[name].stages_per_rank)
    schedule = build(
        name, ranks=model.ranks, microbatches=model.microbatches, costs=costs, memory_limit=limit
    )
    seconds = time.perf_counter() - began
    return simulate(schedule, costs), seconds


def found(model: Model, limit: float | None, objective: Objective, chunks: Sequence[int] = CHUNKS) -> Choice:
    settings = [
        Setting(v, placement, model.costs(v))
        for v in chunks
        for placement in (("plain", "v") if v > 1 else ("plain",))
    ]
    return search(
        settings,
        ranks=model.ranks,
        microbatches=model.microbatches,
        memory_limit=limit,
        objective=objective,
    )


def setting(model: Model) -> str:
    return f"{model.name} p={model.ranks} m={model.microbatches}"


def beside(ours: float, mark: float) -> str:
    """Ours and the mark, with a sign where ours is worse at four decimals."""
    return f"{ours:.4f} / {mark:.4f}{' !' if round(ours, 4) > mark else ''}"


def paper(report: Report) -> None:
    report.line("\nSpan bubble: ours / published (2401.10241); the seconds are for zb-1p and zb-2p together")
    names = ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
    rows = []
    for model, marks in PAPER.items():
        results = [made(name, model) for name in names]
        cells = [beside(result.span_bubble, mark) for (result, _), mark in zip(results, marks, strict=True)]
        peak = "  ".join(f"{max(result.peak_memory):.4g}" for result, _ in results)
        rows.append([setting(model), *cells, peak, f"{sum(seconds for _, seconds in results[3:]):.1f}"])
    report.table(["", *names, "peaks", "seconds"], rows)
    rows = []
    for model, mark in PAPER_V.items():
        result, seconds = made("zb-v", model)
        rows.append(
            [
                setting(model),
                beside(result.span_bubble, mark),
                f"{max(result.peak_memory):.4g}",
                f"{seconds:.1f}",
            ]
        )
    report.table(["", "zb-v", "peak", "seconds"], rows)


def limits(report: Report) -> None:
    report.line("\nUnder a memory limit, in M_B. Span bubble: ours / † mark (peak); seconds to make all")
    models = (B15, B62, B62_64, UNIT, UNIT_64)
    rows = []
    for (name, limit), marks in LIMITS.items():
        cells, total = [], 0.0
        for model in models:
            if model not in marks:
                cells.append("")
                continue
            result, seconds = made(name, model, limit)
            peak = max(result.peak_memory)
            cells.append(f"{beside(result.span_bubble, marks[model])} ({peak:.4g})")
            total += seconds
        rows.append([f"{name}, {limit:g}", *cells, f"{total:.1f}"])
    report.table(["", *(f"{model.name} m={model.microbatches}" for model in models), "seconds"], rows)


def frontier(report: Report) -> None:
    report.line("\nThe frontier: span bubble under a limit in M_B; ! where it is above that of a lower limit")
    for model, families in ((B62, ("v-half", "zb", "gis", "auto")), (LONG, ("v-half", "zb", "gis"))):
        report.line(f"\n{setting(model)}")
        rows, least = [], dict.fromkeys(families, inf)
        for limit in FRONTIER[model.ranks]:
            row = [f"{limit:.4g}"]
            for name in families:
                try:
                    result, _ = made(name, model, limit)
                except ScheduleError:  # gis needs three quarters of 1F1B's memory
                    row.append("")
                    continue
                mark = "!" if result.span > least[name] * (1 + 1e-9) else " "
                row.append(f"{result.span_bubble:.4f}{mark}")
                least[name] = min(least[name], result.span)
            rows.append(row)
        report.table(["limit", *families], rows)


def uneven(report: Report) -> None:
    report.line(f"\nOne rank's stages 30% heavier, {setting(B62)}: seconds of the span (makespan)")
    rows = []
    for name, limit in UNEVEN:
        for heavy in (0, 3, 7):
            chunks = FAMILIES[name].stages_per_rank
            even = B62.costs(chunks)
            homes = place(FAMILIES[name].placement, B62.ranks, chunks)
            costs = replace(
                even,
                stages=tuple(
                    _heavier(stage) if homes[s] == heavy else stage for s, stage in enumerate(even.stages)
                ),
            )
            ours, _ = made(name, B62, limit, costs)
            fed_with_mean, _ = made(name, B62, limit, _mean(costs))
            theirs = simulate(fed_with_mean.schedule, costs)
            rows.append(
                [
                    f"{name}, rank {heavy} heavier",
                    f"{ours.span:.1f} ({ours.seconds:.1f})",
                    f"{theirs.span:.1f} ({theirs.seconds:.1f})",
                    "!" if ours.span > theirs.span * (1 + 1e-9) else "",
                ]
            )
    report.table(["", "ours", "fed with mean costs", ""], rows)


def _heavier(stage: StageCost) -> StageCost:
    return replace(
        stage, forward=1.3 * stage.forward, backward=1.3 * stage.backward, weight=1.3 * stage.weight
    )


def _mean(costs: Costs) -> Costs:
    count = len(costs.stages)
    names = ("forward", "backward", "weight", "saved", "kept")
    mean = StageCost(*(sum(getattr(stage, name) for stage in costs.stages) / count for name in names))
    return replace(costs, stages=(mean,) * count)


def torch_orders(report: Report) -> None:
    work = TORCH.microbatches * (TORCH.forward + TORCH.backward + TORCH.weight)
    report.line(
        f"\nTwo stages a rank, {setting(TORCH)}: makespan and span, of m(F+B+W). "
        "torch: 1.125 (InterleavedZeroBubble), 1.094 (ZBVZeroBubble)"
    )
    rows = []
    for limit in (None, 8.0):
        for objective in ("makespan", "span"):
            began = time.perf_counter()
            choice = found(TORCH, limit, objective, chunks=(2,))
            seconds = time.perf_counter() - began
            timeline = choice.timeline
            rows.append(
                [
                    f"auto, {objective}, {'no limit' if limit is None else f'limit {limit:g}'}",
                    f"{timeline.seconds / work:.4f}",
                    f"{timeline.span / work:.4f}",
                    f"{max(timeline.peak_memory):.4g}",
                    choice.setting.placement,
                    f"{seconds:.1f}",
                ]
            )
    report.table(["", "makespan", "span", "peak", "placement", "seconds"], rows)


def times(report: Report) -> None:
    report.line("\nSeconds to make a schedule (bar)")
    large = replace(B62, ranks=32, microbatches=256)
    rows = []
    for name, family in FAMILIES.items():
        for limit in (None, 16.0) if family.is_searched else (None,):
            _, seconds = made(name, large, limit)
            rows.append([f"{name}, p=32 m=256, limit {limit}", f"{seconds:.2f}", "2"])
    for model, bar in ((B62_64, 10), (large, 60)):
        for limit in (None, model.ranks * 0.7):
            began = time.perf_counter()
            timeline = found(model, limit, "makespan").timeline
            seconds = time.perf_counter() - began
            rows.append(
                [
                    f"auto, p={model.ranks} m={model.microbatches}, limit {limit}: "
                    f"makespan bubble {timeline.makespan_bubble:.4f}, peak {max(timeline.peak_memory):.4g}",
                    f"{seconds:.1f}",
                    f"{bar}",
                ]
            )
    rows.append(_simulating(replace(B62, ranks=64, microbatches=1024), "zb-h1", 2))
    report.table(["", "seconds", "bar"], rows)


def away(report: Report) -> None:
    """One-way times K from a tenth of a microbatch's work on.  Bars, for gis with 4 stages a rank: half away
    at most 4 to K = 0.5, all away at most 1 to K = 0.3; with 16 stages a rank half leaves at most 30%."""
    report.line(
        "\nOffload: F = B = W = 1, 8 ranks, 32 microbatches; peak memory, and time beside gis without"
    )
    rows = []
    for name, chunks in (("gis", 4), ("staggered", 4), ("gis", 16), ("staggered", 16)):
        for k in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5):
            whole, moved = _moved(name, 8, 32, chunks, k)
            gis, _ = _moved("gis", 8, 32, chunks, k)
            peaks = [max(t.peak_memory) for t in (whole, *moved)]
            stalls = max(max(t.stalled) for t in moved)
            row = [f"{name}, {chunks} stages a rank", f"{k}", *(f"{peak:.3g}" for peak in peaks)]
            row += [f"{peaks[1] / peaks[0]:.1%}", f"{whole.seconds / gis.seconds:.4f}", f"{stalls:.2g}"]
            rows.append(row)
    report.table(("schedule", "K", "peak", "half away", "all away", "half / peak", "time", "waiting"), rows)
    before = time.perf_counter()
    _, (_, most) = _moved("gis", 16, 64, 4, 0.3)
    taken = time.perf_counter() - before
    report.line(
        f"16 ranks, 64 microbatches, 4 stages a rank, all away: {taken:.2f} s, with the schedule and half of "
        f"it away too (published: 34 s and more; bar 5 s); peak {max(most.peak_memory):.3g}"
    )


def _moved(
    name: str, ranks: int, microbatches: int, chunks: int, k: float
) -> tuple[Timeline, tuple[Timeline, Timeline]]:
    """As it is; with half of it away, and with all."""
    stage = StageCost(*(1 / chunks,) * 5)
    costs = with_link(chain([stage] * (ranks * chunks)), k)
    schedule = build(name, ranks=ranks, microbatches=microbatches, costs=costs, stages_per_rank=chunks)
    whole = simulate(schedule, costs)
    return whole, (offload(whole, HALF).timeline, offload(whole, FULL).timeline)


def huge(report: Report) -> None:
    report.line("\nA very large step")
    report.table(
        ["", "seconds", "bar"], [_simulating(replace(B62, ranks=1024, microbatches=4096), "1f1b", 600)]
    )


def _simulating(model: Model, name: str, bar: float) -> list[str]:
    costs = model.costs(1)
    schedule = build(name, ranks=model.ranks, microbatches=model.microbatches, costs=costs)
    began = time.perf_counter()
    timeline = simulate(schedule, costs)
    seconds = time.perf_counter() - began
    return [
        f"simulating {name}, p={model.ranks} m={model.microbatches}: span bubble {timeline.span_bubble:.4f}",
        f"{seconds:.2f}",
        f"{bar:g}",
    ]


if __name__ == "__main__":
    main()
