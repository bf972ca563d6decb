"""Runs a program once without the other ranks, before its first step.

Inductor compiles a function when it is first called, for longer than other ranks would wait for a message.

On an accelerator the driver loads a kernel when it first runs, and the caching allocator asks it for memory
when it has none.  For both the driver may wait until all that was started on the device is over, also a
receive that was posted ahead, whose sender may be waiting for this rank: then none of them ends.  After a dry
run the kernels are there, and as much memory as a step takes; where it does not suffice, the error comes
while nobody waits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.errors import FxpipeError
from fxpipe.runtime.accelerator import synchronize
from fxpipe.runtime.checks import unchecked
from fxpipe.runtime.comm import Layout, Pending
from fxpipe.runtime.outputs import Collected
from fxpipe.runtime.rank import Runtime
from fxpipe.runtime.record import Record


def dry_run(rt: Runtime, step: Callable[[Any, Any], Any], batch: Any, grads: dict[str, torch.Tensor]) -> None:
    """Run a step of a rank on zeros in place of messages.  It leaves no trace but in ``grads``, its
    accumulators.

    Warns of an edited program that cannot run on zeros.  Raises what fails of torch and of fxpipe.
    """
    assert rt.device is not None
    alone = replace(
        rt,
        comm=_Alone(rt.rank, rt.spec.ranks, rt.device),
        grads=grads,
        buffers=dict(rt.buffers),
        record=Record(rt.record.clock),
        collected=Collected(),
        _losses=[],
        _counts=[],
        _shared=None,
    )
    try:
        with unchecked():
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


@dataclass(frozen=True)
class _Alone:
    """A Comm to which all other ranks send zeros at once."""

    rank: int
    ranks: int
    device: torch.device

    def receive(self, layouts: Sequence[Layout], source: int) -> Pending:
        return Pending([self._zeros(layout) for layout in layouts], source)

    def wait(self, pending: Pending) -> list[torch.Tensor]:
        return pending.buffers

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        pass

    def broadcast(
        self, tensor: torch.Tensor | None, layout: Layout, source: int, group: int
    ) -> Pending | None:
        return self.receive([layout], source) if tensor is None else None

    def gather(self, tensor: torch.Tensor, layout: Layout, to: int, group: int) -> Pending | None:
        return self.all_gather(tensor, layout, group) if to == self.rank else None

    def all_gather(self, tensor: torch.Tensor, layout: Layout, group: int) -> Pending:
        return self.receive([layout] * self.ranks, -1)

    def broadcast_numbers(self, tensor: torch.Tensor | None, source: int) -> torch.Tensor:
        return torch.ones(2, dtype=torch.float64) if tensor is None else tensor

    def flush(self) -> None:
        pass

    def _zeros(self, layout: Layout) -> torch.Tensor:
        shape, stride, dtype = layout
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device).zero_()
