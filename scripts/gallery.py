"""Draws the pictures of docs/gallery.md, and writes the page: python scripts/gallery.py

Each is a step of 4 ranks and 6 microbatches, by ``fxpipe simulate --draw``.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fxpipe.cli import main  # noqa: E402

COSTS = "--ranks 4 --microbatches 6 --forward 1 --backward-input 1.1 --backward-weight 0.8 --comm 0.05"
#: The name of a picture -> its options, its title, and what to look for.
PICTURES = {
    "1f1b": (
        "--schedule 1f1b",
        "1F1B: one forward, one backward",
        "Both gradients are one op. Rank 0 holds the most and waits in the middle; rank 3 waits at the ends.",
    ),
    "zb-h1": (
        "--schedule zb-h1",
        "Zero bubble: weight gradients fill the gaps",
        "The backward is two ops. B goes on to the previous rank at once; W runs where the rank would wait.",
    ),
    "v-min": (
        "--schedule v-min --effort 0.2",
        "Stages in a V: a third of the memory",
        "Each rank has an early and a late stage, so all ranks hold the same, and less.",
    ),
    "offload": (
        "--schedule gis --stages-per-rank 2 --offload-time 0.3",
        "Offload: activations leave while they are not used",
        "The rows below the ops are the link to the host: out after F, back before B.",
    ),
    "vocabulary": (
        "--schedule 1f1b --vocab-time 1 --vocab-barriers 1",
        "A split vocabulary: the output layer on all ranks",
        "S and T are each rank's shard of the output layer, before and after its barrier.",
    ),
}


def page() -> str:
    """What docs/gallery.md has."""
    parts = ["# Gallery: one step under five schedules\n"]
    parts.append(
        "F is a forward, B an input gradient, W a weight gradient; below is the memory of each rank.\n"
        "[Schedules](schedules.md) explains them, `python scripts/gallery.py` draws them, and\n"
        "`fxpipe simulate --draw FILE.svg` draws yours. [What ran where](limits.md#what-ran-where).\n"
    )
    for name, (_, title, text) in PICTURES.items():
        parts.append(f"## {title}\n\n{text}\n\n![{name}](gallery/{name}.svg)\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs/gallery").mkdir(exist_ok=True)
    for name, (options, _, _) in PICTURES.items():
        words = shlex.split(f"simulate {options} {COSTS}")
        assert main([*words, "--draw", str(ROOT / f"docs/gallery/{name}.svg")]) == 0
    (ROOT / "docs/gallery.md").write_text(page())
