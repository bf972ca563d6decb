"""``fxpipe simulate --lengths``: the step of a batch whose microbatches have lengths of their own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from fxpipe.cli.arguments import flag
from fxpipe.cli.lengths import Listed, drawn
from fxpipe.cli.sources import CostSource, source_of
from fxpipe.cost.batch_order import BatchPlanner, named_lengths
from fxpipe.cost.samples import Packer, Way
from fxpipe.errors import FxpipeError, SizeError
from fxpipe.plan.artifact import Plan
from fxpipe.plan.saved.files import read_plan
from fxpipe.schedule.simulation.timeline import Timeline

_OTHERS = "schedule", "schedule_file", "exact", "offload_time", "memory_limit", "device", "microbatches"


@dataclass(frozen=True)
class Batch:
    """``lengths``: of its microbatches.  ``steps``: the lengths of the samples of some steps, if samples were
    given, of which the batch is the first; ``ways``: to put them into microbatches.  ``shares``: of each
    microbatch, see ``BatchPlanner.costs``."""

    source: CostSource
    planner: BatchPlanner
    lengths: tuple[dict[str, int], ...]
    steps: Sequence[Sequence[int]] = ()
    ways: Sequence[Way] = ()
    shares: tuple[float, ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        return self.planner.timeline(self.lengths, self.shares)


def batch_of(options: argparse.Namespace) -> Batch | None:
    """The batch that the options describe; None if they describe none."""
    needs_lengths(options)
    if options.lengths is None:
        return None
    for name in _OTHERS:
        if getattr(options, name) is not None:
            raise FxpipeError(f"--lengths and {flag(name)} exclude each other: give one of them")
    if options.costs is None or not options.costs.is_dir():
        raise FxpipeError("--lengths needs --costs with the directory of a saved pipeline")
    plan = read_plan(options.costs)
    options.microbatches = plan.step.microbatches
    planner, given = BatchPlanner.of(plan), options.lengths
    source = source_of(options)
    if isinstance(given, Listed) and options.tokens is options.samples is None:
        lengths = named_lengths(plan.step.lengths, given.lengths)
        return Batch(replace(source, microbatches=len(lengths)), planner, tuple(lengths))
    steps, ways = ways_of(options, plan, planner)
    packed = [way for way in ways if way.tokens is not None and options.tokens in (None, way.tokens)]
    best = min(packed, key=lambda way: inf if way.seconds is None else way.seconds)
    named = tuple(map(_packer(plan, planner).lengths, best.steps[0]))
    shares = tuple(each.share for each in best.steps[0])
    return Batch(replace(source, microbatches=len(named)), planner, named, steps, ways, shares)


def needs_lengths(options: argparse.Namespace) -> None:
    """Raise FxpipeError for options of samples without their lengths."""
    for name in ("tokens", "samples"):
        if options.lengths is None and getattr(options, name) is not None:
            raise FxpipeError(f"{flag(name)} needs --lengths")


def ways_of(
    options: argparse.Namespace, plan: Plan, planner: BatchPlanner
) -> tuple[list[list[int]], list[Way]]:
    """The samples of some steps that the options describe, and the ways to put them into microbatches."""
    packer, given, tokens = _packer(plan, planner), options.lengths, options.tokens
    if isinstance(given, Listed) and options.samples is None:
        steps = [[*given.lengths]]
    else:
        number = options.samples or plan.step.microbatches * packer.rows * packer.replicas
        steps = drawn(given, packer.length.example, number, options.seed)
    return steps, packer.ways(steps, () if tokens is None else (tokens, packer.length.example))


def _packer(plan: Plan, planner: BatchPlanner) -> Packer:
    """Raises SizeError unless one dimension beside the rows has a name."""
    lengths = [each for each in plan.step.lengths if not each.leading]
    if len(lengths) != 1:
        named_lengths(plan.step.lengths, [0])  # raises where there is none
        raise SizeError("Samples have one length: give those of microbatches, where several have names.")
    rows = next(leaf.shape[0] for leaf in plan.step.batch.leaves if leaf.shape)
    leading = next((each.name for each in plan.step.lengths if each.leading), None)
    return Packer(planner, lengths[0], rows, plan.replicas, leading)
