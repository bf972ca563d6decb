"""A pipeline-parallel compiler for PyTorch: one training-step graph in, one readable program a rank out.

Names are loaded when they are first used (PEP 562), so that a generated program, which needs
``fxpipe.runtime`` alone, loads nothing of the compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fxpipe.version import __version__

if TYPE_CHECKING:
    from fxpipe.api import compile, load
    from fxpipe.errors import (
        ArtifactError,
        BatchError,
        CaptureError,
        DeadlockError,
        FxpipeError,
        LimitError,
        PartitionError,
        RunError,
        ScheduleError,
        SizeError,
        VerifyError,
        VocabularyError,
    )
    from fxpipe.options import Offload
    from fxpipe.pipeline import Pipeline
    from fxpipe.schedule.ops import Schedule

__all__ = [
    "ArtifactError",
    "BatchError",
    "CaptureError",
    "DeadlockError",
    "FxpipeError",
    "LimitError",
    "Offload",
    "PartitionError",
    "Pipeline",
    "RunError",
    "Schedule",
    "ScheduleError",
    "SizeError",
    "VerifyError",
    "VocabularyError",
    "__version__",
    "compile",
    "load",
]

_ELSEWHERE = {
    "compile": "fxpipe.api",
    "load": "fxpipe.api",
    "Offload": "fxpipe.options",
    "Pipeline": "fxpipe.pipeline",
    "Schedule": "fxpipe.schedule.ops",
}


def __getattr__(name: str) -> Any:
    if name == "ArtefactError":
        import warnings

        warnings.warn("fxpipe.ArtefactError is now fxpipe.ArtifactError", DeprecationWarning, stacklevel=2)
        name = "ArtifactError"
    if name not in __all__:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    value = getattr(import_module(_ELSEWHERE.get(name, "fxpipe.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
