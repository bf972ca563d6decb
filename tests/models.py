"""Hugging Face models of many families, built from small configs with random weights: no network.

All have their labels in the forward and no dropout.  A family is a Case of the zoo: its model, what it
is fed, and its rows a microbatch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from zoo import Case, Shape

VOCABULARY, LENGTH, CLASSES = 96, 10, 5
#: What the families that descend from Llama share.
DECODER = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def words(rows: int) -> dict[str, Any]:
    """Token ids and labels, some of which are ignored."""
    labels = torch.randint(VOCABULARY, (rows, LENGTH))
    labels[:, 3] = -100
    return {"input_ids": torch.randint(VOCABULARY, (rows, LENGTH)), "labels": labels}


def padded_words(rows: int) -> dict[str, Any]:
    """The same with an attention mask that hides the ends of some rows."""
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[::2, -3:] = 0
    return {**words(rows), "attention_mask": mask}


def pairs(rows: int) -> dict[str, Any]:
    """A source, and a target of another length."""
    target = torch.randint(1, VOCABULARY, (rows, LENGTH - 3))
    return {"input_ids": torch.randint(1, VOCABULARY, (rows, LENGTH)), "labels": target}


def pictures(rows: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(CLASSES, (rows,))}


def gpt2(**changes: Any) -> nn.Module:
    small = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**small, **still, **changes}))


def llama(**changes: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**DECODER, **changes}))


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=8, tie_word_embeddings=True))


def gemma2() -> nn.Module:
    """Soft-capped attention and logits; every second layer sees a window of four tokens."""
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER, head_dim=8, sliding_window=4))


def mixtral() -> nn.Module:
    """With the loss that balances the experts."""
    config = hf.MixtralConfig(
        **DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    return hf.MixtralForCausalLM(config)


def deepseek_v3() -> nn.Module:
    """Latent attention; a dense layer, then one with routed and shared experts."""
    config = hf.DeepseekV3Config(
        **{**DECODER, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return hf.DeepseekV3ForCausalLM(config)


def gpt_neox() -> nn.Module:
    still = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    shape = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**shape, **still))


def opt() -> nn.Module:
    config = hf.OPTConfig(
        num_hidden_layers=2,
        hidden_size=32,
        word_embed_proj_dim=24,
        ffn_dim=48,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        dropout=0.0,
    )
    return hf.OPTForCausalLM(config)


def bert() -> nn.Module:
    config = hf.BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        num_layers=2,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.ViTForImageClassification(config)


def mamba() -> nn.Module:
    config = hf.MambaConfig(num_hidden_layers=2, hidden_size=32, vocab_size=VOCABULARY, state_size=4)
    return hf.MambaForCausalLM(config)


def in_training(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().train()


MODELS = {
    name: Case(in_training(build), batch)
    for name, (build, batch) in {
        "gpt2": (gpt2, words),
        "llama": (llama, words),
        "qwen3": (qwen3, padded_words),
        "gemma2": (gemma2, words),
        "mixtral": (mixtral, words),
        "deepseek_v3": (deepseek_v3, words),
        "gpt_neox": (gpt_neox, words),
        "opt": (opt, padded_words),
        "bert": (bert, padded_words),
        "t5": (t5, pairs),
        "vit": (vit, pictures),
        "mamba": (mamba, words),
    }.items()
}


@functools.cache
def in_precision(case: Case, dtype: torch.dtype) -> Case:
    """The same case with parameters, buffers and batch in another precision."""

    def model() -> nn.Module:
        built = case.model().to(dtype)
        if dtype == torch.float64:  # which torch's grouped matrix product does not know
            for module in built.modules():
                if hasattr(getattr(module, "config", None), "num_experts_per_tok"):
                    module.config._experts_implementation = "batched_mm"
        return built

    def batch(rows: int) -> dict[str, Any]:
        return {k: t.to(dtype) if t.is_floating_point() else t for k, t in case.batch(rows).items()}

    return replace(case, model=model, batch=batch)


def own_loss(output: Any, batch: Any) -> torch.Tensor:
    return output.loss


def next_word_loss(output: Any, batch: Any) -> torch.Tensor:
    """The loss of a language model, made outside of it from its logits."""
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def same_word_loss(output: Any, batch: Any) -> torch.Tensor:
    """For masked words, translated words and classes: logits and labels stand side by side."""
    logits = output.logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].flatten())


def label(value: Any) -> str:
    """A shape or a dtype as the name of a test."""
    if isinstance(value, Shape):
        chunks = "" if value.stages_per_rank is None else f"-{value.stages_per_rank}{value.placement}"
        return f"{value.ranks}-{value.schedule}{chunks}"
    return {torch.float32: "fp32", torch.float64: "fp64"}.get(value, str(value))
