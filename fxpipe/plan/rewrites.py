"""The rules that give a step other kernels than the model's code asks for, each with a proof.

A rule is applied where the values that it knows make its result the same function of the model's inputs; the
bits may be those of another kernel.  ``fxpipe.compile(..., without=["causal-masks"])`` leaves one out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from fxpipe.plan.tensors import Size
from fxpipe.strict import at_least

Rule = Literal["causal-masks", "empty-masks", "batch-masks"]
#: What a call of attention needs of its mask: nothing, the rule of causality alone, or all of it.
Mask = Literal["none", "causal", "dense"]

#: What each rule does, as it is told of the ops that it was applied to.
RULES: Mapping[Rule, str] = {
    "causal-masks": "call the kernel that knows causality, as their masks are causal by value",
    "empty-masks": "have no mask, as theirs masks nothing",
    "batch-masks": "have programs of their own for batches without padding",
}


@dataclass(frozen=True)
class Rewrite:
    """A rule that was applied to ``ops`` ops of a microbatch.

    ``seconds``, ``bytes``: what a microbatch takes less on one device, by analytic costs.
    """

    rule: Rule
    ops: Annotated[int, at_least(1)]
    seconds: Annotated[float, at_least(0)] = 0.0
    bytes: Size = 0
