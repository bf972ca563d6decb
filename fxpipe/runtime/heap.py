"""The C library's heap of a CPU rank that offloads: freed memory must be returned to the system.

glibc by itself keeps freed memory between tensors that live on, and gives out parts of large blocks again, so
that a rank's resident memory does not fall when tensors are offloaded.
"""

from __future__ import annotations

import ctypes
import os

_MMAP_THRESHOLD = -3  # <malloc.h>
LARGE = 1 << 20  # bytes


def give_back_large_tensors() -> None:
    """From now on tensors of 1 MiB and more get pages of their own, which go with them.

    Costs some time, as the kernel clears pages.  Does nothing with another C library, and where the user has
    set the heap up himself.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
