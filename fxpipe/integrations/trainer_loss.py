"""The losses of Hugging Face's Trainer as functions (output, microbatch) -> loss, which hold no Trainer.

A microbatch has ``num_items_in_batch`` where the Trainer counts: the number of labels of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fxpipe.errors import CaptureError

COUNT = "num_items_in_batch"


def loss_of(trainer: Any) -> Callable[[Any, Any], torch.Tensor]:
    """What ``compute_loss`` computes."""
    if trainer.compute_loss_func is not None:
        return partial(_of_function, trainer.compute_loss_func)
    if trainer.label_smoother is not None:
        model = trainer.model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        shifts = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        return partial(_smoothed, trainer.label_smoother, shifts)
    return _of_model


def is_mean(trainer: Any, count: object) -> bool:
    """Whether the losses of microbatches are means by themselves, as ``training_step`` has it.

    count: of labels, None where nothing is counted.
    """
    if trainer.loss_is_scaled_for_ga is not None:
        return not trainer.loss_is_scaled_for_ga
    divides = trainer.model_accepts_loss_kwargs and count is not None
    return not (divides or trainer.compute_loss_func is not None)


def counted(microbatch: Mapping[str, Any], count: Any) -> dict[str, Any]:
    """A microbatch with the number of labels of the step."""
    return {**microbatch} if count is None else {**microbatch, COUNT: torch.tensor(int(count))}


def _of_model(output: Any, microbatch: Mapping[str, Any]) -> torch.Tensor:
    if isinstance(output, dict) and output.get("loss") is None:
        raise CaptureError(
            f"The model gives no loss for {', '.join(microbatch)}, only {', '.join(output)}: put labels into "
            "the rows of the dataset, or give compute_loss_func."
        )
    loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


def _of_function(function: Any, output: Any, microbatch: Mapping[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = function(output, microbatch.get("labels"), num_items_in_batch=microbatch.get(COUNT))
    return loss


def _smoothed(smoother: Any, shifts: bool, output: Any, microbatch: Mapping[str, Any]) -> torch.Tensor:
    options = {"shift_labels": shifts, COUNT: microbatch.get(COUNT)}
    loss: torch.Tensor = smoother(output, microbatch["labels"], **options)
    return loss
