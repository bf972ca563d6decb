"""Inner loops compiled by numba.

Numba is loaded at the first call of one that has much to do: to load it takes longer than a named schedule of
some hundred ops takes in Python, and without a cache it compiles for seconds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

_HERE = Path(__file__).parent
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(_HERE.glob("*.py")))).hexdigest()[:16]
_IN_PYTHON = 20_000  # elements of arrays that loops go through in Python, in all calls: a tenth of a second


class Loop:
    """A function that is compiled at its first call; if ``begins_in_python``, once it has much to do."""

    def __init__(self, function: Callable[..., object], begins_in_python: bool = False) -> None:
        self.function, self.begins_in_python = function, begins_in_python
        self.compiled: Callable[..., object] | None = None
        _waiting.append(self)

    def __call__(self, *arguments: object) -> Any:
        global _gone_through
        if self.compiled is None and self.begins_in_python:
            _gone_through += max((len(x) for x in arguments if isinstance(x, np.ndarray)), default=1)
            if _gone_through <= _IN_PYTHON:
                return self.function(*arguments)
        if self.compiled is None:
            _compile_waiting()
            assert self.compiled is not None, "it was waiting"
        return self.compiled(*arguments)


_waiting: list[Loop] = []
_lock, _gone_through = Lock(), 0


def compiled(function: Callable[..., object]) -> Loop:
    """Let numba compile a function, without the GIL and cached on disk, unless that cannot be written to.

    A function whose name begins with an underscore can be called by others only, which take its code in:
    annealing takes a twentieth less time so.  Without wrappers for Python the compilation takes four fifths.
    """
    return Loop(function)


def compiled_later(function: Callable[..., object]) -> Loop:
    """Let numba compile a function that may run as Python before: one that draws no random numbers."""
    return Loop(function, begins_in_python=True)


def _compile_waiting() -> None:
    """Compile all functions that wait for it.  They call each other by names of their modules, which numba
    needs to stand for what it has compiled."""
    with _lock:
        done: dict[Any, object] = {loop: _compiled(loop) for loop in _waiting}
        for loop in done:
            names = loop.function.__globals__
            loops = {name: x for name, x in names.items() if isinstance(x, Loop)}
            names.update({name: done.get(x, x.compiled) for name, x in loops.items()})
        for loop, function in done.items():
            loop.compiled = function
        _waiting.clear()


def _compiled(loop: Loop) -> object:
    from numba import njit

    function = loop.function
    is_inner = function.__name__.startswith("_") and not loop.begins_in_python  # Python may be calling it
    compile = partial(
        njit,
        nogil=True,
        error_model="numpy",
        no_cfunc_wrapper=True,
        no_cpython_wrapper=is_inner,
        forceinline=is_inner,
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
    from numba import config

    configured: str = config.CACHE_DIR  # type: ignore[attr-defined]
    if configured or os.access(_HERE, os.W_OK):
        config.CACHE_DIR = str(Path(configured or _HERE / "__pycache__") / _SOURCES)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        config.CACHE_DIR = configured  # type: ignore[attr-defined]
