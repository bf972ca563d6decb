"""Masks of attention of transformers' decoders: with and without padding, each batch beside eager.

    PYTHONPATH=. python benchmarks/masks.py --output benchmarks/results/masks.txt

Each decoder (a tiny one of its family, random weights, float64) is compiled with the ``attention_mask`` that
a collator gives.  The table has its calls of attention that are given a mask in the programs for all batches,
and in those for batches without padding (``batch-masks``), the largest error of loss and gradients of both
against eager by the largest gradient, the CPU seconds of a compilation without the second programs, and those
with them, relative to these.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from report import Report
from torch import nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto

import fxpipe
from benchmarks.model_coverage.case import without_dropout
from benchmarks.model_coverage.sources.hugging_face import build
from fxpipe.compiler import assumed
from fxpipe.errors import FxpipeError
from fxpipe.ir.ops import is_masked
from fxpipe.ir.storage import call_nodes

LENGTH, MICROBATCHES = 32, 2
#: Of a tiny config or of float64, which a family's code does not take, and of models that are refused.
ERRORS = FxpipeError, ValueError, TypeError, ImportError, RuntimeError, LookupError, AttributeError


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--number", type=int, default=20, help="decoders whose attention is given masks")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the families")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    report = Report("Masks of the batch of transformers' decoders, with programs for batches without padding")
    found = decoders(options.seed, report)
    rows = [row for _, row in zip(range(options.number), found, strict=False)]
    columns = "family", "dense", "without padding", "error", "error, padded", "compile s", "with both"
    report.table(columns, rows)
    report.save(options.output)


def decoders(seed: int, report: Report) -> Iterator[tuple[str, ...]]:
    """A row for each family whose attention is given masks of the batch."""
    families = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    order = torch.randperm(len(families), generator=torch.Generator().manual_seed(seed))
    for kind, names in (families[k] for k in order.tolist()):
        name = names if isinstance(names, str) else names[0]
        torch.manual_seed(0)
        try:
            model = without_dropout(build(kind, name, "CAUSAL_LM").model)
            row = measured(kind, model.to(torch.float64).train())
        except ERRORS as error:
            # Without paths of this machine.
            text = f"{type(error).__name__}: {str(error).splitlines()[0].partition(' (/')[0][:80]}"
            report.line(f"{kind} is left out, as its code or compile raises {text}")
            continue
        if row is not None:
            yield row


def measured(kind: str, model: nn.Module) -> tuple[str, ...] | None:
    ids = torch.randint(3, 90, (2, LENGTH))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def compiled(least: float) -> tuple[fxpipe.Pipeline, float]:
        begin = time.process_time()
        with mock.patch.object(assumed, "LEAST", least):
            shape = {"ranks": 2, "microbatches": MICROBATCHES}
            pipe = fxpipe.compile(model, example, loss_fn=loss_and_count, **shape)
        return pipe, time.process_time() - begin

    alone, seconds = compiled(2.0)
    assert alone.graph is not None
    dense = sum(is_masked(node) and not node.meta["origin"].backward for node in call_nodes(alone.graph))
    if not dense:
        return None
    both, longer = compiled(0.0)
    saved = next((r.ops for r in both.plan.rewrites if r.rule == "batch-masks"), 0)
    errors = [error(both, model, padded) for padded in (False, True)]
    numbers = str(dense), str(dense - saved), *(f"{each:.1e}" for each in errors)
    return kind, *numbers, f"{seconds:.1f}", f"{longer / seconds:.2f}"


def error(pipe: fxpipe.Pipeline, model: nn.Module, padded: bool) -> float:
    """The largest relative error of the loss and of gradients, by the largest gradient's size."""
    ids = torch.randint(3, 90, (2 * MICROBATCHES, LENGTH))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, LENGTH // 2 :] = mask[2, LENGTH - 3 :] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    result = pipe.run_local(batch)
    model.zero_grad()
    count = (batch["labels"][:, 1:] != -100).sum()
    loss = torch.zeros(())
    for k in range(MICROBATCHES):
        part = {name: x[2 * k : 2 * k + 2] for name, x in batch.items()}
        output = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"])
        one = loss_and_count(output, part)[0] / count
        one.backward()
        loss += one.detach()
    assert result.loss is not None
    pairs = [(result.loss, loss)]
    pairs += [(result.grads[n], p.grad) for n, p in model.named_parameters() if p.grad is not None]
    largest = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) / largest for a, b in pairs)


def loss_and_count(output: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of transformers, in float64 throughout, and the number of its labels."""
    labels = batch["labels"][:, 1:].reshape(-1)
    logits = output["logits"][:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()


if __name__ == "__main__":
    main()
