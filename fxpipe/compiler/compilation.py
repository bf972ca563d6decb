"""What is compiled, and how: what the phases of a compilation have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxpipe.compiler.options import Settings
from fxpipe.plan.meshes import Mesh
from fxpipe.python_state.walk import PythonState


@dataclass(frozen=True, eq=False)
class Compilation:
    """What a user compiles.  ``example``: one microbatch.  ``loss_fn``: as for ``fxpipe.compile``.

    ``device``: of the model.  ``has_group``: whether the script has made torch.distributed's default process
    group.  ``walked``: the Python that the model and ``loss_fn`` reach, if it is known.
    ``has_programs``: whether programs are written; False for a plan of times and memory alone.
    ``fused_attention``: of such a plan, as for ``CaptureOptions``.
    """

    model: nn.Module
    example: Any
    loss_fn: Callable[..., object] | None
    options: Settings
    device: torch.device
    has_group: bool = False
    walked: PythonState | None = None
    has_programs: bool = True
    fused_attention: bool = False

    def on_mesh(self, mesh: Mesh) -> Compilation:
        """The same for another number of ranks, replicas or microbatches."""
        return replace(self, options=replace(self.options, mesh=mesh))
