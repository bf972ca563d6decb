"""The loss of a step, whose backward has run."""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.runtime.torch_private import as_plain, pytree


class StepLoss(torch.Tensor):
    """A 0-d tensor; ``backward``, of it and of what is computed from it alone, raises RunError."""

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        plain = pytree.tree_map_only(StepLoss, as_plain, (tuple(args), dict(kwargs or {})))
        if function is torch.Tensor.backward and not plain[0][0].requires_grad:
            raise RunError(HAS_RUN)
        result = function(*plain[0], **plain[1])
        is_number = isinstance(result, torch.Tensor) and result.dim() == 0 and result.is_floating_point()
        return result.as_subclass(StepLoss) if is_number and type(result) is torch.Tensor else result

    def __reduce_ex__(self, protocol: object) -> Any:
        """Files hold a plain tensor, which needs no class to be loaded."""
        return as_plain(self).__reduce_ex__(protocol)


NO_SCALER = (
    "A GradScaler has nothing to scale: the backward runs in pipe.step. Train in bfloat16, which needs none; "
    "pipe.optimizer(…, skip_nonfinite=True) leaves out steps whose gradients are not finite."
)
HAS_RUN = (
    "The backward has run, in pipe.step, which adds to the gradients: leave backward() out and go on with "
    f"opt.step(). {NO_SCALER}"
)
