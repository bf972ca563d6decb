"""Inner loops compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For several threads at a time.  Kept on disk, but where there is no place to write to.

    numba looks only at a function's own file to see whether what it kept is out of date, so functions that
    call each other belong in one file.
    """
    compile = partial(njit, nogil=True, error_model="numpy")
    try:
        return compile(cache=True)(function)
    except RuntimeError:
        return compile()(function)
