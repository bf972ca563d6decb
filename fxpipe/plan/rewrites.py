"""The rules that give a step other kernels than the model's code asks for, each with a proof.

A rule is applied where what it knows makes its result the same function of the model's inputs; the bits may
be those of another kernel.  ``fxpipe.compile(..., without=["causal-masks"])`` leaves one out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from fxpipe.plan.field_types import Size
from fxpipe.strict import at_least

Rule = Literal[
    "causal-masks",
    "empty-masks",
    "batch-masks",
    "batch-branches",
    "joined-sums",
    "repeat-in-kernels",
    "compiled-weights",
    "weights-once",
    "head-chunks",
]
#: What a call of attention needs of its mask: nothing, the rule of causality alone, or all of it.
Mask = Literal["none", "causal", "dense"]

#: What each rule is applied to, and what that does then, where ``{plan}`` is the plan and ``{head}`` says how
#: often its output layers compute their logits.
RULES: Mapping[Rule, tuple[str, str]] = {
    "causal-masks": ("attention", "call the kernel that knows causality, as their masks are causal by value"),
    "empty-masks": ("attention", "have no mask, as theirs masks nothing"),
    "batch-masks": ("attention", "have programs of their own for batches without padding"),
    "batch-branches": (
        "question of the model's code",
        "has programs of its own for each answer of a batch, without the ops of the other",
    ),
    "joined-sums": ("sum over lanes", "with those that they are added to, as one"),
    "repeat-in-kernels": ("op", "of the forward, again in kernels of the backward instead of saved results"),
    "compiled-weights": ("op", "between additions to gradients, in fused kernels"),
    "weights-once": ("op", "on parameters alone, once a step instead of for each microbatch"),
    "head-chunks": ("output layer", "in {plan.head_chunks} parts of the tokens, {head}"),
}
#: Rules that an option asks for, and its value that leaves them out.
ASKED: Mapping[Rule, str] = {"head-chunks": "head_chunks=1"}


@dataclass(frozen=True)
class Rewrite:
    """A rule that was applied to ``ops`` ops of a microbatch.

    ``seconds``, ``bytes``: what a microbatch takes less on one device, by analytic costs, where they are
    known.
    """

    rule: Rule
    ops: Annotated[int, at_least(1)]
    seconds: Annotated[float, at_least(0)] = 0.0
    bytes: Size = 0
