"""Compares a forward with a second run of it in the same trace, on the Python state that the first run left.

before: the ops of the first step; the ops of the forward as the next step would run it
after:  an error if the second run reads a result of the first; a warning if its ops differ otherwise

A program runs the ops of the first step at every step.  Both runs read parameters, buffers and the microbatch
from the same placeholders.  Values that depend on none of them are compared as numbers, since models keep
tables; ops on which no result depends are left out, since models keep records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import fx

from fxpipe.capture.functional import KeepsState
from fxpipe.capture.reads.varying_values import OVERWRITES, Readers, Values
from fxpipe.capture.state.replay import ForwardRun
from fxpipe.ir.graph import Input, Origin
from fxpipe.ir.storage import leading_to


def difference(
    first: ForwardRun,
    second: ForwardRun,
    inputs: Sequence[tuple[Input, torch.Tensor]],
    kept: Mapping[fx.Node, str],
) -> str:
    """How the second run in the running trace differs from the first, as a sentence; empty if it does not.

    inputs: the kind of each placeholder of the graph, and its real tensor, in order.
    kept: nodes of the first run -> the name under which the model keeps its tensor.
    Raises KeepsState where the second run reads a result of the first.
    """
    if first == second:  # so that nothing else was recorded
        return ""
    values = Values(inputs, first.results)
    ops = [values.relevant(run.ops, run.results.values()) for run in (first, second)]
    again = set(second.ops)
    for op in ops[1]:
        for x in values.reads(op):
            if x in values.varying and x.op == "call_function" and x not in again:
                raise _carried(x, op, kept)
    same: dict[fx.Node, fx.Node] = {}  # ops and memory of the second run -> those of the first

    def alike(a: object, b: object, at: Readers) -> bool:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            if a in values.varying or b in values.varying:
                number = values.number(b)
                if b not in same and number is not None and number == values.number(a):  # of its empty memory
                    same.setdefault(values.root(b), values.root(a))
                    return same[values.root(b)] is values.root(a)
                return same.get(b, b) is a
            if values.equal(a, b, at):
                return True
            of_a, of_b = (leading_to([x], lambda node: node.op == "call_function") for x in (a, b))
            earlier = of_b - again - (of_a - {a})
            if earlier:
                raise _carried(next((x for x in earlier if x in kept), b), at[1] or b, kept)
            return False
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(alike(x, y, at) for x, y in zip(a, b, strict=True))
        return type(a) is type(b) and bool(a == b or (a != a and b != b))

    for a, b in zip_longest(*ops):
        if a is None or b is None or a.target is not b.target or a.meta.get("grad") != b.meta.get("grad"):
            return _differs(_shown(a), _shown(b))
        skipped = 1 if b.target in OVERWRITES and b.args[0] not in values.reads(b) else 0
        if skipped and (b.args[0] in again or b.args[0].op == "placeholder"):  # type: ignore[union-attr]
            skipped = 0
        old, new = ((*n.args[skipped:], *sorted(n.kwargs.items())) for n in (a, b))
        if not alike(old, new, (a, b)):
            return _differs(_shown(a), _shown(b))
        same[b] = a
    for name in dict.fromkeys([*first.results, *second.results]):
        a, b = first.results.get(name), second.results.get(name)
        if (a is None) != (b is None):
            return _differs(*(f"{name} as it is" if x is None else f"another {name}" for x in (a, b)))
        if a is not None and b is not None and not alike(a, b, (None, None)):
            return _differs(f"{name} from {_shown(a)}", f"from {_shown(b)}")
    return ""


def _differs(now: str, then: str) -> str:
    return f"The forward runs other ops when it runs again: {then} instead of {now}"


def _shown(op: fx.Node | None) -> str:
    """An op with its numbers, and its place in the model."""
    if op is None:
        return "nothing"
    packet = getattr(op.target, "overloadpacket", op.target)
    arguments = ", ".join("…" if isinstance(x, fx.Node) else str(x) for x in op.args)
    return f"{getattr(packet, '__name__', op.name)}({arguments}) ({op.meta.get('origin', Origin())})"


def _carried(value: fx.Node, op: fx.Node, kept: Mapping[fx.Node, str]) -> KeepsState:
    source, place = (x.meta.get("origin", Origin()) for x in (value, op))
    kind = f"in {kept[value]}" if value in kept else f"of {source}"
    return KeepsState(
        f"The forward keeps a result {kind}, and reads it when it runs again, at {place}. A program carries "
        "from step to step the tensors that the model's modules hold when it is compiled: run the model on "
        "one batch before you compile it, or make it a buffer of the shape and dtype that it has later on "
        "(register_buffer)."
    )
