"""The cases, by library.  A source is a module with ``LIBRARY`` and ``cases()``: names and their builders."""

from __future__ import annotations

import importlib
from functools import cache

from benchmarks.model_coverage.case import Builder, Case
from benchmarks.model_coverage.libraries import PRESENT

#: The source of each library that must be there for it (None: torch alone).
SOURCES: dict[str, str | None] = {
    "torch_modules": None,
    "torch_examples": None,
    "hugging_face": "transformers",
    "timm_models": "timm",
    "torchvision_models": "torchvision",
    "diffusers_models": "diffusers",
    "x_transformers_models": "x_transformers",
    "vit_pytorch_models": "vit_pytorch",
    "litgpt_models": "litgpt.model",
    "peft_adapters": "peft",
    "geometric": "torch_geometric.nn",
    "monai_networks": "monai.networks.nets",
    "small_packages": "vector_quantize_pytorch",
}


def builders(source: str) -> tuple[str, dict[str, Builder]]:
    module = importlib.import_module(f"benchmarks.model_coverage.sources.{source}")
    return module.LIBRARY, module.cases()


@cache
def all_cases() -> dict[str, Case]:
    found = {}
    for source, needs in SOURCES.items():
        if needs is None or needs in PRESENT:
            library, built = builders(source)
            for name, build in built.items():
                case = Case(library, name, build)
                found[case.key] = case
    return found


def find(key: str) -> Case:
    return all_cases()[key]
