"""Clipping and update of a rank as one replay of what was captured, as soon as this is known to be right.

A CUDA graph has the numbers of the host as they were in the capture: a count of updates, a learning rate.  So
optimizers are replayed that keep their counts on the device and say so, by ``capturable=True``, as long as
the options of their groups stay.  The first updates are made twice, op by op and as a replay, and must give
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from fxpipe.plan.step import Replay
from fxpipe.runtime.replays.recorder import DeviceGraph, recorder_of
from fxpipe.runtime.replays.replays import TRIALS, WORTH, same_bits, tell, timed
from fxpipe.runtime.torch_private import copy_each, has_step_hooks
from fxpipe.training.optimizer.several_optimizers import optimizers_in

Update = Callable[[torch.Tensor | None], None]
"""Clips by a norm, if there is one, and updates."""


@dataclass(eq=False)
class UpdateReplays:
    """``optimizer``: the torch optimizer that updates.  ``names``: of what it updates.  ``masters``: of this
    what is not a parameter of the model, and the parameter.  ``reason``: why updates run op by op, if they
    do."""

    wanted: Replay
    device: torch.device
    optimizer: Optimizer
    names: Mapping[Parameter, str]
    masters: Mapping[Parameter, Parameter]
    reason: str = ""
    _recorder: DeviceGraph | None = None
    _norm: torch.Tensor | None = None  # of which the recorder's is
    _updates: int = 0
    _at: tuple[Mapping[str, object], Mapping[str, object]] | None = None  # ``_now`` of the capture

    def make(self, update: Update, norm: torch.Tensor | None) -> None:
        """Make an update.

        norm: of the gradients of all ranks, 0-d float64, if one was computed.
        """
        self._updates += 1
        self._check()
        if self.reason or self._updates == 1:  # in which an optimizer makes its state
            update(norm)
        elif self._updates <= 1 + TRIALS:
            self._on_trial(update, norm)
        else:
            self._replay(norm)

    def restart(self) -> None:
        """Capture anew: the optimizer's state is another one."""
        self._recorder = self._at = None
        self._updates = 0

    def _check(self) -> None:
        """Find a reason to run op by op."""
        if self.reason:
            return
        if not all(group.get("capturable") is True for group in self.optimizer.param_groups):
            kind = type(self.optimizer).__name__
            self._op_by_op(
                f"{kind} was not made with capturable=True, by which it keeps its counts on the device"
            )
        elif has_step_hooks(self.optimizer):
            self._op_by_op("the optimizer has hooks, whose Python a replay leaves out")
        elif self._at is not None:
            addresses, numbers = map(_changed, self._at, self._now())
            if addresses:
                self._op_by_op(f"the {addresses} lies at another address than in the capture")
            elif numbers:
                self._op_by_op(
                    f"{numbers} is another one than in the capture. Give an option that changes as a tensor "
                    "on the device: lr=torch.tensor(…)"
                )

    def _on_trial(self, update: Update, norm: torch.Tensor | None) -> None:
        """Update op by op, and as a replay of what is captured, if it can be."""
        before = self._copies()
        op_by_op, _ = timed(self.device, lambda: update(norm))
        after = None if before is None else self._copies()
        if before is None or after is None:
            return
        try:
            if self._recorder is None:
                before.restore()
                self._capture(update, norm)
            before.restore()
            replayed, _ = timed(self.device, lambda: self._replay(norm))
        except RuntimeError as error:  # those of torch are
            self._op_by_op(next(iter(str(error).splitlines()), "").rstrip("."))
        else:
            self._op_by_op(after.difference())
            times = f"a replay takes {replayed * 1e3:.1f} ms, and an update op by op {op_by_op * 1e3:.1f} ms"
            if self.wanted == "auto" and self._updates == 1 + TRIALS and replayed > WORTH * op_by_op:
                self._op_by_op(times)
        after.restore()

    def _copies(self) -> _State | None:
        """Copies of what an update changes, if there is memory for them."""
        try:
            return _State.of(self)
        except torch.OutOfMemoryError:
            self._op_by_op("the device has no memory for the copies by which replays are compared")
            return None

    def _capture(self, update: Update, norm: torch.Tensor | None) -> None:
        make = recorder_of(self.device)
        assert make is not None, "else no update is replayed"
        self._norm = None if norm is None else norm.to(self.device, copy=True)
        recorder, self._at = make(self.device, 0), self._now()
        recorder.record(lambda: update(self._norm))
        self._recorder = recorder

    def _replay(self, norm: torch.Tensor | None) -> None:
        assert self._recorder is not None
        if norm is not None and self._norm is not None:
            self._norm.copy_(norm)
        self._recorder.replay([])

    def _op_by_op(self, reason: str) -> None:
        """Make all updates op by op, if there is a reason."""
        if not reason or self.reason:
            return
        self.reason, self._recorder, self._at = reason, None, None
        tell("Updates", reason, self.wanted)

    def _now(self) -> tuple[dict[str, object], dict[str, object]]:
        """The addresses of tensors, and the numbers of the host, by what they are."""
        tensors, numbers = dict(self.tensors()), dict[str, object]()
        for k, group in enumerate(self.optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name} of group {k}"] = value
                elif name != "params":
                    numbers[f"{name} of group {k}"] = value
        return {what: tensor.data_ptr() for what, tensor in tensors.items()}, numbers

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What an update reads and writes, with what it is."""
        for each in (p for group in self.optimizer.param_groups for p in group["params"]):
            name, parameter = self.names[each], self.masters.get(each, each)
            yield f"parameter {name}", parameter.detach()
            if each is not parameter:
                yield f"master of {name}", each.detach()
            if parameter.grad is not None:
                yield f"gradient of {name}", parameter.grad
            for key, value in self.optimizer.state.get(each, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", value


@dataclass(frozen=True, eq=False)
class _State:
    """What an update changes: by what they are, tensors and what was in them; and the entries of mappings,
    as options, attributes, and the state of each parameter, which may be replaced."""

    copies: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    entries: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]

    @staticmethod
    def of(replays: UpdateReplays) -> _State:
        optimizer = replays.optimizer
        mappings = [*optimizer.param_groups, *map(vars, optimizers_in(optimizer)), *optimizer.state.values()]
        copies = {what: (x, x.clone()) for what, x in replays.tensors()}
        return _State(copies, [(mapping, {**mapping}) for mapping in mappings])

    def restore(self) -> None:
        for mapping, entries in self.entries:
            mapping.clear()
            mapping.update(entries)
        tensors, copies = zip(*self.copies.values(), strict=True)
        copy_each([*tensors], [*copies])

    def difference(self) -> str:
        """What has other bits now; "" for nothing."""
        others = (what for what, (now, then) in self.copies.items() if not same_bits(now, then))
        return next((f"a replay gives another {what} than the ops" for what in others), "")


def _changed(then: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The name of the first entry that is another one; "" for none."""
    return next((name for name in (*then, *now) if then.get(name) != now.get(name)), "")
