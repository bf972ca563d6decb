"""The vision transformers of vit-pytorch that take an image and give its classes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import partial
from typing import Any

import vit_pytorch
from torch import nn

from benchmarks.model_coverage.case import Builder
from benchmarks.model_coverage.sources.shapes import CLASSES, classifier

LIBRARY = "vit-pytorch"
#: An argument of this name gets this value.
ARGUMENTS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": CLASSES,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 48,
    "dim_head": 8,
    "channels": 3,
    "frames": 4,
    "image_patch_size": 8,
    "frame_patch_size": 2,
    "seq_len": 32,
    "cls_depth": 1,
    "patch_merge_layer": 1,
    "patch_merge_num_tokens": 4,
    "num_register_tokens": 2,
    "max_tokens_per_depth": (16, 8),
    "num_parallel_branches": 2,
    "ndim": 2,
    "input_shape": (32, 32),
}
#: What the arguments by name get wrong.
CHANGES: dict[str, dict[str, Any]] = {
    "levit": {"image_size": 64, "dim": (16, 24), "depth": 1, "heads": (2, 2), "mlp_mult": 2, "stages": 2},
    "nest": {"patch_size": 4, "num_hierarchies": 2, "block_repeats": (1, 1), "dim": 16},
    "pit": {"dim": 16, "depth": (1, 1), "patch_size": 8},
    "cct": {"img_size": 32, "embedding_dim": 32, "num_layers": 2, "num_heads": 4},
    "cct_3d": {"img_size": 32, "num_frames": 4, "embedding_dim": 32, "num_layers": 2, "num_heads": 4},
    "cross_vit": {"sm_dim": 16, "lg_dim": 32, "sm_patch_size": 8, "lg_patch_size": 16},
    "crossformer": {
        "dim": (16, 16, 32, 32),
        "depth": (1, 1, 1, 1),
        "image_size": 224,
    },
    "max_vit": {"dim": 16, "dim_conv_stem": 16, "depth": (1, 1), "window_size": 4, "image_size": 32},
    "max_vit_with_registers": {"dim": 16, "dim_conv_stem": 16, "depth": (1, 1), "window_size": 4},
    "scalable_vit": {
        "dim": 16,
        "depth": (1, 1),
        "heads": (2, 2),
        "ssa_dim_key": 8,
        "ssa_dim_value": 8,
        "reduction_factor": (4, 2),
        "window_size": (4, None),
    },
    "sep_vit": {
        "dim": 16,
        "depth": (1, 1),
        "heads": (2, 2),
        "window_size": 4,
        "image_size": 32,
        "dim_head": 8,
    },
    "mobile_vit": {
        "dims": (16, 24, 32),
        "channels": (8, 8, 8, 8, 8, 8, 8, 16, 16, 16, 32),
        "image_size": (64, 64),
    },
    "regionvit": {"image_size": 224, "dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1)},
    "simple_vit_with_fft": {"freq_patch_size": 8},
    "simple_vit_with_hyper_connections": {"num_residual_streams": 2},
    "twins_svt": {
        "image_size": 64,
        **{
            f"s{s}_{field}": value
            for s in (1, 2, 3, 4)
            for field, value in {
                "emb_dim": 16,
                "patch_size": 2,
                "local_patch_size": 2,
                "global_k": 2,
                "depth": 1,
            }.items()
        },
    },
    "vivit": {"spatial_depth": 1, "temporal_depth": 1},
}
SHAPES = {"1d": (3, 32), "cct_3d": (3, 4, 32, 32), "3d": (3, 4, 32, 32), "vivit": (3, 4, 32, 32)}
LEFT_OUT = ("distill", "dino", "mae", "mpp", "mp3", "simmim", "extractor", "recorder", "es_vit", "efficient")
LEFT_OUT += (
    "lejepa",
    "levjepa",
    "nested",
    "na_vit",
    "accept_video",
    "vaat",
    "vat",
    "wwt",
    "moss",
    "learnable_memory",
    "local_vit",
    "look_vit",
    "vit_nd",
)


def cases() -> dict[str, Builder]:
    found = {}
    for module in pkgutil.iter_modules(vit_pytorch.__path__):
        if any(word in module.name for word in LEFT_OUT):
            continue
        shape = next((s for word, s in SHAPES.items() if word in module.name), (3, *_image(module.name)))
        found[module.name] = classifier(partial(build, module.name), *shape)
    return found


def _image(name: str) -> tuple[int, int]:
    size = CHANGES.get(name, {}).get("image_size", ARGUMENTS["image_size"])
    return size if isinstance(size, tuple) else (size, size)


def build(name: str) -> nn.Module:
    module = importlib.import_module(f"vit_pytorch.{name}")
    made = [
        (n, c)
        for n, c in vars(module).items()
        if inspect.isclass(c) and issubclass(c, nn.Module) and c.__module__ == module.__name__
    ]
    _, last = [item for item in made if "num_classes" in inspect.signature(item[1]).parameters][-1]
    given = {**ARGUMENTS, **CHANGES.get(name, {})}
    return last(**{p: given[p] for p in inspect.signature(last).parameters if p in given})
