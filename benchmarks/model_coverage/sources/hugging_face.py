"""Every architecture of Hugging Face transformers that an auto class knows, from a config that is made tiny.

Nothing is downloaded: a default config is shrunk field by field (``SIZES``), what that rule gets wrong for a
model is set by ``overrides.toml``, and weights are random.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

from benchmarks.model_coverage.case import Builder, Subject, leaves_loss

LIBRARY = "transformers"
OVERRIDES = Path(__file__).parent / "overrides.toml"
LENGTH, LABELS, IMAGE = 12, 4, 32

#: The auto classes in the order in which a type's model is looked for: first those with a loss of their own.
TASKS = (
    "IMAGE_TEXT_TO_TEXT",
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "MULTIMODAL_LM",
    "PRETRAINING",
    "IMAGE_TO_IMAGE",
    "MASK_GENERATION",
    "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM",
    "BACKBONE",
)

#: Field names and the largest value that they keep; the first that matches.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?|n_words|entity_vocab_size|.*_vocab_size", 96),
    (r"(num|n)_(key_value|kv)_heads|.*num_key_value_heads|num_query_groups", 2),
    (r".*(attention|attn)_heads?|n_heads?|num_heads?|.*_num_heads|n_head|.*_heads", 4),
    (r".*experts_per_tok(en)?|top_?k|moe_topk|num_selected_experts|.*_top_k|topk_group", 2),
    (r"n_group", 2),
    (r"n_shared_experts|num_shared_expert.*", 1),
    (r".*num_.*experts|.*n_routed_experts|num_experts.*|.*_num_experts", 4),
    (
        r"(.*_)?(head_dim|d_head|d_kv|attention_head_dim|kv_channels|qk_nope_head_dim|qk_rope_head_dim|v_head_dim)",
        8,
    ),
    (r"rotary_dim|rotary_emb_dim", 4),
    (r".*_lora_rank|q_rank|kv_rank", 16),
    (
        r".*(num|n)_(hidden_)?layers?|.*_layers|n_layer|num_blocks|.*_num_hidden_layers|num_hidden_layers|.*depth",
        2,
    ),
    (
        r".*intermediate_(size|dim)|.*ffn_dim|d_ff|d_inner|n_inner|.*mlp_dim|ff_dim|dim_feedforward|.*ffn_size",
        48,
    ),
    (
        r".*max_position(_embedding)?s|.*max_position_embeddings|n_positions|max_sequence_length|max_seq_len.*|n_ctx|max_source_positions|max_target_positions|max_2d_.*|seq_length|.*context_length",
        64,
    ),
    (r"image_size|input_size|img_size|.*_image_size|crop_size", IMAGE),
    (r"patch_size|.*_patch_size", 8),
    (r"num_frames|frames|.*num_frames", 2),
    (r"num_queries|.*num_queries|num_latents|num_query_tokens|num_proposals", 8),
    (
        r".*(hidden_size|d_model|n_embd|hidden_dim|embed_dim|embedding_dim|embedding_size|projection_dim|_dim|_size_embed|embed_size|_channels|channels|width)|dim|d_embed|hidden_width",
        32,
    ),
    (r"state_size|ssm_state_size|mamba_d_state|.*d_state", 4),
    (r"num_mel_bins|n_mels|feature_size|input_feat_per_channel", 16),
    (r"window_size|.*sliding_window.*|attention_window.*|local_attention.*", 4),
)
#: These are what they are.
KEPT = (
    r"(num|in|input|.*_in|out)_channels|num_channels|.*temporal_patch_size|.*kernel.*|.*stride.*|"
    r".*conv_dim|num_buckets|.*_id|.*_ids|.*token_id.*|.*_index|num_feat_extract_layers|"
    r"num_conv.*_layers|.*_dim_ratio|mrope_section|.*num_feature_levels|.*version|.*_ratio|"
    r"conv_.*|.*pad"
)


def cases() -> dict[str, Builder]:
    """A builder for each model type, by the type's name."""
    found: dict[str, Builder] = {}
    overrides = _overrides()
    for task in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for kind, classes in names.items():
            known = kind in configuration_auto.CONFIG_MAPPING_NAMES
            if known and kind not in found and not overrides.get(kind, {}).get("skip"):
                class_name = classes if isinstance(classes, str) else classes[0]
                found[kind] = partial(build, kind, class_name, task)
    return found


@cache
def _overrides() -> dict[str, dict[str, Any]]:
    return tomllib.loads(OVERRIDES.read_text())


