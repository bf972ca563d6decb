"""Whether a model of transformers keeps the samples of a row apart, tried on two of four tokens.

What one sample's outputs say of the other's inputs are gradients, which are exactly zero where nothing leads
from the one to the other, in any dtype and on any device.  Layers that pass by the attention (recurrences,
convolutions over time, an attention of the model's own) mix samples, and nothing else would tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.errors import OptionError

_TOKENS = 4  # of each sample: as far as most convolutions look back
_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


def check_positions(model: nn.Module) -> None:
    """Raise OptionError where positions that begin at 0 are others than those of the model itself."""
    positions = torch.arange(_TOKENS, device=_ids(model).device)[None]
    with _tried(model), torch.no_grad():
        first = _ids(model)[:, :_TOKENS]
        placed, alone = (_outputs(model, first, **more) for more in ({"position_ids": positions}, {}))
    if not (placed.is_meta or torch.equal(placed, alone)):
        raise OptionError(
            f"{type(model).__name__} does not count positions from 0, as fxpipe.pack does: train it on "
            "samples one by one."
        )


def check_apart(model: nn.Module) -> None:
    """Raise OptionError where the outputs of one sample depend on the other.

    Of a model without values nothing is known.
    """
    embedded: list[Tensor] = []

    def begin(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # which the model may write to

    ids = _ids(model)
    positions = torch.arange(_TOKENS, device=ids.device).repeat(2)[None]
    hook = _embedding(model).register_forward_hook(begin)
    try:
        with _tried(model), torch.enable_grad():
            outputs = _outputs(model, ids, position_ids=positions)
            # Weights of all signs: a norm makes plain sums constant.
            weighted = outputs * torch.arange(outputs[0].numel(), device=ids.device).view_as(outputs[0]).sin()
            halves = [half.sum() for half in weighted.split(_TOKENS, 1)]
            of_each = [torch.autograd.grad(half, embedded[:1], retain_graph=True)[0] for half in halves]
    finally:
        hook.remove()
    first, second = of_each
    if not first.is_meta and (first[:, _TOKENS:].any() or second[:, :_TOKENS].any()):
        raise OptionError(
            f"{type(model).__name__} mixes the samples of a row in other ways than by an attention that "
            "transformers lets be replaced: train it on samples one by one."
        )


def _ids(model: nn.Module) -> Tensor:
    """Tokens amidst the vocabulary: special ones stand at its ends."""
    table = _embedding(model).weight
    return (torch.arange(2 * _TOKENS, device=table.device) + len(table) // 2).clamp(max=len(table) - 1)[None]


def _embedding(model: nn.Module) -> Any:
    of: Any = model
    return of.get_input_embeddings()


def _outputs(model: nn.Module, ids: Tensor, **more: Tensor) -> Tensor:
    outputs: Tensor = model(input_ids=ids, **more)[0]
    return outputs


@contextlib.contextmanager
def _tried(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode; of any error of its own an OptionError."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    except OptionError:
        raise
    except _ERRORS as error:
        name, device = type(model).__name__, _embedding(model).weight.device
        raise OptionError(
            f"{name} was tried on two packed samples on {device}, and cannot run them: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
