"""Where kernels that Inductor compiled are kept, so that a later run compiles none of them again.

Inductor caches its kernels, as pickles and machine code, in the folder that TORCHINDUCTOR_CACHE_DIR names, by
default below ``/tmp``: the machine may empty that, and other users may make the folder first.  The default of
fxpipe is a folder of the user's.  It is not one of a saved pipeline, since those come from others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_kernels() -> None:
    """Let Inductor cache in a folder that lasts, unless the user or torch has chosen one, or it cannot be
    made."""
    if _VARIABLE in os.environ:
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(caches, "fxpipe", "inductor", _processor())
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ[_VARIABLE] = str(folder)


def _processor() -> str:
    """A name for the instructions of this machine: kernels are compiled for them, and machines may share a
    home."""
    text = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
