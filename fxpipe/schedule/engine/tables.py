"""The arrays that the compiled loops read of a problem."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Tables(NamedTuple):
    """The loops' arrays.  Per op: its ``section``, since division is slow; per section: ``seconds`` to
    ``at_end``, ``gathered``, when the parameters of its stage are there, and the seconds of the ``sum`` over
    replicas behind its last op; per stage: ``hold``, ``hold_for_w``; per rank: ``update``, which counts as
    part of its span.

    What an op needs is in rows ``need_at[section]`` to ``need_at[section + 1]``: the op that is ``need_step``
    from it, whose value takes ``need_delay`` seconds to arrive.  Those that need it are in the rows of
    ``feed``, likewise; they run on ``feed_rank``, and from its end to theirs it is ``feed_way`` at least.
    Of rank r are the stages ``placed[placed_at[r]:placed_at[r + 1]]``; in an order of op ids its ops begin at
    ``3 · placed_at[r] · microbatches``.
    """

    section: Ints
    seconds: Floats
    rank: Ints
    lead: Floats
    at_start: Floats
    at_end: Floats
    hold: Floats
    hold_for_w: Floats
    need_at: Ints
    need_step: Ints
    need_delay: Floats
    feed_at: Ints
    feed_step: Ints
    feed_rank: Ints
    feed_delay: Floats
    feed_way: Floats
    placed_at: Ints
    placed: Ints
    update: Floats
    gathered: Floats
    sum: Floats
