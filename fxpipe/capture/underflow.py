"""Warns of a backward in float16, where small gradients become zero."""

from __future__ import annotations

import warnings

import torch
from torch import fx

from fxpipe.ir.storage import call_nodes, tensors


def warn_of_float16(graph: fx.Graph) -> None:
    """Warn of the first op of the backward that computes in float16, with its place in the model.

    Training in float16 scales the loss (``torch.amp.GradScaler``); the gradient of a captured step's loss is
    a constant of the program.
    """
    for node in call_nodes(graph):
        origin = node.meta["origin"]
        if origin.backward and any(t.dtype == torch.float16 for t in tensors(node)):
            warnings.warn(
                f"The backward computes in float16 ({origin}), and gradients below 6e-8 become zero: a "
                "pipeline takes no GradScaler. Train in bfloat16, which needs none; or let loss_fn return "
                "the loss times a constant, with grad_dtype=torch.float32, and divide the gradients by it "
                "before the optimizer's step.",
                stacklevel=2,
            )
            return
