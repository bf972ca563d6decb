"""Checks constants: tensors of a trace that are not parameters, buffers or in the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx, nn

from fxpipe.capture.state.recorded_state import RecordedState
from fxpipe.capture.state.registered import Registered, overlapping
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.graph import Kind, Origin
from fxpipe.python_state.walk import PythonState


def check_constants(
    module: fx.GraphModule,
    tensors: Sequence[Registered],
    model: nn.Module,
    loss_fn: Callable[..., object] | None,
) -> None:
    """Raise CaptureError for a tensor that must not be a constant, since a program would keep its current
    value.

    These are parameters or buffers that the forward reaches by another way than their modules, trainable
    tensors that no module registers, and objects that a program cannot hold.
    """
    nodes = [n for n in module.graph.find_nodes(op="get_attr") if n.users]
    for node in nodes:
        constant = getattr(module, node.target)
        place = _place(node)
        if not isinstance(constant, torch.Tensor):
            raise CaptureError(
                f"The model gives a {type(constant).__name__} to an op, which a program cannot hold{place}. "
                "Leave random numbers to torch's default generator: fxpipe gives each random op a key of "
                "its own."
            )
        if isinstance(constant, compat.FakeTensor):
            raise CaptureError(
                f"The forward uses a tensor that it computed outside of the trace{place}. Compute it in the "
                "forward and in the thread that calls the model."
            )
        if constant.layout is not torch.strided or constant.is_nested:
            raise CaptureError(f"The forward uses a tensor that is not dense{place}. Make it dense.")
    known = {n: Registered(Kind.CONSTANT, n.name, getattr(module, n.target), ()) for n in nodes}
    for a, b in overlapping([*known.values(), *tensors]):
        if (a.kind is Kind.CONSTANT) != (b.kind is Kind.CONSTANT):
            reached, other = (a, b) if a.kind is Kind.CONSTANT else (b, a)
            node = next(n for n, r in known.items() if r is reached)
            raise CaptureError(
                f"The forward reaches {other.name!r} by another way than its module{_place(node)}: through "
                "a copy of the reference, a view made before, a closure or a global. A program would hold "
                "its value of today. Use the module's attribute, and make views of it in the forward; or "
                "copy the values if they are to stay."
            )
    for node in nodes:
        constant, place = getattr(module, node.target), _place(node)
        if constant.requires_grad and constant.is_leaf:
            if loss_fn is not None and not _name_in(model, None, constant):
                raise _of_loss(constant, model, loss_fn)
            raise CaptureError(
                f"The forward uses a trainable tensor of shape {tuple(constant.shape)} that no module of the "
                f"model registers{place}. Make it an nn.Parameter of a module (nn.ModuleList and "
                "nn.ParameterList register what they hold), or call requires_grad_(False)."
            )


def _of_loss(parameter: torch.Tensor, model: nn.Module, loss_fn: Callable[..., object]) -> CaptureError:
    """The error for a trainable tensor that the loss function has, or that no object is seen to have."""
    loss = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
    name = _name_in(model, loss_fn, parameter) or f"a tensor of shape {tuple(parameter.shape)}"
    return CaptureError(
        f"The loss function {loss} trains {name}, and a pipeline trains the parameters of its model. Put the "
        "model and the criterion into one nn.Module, whose forward returns the loss, and compile that alone "
        "(no loss_fn); or call requires_grad_(False) if it is not to train."
    )


def _name_in(model: nn.Module, loss_fn: Callable[..., object] | None, tensor: torch.Tensor) -> str:
    return RecordedState.of(PythonState.of(model, loss_fn)).name_of(tensor)


def _place(node: fx.Node) -> str:
    return f" ({next(iter(node.users)).meta.get('origin', Origin())})"
