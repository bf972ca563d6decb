"""Steps that are replays of a captured one, as soon as these are known to be right.

The first steps run twice, op by op and as a replay, each on its own batch with its own random keys, and must
give the same bits: with kernels that do, as those of attention's backward give others in each run.  One more
step runs twice with the kernels that all others have.  What stands in the way of a capture, or differs, is
told once; then the rank runs op by op.  Other ranks need not know: a replay exchanges the same messages.
"""

from __future__ import annotations

import atexit
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from fxpipe.errors import FxpipeError
from fxpipe.plan.step import Replay
from fxpipe.runtime.debug.finite import place_of_failure
from fxpipe.runtime.program.accelerator import synchronize
from fxpipe.runtime.program.captured import capturing
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.replays.captured_step import CapturedStep, CountedDraws, NotReplayed, StagedBatch
from fxpipe.runtime.replays.deterministic import Deterministic
from fxpipe.runtime.replays.recorder import recorder_of
from fxpipe.runtime.torch_private import copy_each

log = logging.getLogger("fxpipe")

#: Steps in which a replay must give the bits of the ops, on as many batches, before it is believed.
TRIALS = 3
#: The share of the time of a step op by op that a replay may take, where steps are replayed if it is faster.
WORTH = 0.98

T = TypeVar("T")
Losses = Sequence[torch.Tensor | None]
Run = Callable[[Sequence[Runtime], object], Losses]


@dataclass(eq=False)
class Replays:
    """``wanted``: "always", or "auto", where a replay is faster.  ``run``: runs the programs of some ranks on
    a batch.  ``memory``: that of a step op by op, as a block; None where these are all ranks, which then take
    that of the replay while it is tried.  ``never``: why no rank replays its steps.  ``reason``: why this one
    does not, if it is known to be so."""

    wanted: Replay
    device: torch.device
    run: Run
    memory: Callable[[], AbstractContextManager[object]] | None = None
    never: str = ""
    reason: str = ""
    _captured: CapturedStep | None = None
    _trials: int = 0

    def __post_init__(self) -> None:
        if recorder_of(self.device) is None:
            self.never = self.never or f"a {self.device.type} has no graphs of its work"
        self._op_by_op(self.never)

    def step(self, runtimes: Sequence[Runtime], batch: object) -> Losses:
        """Run the step of some ranks, which have their parameters, gradients and buffers; the same runtimes
        in all steps.  Returns what their programs return."""
        _start(runtimes)
        if self.never or self._trials == TRIALS + 1:
            losses = self._replay(batch)
            return self._run(runtimes, batch) if losses is None else losses
        self._trials += 1
        before = [_State.of(rt) for rt in runtimes]
        if self._trials <= TRIALS:
            with Deterministic():  # type: ignore[no-untyped-call]
                return self._on_trial(runtimes, batch, before)
        self._captured = None  # that of the trials has slower kernels
        return self._timed(runtimes, batch, before)

    def _replay(self, batch: object) -> Losses | None:
        """Replay the step, if there is a capture that fits it."""
        if self._captured is not None:
            try:
                self._captured.replay(batch)
                return self._captured.finish()
            except NotReplayed as error:
                self._op_by_op(str(error))
        return None

    def _on_trial(self, runtimes: Sequence[Runtime], batch: object, before: Sequence[_State]) -> Losses:
        """Run a step op by op, and as a replay; twice op by op where there is none, as other ranks may have
        one."""
        draws = CountedDraws()
        with capturing(draws):
            losses = self._run(runtimes, batch)
        after = [_State.of(rt) for rt in runtimes]
        self._capture(runtimes, batch, draws.number, before)
        again = self._again(runtimes, batch, before)
        if self._captured is not None:
            self._op_by_op(_difference(losses, again, runtimes, after))
        _restore(runtimes, after)
        return losses

    def _timed(self, runtimes: Sequence[Runtime], batch: object, before: Sequence[_State]) -> Losses:
        """Run a step both ways with the kernels of all later steps, to see whether a replay is faster."""
        draws = CountedDraws()
        with capturing(draws):
            op_by_op, losses = timed(self.device, lambda: self._run(runtimes, batch))
        after = [_State.of(rt) for rt in runtimes]
        self._capture(runtimes, batch, draws.number, before)
        replayed, _ = timed(self.device, lambda: self._again(runtimes, batch, before))
        _restore(runtimes, after)
        times = f"a replay takes {replayed * 1e3:.1f} ms, and a step op by op {op_by_op * 1e3:.1f} ms"
        if self._captured is not None:
            log.info(times)
            self._op_by_op(times if self.wanted == "auto" and replayed > WORTH * op_by_op else "")
        return losses

    def _capture(
        self, runtimes: Sequence[Runtime], batch: object, random_ops: int, before: Sequence[_State]
    ) -> None:
        """Capture the step, if that has not been done, and nothing stands in the way."""
        if self._captured is not None or self.reason:
            return
        make = recorder_of(self.device)
        assert make is not None, "else no rank replays"
        _restore(runtimes, before)
        spec = runtimes[0].spec
        needed = tuple(dict.fromkeys(name for rt in runtimes for name in spec.leaves[rt.rank]))
        step = CapturedStep(runtimes, StagedBatch.like(batch, spec.batch, needed, self.device), self.device)
        try:
            step.capture(self.run, batch, random_ops, make)
        except (NotReplayed, FxpipeError, RuntimeError) as error:  # those of torch are RuntimeErrors
            what = next(iter(str(error).splitlines()), "").rstrip(".")
            self._op_by_op(f"{what}{place_of_failure(error)}")
        else:
            self._captured = step
            if self.memory is not None:  # a communicator does not end while a graph has its work
                atexit.register(_let_go, weakref.ref(self))

    def _again(self, runtimes: Sequence[Runtime], batch: object, before: Sequence[_State]) -> Losses:
        """Run the step once more: a replay if there is one."""
        _restore(runtimes, before)  # also of what a recorder has computed
        losses = self._replay(batch)
        if losses is not None or self.memory is None:
            return losses or []
        _start(runtimes)
        return self._run(runtimes, batch)

    def _run(self, runtimes: Sequence[Runtime], batch: object) -> Losses:
        """Run the step op by op."""
        captured, memory = self._captured, self.memory
        with nullcontext() if captured is None else captured.memory() if memory is None else memory():
            return self.run(runtimes, batch)

    def _op_by_op(self, reason: str) -> None:
        """Run all steps op by op, if there is a reason."""
        if not reason:
            return
        self.reason, self._captured = reason, None  # and its memory
        tell("Steps", reason, self.wanted)


