"""Python's interpreter, for functions that make graphs: its garbage collector, and room for frames."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_ROOM = 1 << 18  # bytes of frames: about four times those of a trace


def for_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function that makes graphs without what costs it most of Python."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _collector_paused():
            return _with_room(function, *args, **kwargs)

    return run


def _with_room(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function whose calls map no memory.

    CPython keeps frames in pieces of 16 KiB, and gives a piece back to the system with its first frame: where
    an op of a trace is called at the end of a piece, each of its calls maps a new one.  By the depth of the
    caller that was up to a tenth of the time of ``compile``.  A frame that is larger than a piece gets one of
    up to twice its size, in which all calls below it have room.
    """
    return function(*args, **kwargs)


_with_room.__code__ = _with_room.__code__.replace(co_stacksize=_ROOM // 8)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the collector, and at the end collect once what was made meanwhile.

    Graphs are many small objects that refer to each other and live until the end: repeated scans of a graph
    take a sixth of the time of ``compile`` and find no garbage.  What was there before, all of torch for
    example, is frozen meanwhile: the scan at the end leaves it out, and so many new objects that stay would
    else begin another one of it.  Who has frozen it himself needs that no more: of the new objects, which
    are then in the youngest generation, those that stay count as old.
    """
    if not gc.isenabled():
        yield
        return
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(1 if is_frozen else 2)
        gc.enable()
        if not is_frozen:
            gc.unfreeze()
