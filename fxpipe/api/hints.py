"""Hints for users who ask a pipeline for what a model has: what a pipeline has instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, TypeVar

from fxpipe.errors import suggested

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MODE = (
    "It has no mode: pipe.step(batch) trains, and pipe.evaluate(batch) runs the forward in eval mode, if it "
    "was compiled with evaluation=True."
)
_PLACE = "It keeps the device and the dtypes of its model: change those of the model, and compile it again."
_TENSORS = (
    "pipe.parameters and pipe.buffers are what this rank holds, by name; pipe.optimizer(cls, …) makes an "
    "optimizer of it."
)
_STEP = "pipe.step(batch) runs forward and backward of all microbatches, and adds up the gradients."
_CHANGE = "Change the model, and compile it again."
_INSTEAD = {
    _MODE: ("train", "eval", "training"),
    _PLACE: ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "dtype"),
    _TENSORS: ("named_parameters", "named_buffers", "named_modules", "modules", "children"),
    _STEP: ("forward", "backward", "no_sync", "run", "train_step", "train_batch"),
    _CHANGE: ("requires_grad_", "apply", "register_forward_hook", "register_full_backward_hook"),
    "opt.zero_grad() of opt = pipe.optimizer(…) does it, or the model's own.": ("zero_grad",),
    "It does not hold the model: pipe.synchronize() brings it what was trained.": ("model", "module"),
    "pipe.export(directory) writes the weights as Hugging Face does.": ("save_pretrained",),
    "fxpipe.load(path) makes a pipeline; pipe.load_state_dict(path) reads weights.": ("load",),
}


class Named(dict[_Key, _Value]):
    """Parameters or buffers by name; of a model they are methods."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            f"These are a dict, by name, and no method: for their tensors take .values(). {_TENSORS}"
        )


def missing(name: str, known: Iterable[str]) -> AttributeError:
    """The error for an attribute that a pipeline does not have."""
    instead = next((text for text, names in _INSTEAD.items() if name in names), "")
    return AttributeError(f"A pipeline has no {name!r}. {instead or suggested(name, known).strip()}".strip())
