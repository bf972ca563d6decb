"""What the process that all others are forked from imports: no case then pays for it."""

from __future__ import annotations

import torch

import fxpipe
from benchmarks.model_coverage import examine, libraries, sources  # noqa: F401

sources.all_cases()
fxpipe.compile(
    torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)),
    (torch.ones(2, 4),),
    ranks=2,
    microbatches=2,
    loss_fn=lambda output, _: output.mean(),
)
