"""Makes the report that the site shows, and its picture: docs/live_report.html, docs/report.png.

    python benchmarks/live_report.py

A decoder of 1.3 billion parameters on 8 devices, planned without them: 32 microbatches, a memory limit,
offload of half of the activations, and vocabulary layers that are split. The picture needs a Chromium.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from devtools import chromium

import fxpipe

ROOT = Path(__file__).resolve().parents[1]
REPORT, PICTURE = ROOT / "docs/live_report.html", ROOT / "docs/report.png"
WORDS, WIDTH, LAYERS, LENGTH = 50_304, 2048, 24, 2048


def main() -> None:
    # Under the name that the repository has for it: a report names the lines of its model.
    name = "examples/transformer.py"
    names: dict[str, Any] = {"__name__": "transformer"}
    exec(compile((ROOT / name).read_text(), name, "exec"), names)

    with torch.device("meta"):
        model = names["LanguageModel"](WORDS, WIDTH, heads=16, layers=LAYERS, length=LENGTH).bfloat16()
        ids = torch.zeros(1, LENGTH, dtype=torch.long)
    pipe = fxpipe.compile(
        model,
        {"input_ids": ids, "labels": ids},
        ranks=8,
        microbatches=32,
        schedule="auto",
        vocab_parallel="1-barrier",
        offload=0.5,
        memory_limit="3.9GiB",
        costs="H100",
        grad_dtype=torch.float32,
    )
    print(pipe)
    pipe.report(REPORT)
    with chromium() as page:
        page.open(REPORT.as_uri(), width=1280, height=860)
        time.sleep(3.0)  # until the timeline is drawn
        assert not page.errors, page.errors
        page.screenshot(PICTURE)


if __name__ == "__main__":
    main()
