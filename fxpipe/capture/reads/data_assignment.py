"""``x.data = y`` in a trace: from then on ``x`` is the tensor ``y``; views of the old ``x`` stay as they are.

A buffer has been replaced then, as by ``self.scale = y``.  A write to it would also change the old views, and
what autograd has saved.
"""

from __future__ import annotations

import torch

from fxpipe.errors import CaptureError
from fxpipe.ir import compat


class DataAssignments:
    """The tensors that were assigned to, each with what it is now, and the place of the assignment."""

    def __init__(self) -> None:
        self._assigned: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}

    def data(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor that was last assigned to this one's ``.data``, if any was."""
        return self._assigned[id(tensor)][1] if id(tensor) in self._assigned else None

    def place(self, tensor: torch.Tensor) -> str:
        """The place of that assignment."""
        return self._assigned[id(tensor)][2]

    def assign(self, tensor: torch.Tensor, data: torch.Tensor, place: str) -> None:
        """Take a tensor as the new data of another one.  place: of the code that assigns, for messages.

        Raises CaptureError for data of another shape, dtype or device.
        """
        if data is tensor:
            return
        for what in ("shape", "dtype", "device"):
            old, new = getattr(tensor, what), getattr(data, what)
            if old != new:
                raise CaptureError(
                    f"The forward assigns to the .data of a tensor one of another {what} ({old} becomes "
                    f"{new}), at {place}. Convert it once, before you compile."
                )
        now = compat.traced_node(data.detach())
        if compat.traced_node(tensor) is None or now is None:  # one of them is a constant
            with torch.no_grad():
                tensor.copy_(data)
            return
        self._assigned[id(tensor)] = tensor, data, place  # the tensor too, so that its id stays its own
        compat.track(tensor, now)
