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
    replicas behind its last op; per stage: ``hold``, ``kept``; per rank: ``update``, which counts as part of
    its span.

    A section needs ``need[need_at[section]:need_at[section + 1]]``; ``need_delay`` has the seconds that their
    values take to arrive.  ``feed`` has the sections that need it, likewise.  Of rank r are the stages
    ``own[own_at[r]:own_at[r + 1]]``; in an order of op ids its ops begin at ``3 · own_at[r] · microbatches``.
    """

    section: Ints
    seconds: Floats
    rank: Ints
    lead: Floats
    at_start: Floats
    at_end: Floats
    hold: Floats
    kept: Floats
    need_at: Ints
    need: Ints
    need_delay: Floats
    feed_at: Ints
    feed: Ints
    feed_delay: Floats
    own_at: Ints
    own: Ints
    update: Floats
    gathered: Floats
    sum: Floats
