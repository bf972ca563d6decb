"""The verbs of programs: what the text of a program calls of ``rt``, in one table.

``runtime/program/rank.py`` has each as a method on tensors, ``certificate/ranks/`` on terms, under the same
arguments; ``codegen/step/`` writes the calls.  The parser takes no other verb, and the readers of messages
know from the table which argument is the other rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verb:
    """A method of ``rt``.

    arguments: their names, as programs and both runtimes have them; ``*made`` takes any number.
    waits_for: what a rank may wait for within the call; "" where it never waits.
    peer: the argument that is the number of the other rank, or of the root of a collective; "" if none is.
    takes_memory: False where it hands on tensors that are there.
    """

    name: str
    arguments: tuple[str, ...] = ()
    waits_for: str = ""
    peer: str = ""
    takes_memory: bool = True

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of a group call it, in the same order."""
        return "group" in self.arguments


VERBS = {
    verb.name: verb
    for verb in (
        # Ops, and what they read and give.
        Verb("op", ("name",), waits_for="its device"),
        Verb("microbatches", ("batch",)),
        Verb("lengths", ("name",)),
        Verb("layouts", ("messages",)),
        Verb("key", ("microbatch",)),
        Verb("lane_key", ("microbatch", "n", "stride")),
        Verb("once", ("compute", "*tensors"), waits_for="rows of other replicas"),
        Verb("batch_means", ("counts", "batches", "*constants"), waits_for="the sums over the replicas"),
        Verb("add_loss", ("loss", "count"), takes_memory=False),
        Verb("add_output", ("name", "value", "microbatch"), takes_memory=False),
        # Messages: a receive and a collective return what has yet to arrive.
        Verb("receive", ("layouts", "source"), peer="source"),
        Verb("send", ("values", "layouts", "to"), peer="to", takes_memory=False),
        Verb("wait", ("pending",), waits_for="a message"),
        Verb("wait_all", ("pending",), waits_for="messages"),
        Verb("broadcast", ("tensor", "layout", "source", "group"), peer="source"),
        Verb("gather", ("tensor", "layout", "to", "group"), peer="to"),
        Verb("all_gather", ("tensor", "layout", "group")),
        Verb("reduce", ("tensor", "layout", "to", "group"), peer="to"),
        # Saved activations in host memory.
        Verb("offload", ("values", "at")),
        Verb("wait_offload", ("values",), waits_for="a copy"),
        Verb("reload", ("values",)),
        Verb("wait_reload", ("values",), waits_for="a copy"),
        # Parameters and gradients that replicas, or several stages, have in common.
        Verb("gather_parameters", ("bucket",)),
        Verb("wait_parameters", ("bucket",), waits_for="rows of other replicas"),
        Verb("free_parameters", ("bucket",)),
        Verb("sum_over_lanes", ("bucket", "n", "stride")),  # which waits as ops between lanes do
        Verb("reduce_gradients", ("bucket",)),
        Verb("wait_gradients", waits_for="the sums over the replicas"),
        Verb("all_reduce_gradient", ("name", "ranks"), waits_for="the gradients of other ranks"),
        Verb("divide_gradients_by_count", waits_for="the counts of all ranks"),
        # The step.
        Verb("warm_up", ("*made",), waits_for="the verdict on the last update"),
        Verb("finish", waits_for="the loss"),
    )
}  # fmt: skip
#: What programs read of ``rt`` without a call.
ATTRIBUTES = frozenset({
    "buffers", "constants", "grads", "microbatch_count", "own_count", "params", "places", "rank",
})  # fmt: skip
