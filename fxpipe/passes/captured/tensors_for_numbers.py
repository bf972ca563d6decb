"""Gives ops that take tensors alone a tensor for each number: a trace has numbers for the tensors that torch
makes of Python's.

before: conj_physical(1j)
after:  conj_physical(scalar_tensor(1j, dtype=complex128))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxpipe.ir import compat
from fxpipe.ir.builder import Calls
from fxpipe.ir.storage import call_nodes
from fxpipe.runtime.torch_private import schema_of

aten = torch.ops.aten
#: Python's numbers -> the dtype that torch gives them where they meet tensors.
_DTYPES: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


def tensors_for_numbers(graph: fx.Graph) -> None:
    call = Calls(graph)
    for node in call_nodes(graph):
        if not isinstance(node.target, compat.OpOverload) or compat.takes_numbers(node.target):
            continue
        values: tuple[Any, ...] = node.args
        parameters = schema_of(node.target).arguments  # a trace leaves out the last that have defaults
        for k, (value, parameter) in enumerate(zip(values, parameters, strict=False)):
            if type(value) in _DTYPES and isinstance(parameter.type, torch.TensorType):
                dtype, origin = _DTYPES[type(value)], node.meta["origin"]
                val = torch.scalar_tensor(value, dtype=dtype)
                with graph.inserting_before(node):
                    tensor = call(
                        aten.scalar_tensor.default, (value,), {"dtype": dtype}, origin=origin, val=val
                    )
                node.update_arg(k, tensor)
