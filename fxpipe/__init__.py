"""A pipeline-parallel compiler for PyTorch: one training-step graph in, one readable program a rank out."""

from fxpipe.api import compile, load
from fxpipe.errors import (
    ArtefactError,
    BatchError,
    CaptureError,
    DeadlockError,
    FxpipeError,
    PartitionError,
    RunError,
    ScheduleError,
    SizeError,
)
from fxpipe.pipeline import Pipeline
from fxpipe.version import __version__

__all__ = [
    "ArtefactError",
    "BatchError",
    "CaptureError",
    "DeadlockError",
    "FxpipeError",
    "PartitionError",
    "Pipeline",
    "RunError",
    "ScheduleError",
    "SizeError",
    "__version__",
    "compile",
    "load",
]
