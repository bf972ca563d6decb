"""Lists of microbatches of many lengths and rows on models that others wrote, beside eager.

    PYTHONPATH=. python benchmarks/length_models.py --output benchmarks/results/length_models.txt

Each model is a tiny decoder of a family of transformers with random weights, in float64 without dropout,
compiled with its rows and its sequence named, on 2 or 4 ranks under a schedule that is drawn.  Lists of 1 to
6 microbatches, whose lengths and rows are drawn too, are run with an update by the gradients after each; the
table has the largest error of loss, gradients and updated weights against eager, relative to the largest
gradient, and, without replicas, the memory that ranks held at most, relative to the simulated one (the least
and the most of all ranks and lists).  ``--vocabulary`` splits the output layer of every other model by one
barrier, of the rest by two.  Where it is interrupted, the table has the models until then.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import random
import signal
import time
import warnings
from pathlib import Path
from types import FrameType

import torch
from huggingface_hub.errors import StrictDataclassError
from masks import ERRORS, loss_and_count
from report import Report
from torch import nn
from transformers.models.auto import modeling_auto

import fxpipe
from benchmarks.model_coverage.case import without_dropout
from benchmarks.model_coverage.sources.hugging_face import build
from fxpipe.errors import BatchError

ROWS, LONGEST, RATE = 2, 24, 1e-3
BARRIERS = "1-barrier", "2-barrier"
DRAWN: tuple[dict[str, object], ...] = (
    {"ranks": 2, "schedule": "1f1b"},
    {"ranks": 2, "schedule": "zb"},
    {"ranks": 4, "schedule": "auto"},
    {"ranks": 2, "schedule": "zb-v"},
    {"ranks": 2, "schedule": "zb-h1", "recompute": "full"},
    {"ranks": 2, "schedule": "zb", "replicas": 2},
    {"ranks": 2, "schedule": "zb", "validation": "post"},
    {"ranks": 2, "schedule": "interleaved", "microbatches": 4},
)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--number", type=int, default=40, help="models that are tried")
    parser.add_argument("--lists", type=int, default=30, help="lists of lengths for each model")
    parser.add_argument("--seed", type=int, default=0, help="of families, settings and lists")
    parser.add_argument("--seconds", type=int, default=180, help="of the CPU, the most for a model")
    parser.add_argument("--vocabulary", action="store_true", help="split the vocabularies over the ranks")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # the models are tiny
    report = Report("Lists of microbatches of many lengths and rows, on decoders of transformers")
    families = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    draw = random.Random(options.seed)
    draw.shuffle(families)
    rows = []
    with contextlib.suppress(KeyboardInterrupt):
        for number, (kind, names) in enumerate(families[: options.number]):
            name = names if isinstance(names, str) else names[0]
            split = {"vocab_parallel": BARRIERS[number % 2]} if options.vocabulary else {}
            setting = draw.choice(DRAWN) | split
            rows.append(row(kind, name, setting, options.lists, draw, options.seconds))
            print(*rows[-1], flush=True)
    report.line(f"{len(rows)} of {options.number} models were tried")
    heads = "family", "setting", "lengths, rows from", "lists", "largest error", "memory", "seconds"
    report.table([*heads], rows)
    report.save(options.output)


class OutOfTime(Exception):
    """A model took longer than it may."""


def out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def row(
    kind: str, name: str, setting: dict[str, object], lists: int, draw: random.Random, seconds: int
) -> tuple[str, ...]:
    begin = time.process_time()
    shown = ", ".join(f"{value}" if key == "schedule" else f"{key} {value}" for key, value in setting.items())
    signal.signal(signal.SIGPROF, out_of_time)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)  # again, as the first may fall into a callback
    torch.manual_seed(0)
    try:
        model = without_dropout(build(kind, name, "CAUSAL_LM").model).to(torch.float64).train()
        if getattr(model.config, "_experts_implementation", None) is not None:
            model.set_experts_implementation("batched_mm")  # torch's grouped product knows no doubles
        reference = copy.deepcopy(model)
        example = microbatch(ROWS, LONGEST)
        pipe = fxpipe.compile(
            model,
            example,
            loss_fn=loss_and_count,
            dimensions={"rows": ROWS, "sequence": LONGEST},
            **{"microbatches": 3} | setting,  # type: ignore[arg-type]
        )
    except (*ERRORS, StrictDataclassError, OutOfTime) as error:
        text = (
            f"{type(error).__name__}: {str(error).splitlines()[0].partition(' (/')[0]}"
            if str(error)
            else "time"
        )
        return kind, shown, f"not compiled: {text[:60]}", "", "", "", ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if not pipe.lengths:
        return kind, shown, f"the example's alone: {pipe.artifact.plan.step.one_length[:60]}", "", "", "", ""
    rows, known = pipe.lengths
    able = range(known.least, known.example + 1, known.step)
    worst, done, refused, held = 0.0, 0, 0, list[float]()
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        for _ in range(lists):
            number = draw.randint(1, 6) * pipe.plan.replicas
            lengths = [draw.choice(able) for _ in range(number)]
            most = [rows.most(pipe.lengths, {known.name: n}) for n in lengths]
            batch = [microbatch(draw.randint(rows.least, m), n) for m, n in zip(most, lengths, strict=True)]
            try:
                worst = max(worst, step(pipe, model, reference, batch, held))
            except BatchError as error:
                if "and the limit is" not in str(error):
                    raise
                refused += 1  # a microbatch that needs more memory than the plan leaves it
            else:
                done += 1
    except OutOfTime:
        pass
    except ERRORS as error:  # of the model's own kernels in float64, or of fxpipe
        text = f"{type(error).__name__}: {str(error).splitlines()[0].partition(' (/')[0]}"
        return kind, shown, f"list {done} raises {text[:60]}", "", "", "", ""
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    text = f"{able[0]} to {able[-1]}" + (f" by {known.step}" if known.step > 1 else "")
    text += f", {rows.least} row" + ("s" if rows.least > 1 else "")
    memory = f"{min(held):.3f} to {max(held):.3f}" if held else ""
    done_and_refused = f"{done}, {refused} refused" if refused else str(done)
    return kind, shown, text, done_and_refused, f"{worst:.1e}", memory, f"{time.process_time() - begin:.0f}"


def microbatch(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (rows, length))
    labels = ids.clone()
    labels[0, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


def step(
    pipe: fxpipe.Pipeline,
    model: nn.Module,
    reference: nn.Module,
    batch: list[dict[str, torch.Tensor]],
    held: list[float],
) -> float:
    """The largest error of a step with its update, relative to the largest gradient.

    held: gets of each rank the memory relative to the simulated one.
    """
    result = pipe.run_local(batch, measure_memory=True)
    if pipe.plan.replicas == 1:
        lengths = [dict(zip(("rows", "sequence"), one["labels"].shape, strict=True)) for one in batch]
        pairs = zip(result.peak_saved, pipe.simulate(lengths=lengths).peak_memory, strict=True)
        held += (measured / simulated for measured, simulated in pairs)
    reference.zero_grad()
    count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in batch)
    loss = torch.zeros(())
    for one in batch:
        part = loss_and_count(reference(input_ids=one["input_ids"]), one)[0] / count
        part.backward()
        loss += part.detach()
    assert result.loss is not None
    theirs = {name: p for name, p in reference.named_parameters() if p.grad is not None}
    largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
    errors = [float((result.loss - loss).abs())]
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in theirs.items():
            assert p.grad is not None
            errors.append(float((result.grads[name] - p.grad).abs().max()))
            ours[name] -= RATE * result.grads[name]
            p -= RATE * p.grad
            errors.append(float((ours[name] - p).abs().max()))
            p.copy_(ours[name])  # training some models is chaotic: each step begins at the same weights
    return max(errors) / largest


if __name__ == "__main__":
    main()
