"""Finds the loss of one microbatch and the requested outputs in what the model and ``loss_fn`` return.

The loss of a named output is its ``loss``; of a tuple it is the one scalar that needs a gradient.  Outputs
have the names of their places: ``logits``, ``0``, ``loss_dict.ce``.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpipe.capture.activations import Activations
from fxpipe.capture.lanes.dtensors import whole
from fxpipe.capture.output_names import listed, named_tensors
from fxpipe.capture.reads.data_scalar import NumberOfData
from fxpipe.errors import CaptureError, suggested

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@dataclass(frozen=True, eq=False)
class Results:
    """The results of a forward.  ``loss``: 0-d; None if there is none and none is needed.  ``count``: of a
    loss given as (sum, count).  ``outputs``: the requested ones, by name."""

    loss: torch.Tensor | None
    count: torch.Tensor | None
    outputs: dict[str, torch.Tensor]


def find_results(
    output: object,
    example: object,
    loss_fn: Callable[..., object] | None,
    gradients: bool,
    activations: Activations,
) -> Results:
    """Find the loss and the outputs of a microbatch.  output: of the model.  activations: what its modules
    returned, with the names of the outputs that are asked for; without gradients these make the loss
    optional.

    Raises CaptureError, with the remedy, where there is no loss, or none that can be trained, and for an
    unknown name in ``asked``, with the known ones.
    """
    asked = activations.asked
    named = [*named_tensors(output)] if asked else []
    count = None
    if loss_fn is not None:
        loss, count, metrics = _parts(loss_fn(output, example))
        named += named_tensors(metrics) if asked else []
        source = "loss_fn returned"
        if not isinstance(loss, torch.Tensor):
            raise _no_loss("loss_fn", loss)
        if count is not None:
            count = _count(count, gradients)
    else:
        optional = not gradients and bool(asked) and "loss" not in asked
        loss, source = _loss_in(output, optional)
        if loss is None and not optional:
            raise _no_loss("the model", output)
    if loss is not None:
        loss = _checked(loss, source, gradients)
    of_loss = {"loss": loss, "count": count}
    return Results(loss, count, _requested(activations, of_loss, named))


def _parts(returned: Any) -> tuple[Any, Any, Mapping[str, object]]:
    """loss, count and metrics; loss_fn returns a loss or (sum, count), with metrics behind or not."""
    parts = list(returned) if isinstance(returned, tuple) else [returned]
    metrics = parts.pop() if len(parts) > 1 and isinstance(parts[-1], Mapping) else {}
    if len(parts) == 1 and isinstance(parts[0], tuple):  # ((sum, count), {…})
        parts = list(parts[0])
    if len(parts) == 1:
        return parts[0], None, metrics
    if len(parts) == 2:
        return parts[0], parts[1], metrics
    raise CaptureError(
        f"loss_fn returned {len(parts)} values: return the loss, or (sum, count), and behind it a mapping of "
        "metrics if there are any."
    )


def _loss_in(output: object, optional: bool) -> tuple[torch.Tensor | None, str]:
    """The loss in a model's output, and a text for its place.

    A tensor is a loss if it has one element; of an ``optional`` loss, if it is 0-d.
    """
    if isinstance(output, torch.Tensor):
        is_loss = output.dim() == 0 if optional else output.numel() == 1
        return (output if is_loss else None), "the model returned"
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss, "the model's output has as its .loss"
    if not isinstance(output, (tuple, list)) or hasattr(output, "loss"):
        return None, ""
    scalars = {k: x for k, x in enumerate(output) if isinstance(x, torch.Tensor) and _is_scalar(x)}
    trained = {k: x for k, x in scalars.items() if x.requires_grad} or scalars
    if len(trained) > 1 and not optional:
        raise CaptureError(
            f"The model returned a tuple with several scalars (at {listed(map(str, trained))}): any of them "
            "could be the loss. Give loss_fn=lambda output, batch: … to choose or to add them up."
        )
    place, loss = next(iter(trained.items())) if len(trained) == 1 else ("", None)
    if loss is not None and loss.requires_grad and len(output) == 2 and _is_integer(output[1]):
        warnings.warn(
            "The forward returned a scalar and an integer, and the integer is no part of the loss. If they "
            "are a sum and its count, give loss_fn=lambda output, batch: output: the sum over all "
            "microbatches and replicas is then divided by their count. If not, loss_fn=lambda output, batch: "
            "output[0] says so.",
            stacklevel=2,
        )
    return loss, f"the model's output has at {place}"


def _is_integer(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 0 and x.dtype in _INTEGERS


def _is_scalar(x: torch.Tensor) -> bool:
    return x.dim() == 0 and x.is_floating_point()


def _no_loss(who: str, returned: Any) -> CaptureError:
    is_tensor = isinstance(returned, torch.Tensor)
    kind = f"a tensor of shape {tuple(returned.shape)}" if is_tensor else type(returned).__name__
    scalars = [name for name, x in named_tensors(returned) if _is_scalar(x) and x is not returned]
    has = f" with the scalars {listed(scalars)}" if scalars else ""
    if isinstance(returned, numbers.Number | NumberOfData):
        return CaptureError(
            f"No loss: {who} returned a number, which has no gradient. Let it return the tensor itself, "
            "without .item() or float()."
        )
    if who == "loss_fn":
        return CaptureError(
            f"No loss: loss_fn returned {kind}{has}. Let it return a scalar tensor, or "
            "(sum, count), and behind either a mapping of metrics: (loss, {…})."
        )
    return CaptureError(
        f"No loss: {who} returned {kind}{has}. Let the model return a scalar tensor, a "
        "tuple with one, or an output with a .loss (Hugging Face models: put labels into the example), or "
        "give loss_fn. For the forward alone without a loss, give gradients=False and name its outputs=[…]."
    )


def _checked(loss: torch.Tensor, source: str, gradients: bool) -> torch.Tensor:
    loss = whole(loss)
    if loss.numel() != 1:
        raise CaptureError(
            f"The loss is not a scalar: {source} a tensor of shape {tuple(loss.shape)}. "
            "Reduce it to one number, for example with .mean()."
        )
    if loss.is_complex():
        raise CaptureError(f"The loss is complex: {source} {loss.dtype}. Take its .real or its .abs().")
    if gradients and not torch.is_grad_enabled():
        raise CaptureError(
            "Gradients are off, by torch.no_grad() or torch.inference_mode() around fxpipe.compile. Compile "
            "outside of it, or give gradients=False for the forward alone."
        )
    if gradients and not loss.requires_grad:
        raise CaptureError(
            f"The loss needs no gradient: what {source} does not depend on any parameter with "
            "requires_grad=True. Look for a detach(), a no_grad() block, or parameters that are all frozen."
        )
    return loss.reshape(()) if loss.dim() else loss


def _count(returned: object, gradients: bool) -> torch.Tensor:
    count: torch.Tensor = whole(torch.as_tensor(returned))
    if count.numel() != 1 or count.is_complex():
        raise CaptureError(
            "The count that loss_fn returned is no number, but "
            f"shape {tuple(count.shape)}, {count.dtype}, on {count.device}. Return (sum, count) with "
            "a count such as mask.sum(), or (loss, {…}) for metrics."
        )
    if gradients and count.requires_grad:
        raise CaptureError(
            "The count that loss_fn returned depends on parameters, and the step takes no gradient of it: "
            "return count.detach(), or a loss instead of (sum, count)."
        )
    return count.reshape(())


def _requested(
    activations: Activations,
    of_loss: Mapping[str, torch.Tensor | None],
    named: Sequence[tuple[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """The outputs that are asked for; ``of_loss`` come before those of the same name in ``named``, and these
    before those of modules."""
    asked = activations.asked
    known = {name: x for name, x in of_loss.items() if x is not None}
    several = {name for name in asked if name not in known and [n for n, _ in named].count(name) > 1}
    if several:
        raise CaptureError(
            f"There are two outputs called {min(several)!r}, in the model's output and the metrics of "
            "loss_fn. Rename one of them."
        )
    known = dict(named) | known
    results = {}
    for name in asked:
        value = known[name] if name in known else activations.find(name)
        if value is None:
            raise CaptureError(
                f"There is no output {name!r}.{suggested(name, [*known, *activations.modules])} "
                f"Known: {listed(known)}, and the paths of modules."
            )
        if value.layout is not torch.strided or value.is_nested:
            raise CaptureError(f"The output {name!r} is sparse or nested: return a dense tensor.")
        results[name] = whole(value)
    return results
