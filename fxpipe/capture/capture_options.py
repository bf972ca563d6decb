"""Says what of a step is captured, and what the trace may know."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.plan.branches import Branch
from fxpipe.plan.rewrites import RULES, Mask, Rule


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """The options of a capture.  ``gradients``: False traces the loss alone.
    ``fixed``: names of the example's tensors whose values are part of the program.
    ``assumed``: leaf -> the number that all of its elements are in the steps that the program is run for.
    ``branch``: the answer of the microbatches for which the program is.
    ``outputs``: names of values of the forward that the graph gives as well.
    ``over_batch``: whether the means of the loss are those of the batch (``batch_means.py``).
    ``rules``: those of ``plan/rewrites.py`` that may be applied.
    ``masks``: what the attentions may need of their masks at least, in order (``attention_masks.py``).
    ``fused_attention``: whether dropout within attention is left out, for which the CPU, unlike accelerators,
    has no kernel: for costs alone.
    ``lengths``: whether to note what the forward's Python compares with sizes (``length_reads.py``).
    ``replicas``: their number; None where it is chosen later.
    ``has_group``: whether torch.distributed says that there is a process group, if there is one replica.
    """

    gradients: bool = True
    fixed: Sequence[str] = ()
    assumed: Mapping[str, float] = field(default_factory=dict)
    branch: Branch | None = None
    outputs: Sequence[str] = ()
    over_batch: bool = True
    rules: Collection[Rule] = tuple(RULES)
    masks: tuple[Mask, ...] | None = None
    fused_attention: bool = False
    lengths: bool = False
    replicas: int | None = 1
    has_group: bool = False


CAPTURE_ALL = CaptureOptions()
