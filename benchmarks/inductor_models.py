"""The models of ``tests/zoo.py`` with ``backend="inductor"`` beside the eager programs, in double precision.

Loss, gradients and buffers must be the same up to rounding, and the bytes that ranks hold between their ops
the same.  An error is relative to the tensor's largest element, or to a ten-thousandth of the largest of all
tensors where that is more: gradients that are zero but for rounding differ as a whole.

    python benchmarks/inductor_models.py --output benchmarks/results/inductor_models.txt
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from report import ROOT, Report

sys.path.insert(0, str(ROOT / "tests"))
from zoo import CASES, Case, Shape, captured_once, compiled, in_double_precision

LIMIT, MICROBATCHES = 1e-11, 3
SHAPES = {
    "zb-h1": Shape(2, "zb-h1"),
    "1f1b, recompute": Shape(2, "1f1b", recompute="full"),
    "gpipe, offload": Shape(2, "gpipe", offload=True),
    "zb-h1 in a V": Shape(2, "zb-h1", 2, "v"),
}
VOCABULARY = {"tied_head": Shape(2, "1f1b", vocab_parallel="2-barrier")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(CASES), help="of the zoo (default: all)")
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report('Models with backend="inductor"')
    rows = []
    for name, (label, shape) in zip(options.models, itertools.cycle(SHAPES.items()), strict=False):
        if name in VOCABULARY:
            label, shape = "vocabulary", VOCABULARY[name]
        with in_double_precision():
            rows.append([name, label, *checked(CASES[name], shape)])
        print(*rows[-1], flush=True)
    report.table(["model", "compiled as", "functions", "largest error", "", "seconds"], rows)
    report.save(options.output)
    sys.exit(any("too far" in row for row in rows))


def checked(case: Case, shape: Shape) -> tuple[str, str, str, str]:
    """The number of compiled functions, the largest error and whether it is too large, and the seconds of the
    first step."""
    found, seconds, functions = [], 0.0, 0
    for backend in ("eager", "inductor"):
        model = case.build()
        with captured_once(case, MICROBATCHES):
            pipe = compiled(case, model, MICROBATCHES, replace(shape, backend=backend))
        functions = sum(program.count("@inductor") for program in pipe.artifact.programs)
        begun = time.perf_counter()
        result = pipe.run_local(case.data(MICROBATCHES), measure_memory=True)
        seconds = time.perf_counter() - begun
        assert result.loss is not None
        tensors = {"loss": result.loss, **result.grads, **dict(model.named_buffers())}
        found.append(({name: t.detach().clone() for name, t in tensors.items()}, result.peak_saved))
    (expected, held), (given, also_held) = found
    floor = 1e-4 * max(t.abs().max().item() for t in expected.values() if t.numel())
    errors = [
        (given[name] - t).abs().max().item() / max(t.abs().max().item(), floor)
        for name, t in expected.items()
        if t.numel()
    ]
    fits = max(errors) <= LIMIT and held == also_held
    return str(functions), f"{max(errors):.0e}", "" if fits else "too far", f"{seconds:.0f}"


if __name__ == "__main__":
    main()
