"""The accumulators of a step, and what becomes of them after it: the gradients in ``.grad`` of parameters.

Accumulators that are summed over replicas lie in buckets, one behind the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import RunError
from fxpipe.plan.artifact import Plan, holders
from fxpipe.plan.rows import ShardName
from fxpipe.plan.tensors import dtype_of
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.program.replicas import Accumulators, Bucket, Division, even
from fxpipe.runtime.torch_private import writes_to, zero_each
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.model.shards import divisions
from fxpipe.training.model.speculative_update import set_grad

Finish = Callable[[], None]
NOTHING: Mapping[ShardName, torch.Tensor] = MappingProxyType({})

#: Gradients that were zeroed -> how often they had been written to then.  A step whose gradients are changed
#: as a whole, divided by a count, must not change those of earlier steps with them.  Where there are none it
#: needs no second set of accumulators.
_zeroed = WeakTensorKeyDictionary()


def begin_buckets(state: ModelState, rt: Runtime) -> None:
    """Give the program the buckets by which it gathers parameters, before it begins."""
    rt.grads = {}
    if rt.shards:
        rt.buckets = sharded_buckets(state, place_of(state))


def accumulators(
    state: ModelState, rt: Runtime, memory: Mapping[ShardName, torch.Tensor] = NOTHING
) -> Finish:
    """Give the program its accumulators, of the plan's dtype, when the gradients of the last step have been
    used; return what is to be done after the step.

    They are the parameters' ``.grad``.  A gradient of an earlier step is counted once by a sum over ranks,
    and is not divided by this step's count: there the step gets new accumulators, which are added to
    ``.grad`` after it, or one of the ranks alone keeps it.

    memory: for new ones, by name.
    """
    if rt.shards:
        return _sharded(state, rt)
    if rt.replicas is None and not state.plan.lanes.summed:
        return _apart(state, rt, memory)
    return _in_buckets(state, rt, 1 if rt.replicas is None else rt.replicas.number, memory)


def check_rows(state: ModelState, rank: int) -> None:
    """Raise RunError where the gradients of whole parameters have been zeroed, and those of rows have not: an
    optimizer of the model's own parameters knows no rows, and would not train them."""
    grads = {name: state.parameter(name).grad for name in state.owned_by(rank).gradients}
    rows = [name for name, grad in grads.items() if name.is_part and grad is not None]
    whole = [name for name in grads if not name.is_part]
    if rows and whole and all(grads[name] is None for name in whole):
        raise RunError(
            f"The gradient of {rows[0]} was not zeroed, and that of {whole[0]} was: this process trains rows "
            f"of {rows[0].tensor}, which model.parameters() does not have. Make the optimizer by "
            "pipe.optimizer(cls, …), which has all that it trains."
        )


def zero_gradients(state: ModelState, rank: int) -> dict[str, torch.Tensor]:
    """New accumulators of a rank, each in memory of its own."""
    return {name: _zeros(state, name) for name in state.plan.tensors[rank].gradients}


def _zeros(state: ModelState, name: ShardName) -> torch.Tensor:
    """A new accumulator."""
    layout = state.layout(name)
    dtype = state.plan.gradient_dtype(dtype_of(layout.dtype))
    return replace(layout, dtype=str(dtype)).empty(state.device).zero_()


def zero_buckets(state: ModelState, rank: int, replicas: int) -> tuple[dict[str, torch.Tensor], list[Bucket]]:
    """New accumulators of a rank, in buckets."""
    buckets = [_whole(state, names, replicas) for names in names_of_buckets(state.plan, rank)]
    return {name: view for bucket in buckets for name, view in bucket.views(bucket.whole).items()}, buckets


def names_of_buckets(plan: Plan, rank: int) -> list[tuple[ShardName, ...]]:
    """The gradients in each bucket of a rank."""
    return [bucket.gradients for bucket in plan.tensors[rank].buckets]


def check_buckets(plan: Plan) -> None:
    """Raise RunError where the plan has no buckets to sum over replicas."""
    if any(rank.gradients and not rank.buckets for rank in plan.tensors):
        raise RunError(
            "The pipeline was saved by a version of fxpipe that knows no replicas. Compile it again, or "
            f"start as many processes as it has ranks: {plan.ranks}."
        )


