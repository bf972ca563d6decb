"""What is to be seen of a step, and what a step of all ranks in one process gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fxpipe.errors import number_of
from fxpipe.runtime.batch.outputs import MOST_SHOWN, Listed, On, shown
from fxpipe.runtime.debug.finite import Check
from fxpipe.runtime.program.rank import Runtime


@dataclass(frozen=True)
class Looks:
    """What is to be seen of a step.  ``outputs``: by name; ``outputs_on``: where.  ``check``: of all results.
    ``record``: ops, with the directories for what they are given."""

    outputs: Sequence[str] = ()
    outputs_on: On = None
    check: Check = None
    record: Mapping[str, Path] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether anything is to be seen, which a replay has not."""
        return bool(self.outputs or self.check or self.record)


NO_LOOKS = Looks()


@dataclass(frozen=True, eq=False, repr=False)
class LocalResult:
    """The result of a step of all ranks in this process.  ``loss``: of the whole batch, 0-d.  ``grads``:
    parameter name -> gradient of the mean loss.  ``runtimes``: the ranks' runtimes, with their records.
    ``peak_saved``: per rank the maximum number of bytes held between two ops, if measured.  ``outputs``:
    those that were asked for, and ``listed``, as in :class:`StepResult`; the loss is None if the model has
    none."""

    loss: torch.Tensor | None
    grads: dict[str, torch.Tensor]
    runtimes: tuple[Runtime, ...]
    peak_saved: tuple[int, ...]
    outputs: dict[str, torch.Tensor]
    listed: Listed = field(default_factory=dict)

    def __repr__(self) -> str:
        elements = sum(grad.numel() for grad in self.grads.values())
        grads = f"grads of {number_of(len(self.grads), 'parameter')} with {number_of(elements, 'element')}"
        parts = [grads] if self.grads else []
        if self.peak_saved:
            parts.append(f"peak_saved={[*self.peak_saved[:MOST_SHOWN]]}")
        return f"LocalResult({', '.join([*shown(self.loss, self.outputs, self.listed), *parts])})"
