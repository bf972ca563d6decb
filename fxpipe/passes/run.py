"""The passes, in order.  Each rewrites the one coloured graph; ``verify`` runs after each."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxpipe.cost.device import Device
from fxpipe.ir.verify import verify
from fxpipe.passes.accumulate import fuse_accumulation
from fxpipe.passes.contiguous import make_sendable
from fxpipe.passes.inplace import reuse_storage
from fxpipe.passes.keep_for_weight import keep_fewest_bytes
from fxpipe.passes.recompute import Level, recompute
from fxpipe.passes.sink_cheap_values import localise
from fxpipe.passes.split_backward import split_backward
from fxpipe.passes.strides import accept_any_strides
from fxpipe.passes.untie import untie


def prepare(graph: fx.Graph, device: Device) -> None:
    """The passes that are the same whatever B makes again of the forward."""
    verify(graph, "partition")
    _run(
        graph,
        ("untie", untie),
        ("split_backward", split_backward),
        ("localise", lambda g: localise(g, device)),
    )


def finish(graph: fx.Graph, level: Level | None = None) -> None:
    """The others.  ``level``: what B makes again of the forward; nothing where it is None."""
    _run(
        graph,
        *([("recompute", lambda g: recompute(g, level))] if level is not None else []),
        ("keep_fewest_bytes", keep_fewest_bytes),
        ("make_sendable", make_sendable),
        ("fuse_accumulation", fuse_accumulation),
        ("accept_any_strides", accept_any_strides),
        ("reuse_storage", reuse_storage),
    )


def _run(graph: fx.Graph, *passes: tuple[str, Callable[[fx.Graph], None]]) -> None:
    for name, rewrite in passes:
        rewrite(graph)
        verify(graph, name)
