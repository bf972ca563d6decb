"""Mixtures of experts over lanes, ranks and replicas, beside plain torch.

    python benchmarks/mixtures.py --output benchmarks/results/mixtures.txt

Eight processes on the CPU over gloo.  Each model (tiny, random weights, float64) is distributed by
``fxpipe.integrations.transformers.parallelize``, its own by ``fxpipe.ExpertParallel``, and makes four
updates of AdamW with clipping; a checkpoint after two of them is resumed on another mesh.  "sequences": the
lanes divide these, too, by ``fxpipe.ContextParallel``.  Compared with an eager loop over the whole batch in
one process: each loss and norm, and at the end each parameter, relative to its largest value.  transformers
computes losses, routers and norms in single precision.

Bar: every run is right.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from launch import run
from report import Report

#: replicas, ranks and lanes, what replicas divide, options of compile
MESHES = (
    ((2, 2, 2), None, {}),
    ((2, 2, 2), "optimizer", {"schedule": "zb-v"}),
    ((2, 2, 2), "parameters", {"recompute": "full"}),
    ((1, 2, 4), None, {"schedule": "zb-h1"}),
    # Not of whole tokens: other ops run while they are exchanged.
    ((1, 2, 4), None, {"schedule": "zb", "parts": "exchanges"}),
    ((2, 2, 2), "parameters", {"schedule": "zb-v", "parts": "exchanges"}),
)
MODELS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "balanced")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="*", default=MODELS)
    tokens = ("whole", "divided", "sequences")
    parser.add_argument("--tokens", nargs="*", default=tokens, choices=tokens)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report = Report("Mixtures of experts over lanes, ranks and replicas, beside plain torch, 4 updates")
    begun, rows, wrong = time.perf_counter(), [], 0
    for name in options.models:
        found = run(
            "mixtures_worker.py", 8, {"model": name, "meshes": MESHES, "tokens": options.tokens}, limit=3000
        )
        for tokens, (sizes, shard, others), error, resumed in found:
            shape = " x ".join(map(str, sizes))
            settings = ", ".join([*([f"shard {shard}"] if shard else []), *map(str, others.values())])
            rows.append((name, tokens, shape, settings, f"{error:.1e}", f"{resumed:.1e}"))
            wrong += max(error, resumed) > (1e-12 if name == "balanced" else 1e-6)
    report.line()
    columns = "model", "tokens", "replicas x ranks x lanes", "", "error", "resumed on the mesh before"
    report.table(columns, rows)
    report.line()
    report.line(f"{len(rows)} runs, {wrong} wrong. {time.perf_counter() - begun:.0f} s.")
    report.save(options.output)


if __name__ == "__main__":
    main()
