"""How the C library's heap treats tensors of CPU ranks: for speed, or so that freed memory is really free.

By itself glibc does neither: it gives the pages of some freed tensors back to the kernel, which must clear
them when the next op asks for some (percents of a step), and keeps others between tensors that live on (so
that a rank's resident memory does not fall with what leaves it).
"""

from __future__ import annotations

import ctypes
import os

# <malloc.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST, _SMALLEST = 32 << 20, 1 << 20  # bytes; the largest threshold that glibc takes, on 64 bits


def set_up_heap(gives_back: bool) -> None:
    """gives_back: tensors of 1 MiB and more get pages of their own, given back with them; else freed memory
    is kept for the next op.

    Does nothing with another C library, and where the user has set the heap up himself.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_MMAP_THRESHOLD, _SMALLEST if gives_back else _LARGEST)
    if not gives_back:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
