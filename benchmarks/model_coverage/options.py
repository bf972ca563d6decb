"""What every model is compiled with: arguments of ``fxpipe.compile`` for each column of the table."""

from __future__ import annotations

from typing import Any

from fxpipe import Offload

MICROBATCHES = 4
ROWS = 2  # of a microbatch

OPTIONS: dict[str, dict[str, Any]] = {
    "zb-h1": {"ranks": 2, "schedule": "zb-h1"},
    "auto": {"ranks": 3, "schedule": "auto"},
    "recompute": {"ranks": 3, "schedule": "zb-h1", "recompute": "full"},
    # The bandwidth lets values leave although there is no time for it in steps this short.
    "offload": {"ranks": 2, "schedule": "zb-h1", "offload": Offload(bandwidth=1e12)},
    "vocab": {"ranks": 2, "schedule": "zb-h1", "vocab_parallel": True},
}