def _apart(state: ModelState, rt: Runtime, memory: Mapping[ShardName, torch.Tensor]) -> Finish:
    trained = holders(rank.gradients for rank in state.plan.tensors)
    earlier, used_again = {}, []
    for name in state.plan.tensors[rt.rank].gradients:
        parameter = state.parameter(name)
        grad, dtype = parameter.grad, state.plan.gradient_dtype(parameter.dtype)
        if grad is None and name in memory:
            accumulator = memory[name]
            used_again.append(accumulator)
        else:
            accumulator = _zeros(state, name) if grad is None else grad.to(dtype)
        if accumulator is not grad:
            set_grad(parameter, accumulator)
        rt.grads[name] = accumulator
        if grad is None or take_zeroed(grad):
            continue
        if state.plan.step.has_count:
            earlier[name] = accumulator
            rt.grads[name] = _zeros(state, name)
        elif rt.rank != trained[name][0]:  # which has the same one
            accumulator.zero_()
    if used_again:
        zero_each(used_again)

    def finish() -> None:
        for name, grad in earlier.items():
            grad.add_(rt.grads[name])

    return finish


def _in_buckets(
    state: ModelState, rt: Runtime, replicas: int, memory: Mapping[ShardName, torch.Tensor]
) -> Finish:
    """All replicas have all gradients, which lie in buckets also between steps."""
    added: list[tuple[torch.Tensor, torch.Tensor]] = []
    buckets = []
    for names in names_of_buckets(state.plan, rt.rank):
        parameters = [state.parameter(name) for name in names]
        grads = [parameter.grad for parameter in parameters]
        used = [grad is not None and not take_zeroed(grad) for grad in grads]
        bucket = _whole(state, names, replicas)
        # Gradients of an earlier step have been summed over replicas: only those of this step may be again.
        lent = [memory.get(name) if grad is None else grad for name, grad in zip(names, grads, strict=True)]
        bucket.flat = None if any(used) else _memory_of(lent, bucket)
        if bucket.flat is not None and any(grad is None for grad in grads):
            bucket.flat.zero_()
        buckets.append(bucket)
        views = bucket.views(bucket.whole)
        for parameter, is_used, (name, view) in zip(parameters, used, views.items(), strict=True):
            rt.grads[name] = view
            if is_used and parameter.grad is not None:
                set_grad(parameter, parameter.grad.to(view.dtype))
                added.append((parameter.grad, view))
            elif parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                set_grad(parameter, view)
    rt.buckets = buckets

    def finish() -> None:
        for grad, view in added:
            grad.add_(view)

    return finish


def _sharded(state: ModelState, rt: Runtime) -> Finish:
    """Each process has the gradients of its own rows.  With ``shard="optimizer"`` the accumulators stay
    between steps, and these gradients are a part of them; else each bucket has some from the first op that
    adds to it until it is summed."""
    level = state.plan.shard
    buckets = [bucket for bucket in rt.buckets if not bucket.is_frozen]
    for bucket in buckets:
        for piece in bucket.pieces:
            parameter = state.parameter(piece.name)
            if parameter.grad is not None and take_zeroed(parameter.grad):
                parameter.grad = None
            elif parameter.grad is not None and level == "optimizer":  # it is a part of what is zeroed here
                set_grad(parameter, parameter.grad.clone())
        if level == "optimizer":
            handed = (grad() for grad in state.handed_out.pop(bucket.names, ()))
            if all(grad is None for grad in handed):
                bucket.flat = state.accumulators.get(bucket.names)
            # Else the script has a gradient of the last step, which stays as it is.
            state.accumulators[bucket.names] = bucket.whole.zero_()
    rt.grads = Accumulators(buckets)

    def finish() -> None:
        for bucket in buckets:
            assert bucket.summed is not None, "the program sums all buckets"
            for piece in bucket.pieces:
                parameter, first = state.parameter(piece.name), bucket.division.begins[bucket.owner]
                rows = bucket.summed[piece.begin - first : piece.end - first]
                grad = rows.as_strided(parameter.shape, parameter.stride())
                if parameter.grad is None:
                    set_grad(parameter, grad)
                    state.handed_out.setdefault(bucket.names, []).append(weakref.ref(grad))
                else:
                    set_grad(parameter, parameter.grad.to(grad.dtype).add_(grad))
        rt.buckets, rt.grads = (), {}  # let go of the memory of whole buckets before the update
        if state.divides_parameters:
            rt.params = {}

    return finish


