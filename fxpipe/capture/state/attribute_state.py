"""Finds the state that modules keep in plain attributes: hidden states, memories, averages.

before: a trace in which tensors of attributes are constants, and in which the forward replaced some or wrote
        to them
after:  the names of those, which the next trace takes as buffers
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx, nn

from fxpipe.capture.functional import memory_roots, overwritten
from fxpipe.capture.inputs import TracedInput
from fxpipe.capture.state.registered import Registered
from fxpipe.capture.state.replaced_buffers import kind_of
from fxpipe.errors import CaptureError
from fxpipe.ir import compat
from fxpipe.ir.graph import Origin
from fxpipe.plan.attribute_state import kept_slots


class Constants:
    """The tensors in plain attributes of a model that are constants of a trace, as they were before it.

    kept: the names of those that are buffers of the trace.
    """

    def __init__(self, model: nn.Module, kept: Collection[str]):
        tensors = [(name, slot, slot.get()) for name, slot in kept_slots(model).items() if name not in kept]
        self._before = [
            (name, slot, x)
            for name, slot, x in tensors
            if x is not None and not (x.requires_grad and x.is_leaf)  # which is trained
        ]
        self._without = [x for _, _, x in self._before if not x.requires_grad]

    def detach(self) -> None:
        """Take away the history of a gradient that they got by a write to a view of them."""
        for x in self._without:
            if x.requires_grad and x._base is None:  # views cannot be detached in place
                x.detach_()

    def replaced(self) -> dict[str, torch.Tensor]:
        """The new tensors in the places of those that ops read, if they have the same shape and dtype; and
        those that were moved there from other places."""
        new = {name: now for name, before, now in self._changed() if kind_of(now) == kind_of(before)}
        moved = {id(now) for now in new.values()}
        return {name: before for name, _, before in self._before if id(before) in moved} | new

    def reshaped(self) -> str:
        """A sentence about one of another shape, dtype or device; empty if there is none."""
        for name, before, now in self._changed():
            if kind_of(now) != kind_of(before):
                return (
                    f" It changes {name!r} from {kind_of(before)} to {kind_of(now)}: run the model on "
                    "so many batches that shapes stay the same, or begin with the last ones."
                )
        return ""

    def _changed(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        root, nodes = compat.traced_constants(), compat.traced_graph().find_nodes(op="get_attr")
        read = {id(getattr(root, node.target)) for node in nodes}
        for name, slot, before in self._before:
            now = slot.get()
            if now is not None and now is not before and id(before) in read:
                yield name, before, now

    def like(self, written: torch.Tensor) -> dict[str, bool]:
        """Find those in the same attribute of modules of the same class as a tensor that is written to: the
        same code may write to them.  As for ``KeepsState``."""
        attributes = {(type(slot.module), slot.keys[0]) for _, slot, x in self._before if x is written}
        return {
            name: False for name, slot, _ in self._before if (type(slot.module), slot.keys[0]) in attributes
        }


def unwritten(graph: fx.Graph, tensors: Sequence[Registered]) -> set[str]:
    """The names of the kept tensors of a trace that no op writes to.  Changed ones get new tensors, so that
    others may be in their memory."""
    inputs = dict(zip(graph.find_nodes(op="placeholder"), tensors, strict=False))
    left = {r.name for r in tensors if r.is_kept}
    if left:
        roots = memory_roots(graph)
        written = {roots[x] for node in graph.nodes for x in overwritten(node)}
        left -= {inputs[x].name for x in written if x in inputs}
    return left


def with_history(pairs: Sequence[tuple[Registered, TracedInput]]) -> list[tuple[Registered, torch.Tensor]]:
    """Find the kept tensors that come with a gradient's history from the step before."""
    carried = [(r, x.fake) for r, x in pairs if r.is_kept and x.fake.requires_grad]
    for r, fake in carried:
        if not fake.is_leaf:
            raise carries_gradients(r)
    return carried


def carries_gradients(state: Registered) -> CaptureError:
    now = state.now()[0]
    node = None if now is None else compat.traced_node(now)
    if node is not None and node.op == "placeholder":
        roots = memory_roots(node.graph)
        node = next(n for n in reversed(node.graph.nodes) if node in {roots[x] for x in overwritten(n)})
    place = Origin() if node is None else node.meta.get("origin", Origin())
    return CaptureError(
        f"The forward keeps {state.name!r} with its gradient's history ({place}), and the next step's loss "
        "depends on it. Its backward would go on into the step before, whose values are gone: keep it "
        "without (.detach())."
    )
