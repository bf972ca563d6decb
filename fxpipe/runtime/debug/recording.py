"""Records what an op of a step was given, so that it can run again alone (``replay.py``).

A file of an op, ``F1.3-rank1.safetensors``, has the operands of the functions that the op called, in order,
as bytes; its metadata is JSON: the arguments that the operands are part of, and digests of the results.  The
program that ran is beside it, ``rank1.py``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from safetensors.torch import save_file

from fxpipe.errors import OptionError, RunError, suggested
from fxpipe.plan.saved.files import as_path, writing
from fxpipe.runtime.program.comm import on_wire
from fxpipe.runtime.program.load_program import Program
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.torch_private import no_modes, pytree
from fxpipe.strict import unstructure

#: The entry of a file's metadata that has a ``RecordedOp`` as JSON.
RECORDED = "recorded"


@dataclass(frozen=True)
class Operand:
    """A leaf of the arguments: the number of a tensor with its layout, or a plain value as JSON."""

    tensor: int = -1
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: str = ""
    value: str = ""


@dataclass(frozen=True)
class ResultDigest:
    """The digest of one result.  ``name``: the place in what the function returned, ``[1][0]``, or of what it
    wrote, ``grads['weight']``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True)
class RecordedCall:
    """One call of a program's function.  ``tree``: of the arguments, by pytree, with operands as leaves."""

    function: str
    tree: str
    operands: tuple[Operand, ...]
    results: tuple[ResultDigest, ...]


@dataclass(frozen=True)
class RecordedOp:
    op: str
    rank: int
    step: int
    program: str
    default_dtype: str
    device: str
    threads: int
    calls: tuple[RecordedCall, ...]


def checked_record(record: Mapping[str, str | Path] | None) -> dict[str, Path]:
    """Op -> directory.  Raises OptionError for another form."""
    if record is None:
        return {}
    if not isinstance(record, Mapping):
        raise OptionError(
            f'record is {record!r:.60} and must map ops to directories: {{"F1.3": "recorded"}}.'
        )
    for op in record:
        if not isinstance(op, str) or not re.fullmatch(r"[A-Z]+\d+\.\d+", op):
            raise OptionError(f"record has the op {op!r:.60}; ops are called F1.3: stage 1, microbatch 3.")
    return {op: as_path(directory, "record") for op, directory in record.items()}


def check_ops(record: Mapping[str, Path], ops: Sequence[str]) -> None:
    """Raise OptionError for an op that no program runs."""
    for op in record:
        if op not in ops:
            raise OptionError(f"No program runs the op {op!r} of record.{suggested(op, ops)}")


