"""Makes the tensors that several ranks hold equal: tied, shared and frozen parameters, buffers, constants.

Ranks that build their model without a seed begin with different values, and each trains its own copy: a tied
weight has the same gradient on all of its ranks, and would stay different for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from fxpipe.plan.artifact import RankTensors, holders
from fxpipe.runtime.job.process import Process


def share_values(process: Process, tensors: Sequence[RankTensors], own: Mapping[str, torch.Tensor]) -> None:
    """Give each tensor that several ranks hold the values of the first of them.  All ranks must call this.

    tensors: the names by rank.  own: the tensors of this rank, overwritten in place.  Those without values on
    one of the ranks (on the meta device) are left out.
    """
    empty = process.gather(json.dumps([name for name, t in own.items() if t.is_meta]).encode())
    without = {name for names in empty for name in json.loads(names)}
    for name, (first, *others) in holders(held.names for held in tensors).items():
        if name in without:
            continue
        for rank in others:
            if process.rank in (first, rank):
                process.send_to(own[name].detach(), first, rank)
