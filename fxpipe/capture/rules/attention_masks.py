"""Masks of attention by value, where the model calls it: before torch chooses a kernel.

    a mask of no input, equal to the causal one  ──►  is_causal=True, without a mask
    ... that leaves everything in                 ──►  without a mask
    ... of buffers                                ──►  likewise, and an ``expect`` that it is so in each step

A pass of the graph would come too late: kernel, saved values and backward are fixed by then.  Models that ask
whether they are traced build a dense mask where in eager they call attention with ``is_causal``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fxpipe.capture.reads.example import BLOCK
from fxpipe.capture.reads.specialization import Specialization
from fxpipe.ir import compat
from fxpipe.ir.graph import Kind
from fxpipe.plan.rewrites import Mask, Rule
from fxpipe.runtime.program.checks import expect_op
from fxpipe.runtime.torch_private import writes_to

#: The rule that drops a mask which says this.
RULES: dict[Mask, Rule] = {"none": "empty-masks", "causal": "causal-masks"}

#: What masks say that ops make from literals alone, by the text of these ops.
_SAID: dict[str, Mask] = {}

_attention = F.scaled_dot_product_attention


Known = fx.Node | torch.Tensor
"""A mask that the trace computes, or a tensor that the model keeps, or has made without torch."""


@dataclass
class Masks:
    """The masks of a forward: what each call with one needs, in order, and the bytes that no call needs.

    ``leaves``: those of the microbatch that masks are made from, perhaps with buffers, and with nothing else.
    ``checked``: the buffers and frozen parameters that the step checks to lead to such masks.
    """

    needed: list[Mask] = field(default_factory=list)
    leaves: set[str] = field(default_factory=set)
    checked: set[str] = field(default_factory=set)
    dropped: dict[Known, tuple[Mask, int]] = field(default_factory=dict)
    dense: set[Known] = field(default_factory=set)

    def freed(self, mask: Mask) -> int:
        """The bytes of the masks that say this, and that no call needs."""
        return sum(n for node, (says, n) in self.dropped.items() if says == mask and node not in self.dense)


class AttentionMasks(TorchFunctionMode):
    """While entered, drops masks that say what the kernel knows.

    answers: has the values of tensors, and what they are made from.
    allowed: the rules that may be applied.
    agreed: what the calls with a mask may need at least, in order; None to go by the values alone.
    is_fused: as ``CaptureOptions.fused_attention``.
    changing: the names of buffers that the step changes, as far as they are known.
    ``masks``: of the last run.
    """

    def __init__(
        self,
        answers: Specialization,
        allowed: Collection[Rule],
        agreed: Sequence[Mask] | None,
        is_fused: bool = False,
        changing: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._is_fused, self._changing = is_fused, changing
        self._answers, self._allowed, self._agreed = answers, allowed, agreed
        self._said: dict[tuple[Known, int], tuple[Mask, frozenset[str]]] = {}
        self._expected: set[tuple[Known, int]] = set()
        self.masks = Masks()

    def begin(self) -> None:
        """The model's forward begins."""
        self.masks = Masks()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if func is _attention:
            return self._attended(*args, **kwargs)
        if func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        with mock.patch.object(F, _attention.__name__, self._attended):  # no mode sees what it calls
            return func(*args, **kwargs)

    def _attended(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        if attn_mask is not None and not is_causal:  # with both, torch raises its error
            mask = self._needed_of(attn_mask, query.shape[-2] == key.shape[-2])
            is_causal = mask == "causal"
            attn_mask = attn_mask if mask == "dense" else None
        if self._is_fused:
            return _fused(query, key, value, attn_mask, is_causal, **others)
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, **others)

    def _needed_of(self, tensor: torch.Tensor, square: bool) -> Mask:
        """The part of its mask that a call needs.  square: whether there are as many queries as keys, without
        which kernels differ in what is causal."""
        is_fake = isinstance(tensor, compat.FakeTensor)
        node: Known | None = compat.traced_node(tensor) if is_fake else tensor
        if node is None or tensor.requires_grad:
            return self._noted(node, tensor, "dense")
        at = node, writes_to(tensor)  # layers share a mask, which an op in place may have changed in between
        if at not in self._said:
            self._said[at] = self._read(tensor, is_fake)
        says, inputs = self._said[at]
        call = len(self.masks.needed)
        is_agreed = self._agreed is None or self._agreed[call : call + 1] == (says,)
        if RULES.get(says) not in self._allowed or not is_agreed or (says == "causal" and not square):
            says = "dense"
        if inputs and says != "dense" and at not in self._expected:
            self._expected.add(at)
            self.masks.checked |= inputs
            _expect(tensor, says, inputs)
        return self._noted(node, tensor, says)

    def _noted(self, node: Known | None, tensor: torch.Tensor, says: Mask) -> Mask:
        if node is not None and says == "dense":
            self.masks.dense.add(node)
        elif node is not None:
            self.masks.dropped[node] = says, tensor.numel() * tensor.itemsize
        self.masks.needed.append(says)
        return says

    def _read(self, tensor: torch.Tensor, is_fake: bool) -> tuple[Mask, frozenset[str]]:
        """What a mask says, and the buffers and frozen parameters that it is made from."""
        sources = self._answers.sources(tensor)
        lasting = frozenset(x.name for x in sources & self._answers.lasting)
        of_batch = {x.name for x in sources if x.kind is Kind.BATCH}
        if len(of_batch) + len(lasting) == len(sources):
            self.masks.leaves |= of_batch
        if not sources:
            constant = self._answers.constant(tensor) if is_fake else ("", _blocks(tensor))
            return "dense" if constant is None else _said_before(*constant), frozenset()
        value = self._answers.between_steps(tensor)
        if value is None or not lasting.isdisjoint(self._changing):
            return "dense", frozenset()
        return _said_by(_blocks(value)), lasting


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None = None,
    **others: Any,
) -> torch.Tensor:
    """Attention for which the CPU, too, has a kernel: see ``CaptureOptions.fused_attention``."""
    width, of_value = query.shape[-1], value.shape[-1]
    scale = width**-0.5 if scale is None else scale
    if width != of_value:
        query, key, value = (F.pad(x, (0, max(width, of_value) - x.shape[-1])) for x in (query, key, value))
    bias = mask if mask is not None and mask.requires_grad else None
    mask = mask if bias is None else bias.detach()
    out = _attention(query, key, value, mask, 0.0, is_causal, scale=scale, **others)[..., :of_value]
    return out if bias is None else out + 0 * bias.sum()  # a gradient of its size


