"""The step of some ranks, captured once: a replay starts all that the programs start on the device, without
their Python.

What a step gets from the host lies in memory of its own: the batch is copied there, and each random op has
its seed.  What the host takes of a step it takes behind the replay: the total of the losses, and the values
that a check reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from fxpipe.plan.step import BatchSpec
from fxpipe.runtime.batch.microbatches import as_dicts, batch_leaves
from fxpipe.runtime.batch.outputs import Collected
from fxpipe.runtime.program.accelerator import on_host
from fxpipe.runtime.program.captured import capturing
from fxpipe.runtime.program.checks import check_values
from fxpipe.runtime.program.losses import Losses
from fxpipe.runtime.program.random import seed_of, seeded
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.program.record import Record
from fxpipe.runtime.program.replicas import Accumulators
from fxpipe.runtime.replays.recorder import DeviceGraph, MakeRecorder
from fxpipe.runtime.torch_private import pytree

Run = Callable[[Sequence[Runtime], object], object]
"""Runs the programs of some ranks, on a batch."""


class NotReplayed(Exception):
    """A step that cannot be captured, or not be replayed; the text says why."""


@dataclass(eq=False)
class CountedDraws:
    """The random ops of a step that runs op by op, counted."""

    number: int = 0

    def key(self, now: Callable[[], int]) -> int:
        return now()

    def draw(self, key: int, position: int, op: Callable[[], object], device: torch.device) -> object:
        self.number += 1
        return seeded(op, seed_of(key, position), device)

    def expect(self, value: torch.Tensor, expected: list[bool | int], where: str) -> None:
        check_values(value.reshape(-1).tolist(), expected, where)


@dataclass(eq=False)
class StagedBatch:
    """Memory for the leaves of a batch that ranks need, on their device.  ``whole``: a batch of it."""

    names: tuple[str, ...]
    whole: object

    @staticmethod
    def like(batch: object, spec: BatchSpec, needed: Sequence[str], device: torch.device) -> StagedBatch:
        tensors = {leaf.name for leaf in spec.leaves if leaf.shape is not None and not leaf.unread}
        leaves = [
            torch.empty_like(value, device=device) if name in tensors and name in needed else value
            for name, value in batch_leaves(batch)
        ]
        whole = pytree.tree_unflatten(leaves, pytree.tree_flatten(as_dicts(batch))[1])
        return StagedBatch(tuple(name for name in needed if name in tensors), whole)

    def take(self, batch: object) -> None:
        """Copy the values of a batch.  Raises NotReplayed for tensors of another layout."""
        mine, theirs = dict(batch_leaves(self.whole)), dict(batch_leaves(batch))
        for name in self.names:
            target, value = mine[name], theirs[name]
            if (target.shape, target.stride(), target.dtype) != (value.shape, value.stride(), value.dtype):
                raise NotReplayed(f"the leaf {name!r} has another layout than in the step that was captured")
            target.copy_(value, non_blocking=True)


@dataclass(eq=False)
class CapturedStep:
    """``runtimes``: of the ranks, whose tensors the replays use, and whose step is the next one.
    ``device``: of all of them.  ``copies``: of the runtimes, as the capture has them."""

    runtimes: Sequence[Runtime]
    batch: StagedBatch
    device: torch.device
    copies: Sequence[Runtime] = ()
    _recorder: DeviceGraph | None = None
    _draws: list[tuple[Callable[[], int], int]] = field(default_factory=list)  # the key now, and the position
    _keys: dict[int, Callable[[], int]] = field(default_factory=dict)
    _expected: list[tuple[torch.Tensor, list[bool | int], str]] = field(default_factory=list)
    _addresses: dict[tuple[int, str, str], int] = field(default_factory=dict)

    def capture(self, run: Run, batch: object, random_ops: int, make: MakeRecorder) -> None:
        """Record the step that the runtimes are about to run.

        random_ops: their number in a step.  Raises NotReplayed, or what fails in the step.
        """
        self.batch.take(batch)
        self._recorder = make(self.device, random_ops)

        def step() -> object:
            self.copies = [_without_host(rt) for rt in self.runtimes]
            for copy in self.copies:
                copy.start()
            return run(self.copies, self.batch.whole)

        with capturing(self):
            self._recorder.record(step)
        self._addresses = self._addresses_now()

    def replay(self, batch: object) -> None:
        """Start the step of the runtimes on a batch; ``finish`` ends it.

        Raises NotReplayed where a tensor lies elsewhere than in the capture.
        """
        assert self._recorder is not None
        now, then = self._addresses_now(), self._addresses
        if now != then:
            _, kind, name = next(at for at in (*then, *now) if now.get(at) != then.get(at))
            raise NotReplayed(
                f"the {kind} {name} lies at another address than in the capture, as where the script "
                "replaces a tensor, or keeps the gradient of an earlier step"
            )
        self.batch.take(batch)
        for rt, copy in zip(self.runtimes, self.copies, strict=False):  # none where no ops ran to be recorded
            copy.step_number = rt.step_number  # of which its keys are
        self._recorder.replay([seed_of(key(), position) for key, position in self._draws])

    def memory(self) -> AbstractContextManager[None]:
        """Let ops in the block take the memory of the replays."""
        assert self._recorder is not None
        return self._recorder.memory()

    def finish(self) -> list[torch.Tensor | None]:
        """End the replayed step as the programs do; return what they return, by rank."""
        for value, expected, where in self._expected:
            check_values(value.tolist(), expected, where)
        for rt, copy in zip(self.runtimes, self.copies, strict=True):
            rt.start()
            rt.record.forget()  # the ops of a replay have no times
            rt.buffers = dict(copy.buffers)
            for bucket, of_copy in zip(rt.buckets, copy.buckets, strict=True):
                bucket.take_sum(of_copy)
            total = copy.kept_total[-1] if copy.kept_total else None
            rt.share_total(None if total is None else on_host(total.device, total.detach))
        for rt in self.runtimes:
            if rt.spec.has_count:
                rt.divide_gradients_by_count()
        return [rt.finish() for rt in self.runtimes]

    def key(self, now: Callable[[], int]) -> int:
        key = now()
        self._keys[key] = now
        return key

    def draw(self, key: int, position: int, op: Callable[[], object], device: torch.device) -> object:
        assert self._recorder is not None
        if device != self.device:
            raise NotReplayed(f"a random op draws on {device}, and the step runs on {self.device}")
        if key not in self._keys:
            raise NotReplayed("a random op has a key of its own, and none of the step")
        self._draws.append((self._keys[key], position))
        return self._recorder.draw(len(self._draws) - 1, op)

    def expect(self, value: torch.Tensor, expected: list[bool | int], where: str) -> None:
        self._expected.append((value.reshape(-1).clone(), expected, where))

    def _addresses_now(self) -> dict[tuple[int, str, str], int]:
        """The addresses of what the programs are given beside the batch, by runtime, kind and name."""
        return {
            (number, kind, name): tensor.data_ptr()
            for number, rt in enumerate(self.runtimes)
            for kind, tensors in _tensors(rt).items()
            for name, tensor in tensors.items()
        }


def _tensors(rt: Runtime) -> dict[str, Mapping[str, torch.Tensor]]:
    """The tensors of a runtime, by kind and name."""
    params, grads = dict(rt.params), dict(rt.grads)
    for bucket in rt.buckets:
        params |= {piece.name: x for piece, x in zip(bucket.pieces, bucket.owned, strict=False)}
        if bucket.flat is not None:
            grads[bucket.names[0]] = bucket.flat
    return {
        "parameter": params,
        "gradient of": grads,
        "buffer": rt.buffers,
        "constant": rt.constants,
    }


def _without_host(rt: Runtime) -> Runtime:
    """A runtime on the same tensors that times no op on its device, and keeps its total for later."""
    buckets = [replace(bucket) for bucket in rt.buckets]
    return replace(
        rt,
        params=dict(rt.params),
        grads=Accumulators(buckets) if isinstance(rt.grads, Accumulators) else dict(rt.grads),
        buffers=dict(rt.buffers),
        buckets=buckets,
        record=Record(),
        collected=Collected(),
        validate=None,
        losses=Losses(),
        kept_total=[],
    )
