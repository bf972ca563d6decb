"""Says what of a step is captured, and what the trace may know."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.plan.branches import Branch
from fxpipe.plan.rewrites import RULES, Mask, Rule


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """The options of a capture."""

    gradients: bool = True
    """False traces the loss alone."""
    fixed: Sequence[str] = ()
    """Names of the example's tensors whose values are part of the program."""
    assumed: Mapping[str, float] = field(default_factory=dict)
    """Leaf -> the number that all of its elements are in the steps that the program is run for."""
    branch: Branch | None = None
    """The answer of the microbatches for which the program is."""
    outputs: Sequence[str] = ()
    """The names of values of the forward that the graph gives as well."""
    over_batch: bool = True
    """Whether the means of the loss are those of the batch (``batch_means.py``)."""
    judged: bool = True
    """Whether to look for what joins the rows of a microbatch, and to warn of it (``joins.py``)."""
    rules: Collection[Rule] = tuple(RULES)
    """The rules of ``plan/rewrites.py`` that may be applied."""
    masks: tuple[Mask, ...] | None = None
    """What the attentions may need of their masks at least, in order (``attention_masks.py``)."""
    fused_attention: bool = False
    """Whether dropout within attention is left out, and the gradient of a bias, and heads of keys and values
    are as wide as the wider of them: else the CPU, unlike accelerators, has no kernel.  For costs alone."""
    lengths: bool = False
    """Whether to note what the forward's Python compares with sizes (``length_reads.py``)."""
    replicas: int | None = 1
    """The number of replicas; None where it is chosen later."""
    has_group: bool = False
    """Whether torch.distributed says that there is a process group, if there is one replica."""


CAPTURE_ALL = CaptureOptions()
