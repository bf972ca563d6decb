"""The adapters of peft, each on a small Llama."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import torch
import transformers

from benchmarks.model_coverage.case import Builder, Subject
from benchmarks.model_coverage.sources.shapes import VOCABULARY

LIBRARY = "peft"
ON = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, **ON}),
    "rslora": ("LoraConfig", {"r": 4, "use_rslora": True, **ON}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True, **ON}),
    "lora_embedding": ("LoraConfig", {"r": 4, "target_modules": ["q_proj", "embed_tokens"]}),
    "lora_and_head": ("LoraConfig", {"r": 4, "modules_to_save": ["lm_head"], **ON}),
    "adalora": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10, **ON}),
    "loha": ("LoHaConfig", {"r": 4, **ON}),
    "lokr": ("LoKrConfig", {"r": 4, **ON}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "oft": ("OFTConfig", {"oft_block_size": 4, "r": 0, **ON}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, **ON}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 16, **ON}),
    "hra": ("HRAConfig", {"r": 4, **ON}),
    "vblora": ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 8, "topk": 2, **ON}),
    "miss": ("MissConfig", {"r": 4, **ON}),
    "randlora": ("RandLoraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "road": ("RoadConfig", {"group_size": 8, **ON}),
    "shira": ("ShiraConfig", {"r": 4, **ON}),
    "c3a": ("C3AConfig", {"block_size": 8, **ON}),
    "waveft": ("WaveFTConfig", {"n_frequency": 16, **ON}),
    "delora": ("DeloraConfig", {"r": 4, **ON}),
    "ln_tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "trainable_tokens": (
        "TrainableTokensConfig",
        {"token_indices": [5, 6, 7], "target_modules": ["embed_tokens"]},
    ),
    "prompt_tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}),
    "p_tuning": (
        "PromptEncoderConfig",
        {"num_virtual_tokens": 4, "encoder_hidden_size": 16, "task_type": "CAUSAL_LM"},
    ),
    "prefix_tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}),
    "adaption_prompt": (
        "AdaptionPromptConfig",
        {"adapter_len": 4, "adapter_layers": 1, "task_type": "CAUSAL_LM"},
    ),
}


def cases() -> dict[str, Builder]:
    return {name: partial(build, *given) for name, given in ADAPTERS.items() if hasattr(peft, given[0])}


def build(config: str, given: dict[str, Any]) -> Subject:
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
        )
    )
    model = peft.get_peft_model(base, getattr(peft, config)(**given))
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            # Adapters begin as nothing; a gradient of zero would say little.
            torch.nn.init.normal_(parameter, std=0.05)

    def batch(rows: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (rows, 12))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}

    return Subject(model, batch)
