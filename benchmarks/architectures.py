"""Three steps of models that others wrote, with other batches and an update between, beside eager.

python -m benchmarks.architectures --only 'small packages' --output benchmarks/results/architectures.txt

``model_coverage`` compares one step with many options; here later steps read what earlier ones left: buffers,
codebooks that move, membranes, counters.  Two ranks, zb-h1, double precision, SGD with momentum (Adam makes
updates of the rounding errors of gradients that are zero).
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import fxpipe
from benchmarks.model_coverage import libraries  # noqa: F401 - first of all: what the others import depends on it
from benchmarks.model_coverage.case import Case, Subject
from benchmarks.model_coverage.examine import in_double, is_clear, made, seeded, text_of
from benchmarks.model_coverage.reference import Results, accumulate, difference
from benchmarks.model_coverage.sources import all_cases
from benchmarks.model_coverage.state import buffers_of, parameters_of

MICROBATCHES, ROWS, STEPS, BOUND = 2, 2, 3, 1e-7
FXPIPE = str(Path(fxpipe.__file__).parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose library/name matches")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    lines, counts = [], Counter[str]()
    for key, case in all_cases().items():
        if re.search(given.only, key):
            outcome, detail = examined(case)
            counts[outcome] += 1
            lines.append(f"{key:45s} {outcome:8s} {detail}")
            print(lines[-1], flush=True)
    total = f"{len(lines)} models: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common())
    print(total)
    if given.output is not None:
        when = f"{datetime.datetime.now():%Y-%m-%d}, {platform.machine()}, torch {torch.__version__}"
        head = [
            f"python -m benchmarks.architectures {' '.join(sys.argv[1:])}",
            when,
            __doc__.strip(),
            "",
            total,
            "",
        ]
        given.output.write_text("\n".join([*head, *lines, ""]))


def examined(case: Case) -> tuple[str, str]:
    """What became of it: right, warned, random, refused, failed or wrong; ``none`` where eager fails."""

    def build() -> Subject:
        return in_double(seeded(case.build))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            subject = build()
            batches = [_batch(subject, k) for k in range(STEPS)]
            example = made(subject, ROWS)
            expected = _eager(subject, batches)
            again = build()
            torch.manual_seed(99)
            is_random = difference(_eager(again, batches)[0], expected[0], 0.0)[0] > BOUND
        except Exception as error:  # noqa: BLE001 - whatever eager raises takes the case out of the table
            return "none", f"{type(error).__name__}: {text_of(error)}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        subject = build()
        try:
            found = _compiled(subject, example, batches)
        except Exception as error:  # noqa: BLE001 - the line says which
            return "refused" if is_clear(error) else "failed", f"{type(error).__name__}: {text_of(error)}"
    said = "; ".join(dict.fromkeys(str(w.message).splitlines()[0] for w in caught if _is_ours(w)))
    if is_random:
        return "random", said
    for k, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        error, where = difference(mine, theirs, 1e-16)
        if not error <= BOUND:
            return ("warned" if said else "wrong"), f"step {k}: {where} is off by {error:.1e}. {said}"
    return "right", said


def _is_ours(warning: Any) -> bool:
    return (
        "programs" in str(warning.message)
        or "A program" in str(warning.message)
        or FXPIPE in warning.filename
    )


def _batch(subject: Subject, k: int) -> Any:
    torch.manual_seed(1000 + k)
    batch = subject.batch(MICROBATCHES * ROWS)
    return tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)


def _eager(subject: Subject, batches: list[Any]) -> list[Results]:
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-2, momentum=0.9)
    results = []
    for batch in batches:
        optimizer.zero_grad()
        found = accumulate(subject, batch, MICROBATCHES)
        grads = {name: grad.clone() for name, grad in found.grads.items()}
        optimizer.step()
        results.append(Results(found.loss, grads, found.buffers | _parameters(subject)))
    return results


def _compiled(subject: Subject, example: Any, batches: list[Any]) -> list[Results]:
    model = subject.model
    given = {"ranks": 2, "schedule": "zb-h1", "microbatches": MICROBATCHES}
    pipe = fxpipe.compile(model, example, loss_fn=subject.loss_fn, **given)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    results = []
    for k, batch in enumerate(batches):
        found = pipe.run_local(batch, step=k)
        for name, parameter in model.named_parameters():
            parameter.grad = found.grads.get(name)
        optimizer.step()
        results.append(Results(found.loss, found.grads, buffers_of(model) | _parameters(subject)))
    return results


def _parameters(subject: Subject) -> dict[str, torch.Tensor]:
    return {f"{name} (a parameter)": p.detach().clone() for name, p in parameters_of(subject.model).items()}


if __name__ == "__main__":
    main()