def build(kind: str, class_name: str, task: str) -> Subject:
    given = _overrides().get(kind, {})
    model_class = getattr(transformers, class_name)
    config = tiny_config(kind, model_class, given.get("config", {}))
    for name in ("pad_token_id", "decoder_start_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    model = model_class(config)
    return Subject(model, partial(inputs_of, model, task, given.get("inputs", {})), loss)


def loss(output: Any, batch: Any) -> torch.Tensor:
    """The model's own loss where it has one."""
    own = output.get("loss") if isinstance(output, Mapping) else None
    return own if own is not None else leaves_loss(output, batch)


# -- configs ------------------------------------------------------------------------------------------


def tiny_config(kind: str, model_class: Any, changes: Mapping[str, Any]) -> Any:
    config_class = configuration_auto.CONFIG_MAPPING[kind]
    if model_class.config_class in config_class.sub_configs.values():  # as that of its decoder alone
        config_class = model_class.config_class
    fields = shrunk(config_class().to_dict())
    return config_class.from_dict(merged(fields, changes))


def merged(fields: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(fields)
    for name, value in changes.items():
        old = fields.get(name)
        fields[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return fields


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields, smaller: sizes by name, lists of sizes by their ratios, ids within the vocabulary."""
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            small[name] = shrunk(value) if name.endswith("config") else value
        elif "drop" in name and isinstance(value, float):
            small[name] = 0.0
        elif isinstance(value, bool) or value is None:
            small[name] = value
        elif isinstance(value, int):
            small[name] = _size(name, value)
        elif isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
            small[name] = _sizes(name, list(value))
        else:
            small[name] = value
    for name, size in (("head_dim", 8), ("vocab_size", 96), ("n_routed_experts", 4)):
        if name in small and small[name] is None:
            small[name] = size
    for name in ("out_features", "out_indices", "stage_names"):
        small.pop(name, None)  # of stages that are no longer there
    _make_consistent(small, fields)
    return small


def _size(name: str, value: int) -> int:
    if re.fullmatch(r".*(_id|_idx|_index|_token)", name) and value >= 90:
        return 3 + sum(map(ord, name)) % 80  # ids of special tokens stay apart from each other
    if re.fullmatch(KEPT, name):
        return value
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def _sizes(name: str, values: list[int]) -> list[int]:
    if re.fullmatch(r"depths|.*layers|.*num_blocks|.*_depths|layer_depths", name):
        return [min(v, 1 + (i == 0)) for i, v in enumerate(values)]
    widths = (
        r"hidden_sizes|embed_dims?|.*hidden_sizes|.*embed_dims|dims|.*channels|.*widths|encoder_hidden_sizes"
    )
    if re.fullmatch(widths, name) and values[0] > 16:
        return [max(16, v * 16 // values[0] // 8 * 8) for v in values]
    if re.fullmatch(r".*(image_size|img_size|input_size)", name):
        return [min(v, IMAGE) for v in values]
    if re.fullmatch(r".*patch_size", name):
        return [min(v, 8) for v in values]
    if re.fullmatch(r".*heads", name):
        return [min(v, 2) for v in values]
    return values


def _make_consistent(small: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """What the rules by name cannot see: lists with an item a layer, and heads that are as many as others."""
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads") is not None:
        small["num_key_value_heads"] = small["num_attention_heads"]
    counts = [n for n in ("num_hidden_layers", "num_layers", "n_layer") if isinstance(small.get(n), int)]
    if not counts:
        return
    before, layers = fields[counts[0]], small[counts[0]]
    kinds = [fields[n] for n in ("layer_types", "layers_block_type", "mlp_layer_types") if fields.get(n)]
    if kinds and isinstance(kinds[0], (list, tuple)):
        # A layer of each kind at least: the first ones up to it.
        seen = [list(kinds[0]).index(kind) for kind in set(kinds[0])]
        layers = small[counts[0]] = max(layers, *(at + 1 for at in seen)) if max(seen) < 8 else layers
    for name, value in fields.items():
        if isinstance(value, (list, tuple)) and len(value) == before and before > layers:
            small[name] = list(value)[:layers]
        elif name == "per_layer_config" and isinstance(value, dict):
            small[name] = {at: x for at, x in value.items() if int(at) < layers}


# -- inputs -------------------------------------------------------------------------------------------


VISION_TEXT = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "ZERO_SHOT_IMAGE_CLASSIFICATION")


def inputs_of(model: nn.Module, task: str, given: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """A batch: each input that the forward names and this knows, with labels where the task has them.

    given: changes by name: a list is a shape (without rows) of random numbers; an empty one leaves the
    input out; a table ``{shape, high}`` is of whole numbers; anything else is an input as it is.
    """
    names = inspect.signature(model.forward).parameters
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or 96
    batch: dict[str, Any] = {}

    def words(length: int = LENGTH) -> torch.Tensor:
        return torch.randint(5, max(min(vocabulary, 90) - 8, 8), (rows, length))

    main = getattr(model, "main_input_name", "input_ids")
    if "input_ids" in names and (main == "input_ids" or task in VISION_TEXT):
        batch["input_ids"] = words()
    if "pixel_values" in names:
        batch |= images(model, names, task, rows)
    if "pixel_values_videos" in names and main == "pixel_values_videos":
        frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 2)
        batch["pixel_values_videos"] = torch.randn(rows, frames, *pixels(config, ""))
    if "input_features" in names:
        batch["input_features"] = torch.randn(rows, *features(config))
        for mask in {"input_features_mask", "feature_attention_mask"} & set(names):
            batch[mask] = torch.ones(rows, batch["input_features"].shape[1], dtype=torch.long)
    if "input_values" in names:
        batch["input_values"] = torch.randn(rows, 1600)
    if "decoder_input_ids" in names and task not in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        batch["decoder_input_ids"] = words(8)
    for name, shape in given.items():
        batch.pop(name, None)
        if isinstance(shape, dict):
            batch[name] = torch.randint(shape.get("low", 0), shape["high"], (rows, *shape["shape"]))
        elif isinstance(shape, list):
            batch |= {name: torch.randn(rows, *shape)} if shape else {}
        else:
            batch[name] = shape
    for kind, feature in (("image", "pixel_values"), ("audio", "input_features")):
        if feature in batch and "input_ids" in batch and hasattr(model, f"get_{kind}_features"):
            batch["input_ids"] = with_tokens_of(model, kind, batch, rows)
    if "mm_token_type_ids" in names and "input_ids" in batch:
        batch["mm_token_type_ids"] = (batch["input_ids"] == token_of(config, "image")).long()
    if "labels" in names and "labels" not in given:
        label = labels(task, batch, rows, config, vocabulary)
        if label is not None:
            batch["labels"] = label
    return {name: value for name, value in batch.items() if name in names or "kwargs" in names}


def images(model: nn.Module, names: Mapping[str, Any], task: str, rows: int) -> dict[str, torch.Tensor]:
    """Pixels in the form that the model takes them in, and the sizes of the images."""
    config = model.config
    vision = getattr(config, "vision_config", None) or config
    for grid in ("image_grid_thw", "grid_thws"):
        if grid in names:
            # Patches in a row, of images of 4 × 4 patches.
            patch, frames = getattr(vision, "patch_size", 8), getattr(vision, "temporal_patch_size", 1)
            channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
            return {
                "pixel_values": torch.randn(rows * 16, channels * frames * patch * patch),
                grid: torch.tensor([[1, 4, 4]] * rows),
            }
    shape = pixels(vision, task)
    found = {"pixel_values": torch.randn(rows, *shape)}
    if "image_sizes" in names:
        found["image_sizes"] = torch.tensor([list(shape[-2:])] * rows)
    return found


def token_of(config: Any, kind: str) -> int | None:
    """The token that stands in the words where the features of an image or of sound go."""
    return next(
        (t for n in ("id", "index") if (t := getattr(config, f"{kind}_token_{n}", None)) is not None), None
    )


def with_tokens_of(model: nn.Module, kind: str, batch: Mapping[str, Any], rows: int) -> torch.Tensor:
    """The words with as many such tokens in front as the model makes features of a row."""
    words, token = batch["input_ids"], token_of(model.config, kind)
    if token is None:
        return words
    make = getattr(model.double(), f"get_{kind}_features")
    known = inspect.signature(make).parameters
    given = {n: v for n, v in batch.items() if n in known and n != "input_ids"}
    given = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
    with torch.no_grad():
        found = make(**given)
    found = getattr(found, "pooler_output", found)
    parts = found if isinstance(found, (list, tuple)) else [found]
    count = sum(p.numel() // p.shape[-1] for p in parts) // rows
    return torch.cat([torch.full((rows, count), token), words], dim=1)


def pixels(config: Any, task: str) -> tuple[int, ...]:
    size = getattr(config, "image_size", None) or IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3) or 3
    if task == "VIDEO_CLASSIFICATION":
        return getattr(config, "num_frames", 2), channels, height, width
    return channels, height, width


def features(config: Any) -> tuple[int, int]:
    """Frames and mel bins, or bins and frames where an encoder like Whisper's has a fixed length."""
    config = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    bins = next(
        (b for n in ("num_mel_bins", "feature_size", "input_dim") if (b := getattr(config, n, None))), 16
    )
    positions = getattr(config, "max_source_positions", None)
    if positions is not None and hasattr(config, "num_mel_bins") and not hasattr(config, "conv_channels"):
        return bins, 2 * positions
    return 32, bins


def labels(task: str, batch: Mapping[str, Any], rows: int, config: Any, vocabulary: int) -> Any:
    classes = getattr(config, "num_labels", 2)
    if task in ("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        return batch["input_ids"].clone() if "input_ids" in batch else None
    if task in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        return torch.randint(5, max(vocabulary - 8, 8), (rows, 8))
    if task == "CTC":
        return torch.randint(1, max(vocabulary - 8, 8), (rows, 2))
    if task in (
        "IMAGE_CLASSIFICATION",
        "VIDEO_CLASSIFICATION",
        "AUDIO_CLASSIFICATION",
        "SEQUENCE_CLASSIFICATION",
    ):
        return torch.randint(classes, (rows,))
    if task == "SEMANTIC_SEGMENTATION":
        return torch.randint(classes, (rows, *batch["pixel_values"].shape[-2:]))
    return None
