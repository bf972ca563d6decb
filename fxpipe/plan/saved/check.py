"""Reads the text of a plan, and checks that its fields are consistent; ``structure`` checks their types and
bounds.

Every number on which memory or time depends is bounded by the contents of the file itself, so that a small
file cannot ask for much of either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from fxpipe.errors import ArtifactError, FxpipeError
from fxpipe.plan.artifact import FORMAT, Plan, RankTensors, TensorLayout
from fxpipe.plan.branches import Branch, parsed
from fxpipe.plan.field_types import IS_DTYPE, IS_FLOATING, MOST_DIMENSIONS, Terms
from fxpipe.plan.rows import ShardName
from fxpipe.plan.step import Leaf
from fxpipe.plan.tensors import dtype_of, is_packed
from fxpipe.plan.version import __version__
from fxpipe.plan.work import PlanWork
from fxpipe.schedule.check import check_costs, check_whole
from fxpipe.schedule.costs import TIMES, Costs, StageBytes
from fxpipe.schedule.ops import Phase
from fxpipe.strict import Mismatch, between, parse_json, refused, require, shown, structure, unstructure


def plan_of(text: str, where: str) -> Plan:
    """The plan that a text in JSON is.

    Raises ArtifactError, naming ``where`` and the field, for a text that is no plan of this format.
    """
    with refused(ArtifactError, f"{where} is damaged:", "Undo the edit, or save the pipeline again."):
        data = parse_json(text)
        version = data.get("format") if isinstance(data, dict) else None
        # Before the fields: those of another format may be others.
        if type(version) is not int or version != FORMAT:
            raise ArtifactError(
                f"{where} has format {shown(version)} and fxpipe {__version__} reads format {FORMAT}. "
                "Compile and save the pipeline again with this version."
            )
        plan = structure(_with_axes(data), Plan)
        check_plan(plan)
    return plan


def _with_axes(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a plan; those of earlier versions have lanes of one dimension alone."""
    match data.get("lanes"):
        case {"number": number} as axis:
            return {**data, "lanes": {"axes": [axis] if number != 1 else []}}
    return data


def check_plan(plan: Plan) -> None:
    """Raise Mismatch, naming the field, if the plan is inconsistent."""
    for check in (
        _step,
        _stages,
        _vocabulary,
        _schedule,
        _tensors,
        _lanes,
        _state,
        _channels,
        _offload,
        _work,
    ):
        check(plan)


def _step(plan: Plan) -> None:
    step = plan.step
    _ranks("step.loss_rank", step.loss_rank, plan)
    _distinct("step.batch.leaves", [leaf.name for leaf in step.batch.leaves])
    for k, leaf in enumerate(step.batch.leaves):
        _leaf(f"step.batch.leaves[{k}]", leaf)
    for rank, names in enumerate(step.leaves):
        _distinct(f"step.leaves[{rank}]", names)
        _known(f"step.leaves[{rank}]", names, step.batch.tensors, "the name of a tensor in step.batch.leaves")
    _known("assumed", (*plan.assumed,), step.batch.tensors, "the name of a tensor in step.batch.leaves")
    if plan.branch is not None:
        _branch("branch", plan.branch, step.batch.tensors)
    _distinct("step.outputs", [output.name for output in step.outputs])
    _distinct("step.lengths", [each.name for each in step.lengths])
    rows = {n for leaf in step.batch.leaves for n in (leaf.shape or ())[:1]}
    shapes = {n for leaf in step.batch.leaves for n in (leaf.shape or ())[1:]}
    for k, each in enumerate(step.lengths):
        path, lengths = f"step.lengths[{k}]", rows if each.leading else shapes
        require(f"{path}.example", each.example, each.example in lengths, "a length of the example")
        require(f"{path}.least", each.least, each.least <= each.example, f"at most {each.example}")
    for k, boundaries in enumerate(step.boundaries):
        _polynomial(f"step.boundaries[{k}].tokens", boundaries.tokens, len(step.lengths))
    for k, output in enumerate(step.outputs):
        _ranks(f"step.outputs[{k}].rank", output.rank, plan)


