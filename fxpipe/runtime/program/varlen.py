"""Attention of packed documents as one op: each position looks at those of its own document alone.

    queries, keys, values [tokens, heads, size]
    boundaries [documents + 1]: document i has the positions from boundaries[i] to boundaries[i + 1]

The number of boundaries is fixed, as all shapes of a step: the last one is repeated where there are fewer
documents.  Positions behind it are padding, whose results are 0.  On a GPU torch's kernel of FlashAttention
runs in half precision; elsewhere the documents come one by one, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


@torch.library.custom_op("fxpipe::varlen_attention", mutates_args=())
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries_q: Tensor,
    boundaries_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    """The result, and by head and position the logarithm of the sum of what softmax divides by.

    left, right: how far a position looks back and ahead, -1 for any distance; of a document with more keys
    than queries the last ones stand side by side.  The result lies without gaps, however the queries do.
    """
    if _is_flash(query):
        kernel = _kernels()._varlen_attn
        ends, last = _trimmed(boundaries_q, boundaries_k)
        # Whether it is causal, the scale, the window, and whether heads of queries share those of keys.
        options = left < 0 and right == 0, scale, [left, right], query.shape[1] != key.shape[1]
        result, sums, _ = kernel(query, key, value, *ends, max_q, max_k, *options)
        result[last[0] :].zero_()
        return result.contiguous(), sums
    result, sums = query.new_zeros(query.shape), _sums_like(query)
    for at_q, at_k, seen in _documents(query, boundaries_q, boundaries_k, left, right):
        q, k, v = _by_head(query[at_q]), _by_head(key[at_k]), _by_head(value[at_k])
        scores = _scores(q, k, scale, seen)
        sums[:, at_q] = total = scores.logsumexp(-1).to(sums.dtype)
        result[at_q] = _weighted(_weights(scores, total), v).transpose(0, 1).to(query.dtype)
    return result, sums


@torch.library.custom_op("fxpipe::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    result: Tensor,
    sums: Tensor,
    boundaries_q: Tensor,
    boundaries_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    if _is_flash(query):
        kernel = _kernels()._varlen_attn_backward
        ends, last = _trimmed(boundaries_q, boundaries_k)
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
        options = left < 0 and right == 0, state, scale, [left, right]
        values = gradient.contiguous(), query, key, value, result, sums
        dq, dk, dv = kernel(*values, *ends, max_q, max_k, *options)
        for gradient_of, end in ((dq, last[0]), (dk, last[1]), (dv, last[1])):
            gradient_of[end:].zero_()
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    dq, dk, dv = (x.new_zeros(x.shape) for x in (query, key, value))
    for at_q, at_k, seen in _documents(query, boundaries_q, boundaries_k, left, right):
        q, k, v = _by_head(query[at_q]), _by_head(key[at_k]), _by_head(value[at_k])
        g, out = _by_head(gradient[at_q]), _by_head(result[at_q])
        weights = _weights(_scores(q, k, scale, seen), sums[:, at_q])
        group = len(q) // len(k)
        seen_by = g @ v.repeat_interleave(group, 0).transpose(1, 2)
        of_scores = weights * (seen_by - (g * out).sum(-1, keepdim=True)) * scale
        dq[at_q] = _weighted(of_scores, k).transpose(0, 1).to(dq.dtype)
        for to, of in ((dk, of_scores.transpose(1, 2) @ q), (dv, weights.transpose(1, 2) @ g)):
            to[at_k] = of.unflatten(0, (len(k), group)).sum(1).transpose(0, 1).to(to.dtype)
    return dq, dk, dv


def _is_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in _HALF


def _kernels() -> Any:
    """torch's ops, which a module registers that few programs need."""
    import torch.nn.attention.varlen

    return torch.ops.torch_attn


def _trimmed(boundaries_q: Tensor, boundaries_k: Tensor) -> tuple[list[Tensor], list[int]]:
    """The boundaries without repeats, for each of which a kernel would begin blocks, and the last ones,
    behind which it writes nothing."""
    both = torch.stack([boundaries_q, boundaries_k]).unique_consecutive(dim=1).to(torch.int32)
    return [*both], both[:, -1].tolist()


def _sums_like(query: Tensor) -> Tensor:
    dtype = torch.float32 if query.dtype in _HALF else query.dtype
    return query.new_zeros((query.shape[1], query.shape[0]), dtype=dtype)


def _documents(
    query: Tensor, boundaries_q: Tensor, boundaries_k: Tensor, left: int, right: int
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """The queries and keys of each document, and which of them each query looks at; None for all."""
    ends = [*zip(boundaries_q.tolist(), boundaries_k.tolist(), strict=True)]
    for (begin_q, begin_k), (end_q, end_k) in pairwise(ends):
        if end_q > begin_q and end_k > begin_k:
            queries, keys = end_q - begin_q, end_k - begin_k
            seen = None
            if left >= 0 or right >= 0:
                at = torch.arange(keys, device=query.device)
                ahead = at - torch.arange(keys - queries, keys, device=query.device)[:, None]
                seen = torch.ones_like(ahead, dtype=torch.bool)
                seen = seen if right < 0 else seen & (ahead <= right)
                seen = seen if left < 0 else seen & (ahead >= -left)
            yield slice(begin_q, end_q), slice(begin_k, end_k), seen


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(0, 1).to(torch.float32 if x.dtype in _HALF else x.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, seen: Tensor | None) -> Tensor:
    scores: Tensor = q @ k.repeat_interleave(len(q) // len(k), 0).transpose(1, 2) * scale
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    # A query that looks at nothing has no weights.
    return (scores - sums.unsqueeze(-1)).exp().nan_to_num(0.0)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    weighted: Tensor = weights @ values.repeat_interleave(len(weights) // len(values), 0)
    return weighted


@varlen_attention.register_fake
def _(query: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), _sums_like(query)


@varlen_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *boundaries_and_more = inputs
    boundaries, ctx.options = boundaries_and_more[:2], boundaries_and_more[2:]
    ctx.save_for_backward(query, key, value, *output, *boundaries)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *gradients_of, boundaries_q, boundaries_k = ctx.saved_tensors
    ends = boundaries_q, boundaries_k
    return *varlen_attention_backward(gradient, *gradients_of, *ends, *ctx.options), *[None] * 7


varlen_attention.register_autograd(_backward, setup_context=_setup)
