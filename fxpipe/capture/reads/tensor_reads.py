"""Intercepts reads of tensors by the model's code that do not pass the dispatcher."""

from __future__ import annotations

import itertools
import operator
import os
import sys
import weakref
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from fxpipe.capture.hooks import Hooks
from fxpipe.capture.provenance import Provenance
from fxpipe.capture.reads.checkpoint import HISTORY
from fxpipe.capture.reads.data_assignment import DataAssignments
from fxpipe.capture.reads.tensor_text import OTHER_TEXT, Text, without_values
from fxpipe.ir import compat
from fxpipe.ir.compat import pytree
from fxpipe.plan.step import ASKED_NOTHING, Asked

#: What code may read of a tensor that is no value -> for messages.
_UNKNOWN: dict[object, str] = {
    torch.Tensor.grad: "the gradient of a parameter, as the step before left it",
    torch.Tensor._version: "how often a tensor was written (_version)",
    torch.Tensor.data_ptr: "the address of a tensor",
    torch.Tensor.__reduce_ex__: "the values of a tensor, to pickle or to save them",
    torch.Tensor.__dlpack__: "the memory of a tensor, through DLPack",
}
#: Those that the libraries of others call.
_PROTOCOLS = (torch.Tensor.__reduce_ex__, torch.Tensor.__dlpack__)
#: Methods of storages that read or write their bytes.
_OF_BYTES = (
    *("__getitem__", "__setitem__", "__iter__", "tolist", "fill_", "copy_", "clone", "cpu", "byteswap"),
    *("_write_file", "__reduce__", "__deepcopy__"),
)

_STRIDES = (torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset)
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_TRUTH = (torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero)


