"""The passes, in order.  Each rewrites the one coloured graph; ``verify`` runs after each."""

from __future__ import annotations

from torch import fx

from fxpipe.partition.device import Device
from fxpipe.passes.accumulate import fuse_accumulation
from fxpipe.passes.keep import keep_fewest_bytes
from fxpipe.passes.localise import localise
from fxpipe.passes.recompute import Level, recompute
from fxpipe.passes.reuse import reuse_storage
from fxpipe.passes.sendable import make_sendable
from fxpipe.passes.split_backward import split_backward
from fxpipe.passes.strides import accept_any_strides
from fxpipe.passes.untie import untie
from fxpipe.verify import verify


def run_passes(graph: fx.Graph, device: Device, level: Level | None = None) -> None:
    """``level``: what B makes again of the forward; nothing where it is None."""
    verify(graph, "partition")
    for name, rewrite in (
        ("untie", untie),
        ("split_backward", split_backward),
        ("localise", lambda g: localise(g, device)),
        *([("recompute", lambda g: recompute(g, level))] if level is not None else []),
        ("keep_fewest_bytes", keep_fewest_bytes),
        ("make_sendable", make_sendable),
        ("fuse_accumulation", fuse_accumulation),
        ("accept_any_strides", accept_any_strides),
        ("reuse_storage", reuse_storage),
    ):
        rewrite(graph)
        verify(graph, name)