@dataclass(frozen=True, eq=False)
class _State:
    """What a step changes of a runtime.  ``copies``: by the names of gradients or buckets, the memory of
    their sums and what was in it.  ``buckets``: of each the memory that it has, and its sum."""

    params: Mapping[str, torch.Tensor]
    grads: Mapping[str, torch.Tensor]
    copies: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    buckets: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]
    buffers: Mapping[str, torch.Tensor]
    step_number: int

    @staticmethod
    def of(rt: Runtime) -> _State:
        return _State(
            dict(rt.params),
            dict(rt.grads),
            {name: (x, x.clone()) for name, x in _sums(rt).items()},
            [(bucket.flat, bucket.summed) for bucket in rt.buckets],
            dict(rt.buffers),
            rt.step_number,
        )

    def restore(self, rt: Runtime) -> None:
        if self.copies:
            tensors, copies = zip(*self.copies.values(), strict=True)
            copy_each([*tensors], [*copies])
        for bucket, (flat, summed) in zip(rt.buckets, self.buckets, strict=True):
            bucket.flat, bucket.summed = flat, summed
        rt.grads.clear()
        rt.grads.update(self.grads)
        rt.params, rt.buffers, rt.step_number = dict(self.params), dict(self.buffers), self.step_number


def _sums(rt: Runtime) -> dict[str, torch.Tensor]:
    """The gradients of a runtime, or of each of its buckets the memory that has them, or their sum."""
    if not rt.buckets:
        return dict(rt.grads)
    memory = {bucket.names[0]: bucket.summed if bucket.flat is None else bucket.flat for bucket in rt.buckets}
    return {name: tensor for name, tensor in memory.items() if tensor is not None}


def _let_go(reference: weakref.ref[Replays]) -> None:
    if (replays := reference()) is not None:
        replays._captured = None


def _start(runtimes: Sequence[Runtime]) -> None:
    for rt in runtimes:
        rt.start()


def _restore(runtimes: Sequence[Runtime], states: Sequence[_State]) -> None:
    for rt, state in zip(runtimes, states, strict=True):
        state.restore(rt)


def _difference(losses: Losses, again: Losses, runtimes: Sequence[Runtime], after: Sequence[_State]) -> str:
    """What a replay has computed otherwise than the ops; "" for nothing."""
    for loss, other in zip(losses, again, strict=True):
        if loss is not None and other is not None and not same_bits(loss, other):
            return f"a replay gives the loss {float(other)!r}, and the ops {float(loss)!r}"
    for rt, state in zip(runtimes, after, strict=True):
        copies = {name: copy for name, (_, copy) in state.copies.items()}
        pairs = {"gradient": (_sums(rt), copies), "buffer": (rt.buffers, state.buffers)}
        for kind, (ours, theirs) in pairs.items():
            for name in theirs:
                if not same_bits(ours[name], theirs[name]):
                    return f"a replay gives another {kind} of {name} than the ops"
    return ""


def tell(what: str, reason: str, wanted: Replay) -> None:
    """Say why steps, or updates, are not replayed."""
    text = f"{what} run op by op, and are not replayed: {reason}."
    if wanted == "always":
        warnings.warn(text, stacklevel=3)
    else:
        log.info(text)


def timed(device: torch.device, run: Callable[[], T]) -> tuple[float, T]:
    """The seconds that a function takes, on the device too, and its result."""
    synchronize(device)
    begin = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - begin, result


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, a NaN too."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a, b))
    return torch.equal(a.view(kinds[a.itemsize]), b.view(kinds[b.itemsize]))
