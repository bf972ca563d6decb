"""Import once, in the process that all others are forked from, the libraries whose models are tried."""

from __future__ import annotations

import importlib
import os
import warnings

import torch

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
warnings.simplefilter("ignore")

LIBRARIES = (
    "torchvision",
    "transformers",
    "timm",
    "diffusers",
    "x_transformers",
    "vit_pytorch",
    "litgpt.model",
    "peft",
    "torch_geometric.nn",
    "monai.networks.nets",
    "vector_quantize_pytorch",
)


def import_torchvision() -> None:
    """Where torch's build cannot load torchvision's ops: declare the two that its import asks for.

    The models are plain Python; those that call such an op (detection) fail in eager and so drop out.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for op in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{op}", schema)
        importlib.import_module("torchvision")


def _import(name: str) -> str:
    """Empty, or why the library is not there."""
    try:
        import_torchvision() if name == "torchvision" else importlib.import_module(name)
    except ImportError as error:
        return str(error)
    return ""


#: Why libraries are missing, by name.
MISSING = {name: why for name in LIBRARIES if (why := _import(name))}
PRESENT = [name for name in LIBRARIES if name not in MISSING]
