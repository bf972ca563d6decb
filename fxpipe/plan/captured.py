"""The captured step as data: the ops of one microbatch that the programs of all ranks compute together.

A saved pipeline keeps it beside its plan, so that its programs can be checked against it at any time
(``fxpipe check``).  Arguments are JSON: a value is ``{"value": 7}``, a dtype ``{"torch": "torch.float32"}``,
a number that JSON lacks ``{"float": "inf"}``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from fxpipe.errors import ArtifactError
from fxpipe.plan.field_types import Dtype, Shape
from fxpipe.plan.step import MOST_LENGTH
from fxpipe.strict import Fits, Mismatch, between, entries, parse_json, refused, structure

CAPTURED_FORMAT = 1
MOST_OPS, MOST_OTHERS, MOST_NESTED = 1 << 20, 64, 16

Index = Annotated[int, between(0, 2 * MOST_OPS)]
"""The number of a value: first the inputs, then the ops' results, in order."""


@dataclass(frozen=True)
class CapturedInput:
    """An input of the step; ``kind`` and ``name`` as in ``ir/graph.py``."""

    kind: str
    name: str
    shape: Shape | None
    dtype: Dtype | None


@dataclass(frozen=True)
class CapturedOp:
    """One op.  ``target``: as text, ``"aten.addmm.default"``.  ``shape``, ``dtype``: of a result that is one
    tensor.  ``results``: the number of those of an op that gives several.  ``position``: of an op that may
    draw random numbers, among those of the step."""

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: Shape | None = None
    dtype: Dtype | None = None
    results: Annotated[int, between(0, MOST_OPS)] | None = None
    position: Annotated[int, between(0, MOST_OPS)] | None = None


@dataclass(frozen=True)
class CapturedOps:
    """The step of one microbatch, with its results by the number of their values; ``Outputs`` in
    ``ir/graph.py`` says what they are.

    ``split``: whether its vocabulary layers are split over the ranks.  ``constants``: the digests of its
    constants, by name; none in steps that earlier versions saved.
    """

    format: int
    inputs: Annotated[tuple[CapturedInput, ...], entries(0, MOST_OPS)]
    ops: Annotated[tuple[CapturedOp, ...], entries(0, MOST_OPS)]
    loss: Index | None
    count: Index | None
    outputs: dict[str, Index]
    grads: dict[str, tuple[Index, ...]]
    buffers: dict[str, Index]
    checks: tuple[Index, ...]
    split: bool = False
    constants: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AtLengths:
    """The step of a microbatch of other lengths than the example's.  ``lengths``: by name."""

    lengths: dict[str, Annotated[int, between(1, MOST_LENGTH)]]
    step: CapturedOps


@dataclass(frozen=True)
class CapturedStep(CapturedOps):
    """The captured step of the example.  ``others``: at other lengths, where programs take several."""

    others: Annotated[tuple[AtLengths, ...], entries(0, MOST_OTHERS)] = ()

    def to_json(self) -> str:
        return json.dumps(vars(self), default=vars, separators=(",", ":"))

    @staticmethod
    def from_json(text: str, where: str) -> CapturedStep:
        """The step of a text.  Raises ArtifactError, naming ``where`` and the field, for one that is none."""
        with refused(ArtifactError, f"{where} is damaged:", "Undo the edit, or save the pipeline again."):
            step = structure(parse_json(text), CapturedStep)
            for each in (step, *(other.step for other in step.others)):
                _check(each)
        return step


def _check(step: CapturedOps) -> None:
    """Raise Mismatch for another format, and for a value that nothing computes, or nothing before its use."""
    Fits(lambda version: version == CAPTURED_FORMAT, f"{CAPTURED_FORMAT}").check(step.format, "format")
    count = len(step.inputs)
    for number, op in enumerate(step.ops):
        for index in values_in([*op.args, *op.kwargs.values()]):
            # Untrusted: the certificate looks values up by these numbers.
            if not isinstance(index, int) or not 0 <= index < count:
                raise Mismatch(f"uses the value {index!r}, which does not come before it", f"ops[{number}]")
        count += 1
    results = [step.loss, step.count, *step.outputs.values(), *step.buffers.values(), *step.checks]
    results += [index for summands in step.grads.values() for index in summands]
    for index in results:
        if index is not None and index >= count:
            raise Mismatch(f"has the result {index}, which no op computes")


def digest(tensor: torch.Tensor) -> str:
    """The SHA-256 of a tensor's elements, in their order; "" for one without values."""
    if tensor.is_meta:
        return ""
    elements = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha256(elements.view(torch.uint8).numpy().data).hexdigest()


def values_in(argument: object, deepest: int = MOST_NESTED) -> list[object]:
    """The numbers of the values in an op's arguments.  Raises Mismatch for lists that are nested deeper."""
    if isinstance(argument, dict):
        if argument.keys() == {"value"}:
            return [argument["value"]]
        argument = [*argument.values()]
    if not isinstance(argument, list | tuple):
        return []
    # Untrusted: whoever reads arguments follows their lists by recursion.
    if not deepest:
        raise Mismatch(f"has an op whose arguments are nested more than {MOST_NESTED} deep", "ops")
    return [index for entry in argument for index in values_in(entry, deepest - 1)]
