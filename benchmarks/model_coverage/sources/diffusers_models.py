"""The denoisers and autoencoders of diffusers, tiny."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch

from benchmarks.model_coverage.case import Builder, Subject, leaves_loss

LIBRARY = "diffusers"
UNET = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
VAE = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "sample_size": 16, **UNET}
WORDS = (6, 32)  # the states of a text encoder

#: Constructor's arguments, and of each input its shape without rows: numbers, or () for a time step.
MODELS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "UNet2DModel": (
        {
            "sample_size": 16,
            "in_channels": 3,
            "out_channels": 3,
            **UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
        },
        {"sample": (3, 16, 16), "timestep": ()},
    ),
    "UNet2DConditionModel": (
        {
            "sample_size": 16,
            **UNET,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
        },
        {"sample": (4, 16, 16), "timestep": (), "encoder_hidden_states": WORDS},
    ),
    "UNet3DConditionModel": (
        {
            "sample_size": 8,
            **UNET,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
        },
        {"sample": (4, 2, 8, 8), "timestep": (), "encoder_hidden_states": WORDS},
    ),
    "UNet1DModel": (
        {
            "block_out_channels": (8, 16, 32),
            "in_channels": 14,
            "out_channels": 14,
            "extra_in_channels": 0,
            "time_embedding_type": "positional",
            "use_timestep_embedding": True,
            "act_fn": "mish",
            "down_block_types": ("DownResnetBlock1D",) * 3,
            "up_block_types": ("UpResnetBlock1D",) * 2,
            "mid_block_type": "MidResTemporalBlock1D",
            "out_block_type": "OutConv1DBlock",
            "downsample_each_block": False,
        },
        {"sample": (14, 16), "timestep": ()},
    ),
    "AutoencoderKL": (
        {**VAE, "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (3, 16, 16)},
    ),
    "VQModel": (
        {
            **VAE,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "num_vq_embeddings": 16,
        },
        {"sample": (3, 16, 16)},
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        {"sample": (3, 16, 16)},
    ),
    "AsymmetricAutoencoderKL": (
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "down_block_out_channels": (16, 32),
            "norm_num_groups": 8,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "up_block_out_channels": (16, 32),
        },
        {"sample": (3, 16, 16)},
    ),
    "AutoencoderDC": (
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_out_channels": (8, 16),
            "decoder_block_out_channels": (8, 16),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "downsample_block_type": "pixel_unshuffle",
        },
        {"sample": (3, 16, 16)},
    ),
    "DiTTransformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "sample_size": 8,
            "norm_num_groups": 8,
            "num_embeds_ada_norm": 8,
            "patch_size": 2,
        },
        {"hidden_states": (4, 8, 8), "timestep": (), "class_labels": ()},
    ),
    "PixArtTransformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "sample_size": 8,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "norm_num_groups": 8,
            "use_additional_conditions": False,
        },
        {"hidden_states": (4, 8, 8), "timestep": (), "encoder_hidden_states": WORDS},
    ),
    "Transformer2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "in_channels": 32,
            "norm_num_groups": 8,
            "cross_attention_dim": 32,
        },
        {"hidden_states": (32, 8, 8), "encoder_hidden_states": WORDS},
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 8,
        },
        {
            "hidden_states": (4, 8, 8),
            "encoder_hidden_states": WORDS,
            "pooled_projections": (16,),
            "timestep": (),
        },
    ),
    "SanaTransformer2DModel": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "sample_size": 8,
            "patch_size": 1,
        },
        {"hidden_states": (4, 8, 8), "encoder_hidden_states": WORDS, "timestep": ()},
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
        },
        {"hidden_states": (4, 8, 8), "encoder_hidden_states": WORDS, "timestep": ()},
    ),
    "PriorTransformer": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "embedding_dim": 32,
            "num_embeddings": 6,
            "additional_embeddings": 4,
        },
        {"hidden_states": (32,), "timestep": (), "proj_embedding": (32,), "encoder_hidden_states": WORDS},
    ),
    "UVit2DModel": (
        {
            "hidden_size": 32,
            "cond_embed_dim": 32,
            "micro_cond_encode_dim": 8,
            "micro_cond_embed_dim": 40,
            "encoder_hidden_size": 32,
            "vocab_size": 64,
            "codebook_size": 60,
            "in_channels": 32,
            "block_out_channels": 32,
            "num_res_blocks": 1,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "sample_size": 8,
            "block_num_heads": 2,
        },
        {"input_ids": (-8, 8), "encoder_hidden_states": WORDS, "pooled_text_emb": (32,), "micro_conds": (1,)},
    ),
    "LatteTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 8,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "norm_elementwise_affine": False,
            "norm_type": "ada_norm_single",
            "activation_fn": "gelu-approximate",
            "attention_bias": True,
        },
        {"hidden_states": (4, 2, 8, 8), "timestep": (), "encoder_hidden_states": WORDS},
    ),
    "CogVideoXTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": 32,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "patch_size": 2,
            "temporal_compression_ratio": 4,
            "max_text_seq_length": 6,
        },
        {"hidden_states": (2, 4, 8, 8), "encoder_hidden_states": WORDS, "timestep": ()},
    ),
    "MochiTransformer3DModel": (
        {
            "patch_size": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "qk_norm": "rms_norm",
            "text_embed_dim": 32,
            "time_embed_dim": 8,
            "activation_fn": "swiglu",
            "max_sequence_length": 6,
        },
        {
            "hidden_states": (4, 2, 8, 8),
            "encoder_hidden_states": WORDS,
            "timestep": (),
            "encoder_attention_mask": (-2, 6),
        },
    ),
    "WanTransformer3DModel": (
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 32,
            "ffn_dim": 48,
            "num_layers": 2,
        },
        {"hidden_states": (4, 2, 8, 8), "timestep": (), "encoder_hidden_states": WORDS},
    ),
    "AllegroTransformer3DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 48,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 2,
            "caption_channels": 32,
        },
        {"hidden_states": (4, 2, 8, 8), "timestep": (), "encoder_hidden_states": WORDS},
    ),
    "HunyuanDiT2DModel": (
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 8,
            "hidden_size": 32,
            "num_layers": 2,
            "mlp_ratio": 2.0,
            "cross_attention_dim": 32,
            "cross_attention_dim_t5": 32,
            "pooled_projection_dim": 16,
            "text_len": 4,
            "text_len_t5": 4,
            "use_style_cond_and_image_meta_size": False,
            "activation_fn": "gelu-approximate",
        },
        {
            "hidden_states": (4, 8, 8),
            "timestep": (),
            "encoder_hidden_states": (4, 32),
            "text_embedding_mask": (4,),
            "encoder_hidden_states_t5": (4, 32),
            "text_embedding_mask_t5": (4,),
        },
    ),
    "StableAudioDiTModel": (
        {
            "sample_size": 8,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "time_proj_dim": 8,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": 16,
        },
        {
            "hidden_states": (4, 8),
            "timestep": (),
            "encoder_hidden_states": (6, 16),
            "global_hidden_states": (1, 16),
        },
    ),
    "StableCascadeUNet": (
        {
            "block_out_channels": (16, 32),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "down_blocks_repeat_mappers": (1, 1),
            "up_blocks_repeat_mappers": (1, 1),
            "num_attention_heads": (0, 2),
            "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock"),) * 2,
            "in_channels": 4,
            "out_channels": 4,
            "conditioning_dim": 32,
            "clip_text_in_channels": 32,
            "clip_text_pooled_in_channels": 16,
            "clip_image_in_channels": 16,
            "timestep_ratio_embedding_dim": 8,
            "switch_level": (False,),
            "patch_size": 1,
        },
        {"sample": (4, 8, 8), "timestep_ratio": (), "clip_text_pooled": (1, 16)},
    ),
    "Kandinsky3UNet": (
        {
            "time_embedding_dim": 16,
            "groups": 4,
            "attention_head_dim": 8,
            "layers_per_block": 1,
            "block_out_channels": (16, 32),
            "cross_attention_dim": 32,
            "encoder_hid_dim": 32,
        },
        {
            "sample": (4, 8, 8),
            "timestep": (),
            "encoder_hidden_states": WORDS,
            "encoder_attention_mask": (-2, 6),
        },
    ),
}


def cases() -> dict[str, Builder]:
    return {name: partial(build, name) for name in MODELS if hasattr(diffusers, name)}


def build(name: str) -> Subject:
    arguments, inputs = MODELS[name]

    def batch(rows: int) -> dict[str, torch.Tensor]:
        return {name: _input(name, shape, rows) for name, shape in inputs.items()}

    return Subject(getattr(diffusers, name)(**arguments), batch, leaves_loss)


def _input(name: str, shape: tuple[int, ...], rows: int) -> torch.Tensor:
    """A shape that begins with -n is of whole numbers below n: (-8, 8) of 8 × 8 ids."""
    if name in ("timestep", "class_labels"):
        return torch.randint(1, 8, (rows,))
    if not shape:
        return torch.rand(rows)
    if shape[0] < 0:
        size = (rows, -shape[0], *shape[1:]) if name == "input_ids" else (rows, *shape[1:])
        return (
            torch.randint(1, -shape[0], size) if name == "input_ids" else torch.ones(size, dtype=torch.long)
        )
    return torch.randn(rows, *shape)
