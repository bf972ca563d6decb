"""The colors of phases, from Okabe and Ito's palette, which color-blind readers can distinguish."""

from __future__ import annotations

from fxpipe.schedule.ops import Phase

PHASES: dict[Phase, str] = {
    Phase.F: "#56B4E9",
    Phase.B: "#E69F00",
    Phase.W: "#009E73",
}
OFFLOADED = "#7A5C99"  # offloaded values
EXCHANGED = "#D55E00"  # between replicas
BEFORE_BARRIER, AFTER_BARRIER = "#F0E442", "#CC79A7"
UPDATE, VERDICT = "#444444", "#D55E00"


def tint(color: str, share: float) -> str:
    """``#rrggbb`` mixed with white: 0 is the color itself, 1 is white."""
    mixed = (round(int(color[i : i + 2], 16) * (1 - share) + 255 * share) for i in (1, 3, 5))
    return "#" + "".join(f"{channel:02X}" for channel in mixed)
