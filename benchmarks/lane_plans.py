"""transformers' decoders on lanes by their own plans of parallelism, beside eager.

    PYTHONPATH=. python benchmarks/lane_plans.py --output benchmarks/results/lane_plans.txt
    … --lanes 3 --output benchmarks/results/lane_plans_uneven.txt
    … --context --output benchmarks/results/context_models.txt
    … --context --tensor --output benchmarks/results/context_tensor.txt

Each family with a plan of tensor or expert parallelism (a tiny model, random weights, float64) is distributed
by ``fxpipe.integrations.transformers.parallelize`` over the lanes of two ranks, mixtures with all tokens on
each lane and with divided ones, and runs one step in one process.  Three lanes divide neither the heads of
these models nor most of their layers.  The table has the parameters that lanes
share, and the largest error of the loss and of a gradient against eager, by its largest value (at least a
millionth of that of all).  With ``--context`` the lanes divide the sequences instead, and of the plan they
share experts alone; the table has the exchanges in programs by kind.  With ``--tensor`` there are 2 x 2
lanes: along the second dimension they share the layers, and all of them the experts.  Families of which eager
itself fails with the tiny configuration are left out.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from report import Report
from torch import nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto

import fxpipe
from benchmarks.model_coverage.case import without_dropout
from benchmarks.model_coverage.sources.hugging_face import build
from fxpipe.errors import FxpipeError
from fxpipe.integrations.transformers import parallelize

RANKS, MICROBATCHES, ROWS, LENGTH = 2, 2, 2, 12
ERRORS = (
    ValueError, TypeError, ImportError, RuntimeError, LookupError, AttributeError, NotImplementedError,
    StrictDataclassError,
)  # fmt: skip


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--families", nargs="*", help="instead of all")
    parser.add_argument("--seconds", type=float, default=inf, help="after which it begins no other family")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--context", action="store_true", help="lanes divide the sequences")
    parser.add_argument("--tensor", action="store_true", help="with --context, on a mesh of 2 x 2 lanes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    number = f"{options.lanes} x {options.lanes}" if options.tensor else options.lanes
    report = Report(f"transformers' decoders on {number} lanes, by their own plans, beside eager")
    rows = [*measured(options, report, time.monotonic() + options.seconds)]
    shared = "exchanges" if options.context else "parameters shared"
    report.table(("family", "tokens", shared, "error"), rows)
    right = sum(row[-1][0].isdigit() and float(row[-1]) < 1e-6 for row in rows)
    report.line(f"{right} of {len(rows)} are those of eager.")
    report.save(options.output)


def measured(options: argparse.Namespace, report: Report, end: float) -> Iterator[tuple[str, ...]]:
    for kind, names in sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        if options.families and kind not in options.families:
            continue
        if time.monotonic() > end:
            report.line(f"It ended before {kind}.")
            return
        torch.manual_seed(0)
        try:
            built = build(kind, names if isinstance(names, str) else names[0], "CAUSAL_LM").model
            model = without_dropout(built).to(torch.float64).train()
            words = {**(getattr(model, "tp_plan", None) or {}), **(getattr(model, "ep_plan", None) or {})}
            if not words and (options.tensor or not options.context):
                continue
            has_experts = any(word in ("moe_tp_experts", "ep_dispatch_experts") for word in words.values())
            if has_experts:
                model.set_experts_implementation("batched_mm")
            unused = copy.deepcopy(model)
            expected = eager(model)
            again = eager(model)
            if any(not expected[name].equal(again[name]) for name in expected):
                report.line(f"{kind} is left out, as its numbers are random")
                continue
        except ERRORS as error:
            report.line(f"{kind} is left out, as its own code raises {text(error)}")
            continue
        for tokens in ("whole", "divided") if has_experts else ("whole",):
            shared, result = on_lanes(copy.deepcopy(unused), tokens, expected, options)
            if not shared:
                report.line(f"{kind} is refused: {result}")
            yield kind, tokens if has_experts else "", shared, result if shared else "refused"


def text(error: BaseException) -> str:
    """Without paths of this machine."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].partition(' (/')[0].partition(', /')[0][:160]}"


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (ROWS * MICROBATCHES, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def loss_of(output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The loss of transformers, in float64 throughout."""
    return F.cross_entropy(output["logits"][:, :-1].flatten(0, 1), batch["labels"][:, 1:].reshape(-1))


def eager(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {"the loss": torch.zeros(())}
    model.zero_grad()
    for k in range(MICROBATCHES):
        part = {name: x[ROWS * k :][:ROWS] for name, x in batch().items()}
        loss = loss_of(model(input_ids=part["input_ids"]), part) / MICROBATCHES
        loss.backward()
        found["the loss"] += loss.detach()
    found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def on_lanes(
    model: nn.Module, tokens: Any, expected: Mapping[str, torch.Tensor], asked: argparse.Namespace
) -> tuple[str, str]:
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    example = {name: x[:ROWS] for name, x in batch().items()}
    try:
        sizes, names = ((asked.lanes, asked.lanes), ("cp", "tp")) if asked.tensor else (asked.lanes, ("tp",))
        with fxpipe.local_lanes(sizes, names=names) as mesh:
            divided = {"input_ids": 1} if asked.context else None
            parallelize(model, mesh, fxpipe.ExpertParallel(tokens=tokens), context=divided)
            options = {"ranks": RANKS, "microbatches": MICROBATCHES, "schedule": "zb-h1"}
            pipe = fxpipe.compile(model, example, loss_fn=loss_of, **options)
        pipe.load_state_dict(whole)
        result = pipe.run_local(batch())
    except (FxpipeError, *ERRORS) as error:
        return "", text(error)
    found = {"the loss": result.loss, **result.grads}
    largest = {name: float(x.abs().max()) for name, x in expected.items()}
    # Gradients that are zero but for rounding have no size of their own.
    floor = 1e-6 * max(largest.values())
    errors = (float((found[n] - x).abs().max()) / max(largest[n], floor) for n, x in expected.items())
    shared = exchanges(pipe) if asked.context else str(len(pipe.plan.lanes.shared))
    return shared, f"{max(errors):.1e}"


def exchanges(pipe: fxpipe.Pipeline) -> str:
    """The exchanges between lanes in the programs of all ranks, but for sums, by kind."""
    programs = "\n".join(pipe.artifact.programs)
    counts = {kind: programs.count(f"{kind}(") for kind in ("all_to_all", "all_gather", "reduce_scatter")}
    return ", ".join(f"{number} {kind}" for kind, number in counts.items() if number) or "none"


if __name__ == "__main__":
    main()
