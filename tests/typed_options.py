"""What a type checker knows of the options of ``fxpipe.compile``: ``make lint`` checks this file, and nothing
runs it.

Each wrong line has an ignore of its error, and mypy tells an ignore that it does not need.
"""

from torch import nn

import fxpipe


def compiled(model: nn.Module) -> fxpipe.Pipeline:
    fxpipe.compile(model, (), ranks=2, microbatches=4, recompute="norms", schedule="1f1b", offload=0.5)
    fxpipe.compile(model, (), ranks=2, microbatches=4, recompute="norm")  # type: ignore[arg-type]
    fxpipe.compile(model, (), rank=2, microbatches=4)  # type: ignore[call-arg]
    return fxpipe.compile(model, (), 2)  # type: ignore[call-arg, arg-type]
