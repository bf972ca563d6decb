"""Replays of every family, and what is beside it, by a tape of ops and storages in place of a GPU's graph.

    python tests/runtime/replays_campaign.py benchmarks/results/replays.txt

A tape is as blind as a graph: a number of the host, a wait for the device or memory that moves between
steps would change a loss, a gradient or a buffer, or is an error.  Each setting runs steps on other batches,
weights and random numbers, op by op and replayed, which must give the same bits.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2]))

import tensor_parallel
from tape import Tape
from test_replays import (
    MICROBATCHES,
    ROWS,
    Memory,
    batch,
    batch_of_lanes,
    check_replays,
    compiled,
    words,
)

import fxpipe
from benchmarks.report import Report
from fxpipe.errors import FxpipeError
from fxpipe.runtime.replays import replays
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.training.run import local_runner

BESIDE: dict[str, dict[str, Any]] = {
    "a model with dropout and batch norm": {},
    "norms recomputed": {"recompute": "norms"},
    "all recomputed": {"recompute": "full"},
    "offload": {"offload": 0.7},
    "vocabulary, 1 barrier": {"vocab_parallel": "1-barrier"},
    "vocabulary, 2 barriers": {"vocab_parallel": "2-barrier"},
    "vocabulary, offload, recomputed": {"vocab_parallel": "1-barrier", "offload": 0.5, "recompute": "norms"},
    "head in parts": {"head_chunks": 2},
    "two replicas": {"replicas": 2},
    "two replicas, divided": {"replicas": 2, "shard": "parameters", "mean": "microbatch"},
    "sum and count": {"loss_fn": lambda loss, given: (loss * (n := given["labels"].ne(-100).sum()), n)},
}


def main() -> None:
    torch.set_num_threads(1)
    report = Report("Steps replayed by a tape that have the bits of the ops, by schedule")
    settings = {name: partial(on_ranks, options=options) for name, options in BESIDE.items()}
    settings["lanes that divide sequences"] = on_lanes
    for name, setting in settings.items():
        told = {family: setting(family) for family in FAMILIES}
        report.line(f"{name:<40} {sum(not why for why in told.values())} of {len(told)}")
        for family, why in told.items():
            if why:
                report.line(f"  {family}: {why}")
    report.save(Path(sys.argv[1]) if sys.argv[1:] else None)


def on_ranks(family: str, options: dict[str, Any]) -> str:
    """Why not; "" where all steps have the bits of the ops."""
    try:
        pipe = compiled(words(), ranks=2, schedule=family, **options)
        check_replays(pipe, partial(batch, replicas=options.get("replicas", 1)))
    except (FxpipeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return ""


def on_lanes(family: str) -> str:
    torch.manual_seed(0)
    model = tensor_parallel.Words(dropout=0.25, layers=2)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    example = {name: x[:ROWS] for name, x in batch_of_lanes(0).items()}
    try:
        with fxpipe.local_lanes(2) as mesh, tensor_parallel.parallelized(model, mesh, "sequence"):
            options = {"ranks": 2, "microbatches": MICROBATCHES, "schedule": family, "effort": 0.02}
            pipe = fxpipe.compile(model, example, check=False, **options)
        pipe.load_state_dict(state)
        check_replays(pipe, batch_of_lanes)
    except (FxpipeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with (
        mock.patch.object(replays, "recorder_of", return_value=Tape),
        mock.patch.object(local_runner, "open_store", lambda tier, size, *_: Memory(size)),
    ):
        main()
