"""The features of x-transformers, one at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import x_transformers as xt
from torch import nn

from benchmarks.model_coverage.case import Builder, Subject
from benchmarks.model_coverage.sources.shapes import CLASSES, VOCABULARY, classifier, words

LIBRARY = "x-transformers"

#: Arguments of the layers, by the name of the case.
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "rel_pos_bias": {"rel_pos_bias": True},
    "dynamic_pos_bias": {"dynamic_pos_bias": True},
    "rmsnorm": {"use_rmsnorm": True},
    "simple_rmsnorm": {"use_simple_rmsnorm": True},
    "scalenorm": {"use_scalenorm": True},
    "sandwich_norm": {"sandwich_norm": True},
    "post_norm": {"pre_norm": False},
    "glu": {"ff_glu": True},
    "swish_glu": {"ff_glu": True, "ff_swish": True},
    "relu_squared": {"ff_relu_squared": True},
    "no_bias": {"ff_no_bias": True},
    "talking_heads": {"attn_pre_talking_heads": True},
    "sparse_topk": {"attn_sparse_topk": 4},
    "kv_heads": {"attn_kv_heads": 2},
    "one_kv_head": {"attn_one_kv_head": True},
    "qk_norm": {"attn_qk_norm": True},
    "gate_values": {"attn_gate_values": True},
    "gate_residual": {"gate_residual": True},
    "macaron": {"macaron": True},
    "residual_attn": {"residual_attn": True},
    "shift_tokens": {"shift_tokens": 1},
    "sandwich_coef": {"sandwich_coef": 1},
    "mem_kv": {"attn_num_mem_kv": 4},
    "memory_efficient_rope_xpos": {"rotary_pos_emb": True, "rotary_xpos": True},
    "flash": {"attn_flash": True},
    "value_residual": {"add_value_residual": True},
    "hyper_connections": {"num_residual_streams": 2},
    "softclamp": {"attn_softclamp_logits": True},
    "head_scale": {"attn_head_scale": True},
    "selective": {"attn_selective": True},
    "laser": {"attn_laser": True},
    "custom_pattern": {"custom_layers": ("a", "f", "a", "f")},
}


def decoder(given: dict[str, Any], **wrapper: Any) -> nn.Module:
    layers = xt.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **given)
    return xt.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers, **wrapper)


def encoder_decoder() -> Subject:
    model = xt.XTransformer(
        dim=32,
        tie_token_emb=True,
        enc_num_tokens=VOCABULARY,
        enc_depth=2,
        enc_heads=4,
        enc_max_seq_len=16,
        dec_num_tokens=VOCABULARY,
        dec_depth=2,
        dec_heads=4,
        dec_max_seq_len=16,
    )

    def batch(rows: int) -> dict[str, torch.Tensor]:
        return {
            "src": torch.randint(1, VOCABULARY, (rows, 12)),
            "tgt": torch.randint(1, VOCABULARY, (rows, 10)),
            "mask": torch.ones(rows, 12, dtype=torch.bool),
        }

    return Subject(model, batch)


def autoregressive() -> Subject:
    model = xt.AutoregressiveWrapper(decoder({}))
    return Subject(model, lambda rows: (torch.randint(1, VOCABULARY, (rows, 13)),))


def image() -> nn.Module:
    layers = xt.Encoder(dim=32, depth=2, heads=4)
    return xt.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=CLASSES, attn_layers=layers)


def cases() -> dict[str, Builder]:
    found = {f"decoder_{name}": words(partial(decoder, given)) for name, given in LAYERS.items()}
    found["decoder_tied"] = words(partial(decoder, {}, tie_embedding=True))
    found["decoder_memory_tokens"] = words(partial(decoder, {}, num_memory_tokens=4))
    found["decoder_post_emb_norm"] = words(partial(decoder, {}, post_emb_norm=True))
    found["encoder_decoder"] = encoder_decoder
    found["autoregressive"] = autoregressive
    found["vit"] = classifier(image, 3, 32, 32)
    return found