class _Read(dict[str, torch.Tensor]):
    """Tensors by name, of which it copies those that are read, as they are then."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        super().__init__(tensors)
        self.copies: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = super().__getitem__(name)
        if name not in self.copies:
            self.copies[name] = _copy(tensor)
        return tensor


@dataclass(eq=False)
class Recording:
    """Records the ops in ``record`` that a rank runs.  ``number``: of the rank, or of its process, in files.
    ``source``: of its program.  ``default_dtype``: as text."""

    record: Mapping[str, Path]
    rt: Runtime
    number: int
    source: str
    default_dtype: str
    _op: str = ""
    _is_running: bool = False  # a function that is recorded, with those that it calls
    _calls: list[RecordedCall] = field(default_factory=list)
    _tensors: list[torch.Tensor] = field(default_factory=list)

    def of(self, program: Program) -> Program:
        """A program that no other rank runs; its functions are recorded from now on."""
        namespace = namespace_of(program)
        for name, value in [*namespace.items()]:
            if value is not program.step and is_of_program(value, namespace):
                namespace[name] = self._recorded(name, value)
        return program

    def _recorded(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object) -> object:
            if self._is_running or self.rt.current_op not in self.record:
                return function(*args)
            self._is_running = True
            try:
                return self._call(name, function, args)
            finally:
                self._is_running = False

        return called

    def _call(self, name: str, function: Callable[..., object], args: Sequence[object]) -> object:
        if self._op != self.rt.current_op or name in (call.function for call in self._calls):  # it runs again
            self._op, self._calls, self._tensors = self.rt.current_op, [], []
        dicts = {k: _Read(x) for k, x in enumerate(args) if isinstance(x, dict)}
        before = [None if k in dicts else pytree.tree_map(_copy, x) for k, x in enumerate(args)]
        arguments = [dicts.get(k, x) for k, x in enumerate(args)]
        if not isinstance(function, FunctionType):  # Inductor takes the dicts apart by itself
            arguments = [*args]
            for read in dicts.values():
                read.copies = {key: _copy(x) for key, x in read.items()}
        result = function(*arguments)
        for k, read in dicts.items():
            before[k] = read.copies
        with no_modes():
            self._keep(name, before, digests(function, result, before, args))
        return result

    def _keep(self, name: str, arguments: list[object], results: tuple[ResultDigest, ...]) -> None:
        leaves, tree = pytree.tree_flatten(arguments)
        operands = tuple(map(self._operand, leaves))
        self._calls.append(RecordedCall(name, pytree.treespec_dumps(tree), operands, results))
        directory, program = self.record[self._op], f"rank{self.number}.py"
        recorded = RecordedOp(
            self._op,
            self.number,
            self.rt.step_number,
            program,
            self.default_dtype,
            str(self.rt.device or "cpu"),
            torch.get_num_threads(),
            tuple(self._calls),
        )
        tensors = {str(k): as_bytes(x) for k, x in enumerate(self._tensors)}
        metadata = {RECORDED: json.dumps(unstructure(recorded))}
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            _replace(directory / program, lambda file: file.write_text(self.source))
            _replace(
                file_of(directory, self._op, self.number), lambda file: save_file(tensors, file, metadata)
            )

    def _operand(self, leaf: object) -> Operand:
        if isinstance(leaf, torch.Tensor):
            self._tensors.append(leaf)
            return Operand(len(self._tensors) - 1, tuple(leaf.shape), leaf.stride(), str(leaf.dtype))
        if leaf is None or isinstance(leaf, (int, float)):
            return Operand(value=repr(leaf))
        raise RunError(
            f"{self._op} has an argument of the type {type(leaf).__name__}, which cannot be recorded. Give "
            "the program's functions tensors and numbers."
        )


def file_of(directory: Path, op: str, number: int) -> Path:
    return directory / f"{op}-rank{number}.safetensors"


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def namespace_of(program: Program) -> dict[str, Any]:
    """The names at the top level of a program."""
    namespace: dict[str, Any] = program.step.__globals__
    return namespace


def is_of_program(value: object, namespace: Mapping[str, object]) -> bool:
    """Whether it is a function that the program defines, also one that Inductor compiles."""
    return bool(getattr(getattr(value, "function", value), "__module__", "") == namespace["__name__"])


def copied_in_strides(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with these strides, also where elements share memory, or where there are gaps."""
    sizes = zip(tensor.shape, stride, strict=True)
    once = [slice(0, 1) if n > 1 and not step else slice(None) for n, step in sizes]
    elements = tensor[tuple(once)]
    copy = torch.empty_strided(elements.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(elements).expand(tensor.shape)


def _copy(leaf: object) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    with no_modes():
        return copied_in_strides(leaf.detach(), leaf.stride())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their order, on the CPU."""
    return on_wire(tensor.detach().cpu().contiguous()).clone()


def digests(
    function: Callable[..., object], result: object, before: Sequence[Any], after: Sequence[Any]
) -> tuple[ResultDigest, ...]:
    """The digests of what a function returned, and wrote to tensors that its arguments have by name.

    before: the arguments, of which a dict has what was read.
    """
    results = [
        _digest(pytree.keystr(path), leaf)
        for path, leaf in pytree.tree_flatten_with_path(result)[0]
        if isinstance(leaf, torch.Tensor)
    ]
    names = inspect.signature(getattr(function, "function", function)).parameters
    for argument, copies, now in zip(names, before, after, strict=True):
        for name, copy in copies.items() if isinstance(now, dict) else ():
            written = _digest(f"{argument}[{name!r}]", now[name])
            if written != _digest(written.name, copy):
                results.append(written)
    return tuple(results)


def _digest(name: str, tensor: torch.Tensor) -> ResultDigest:
    sha256 = hashlib.sha256(as_bytes(tensor).numpy().data).hexdigest()
    return ResultDigest(name, tuple(tensor.shape), str(tensor.dtype), sha256)
