"""Schedules beside what is published: bubbles at the same peak memory, and how long it takes to make them.

Rows that are searched show the median and the worst of ten seeds of the search's random numbers; a mark
holds for the median. ``draw`` makes settings at random, new ones with ``--draw N``; to compare two commits,
``--against FILE`` names what the other one wrote with ``--json FILE``.

Marks of 2401.10241 are of its paper.  Marks under a memory limit (†) are what the published schedulers of
2401.10241, 2405.15362 and 2503.01328 gave when they were run on the same times; a mark is the best of them
at that peak; what ``auto`` aims at for 6.2B is below it.  Families have their own stages per rank;
``auto`` tries one, two and four.  Times of a model are per microbatch and rank; memory is in microbatches
of a rank.

    python benchmarks/schedules.py --output benchmarks/results/schedules.txt
    python benchmarks/schedules.py --only limits uneven
    python benchmarks/schedules.py --only draw --draw 7 --seeds 3 --json this.json --against other.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from unittest import mock

from drawn_settings import Drawn, drawn_settings
from report import Report
from rich.progress import track

from fxpipe import ScheduleError
from fxpipe.schedule.candidate import SearchResult
from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.families import starts
from fxpipe.schedule.families.greedy import zero_bubble, zero_bubble_v
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.offload.planner import FULL, HALF, offload, with_link
from fxpipe.schedule.ops import Objective
from fxpipe.schedule.placement import place
from fxpipe.schedule.problem import Limit, Problem, per_rank
from fxpipe.schedule.search.auto import frontier as search_frontier
from fxpipe.schedule.search.auto import search
from fxpipe.schedule.search.build import build
from fxpipe.schedule.search.fastest import STAGES_PER_RANK
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
        stage = StageCost(*times, saved_activations=1 / chunks, saved_for_weight=self.kept / chunks)
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
HUGE = replace(B62, ranks=64, microbatches=512)
AIMS = {3: 0.3200, 4: 0.1780, 5: 0.1110, 6: 0.0860, 8: 0.0350, 12: 0.0140, 16: 0.0015}
HEURISTICS = (  # 28.3B of 2401.10241, and 24 ranks
    Model("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, LARGE),
    Model("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, LARGE),
    Model("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, LARGE),
    Model("6.2B", 24, 72, 29.718, 29.444, 19.927, 0.527, LARGE),
    Model("6.2B", 24, 192, 29.718, 29.444, 19.927, 0.527, LARGE),
)
TORCH = Model("1 / 1.2 / 0.6", 8, 16, 1.0, 1.2, 0.6, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: dict[str, Callable[[Report, argparse.Namespace], None]] = {
        "paper": paper,
        "heuristics": heuristics,
        "limits": limits,
        "aims": aims,
        "draw": draw,
        "ablation": ablation,
        "frontier": frontier,
        "uneven": uneven,
        "torch": torch_orders,
        "times": times,
        "offload": away,
        "huge": huge,
    }
    parser.add_argument(
        "--only", nargs="+", choices=parts, default=[p for p in parts if p not in ("huge", "ablation")]
    )
    parser.add_argument("--seeds", type=int, default=10, help="searches for a row")
    parser.add_argument("--draw", type=int, default=1, metavar="N", help="which settings are drawn")
    parser.add_argument("--settings", type=int, default=30, help="how many are drawn")
    parser.add_argument("--json", type=Path, help="keep the spans of drawn settings in this file")
    parser.add_argument("--against", type=Path, help="such a file, to compare with")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Schedules")
    for part in options.only:
        parts[part](report, options)
    report.save(options.output)


def made(
    name: str, model: Model, limit: float | None = None, costs: Costs | None = None, seed: int = 0
) -> tuple[Timeline, float]:
    """The simulated schedule, and the seconds that it took to make it."""
    began = time.perf_counter()
    if name == "auto":
        return found(model, limit, "span", seed=seed).timeline, time.perf_counter() - began
    costs = costs or model.costs(FAMILIES[name].stages_per_rank)
    schedule = build(
        name, ranks=model.ranks, microbatches=model.microbatches, costs=costs, memory_limit=limit, seed=seed
    )
    seconds = time.perf_counter() - began
    return simulate(schedule, costs), seconds


@dataclass(frozen=True)
class Luck:
    """Of several seeds: the span bubbles, rising, the largest peak, and the mean seconds of one."""

    bubbles: tuple[float, ...]
    peak: float
    seconds: float

    def beside(self, mark: float) -> str:
        """Median … worst / mark, with a sign where the median is worse at four decimals."""
        middle, worst = median(self.bubbles), self.bubbles[-1]
        spread = f" … {worst:.4f}" if worst > self.bubbles[0] else ""
        return f"{middle:.4f}{spread} / {mark:.4f}{' !' if round(middle, 4) > mark else ''}"


def tried(name: str, model: Model, limit: float | None, seeds: int) -> Luck:
    """One run where nothing is searched."""
    searched = name == "auto" or FAMILIES[name].is_searched
    runs = [made(name, model, limit, seed=seed) for seed in range(seeds if searched else 1)]
    bubbles = sorted(timeline.span_bubble for timeline, _ in runs)
    peak = max(max(timeline.peak_memory) for timeline, _ in runs)
    return Luck(tuple(bubbles), peak, sum(seconds for _, seconds in runs) / len(runs))


def found(
    model: Model,
    limit: float | None,
    objective: Objective,
    chunks: Sequence[int] = STAGES_PER_RANK,
    seed: int = 0,
) -> SearchResult:
    return search(problems_of(model, limit, objective, chunks), seed=seed)


def problems_of(
    model: Model, limit: Limit, objective: Objective, chunks: Sequence[int] = STAGES_PER_RANK
) -> list[Problem]:
    p, m, limits = model.ranks, model.microbatches, per_rank(limit, model.ranks)
    return [
        Problem(p, m, v, shape, model.costs(v), limits, objective=objective)
        for v in chunks
        for shape in (("plain", "v") if v > 1 else ("plain",))
    ]


def setting(model: Model) -> str:
    return f"{model.name} p={model.ranks} m={model.microbatches}"


def paper(report: Report, options: argparse.Namespace) -> None:
    report.line("\nSpan bubble: median … worst / published (2401.10241); seconds of one search of each")
    names = ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
    rows = []
    for model, marks in PAPER.items():
        results = [tried(name, model, None, options.seeds) for name in names]
        cells = [result.beside(mark) for result, mark in zip(results, marks, strict=True)]
        peak = "  ".join(f"{result.peak:.4g}" for result in results)
        rows.append([setting(model), *cells, peak, f"{sum(result.seconds for result in results[3:]):.1f}"])
    report.table(["", *names, "peaks", "seconds"], rows)
    rows = []
    for model, mark in PAPER_V.items():
        result = tried("zb-v", model, None, options.seeds)
        rows.append([setting(model), result.beside(mark), f"{result.peak:.4g}", f"{result.seconds:.1f}"])
    report.table(["", "zb-v", "peak", "seconds"], rows)


def heuristics(report: Report, options: argparse.Namespace) -> None:
    report.line("\nSpan bubble: median … worst / the published heuristic on the same times")
    rows = []
    for model in HEURISTICS:
        p = model.ranks
        for name, chunks, limit in (("zb", 1, p), ("zb", 1, 2 * p), ("zb-v", 2, p)):
            costs, shape = model.costs(chunks), "v" if chunks == 2 else "plain"
            problem = Problem(p, model.microbatches, chunks, shape, costs, (limit,) * p)
            publish = zero_bubble_v if chunks == 2 else zero_bubble
            spans = [
                done.span
                for order in publish(problem.arrays, problem.limits)
                if (done := order.run()) is not None
            ]
            mark = 1 - model.microbatches * problem.arrays.period / min(spans)
            result = tried(name, model, limit, options.seeds)
            label = f"{setting(model)}, {name}, {limit} M_B"
            rows.append([label, result.beside(round(mark, 4)), f"{result.seconds:.1f}"])
    report.table(["", "span bubble", "seconds"], rows)


def limits(report: Report, options: argparse.Namespace) -> None:
    report.line("\nUnder a limit in M_B. Span bubble: median … worst / † mark (peak); seconds of one each")
    models = (B15, B62, B62_64, UNIT, UNIT_64)
    rows = []
    for (name, limit), marks in LIMITS.items():
        cells, total = [], 0.0
        for model in models:
            if model not in marks:
                cells.append("")
                continue
            result = tried(name, model, limit, options.seeds)
            cells.append(f"{result.beside(marks[model])} ({result.peak:.4g})")
            total += result.seconds
        rows.append([f"{name}, {limit:g}", *cells, f"{total:.1f}"])
    report.table(["", *(f"{model.name} m={model.microbatches}" for model in models), "seconds"], rows)


def aims(report: Report, options: argparse.Namespace) -> None:
    report.line(f"\nauto, {setting(B62)}: median … worst / aim; seconds of one search (bar: 5)")
    rows = []
    for limit, mark in AIMS.items():
        result = tried("auto", B62, limit, options.seeds)
        rows.append([f"{limit:g} M_B", result.beside(mark), f"{result.seconds:.1f}"])
    began = time.perf_counter()
    costs = HUGE.costs(2)
    schedule = build(
        "zb", ranks=64, microbatches=512, costs=costs, stages_per_rank=2, placement="v", memory_limit=24.0
    )
    seconds = time.perf_counter() - began
    bubble = simulate(schedule, costs).span_bubble
    rows.append([f"zb in V, {setting(HUGE)}, 24 M_B", f"{bubble:.4f} / 0.2770", f"{seconds:.1f}"])
    report.table(["limit", "span bubble", "seconds"], rows)


def draw(report: Report, options: argparse.Namespace) -> None:
    report.line(f"\n{options.settings} settings drawn at random (draw {options.draw}), zb: span")
    given = [] if options.against is None else json.loads(options.against.read_text())
    others = {row["setting"]: row for row in given}
    rows, kept, ratios, spent = [], [], [], [0.0, 0.0]
    for drawn in track(drawn_settings(options.settings, options.draw), "settings", transient=True):
        began = time.process_time()
        spans = _spans(drawn, options.seeds)
        cpu = (time.process_time() - began) / options.seeds
        kept.append({"setting": drawn.label, "spans": sorted(spans), "cpu": cpu})
        row = [drawn.label, f"{median(spans):.4f}", f"{max(spans):.4f}", f"{cpu:.1f}"]
        if drawn.label in others:
            other = others[drawn.label]
            ratios.append(median(spans) / median(other["spans"]) - 1)
            spent = [spent[0] + cpu, spent[1] + other["cpu"]]
            row += [f"{median(other['spans']):.4f}", f"{ratios[-1]:+.2%}", f"{other['cpu']:.1f}"]
        rows.append(row)
    beside = ["other", "difference", "CPU s"] if others else []
    report.table(["", "median", "worst", "CPU s", *beside], rows)
    if ratios:
        report.line(
            f"difference: median {median(ratios):+.2%}, mean {sum(ratios) / len(ratios):+.2%}, best "
            f"{min(ratios):+.2%}, worst {max(ratios):+.2%}; CPU seconds {spent[0]:.0f} beside {spent[1]:.0f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(kept, indent=1))


def ablation(report: Report, options: argparse.Namespace) -> None:
    """With one stage a rank, and two in V placement; under the drawn limit and that of 1F1B."""
    report.line(
        f"\nThe search without the greedy orders of 2401.10241 among its starts (draw {options.draw}), zb: "
        "median span with them, without, difference"
    )
    for greedy, chunks, shape in (("zero_bubble", 1, "plain"), ("zero_bubble_v", 2, "v")):
        drawn = drawn_settings(20 * options.settings, options.draw)
        kept = [one for one in drawn if (one.stages_per_rank, one.placement) == (chunks, shape)]
        rows, ratios = [], []
        for one in track(kept[: options.settings], "settings", transient=True):
            for limit in (one.limit, float(one.ranks)):
                limited = replace(one, limit=limit)
                with_them = median(_spans(limited, options.seeds))
                with mock.patch.object(starts, greedy, return_value=[]):
                    without = median(_spans(limited, options.seeds))
                ratios.append(without / with_them - 1)
                rows.append([limited.label, f"{with_them:.4f}", f"{without:.4f}", f"{ratios[-1]:+.2%}"])
        report.table([greedy, "with", "without", "difference"], rows)
        report.line(f"difference: mean {sum(ratios) / len(ratios):+.2%}, worst {max(ratios):+.2%}")


def _spans(drawn: Drawn, seeds: int) -> list[float]:
    spans = []
    for seed in range(seeds):
        schedule = build(
            "zb",
            ranks=drawn.ranks,
            microbatches=drawn.microbatches,
            costs=drawn.costs,
            stages_per_rank=drawn.stages_per_rank,
            placement=drawn.placement,
            memory_limit=drawn.limit,
            seed=seed,
        )
        spans.append(simulate(schedule, drawn.costs).span)
    return spans


def frontier(report: Report, options: argparse.Namespace) -> None:
    report.line("\nThe frontier in one call: span bubble under a limit; ! where a lower limit has less")
    for model in (B62, LONG):
        limits = FRONTIER[model.ranks]
        choices = search_frontier(problems_of(model, None, "span"), limits, effort=1.0)
        rows, least = [], inf
        for limit, choice in zip(limits, choices, strict=True):
            if isinstance(choice, ScheduleError):
                raise choice
            timeline = choice.timeline
            mark = "!" if timeline.span > least * (1 + 1e-9) else ""
            least = min(least, timeline.span)
            bubble, peak = f"{timeline.span_bubble:.4f}{mark}", f"{max(timeline.peak_memory):.4g}"
            rows.append([f"{limit:.4g}", bubble, peak])
        report.table([setting(model), "auto", "peak"], rows)


def uneven(report: Report, options: argparse.Namespace) -> None:
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
    names = ("forward", "backward", "weight", "saved_activations", "saved_for_weight")
    mean = StageCost(*(sum(getattr(stage, name) for stage in costs.stages) / count for name in names))
    return replace(costs, stages=(mean,) * count)


def torch_orders(report: Report, options: argparse.Namespace) -> None:
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
                    choice.problem.shape,
                    f"{seconds:.1f}",
                ]
            )
    report.table(["", "makespan", "span", "peak", "placement", "seconds"], rows)


def times(report: Report, options: argparse.Namespace) -> None:
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


def away(report: Report, options: argparse.Namespace) -> None:
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


def huge(report: Report, options: argparse.Namespace) -> None:
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
