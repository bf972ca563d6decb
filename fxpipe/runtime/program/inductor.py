"""Functions of a program that Inductor, PyTorch's own compiler, fuses into few kernels.

``@inductor`` above a function says so; without that line the function runs op by op.  Nothing of Inductor is
loaded before.  The function of a layer is compiled once for all layers: their tensors and the positions of
their random ops are its inputs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fxpipe.errors import RunError
from fxpipe.runtime.program.checks import expect, expect_op
from fxpipe.runtime.program.random import as_tensor
from fxpipe.runtime.program.within import within
from fxpipe.runtime.torch_private import (
    compile_by_inductor,
    decompositions,
    default_kernels,
    fake_tensors,
    is_watched,
    no_modes,
    pytree,
)

_CACHE = "TORCHINDUCTOR_CACHE_DIR"

Place = tuple[object, ...]
"""Of a value among the arguments: the number of the argument, and the keys and indices in it."""


@dataclass(frozen=True, eq=False)
class _Compiled:
    """A function as compiled for inputs of some layouts.

    ``places``: of its inputs, the tensors and integers among its arguments that it uses.  ``numbers``: the
    floats among the arguments, which are parts of kernels, by place.  ``run``: takes a list of the inputs,
    which it empties, and gives the function's results (None for a function without) and the values that its
    checks read.  ``built``: the results as the function nests them.  ``checks``: the other arguments of each
    ``expect``.
    """

    places: tuple[Place, ...]
    layouts: list[object]
    numbers: tuple[tuple[Place, str], ...]
    run: Callable[[list[torch.Tensor]], Sequence[Any]]
    built: Callable[[list[object]], object]
    checks: tuple[tuple[Any, ...], ...]

    def inputs(self, args: Sequence[object]) -> list[torch.Tensor] | None:
        """The inputs among some arguments; None if the function was compiled for other ones."""
        if any(repr(_at(args, place)) != number for place, number in self.numbers):
            return None
        values = [_at(args, place) for place in self.places]
        inputs = [as_tensor(value) if isinstance(value, int) else value for value in values]
        return inputs if _layouts(inputs) == self.layouts else None


class inductor:
    """A function of tensors, of dicts and lists of tensors, and of numbers, as Inductor compiles it.

    The first call compiles, and so does a call with a tensor of another layout, or with another float.
    Lists among the arguments are emptied, and their tensors freed after their last use, as by the function.

    Raises RunError if the function cannot be traced or compiled.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self._known: list[_Compiled] = []

    def __call__(self, *args: object) -> object:
        compiled, inputs = self._for(args)
        for argument in args:  # before the run, which frees each input after its last use
            if isinstance(argument, list):
                argument.clear()
        results = list(compiled.run(inputs))
        if is_watched():  # by a measurement of memory, which only sees the results of ops
            results = [x if x is None else torch.ops.aten.alias.default(x) for x in results]
        end = len(results) - len(compiled.checks)
        for value, check in zip(results[end:], compiled.checks, strict=True):
            expect(value, *check)
        return compiled.built(results)

    def _for(self, args: Sequence[object]) -> tuple[_Compiled, list[torch.Tensor]]:
        """The function as compiled for these arguments, and its inputs among them."""
        for compiled in self._known:
            inputs = compiled.inputs(args)
            if inputs is not None:
                return compiled, inputs
        compiled = self._compiled_for(args)
        inputs = compiled.inputs(args)
        assert inputs is not None
        return compiled, inputs

    def _compiled_for(self, args: Sequence[object]) -> _Compiled:
        keep_kernels()
        try:
            with no_modes():
                compiled = _compile(self.function, args)
        except Exception as error:  # Inductor may raise anything
            name = getattr(self.function, "__name__", "a function")
            what = next(iter(str(error).strip().splitlines()), "").rstrip(".")
            raise RunError(
                f"Inductor cannot compile {name} ({type(error).__name__}: {what}). It needs a C++ compiler "
                "for programs on the CPU (g++, or the one that the environment variable CXX names), and "
                "Triton for those on GPUs. If it has them, its kept kernels may be damaged: delete the "
                f"folder {os.environ.get(_CACHE, 'of its cache')}. Or take the line @inductor above {name} "
                "out of the program, which then runs it op by op, or compile the pipeline with "
                "backend='eager'."
            ) from error
        self._known.append(compiled)
        return compiled


def compiled_functions(step: Callable[..., object]) -> dict[str, inductor]:
    """The functions beside the ``step`` of a program that Inductor compiles, by name."""
    namespace = step.__globals__ if isinstance(step, FunctionType) else {}
    return {name: value for name, value in namespace.items() if isinstance(value, inductor)}


def _layouts(tensors: Sequence[torch.Tensor]) -> list[object]:
    """The layouts on which compiled code depends; on the CPU also the number of threads."""
    return [torch.get_num_threads(), *((t.shape, t.stride(), t.dtype) for t in tensors)]


