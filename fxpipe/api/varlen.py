"""Attention of packed documents for models: under the names of torch and flash_attn, and for transformers.

Each call is one op, ``fxpipe::varlen_attention``, on any device (``runtime/program/varlen.py``).
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fxpipe.api.packed_check import check_apart, check_positions
from fxpipe.errors import OptionError
from fxpipe.runtime.program.varlen import varlen_attention

PACKED = "packed"  # the name of the implementation for models of transformers

_Model = TypeVar("_Model", bound=torch.nn.Module)


def use_packed_attention(model: _Model) -> _Model:
    """Let a model of transformers keep the samples of ``fxpipe.pack`` apart by attention that computes
    nothing between them, as one op, instead of by a mask.

    Returns the model, which has run two short samples (``packed_check.py``).  Raises OptionError for one that
    is not of transformers, does not keep them apart, or gives attention soft caps or sinks; then it has the
    attention that it had.  Other masks and dropout are an OptionError of its forward.
    """
    of_transformers: Any = model
    if getattr(model, "set_attn_implementation", None) is None:
        name = type(model).__name__
        raise OptionError(f"{name} is no model of transformers, which can be told its attention.")
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)
    before = of_transformers.config._attn_implementation
    check_positions(model)
    of_transformers.set_attn_implementation(PACKED)
    try:
        check_apart(model)
    except OptionError:
        of_transformers.set_attn_implementation(before)
        raise
    return model


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Attend within documents, called as ``torch.nn.attention.varlen.varlen_attn``: [tokens, heads, size].
    Repeats of the last boundary make no documents."""
    heads, of_keys = query.shape[1], key.shape[1]
    if heads % of_keys or (heads != of_keys and not enable_gqa):
        remedy = "give enable_gqa=True" if heads % of_keys == 0 else "make the one a multiple of the other"
        raise OptionError(f"Queries have {heads} heads, and keys {of_keys}: {remedy}.")
    width, of_values = query.shape[-1], value.shape[-1]
    if width != of_values:
        raise OptionError(f"Queries are {width} wide, and values {of_values}: pad one of them.")
    scale = width**-0.5 if scale is None else scale
    ends = cu_seq_q, cu_seq_q if cu_seq_k is None else cu_seq_k
    attended: Tensor = varlen_attention(query, key, value, *ends, max_q, max_k, scale, *window_size)[0]
    return attended


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attend within documents, called as the function of flash_attn; there is no dropout."""
    if dropout_p:
        raise OptionError(f"dropout_p is {dropout_p}, and attention of packed documents has no dropout.")
    window = window_size[0], 0 if causal else window_size[1]
    ends, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return varlen_attn(q, k, v, *ends, *longest, scale=softmax_scale, window_size=window, enable_gqa=True)


def boundaries_of(position_ids: Tensor) -> Tensor:
    """The boundaries of the documents in rows of positions, [rows, tokens], which rise by 1 in each: as many
    as there could be, with repeats of the last one."""
    positions = position_ids.reshape(-1)
    tokens = positions.shape[0]
    at = torch.arange(1, tokens, device=positions.device)
    # Where no document begins stands the end, which sorts behind all begins: no size depends on the data.
    begins = torch.where(positions[1:] - positions[:-1] == 1, tokens, at).sort().values
    return torch.cat([begins.new_zeros(1), begins, begins.new_full((1,), tokens)]).to(torch.int32)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention of transformers: [rows, heads, tokens, size] -> [rows, tokens, heads, size]."""
    if position_ids is None or position_ids.dim() != 2 or query.shape[2] != key.shape[2]:
        raise OptionError(
            f'{type(module).__name__} gives attention no position_ids of its keys, by which "{PACKED}" keeps '
            'documents apart: use attn_implementation="sdpa".'
        )
    if attention_mask is not None or others.get("softcap") or others.get("s_aux") is not None:
        raise OptionError(f'"{PACKED}" takes no attention mask, soft cap or sink: use "sdpa" or "eager".')
    rows, _, length, _ = query.shape
    positions = position_ids.expand(rows, -1)
    causal = module.is_causal if is_causal is None else is_causal
    ends, tokens = boundaries_of(positions), rows * length
    # A sliding window counts the position itself.
    window = (-1 if sliding_window is None else sliding_window - 1), 0 if causal else -1
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    width = v.shape[-1]
    v = F.pad(v, (0, max(0, q.shape[-1] - width)))  # as values of latent attention are narrower
    dropped = dropout if module.training else 0.0
    longest = tokens, tokens
    attended = flash_attn_varlen_func(q, k, v, ends, ends, *longest, dropped, scaling, window_size=window)
    return attended[..., :width].unflatten(0, (rows, length)), None


def _no_mask(*positions: Any, attention_mask: Tensor | None = None, **others: Any) -> None:
    if attention_mask is not None:
        raise OptionError(f'"{PACKED}" takes no attention_mask: leave it out, or use "sdpa".')
