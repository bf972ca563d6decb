"""Gives each random op an explicit key, so that its numbers depend on (seed, step, microbatch) alone.

needs:  ``random_position`` of random ops, from the trace
before: native_dropout(x, 0.1, True)                        draws from torch's hidden generator
after:  keyed(key, 3, native_dropout, x, 0.1, True)         key: an input of the step
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpipe.ir.graph import Input, Kind, Origin
from fxpipe.ir.names import identifier
from fxpipe.ir.storage import call_nodes, draws_numbers
from fxpipe.runtime.program.random import keyed


def key_random_ops(graph: fx.Graph) -> None:
    random = [node for node in call_nodes(graph) if draws_numbers(node)]
    if not random:
        return
    # One key for all: the position of each op, in its arguments, tells their numbers apart.
    with graph.inserting_before(call_nodes(graph)[0]):
        key = graph.placeholder(identifier("key"))
    key.meta.update(input=Input(Kind.KEY, "key"), val=None, origin=Origin())
    for node in random:
        op: Any = node.target
        node.args = (key, node.meta["random_position"], op, *node.args)
        node.target = keyed
