"""One case through every option, each compared with eager; run in a process of its own."""

from __future__ import annotations

import contextlib
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import fxpipe
from benchmarks.model_coverage.case import SEED, Case, Subject, without_dropout
from benchmarks.model_coverage.options import MICROBATCHES, OPTIONS, ROWS
from benchmarks.model_coverage.reference import COMPARABLE, Reference, Results, difference, refer
from benchmarks.model_coverage.state import (
    aliases_of,
    buffers_of,
    changed_attributes,
    changed_tensors,
    state_of,
)
from fxpipe import CaptureError, FxpipeError, RunError, ScheduleError, VerifyError

EAGER = "eager"
RIGHT, REFUSED, FAILED, WRONG, RANDOM = "right", "refused", "failed", "wrong", "random"
FXPIPE = str(Path(fxpipe.__file__).parent)


@dataclass(frozen=True)
class Row:
    """What became of one case with one option; of the option ``eager``: whether eager trains it at all.

    kind: of a refusal or a failure, its exception; detail: its message; place: where in fxpipe it arose.
    error: the largest relative error; bound: the one that rounding may make.
    fixed: the inputs that an error asked to fix, with which it went on.
    """

    case: str
    option: str
    outcome: str
    kind: str = ""
    detail: str = ""
    place: str = ""
    error: float | None = None
    bound: float | None = None
    compile_s: float | None = None
    run_s: float | None = None
    nodes: int | None = None
    parameters: int | None = None
    fixed: str = ""

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def examine(case: Case, options: Iterable[str]) -> Iterator[Row]:
    """The row of eager, then those of the options; only the first where eager fails."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")

    def build() -> Subject:
        return in_double(seeded(case.build))

    try:
        subject = build()
        batch, example = made(subject, MICROBATCHES * ROWS), made(subject, ROWS)
        size = sum(p.numel() for p in subject.model.parameters())
        reference = refer(build, batch, MICROBATCHES)
    except Exception as error:  # noqa: BLE001 - whatever eager raises takes the case out of the table
        yield Row(case.key, EAGER, FAILED, type(error).__name__, text_of(error), frames_of(error))
        return
    if reference.bound > COMPARABLE:
        detail = "results change too much when parameters are rounded"
        yield Row(case.key, EAGER, FAILED, "unstable", detail, bound=reference.bound)
        return
    outcome = RANDOM if reference.random else RIGHT
    yield Row(case.key, EAGER, outcome, bound=reference.bound, parameters=size)
    for option in options:
        yield compared(case, option, build, example, batch, reference)


def seeded(build: Callable[[], Subject]) -> Subject:
    random.seed(SEED)
    torch.manual_seed(SEED)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(SEED)
    return build()


def in_double(subject: Subject) -> Subject:
    """In training mode, double precision and without dropout."""
    without_dropout(subject.model.train().double())
    for module in subject.model.modules():
        for name, value in list(vars(module).items()):
            if value is torch.float32:  # what its forward converts to
                setattr(module, name, torch.float64)
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "batched_mm"  # torch's grouped product knows no doubles
    return subject


def made(subject: Subject, rows: int) -> Any:
    torch.manual_seed(rows)
    batch = subject.batch(rows)
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, batch
    )


def compared(
    case: Case,
    option: str,
    build: Callable[[], Subject],
    example: Any,
    batch: Any,
    reference: Reference,
    fixed: tuple[str, ...] = (),
) -> Row:
    """Compile, look whether the model is as it was, run, and compare with eager.

    Where an error says that to fix an input may help: once more with it fixed, which counts if it is right.
    """
    subject = build()
    model = subject.model
    before = state_of(model)
    found: dict[str, Any] = {"bound": reference.bound, "fixed": ", ".join(fixed)}
    pipe: fxpipe.Pipeline | None = None
    result, error = None, None
    began = time.perf_counter()
    try:
        pipe = fxpipe.compile(
            model,
            example,
            microbatches=MICROBATCHES,
            loss_fn=subject.loss_fn,
            fixed=fixed,
            **OPTIONS[option],
        )
    except Exception as raised:  # noqa: BLE001 - the row says which
        error = raised
    found["compile_s"] = time.perf_counter() - began
    faults = [("model touched", text) for text in dict.fromkeys(changed_tensors(model, before))][:4]
    attributes = changed_attributes(model, before)
    if pipe is not None:
        found["nodes"] = len(pipe.graph.nodes) if pipe.graph is not None else None
        began = time.perf_counter()
        try:
            result = pipe.run_local(batch)
        except Exception as raised:  # noqa: BLE001 - the row says which
            error = raised
        found["run_s"] = time.perf_counter() - began
    if result is not None and not reference.random:
        results = Results(result.loss, result.grads, buffers_of(model))
        found["error"], where = difference(results, reference.results, reference.epsilon)
        if not found["error"] <= reference.bound:
            faults.append(("numbers", f"{where} is off by {found['error']:.1e} of its largest element"))
        if aliases_of(model) != aliases_of(reference.model):
            faults.append(("aliases", "other names share memory than after eager's step"))
    if isinstance(error, CaptureError) and not faults and set(error.fixable) - set(fixed):
        again = compared(case, option, build, example, batch, reference, (*fixed, *error.fixable))
        if again.outcome in (RIGHT, RANDOM, WRONG):
            return again
    if error is not None:
        found["place"] = frames_of(error)
        text = f"{type(error).__name__}: {text_of(error)}"
        if not faults:
            outcome = REFUSED if is_clear(error) else FAILED
            return Row(case.key, option, outcome, type(error).__name__, text_of(error), **found)
        faults.append((type(error).__name__, text))
    if faults:
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in faults))
        return Row(case.key, option, WRONG, kinds, "; ".join(text for _, text in faults), **found)
    kind = "attributes" if attributes else ""
    outcome = RANDOM if reference.random else RIGHT
    return Row(case.key, option, outcome, kind, "; ".join(attributes[:3]), **found)


def is_clear(error: BaseException) -> bool:
    """An error of fxpipe that is neither a fault in fxpipe nor another error of a rank in its program.

    All options of the suite can be kept, so that a schedule that cannot be made is a fault.
    """
    if isinstance(error, RunError):
        return error.__cause__ is None
    return isinstance(error, FxpipeError) and not isinstance(error, (VerifyError, ScheduleError))


def text_of(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return shortened(lines[0])[:400] if lines else ""


def shortened(text: str) -> str:
    """Without where the packages and this repository lie."""
    return re.sub(r"/\S*/site-packages/", "", text).replace(f"{Path(FXPIPE).parent}/", "")


def frames_of(error: BaseException) -> str:
    """The innermost line of fxpipe, and the innermost line of all, over the error and its causes."""
    inside, last = "", ""
    cause: BaseException | None = error
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            line = f"{frame.filename}:{frame.lineno}"
            if frame.filename.startswith(FXPIPE):
                inside = shortened(line)
            last = shortened(line)
        cause = cause.__cause__
    return " < ".join(x for x in dict.fromkeys((inside, last)) if x)
