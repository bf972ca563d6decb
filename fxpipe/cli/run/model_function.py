"""A function of the user's that gives a model and an example, as ``module:function``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from fxpipe.cli.run.functions import called
from fxpipe.errors import OptionError

RETURNS = "(model, example) or (model, example, loss_fn)."


def model_from(
    where: str, within: AbstractContextManager[object] | None = None
) -> tuple[nn.Module, object, Callable[..., object] | None]:
    """What the function gives: model, example microbatch, and its loss function or None.

    within: entered for the call, such as a device of torch.  Raises OptionError for another function.
    """
    made = called(where, RETURNS, OptionError, {}, within)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise OptionError(f"{where} gives a {type(made).__name__}; it must give {RETURNS}")
    model, example, *loss_fn = made
    return model, example, loss_fn[0] if loss_fn else None
