"""One small model of each file of timm."""

from __future__ import annotations

from functools import partial

import timm
from torch import nn

from benchmarks.model_coverage.case import Builder
from benchmarks.model_coverage.sources.shapes import CLASSES, classifier

LIBRARY = "timm"
#: Words in the names of small models, the smallest first.
SMALL = ("test_", "atto", "femto", "pico", "nano", "zepto", "_xxs", "xxt", "_xs", "xx_small", "050", "tiny")
SMALL += ("micro", "mini", "_t0", "_b0", "_m0", "_s0", "_0", "18", "_s", "small", "_t")
SIZE = 64
#: Too large to be tried in double precision, whatever their size is.
LEFT_OUT = {"gemma4_vit", "vision_transformer_sam", "qwen3_vit", "deepseek_vit", "mobilenetv5", "naflexvit"}


def cases() -> dict[str, Builder]:
    found = {}
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        if names and module not in LEFT_OUT:
            name = min(names, key=_rank)
            found[name] = make(name)
    return found


def _rank(name: str) -> tuple[int, int, str]:
    return next((i for i, word in enumerate(SMALL) if word in name), len(SMALL)), len(name), name


def make(name: str) -> Builder:
    fixed = timm.get_pretrained_cfg(name)
    size = fixed.input_size[-1] if fixed is not None and fixed.fixed_input_size else SIZE
    return classifier(partial(build, name), 3, *_size_of(name, size))


def _size_of(name: str, size: int) -> tuple[int, int]:
    return (SIZE, SIZE) if _takes_size(name) else (size, size)


def _takes_size(name: str) -> bool:
    """Transformers learn one embedding a position, and are told how many."""
    return any(
        word in name for word in ("vit", "deit", "beit", "eva", "swin", "cait", "mixer", "volo", "xcit")
    )


def build(name: str) -> nn.Module:
    if _takes_size(name):
        try:
            return timm.create_model(name, num_classes=CLASSES, img_size=SIZE)
        except TypeError:
            pass
    return timm.create_model(name, num_classes=CLASSES)
