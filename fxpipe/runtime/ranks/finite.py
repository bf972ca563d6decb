"""Finds the op with which NaN or infinities begin, and names it as the user knows it: by module and line."""

from __future__ import annotations

import linecache
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from fxpipe.errors import OptionError, RunError
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.torch_private import TorchDispatchMode, no_modes, pytree

_TORCH = str(Path(str(torch.__file__)).parent)
_MODULE = re.compile(r"^\s+# (\S+)(?:  \((.*)\))?$")  # a comment of a program, with the line of the model
_LAYER = re.compile(r'within\(\w+, f?"([^"]*)"\)')
_FIELD = re.compile(r"\{(\w+)\}")


Check = Literal["finite"] | None


def checked(asked: str | None) -> Check:
    """Raises OptionError for a check that is not known."""
    if asked not in (None, "finite"):
        raise OptionError(f'check is {asked!r} and must be "finite" or None.')
    return asked  # type: ignore[return-value]


class Finite(TorchDispatchMode):
    """While entered on a rank's thread, an op of its program that gives NaN, or that makes infinities of
    finite operands, raises RunError.  Memory that ops leave as it is (``empty``) does not count.

    file: of the program, as its frames have it.
    """

    def __init__(self, rt: Runtime, file: str):
        super().__init__()  # type: ignore[no-untyped-call]
        self._rt, self._file = rt, file

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        frame = _caller()
        if frame.f_code.co_filename != self._file and frame.f_code.co_name != "keyed":
            return result  # of the runtime, not of the program
        if "empty" not in func.name() and not func.is_view:
            with no_modes():
                self._check(func, _floats((args, kwargs)), _floats(result), (args, kwargs))
        return result

    def _check(self, func: Any, given: list[torch.Tensor], made: list[torch.Tensor], arguments: Any) -> None:
        for number, tensor in enumerate(made):
            if tensor.isnan().any():
                self._fail(func, "NaN", tensor, tensor.isnan(), _apart(given, tensor))
            # A fused op gives infinities beside its result, as the logarithm of an empty sum.
            if number == 0 and tensor.isinf().any():
                operands = _apart(given, tensor)
                numbers = [x for x in pytree.tree_leaves(arguments) if isinstance(x, float)]
                if not any(map(math.isinf, numbers)) and not any(x.isinf().any() for x in operands):
                    self._fail(func, "infinity", tensor, tensor.isinf(), operands)

    def _fail(
        self, func: Any, what: str, made: torch.Tensor, where: torch.Tensor, given: list[torch.Tensor]
    ) -> None:
        frames = [*_program_frames(self._file)]
        module, line = _place(frames)
        place = f"the module {module}" if module else "the model itself"
        place += f" ({line})" if line else ""
        if frames:
            place += f", line {frames[0].f_lineno} of {Path(self._file).name.rstrip('>').split()[-1]}"
        operands = "it has no operands"
        if not all(x.isfinite().all() for x in given):
            operands = "an operand has such values: a parameter, a buffer or the batch"
        elif given:
            ranges = ", ".join(f"{float(x.min()):.3g} to {float(x.max()):.3g}" for x in given if x.numel())
            operands = f"its operands are finite, from {ranges}"
        raise RunError(
            f"Rank {self._rt.rank}, {self._rt.current_op}: {func} gives the first {what}, in "
            f"{int(where.sum())} of {made.numel()} values of shape {tuple(made.shape)}, in {place}; "
            f"{operands}."
        )


def _floats(values: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(values)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.is_meta]


def _apart(given: list[torch.Tensor], made: torch.Tensor) -> list[torch.Tensor]:
    """The operands that the op has not overwritten."""
    own = made.untyped_storage().data_ptr()
    return [x for x in given if x.untyped_storage().data_ptr() != own]


def _caller() -> FrameType:
    """The frame that called the op."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame


def _program_frames(file: str) -> Iterator[FrameType]:
    """Those of the program, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file:
            yield frame
        frame = frame.f_back


def _place(frames: list[FrameType]) -> tuple[str, str]:
    """The module of the innermost line, by the comment above it, and the line of the model there.

    The comments of a layer's function begin with a dot: its caller says of which layer.
    """
    if not frames:
        return "", ""
    module, line = _comment(frames[0])
    for frame in frames[1:]:
        file, first = frame.f_code.co_filename, frame.f_lineno
        call = _LAYER.search("".join(linecache.getline(file, first + k) for k in range(3)))
        if call is not None:
            layer = _FIELD.sub(lambda field, f=frame: str(f.f_locals.get(field[1], field[0])), call[1])
            return layer + (module if module.startswith(".") else ""), line
    return module, line


def _comment(frame: FrameType) -> tuple[str, str]:
    for number in range(frame.f_lineno, frame.f_code.co_firstlineno, -1):
        found = _MODULE.match(linecache.getline(frame.f_code.co_filename, number).rstrip())
        if found is not None:
            return found[1], found[2] or ""
    return "", ""
