"""Other tensors of the memory of one that is elsewhere, as those of a state dict are.

A script may take a state dict while the model is whole, before ``compile`` or after ``synchronize``, and read
it after more steps: it would have new values of what this rank trains and old ones of the rest.  So these
tensors become errors, too, at the first change of values.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Set
from types import FrameType

import torch
from torch import nn

from fxpipe.plan.dtensors import local
from fxpipe.plan.tensors import storage_bytes
from fxpipe.runtime.torch_private import has_memory, holders_of_memory
from fxpipe.training.model.elsewhere import Classes, Explain, hide, is_elsewhere

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class Aliases:
    """The aliases of tensors that a pipeline has sent away.  ``explain``: why these cannot be used."""

    def __init__(self, explain: Explain):
        self.number, self._explain = explain.number, explain
        self._named: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._classes = Classes(self)

    def add(self, leaving: Mapping[str, torch.Tensor], others: Set[int]) -> None:
        """Note the tensors that share memory with those that are about to leave.

        others: the ids of tensors that are none, as they are the model's.
        """
        self._named += [(weakref.ref(tensor), name) for tensor, name in _aliases(leaving, others)]

    def hide(self) -> None:
        """Make each use of them an error."""
        for reference, _ in self._named:
            tensor = reference()
            if tensor is not None and not is_elsewhere(tensor):
                hide(tensor, self._classes.of(tensor))

    def __call__(self, tensor: torch.Tensor) -> str:
        name = next((name for reference, name in self._named if reference() is tensor), "a tensor")
        return (
            f"This tensor had the memory of {name} before a step, as the tensors of a state dict have, and "
            "would keep old values, as another rank trains it. Take a copy while the model is whole "
            "(copy.deepcopy(model.state_dict())), or pipe.full_state_dict() on all ranks."
        )

    def gradient_is_read(self, tensor: torch.Tensor, frame: FrameType) -> None:
        """It has no gradient of the pipeline."""

    def is_written_there(self, tensor: torch.Tensor) -> bool:
        return False


def _aliases(leaving: Mapping[str, torch.Tensor], others: Set[int]) -> Iterator[tuple[torch.Tensor, str]]:
    shared: dict[int, list[tuple[range, str]]] = {}
    for name, tensor in leaving.items():
        memory = local(tensor).untyped_storage()
        if holders_of_memory(memory) > 1:
            shared.setdefault(memory._cdata, []).append((_bytes(local(tensor)), name))
    if not shared:
        return
    for each in gc.get_objects():
        if type(each) not in _PLAIN or id(each) in others or not has_memory(each):
            continue
        for used, name in shared.get(each.untyped_storage()._cdata, ()):
            theirs = _bytes(each)
            if theirs.start < used.stop and used.start < theirs.stop:
                yield each, name
                break


def _bytes(tensor: torch.Tensor) -> range:
    """The addresses of a tensor, from its first byte to behind its last one."""
    first = tensor.storage_offset() * tensor.element_size()
    return range(first, first + storage_bytes(tensor))
