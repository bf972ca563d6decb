"""Runs a program once without the other ranks, before its first step.

Inductor compiles a function when it is first called, for longer than other ranks would wait for a message.

On an accelerator the driver loads a kernel when it first runs, and may wait until all that was started on
the device is over, also a receive that was posted ahead, whose sender may be waiting for this rank: then none
of them ends.  After a dry run the kernels are there, and the memory that a step takes (``step_memory.py``);
where it does not suffice, the error comes while nobody waits.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from fxpipe.errors import FxpipeError
from fxpipe.runtime.batch.outputs import Collected
from fxpipe.runtime.program.accelerator import is_accelerator, synchronize
from fxpipe.runtime.program.checks import unchecked
from fxpipe.runtime.program.comm import (
    Collective,
    Layout,
    Numbers,
    Pending,
    add_up,
    gets_values,
    new_buffer,
    new_buffers,
)
from fxpipe.runtime.program.lanes import AloneLane, running
from fxpipe.runtime.program.losses import Losses
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.program.record import Record
from fxpipe.runtime.ranks.send_buffers import Sent, SentOnStreams
from fxpipe.runtime.ranks.send_release import Event, Key, Releases
from fxpipe.runtime.ranks.side_stream import Begun, beside

#: The send of a message to nobody.
_OVER = Begun(lambda: None, lambda: True)


def dry_run(
    rt: Runtime,
    step: Callable[[object, object], object],
    batch: object,
    grads: dict[str, torch.Tensor],
    releases: Releases | None = None,
) -> list[Event] | None:
    """Run a step of a rank on zeros in place of messages, which leaves a trace in ``grads`` alone.

    releases: where the step lets what it sends go; by default it keeps nothing.
    Returns the rank's events, or None after a warning of an edited program that cannot run on zeros.  Raises
    what fails of torch and of fxpipe.
    """
    assert rt.device is not None
    comm = _Alone(rt.rank, rt.spec.ranks, rt.device, None if releases is None else SentOnStreams(releases))
    alone = replace(
        rt,
        comm=comm,
        grads=grads,
        replicas=None,
        shards={},
        summing_lanes=None,
        buffers=dict(rt.buffers),
        record=Record(rt.record.clock),
        collected=Collected(),
        losses=Losses(),
        validate=None,
        _sharing=None,
        _shared=None,
        _sums=[],
        _gathers={},
    )
    try:
        lane = None if rt.lanes is None else AloneLane(rt.lanes.index, rt.lanes.number)
        with unchecked(), running(lane):
            step(alone, batch)
        synchronize(rt.device)
    except (FxpipeError, RuntimeError):  # those of torch are RuntimeErrors
        rt.current_op = alone.current_op
        raise
    except Exception as error:  # noqa: BLE001 - an edited step may raise anything
        warnings.warn(
            "The other ranks may have to wait in the first step, for kernels that are compiled or loaded: "
            f"{alone.current_op or 'the program'} cannot run on zeros ({type(error).__name__}: {error}).",
            stacklevel=2,
        )
        return None
    return comm.events


@dataclass(eq=False)
class _Alone:
    """A Comm to which all other ranks send zeros at once.

    ``sent``: keeps what is sent as long as in a step.  ``events``: of this rank so far.
    """

    rank: int
    ranks: int
    device: torch.device
    sent: Sent | None = None
    events: list[Event] = field(default_factory=list)
    _numbers: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def start(self) -> None:
        pass

    def receive(self, layouts: Sequence[Layout], source: int) -> Pending:
        keys = tuple(self._key(source, self.rank) for _ in layouts)
        return Pending([self._zeros(layout) for layout in layouts], source, keys)

    def wait(self, pending: Pending) -> list[torch.Tensor]:
        self.events.append(("take", pending.work))
        if self.sent is not None:
            self.sent.arrived()
        return pending.buffers

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        self._keep(tensors, tuple(self._key(self.rank, to) for _ in tensors))

    def collective(
        self, verb: Collective, tensor: torch.Tensor | None, layout: Layout, root: int, group: int
    ) -> Pending | None:
        key, buffers = (self._key(group),), list[torch.Tensor]()
        if verb == "all_gather":
            whole, buffers = new_buffers(layout, self.ranks, self.device)
            whole.zero_()
        elif gets_values(verb, tensor, root, self.rank):
            buffers = [self._zeros(layout) for _ in range(self.ranks if verb == "gather" else 1)]
        if tensor is None:
            return Pending(buffers, root, key)
        if verb == "reduce" and is_accelerator(self.device):  # the memory and the kernels of the sum
            total = buffers[0] if buffers else None
            added = partial(add_up, tensor, total, root, self.rank, self.ranks, lambda *_: None)
            beside(self.device).run(added)
        if not buffers:
            self._keep([tensor], key)
            return None
        self.events.append(("give", key))
        return Pending(buffers, -1, key, tensor)

    def share_numbers(self, numbers: Numbers | None, source: int) -> Numbers:
        totals = torch.ones(2, dtype=torch.float64)  # now, as in a step, not when they are asked for
        return lambda: totals if numbers is None else numbers()

    def flush(self) -> None:
        if self.sent is not None:
            self.sent.join()

    def _keep(self, tensors: Sequence[torch.Tensor], keys: tuple[Key, ...]) -> None:
        self.events.append(("keep", keys))
        if self.sent is not None:
            self.sent.add(_OVER, tensors)

    def _key(self, *which: int) -> Key:
        """The next tensor from a rank to another one, or the next collective of a group."""
        self._numbers[which] += 1
        return (*which, self._numbers[which])

    def _zeros(self, layout: Layout) -> torch.Tensor:
        return new_buffer(layout, self.device).zero_()
