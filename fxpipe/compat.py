"""Every private torch symbol that fxpipe uses, and nothing else (checked with torch 2.11 and 2.13).

A new torch release that moves one of these breaks here, by name, and nowhere else.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_modes

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "compiling_flags",
    "current_sequence_number",
    "gradient_hooks",
    "no_modes",
    "nodes_after",
    "sequence_number",
    "traced_graph",
]

#: Raised by a fake tensor where the model asks for a number that only real data has.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)


@contextlib.contextmanager
def compiling_flags() -> Iterator[None]:
    """Let the model see ``torch.compiler.is_compiling()`` and ``is_exporting()`` as true.

    Models ask these before they branch on data (attention masks, expert routing).
    """
    module: Any = torch.compiler
    before = module._is_compiling_flag, module._is_exporting_flag
    module._is_compiling_flag = module._is_exporting_flag = True
    try:
        yield
    finally:
        module._is_compiling_flag, module._is_exporting_flag = before


def current_sequence_number() -> int:
    """The sequence number of the autograd node that was made last on this thread."""
    return torch.autograd._get_sequence_nr() - 1


def sequence_number(grad_fn: Any) -> int:
    return grad_fn._sequence_nr()


def gradient_hooks(parameter: torch.Tensor) -> list[Any]:
    """What ``parameter.register_hook`` was given."""
    return list((parameter._backward_hooks or {}).values())


def traced_graph() -> torch.fx.Graph:
    """The graph that the make_fx trace now running writes to."""
    mode = get_proxy_mode()
    assert mode is not None, "no make_fx trace is running"
    return mode.tracer.graph


def nodes_after(last: torch.fx.Node | None, graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes that were appended to the graph after ``last``, in order."""
    new = itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))
    return list(new)[::-1]
