"""Answers for torch.distributed in a trace: the world of a model is that of its replicas.

    get_world_size()     ──►  the number of replicas
    get_world_size(g)    ──►  of those in the script's own group; its other processes run stages of theirs
    get_rank()           ──►  the replica; the forward must run the same ops with any
    a collective         ──►  nothing, or a copy, as of one process; an error if there are several replicas
    os.environ["RANK"]   ──►  what the functions above say, as of WORLD_SIZE and torchrun's other names

The processes that run the stages of a replica are no part of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from fxpipe.capture.lanes.collectives import Ended
from fxpipe.capture.provenance import Provenance
from fxpipe.errors import CaptureError
from fxpipe.ir.compat import pytree

_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier")
_COPIES = (
    *("allgather", "allgather_coalesced", "gather", "scatter", "reduce_scatter", "alltoall", "alltoall_base"),
    *("_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"),
    "all_to_all_single",
)  # torch 2.13 has other names for some
#: The variables by which torchrun tells a process the same.
_RANKS, _SIZES = ({f"{whose}{what}" for whose in ("", "LOCAL_", "ROLE_")} for what in ("RANK", "WORLD_SIZE"))
_ProcessGroup = torch.distributed.ProcessGroup


class World(_ProcessGroup):
    """The process group of a trace.  ``replica``: that of this run.  ``asked``: the first place that asked
    for it."""

    def __init__(self, replicas: int | None, provenance: Provenance):
        """replicas: None where their number is chosen later."""
        super().__init__(0, replicas or 1)  # type: ignore[call-arg]
        self._replicas, self._provenance = replicas, provenance
        self._refusals = provenance.answers.refusals
        self.replica, self.asked = 0, ""

    def rank(self) -> int:
        self.asked = self.asked or self._provenance.place()
        return self.replica

    def size(self) -> int:
        if self._replicas is None:
            self._refusals.refuse_code(
                "asks torch.distributed for the number of processes",
                "It is that of the replicas, which is not chosen yet: give replicas=.",
            )
        return self._replicas

    @property
    def group_name(self) -> Any:
        self.refuse_to_communicate("a functional collective")

    def again(self) -> None:
        """Answer as another replica."""
        self.replica = (self._replicas or 2) - 1

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Let the variables of the environment that torchrun sets have the answers of this world."""
        world, kind = self, type(os.environ)

        class Environment(kind):  # type: ignore[misc, valid-type]
            def __getitem__(self, name: str) -> object:
                if name not in _RANKS | _SIZES or (world._replicas == 1 and name not in {*self}):
                    return super().__getitem__(name)
                return str(world.rank() if name in _RANKS else world.size())

        os.environ.__class__ = Environment
        try:
            yield
        finally:
            os.environ.__class__ = kind

    def refuse_to_communicate(self, name: str) -> NoReturn:
        self._refusals.refuse_code(
            f"communicates with other processes ({name})",
            "A program runs the forward of one replica, and replicas exchange gradients alone: take it out "
            "of the forward. For a mean over all replicas let loss_fn return (sum, count).",
        )

    def end(self, difference: str) -> None:
        """Raise CaptureError where another replica would run other ops, if there are several.

        difference: of what that runs, as a sentence; "" for none.
        """
        if self.asked and difference and self._replicas != 1:
            raise CaptureError(
                f"The model's code runs other ops on another replica: it asks for its rank, at {self.asked}. "
                f"All replicas run one program: take that out of the forward. ({difference}.)"
            )


def _collective(name: str) -> Callable[..., object]:
    def run(world: World, *args: object, **kwargs: object) -> object:
        if world._replicas != 1 or name not in (*_IN_PLACE, *_COPIES):
            world.refuse_to_communicate(name.strip("_"))
        if name in _COPIES:
            for to, source in zip(*map(pytree.tree_leaves, args[:2]), strict=True):
                to.copy_(source.reshape(to.shape))
        return Ended()

    return run


for _name in {*dir(_ProcessGroup)} - {*vars(World)}:
    is_public = not _name.startswith("_") and callable(getattr(_ProcessGroup, _name))
    if _name in _COPIES or (is_public and _name.islower()):
        setattr(World, _name, _collective(_name))
