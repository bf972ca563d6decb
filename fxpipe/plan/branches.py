"""What the model's code asks of a microbatch, and the programs for each answer.

``if (labels == -100).any():`` asks ``labels`` by ``eq.Scalar(-100)`` and ``any()``.  The ops are data, so
that a step can ask its microbatches before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: Ops of one tensor and numbers whose results no other microbatch has a part in.
OPS = frozenset({
    "abs", "all", "all.dim", "amax", "amin", "any", "any.dim", "bitwise_not", "eq.Scalar", "ge.Scalar",
    "gt.Scalar", "isfinite", "isinf", "isnan", "le.Scalar", "logical_not", "lt.Scalar", "max", "mean", "min",
    "ne.Scalar", "neg", "select.int", "slice.Tensor", "squeeze", "sum", "sum.dim_IntList", "to", "unsqueeze",
})  # fmt: skip
MOST_CHARACTERS = 200  # of an op


@dataclass(frozen=True)
class Branch:
    """A question with two answers.

    ``leaf``: of the microbatch.  ``ops``: on it, one after the other, as text: ``"eq.Scalar(-100)"``; their
    result is one truth value.  ``answer``: that for which programs are.  ``where``: the place in the model's
    code that asks.
    """

    leaf: str
    ops: tuple[str, ...]
    answer: bool
    where: str

    def of(self, leaf: torch.Tensor) -> torch.Tensor:
        """The answer of a microbatch with this leaf, in one element."""
        for op in self.ops:
            name, arguments = parsed(op)
            if name == "to":
                leaf = leaf.to(getattr(torch, arguments[0]))
            else:
                packet, _, overload = name.partition(".")
                leaf = getattr(getattr(torch.ops.aten, packet), overload or "default")(leaf, *arguments)
        # The code may ask a number, which is true unless it is 0.
        return leaf.reshape(1) != 0


def op_text(name: str, arguments: Sequence[object]) -> str:
    """An op with its arguments behind the tensor."""
    return f"{name}({json.dumps(arguments)[1:-1]})"


def parsed(op: str) -> tuple[str, list[Any]]:
    """The name of an op and its arguments.  Raises ValueError for a text that is no op of ``OPS``."""
    name, bracket, arguments = op.partition("(")
    if name not in OPS or not bracket or not arguments.endswith(")") or len(op) > MOST_CHARACTERS:
        raise ValueError("no op of a branch")
    values: list[Any] = json.loads(f"[{arguments[:-1]}]")
    if name == "to" and not (values and isinstance(getattr(torch, str(values[0]), None), torch.dtype)):
        raise ValueError("no dtype")
    return name, values


@dataclass(frozen=True)
class When:
    """The batches that programs are for: of which all elements of leaves are one number (``assumed``), and
    whose microbatches all give one answer (``branch``)."""

    assumed: Mapping[str, float] = field(default_factory=dict)
    branch: Branch | None = None

    def __bool__(self) -> bool:
        return bool(self.assumed) or self.branch is not None
