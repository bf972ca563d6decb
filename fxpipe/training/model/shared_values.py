"""Makes the tensors that several ranks hold equal: tied, shared and frozen parameters, buffers, constants.

Ranks that build their model without a seed begin with different values, and each trains its own copy: a tied
weight has the same gradient on all of its ranks, and would stay different for ever.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence

import torch

from fxpipe.plan.artifact import RankTensors, holders
from fxpipe.runtime.job.process import Process


def share_values(
    process: Process,
    tensors: Sequence[RankTensors],
    tensors_here: Mapping[str, torch.Tensor],
    shards: Container[str] = (),
) -> None:
    """Give each tensor that several processes hold the values of the first.  All must call this.

    tensors: the names by process.  own: the tensors of this one, overwritten in place.  Those without values
    on one of them (on the meta device) are left out.  shards: the names of those of which each lane has
    another share: it gets that of the same lane.
    """
    empty = process.gather(json.dumps([name for name, t in tensors_here.items() if t.is_meta]).encode())
    without = {name for names in empty for name in json.loads(names)}
    for name, holding in holders(rank.names for rank in tensors).items():
        lanes = range(process.lanes if name.tensor in shards else 1)
        for first, *others in (holding[lane :: len(lanes)] for lane in lanes) if name not in without else ():
            for other in others:
                if process.world_rank in (first, other):
                    process.send_to(tensors_here[name].detach(), first, other)
