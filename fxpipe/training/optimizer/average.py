"""Averages of weights over steps, on the ranks that have them: ``pipe.average(…)``.

    average = decay * average + (1 - decay) * weight

Either beside the model, of all parameters that are trained, or in parameters of the model itself: those of a
teacher, which follow a student's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from fxpipe.errors import OptionError, RunError
from fxpipe.plan.rows import ShardName
from fxpipe.plan.tensors import gradient_dtype
from fxpipe.runtime.job.process import agreed
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.optimizer.follow import follow, matched

Decay = float | Callable[[int], float]


class Average:
    """An average of weights on the ranks that have them.  ``updates``: how often ``step`` was called.
    ``values``: the averages that this process has, by name or by that of rows.  ``pairs``: where they are
    parameters of the model, these, each with what it follows.
    """

    def __init__(self, state: ModelState, decay: Decay, into: Mapping[str, str] | None = None):
        """See ``Pipeline.average``."""
        self._state, self._decay, self.updates = state, decay, 0
        self.values: dict[ShardName, torch.Tensor] = {}
        self.is_applied = False
        with agreed(state.process, "make an average of its weights"):
            self._rate()
            state.follow_model()
            self.pairs = {} if into is None else matched(state.plan, into)
            if into is None:
                for name, value in self._weights():
                    self.values[name] = value.to(gradient_dtype(value.dtype, torch.float32), copy=True)
        if state.process is not None:
            arguments = {"decay": "a function" if callable(decay) else repr(decay), "into": repr(into)}
            state.process.check_alike(arguments, "pipe.average", "Call it with the same on all ranks.")

    @torch.no_grad()
    def step(self) -> None:
        """Take the weights of now into the average: behind each step of the optimizer, on all ranks."""
        if self.is_applied:
            raise RunError(
                "The weights are those of the average now: train outside of the block of applied()."
            )
        self._state.updates.settle()  # or weights that are taken back would stay in the average
        self._state.follow_model()
        rate = self._rate()
        self.updates += 1
        for name, value in self._weights() if self.values else ():
            self.values[name].lerp_(value.to(self.values[name].dtype), rate)
        for target, source in self.pairs.items():
            follow(self._state, target, source, rate)
        if self.pairs:
            self._state.changed()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the pipeline the average's weights for a block that evaluates, exports, saves or synchronizes
        them.  All ranks enter it."""
        if self.pairs:
            raise RunError(
                "This average is in parameters of the model, and the pipeline has it without applied()."
            )
        process = self._state.process
        self._state.updates.settle()
        if process is not None:
            process.check_same(str(self.updates).encode(), "number of calls of an average's step()")
        self._state.follow_model()
        before = {name: value.clone() for name, value in self._weights()}
        self._put(self.values)
        self.is_applied = True
        try:
            yield
        finally:
            self._state.follow_model()
            # Compared before they are put back: training in the block would be lost without a word.
            stay = all(_is_same(value, self.values[name]) for name, value in self._weights())
            self._put(before)
            self.is_applied = False
        if not stay:
            raise RunError(
                "Weights were changed while they were those of an average, and are as before the block "
                "again. Train, and load values, outside of the block of applied()."
            )

    def _weights(self) -> Iterator[tuple[ShardName, torch.Tensor]]:
        """Yield the weights that are trained and that this process updates, by name."""
        state = self._state
        process = state.process
        owners = state.owned if process is None else (state.owned_by(process.rank),)
        for name in dict.fromkeys(name for tensors in owners for name in tensors.gradients):
            value = state.value(name)
            if value.is_meta:
                raise RunError(
                    f"{name} has no values yet: pipe.load_state_dict(…) or pipe.initialize() gives them."
                )
            yield name, value

    @torch.no_grad()
    def _put(self, values: Mapping[ShardName, torch.Tensor]) -> None:
        for name, value in self._weights():
            value.copy_(values[name])
        self._state.updated()

    def _rate(self) -> float:
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise OptionError(
                f"decay is {decay!r:.60} and must be from 0 to 1, or a function of the updates so far."
            )
        return 1 - float(decay)


class OfAverage:
    """The state of an average beside its values, as a checkpoint keeps it."""

    def __init__(self, average: Average):
        self.average = average

    def state_dict(self) -> dict[str, object]:
        return {"updates": self.average.updates}

    def load_state_dict(self, state: object) -> None:
        """Raises OptionError for anything else."""
        updates = state.get("updates") if isinstance(state, Mapping) else None
        if not isinstance(updates, int) or isinstance(updates, bool) or updates < 0:
            raise OptionError(f"The state of an average has a number of updates, and no {updates!r:.60}.")
        self.average.updates = updates


def _is_same(value: torch.Tensor, average: torch.Tensor) -> bool:
    """Whether the value is that of the average, whose NaN stay NaN."""
    wanted = average.to(value.dtype)
    return bool(((value == wanted) | (wanted != wanted)).all())
