"""The losses of a step's microbatches on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fxpipe.runtime.program.accelerator import on_host
from fxpipe.runtime.program.comm import Numbers


@dataclass(eq=False)
class Losses:
    """The losses so far, with their counts where they are sums.

    ``weights``: what each microbatch counts for; None if all count alike.
    """

    values: list[torch.Tensor] = field(default_factory=list)
    counts: list[torch.Tensor] = field(default_factory=list)
    weights: Sequence[float] | None = None

    def forget(self) -> None:
        self.values, self.counts = [], []

    def add(self, loss: torch.Tensor, count: torch.Tensor | None) -> None:
        self.values.append(loss.clone())  # a kernel may return a view of a storage as large as its input
        if count is not None:
            self.counts.append(count)

    def total(self) -> torch.Tensor:
        """Their sum, and its divisor, float64, on their device; without losses zeros."""
        if not self.values:
            return torch.zeros(2, dtype=torch.float64)
        sums = torch.stack([x.double() for x in self.values])
        # new_full, as new_tensor would wait for the device
        counts = torch.stack(self.counts).double() if self.counts else sums.new_full(sums.shape, 1)
        if self.weights is not None:
            share = sums.new_tensor(self.weights)
            sums, counts = sums * share, counts * share
        return torch.stack([sums.sum(), counts.sum()])

    def total_on_host(self) -> Numbers:
        """``total``; the function waits until it is on the CPU."""
        device = self.values[0].device if self.values else torch.device("cpu")
        return on_host(device, self.total)
