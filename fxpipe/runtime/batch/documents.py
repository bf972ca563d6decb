"""What attention of packed documents computes of a microbatch, relative to attention to all of its tokens.

    documents of 700, 300 and 24 tokens in 1024   ──►   (700² + 300² + 24²) / 1024², 9 of 16 parts

The order of a batch depends on it, and no result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxpipe.plan.step import POSITIONS, SHARES, Documents, StepSpec
from fxpipe.runtime.batch.lengths import are_listed, parts_of
from fxpipe.runtime.batch.microbatches import given_leaves


def shares_of(spec: StepSpec, batch: object, lengths: Sequence[Mapping[str, int] | None]) -> list[int]:
    """Per microbatch of a list the parts of ``SHARES`` that its documents are, rounded up; all of them where
    that is not known here: of a batch as one, and where the leaf is missing or on an accelerator, for whose
    queue a step does not wait.

    lengths: of each microbatch, None where they are not known.
    """
    documents, parts = spec.documents, parts_of(spec, batch)
    if documents is None or not are_listed(batch, spec):
        return [SHARES] * len(lengths)
    leaves = (given_leaves(spec.batch, part).get(documents.leaf) for part, _ in parts)
    tokens = (0 if each is None else spec.tokens([each]) for each in lengths)
    return [_share(documents, leaf, number) for leaf, number in zip(leaves, tokens, strict=True)]


def has_several(spec: StepSpec, batch: object) -> bool:
    """Whether a row of positions on the CPU has several documents: it begins at 0, and does so again."""
    for part, _ in parts_of(spec, batch):
        leaf = given_leaves(spec.batch, part).get(POSITIONS)
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.dim() == 2:
            begins = leaf == 0
            if (begins[:, :1] & begins[:, 1:]).any():
                return True
    return False


def agreed_shares(number: int, ranks: Sequence[Sequence[int]]) -> list[int]:
    """The shares of so many microbatches, by what each rank says: one that does not know them says all, and
    one without leaves may have another number."""
    return [min(of_all) for of_all in zip(*(rank for rank in ranks if len(rank) == number), strict=True)]


def _share(documents: Documents, leaf: object, tokens: int) -> int:
    # What else it may be, the check of the batch tells.
    if not tokens or not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu" or leaf.numel() < 2:
        return SHARES
    values = leaf.reshape(-1).long()
    if documents.are_positions:
        begins = 1 + (values.diff() != 1).nonzero()[:, 0]
        values = torch.cat([begins.new_zeros(1), begins, begins.new_tensor([len(values)])])
    return share_of(values.diff().clamp(min=0).tolist(), tokens)


def share_of(documents: Sequence[int], tokens: int) -> int:
    """The parts for documents of these lengths in so many tokens."""
    squares = sum(n * n for n in documents)
    return min(SHARES, max(1, -(-squares * SHARES // tokens**2)))
