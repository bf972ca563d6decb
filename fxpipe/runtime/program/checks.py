"""Run-time checks that facts about the example also hold for every microbatch.

A forward that branches on data (``if mask.all():``) was traced along one branch.  The program has the
condition as an op, ``expect``, and stops if a microbatch would have taken the other branch.  An assert of a
tensor in the model's code (``torch._assert_async``) is such an op as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpipe.errors import RunError
from fxpipe.runtime.program.captured import captured
from fxpipe.runtime.torch_private import writes_to

_library = torch.library.Library("fxpipe", "DEF")
_library.define("expect(Tensor value, Scalar[] expected, str where) -> ()")


INSTEAD_OF_A_NUMBER = (
    "If it is a size or a count, use an upper bound of all batches instead (one_hot(i, n), "
    "bincount(i, minlength=n)); else compare it as a tensor (no .item() there), or keep it out of"
)
"""The beginning of a remedy."""

_off = False  # whether values are synthetic

#: Of tensors that were checked, how often they had been written to, and their elements: for a value of the
#: whole step, a device is not waited for in each microbatch.
_checked: MutableMapping[torch.Tensor, tuple[object, ...]] = WeakTensorKeyDictionary()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Let ``expect`` do nothing in a block whose values are synthetic."""
    global _off
    _off = True
    try:
        yield
    finally:
        _off = False


def expect(value: torch.Tensor, expected: list[bool | int], where: str) -> None:
    """Raise RunError, naming the source line that read the value, unless its elements are as expected.

    where: that line, or a sentence, with its full stop, of what an assert of the model's says.
    """
    expect_op(value, expected, where)


def is_assert(where: str) -> bool:
    """Whether the text of an ``expect`` is that of an assert in the model's code."""
    return where.endswith(".")


def _check(value: torch.Tensor, expected: list[bool | int], where: str) -> None:
    if _off:
        return
    if (capture := captured.get()) is not None:
        capture.expect(value, expected, where)
        return
    says = None if value.is_inference() else (writes_to(value), *expected)
    if says is None or _checked.get(value) != says:
        check_values(value.reshape(-1).tolist(), expected, where)
        if says is not None:
            _checked[value] = says


def check_values(values: list[object], expected: list[bool | int], where: str) -> None:
    """Raise RunError, naming the source line that read the values, unless they are as expected."""
    if values != list(expected) and not _equal(values, expected):
        if is_assert(where):
            raise RunError(where)
        remedy = INSTEAD_OF_A_NUMBER
        if isinstance(values[0], bool):
            remedy = (
                "Compile with an example of the same kind as the batches, give a loop a fixed number of "
                "rounds, or take the branch out of"
            )
        raise RunError(
            f"The model's code reads a value of the data at {where}. The program was compiled for "
            f"{_shown(expected)}, and this microbatch gives {_shown(values)}: other code would run. {remedy} "
            "the model."
        )


def _equal(values: list[object], expected: list[Any]) -> bool:
    """Whether the numbers are the same; unlike in Python's comparison, NaN is the same as NaN."""
    same = (a == b or (a != a and b != b) for a, b in zip(values, expected, strict=True))
    return len(values) == len(expected) and all(same)


def _shown(values: list[Any]) -> str:
    if len(values) == 1:
        return str(values[0])
    return f"[{', '.join(map(str, values[:8]))}{', …' if len(values) > 8 else ''}]"


_library.impl("expect", _check, "CompositeExplicitAutograd")
_library.impl("expect", lambda value, expected, where: None, "Meta")
#: The op of the same name, which traces see.
expect_op = torch.ops.fxpipe.expect.default
torch.fx.node.has_side_effect(expect_op)
