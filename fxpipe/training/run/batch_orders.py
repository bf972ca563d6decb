"""The programs of ranks with the order of ops that is the fastest for the lengths of a batch.

Rank 0 writes the function ``step`` of each rank, and sends it: what the ranks run cannot differ, though their
processors may.  A batch whose microbatches are as those of the example runs the program as it is.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from threading import main_thread

from fxpipe.errors import BatchError, FxpipeError
from fxpipe.plan.artifact import Artifact
from fxpipe.plan.step import SHARES, OrderedStep, StepSpec
from fxpipe.runtime.batch.documents import agreed_shares, shares_of
from fxpipe.runtime.batch.lengths import (
    Lengths,
    agreed_lengths,
    check_values,
    checked,
    lengths_of,
    or_example,
)
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.load_program import Program

#: So many orders are kept; a batch of the same lengths runs one of them again.  And so many are looked for
#: that no step has asked for yet.
MOST_KEPT, MOST_BEGUN = 64, 8
NO_ORDER = "There is no order for this batch"

_Lengths = tuple[int, ...]
Key = tuple[tuple[tuple[_Lengths, ...], ...], bool]
"""Of each replica the lengths of the microbatch in each place, by the names of the plan in their order, and
its share of ``SHARES``; replicas with the same are one.  And ``by_place`` of ``write_step``."""
Batch = Sequence[tuple[Sequence[Lengths], Sequence[int]]]
"""Of each replica the lengths of its microbatches, and their shares."""


@dataclass(eq=False)
class BatchOrders:
    """The orders of the last batches.  ``process``: None where this process runs all ranks."""

    artifact: Artifact
    process: Process | None
    _programs: OrderedDict[Key, tuple[Program, ...]] = field(default_factory=OrderedDict)
    _begun: dict[Key, Future[OrderedStep]] = field(default_factory=dict)

    def prepare(self, replicas: Batch) -> None:
        """Begin to look for the order of a batch that comes later."""
        key, write = self._key(replicas), self.artifact.write_step
        if key is None or write is None or key in self._begun or key in self._programs:
            return
        if len(self._begun) == MOST_BEGUN:  # of batches that did not come
            self._begun.pop(next(iter(self._begun))).cancel()
        self._begun[key] = self._thread.submit(self._written_ahead, write, key)

    def of(self, replicas: Batch, programs: Sequence[Program]) -> Sequence[Program]:
        """The programs for a batch; ``programs``: those of the pipeline, of this process or of all ranks.

        All ranks call it alike, and raise BatchError where there is no order for so many microbatches.
        """
        key = self._key(replicas)
        if key is None:
            return programs
        if key not in self._programs:
            step = self._step(key)
            if step.texts:
                each = zip(programs, step.texts, step.ops, strict=True)
                programs = [program.with_step(text, ops) for program, text, ops in each]
            self._programs[key] = tuple(replace(program, bubble=step.bubble) for program in programs)
            if len(self._programs) > MOST_KEPT:
                for program in self._programs.popitem(last=False)[1]:
                    program.forget()
        self._programs.move_to_end(key)
        return self._programs[key]

    def _key(self, replicas: Batch) -> Key | None:
        """What the order of a batch depends on; None of one whose microbatches are as the example."""
        spec = self.artifact.plan.step
        numbers = {len(lengths) for lengths, _ in replicas}
        if numbers == {0}:
            raise BatchError("The list has 0 microbatches: give one or more.")
        if spec.totals and 0 in numbers:
            raise BatchError(
                f"A replica has no microbatch, and with it no number {spec.totals[0]!r}, by which the loss "
                "is divided: give it one whose labels are ignored, or let loss_fn return (sum, count)."
            )
        example = (*(each.example for each in spec.lengths), SHARES)
        places = self.places(replicas)
        each_replica = {
            tuple((*(lengths[k][each.name] for each in spec.lengths), shares[k]) for k in of_one)
            for (lengths, shares), of_one in zip(replicas, places, strict=True)
        }
        if each_replica == {(example,) * spec.microbatches}:
            return None
        # A replica without any does nothing in each place.
        return tuple(sorted(each_replica - {()})), len(numbers) > 1 or any(
            [*one] != sorted(one) for one in places
        )

    def places(self, replicas: Batch) -> list[Sequence[int]]:
        """Of each replica the microbatch in each place of the order that all run: the largest in the first,
        so that those in a place take about as long.  One alone has places for its numbers, and so have all
        where microbatches must come in their order."""
        plan = self.artifact.plan
        if len(replicas) == 1 or not plan.step.lengths or plan.changed:
            return [range(len(lengths)) for lengths, _ in replicas]
        sizes = dict[_Lengths, int]()

        def size(lengths: Lengths, share: int) -> tuple[int, int, int]:
            key = (*lengths.values(),)
            if key not in sizes:  # those of a batch repeat, and the shapes of all leaves take long
                shapes = [leaf.shape for leaf in plan.step.batch_at(lengths).leaves]
                sizes[key] = sum(prod(shape) for shape in shapes if shape)
            return -sizes[key], -share, -max(key)

        of_each = [[*map(size, *one)] for one in replicas]
        return [sorted(range(len(one)), key=one.__getitem__) for one in of_each]

    def _written_ahead(self, write: Callable[..., OrderedStep], key: Key) -> OrderedStep:
        if not main_thread().is_alive():  # the script has ended, and the interpreter waits for this thread
            raise CancelledError
        return self._written_for(write, key)

    def _written_for(self, write: Callable[..., OrderedStep], key: Key) -> OrderedStep:
        names = [each.name for each in self.artifact.plan.step.lengths]
        (lengths, shares), *others = (
            ([dict(zip(names, each, strict=False)) for each in one], [each[-1] / SHARES for each in one])
            for one in key[0]
        )
        return write(lengths, shares, others, key[1])

    def _step(self, key: Key) -> OrderedStep:
        """The step of this process, or those of all ranks."""
        process = self.process
        if process is not None and not process.leads:
            return _received(process.scatter(None))
        try:
            step = self._written(key)
        except FxpipeError as error:
            if process is not None:
                process.scatter([_packed({"error": str(error)})] * process.world_size)
            raise BatchError(f"{NO_ORDER}: {error}") from error
        if process is None:
            return step
        says = {"texts": (), "ops": (), "bubble": step.bubble}
        if not step.texts:
            return _received(process.scatter([_packed(says)] * process.world_size))
        pairs = zip(step.texts, step.ops, strict=True)
        parts = [_packed(says | {"texts": (text,), "ops": (ops,)}) for text, ops in pairs]
        return _received(process.scatter(process.of_each(parts)))

    def _written(self, key: Key) -> OrderedStep:
        write, number = self.artifact.write_step, self.artifact.plan.step.microbatches
        begun = self._begun.pop(key, None)
        if begun is not None:
            return begun.result()
        if write is not None:
            return self._written_for(write, key)
        numbers = {*map(len, key[0])}
        if numbers == {number}:
            return OrderedStep((), (), None)
        raise BatchError(
            f"The batch has {_text(numbers)} microbatches, and the programs were written for {number}: a "
            "pipeline that an earlier version saved, or whose step was edited, takes no other one. Compile "
            "it in this script, or for another number too, with like=."
        )

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="fxpipe orders")


def _text(numbers: Collection[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def _packed(data: object) -> bytes:
    return zlib.compress(json.dumps(data).encode(), 1)


def _received(data: bytes) -> OrderedStep:
    """Raises BatchError where rank 0 has none."""
    message = json.loads(zlib.decompress(data))
    if "error" in message:
        raise BatchError(f"{NO_ORDER}: {message['error']}")
    return OrderedStep(tuple(message["texts"]), tuple(map(tuple, message["ops"])), message["bubble"])


def agreed_batch(
    spec: StepSpec, batch: object, process: Process | None, step: str, *, is_checked: bool
) -> Batch:
    """The lengths of each replica's microbatches, on which its ranks agree before anything is sent, and the
    shares of their documents.

    step: as text.  Raises BatchError on all ranks where one of them refuses its batch: for its lengths and,
    with ``is_checked``, for anything in which its leaves are unlike the example's.
    """
    if not spec.lengths:
        if is_checked:
            check_values(spec, batch, [{}] * spec.microbatches)
        # Not the plan's: programs run on any number of replicas.
        replicas = 1 if process is None else process.replicas
        number = spec.microbatches
        return [(or_example(spec, [None] * number), [SHARES] * number)] * replicas
    error, known, shares = None, list[Lengths | None](), list[int]()
    try:
        known = lengths_of(spec, batch)
        shares = shares_of(spec, batch, known)
        if is_checked:
            rank = 0 if process is None else process.rank
            of_all = or_example(spec, known)
            checked(spec, batch, of_all, spec.leaves[rank])
            check_values(spec, batch, of_all)
    except BatchError as refusal:
        if process is None:
            raise
        error = refusal
    if process is None:
        return [(or_example(spec, known), shares)]
    says = {"refuses": "" if error is None else str(error), "lengths": known, "shares": shares}
    ranks = [json.loads(each) for each in process.gather(json.dumps(says).encode())]
    if error is not None:
        raise error
    for rank, said in enumerate(ranks):
        if said["refuses"]:
            raise BatchError(f"Rank {rank} refuses the batch of {step}: {said['refuses']}")
    # Of all replicas, so that where the ranks of one disagree all refuse the step.
    of_replicas = [process.of_replica(replica) for replica in range(process.replicas)]
    agreed = [agreed_lengths(spec, {rank: ranks[rank]["lengths"] for rank in one}) for one in of_replicas]
    return [
        (lengths, agreed_shares(len(lengths), [ranks[rank]["shares"] for rank in one]))
        for lengths, one in zip(agreed, of_replicas, strict=True)
    ]