def _leaf(path: str, leaf: Leaf) -> None:
    if leaf.shape is None:
        require(f"{path}.stride", leaf.stride, leaf.stride == (), "empty where there is no shape")
        return
    IS_DTYPE.check(leaf.dtype, f"{path}.dtype")
    _fills(path, leaf.shape, leaf.stride)
    # No rows can be cut in microbatches.
    require(f"{path}.shape", leaf.shape, leaf.shape[:1] != (0,), "of one row or more")


def _stages(plan: Plan) -> None:
    for stage, rank in enumerate(plan.placement):
        _ranks(f"placement[{stage}]", rank, plan)
    for name in ("order", "tensors", "step.leaves", "prediction.peak_memory"):
        _as_many(name, plan, plan.ranks, "rank")
    for name in ("stages", "costs.stages"):
        _as_many(name, plan, len(plan.placement), "stage of placement")
    for name in ("seconds", "copies"):
        number = len(getattr(plan.costs.update, name))
        require(
            f"costs.update.{name}", number, number in (0, plan.ranks), "one number for each rank, or none"
        )
    for k, (record, rank) in enumerate(zip(plan.stages, plan.placement, strict=True)):
        require(f"stages[{k}].stage", record.stage, record.stage == k, f"{k}")
        require(f"stages[{k}].rank", record.rank, record.rank == rank, f"{rank}, as in placement")
        parameters = set(plan.tensors[rank].parameters)
        _known(f"stages[{k}].parameters", record.parameters, parameters, f"a parameter of rank {rank}")


def _vocabulary(plan: Plan) -> None:
    vocabulary = plan.vocabulary
    most = 0 if vocabulary is None else 6 * 3 * len(plan.placement)  # each direction between any two phases
    # Each is a communicator, which a loaded plan makes its ranks connect.
    between(0, most).check(plan.collectives, "collectives")
    if vocabulary is None:
        return
    for name in ("embedding_shards", "output_shards"):
        number = getattr(vocabulary, name)
        require(f"vocabulary.{name}", number, number in (0, plan.ranks), f"0 or {plan.ranks}, one a rank")
    model = plan.placement[vocabulary.embedding_shards : len(plan.placement) - vocabulary.output_shards]
    fits = bool(model) and vocabulary.placement(model) == plan.placement
    require("placement", plan.placement, fits, "the ranks in order for the stages that vocabulary names")


def _schedule(plan: Plan) -> None:
    # Before the order, which is checked by them.
    check_costs(plan.costs, "costs.")
    try:
        check_whole(plan.ordered, plan.costs)
    except FxpipeError as error:
        raise Mismatch(f"or transfers are inconsistent with the plan: {error}", "order") from error


def _tensors(plan: Plan) -> None:
    for name, layout in plan.layouts.items():
        _fills(f"layouts[{name!r}]", layout.shape, layout.stride)
    tables, ops = dict[str, set[ShardName]](), set(" ".join(plan.order).split())
    for rank, tensors in enumerate(plan.tensors):
        path = f"tensors[{rank}]"
        _distinct(path, tensors.names)
        _distinct(f"{path}.gradients", tensors.gradients)
        for kind in ("parameters", "buffers", "constants"):
            _known(f"{path}.{kind}", getattr(tensors, kind), plan.layouts, "a name in layouts")
        _known(f"{path}.gradients", tensors.gradients, set(tensors.parameters), f"a parameter of rank {rank}")
        for kind in ("buckets", "frozen"):
            for k, bucket in enumerate(getattr(tensors, kind)):
                for end in ("before", "after"):
                    op = getattr(bucket, end)
                    require(f"{path}.{kind}[{k}].{end}", op, op in ops, "an op in order")
        _buckets(f"{path}.buckets", tensors, plan)
        _frozen(f"{path}.frozen", tensors, plan)
        for name in tensors.gradients:
            IS_FLOATING.check(plan.layouts[name].dtype, f"layouts[{name!r}].dtype")
        for name in tensors.parameters:
            if name.is_part:
                # ``a[00:4]`` would be a second name of the same rows.
                written = ShardName.of_rows(name.tensor, name.begin, name.end)
                require(f"{path}.parameters", name, written == name, f"written {written}")
                tables.setdefault(name.tensor, set()).add(name)
    for table, parts in tables.items():
        # By their begin: a table is whole if each part begins where the one before ends.
        _rows(table, sorted(parts, key=lambda rows: (rows.begin, rows.end)), plan.layouts)
    spare = plan.layouts.keys() - {name for tensors in plan.tensors for name in tensors.names} - set(tables)
    if spare:
        raise Mismatch(f"has {shown(min(spare))}, which no rank holds", "layouts")


