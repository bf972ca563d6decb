"""Digests by which ranks compare their training in each step: of the optimizer, of its gradients, and of the
tensors that other ranks hold as well.

A rank that makes fewer updates, or others, or changes its copy of a tied weight, would train another model
than the rest, and the loss would even fall.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fxpipe.errors import RunError
from fxpipe.plan.artifact import holders
from fxpipe.plan.number import number
from fxpipe.runtime.job.digest import MOST, digest
from fxpipe.runtime.job.process import Process
from fxpipe.runtime.program.accelerator import event, is_accelerator
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.model.partial_model import trained_tensors
from fxpipe.training.optimizer.batch_digest import ABSENT, DIGESTS, Facts, difference, words
from fxpipe.training.optimizer.optimizer import Counts, PipelineOptimizer
from fxpipe.training.optimizer.script_changes import ScriptChanges
from fxpipe.training.optimizer.weight_writes import Form


@dataclass(eq=False)
class RankDigests:
    """The digests of one pipeline on one rank.  ``compares``: whether ranks must have the same bits."""

    state: ModelState
    rank: int
    compares: bool
    _optimizer: weakref.ref[PipelineOptimizer] | None = None
    _counts: Counts | None = None  # which outlive it
    _steps: int = 0  # whose gradients are in .grad
    _zeroed: int = 0
    _first: int = 0  # of the tensors in the next step's digests
    _turn: int = 0  # the number of times that all had theirs
    _names: tuple[str, ...] = ()
    _digests: torch.Tensor | None = None
    _copied: torch.Event | None = None
    _shared: list[str] = field(default_factory=list)
    changes: ScriptChanges = field(init=False)

    def __post_init__(self) -> None:
        shards = self.state.plan.lanes.shared  # of which each lane has other values
        owners = holders(tensors.state for tensors in self.state.owned).items()
        alike = [name for name, processes in owners if len(processes) > 1 and name.tensor not in shards]
        self._shared = [*alike] if self.compares else []
        self.changes = ScriptChanges(self.state, self.rank)

    @property
    def optimizer(self) -> PipelineOptimizer | None:
        """The one that was made last, if it is still there."""
        return None if self._optimizer is None else self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: PipelineOptimizer) -> None:
        if self._counts is not None and self._counts.zeroed != self._zeroed:  # by the one before
            self._steps = 0
        self._optimizer, self._counts = weakref.ref(optimizer), optimizer.counts
        self._zeroed = optimizer.counts.zeroed

    def facts(self, plan: int, stop: bool, asked: str, written: int) -> Facts:
        """The facts of the step that begins.  plan: its number.  stop: whether the rank was asked to end the
        run.  asked: outputs that all ranks must ask for alike, as text.  written: as before it."""
        order = ABSENT if self._counts is None else self._counts.order
        self.changes.warn_of_unused()
        self.changes.compare(gradients_alone=True)  # of those to which the step adds
        changed, weights = self.changes.change(at_once=False), self.changes.writes.compare()
        if weights.form <= Form.UNCHANGED and self.changes.allowed:
            weights = self.changes.declared
        options, updates = self._of_optimizer()
        names, digests = self._known_digests()
        return Facts(
            plan,
            stop,
            asked=number(asked.encode()),
            options=options,
            updates=updates,
            added=self._added(),
            calls=order,
            changed=changed,
            weights=weights,
            names=names,
            digests=digests,
            written=written,
        )

    def stepped(self) -> None:
        """A step has ended, of which ``facts`` were told."""
        self.changes.stepped(adds=self._steps > 1)

    def check(self, process: Process, call: str) -> None:
        """Raise RunError, on all ranks, where their training differs between two steps.  All must call it.

        call: the one for which they compare it, as text.
        """
        changed = self.changes.change(at_once=True)
        options, updates = self._of_optimizer()
        for first in range(0, max(1, len(self._shared)), DIGESTS):
            names = tuple(self._shared[first : first + DIGESTS])
            digests = tuple(self._digest(names).tolist()) if names else ()
            facts = Facts(
                plan=0,
                options=options,
                updates=updates,
                changed=changed,
                names=names,
                digests=digests,
                written=self.written(),
            )
            table = process.begin_gather(words(facts, (), {}), call)()
            if problem := difference(table, (), call, names, resolution=self.changes.resolution):
                raise RunError(problem)

    def _of_optimizer(self) -> tuple[int, int]:
        """The number of its options, and one more than that of its updates."""
        optimizer, counts = self.optimizer, self._counts
        options = ABSENT if optimizer is None else number(json.dumps(optimizer.options()).encode())
        return options, ABSENT if counts is None else 1 + counts.updates

    def written(self) -> int:
        """The number of the tensors that the script has changed in a model that is whole, and of their values
        where all ranks must have the same; else ABSENT."""
        if self.state.whole is None:
            return ABSENT
        changed = self.state.whole.changed(trained_tensors(self.state))
        shards = self.state.plan.lanes.shared  # of which each lane has other values
        alike = {
            name: value if self.compares and name not in shards else 0 for name, value in changed.items()
        }
        return number(json.dumps(alike).encode())

    def _added(self) -> int:
        """The steps whose gradients the next one adds to, and one; ABSENT without gradients."""
        names = self.state.owned_by(self.rank).gradients
        if not names:
            return ABSENT
        zeroed = self._zeroed if self._counts is None else self._counts.zeroed
        if zeroed != self._zeroed or all(self.state.parameter(name).grad is None for name in names):
            self._steps, self._zeroed = 0, zeroed
        self._steps += 1
        return self._steps

    def _known_digests(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names, the same on all ranks, and the digests of these tensors, of the step before.

        They were begun a step ago, so that no rank waits for its device.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._names, () if self._digests is None else tuple(self._digests.tolist())

    def begin_digests(self) -> None:
        """Begin those for the next step, when the last update stands on all ranks."""
        shared, first = self._shared, self._first
        self._names = tuple((shared * 2)[first : first + min(DIGESTS, len(shared))])
        self._first = (first + DIGESTS) % max(1, len(shared))
        if self._names:
            self._digests = self._digest(self._names, self._turn).to("cpu", non_blocking=True)
            self._turn += first + DIGESTS >= len(shared)
            if is_accelerator(self.state.device):
                self._copied = event(self.state.device)
                self._copied.record()

    def _digest(self, names: Sequence[str], turn: int | None = None) -> torch.Tensor:
        """The digests of these tensors, ABSENT for those that this rank does not hold.

        turn: take some rows of large ones, each time others; None for all of them.
        """
        names_here, device = {*self.state.owned_by(self.rank).state}, self.state.device
        process = self.state.process
        if process is not None and process.lane and is_accelerator(device):
            # Where kernels add in any order, lanes differ in the last bits of what they all hold.
            names_here = set()
        values = [self.state.value(name) if name in names_here else None for name in names]
        absent = torch.full((), ABSENT, device=device)
        digests = [absent if t is None or t.is_meta else digest(_rows(t, turn)) for t in values]
        return torch.stack(digests)


def _rows(tensor: torch.Tensor, turn: int | None) -> torch.Tensor:
    """Take at most MOST rows of a tensor, in each turn others, until all were taken."""
    apart = -(-len(tensor) // MOST) if tensor.dim() and turn is not None else 1
    return tensor if apart <= 1 or turn is None else tensor[turn % apart :: apart]
