"""Vocabulary layers spread over the ranks: is the work even, with a small vocabulary and with a large one?

A GPT-2 of Hugging Face with 8 layers, hidden 512, sequence 256 (embedding and head not tied, no dropout),
microbatches of one sequence, on 4 ranks (CPU, gloo, one thread a rank).  Forward and backward, no optimizer.
fxpipe runs it whole, where the cuts between stages are all that balances the output layer, and with
vocab_parallel; for torch.distributed.pipelining the layers are split evenly by hand, with the embedding on
the first and the head on the last stage.  fxpipe compiles the model once, saves it, and the ranks load it.

Measured, in real processes, each contender alone and one after the other:
- CPU s a step: processor time of each rank in a step, all its threads, the median of the steps.  The ranks
  share the machine's cores, so times by the clock would say little; a rank that waits takes next to no
  processor time (measured and printed), and what it spends on sending and receiving is counted;
- busiest ÷ mean: of these, the largest over the mean of all ranks; "of main threads" is the same without the
  threads in which gloo sends and receives;
- peak: what a rank holds resident at most, MiB, weights, gradients and libraries included; of it before the
  first step: libraries and weights; those that fxpipe loads are mapped from their file and come in with the
  first step.

Simulated, on costs that are estimated from shapes:
- busiest ÷ mean, of the times that the ranks compute;
- bubble against ideal: 1 - (mean of the times that the ranks compute) / makespan.  Uneven work counts;
- saved at most: what a rank holds between ops, MiB, without weights and gradients.

Bar: with the vocabulary of 32768 every contender that spreads it has busiest ÷ mean at most 1.05.

    python benchmarks/vocab.py --output benchmarks/results/vocab.txt
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import run
from report import Report, median_and_spread
from rich.progress import track

from fxpipe.schedule.simulation.timeline import Timeline

RANKS = 4
VOCABULARIES = (8192, 32768, 131072, 262144)
BAR, BAR_VOCABULARY = 1.05, 32768
#: A loss may differ by the order in which numbers were added.
TOLERANCE = 1e-5
#: fxpipe's schedule -> torch's
TORCH = {"1f1b": "1F1B", "zb-v": "ZBVZeroBubble"}
WORKER = "vocab_worker.py"


@dataclass(frozen=True)
class Contender:
    """``kind``: eager, fxpipe or torch.  ``barriers``: fxpipe's ``vocab_parallel``, "" where it is whole."""

    kind: str
    schedule: str = ""
    barriers: str = ""

    @property
    def name(self) -> str:
        how = f", {self.barriers or 'whole'}" if self.kind == "fxpipe" else ""
        return f"{self.kind} {self.schedule}{how}".strip()


EAGER = Contender("eager")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--schedules", nargs="+", default=tuple(TORCH), help="fxpipe's names")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    report = Report("Vocabulary layers spread over the ranks")
    contenders = [EAGER, *(c for schedule in options.schedules for c in _with(schedule))]
    spent = run(WORKER, RANKS, {"contender": "waiting"})["waiting"]
    report.line(f"\nin a second of waiting a rank spends {1000 * max(spent[1:]):.1f} ms of processor time")
    for vocabulary in options.vocabularies:
        runs, timelines = _measured(contenders, vocabulary, options)
        report.line(
            f"\nvocabulary {vocabulary}, m = {options.microbatches}, {RANKS} ranks; "
            f"{options.rounds} rounds of {options.steps} steps"
        )
        _print(report, vocabulary, runs, timelines)
        report.save(options.output)


def _with(schedule: str) -> list[Contender]:
    """The contenders of a schedule."""
    ours = [Contender("fxpipe", schedule, barriers) for barriers in ("", "1-barrier", "2-barrier")]
    return ours + [Contender("torch", TORCH[name]) for name in (schedule,) if name in TORCH]


