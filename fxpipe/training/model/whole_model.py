"""What a script changes of a model that is whole, between ``synchronize`` and the next step.

Each rank trains its own part of it, and drops the rest: a change by one rank alone, as of weights that rank 0
loads, would reach the part of that rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxpipe.plan.dtensors import local
from fxpipe.runtime.job.digest import digest


class WholeModel:
    """Digests of the tensors as ``synchronize`` has left them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._then = _digests(tensors)

    def changed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The digests of those that have other values now, by name."""
        now = _digests({name: tensor for name, tensor in tensors.items() if name in self._then})
        return {name: value for name, value in sorted(now.items()) if value != self._then[name]}


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    there = {name: local(tensor).detach() for name, tensor in tensors.items() if not tensor.is_meta}
    if not there:
        return {}
    values: list[int] = torch.stack([digest(tensor) for tensor in there.values()]).tolist()
    return dict(zip(there, values, strict=True))