def new_buckets(state: ModelState, rt: Runtime) -> list[Bucket]:
    """The buckets of this process by their numbers, with new accumulators."""
    if rt.shards:
        return sharded_buckets(state, place_of(state))
    return zero_buckets(state, rt.rank, 1 if rt.replicas is None else rt.replicas.number)[1]


class Place(NamedTuple):
    """The place of a process among those that own rows."""

    replicas: int
    replica: int
    rank: int
    lane: int


def place_of(state: ModelState) -> Place:
    """The place of this process."""
    process = state.process
    assert process is not None, "processes own rows"
    return Place(process.replicas, process.replica, process.rank, process.lane)


def sharded_buckets(state: ModelState, place: Place) -> list[Bucket]:
    """The buckets of a process by their numbers, without accumulators; it owns rows of each."""
    tensors = state.plan.tensors[place.rank]
    divided = divisions(state.plan, tensors, place.replicas)
    buckets = [
        _sharded_bucket(state, bucket.gradients, each, each.owner(place.replica, place.lane))
        for bucket, each in zip(tensors.exchanged, divided, strict=True)
    ]
    for bucket in buckets[len(tensors.buckets) :]:
        bucket.is_frozen = True
    return buckets


def _sharded_bucket(
    state: ModelState, names: tuple[ShardName, ...], division: Division, owner: int
) -> Bucket:
    bucket = _new(state, names, division)
    bucket.owner, bucket.level = owner, state.plan.shard
    if state.plan.shard == "parameters":
        bucket.owned = tuple(state.value(piece.name) for piece in bucket.pieces)
        bucket.parameter_dtype = dtype_of(state.layout(names[0]).dtype)
    else:
        bucket.parameters = tuple(state.value(name) for name in names)
    return bucket


def _whole(state: ModelState, names: tuple[ShardName, ...], replicas: int) -> Bucket:
    """A bucket that each of the replicas has as a whole."""
    size = sum(torch.Size(state.layout(name).shape).numel() for name in names)
    return _new(state, names, Division(even(size, replicas)))


def _new(state: ModelState, names: tuple[ShardName, ...], division: Division) -> Bucket:
    layouts = [state.layout(name) for name in names]
    return Bucket(
        names,
        tuple((layout.shape, layout.stride) for layout in layouts),
        state.plan.gradient_dtype(dtype_of(layouts[0].dtype)),
        state.device,
        division,
    )


def _memory_of(grads: Sequence[torch.Tensor | None], bucket: Bucket) -> torch.Tensor | None:
    """The memory in which the gradients of a bucket lie, one behind the other."""
    first, size = grads[0], bucket.division.size
    if first is None or first.dtype != bucket.dtype:
        return None
    if first.untyped_storage().nbytes() < (first.storage_offset() + size) * first.itemsize:
        return None
    flat = first.as_strided((size,), (1,))
    fits = zip(grads, bucket.views(flat).values(), strict=True)
    return flat if all(grad is not None and _is_same(grad, view) for grad, view in fits) else None


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory in the same layout."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def mark_zeroed(grads: Iterable[torch.Tensor]) -> None:
    """Remember that they were zeroed just now."""
    for grad in grads:
        _zeroed[grad] = writes_to(grad)


def is_zeroed(grad: torch.Tensor) -> bool:
    """Whether nothing was written to a gradient since it was zeroed."""
    return bool(_zeroed) and bool(_zeroed.get(grad) == writes_to(grad))


def take_zeroed(grad: torch.Tensor) -> bool:
    """Whether a gradient is known to be zero; forgets it, as the caller is about to change it."""
    return bool(_zeroed.pop(grad, None) == writes_to(grad))
