"""A compiled model against the same model trained by eager PyTorch, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from zoo import EFFORT, cut, relative_error, too_far

import fxpipe

LIMIT = 1e-9  # relative


def attributes(model: nn.Module) -> dict[str, Any]:
    """All that hangs on a model's modules: ids and types, and the values of tensors."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            found[f"{path} {key}"] = (type(value), id(value))
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            found[f"{path}.{key}"] = (type(value), id(value), None if value is None else value.tolist())
    return found


def eager_step(
    model: nn.Module, batch: Any, microbatches: int, loss_fn: Callable[..., Any] | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The mean loss and the gradients of one step on the model itself, whose buffers change."""
    model.zero_grad()
    total = torch.zeros(())
    for microbatch in cut(batch, microbatches):
        output = model(*microbatch) if isinstance(microbatch, tuple) else model(**microbatch)
        loss = output if loss_fn is None else loss_fn(output, microbatch)
        (loss / microbatches).backward()
        total = total + loss.detach() / microbatches
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equals_eager(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    *,
    rows: int = 2,
    microbatches: int = 3,
    steps: int = 2,
    loss_fn: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """Loss, gradients, parameters and buffers after each step; and the model left alone by ``compile``.

    batch: makes a batch of so many rows, in torch's default float type, which the caller sets to double.
    """
    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(1)
    data, example = batch(rows * microbatches), batch(rows)
    before = attributes(model)
    pipe = fxpipe.compile(
        model, example, microbatches=microbatches, loss_fn=loss_fn, effort=EFFORT, **options
    )
    assert attributes(model) == before
    for step in range(steps):
        loss, grads = eager_step(expected, data, microbatches, loss_fn)
        result = pipe.run_local(data, step=step)
        assert relative_error(result.loss, loss) <= LIMIT
        assert too_far(result.grads, grads, LIMIT) == {}
        assert too_far(_state(model), _state(expected), LIMIT) == {}


def _state(model: nn.Module) -> Mapping[str, torch.Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().double() for name, tensor in tensors if tensor.numel()}
