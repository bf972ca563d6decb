"""The loss of a step, whose backward has run."""

from __future__ import annotations

from typing import Any

import torch

from fxpipe.errors import RunError
from fxpipe.runtime.torch_private import as_plain, pytree


class StepLoss(torch.Tensor):
    """A 0-d tensor; ``backward``, of it and of what is computed from it alone, raises RunError, and so does
    that of a sum in which it has another factor than 1.

    ``divisors``: gets the numbers by which the script divides it, or a sum of it and others.  ``is_term``:
    whether it is a summand.
    """

    divisors: set[float] | None = None
    is_term = True

    @classmethod
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        plain: Any = pytree.tree_map_only(StepLoss, as_plain, (tuple(args), dict(kwargs or {})))
        terms = [x for x in pytree.tree_leaves(args) if isinstance(x, StepLoss)]
        if function is torch.Tensor.backward:
            if not plain[0][0].requires_grad:
                raise RunError(HAS_RUN)
            if not terms[0].is_term:
                raise RunError(IS_SCALED)
        result = function(*plain[0], **plain[1])
        name = getattr(function, "__name__", "").rstrip("_")
        is_number = isinstance(result, torch.Tensor) and result.dim() == 0 and result.is_floating_point()
        if not is_number or type(result) is not torch.Tensor or name == "detach":
            return result
        made = result.as_subclass(StepLoss)
        made.is_term = name in _SUMS and not kwargs and all(x.is_term for x in terms)
        made.divisors = next((x.divisors for x in terms), None)
        number = plain[0][-1]
        if made.divisors is not None and isinstance(number, int | float) and number:
            made.divisors |= {number} if name in _DIVISIONS else {1 / number} if name == "mul" else set()
        return made

    def __reduce_ex__(self, protocol: object) -> Any:
        """Files hold a plain tensor, which needs no class to be loaded."""
        return as_plain(self).__reduce_ex__(protocol)


#: What has its operands as summands.
_SUMS = {"add", "clone", "mean", "squeeze", "sum"}
_DIVISIONS = {"div", "true_divide"}
NO_SCALER = (
    "A GradScaler has nothing to scale: the backward runs in pipe.step. Train in bfloat16, which needs none; "
    "pipe.optimizer(…, skip_nonfinite=True) leaves out steps whose gradients are not finite."
)
HAS_RUN = (
    "The backward has run, in pipe.step, which adds to the gradients: leave backward() out and go on with "
    f"opt.step(). {NO_SCALER}"
)
IS_SCALED = (
    "The loss of pipe.step is a part of what is differentiated here, and no summand with the factor 1: its "
    "gradients, which pipe.step has added, are those of the loss as it is. Multiply it in the model or in "
    "loss_fn, and call backward() of the other losses alone."
)
