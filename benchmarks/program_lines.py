"""The length of generated programs, by the layers of a stage and by microbatches.

    python benchmarks/program_lines.py --output benchmarks/results/program_lines.txt

GPT-2 and Llama as transformers writes them, on the meta device, 2 ranks, ZB-H1.  A row a rank: its lines,
those of its functions, and those of ``step``; the rest is the head.  Below them programs that recompute, with
1F1B, where a backward repeats the forward of its layers.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from report import Report
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fxpipe

RANKS, LENGTH, WORDS = 2, 64, 1024


def gpt2(layers: int) -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, vocab_size=WORDS, n_positions=LENGTH))


def llama(layers: int) -> nn.Module:
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=512, intermediate_size=1536, vocab_size=WORDS)
    return LlamaForCausalLM(config)


def programs(model: nn.Module, microbatches: int, **options: str) -> tuple[str, ...]:
    ids = torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    given = {"ranks": RANKS, "microbatches": microbatches, "schedule": "zb-h1", "check": False} | options
    return fxpipe.compile(model, batch, **given).artifact.programs


def counted(program: str) -> tuple[str, ...]:
    """The lines of all, of the functions and of ``step``."""
    _, *functions = program.split("\n\n\n")
    parts = program, "\n\n\n".join(functions[:-1]), functions[-1]
    return tuple(str(part.count("\n") + 1) for part in parts)


def counted_by_rank(
    build: Callable[[int], nn.Module], layers: int, microbatches: int, **options: str
) -> Iterator[tuple[str, ...]]:
    with torch.device("meta"):
        model = build(layers * RANKS)
    what = f"{layers} layers a stage, m = {microbatches}"
    recompute = f", recompute {options['recompute']}" if options else ""
    for rank, program in enumerate(programs(model, microbatches, **options)):
        yield f"{build.__name__}, {what}{recompute}, rank {rank}", *counted(program)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    report, rows = Report("Lines of generated programs"), []
    for build, layers, microbatches in itertools.product((gpt2, llama), (12, 48), (8, 32)):
        rows += counted_by_rank(build, layers, microbatches)
    for build, recompute, layers in itertools.product((gpt2, llama), ("norms", "full"), (12, 48)):
        rows += counted_by_rank(build, layers, 8, schedule="1f1b", recompute=recompute)
    report.table(["model", "lines", "functions", "step"], rows)
    report.save(given.output)


if __name__ == "__main__":
    main()
