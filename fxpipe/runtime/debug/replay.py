"""Runs one op of a recorded step alone: its functions, from the program's text, on the recorded operands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxpipe.errors import ArtifactError, RunError, suggested
from fxpipe.plan.saved.files import open_tensors
from fxpipe.plan.tensors import dtype_of
from fxpipe.runtime.debug.recording import (
    RECORDED,
    Operand,
    RecordedCall,
    RecordedOp,
    ResultDigest,
    copied_in_strides,
    digests,
    file_of,
    namespace_of,
)
from fxpipe.runtime.program.ambient import as_traced
from fxpipe.runtime.program.load_program import load_program
from fxpipe.runtime.torch_private import pytree
from fxpipe.strict import MEBIBYTE, Mismatch, parse_json, read_text, refused, structure

_MOST = 256 * MEBIBYTE
#: The files of ops, by ``file_of``; others may lie beside them, as copies that a file manager has named.
_FILE = re.compile(r"([A-Z]+\d+\.\d+)-rank(\d+)\.safetensors")
AGAIN = "Record the op again, by record= of pipe.step or pipe.run_local."


@dataclass(frozen=True)
class Replayed:
    """One function that ran again.  ``line``: of the function, as file and number.  ``results``: what it
    gives now, ``recorded``: in the step."""

    function: str
    line: str
    results: tuple[ResultDigest, ...]
    recorded: tuple[ResultDigest, ...]


def read_recorded(directory: Path, op: str, rank: int | None) -> tuple[RecordedOp, dict[str, torch.Tensor]]:
    """An op and the bytes of its operands; ``rank`` may be None where one rank alone has recorded it.

    Raises ArtifactError if it was not recorded, or if its file is damaged.
    """
    names = sorted(path.name for path in directory.glob("*-rank*.safetensors"))
    files = [match.groups() for match in map(_FILE.fullmatch, names) if match]
    ranks = [int(number) for name, number in files if name == op]
    if rank is None and len(ranks) > 1:
        raise ArtifactError(f"The ranks {ranks} have recorded {op}: name one, --rank {ranks[0]}.")
    if not ranks or rank not in (None, *ranks):
        ops = dict.fromkeys(name for name, _ in files)
        of = f" of rank {rank}" if ranks else ""
        known = f" It has {', '.join(ops)}." if ops else ""
        how = known or f" Record it: pipe.step(batch, record={{{op!r}: {str(directory)!r}}})."
        raise ArtifactError(f"{directory} has no recording of {op}{of}.{suggested(op, ops)}{how}")
    path = file_of(directory, op, ranks[0] if rank is None else rank)
    with open_tensors(path) as file:
        text = (file.metadata() or {}).get(RECORDED, "")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    with refused(ArtifactError, f"{path} is damaged:", AGAIN):
        return structure(parse_json(text), RecordedOp), tensors


def replay(
    directory: Path, recorded: RecordedOp, tensors: dict[str, torch.Tensor], call: Callable[..., object]
) -> Iterator[Replayed]:
    """Run the functions that the op called; ``call(function, *args)`` runs one.

    Raises ArtifactError for a damaged recording, and RunError where the program has no such function.
    """
    path = directory / Path(recorded.program).name
    try:
        source = read_text(path, _MOST)
        device, dtype = torch.device(recorded.device), dtype_of(recorded.default_dtype)
    except (Mismatch, OSError, RuntimeError, KeyError) as error:
        raise ArtifactError(f"{path} cannot be replayed: {error}. {AGAIN}") from error
    namespace = namespace_of(load_program(source, str(path)))
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(recorded.threads, os.cpu_count() or 1)))
    try:
        with as_traced(str(dtype), device):
            for function_call in recorded.calls:
                yield _run(namespace, function_call, str(path), tensors, device, call)
    finally:
        torch.set_num_threads(before)


def _run(
    namespace: dict[str, object],
    recorded: RecordedCall,
    path: str,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    call: Callable[..., object],
) -> Replayed:
    function: Any = namespace.get(recorded.function)
    code = getattr(getattr(function, "function", function), "__code__", None)
    if code is None or code.co_filename != path:
        raise RunError(f"{path} has no function {recorded.function}, which the op called. Undo the edit.")
    before, args = (_arguments(recorded, tensors, device) for _ in range(2))
    result = call(function, *args)
    results = digests(function, result, before, args)
    return Replayed(recorded.function, f"{path}:{code.co_firstlineno}", results, recorded.results)


def _arguments(recorded: RecordedCall, tensors: dict[str, torch.Tensor], device: torch.device) -> list[Any]:
    leaves = [_leaf(operand, tensors, device) for operand in recorded.operands]
    try:
        arguments: list[object] = pytree.tree_unflatten(leaves, pytree.treespec_loads(recorded.tree))
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise ArtifactError(f"The arguments of {recorded.function} are damaged: {error}. {AGAIN}") from error
    return arguments


def _leaf(operand: Operand, tensors: dict[str, torch.Tensor], device: torch.device) -> object:
    try:
        if operand.value:
            return _plain(operand.value)
        data = tensors[str(operand.tensor)].clone().view(dtype_of(operand.dtype)).view(operand.shape)
        return copied_in_strides(data, operand.stride).to(device)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ArtifactError(f"An operand is damaged: {error}. {AGAIN}") from error


def _plain(text: str) -> float | bool | None:
    """The value that Python writes like this."""
    named = {"None": None, "True": True, "False": False}
    if text in named:
        return named[text]
    return int(text) if text.lstrip("-").isdigit() else float(text)
