"""Optimizers that update the same parameters in turn.

``pipe.optimizer`` has all that its pipeline trains, also what no group names.  In plain torch a script gives
each optimizer a part of a model: the actor to one, whose loss goes through the critic, and that to the other.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Mapping

from torch.nn import Parameter

_all: weakref.WeakSet[Turns] = weakref.WeakSet()
_updates = itertools.count(1)


class Turns:
    """When one optimizer has updated, among all of this process.  names: of what it updates."""

    def __init__(self, names: Mapping[Parameter, str]) -> None:
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._last = 0
        self._has_told = False
        _all.add(self)

    def updates(self) -> None:
        """Warn, at an update, where another one has updated the same since the last one."""
        for other in () if self._has_told or not self._last else _all:
            shared = self._names.keys() & other._names.keys()
            if shared and other._last > self._last:
                self._has_told = other._has_told = True
                name = next(name for key, name in self._names.items() if key in shared)
                warnings.warn(_TEXT.format(name=name), stacklevel=2)
                break
        self._last = next(_updates)


_TEXT = (
    "Two optimizers of pipe.optimizer update {name} in turn: each has all that its pipeline trains, what no "
    "group names too. For a part of the model make torch's optimizer of its parameters, "
    "torch.optim.Adam(model.actor.parameters()); so too if both are to update this."
)
