"""Finds the op with which NaN or infinities begin, and names it as the user knows it: by module and line."""

from __future__ import annotations

import ast
import linecache
import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from fxpipe.errors import FxpipeError, RunError, one_of
from fxpipe.plan.program import records as r
from fxpipe.plan.program.parse import parse
from fxpipe.plan.program.performed import text_of
from fxpipe.runtime.batch.microbatches import batch_leaves
from fxpipe.runtime.program.load_program import PROGRAM
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.torch_private import TorchDispatchMode, no_modes, pytree

_TORCH = str(Path(str(torch.__file__)).parent)
_ROOT = "the model itself"
_MOST_NAMED = 3  # tensors in a message

Check = Literal["finite"] | None


def checked(asked: str | None) -> Check:
    """Raises OptionError for a check that is not known."""
    one_of("check", asked, ("finite", None))
    return asked  # type: ignore[return-value]


class Finite(TorchDispatchMode):
    """While entered on a rank's thread, an op of its program that gives NaN, or that makes infinities of
    finite operands or of a parameter, raises RunError.  Memory that ops leave as it is (``empty``) does not
    count.

    number: of the process, in errors.  file: of the program, as its frames have it.  batch: what the rank was
    given.
    """

    def __init__(self, rt: Runtime, number: int, file: str, batch: object):
        super().__init__()  # type: ignore[no-untyped-call]
        self._rt, self._number, self._file, self._batch = rt, number, file, batch
        self._parameters = {_storage(x) for x in rt.params.values()}

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        frame = _caller()
        if frame.f_code.co_filename != self._file and frame.f_code.co_name != "seeded":
            return result  # of the runtime, not of the program
        if "empty" not in func.name() and not func.is_view:
            with no_modes():
                self._check(func, _floats((args, kwargs)), _floats(result), (args, kwargs))
        return result

    def _check(
        self, func: object, inputs: list[torch.Tensor], made: list[torch.Tensor], arguments: object
    ) -> None:
        for number, tensor in enumerate(made):
            if tensor.isnan().any():
                self._fail(func, "NaN", tensor, tensor.isnan(), _apart(inputs, tensor))
            # A fused op gives infinities beside its result, as the logarithm of an empty sum.
            if number == 0 and tensor.isinf().any():
                operands = _apart(inputs, tensor)
                numbers = [x for x in pytree.tree_leaves(arguments) if isinstance(x, float)]
                infinite = {_storage(x) for x in operands if x.isinf().any()}  # those of a mask are meant
                if infinite & self._parameters or not (infinite or any(map(math.isinf, numbers))):
                    self._fail(func, "infinity", tensor, tensor.isinf(), operands)

    def check_loss(self, loss: torch.Tensor | None) -> None:
        """Raise RunError for a loss with infinities that no op made: they were given, or are meant."""
        with no_modes():
            if loss is None or loss.isfinite():
                return
            raise RunError(
                f"{self._given_causes(())}The loss is {float(loss)}, and no op made that of finite values: "
                "they were in the parameters, buffers or batch of some rank, or are written in the model."
            )

    def _given_causes(self, operands: Sequence[torch.Tensor]) -> str:
        """The tensors that were not finite before the step, as a sentence: those among the operands, or else
        all that the rank was given."""
        rt = self._rt
        kinds = {"parameter": rt.params, "buffer": rt.buffers, "constant": rt.constants}
        kinds["batch's leaf"] = dict(batch_leaves(self._batch))
        bad = [
            (f"the {kind} {name}", tensor)
            for kind, named in kinds.items()
            for name, tensor in named.items()
            if _floats(tensor) and not tensor.isfinite().all()
        ]
        read = {_storage(x) for x in operands}
        bad = [(name, tensor) for name, tensor in bad if _storage(tensor) in read] or bad
        if not bad:
            return ""
        texts = [f"{name} ({_counted(tensor)})" for name, tensor in bad[:_MOST_NAMED]]
        more = f" and {len(bad) - _MOST_NAMED} others" if len(bad) > _MOST_NAMED else ""
        return f"Not finite before the step: {', '.join(texts)}{more}. "

    def _fail(
        self, func: object, what: str, made: torch.Tensor, where: torch.Tensor, values: list[torch.Tensor]
    ) -> None:
        place = _written([*_program_frames(self._file)])
        operands, cause = "it has no operands", ""
        bad = [x for x in values if not x.isfinite().all()]
        if bad:
            cause = self._given_causes(bad)
            operands = "an operand is not finite" + (
                "" if cause else ", as another rank sent it or as written"
            )
        elif values:
            ranges = ", ".join(f"{float(x.min()):.3g} to {float(x.max()):.3g}" for x in values if x.numel())
            operands = f"its operands are finite, from {ranges}"
        raise RunError(
            f"{cause}Rank {self._number}, {self._rt.current_op}: {func} gives the first {what}, in "
            f"{int(where.sum())} of {made.numel()} values of shape {tuple(made.shape)}, in {place}; "
            f"{operands}."
        )


