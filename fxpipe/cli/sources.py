"""Finds the costs of ``simulate`` and ``compare``: times, a file, or a saved pipeline."""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fxpipe.cli.arguments import flag
from fxpipe.cost.devices.known_devices import device_named
from fxpipe.cost.plan_costs import costs_of
from fxpipe.cost.profile import with_seconds
from fxpipe.errors import FxpipeError, number_of
from fxpipe.plan.artifact import Plan
from fxpipe.plan.saved.files import read_plan
from fxpipe.plan.saved.recorded import RankSpans, read_spans, recorded_ops
from fxpipe.schedule.costs import Costs, StageCost, Update, chain
from fxpipe.schedule.formats.costs_file import read_costs
from fxpipe.schedule.ops import MOST_FORWARDS, PHASES, Color, OpKind, Phase, Schedule
from fxpipe.schedule.stages import Vocabulary
from fxpipe.schedule.units import DECIMAL, PHYSICAL, PLAIN, Units, is_decimal
from fxpipe.schedule.vocabulary_costs import with_output_shards

TIMES = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class CostSource:
    """``costs``: of so many stages a rank; ``stages_per_rank`` is set where there are only costs for that.
    ``schedule``: the one that comes with the costs.  ``note``: where the costs come from.
    ``vocabulary``: the stages beside the model's own that the costs are of as well."""

    note: str
    ranks: int
    microbatches: int
    costs: Callable[[int], Costs]
    units: Units
    stages_per_rank: int | None = None
    schedule: Schedule | None = None
    vocabulary: Vocabulary | None = None


def source_of(options: argparse.Namespace) -> CostSource:
    """Raises FxpipeError where arguments are missing or do not go together."""
    if options.vocab_barriers is not None and options.vocab_time is None:
        raise FxpipeError("--vocab-barriers needs --vocab-time")
    if options.inter_comm is not None and options.ranks_per_machine is None:
        raise FxpipeError("--inter-comm needs --ranks-per-machine")
    if options.device is not None and (options.costs is None or not options.costs.is_dir()):
        raise FxpipeError("--device needs --costs with the directory of a saved pipeline")
    limits = [x for x in (options.memory_limit, *getattr(options, "limits", ())) if x is not None and x.unit]
    if options.costs is None:
        _require(options, "ranks", "microbatches", *TIMES)
        if options.ranks * options.microbatches > MOST_FORWARDS:
            raise FxpipeError(f"--ranks times --microbatches is more than {MOST_FORWARDS:,}")
        if limits:
            raise FxpipeError(
                f"{limits[0].unit} is in bytes, and without --costs memory is in units of one microbatch's "
                "activations on one rank: give a number of these"
            )
        return _from_times(options)
    if not options.costs.exists():
        raise FxpipeError(
            f"{options.costs} does not exist: --costs is a JSON file or the directory of a saved pipeline"
        )
    for name in (*TIMES, "weight_memory", "vocab_time"):
        if getattr(options, name) is not None:
            raise FxpipeError(f"--costs and {flag(name)} do not go together")
    source = _from_directory(options) if options.costs.is_dir() else _from_file(options)
    if limits and not options.costs.is_dir():
        source = replace(source, units=replace(source.units, memory=PHYSICAL.memory, limit=PHYSICAL.limit))
    if any(is_decimal(limit.unit) for limit in limits):
        source = replace(source, units=replace(source.units, memory=DECIMAL.memory, limit=DECIMAL.limit))
    return source


def _from_times(options: argparse.Namespace) -> CostSource:
    def costs(chunks: int) -> Costs:
        return _with_update(options, options.ranks, without_update(chunks))

    def without_update(chunks: int) -> Costs:
        stage = StageCost(
            forward=options.forward / chunks,
            backward=options.backward_input / chunks,
            weight=options.backward_weight / chunks,
            saved_activations=1 / chunks,
            saved_for_weight=(1.0 if options.weight_memory is None else options.weight_memory) / chunks,
        )
        model_stages = chain(
            [stage] * (options.ranks * chunks), comm, 0.0, options.inter_comm, options.ranks_per_machine
        )
        if options.vocab_time is None:
            return model_stages
        return with_output_shards(
            model_stages, options.ranks, options.vocab_time, barriers, comm, inter_transfer=options.inter_comm
        )

    barriers, comm = options.vocab_barriers or 1, options.comm or 0.0
    times = (options.forward, options.backward_input, options.backward_weight, comm)
    note = "F {:g}, B {:g}, W {:g}, transfer {:g}".format(*times)
    if options.inter_comm is not None:
        note += f", {options.inter_comm:g} between machines of {number_of(options.ranks_per_machine, 'rank')}"
    if options.update:
        note += f", update {options.update:g}"
    vocabulary = None
    if options.vocab_time is not None:
        note += f", vocabulary {options.vocab_time:g}"
        vocabulary = Vocabulary(output_shards=options.ranks, barriers=barriers)
    return CostSource(note, options.ranks, options.microbatches, costs, PLAIN, vocabulary=vocabulary)


