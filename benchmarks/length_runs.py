"""Lists of microbatches of many lengths under torchrun, on models that others wrote, beside eager.

    PYTHONPATH=. python benchmarks/length_runs.py --output benchmarks/results/length_runs.txt

Each setting of ``SETTINGS`` trains a tiny decoder of the next family of transformers, in an order that is
drawn, with random weights in float64 and with its sequence named: on lists of 1 to 6 microbatches of lengths
that are drawn, for each replica its own, with SGD with momentum and a clipped norm behind each.  A family
whose plain model cannot take a step in float64 is left out, with what it raises; behind one that is not
compiled for several lengths, or fails, the next one gets the same setting.  The table has the largest error
of losses and of the weights behind the last step against eager, relative to the largest value; of a model
with dropout there is none.  Half-way all write a checkpoint; a second pipeline resumes from it, prepares
each list one step before, and must end with the same bits.  Where it is interrupted, the table has the
settings until then.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from launch import run
from length_runs_worker import LONGEST, microbatch, model_of
from masks import ERRORS, loss_and_count
from report import Report
from transformers.models.auto import modeling_auto

POST, ZERO = {"validation": "post"}, {"shard": "parameters"}
SETTINGS: tuple[tuple[int, dict[str, Any]], ...] = (
    (2, {"schedule": "zb-h1"}),
    (2, {"schedule": "zb-v", "offload": True}),
    (2, {"schedule": "interleaved", "microbatches": 4}),
    (2, {"schedule": "zb", "recompute": "full"}),
    (2, {"schedule": "zb", **POST}),
    (2, {"schedule": "auto", "dropout": True}),
    (2, {"schedule": "1f1b", "vocab_parallel": "1-barrier"}),
    (2, {"schedule": "zb-v", "vocab_parallel": "2-barrier", "recompute": "full"}),
    (2, {"schedule": "zb", "vocab_parallel": "1-barrier", **POST}),
    (2, {"ranks": 1, "schedule": "1f1b", **ZERO}),
    (4, {"schedule": "zb-h1", "recompute": "norms"}),
    (4, {"schedule": "auto"}),
    (4, {"schedule": "zb-v", **POST}),
    (4, {"schedule": "zb-h1", "vocab_parallel": "2-barrier"}),
    (4, {"schedule": "auto", "vocab_parallel": "auto", "dropout": True}),
    (4, {"ranks": 2, "schedule": "interleaved", "vocab_parallel": "2-barrier", "microbatches": 4, **ZERO}),
    (4, {"ranks": 2, "schedule": "zb"}),
    (4, {"ranks": 2, "schedule": "zb-h1", "shard": "optimizer"}),
    (4, {"ranks": 2, "schedule": "zb-v", "shard": "gradients", "recompute": "full"}),
    (4, {"ranks": 2, "schedule": "interleaved", "microbatches": 4, **ZERO}),
    (4, {"ranks": 2, "schedule": "zb", "offload": True}),
    (4, {"ranks": 2, "schedule": "1f1b", "dropout": True, "shard": "optimizer", **POST}),
)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--lists", type=int, default=8, help="lists of lengths for each model")
    parser.add_argument("--seed", type=int, default=0, help="of families and lists")
    parser.add_argument("--families", nargs="*", help="by default all causal ones, in an order that is drawn")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # the models are tiny
    report = Report("Lists of microbatches of many lengths under torchrun")
    families = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    random.Random(options.seed).shuffle(families)
    drawn = iter([each for each in families if not options.families or each[0] in options.families])
    rows = []
    with contextlib.suppress(KeyboardInterrupt):
        for number, (processes, setting) in enumerate(SETTINGS):
            while (each := next(drawn, None)) is not None:
                kind, names = each
                name = names if isinstance(names, str) else names[0]
                if raised := raises(kind, name):
                    report.line(f"{kind} is left out, as its plain model raises {raised}")
                    continue
                case = {
                    "kind": kind,
                    "name": name,
                    "setting": setting,
                    "lists": options.lists,
                    "seed": number,
                }
                try:
                    result = run("length_runs_worker.py", processes, case, limit=480)
                except Exception as error:  # noqa: BLE001 - a run that fails in any way is a row of the table
                    lines = [line for line in str(error).splitlines() if "Error: " in line]
                    result = [f"fails: {(lines or [type(error).__name__])[-1].strip()[:50]}", "", "", ""]
                shown = ", ".join(f"{x}" if key == "schedule" else f"{key} {x}" for key, x in setting.items())
                rows.append([kind, f"{processes}: {shown}", *result])
                print(*rows[-1], flush=True)
                if result[1]:
                    break
    report.line(f"{sum(bool(row[3]) for row in rows)} of {len(SETTINGS)} settings")
    report.table(["family", "processes: setting", "lengths", "lists", "largest error", "resumed"], rows)
    report.save(options.output)


def raises(kind: str, name: str) -> str:
    """What the plain model of this family raises in a step without fxpipe, "" for nothing."""
    try:
        model = model_of(kind, name, has_dropout=False)
        one = microbatch(LONGEST)
        loss_and_count(model(input_ids=one["input_ids"]), one)[0].backward()
    except (*ERRORS, StrictDataclassError) as error:
        return f"{type(error).__name__}: {str(error).partition(' (/')[0].partition(chr(10))[0][:80]}"
    return ""


if __name__ == "__main__":
    main()
