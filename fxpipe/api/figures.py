"""The figures of a training run, for any logger."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fxpipe.cost.devices.known_devices import reported_device
from fxpipe.cost.throughput import peak_seconds
from fxpipe.plan.artifact import Plan
from fxpipe.runtime.program.accelerator import identity, is_accelerator, memory_size


class StepClock:
    """The seconds of a step with what the script does around it, but for evaluations."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._steps, self._shares, self._last = 0, 0.0, (math.nan, math.nan)

    @contextmanager
    def step(self, share: Callable[[], float]) -> Iterator[None]:
        """A step of the pipeline.  share: behind it, its tokens relative to those of the plan's step."""
        if self._since is None:
            self._since = time.perf_counter()
        yield
        self._steps, self._shares = self._steps + 1, self._shares + share()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What does not count."""
        begun = time.perf_counter()
        try:
            yield
        finally:  # also of an evaluation that refuses its batch, after which a script may go on
            if self._since is not None:
                self._since += time.perf_counter() - begun

    def take(self) -> tuple[float, float]:
        """The means of the steps since the last call, of seconds and shares; those of the last call if there
        were none since."""
        if self._steps and self._since is not None:
            now = time.perf_counter()
            self._last = (now - self._since) / self._steps, self._shares / self._steps
            self._since, self._steps, self._shares = now, 0, 0.0
        return self._last


def figures_of(
    plan: Plan,
    step: int,
    seconds: float,
    spans: Sequence[tuple[str, float, float]],
    replicas: int,
    device: torch.device,
    share: float = 1.0,
    bubble: float | None = None,
) -> dict[str, float]:
    """See ``Pipeline.figures``.  spans: (op, start, end) of the last step, none where it was replayed.

    share: the tokens of steps relative to those of the plan's.  bubble: as simulated of the last step, where
    it is not the plan's.
    """
    spec, (done, unit) = plan.step, plan.per_second(seconds, replicas)
    figures = {"step": step, "seconds": seconds, f"{unit}/s": done * share}
    if is_accelerator(device):
        known = reported_device(identity(device)[0], memory_size(device))
        if known is not None and plan.flops and share == 1:
            peak = peak_seconds(plan.flops, known.name) * spec.microbatches / spec.ranks
            figures["MFU"] = peak / seconds
        figures["memory"] = torch.accelerator.max_memory_allocated(device)
    if spans:
        busy = sum(end - start for _, start, end in spans)
        figures["bubble"] = 1 - busy / (spans[-1][2] - spans[0][1])
    return figures | {"predicted": plan.prediction.span_bubble if bubble is None else bubble}