def _from_file(options: argparse.Namespace) -> CostSource:
    _require(options, "ranks", "microbatches")
    costs = _on_machines(options, read_costs(options.costs, options.comm or 0.0, options.inter_comm))
    costs = _with_update(options, options.ranks, costs)
    note = f"costs of {options.costs}"
    return _of_stages(options, CostSource(note, options.ranks, options.microbatches, lambda _: costs, PLAIN))


def _from_directory(options: argparse.Namespace) -> CostSource:
    plan = read_plan(options.costs)
    ranks, microbatches = options.ranks or plan.ranks, options.microbatches or plan.step.microbatches
    spans = None if options.device is not None else read_spans(options.costs, plan.ranks)
    if spans is None:
        costs = costs_of(plan, device=options.device, ranks_per_machine=options.ranks_per_machine)
    else:
        costs = _on_machines(options, recorded_costs(plan, spans))
    costs = _with_update(options, ranks, costs)
    note = f"{plan.model} in {options.costs}, {'planned' if spans is None else 'recorded'} times"
    if options.device is not None:
        note += f" on {device_named(options.device).name}"
    if plan.vocabulary is not None and ranks != plan.ranks:
        raise FxpipeError(
            f"{options.costs} has vocabulary stages on {number_of(plan.ranks, 'rank')}: not for {ranks}"
        )
    schedule = plan.ordered if (ranks, microbatches) == (plan.ranks, plan.step.microbatches) else None
    source = CostSource(note, ranks, microbatches, lambda _: costs, PHYSICAL, None, schedule, plan.vocabulary)
    return _of_stages(options, source)


def recorded_costs(plan: Plan, spans: Sequence[RankSpans]) -> Costs:
    """The plan's costs with each stage's times replaced by the medians of its ops in a recorded run; bytes
    and edges stay.

    The time of a BW is divided between B and W as in the plan.
    Raises ArtifactError if the spans do not belong to this plan.
    """
    times_of: dict[tuple[int, OpKind], list[float]] = defaultdict(list)
    for ops in recorded_ops(plan, spans):
        for op, start, end in ops:
            times_of[op.stage, op.kind].append(end - start)
    seconds = {}
    for (stage, kind), times in times_of.items():
        for phase, part in _shares(kind, plan.costs.stages[stage]).items():
            seconds[Color(stage, phase)] = part * statistics.median(times)
    return with_seconds(plan.costs, seconds)


def _shares(kind: OpKind, planned: StageCost) -> dict[Phase, float]:
    if kind is not OpKind.BW:
        return {PHASES[kind][0]: 1.0}
    both = planned.backward + planned.weight
    backward = planned.backward / both if both else 1.0
    return {Phase.B: backward, Phase.W: 1 - backward}


def _on_machines(options: argparse.Namespace, costs: Costs) -> Costs:
    """The costs with the asked number of ranks on a machine, if one is given."""
    size = options.ranks_per_machine
    return costs if size is None else replace(costs, ranks_per_machine=size)


def _with_update(options: argparse.Namespace, ranks: int, costs: Costs) -> Costs:
    """The costs with the asked times of updates and their messages, where these are given."""
    update = costs.update
    if options.update is not None:
        update = replace(update, seconds=(options.update,) * ranks, copies=())
    if options.verdict is not None:
        update = Update(update.seconds, update.copies, options.verdict)
    return replace(costs, update=update)


def _of_stages(options: argparse.Namespace, source: CostSource) -> CostSource:
    """Raises FxpipeError unless the costs, which are the same for any number of stages a rank, are of the
    stages that are asked for."""
    stages, ranks, vocabulary = len(source.costs(1).stages), source.ranks, source.vocabulary
    beside = 0 if vocabulary is None else vocabulary.embedding_shards + vocabulary.output_shards
    chunks, rest = divmod(stages - beside, ranks)
    has = f"{options.costs} has {number_of(stages, 'stage')}"
    if rest or not chunks:
        raise FxpipeError(f"{has}: not as many for each of {ranks} ranks")
    if options.stages_per_rank not in (None, chunks):
        each = f"{chunks} for each of {number_of(ranks, 'rank')}"
        raise FxpipeError(f"{has}: {each}, not {options.stages_per_rank}")
    return replace(source, stages_per_rank=chunks)


def _require(options: argparse.Namespace, *names: str) -> None:
    missing = [flag(name) for name in names if getattr(options, name) is None]
    if missing:
        raise FxpipeError(f"these arguments are required: {', '.join(missing)}")
