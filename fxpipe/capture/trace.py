"""Capture: one functional ATen graph of the whole training step of one microbatch, as autograd ran it.

    model, example microbatch  ──►  fx.Graph: forward, loss, backward

``make_fx`` runs the user's forward and ``torch.autograd.grad`` on fake tensors, so that custom autograd
functions, no-grad regions and activation checkpointing mean what they mean in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fxpipe import compat
from fxpipe.capture.clean import clean
from fxpipe.capture.functional import functionalize
from fxpipe.capture.provenance import Provenance
from fxpipe.errors import CaptureError
from fxpipe.graph import Input, Kind
from fxpipe.runtime.batch import batch_leaves
from fxpipe.values import is_dense


@dataclass(frozen=True, eq=False)
class Captured:
    """The training step of one microbatch.

    ``graph``'s placeholders carry an ``Input``; its output is described at ``fxpipe.graph.OUTPUTS``.
    ``constants`` are the tensors that the model made from nothing or held outside parameters and buffers.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]


def capture(
    model: nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...],
    loss_fn: Callable[..., Any] | None,
    scale: float,
    device: torch.device,
    gradients: bool = True,
) -> Captured:
    """Trace the loss of one microbatch and its gradients.

    example: keyword arguments (a mapping) or positional arguments (a tuple) of one microbatch.
    loss_fn: ``(output, example) -> loss`` or ``-> (sum, count)``; None takes the output itself if it
        is a scalar, else its ``.loss``.
    scale: the gradient of the loss that the backward starts from (1 / microbatches; for a loss given
        as (sum, count) it is 1, and the division is the step's last act).
    gradients: False traces the loss alone.
    Raises CaptureError, naming module path and source line, for a model that cannot be traced and a
    loss that is no scalar or needs no gradient.
    """
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    values, inputs = _fake_inputs(model, example, mode, device)
    step = _Step(model, example, loss_fn, scale, inputs, gradients)
    with compat.compiling_flags(), torch.random.fork_rng(devices=[]), mode:
        try:
            module = make_fx(step, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
        except CaptureError:
            raise
        except Exception as error:
            raise _explained(error, step.provenance) from error
        module = functionalize(module, values)
    return Captured(*clean(module, inputs, step.layout))


def _fake_inputs(
    model: nn.Module, example: Any, mode: compat.FakeTensorMode, device: torch.device
) -> tuple[list[torch.Tensor], list[Input]]:
    """A fake tensor and its description for each parameter, buffer and tensor of the microbatch."""

    lazy = [n for n, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise CaptureError(
            f"The parameter {lazy[0]!r} has no shape yet (a lazy module). Run the model on one batch first."
        )

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "meta":
            with mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return mode.from_tensor(tensor.detach() if is_dense(tensor) else tensor.detach().contiguous())

    values, inputs = [], []
    for name, parameter in model.named_parameters():
        values.append(fake(parameter).requires_grad_(parameter.requires_grad))
        inputs.append(Input(Kind.PARAMETER, name))
    for name, buffer in model.named_buffers():
        values.append(fake(buffer))
        inputs.append(Input(Kind.BUFFER, name))
    for name, leaf in batch_leaves(example):
        if isinstance(leaf, torch.Tensor):
            values.append(fake(leaf))
            inputs.append(Input(Kind.BATCH, name))
    return values, inputs


class _Step:
    """The function that is traced: fake parameters, buffers and batch leaves to loss and gradients."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        loss_fn: Any,
        scale: float,
        inputs: list[Input],
        gradients: bool,
    ):
        self.model, self.loss_fn, self.scale, self.inputs = model, loss_fn, scale, inputs
        self.gradients = gradients
        self.leaves, self.spec = pytree.tree_flatten(example)
        self.provenance = Provenance(model)
        self.layout: dict[str, Any] = {}  # what the flat outputs of the traced graph are

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        named = list(zip(self.inputs, values, strict=True))
        state = {i.name: v for i, v in named if i.kind in (Kind.PARAMETER, Kind.BUFFER)}
        buffers = {i.name: v for i, v in named if i.kind is Kind.BUFFER}
        tensors = iter([v for i, v in named if i.kind is Kind.BATCH])
        leaves = [next(tensors) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        example = pytree.tree_unflatten(leaves, self.spec)
        wanted = {i.name: v for i, v in named if i.kind is Kind.PARAMETER and v.requires_grad}

        parameters = dict(self.model.named_parameters())
        with self.provenance:
            for name, value in wanted.items():
                for hook in compat.gradient_hooks(parameters[name]):
                    value.register_hook(hook)
            args, kwargs = (example, {}) if isinstance(example, tuple) else ((), dict(example))
            output = torch.func.functional_call(self.model, state, args, kwargs)
            loss, count = _loss_of(output, example, self.loss_fn, self.gradients)
            found = self._gradients(loss, wanted, 1.0 if count is not None else self.scale)
        replaced = {name: state[name] for name, old in buffers.items() if state[name] is not old}
        self.layout = {"count": count is not None, "grads": list(found), "buffers": list(replaced)}
        counts = [] if count is None else [count.detach()]
        return [loss.detach(), *counts, *found.values(), *replaced.values()]

    def _gradients(
        self, loss: torch.Tensor, wanted: dict[str, torch.Tensor], scale: float
    ) -> dict[str, torch.Tensor]:
        if not self.gradients:
            return {}
        self.provenance.backward_from(loss)
        with torch.autocast(loss.device.type, enabled=False):
            seed = torch.full((), scale, dtype=loss.dtype, device=loss.device)
            grads = torch.autograd.grad(loss, list(wanted.values()), seed, allow_unused=True)
        if all(g is None for g in grads):
            raise CaptureError(
                "No trainable parameter gets a gradient: the loss does not depend on any of them. "
                "Look for a detach() or a no_grad() block on the way."
            )
        return {name: g for name, g in zip(wanted, grads, strict=True) if g is not None}


def _loss_of(
    output: Any, example: Any, loss_fn: Any, gradients: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scalar loss, and the count that it is a sum over where ``loss_fn`` gives (sum, count)."""
    count = None
    if loss_fn is not None:
        loss = loss_fn(output, example)
        if isinstance(loss, tuple):
            if len(loss) != 2:
                raise CaptureError(f"loss_fn returned {len(loss)} values: return the loss, or (sum, count).")
            loss, count = loss
            count = torch.as_tensor(count)
        source = "loss_fn returned"
    elif isinstance(output, torch.Tensor) and output.numel() == 1:
        loss, source = output, "the model returned"
    else:
        loss, source = getattr(output, "loss", None), "the model's output has as its .loss"
    if not isinstance(loss, torch.Tensor):
        who, what = ("loss_fn", loss) if loss_fn is not None else ("the model", output)
        raise CaptureError(
            f"No loss: {who} returned {type(what).__name__}. Let the model return a scalar tensor or an "
            "output with a .loss (Hugging Face models: put labels into the example), or give loss_fn."
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"The loss is not a scalar: {source} a tensor of shape {tuple(loss.shape)}. "
            "Reduce it to one number, for example with .mean()."
        )
    if gradients and not loss.requires_grad:
        raise CaptureError(
            f"The loss needs no gradient: what {source} does not depend on any parameter with "
            "requires_grad=True. Look for a detach(), a no_grad() block, or parameters that are all frozen."
        )
    return loss.reshape(()) if loss.dim() else loss, count


def _explained(error: Exception, provenance: Provenance) -> CaptureError:
    """A tracing failure with the place in the user's model where it happened."""
    where = f"module {provenance.path!r} ({_user_line(error) or 'unknown line'})"
    if isinstance(error, compat.DATA_DEPENDENT):
        return CaptureError(
            f"The model's control flow or shapes depend on data, in {where}: {_first_line(error)}\n"
            "A pipeline program is fixed before the data is known. Replace the Python branch, .item() or "
            "boolean indexing there by tensor operations (torch.where, masks), or move it out of the model."
        )
    return CaptureError(
        f"The model cannot be traced, in {where}: {type(error).__name__}: {_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _user_line(error: Exception) -> str:
    """The innermost line of the traceback that is neither torch's nor fxpipe's."""
    line, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if Provenance.is_users(code.co_filename):
            line = f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