def _lanes(plan: Plan) -> None:
    for k, axis in enumerate(plan.lanes.axes):
        for name, dim in axis.shards.items():
            dims = len(plan.layouts[name].shape) if name in plan.layouts else MOST_DIMENSIONS
            require(f"lanes.axes[{k}].shards[{name!r}]", dim, dim < dims, f"one of {dims} dimensions")
    for name, length in plan.lanes.lengths.items():
        shares = [*plan.lanes.shares(name)]
        is_one = len({dim for dim, _ in shares}) == 1
        require(f"lanes.lengths[{name!r}]", name, is_one, "a tensor of which lanes share out one dimension")
        if name in plan.layouts:
            each = plan.layouts[name].shape[shares[0][0]]
            lanes = math.prod(group.number for _, group in shares)
            wanted = f"a length of which each of {lanes} lanes has {each}"
            require(f"lanes.lengths[{name!r}]", length, -(-length // lanes) == each, wanted)


def _buckets(path: str, tensors: RankTensors, plan: Plan) -> None:
    """Check that the buckets of a rank have each of its gradients once."""
    names = [name for bucket in tensors.buckets for name in bucket.gradients]
    for k, bucket in enumerate(tensors.buckets):
        own = [name for name in bucket.gradients if name in tensors.gradients]
        dtypes = {plan.gradient_dtype(dtype_of(plan.layouts[name].dtype)) for name in own}
        require(f"{path}[{k}].gradients", bucket.gradients, len(dtypes) == 1, "gradients of one dtype")
    # A gradient in no bucket would not be summed over the replicas.
    fits = not tensors.buckets or sorted(names) == sorted(tensors.gradients)
    require(path, tensors.buckets, fits, "of each name in gradients once")


def _frozen(path: str, tensors: RankTensors, plan: Plan) -> None:
    """Check that these buckets have each name once, of parameters without gradients."""
    spare = {*tensors.parameters} - {*tensors.gradients}
    _distinct(path, [name for bucket in tensors.frozen for name in bucket.gradients])
    for k, bucket in enumerate(tensors.frozen):
        _known(f"{path}[{k}].gradients", bucket.gradients, spare, "a parameter without a gradient")
        dtypes = {plan.layouts[name].dtype for name in bucket.gradients}
        require(f"{path}[{k}].gradients", bucket.gradients, len(dtypes) == 1, "parameters of one dtype")


def _rows(table: str, parts: Sequence[ShardName], layouts: dict[str, TensorLayout]) -> None:
    """Check that the ranks hold every row of the table once."""
    path = f"layouts[{table!r}]"
    if table not in layouts:
        raise Mismatch(f"is missing, but a rank holds {parts[0]}", path)
    whole, end = layouts[table], 0
    for rows in parts:
        layout = layouts[rows]
        follows = rows.begin == end < rows.end
        fits = follows and (layout.shape, layout.dtype) == ((rows.end - end, *whole.shape[1:]), whole.dtype)
        require(f"layouts[{rows!r}]", layout.shape, fits, f"the rows of {table} from {end} on")
        end = rows.end
    require(f"{path}.shape", whole.shape, whole.shape[:1] == (end,), f"of the {end} rows that ranks hold")


def _state(plan: Plan) -> None:
    _distinct("state", [key for key, _ in plan.state])
    tensors = {name for name in plan.layouts if not ShardName(name).is_part}
    for k, (_, name) in enumerate(plan.state):
        require(f"state[{k}][1]", name, name in tensors, "a name in layouts")
    trained = {name.tensor for rank_tensors in plan.tensors for name in rank_tensors.parameters}
    for name in sorted(trained - {name for _, name in plan.state}) if plan.state else ():
        raise Mismatch(f"lacks the parameter {shown(name)}, which no state dict would have", "state")


def _channels(plan: Plan) -> None:
    _distinct("channels", plan.channels)
    for k, pair in enumerate(plan.channels):
        for i, rank in enumerate(pair):
            _ranks(f"channels[{k}][{i}]", rank, plan)
        require(f"channels[{k}]", pair, pair[0] != pair[1], "of two different ranks")


def _offload(plan: Plan) -> None:
    if plan.tier is None:
        require("transfers", plan.transfers, not plan.transfers, "empty where tier is null")
    _as_many("held", plan, plan.ranks if plan.held else 0, "rank")
    _as_many("pools", plan, 0 if plan.tier is None else plan.ranks, "rank, where there is a tier")
    stages = range(len(plan.placement) if plan.tier is not None else 0)
    for k, slot in enumerate(plan.slots):
        require(f"slots[{k}].stage", slot.stage, slot.stage in stages, "a stage that offloads")
        require(f"slots[{k}].user", str(slot.user), slot.user is not Phase.F, "B or W")
        require(f"slots[{k}].tensors", slot.tensors, slot.tensors > 0, "1 or more")


def _work(plan: Plan) -> None:
    work = plan.work
    if work is None:
        return
    if work.stage_rates:
        _as_many("work.stage_rates", plan, len(plan.placement), "stage of placement")
    _as_many("work.stages", plan, len(plan.placement), "stage of placement")
    _as_many("work.edges", plan, len(plan.costs.edges), "entry of costs.edges")
    for path, terms in _terms(work):
        _polynomial(f"work.{path}", terms, len(work.lengths))
    try:
        # By the same bounds as costs from a file, which a polynomial could leave.
        structure(unstructure(work.costs(plan.costs, {})), Costs, "costs")
    except Mismatch as error:
        raise Mismatch(f"does not give the costs of the example: {error}", "work") from error


def _polynomial(path: str, terms: Terms, lengths: int) -> None:
    for k, term in enumerate(terms):
        require(f"{path}[{k}]", term, len(term) == 2 + lengths, f"of {2 + lengths} numbers")


def _terms(work: PlanWork) -> Iterator[tuple[str, Terms]]:
    """The polynomials of a plan's work, each with its path in the work."""
    for k, edge in enumerate(work.edges):
        yield f"edges[{k}]", edge
    for k, stage in enumerate(work.stages):
        for name in StageBytes._fields:
            yield f"stages[{k}].{name}", getattr(stage, name)
        for phase in TIMES.values():
            for i, op in enumerate(getattr(stage, phase)):
                yield f"stages[{k}].{phase}[{i}].flops", op.flops
                yield f"stages[{k}].{phase}[{i}].bytes", op.bytes


def _fills(path: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """Check the strides of a tensor that fills its memory, in any order of dimensions."""
    if len(stride) != len(shape):
        raise Mismatch(
            f"has {len(stride)} entries and must have {len(shape)}, one for each dimension", f"{path}.stride"
        )
    fits = not math.prod(shape) or is_packed(shape, stride)
    require(f"{path}.stride", stride, fits, f"without holes for shape {shape}")


def _ranks(path: str, rank: int, plan: Plan) -> None:
    between(0, plan.ranks - 1).check(rank, path)


def _as_many(path: str, plan: Plan, number: int, of: str) -> None:
    value: Any = plan
    for name in path.split("."):
        value = getattr(value, name)
    if len(value) != number:
        raise Mismatch(f"has {len(value)} entries and must have {number}, one for each {of}", path)


def _branch(path: str, branch: Branch, tensors: Collection[str]) -> None:
    require(f"{path}.leaf", branch.leaf, branch.leaf in tensors, "the name of a tensor in step.batch.leaves")
    for k, op in enumerate(branch.ops):
        try:
            parsed(op)
        except ValueError as error:
            raise Mismatch(f"is {shown(op)}: {error}", f"{path}.ops[{k}]") from None


def _known(path: str, names: Sequence[str], allowed: Collection[str], wanted: str) -> None:
    for k, name in enumerate(names):
        require(f"{path}[{k}]", name, name in allowed, wanted)


def _distinct(path: str, names: Sequence[Any]) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise Mismatch(f"has {shown(twice[0])} twice", path)
