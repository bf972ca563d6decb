"""The output layer in parts of the tokens: saved bytes, the largest tensor, and the time of a step.

    python benchmarks/head_chunks.py --output benchmarks/results/head_chunks.txt

A GPT-2 of few layers with the vocabulary of GPT-2, whose last rank is mostly its output layer, where one rank
has that. ``run_local`` runs all ranks in one process; the times of the settings are taken in turns, and are
CPU seconds.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path
from statistics import median

import torch
from report import Report
from transformers import GPT2Config, GPT2LMHeadModel

import fxpipe
from fxpipe.ir.storage import call_nodes, node_bytes

ROWS, LENGTH, MICROBATCHES, ROUNDS = 2, 512, 4, 5
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1"])
    parser.add_argument("--vocabularies", nargs="+", default=["whole", "1-barrier", "2-barrier"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    report = Report(
        "An output layer of 50,257 words in parts of the tokens, 2 ranks, 1,024 tokens a microbatch"
    )
    rows = []
    for schedule, vocabulary in product(arguments.schedules, arguments.vocabularies):
        pipes = {chunks: compiled(schedule, vocabulary, chunks) for chunks in arguments.chunks}
        ids = torch.randint(50257, (ROWS * MICROBATCHES, LENGTH), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "labels": ids}
        results = {k: pipe.run_local(batch, measure_memory=True) for k, pipe in pipes.items()}
        seconds: dict[int, list[float]] = {chunks: [] for chunks in pipes}
        for _ in range(ROUNDS):
            for chunks, pipe in pipes.items():
                begun = time.process_time()
                pipe.run_local(batch)
                seconds[chunks].append(time.process_time() - begun)
        first = next(iter(pipes))
        for chunks, pipe in pipes.items():
            grads = results[chunks].grads, results[first].grads
            apart = max(float((grads[0][n] - g).norm() / g.norm()) for n, g in grads[1].items())
            largest = max(
                node_bytes(node) for node in call_nodes(pipe.graph) if "getitem" not in str(node.target)
            )
            rows.append(
                (
                    f"{schedule}, {vocabulary}, {chunks}",
                    f"{max(results[chunks].peak_saved) / MIB:.0f}",
                    f"{largest / MIB:.0f}",
                    f"{median(seconds[chunks]) / median(seconds[first]):.2f}",
                    f"{apart:.1e}",
                )
            )
    report.table(
        ("vocabulary, parts", "saved, any rank, MiB", "largest value, MiB", "CPU time", "gradients apart"),
        rows,
    )
    report.save(arguments.output)


def compiled(schedule: str, vocabulary: str, chunks: int) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, tie_word_embeddings=False)).eval()
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids}
    return fxpipe.compile(
        model,
        example,
        ranks=2,
        microbatches=MICROBATCHES,
        schedule=schedule,
        head_chunks=chunks,
        vocab_parallel=False if vocabulary == "whole" else vocabulary,
    )


if __name__ == "__main__":
    main()
