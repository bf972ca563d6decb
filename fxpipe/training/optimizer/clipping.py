"""The norm of the gradients of all ranks, and whether they are clipped, or left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils import get_total_norm

from fxpipe.errors import OptionError

#: Steps that ``skip_nonfinite=True`` leaves out one after the other: a scale of the loss that is halved in
#: each of them would be 1e-30 of what it was.
MOST_SKIPPED = 100


def check_norm(name: str, norm: object) -> None:
    """Raise OptionError for a norm, by the name of its option, that is no number above 0."""
    if not isinstance(norm, int | float) or norm is True or not norm > 0:
        raise OptionError(f"{name} is {norm!r} and must be a number above 0.")


@dataclass(frozen=True)
class Clipping:
    """What is done with gradients by their norm.  ``largest``: the norm to which gradients are clipped, if
    they are.  ``norm_type``: see ``torch.nn.utils.clip_grad_norm_``.  ``skip_nonfinite``: whether updates by
    infinities or NaN are left out; a number: at most so many one after the other.
    """

    largest: float | None = None
    norm_type: float = 2.0
    skip_nonfinite: bool | int = False

    def __post_init__(self) -> None:
        if self.largest is not None:
            check_norm("clip_grad_norm", self.largest)
        check_norm("norm_type", self.norm_type)
        if not (isinstance(self.skip_nonfinite, int) and self.skip_nonfinite >= 0):
            raise OptionError(
                f"skip_nonfinite is {self.skip_nonfinite!r} and must be True, False, or the number of steps "
                "that may be left out one after the other."
            )

    @property
    def asks(self) -> bool:
        """Whether an update depends on the norm."""
        return self.largest is not None or bool(self.skip_nonfinite)

    @property
    def most_skipped(self) -> int:
        """The number of updates that may be left out one after the other."""
        return MOST_SKIPPED if self.skip_nonfinite is True else int(self.skip_nonfinite)

    @property
    def by_largest(self) -> bool:
        return math.isinf(self.norm_type)

    def number(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The number of one rank: the norm is of the sum over ranks, or the largest; 0-d, float64."""
        norm = get_total_norm(grads, float(self.norm_type))
        norm = norm.to(grads[0].device if grads else None, torch.float64)
        return norm if self.by_largest else norm**self.norm_type

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """The number of the whole model, from those of all ranks, in their order."""
        return numbers.amax() if self.by_largest else numbers.sum()

    def norm(self, total: torch.Tensor) -> torch.Tensor:
        return total if self.by_largest else total ** (1 / self.norm_type)

    def leaves_out(self, norm: torch.Tensor) -> bool:
        return bool(self.skip_nonfinite) and not math.isfinite(norm)

    def is_plain(self, norm: torch.Tensor) -> bool:
        """Whether an update with gradients of this norm is made, and without clipping."""
        is_below = self.largest is None or bool(self.largest / (norm + 1e-6) >= 1)  # as torch has it
        return math.isfinite(norm) and is_below
