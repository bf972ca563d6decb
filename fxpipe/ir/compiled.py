"""Inner loops compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled without the GIL.  Cached on disk, unless the disk cannot be written to.

    numba checks only a function's own file to see whether its cache is out of date, so functions that call
    each other belong in one file.
    """
    compile = partial(njit, nogil=True, error_model="numpy")
    try:
        return compile(cache=True)(function)
    except RuntimeError:
        return compile()(function)