def _compile(function: Callable[..., object], args: Sequence[object]) -> _Compiled:
    from torch.fx.experimental.proxy_tensor import make_fx

    operands = [argument.tensors_by_name() if isinstance(argument, within) else argument for argument in args]
    paths, tree = pytree.tree_flatten_with_path(tuple(operands))
    values = [value for _, value in paths]
    varying = [k for k, value in enumerate(values) if not isinstance(value, float)]
    result_tree: Any = None

    def flat(*inputs: torch.Tensor) -> list[torch.Tensor]:
        nonlocal result_tree
        leaves = [*values]
        for k, value in zip(varying, inputs, strict=True):
            leaves[k] = value
        results, result_tree = pytree.tree_flatten(function(*pytree.tree_unflatten(leaves, tree)))
        return results

    with fake_tensors():
        fakes = [_fake(values[k]) for k in varying]
        # Views in the trace must fit the strides of what Inductor's own decompositions of ops give.
        table = decompositions() | {torch.ops.aten.scatter_add.default: _add_to_entries}
        traced = make_fx(flat, decomposition_table=table)(*fakes)
        checks = _take_out_checks(traced.graph)
        placeholders = traced.graph.find_nodes(op="placeholder")
        used = [i for i, node in enumerate(placeholders) if node.users]
        for node in placeholders:
            if not node.users:
                traced.graph.erase_node(node)
        traced.recompile()
    places = [tuple(_key(step) for step in path) for path, _ in paths]
    inputs = [fakes[i] for i in used]
    return _Compiled(
        tuple(places[varying[i]] for i in used),
        _layouts(inputs),
        tuple((places[k], repr(value)) for k, value in enumerate(values) if isinstance(value, float)),
        _run(traced, inputs),
        _built(pytree.tree_unflatten(range(result_tree.num_leaves), result_tree)),
        checks,
    )


def _run(
    traced: fx.GraphModule, inputs: list[torch.Tensor]
) -> Callable[[list[torch.Tensor]], Sequence[object]]:
    if not any(getattr(node.target, "namespace", "") == "lanes" for node in traced.graph.nodes):
        return compile_by_inductor(traced, inputs)
    from fxpipe.runtime.program.pieces import compiled_in_pieces

    return compiled_in_pieces(traced, inputs, compile_by_inductor)


def _built(numbers: Any) -> Callable[[list[object]], object]:
    """A function that nests values as their numbers are: pytree's own takes as long as a small kernel."""
    if isinstance(numbers, int):
        return itemgetter(numbers)
    if isinstance(numbers, dict):  # of what a program computes once a step
        named = {name: _built(part) for name, part in numbers.items()}
        return lambda values: {name: part(values) for name, part in named.items()}
    kind, parts = type(numbers), [_built(part) for part in numbers]
    if kind is list and numbers and all(isinstance(number, int) for number in numbers):
        return itemgetter(slice(numbers[0], numbers[-1] + 1))
    assert kind in (list, tuple), "functions of programs return tensors in lists and tuples"
    return lambda values: kind([part(values) for part in parts])


def _at(args: Sequence[object], place: Place) -> Any:
    value: Any = args
    for key in place:
        value = value[key]
    return value


def _key(step: Any) -> object:
    """A step of a path within the arguments, as the key or index that it stands for."""
    return step.key if hasattr(step, "key") else step.idx


def _fake(value: torch.Tensor | int) -> torch.Tensor:
    """A new tensor of the same layout; for a random key or a position, an int, that of ``as_tensor``."""
    if isinstance(value, int):
        return torch.empty((), dtype=torch.int64)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _add_to_entries(total: torch.Tensor, dim: int, index: torch.Tensor, summand: torch.Tensor) -> object:
    """An addition to one entry of each row, as to the label's in a gradient of logits, for all entries.

    Inductor's own way writes all of ``total`` to memory before, and reads it again behind.
    """
    one_of_each = [*total.shape[:dim], 1, *total.shape[dim:][1:]]
    if not total.dim() or [*index.shape] != one_of_each or [*summand.shape] != one_of_each:
        return NotImplemented  # it stays as it is
    entries = torch.arange(total.shape[dim], device=total.device)
    entries = entries.view([-1, *[1] * (total.dim() - dim % total.dim() - 1)])
    return torch.where(entries == index, total + summand, total)


def _take_out_checks(graph: fx.Graph) -> tuple[tuple[object, ...], ...]:
    """Return what ``expect`` reads behind the results, as checks are no work for a compiler."""
    nodes = graph.find_nodes(op="call_function", target=expect_op)
    checks = [node.args for node in nodes]
    for node in nodes:
        graph.erase_node(node)
    output = graph.output_node()
    output.args = ([*output.args[0], *(value for value, *_ in checks)],)  # type: ignore[misc]
    return tuple(tuple(others) for _, *others in checks)


def keep_kernels() -> None:
    """Let Inductor keep its kernels in a folder that lasts, so that a later run compiles none of them again,
    unless the user has chosen one, or it cannot be made.

    By default Inductor caches them, as pickles and machine code, below ``/tmp``: the machine may empty that,
    and other users may make the folder first.  The folder is the user's, and not one of a saved pipeline,
    since those come from others.
    """
    named = os.environ.get(_CACHE)
    if named is not None and named != default_kernels():
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(caches, "fxpipe", "inductor", _processor())
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ[_CACHE] = str(folder)


def _processor() -> str:
    """A name for this machine's instructions: kernels are compiled for them, and machines may share a
    home."""
    text = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
