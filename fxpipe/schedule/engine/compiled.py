"""Inner loops compiled by numba."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from numba import config, njit

_HERE = Path(__file__).parent
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(_HERE.glob("*.py")))).hexdigest()[:16]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled without the GIL.  Cached on disk, unless the disk cannot be written to.

    A function whose name begins with an underscore can be called by compiled ones only: without the wrappers
    for other callers the compilation takes four fifths of the time.
    """
    is_inner = function.__name__.startswith("_")
    compile = partial(
        njit, nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=is_inner
    )
    try:
        with _own_cache():
            return compile(cache=True)(function)
    except RuntimeError:
        return compile()(function)


@contextmanager
def _own_cache() -> Iterator[None]:
    """Let numba cache in a folder of these sources.

    It looks only at a function's own file to see whether its cache is out of date, and fails to read a cache
    whose types are of a module that was changed.
    """
    asked: str = config.CACHE_DIR  # type: ignore[attr-defined]
    if asked or os.access(_HERE, os.W_OK):
        config.CACHE_DIR = str(Path(asked or _HERE / "__pycache__") / _SOURCES)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        config.CACHE_DIR = asked  # type: ignore[attr-defined]
