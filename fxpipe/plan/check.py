"""Checks that the fields of a plan from a file are consistent; their types have been checked before.

Every number on which memory or time depends is bounded by the contents of the file itself, so that a small
file cannot ask for much of either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.errors import FxpipeError
from fxpipe.plan.rows import Rows, rows_of
from fxpipe.plan.step import Leaf
from fxpipe.plan.tensors import GRAD_DTYPES, dtype_of
from fxpipe.plan.work import Rates, Terms
from fxpipe.schedule.check import check_costs, check_whole
from fxpipe.strict import Misfit, misfit, shown

if TYPE_CHECKING:
    from fxpipe.plan.artifact import Plan, TensorLayout

LEVELS = ("", "norms", "full")  # of recomputation
MOST_RANKS, MOST_BYTES, MOST_LENGTH = 1 << 16, 1 << 48, 1 << 31
MOST_DIMENSIONS, MOST_POWER, MOST_TERMS, MOST_TRIED = 64, 16, 1024, 4096


def check_plan(plan: Plan) -> None:
    """Raise Misfit, naming the field, if the plan is inconsistent."""
    for check in (
        _step,
        _stages,
        _vocabulary,
        _costs,
        _order,
        _tensors,
        _channels,
        _figures,
        _offload,
        _work,
    ):
        check(plan)


def _step(plan: Plan) -> None:
    step = plan.step
    _between("step.ranks", step.ranks, 1, MOST_RANKS)
    _between("step.loss_rank", step.loss_rank, 0, step.ranks - 1)
    _floating("step.loss_dtype", step.loss_dtype)
    _floating("step.default_dtype", step.default_dtype)
    _distinct("step.batch.leaves", [leaf.name for leaf in step.batch.leaves])
    for k, leaf in enumerate(step.batch.leaves):
        _leaf(f"step.batch.leaves[{k}]", leaf)
    for rank, names in enumerate(step.leaves):
        _distinct(f"step.leaves[{rank}]", names)
        for k, name in enumerate(names):
            known = name in step.batch.tensors
            _fits(f"step.leaves[{rank}][{k}]", name, known, "the name of a tensor in step.batch.leaves")
    _distinct("step.outputs", [output.name for output in step.outputs])
    for k, output in enumerate(step.outputs):
        path = f"step.outputs[{k}]"
        _between(f"{path}.rank", output.rank, 0, step.ranks - 1)
        _elements(path, output.shape, output.dtype)


def _leaf(path: str, leaf: Leaf) -> None:
    if leaf.shape is None:
        _fits(f"{path}.stride", leaf.stride, leaf.stride == (), "empty where there is no shape")
        return
    _tensor(path, leaf.shape, leaf.stride, leaf.dtype)
    if leaf.shape:
        _between(f"{path}.shape[0]", leaf.shape[0], 1, MOST_BYTES)


def _stages(plan: Plan) -> None:
    ranks, stages = plan.ranks, len(plan.placement)
    _between("the length of placement", stages, 1, 2**31)
    for stage, rank in enumerate(plan.placement):
        _between(f"placement[{stage}]", rank, 0, ranks - 1)
    _as_many("order", plan.order, ranks, "rank")
    _as_many("tensors", plan.tensors, ranks, "rank")
    _as_many("step.leaves", plan.step.leaves, ranks, "rank")
    _as_many("prediction.peak_memory", plan.prediction.peak_memory, ranks, "rank")
    _as_many("stages", plan.stages, stages, "stage of placement")
    _as_many("costs.stages", plan.costs.stages, stages, "stage of placement")
    held = [set(tensors.parameters) for tensors in plan.tensors]
    for k, stage_plan in enumerate(plan.stages):
        _fits(f"stages[{k}].stage", stage_plan.stage, stage_plan.stage == k, f"{k}")
        rank = plan.placement[k]
        _fits(f"stages[{k}].rank", stage_plan.rank, stage_plan.rank == rank, f"{rank}, as in placement")
        for i, name in enumerate(stage_plan.parameters):
            _fits(f"stages[{k}].parameters[{i}]", name, name in held[rank], f"a parameter of rank {rank}")


def _vocabulary(plan: Plan) -> None:
    vocabulary = plan.vocabulary
    most = 0 if vocabulary is None else 6 * 3 * len(plan.placement)  # each direction between any two phases
    _between("collectives", plan.collectives, 0, most)
    if vocabulary is None:
        return
    for name in ("embedding_shards", "output_shards"):
        number = getattr(vocabulary, name)
        _fits(f"vocabulary.{name}", number, number in (0, plan.ranks), f"0 or {plan.ranks}, one a rank")
    _between("vocabulary.barriers", vocabulary.barriers, 0, 2)
    model_stages = plan.placement[
        vocabulary.embedding_shards : len(plan.placement) - vocabulary.output_shards
    ]
    fits = bool(model_stages) and vocabulary.placement(model_stages) == plan.placement
    _fits("placement", plan.placement, fits, "the ranks in order for the stages that vocabulary names")


def _costs(plan: Plan) -> None:
    check_costs(plan.costs, "costs.")


def _order(plan: Plan) -> None:
    try:
        check_whole(plan.ordered, plan.costs)
    except FxpipeError as error:
        raise Misfit(f"or transfers are inconsistent with the plan: {error}", "order") from error


def _tensors(plan: Plan) -> None:
    for name, layout in plan.layouts.items():
        _tensor(f"layouts[{name!r}]", layout.shape, layout.stride, layout.dtype)
    wide = plan.grad_dtype in ("", *map(str, GRAD_DTYPES))
    _fits("grad_dtype", plan.grad_dtype, wide, "empty, 'torch.float32' or 'torch.float64'")
    known, tables = set(plan.layouts), dict[str, set[Rows]]()
    for rank, held in enumerate(plan.tensors):
        path = f"tensors[{rank}]"
        _distinct(path, held.names)
        _distinct(f"{path}.gradients", held.gradients)
        own = set(held.parameters)
        for kind in ("parameters", "buffers", "constants"):
            for k, name in enumerate(getattr(held, kind)):
                _fits(f"{path}.{kind}[{k}]", name, name in known, "a name in layouts")
        for k, name in enumerate(held.gradients):
            _fits(f"{path}.gradients[{k}]", name, name in own, f"a parameter of rank {rank}")
            _floating(f"layouts[{name!r}].dtype", plan.layouts[name].dtype)
        for name in held.parameters:
            if rows := rows_of(name):
                _fits(f"{path}.parameters", name, str(rows) == name, f"written {rows}")
                tables.setdefault(rows.table, set()).add(rows)
    for table, parts in tables.items():
        _rows(table, sorted(parts, key=lambda rows: (rows.begin, rows.end)), plan.layouts)
    _distinct("state", [key for key, _ in plan.state])
    for k, (_, name) in enumerate(plan.state):
        _fits(f"state[{k}][1]", name, name in known and not rows_of(name), "a name in layouts")
    spare = known - {n for h in plan.tensors for n in h.names} - set(tables)
    if spare:
        raise Misfit(f"has {shown(min(spare))}, which no rank holds", "layouts")


def _rows(table: str, parts: Sequence[Rows], layouts: dict[str, TensorLayout]) -> None:
    """Check that the ranks hold every row of the table once."""
    path = f"layouts[{table!r}]"
    if table not in layouts:
        raise Misfit(f"is missing, but a rank holds {parts[0]}", path)
    whole, end = layouts[table], 0
    for rows in parts:
        found = layouts[str(rows)]
        follows = rows.begin == end < rows.end
        fits = follows and (found.shape, found.dtype) == ((rows.end - end, *whole.shape[1:]), whole.dtype)
        _fits(f"layouts[{str(rows)!r}]", found.shape, fits, f"the rows of {table} from {end} on")
        end = rows.end
    _fits(f"{path}.shape", whole.shape, whole.shape[:1] == (end,), f"of the {end} rows that ranks hold")


def _channels(plan: Plan) -> None:
    _distinct("channels", plan.channels)
    for k, (source, target) in enumerate(plan.channels):
        _between(f"channels[{k}][0]", source, 0, plan.ranks - 1)
        _between(f"channels[{k}][1]", target, 0, plan.ranks - 1)
        _fits(f"channels[{k}]", (source, target), source != target, "of two different ranks")


def _figures(plan: Plan) -> None:
    """Check the predictions, and the candidates of ``auto``."""
    found = plan.prediction
    _fits("prediction.seconds", found.seconds, found.seconds > 0, "above 0")
    _shares("prediction", found.span_bubble, found.makespan_bubble)
    for rank, memory in enumerate(found.peak_memory):
        _fits(f"prediction.peak_memory[{rank}]", memory, memory >= 0, "0 or more")
    _fits("recompute", plan.recompute, plan.recompute in LEVELS, "empty, 'norms' or 'full'")
    _between("the length of tried", len(plan.tried), 0, MOST_TRIED)
    for k, candidate in enumerate(plan.tried):
        path = f"tried[{k}]"
        _between(f"{path}.stages_per_rank", candidate.stages_per_rank, 1, 2**31)
        _between(f"{path}.barriers", candidate.barriers, 0, 2)
        _fits(
            f"{path}.recompute",
            candidate.recompute,
            candidate.recompute in LEVELS,
            "empty, 'norms' or 'full'",
        )
        _shares(path, candidate.span_bubble or 0.0)
        for name in ("seconds", "peak_memory", "offloaded"):
            number = getattr(candidate, name) or 0.0
            _fits(f"{path}.{name}", number, number >= 0, "0 or more")


def _offload(plan: Plan) -> None:
    if plan.tier is None:
        _fits("transfers", plan.transfers, not plan.transfers, "empty where tier is null")
    _as_many("pools", plan.pools, 0 if plan.tier is None else plan.ranks, "rank, where there is a tier")
    for rank, size in enumerate(plan.pools):
        _between(f"pools[{rank}]", size, 0, MOST_BYTES)


def _work(plan: Plan) -> None:
    work = plan.work
    if work is None:
        return
    _between("the number of work.lengths", len(work.lengths), 1, MOST_POWER)
    for name, length in work.lengths.items():
        _between(f"work.lengths[{name!r}]", length, 1, MOST_LENGTH)
    _rates("work.rates", work.rates)
    if work.stage_rates:
        _as_many("work.stage_rates", work.stage_rates, len(plan.placement), "stage of placement")
    for k, rates in enumerate(work.stage_rates):
        _rates(f"work.stage_rates[{k}]", rates)
    _as_many("work.stages", work.stages, len(plan.placement), "stage of placement")
    _as_many("work.edges", work.edges, len(plan.costs.edges), "entry of costs.edges")
    lengths = len(work.lengths)
    for k, edge in enumerate(work.edges):
        _terms(f"work.edges[{k}]", edge, lengths)
    for k, stage in enumerate(work.stages):
        path = f"work.stages[{k}]"
        for name in ("saved_activations", "saved_for_weight", "offloadable", "offloadable_for_weight"):
            _terms(f"{path}.{name}", getattr(stage, name), lengths)
        for phase in ("forward", "backward", "weight"):
            for i, op in enumerate(getattr(stage, phase)):
                _between(f"{path}.{phase}[{i}].count", op.count, 1, MOST_LENGTH)
                _fits(f"{path}.{phase}[{i}].rate", op.rate, op.rate >= 1, "1 or more")
                _terms(f"{path}.{phase}[{i}].flops", op.flops, lengths)
                _terms(f"{path}.{phase}[{i}].bytes", op.bytes, lengths)
    try:
        check_costs(work.costs(plan.costs, {}), "costs.")
    except Misfit as error:
        raise Misfit(f"does not give the costs of the example: {error}", "work") from error


def _rates(path: str, rates: Rates) -> None:
    for name, rate in asdict(rates).items():
        least = 1.0 if name in ("memory", "link", "inter_link") else 0.0
        _fits(f"{path}.{name}", rate, rate is None or rate >= least, f"{least:g} or more")


def _terms(path: str, terms: Terms, lengths: int) -> None:
    _between(f"the length of {path}", len(terms), 0, MOST_TERMS)
    for k, term in enumerate(terms):
        _fits(f"{path}[{k}]", term, len(term) == 2 + lengths, f"of {2 + lengths} numbers")
        _fits(f"{path}[{k}][1]", term[1], term[1] >= 1, "1 or more")
        for i, power in enumerate(term[2:], start=2):
            _between(f"{path}[{k}][{i}]", power, 0, MOST_POWER)
        _between(f"the sum of the powers of {path}[{k}]", sum(term[2:]), 0, MOST_POWER)


def _tensor(path: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: str) -> None:
    """Check the layout of a tensor that fills its memory, in any order of dimensions."""
    _elements(path, shape, dtype)
    _as_many(f"{path}.stride", stride, len(shape), "dimension")
    for k, step in enumerate(stride):
        _between(f"{path}.stride[{k}]", step, 0, MOST_BYTES)
    if math.prod(shape):
        size = 1
        for step, length in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
            _fits(f"{path}.stride", stride, step == size, f"without holes for shape {shape}")
            size *= length


def _elements(path: str, shape: tuple[int, ...], dtype: str) -> None:
    _between(f"the length of {path}.shape", len(shape), 0, MOST_DIMENSIONS)
    for k, size in enumerate(shape):
        _between(f"{path}.shape[{k}]", size, 0, MOST_BYTES)
    _fits(f"{path}.shape", shape, math.prod(shape) <= MOST_BYTES, f"of at most {MOST_BYTES} elements")
    if not isinstance(dtype_of(dtype), torch.dtype):
        raise misfit(f"{path}.dtype", dtype, "a dtype such as 'torch.float32'")


def _floating(path: str, dtype: str) -> None:
    found = dtype_of(dtype)
    fits = found is not None and (found.is_floating_point or found.is_complex)
    _fits(path, dtype, fits, "a floating-point dtype such as 'torch.float32'")


def _shares(path: str, *bubbles: float) -> None:
    for bubble in bubbles:
        _fits(f"{path}'s bubble", bubble, 0 <= bubble <= 1, "from 0 to 1")


def _between(path: str, number: int, least: int, most: int) -> None:
    _fits(path, number, least <= number <= most, f"from {least} to {most}")


def _as_many(path: str, entries: Sequence[Any], number: int, of: str) -> None:
    if len(entries) != number:
        raise Misfit(f"has {len(entries)} entries and must have {number}, one for each {of}", path)


def _distinct(path: str, names: Iterable[Any]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise Misfit(f"has {shown(twice[0])} twice", path)


def _fits(path: str, value: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise misfit(path, value, wanted)
