"""Layers whose rows or columns lanes cannot share evenly, a style for torch's ``parallelize_module``.

before: head.weight [50257, 768]
after:  head.weight [50260, 768] over 4 lanes, of which the last holds three rows of zeros; the plan knows
        50257, and checkpoints have it

What the layer takes and gives is whole on all lanes, without the zeros, so that no op reads them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from fxpipe.integrations.tensor_plan import dims_of
from fxpipe.plan.dtensors import note_length
from fxpipe.plan.lanes import padded


class PaddedParallel(ParallelStyle):
    """``ColwiseParallel`` or ``RowwiseParallel`` of an ``nn.Linear`` or ``nn.Embedding``, also where the
    lanes cannot share its rows or columns evenly.

    style: of its layouts those count along which the layer is not divided: columns are given whole, and rows
        are taken whole.

    Raises OptionError, in ``parallelize_module``, for other styles and modules.
    """

    def __init__(self, style: ParallelStyle):
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style: Any = copy.copy(self.style)
        lanes = device_mesh.size()
        length, more = 0, 0
        for name, dim in dims_of(module, style, "PaddedParallel").items():
            parameter = module.get_parameter(name)
            length = parameter.shape[dim]
            more = -length % lanes
            if more:
                with_zeros = padded(parameter.detach(), dim, length + more)
                module.register_parameter(name, nn.Parameter(with_zeros, parameter.requires_grad))
                note_length(module, name, length)
        takes_part = isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear)
        if takes_part:
            style.input_layouts = (Replicate(),)
            if more:  # in front of the hook by which the style cuts its input
                module.register_forward_pre_hook(lambda _, inputs: (F.pad(inputs[0], (0, more)), *inputs[1:]))
        elif isinstance(style, ColwiseParallel):
            style.output_layouts = (Replicate(),)
        module = style._apply(module, device_mesh)
        if more and isinstance(style, ColwiseParallel):
            module.register_forward_hook(lambda _, inputs, result: _first(result, length))
        return module


def _first(result: torch.Tensor, length: int) -> torch.Tensor:
    return result.narrow(-1, 0, length)