def place_of_failure(error: BaseException) -> str:
    """``, in`` the module, the line of the model and that of the program whose op failed, with the op; empty
    for errors of fxpipe, which name what they are about, and of no program's line."""
    if isinstance(error, FxpipeError):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [frame for frame in frames if frame.f_globals.get("__name__", "").startswith(PROGRAM)]
    return f", in {_written(inside[::-1])}{_called(inside[-1])}" if inside else ""


def _written(frames: list[FrameType]) -> str:
    """The place of a program's frames, the innermost first, as text."""
    module, line = _place(frames)
    place = _ROOT if module in ("", _ROOT) else f"the module {module}"
    place += f" ({line})" if line else ""
    if frames:
        file = Path(frames[0].f_code.co_filename).name.rstrip(">").split()[-1]
        place += f", line {frames[0].f_lineno} of {file}"
    return place


def _floats(values: object) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(values)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.is_meta]


def _counted(tensor: torch.Tensor) -> str:
    kind = "NaN" if tensor.isnan().any() else "infinity"
    return f"{kind} in {int((~tensor.isfinite()).sum())} of {tensor.numel()} values"


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _apart(operands: list[torch.Tensor], made: torch.Tensor) -> list[torch.Tensor]:
    """The operands that the op has not overwritten."""
    return [x for x in operands if _storage(x) != _storage(made)]


def _caller() -> FrameType:
    """The frame that called the op."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame


def _program_frames(file: str) -> Iterator[FrameType]:
    """Yield the frames of the program, the innermost first."""
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
    program = parse("".join(linecache.getlines(frames[0].f_code.co_filename)))
    module, line = _comment(program, frames[0])
    for frame in frames[1:]:
        layer = _layer(program, frame)
        if layer is not None:
            return layer + (module if module.startswith(".") else ""), line
    return module, line


def _layer(program: r.Program, frame: FrameType) -> str | None:
    """The module whose tensors the call in a frame's line takes."""
    calls = [each for each in program.nodes() if isinstance(each, ast.Call)]
    for each in (inner for call in calls if call.lineno == frame.f_lineno for inner in call.args):
        match each:
            case ast.Call(func=ast.Name(id="within"), args=[_, module]):
                return text_of(module, frame.f_locals)
    return None


def _called(frame: FrameType) -> str:
    """The function that the line of a program's frame calls, as text behind its number."""
    program = parse("".join(linecache.getlines(frame.f_code.co_filename)))
    for each in program.nodes():
        match each:
            case ast.Call(func=ast.Name(id=name), lineno=frame.f_lineno):
                return f" ({name})"
    return ""


def _comment(program: r.Program, frame: FrameType) -> tuple[str, str]:
    """The last comment above a frame's line, in its function."""
    above = [c for c in program.comments if frame.f_code.co_firstlineno < c.line <= frame.f_lineno]
    return (above[-1].module, above[-1].source) if above else ("", "")
