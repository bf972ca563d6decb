"""Inner loops compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled without the GIL.  Cached on disk, unless the disk cannot be written to.

    A function whose name begins with an underscore can be called by compiled ones only: without the wrappers
    for other callers the compilation takes four fifths of the time.

    numba checks only a function's own file to see whether its cache is out of date, so functions that call
    each other belong in one file.
    """
    is_inner = function.__name__.startswith("_")
    compile = partial(
        njit, nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=is_inner
    )
    try:
        return compile(cache=True)(function)
    except RuntimeError:
        return compile()(function)
