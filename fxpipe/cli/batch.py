"""``fxpipe simulate --lengths``: the step of a batch whose microbatches have lengths of their own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fxpipe.cli.arguments import positive_int
from fxpipe.cli.sources import CostSource, source_of
from fxpipe.cost.batch_order import BatchPlanner, filled, named_lengths
from fxpipe.errors import FxpipeError, number_of
from fxpipe.plan.saved.files import read_plan
from fxpipe.schedule.simulation.timeline import Timeline

_OTHERS = ("schedule", "schedule_file", "exact", "offload_time", "memory_limit", "device")


def add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        type=_lengths,
        metavar="L,L,…",
        help="of the microbatches of a batch, or a file of them: with --costs of a saved pipeline whose "
        "dimension has a name, the order that pipe.step runs for them",
    )
    parser.add_argument(
        "--tokens",
        type=positive_int,
        metavar="N",
        help="--lengths are those of samples, which fill microbatches of up to N tokens (fxpipe.pack)",
    )


@dataclass(frozen=True)
class Batch:
    """``lengths``: of its microbatches.  ``samples``: the lengths of what fills them, if that was given."""

    source: CostSource
    planner: BatchPlanner
    lengths: tuple[int, ...]
    samples: tuple[int, ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        return self._step(self.lengths)

    def figures(self) -> dict[str, object]:
        """What ``--json`` has beside the figures of the timeline."""
        if not self.samples:
            return {"lengths": self.lengths}
        seconds = {name: step.seconds for name, step in self._others.items()}
        return {"lengths": self.lengths, "samples": len(self.samples), "other_seconds": seconds}

    def text(self) -> str:
        """The samples, and their step in other microbatches."""
        units, samples = self.source.units, self.samples
        others = [
            f"{name}, {number_of(step.schedule.microbatches, 'microbatch')}: {units.time(step.seconds)}"
            for name, step in self._others.items()
        ]
        return (
            f"{number_of(len(samples), 'sample')} of {min(samples)} to {max(samples)} tokens, in "
            f"{number_of(len(self.lengths), 'microbatch')}: {units.time(self.timeline.seconds)}\n"
            f"{'; '.join(others)}"
        )

    @cached_property
    def _others(self) -> dict[str, Timeline]:
        longest, most = max(self.samples), self.planner.plan.step.lengths[0].example
        packed = [sum(self.samples[k] for k in place) for place in filled(self.samples, most)]
        return {
            "each padded to the longest": self._step([longest] * len(self.samples)),
            f"packed to {most} tokens": self._step(packed),
        }

    def _step(self, lengths: Sequence[int]) -> Timeline:
        return self.planner.timeline(named_lengths(self.planner.plan.step.lengths, lengths))


def batch_of(options: argparse.Namespace) -> Batch | None:
    """The batch that the options describe; None if they describe none."""
    if options.lengths is None:
        if options.tokens is not None:
            raise FxpipeError("--tokens needs --lengths")
        return None
    for name in _OTHERS:
        if getattr(options, name) is not None:
            raise FxpipeError(
                f"--lengths and --{name.replace('_', '-')} exclude each other: give one of them"
            )
    if options.costs is None or not options.costs.is_dir():
        raise FxpipeError("--lengths needs --costs with the directory of a saved pipeline")
    plan = read_plan(options.costs)
    options.microbatches = plan.step.microbatches
    samples: tuple[int, ...] = ()
    lengths = tuple(options.lengths)
    if options.tokens is not None:
        samples = lengths
        lengths = tuple(sum(samples[k] for k in place) for place in filled(samples, options.tokens))
    source = replace(source_of(options), microbatches=len(lengths))
    return Batch(source, BatchPlanner(plan), lengths, samples)


def _lengths(text: str) -> list[int]:
    """Numbers, or a file of them."""
    path = Path(text)
    words = path.read_text().split() if path.is_file() else text.split(",")
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of lengths, 731,64,2048, or a file") from error
