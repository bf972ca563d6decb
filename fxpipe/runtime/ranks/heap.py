"""Configures the C library's heap, on a CPU rank that offloads, to return freed memory to the system.

By default glibc keeps freed memory between live blocks and reuses parts of large blocks, so that a rank's
resident memory would not fall when tensors are offloaded.
"""

from __future__ import annotations

import ctypes
import os

_MMAP_THRESHOLD = -3  # <malloc.h>
LARGE = 1 << 20  # bytes


def give_back_large_tensors() -> None:
    """Allocate tensors of 1 MiB and more, from now on, in pages of their own, which are freed with them.

    This costs time, as the kernel clears new pages.  It does nothing with another C library, or if the user
    has configured the heap by environment variables.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