class TensorReads(TorchFunctionMode):
    """While entered, intercepts reads of tensors, and assignments to ``.data``, that do not pass the
    dispatcher.  ``assigned``: those of the run.  ``with_gradients``: ids of what has a ``.grad`` before.
    ``asked``: by what else than values the code decides.  ``text``: the first place that makes text of a
    tensor."""

    def __init__(self, provenance: Provenance, hooks: Hooks):
        super().__init__()
        self._hooks = hooks
        self._provenance, self._answers, self.assigned = provenance, provenance.answers, DataAssignments()
        self.with_gradients = frozenset[int]()
        self.asked = ASKED_NOTHING
        self.hooked = False  # whether there are hooks of the backward
        self.again = False  # whether this is the second run
        self.text = ""
        # Functions that are not seen here, to be put back.
        self._before: list[tuple[object, str, object]] = []

    def __torch_function__(
        self, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        reader = _reader(sys._getframe(1))
        return self._answers.refusals.judged(self._answered, func, args, kwargs or {}, reader)

    def _answered(self, func: Any, args: Any, kwargs: Any, reader: FrameType) -> Any:
        self._provenance.read |= {id(x): weakref.ref(x) for x in args if compat.is_real(x)}
        if func in _TRUTH and args[0].dtype != torch.bool:
            return bool(args[0] != 0)
        if func is torch.Tensor.__int__ and args[0].is_floating_point():
            return int(args[0].long())
        if func is torch.Tensor.item or (func is torch.Tensor.tolist and not args[0].dim()):
            return self._answers.number(args[0]) if args[0].numel() == 1 else func(*args)
        if func is torch.Tensor.tolist:
            return self._tolist(args[0])
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):
            if args[0].requires_grad and not kwargs.get("force"):
                raise RuntimeError(
                    "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
                )
            return self._numpy(args[0])
        if func is torch.Tensor.__deepcopy__:
            return _copied(*args)
        if func in (torch.allclose, torch.Tensor.allclose):
            return bool(torch.isclose(*args, **kwargs).all())
        if func in (torch.equal, torch.Tensor.equal):
            return args[0].shape == args[1].shape and bool((args[0] == args[1]).all())
        if func in _FROM_DATA and _has_tensors(args, func is torch.tensor):
            return _stacked(args[0]).to(**{k: v for k, v in kwargs.items() if k in ("dtype", "device")})
        has_no_format = func is torch.Tensor.__format__ and args[0].dim() and args[1]  # only a number has one
        if func in (torch.Tensor.__repr__, torch.Tensor.__format__) and not has_no_format:
            self.text = self.text or self._provenance.place()
            return Text.of(OTHER_TEXT if self.again else without_values(args[0]), self._refuse_text)
        if func is torch.Tensor.register_hook:
            self.hooked = True
            if not self.again and "hook" not in kwargs:
                of = f"a tensor's gradient, registered at {self._provenance.place()}"
                args = args[0], self._hooks.noted("hook", of, args[1])
        descriptor = getattr(func, "__self__", None)
        asked = Asked(descriptor in HISTORY, func in _STRIDES and compat.is_placeholder(args[0]))
        may_count = any(asked) and not isinstance(args[0], torch.nn.Parameter)
        if may_count and self._provenance.is_users(reader.f_code.co_filename):
            self.asked = Asked(*map(operator.or_, self.asked, asked))
        if descriptor is torch.Tensor.data and func.__name__ == "__set__":
            return self.assigned.assign(args[0], args[1], self._provenance.place())
        read = _UNKNOWN.get(descriptor, _UNKNOWN.get(func))
        if read and (descriptor is not torch.Tensor.grad or self._may_have_gradient(args[0], func)):
            through_torch = descriptor is torch.Tensor.grad or func in _PROTOCOLS
            self._refuse(read, reader, through_torch)
        return func(*args, **kwargs)

    def _may_have_gradient(self, tensor: torch.Tensor, func: Any) -> bool:
        """Whether another step may have left one there: a tensor that is not trained has none."""
        asks = func.__name__ == "__get__" and not tensor.requires_grad
        return compat.is_placeholder(tensor) and (not asks or id(tensor) in self.with_gradients)

    def _refuse(self, read: str, reader: FrameType, through_torch: bool = False) -> None:
        """Raise CaptureError where the model's code reads what a trace cannot tell.

        through_torch: also where it calls a function of torch that does.
        """
        file, users = reader.f_code.co_filename, self._provenance.is_users
        of_torch = not users(file) and os.path.dirname(file) != os.path.dirname(__file__)
        if users(file) or (through_torch and of_torch and self._provenance.source()):
            self._answers.refusals.refuse_code(
                f"reads {read}", "A program has another one: take that out of the forward."
            )

    def _refuse_text(self) -> NoReturn:
        remedy = "A program is fixed before the data is known: compare tensors instead."
        self._answers.refusals.refuse_code("reads the text of a tensor", remedy)

    def __enter__(self) -> TensorReads:
        self._replace(torch.UntypedStorage, "data_ptr", _UNKNOWN[torch.Tensor.data_ptr], through_torch=False)
        for owner, name in itertools.product((torch.UntypedStorage, torch.TypedStorage), _OF_BYTES):
            if hasattr(owner, name):
                self._replace(owner, name, "the bytes of a tensor's storage", through_torch=True)
        for module in (torch, torch.utils.dlpack):
            self._replace(module, "to_dlpack", _UNKNOWN[torch.Tensor.__dlpack__], through_torch=True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        while self._before:
            owner, name, function = self._before.pop()
            if function is None:
                delattr(owner, name)
            else:
                setattr(owner, name, function)

    def _replace(self, owner: object, name: str, read: str, through_torch: bool) -> None:
        """Refuse a function for a tensor of the trace, or for its storage."""
        function = getattr(owner, name)

        def asked(x: Any, *args: object, **kwargs: object) -> object:
            if x.device.type == "meta" or isinstance(x, compat.FakeTensor):
                self._refuse(read, sys._getframe(1), through_torch)
            return function(x, *args, **kwargs)

        self._before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, asked)

    def _tolist(self, tensor: torch.Tensor) -> list[object]:
        numbers = self._answers.numbers(tensor)
        for length in reversed(tensor.shape[1:]):
            numbers = [numbers[k : k + length] for k in range(0, len(numbers), length)]
        return numbers

    def _numpy(self, tensor: torch.Tensor) -> object:
        numbers = self._answers.numbers(tensor)
        with compat.no_modes():
            return torch.tensor(numbers, dtype=tensor.dtype, device="cpu").reshape(tensor.shape).numpy()


def _reader(frame: FrameType) -> FrameType:
    """The code that asks, behind modes of torch's functions that were entered later."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _copied(tensor: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
    """``copy.deepcopy``, which would read the memory."""
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        compat.mark_as_parameter(copy)
    memo[id(tensor)] = copy
    return copy


def _has_tensors(args: Any, copies: bool) -> bool:
    """Whether the first argument is a list with tensors, or, for what copies it, one."""
    takes = bool(args) and (copies or isinstance(args[0], (list, tuple)))
    return takes and any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(args[0]))


def _stacked(data: object) -> torch.Tensor:
    """``torch.tensor`` of tensors and numbers in lists, which would ask each for its value."""
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(x) for x in data])
    return data.detach().clone() if isinstance(data, torch.Tensor) else torch.as_tensor(data)
