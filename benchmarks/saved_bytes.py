"""What the simplifications leave of the zoo's models: ops, and bytes that are saved for the backward.

Each model of ``tests/zoo.py`` is compiled twice: with ``simplify``, ``merge_equal`` and
``simplify_views``, and without them.
Bytes are sums over stages of ``StageCost.saved_activations`` and ``saved_for_weight``, which must not grow.
With several ranks the cuts may move, as the ops that are gone took time: there is one by default.

    python benchmarks/saved_bytes.py [--ranks N] [--output FILE] [model ...]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

from report import ROOT, Report

sys.path.insert(0, str(ROOT / "tests"))

from zoo import CASES, Case, captured_once

import fxpipe
from fxpipe.compiler import cut, passes
from fxpipe.ir.storage import call_nodes

SIMPLIFICATIONS = ("simplify", "merge_equal", "simplify_views")


@contextlib.contextmanager
def without(names: tuple[str, ...]) -> Iterator[None]:
    """These passes do nothing."""
    groups = passes.Passes(
        *(
            tuple(replace(each, run=lambda *_: None) if each.name in names else each for each in group)
            for group in passes.PASSES
        )
    )
    with mock.patch.object(passes, "PASSES", groups), mock.patch.object(cut, "PASSES", groups):
        yield


def counts(case: Case, ranks: int) -> tuple[int, int, int]:
    """Ops, bytes of saved activations, and bytes saved for the weight gradients."""
    pipe = fxpipe.compile(
        case.build(),
        case.example(),
        loss_fn=case.loss_fn,
        ranks=ranks,
        microbatches=2,
        schedule="zb-h1",
    )
    assert pipe.graph is not None
    stages = pipe.plan.costs.stages
    held = [sum(int(getattr(s, name)) for s in stages) for name in ("saved_activations", "saved_for_weight")]
    return len(call_nodes(pipe.graph)), held[0], held[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*CASES, []], help="all by default")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    report = Report("Ops and saved bytes, without the simplifications → with them (bar: bytes never grow)")
    rows, grown = [], 0
    for name in options.models or CASES:
        with captured_once(name):
            after = counts(CASES[name], options.ranks)
        with captured_once(name), without(SIMPLIFICATIONS):
            before = counts(CASES[name], options.ranks)
        grown += any(b > a for a, b in zip(before[1:], after[1:], strict=True))
        rows.append([name, *(f"{a} → {b}" if a != b else f"{a}" for a, b in zip(before, after, strict=True))])
    report.table(["model", "ops", "saved activations", "saved for weight"], rows)
    report.line(f"{grown} models save more bytes than before.")
    report.save(options.output)
    return int(grown > 0)


if __name__ == "__main__":
    sys.exit(main())