def _expect(mask: torch.Tensor, says: Mask, inputs: Iterable[str]) -> None:
    """Let each step check that a mask says what it said to the trace.  inputs: the names of what it is made
    from."""
    expected = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device)
    if says == "causal":
        expected = expected.tril()
    if mask.dtype is not torch.bool:
        expected = torch.zeros_like(mask).masked_fill(~expected, -torch.inf)
    # Of any layer, as the code of all layers is one function.
    names = ", ".join(sorted({re.sub("[0-9]+", "*", name) for name in inputs}))
    was = "was causal" if says == "causal" else "masked nothing"
    text = (
        f"The mask of attention made from {names} {was} when the model was compiled, and is another one now. "
        f"Compile the model again, or with without=[{RULES[says]!r}]."
    )
    expect_op((mask == expected).all(), [True], text)


def _blocks(mask: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a mask by its queries, as a comparison takes as much memory again."""
    rows = mask.shape[-2] if mask.dim() > 1 else 0
    yield from mask.split(max(1, rows * BLOCK // mask.numel()), -2) if rows else [mask]


def _said_before(recipe: str, blocks: Iterable[torch.Tensor]) -> Mask:
    """Read a mask, or know it from another trace: of 65,536 tokens a reading takes many seconds."""
    if recipe not in _SAID:
        says = _said_by(blocks)
        if not recipe:
            return says
        _SAID[recipe] = says
    return _SAID[recipe]


def _said_by(blocks: Iterable[torch.Tensor]) -> Mask:
    """Read a mask [..., queries, keys], in blocks of queries, that is True, or 0 beside -inf, where a query
    may look."""
    says, first = set[Mask]({"none", "causal"}), 0
    with compat.no_modes():
        for mask in blocks:
            if mask.is_meta:  # nothing is known of it; constants are checked later
                return "dense"
            may_look = mask if mask.dtype is torch.bool else mask == 0
            if mask.dtype is not torch.bool and not ((mask == -torch.inf) | may_look).all():
                return "dense"
            if mask.dim() < 2 or not (may_look == _below(mask, first)).all():
                says.discard("causal")
            if not may_look.all():
                says.discard("none")
            if not says:
                return "dense"
            first += mask.shape[-2] if mask.dim() > 1 else 0
    return "none" if "none" in says else "causal"


def _below(mask: torch.Tensor, first: int) -> torch.Tensor:
    """Say where queries of a block may look that see those before them.  first: the place of the first."""
    queries, keys = mask.shape[-2:]
    at = torch.arange(first, first + queries, device=mask.device)
    return at.unsqueeze(1) >= torch.arange(keys, device=mask.device)