def _measured(
    contenders: Sequence[Contender], vocabulary: int, options: argparse.Namespace
) -> tuple[dict[Contender, list[Any]], dict[Contender, Timeline]]:
    """What the runs of each contender measured, and fxpipe's simulated steps."""
    runs: dict[Contender, list[Any]] = defaultdict(list)
    timelines = {}
    for contender in track(contenders, f"vocabulary {vocabulary}", transient=True):
        case = {
            "contender": contender.kind,
            "schedule": contender.schedule,
            "vocabulary": vocabulary,
            "microbatches": options.microbatches,
            "steps": options.steps,
        }
        with tempfile.TemporaryDirectory() as folder:
            if contender.kind == "fxpipe":
                directory = Path(folder) / "pipeline"
                timelines[contender] = _compile(contender, vocabulary, options.microbatches, directory)
                case["directory"] = str(directory)
            for _ in range(options.rounds):
                runs[contender].append(run(WORKER, 1 if contender is EAGER else RANKS, case))
    return runs, timelines


def _compile(contender: Contender, vocabulary: int, microbatches: int, directory: Path) -> Timeline:
    """Compile the model, save the pipeline, simulate a step of it."""
    import gpt2_worker

    import fxpipe

    pipe = fxpipe.compile(
        gpt2_worker.build(vocabulary),
        gpt2_worker.example(1, vocabulary),
        ranks=RANKS,
        microbatches=microbatches,
        schedule=contender.schedule,
        vocab_parallel=contender.barriers or False,
    )
    pipe.save(directory)
    return pipe.simulate()


def _print(
    report: Report, vocabulary: int, runs: dict[Contender, list[Any]], timelines: dict[Contender, Timeline]
) -> None:
    loss = runs[EAGER][0]["loss"]
    rows, ratios = [], {}
    for contender, results in runs.items():
        wrong = [r["loss"] for r in results if abs(r["loss"] - loss) > TOLERANCE * abs(loss)]
        if wrong:
            raise SystemExit(f"{contender.name} has the loss {wrong[0]}, eager has {loss}")
        of_process, of_main = ([_of_ranks(r[field]) for r in results] for field in ("process", "main"))
        ratios[contender] = [_busiest(seconds) for seconds in of_process]
        row = [contender.name, _per_rank(of_process, ".2f")]
        row += [
            "" if contender is EAGER else median_and_spread(values, ".3f")
            for values in (ratios[contender], [_busiest(seconds) for seconds in of_main])
        ]
        rows.append([*row, *(_per_rank([r[field] for r in results], ".0f") for field in ("peak", "before"))])
    columns = ("measured", "CPU s a step", "busiest ÷ mean", "of main threads", "peak MiB", "before")
    report.table(columns, rows)
    report.line(f"all have the loss of eager, {loss:.6f}, to {TOLERANCE:g}")
    simulated = [[contender.name, *_simulated(timeline)] for contender, timeline in timelines.items()]
    report.table(("simulated", "busiest ÷ mean", "bubble against ideal", "saved at most, MiB"), simulated)
    if vocabulary == BAR_VOCABULARY:
        for contender, found in ratios.items():
            if contender.barriers:
                ratio = statistics.median(found)
                verdict = "the bar is met" if ratio <= BAR else f"THE BAR OF {BAR} IS MISSED"
                report.line(f"{contender.name}: busiest ÷ mean {ratio:.3f}: {verdict}")


def _of_ranks(steps: Sequence[Sequence[float]]) -> list[float]:
    """Per rank the median of its steps."""
    return [statistics.median(of_rank) for of_rank in steps]


def _busiest(seconds: Sequence[float]) -> float:
    return max(seconds) / statistics.mean(seconds)


def _per_rank(rounds: Sequence[Sequence[float]], format: str) -> str:
    return " ".join(f"{statistics.median(of_rank):{format}}" for of_rank in zip(*rounds, strict=True))


def _simulated(timeline: Timeline) -> list[str]:
    ideal = statistics.mean(timeline.busy)
    saved = " ".join(f"{peak / 2**20:.0f}" for peak in timeline.peak_memory)
    return [f"{_busiest(timeline.busy):.3f}", f"{1 - ideal / timeline.seconds:.3f}", saved]


if __name__ == "__main__":
    main()
