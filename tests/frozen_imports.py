"""Imported objects, kept out of the collector's way for as long as the process runs."""

import functools
import gc


def freeze() -> None:
    """Freeze all objects that there are, and remember that some are frozen.

    Each ``compile`` asks whether there are any.  Python walks all of them to count them, which takes a tenth
    of a small compilation.
    """
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = functools.partial(int, gc.get_freeze_count())
