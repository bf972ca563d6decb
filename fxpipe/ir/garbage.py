"""Python's cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector, and at the end collect once what was made meanwhile.

    Graphs are many small objects that refer to each other and live until the end: repeated scans of a graph
    take a sixth of the time of ``compile`` and find no garbage.  What was there before, all of torch for
    example, is left out of the collection at the end, and what remains counts as old: else the next objects
    that anybody makes would begin two more.
    """
    if not gc.isenabled():
        yield
        return
    is_frozen = gc.get_freeze_count() > 0  # by the user: then it stays as it is
    if not is_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.enable()
        if not is_frozen:
            gc.unfreeze()
