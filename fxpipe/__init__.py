"""A pipeline-parallel compiler for PyTorch: one training-step graph in, one readable program per rank out.

All names except the errors are loaded on first use (PEP 562), so that a generated program, which needs only
``fxpipe.runtime``, does not load the compiler.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe.errors import (
    ArtifactError,
    BatchError,
    CallsDifferError,
    CaptureError,
    DeadlockError,
    FxpipeError,
    LimitError,
    OptionError,
    PartitionError,
    RunError,
    ScheduleError,
    SizeError,
    VerifyError,
    VocabularyError,
)

# The streams of a GPU that share one of its queues wait for each other, those of messages for ever.  The
# driver reads it when the GPU is used first: where it was, runtime/ranks/connect.py finds that it is not set.
# While torch is being imported it has no attribute cuda: it imports a module of NVIDIA's called cuda, and a
# user's script of that name, which imports fxpipe, comes before that.
_cuda = getattr(sys.modules.get("torch"), "cuda", None)
if _cuda is None or not _cuda.is_initialized():
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

if TYPE_CHECKING:
    from fxpipe.api.checkpointer import Checkpointer
    from fxpipe.api.compile import compile
    from fxpipe.api.load import load
    from fxpipe.api.pipeline import Pipeline
    from fxpipe.api.read_checkpoint import Checkpoint, read_checkpoint
    from fxpipe.api.varlen import flash_attn_varlen_func, use_packed_attention, varlen_attn
    from fxpipe.compiler.options import Offload
    from fxpipe.integrations.context import ContextParallel
    from fxpipe.integrations.experts import ExpertParallel
    from fxpipe.integrations.head_parallel import HeadParallel
    from fxpipe.integrations.pack import PackedSteps, pack, pad
    from fxpipe.integrations.padded_parallel import PaddedParallel
    from fxpipe.integrations.summed_gradients import SummedGradients
    from fxpipe.runtime.batch.outputs import StepResult
    from fxpipe.runtime.ranks.local_mesh import local_lanes
    from fxpipe.schedule.ops import Schedule

    __version__: str

__all__ = [
    "ArtifactError",
    "BatchError",
    "CallsDifferError",
    "CaptureError",
    "Checkpoint",
    "Checkpointer",
    "ContextParallel",
    "DeadlockError",
    "ExpertParallel",
    "FxpipeError",
    "HeadParallel",
    "LimitError",
    "Offload",
    "OptionError",
    "PackedSteps",
    "PaddedParallel",
    "PartitionError",
    "Pipeline",
    "RunError",
    "Schedule",
    "ScheduleError",
    "SizeError",
    "StepResult",
    "SummedGradients",
    "VerifyError",
    "VocabularyError",
    "__version__",
    "compile",
    "flash_attn_varlen_func",
    "load",
    "local_lanes",
    "pack",
    "pad",
    "read_checkpoint",
    "use_packed_attention",
    "varlen_attn",
]

_LAZY = {
    "__version__": "fxpipe.plan.version",
    "Checkpoint": "fxpipe.api.read_checkpoint",
    "Checkpointer": "fxpipe.api.checkpointer",
    "ContextParallel": "fxpipe.integrations.context",
    "ExpertParallel": "fxpipe.integrations.experts",
    "HeadParallel": "fxpipe.integrations.head_parallel",
    "Offload": "fxpipe.compiler.options",
    "PackedSteps": "fxpipe.integrations.pack",
    "PaddedParallel": "fxpipe.integrations.padded_parallel",
    "Pipeline": "fxpipe.api.pipeline",
    "Schedule": "fxpipe.schedule.ops",
    "StepResult": "fxpipe.runtime.batch.outputs",
    "SummedGradients": "fxpipe.integrations.summed_gradients",
    "compile": "fxpipe.api.compile",
    "flash_attn_varlen_func": "fxpipe.api.varlen",
    "load": "fxpipe.api.load",
    "local_lanes": "fxpipe.runtime.ranks.local_mesh",
    "pack": "fxpipe.integrations.pack",
    "pad": "fxpipe.integrations.pack",
    "read_checkpoint": "fxpipe.api.read_checkpoint",
    "use_packed_attention": "fxpipe.api.varlen",
    "varlen_attn": "fxpipe.api.varlen",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    try:
        value = getattr(import_module(_LAZY[name]), name)
    except (ImportError, AttributeError) as error:
        if torch := sys.modules.get("torch"):  # whose private parts may be elsewhere in another version
            word = import_module("fxpipe.api.tried_torch").untried(torch.__version__)
            if word:
                error.add_note(word)
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
