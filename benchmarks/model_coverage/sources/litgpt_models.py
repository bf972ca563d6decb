"""litgpt's one GPT as each of the families that it stands for."""

from __future__ import annotations

from functools import partial
from typing import Any

from litgpt.config import configs
from litgpt.model import GPT, Config
from torch import nn

from benchmarks.model_coverage.case import Builder
from benchmarks.model_coverage.sources.shapes import VOCABULARY, words

LIBRARY = "litgpt"
NAMES = (
    "pythia-14m",
    "falcon-7b",
    "open_llama_3b",
    "Llama-2-7b-hf",
    "Llama-3.2-1B",
    "Gemma-2b",
    "Gemma-2-2b",
    "Gemma-3-1b-it",
    "phi-1_5",
    "phi-2",
    "Phi-3-mini-4k-instruct",
    "Mistral-7B-v0.1",
    "Mixtral-8x7B-v0.1",
    "Qwen2.5-0.5B",
    "Qwen3-0.6B",
    "Qwen3-30B-A3B",
    "OLMo-1B-hf",
    "stablelm-3b-4e1t",
    "SmolLM2-135M",
    "CodeLlama-7b-hf",
)
SMALL: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "head_size": 8,
    "intermediate_size": 48,
    "padded_vocab_size": VOCABULARY,
    "vocab_size": VOCABULARY,
    "block_size": 16,
}


def cases() -> dict[str, Builder]:
    known = {config["name"] for config in configs}
    return {name: words(partial(build, name)) for name in NAMES if name in known}


def build(name: str) -> nn.Module:
    given = {**next(config for config in configs if config["name"] == name), **SMALL}
    groups = given.get("n_query_groups")
    if groups is not None:
        given["n_query_groups"] = 1 if groups == 1 else 2
    for field in ("n_expert", "moe_intermediate_size"):
        if given.get(field):
            given[field] = min(given[field], 16 if field == "moe_intermediate_size" else 4)
    if given.get("n_expert_per_token"):
        given["n_expert_per_token"] = 2
    for field in ("sliding_window_indices", "rope_indices"):
        if given.get(field):
            given[field] = given[field][:2]
    return GPT(Config(**given))
