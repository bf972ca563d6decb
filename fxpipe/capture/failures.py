"""Explains a failed trace to the user: the cause, the place in the model, the remedy."""

from __future__ import annotations

import traceback

import torch

from fxpipe.capture.provenance import Provenance
from fxpipe.errors import CaptureError, FxpipeError
from fxpipe.ir import compat

_DENSE = "Add up over the indices of what is not zero instead (index_add, scatter_add), or keep it dense."
#: Also in ``changed_buffers.py``, for observers that have run.
ONE_OP = "for fake quantization take a qconfig of version=1, whose observer is one op"
#: Causes of failed traces: a text in the error or in a file of the traceback -> its meaning, and the remedy.
_UNSUPPORTED = (
    (
        "HigherOrderOperator",
        "an operator with branches or loops of its own (torch.cond, while_loop, scan)",
        "Compute both branches and choose with torch.where, or write the loop in Python.",
    ),
    ("torch/nested", "nested (jagged) tensors", "Pad them to dense tensors with a mask."),
    ("_nested_", "nested (jagged) tensors", "Pad them to dense tensors with a mask."),
    (
        "no fake impl registered",
        "an op that does not tell the shapes of its results",
        "Give it a function that does: torch.library.register_fake (@op.register_fake for a custom_op).",
    ),
    ("SparseCoo", "sparse tensors", _DENSE),
    ("from the 'Sparse", "sparse tensors", _DENSE),
    ("compressed tensor", "sparse tensors", _DENSE),
    (
        "NumberOfData",
        "a floating-point number of the data (.item(), .tolist()), and not to compare it",
        "Keep it a tensor: no .item() or .tolist() there.",
    ),
    (
        "Creating a new Tensor subclass",
        "a subclass of torch.Tensor that the forward makes",
        "Leave out as_subclass(…) there, and compute with plain tensors.",
    ),
    (
        "'FakeTensor' object has no attribute",
        "an attribute or a method that plain tensors do not have",
        "Keep it in the module, or make the method a function of a tensor.",
    ),
    (
        "returned NotImplemented",
        "a tensor of a subclass of torch.Tensor that no module registers",
        "Give its values as a plain tensor: x.as_subclass(torch.Tensor).",
    ),
    (
        "torch/ao/quantization",
        "observers that decide by values",
        f"Run the model on one batch before you compile it, and {ONE_OP}.",
    ),
)
_PACKED = (
    "Give the layer the padded batch: a row with its padding at the end has the same results before that. "
    "Mask the others (torch.where(torch.arange(T) < lengths[:, None], …)), and take the last ones with "
    "y[torch.arange(len(y)), lengths - 1]. For the backward direction flip each row within its length."
)


#: Texts of errors of a device that is not here.
_NO_DEVICE = (
    "not linked with support for",
    "not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
)


def explained(error: Exception, provenance: Provenance, of_loss: str) -> CaptureError:
    """A tracing failure with the place in the user's model where it happened; where the model's code caught
    one that the trace alone has, that one.

    of_loss: while ``loss_fn`` runs, its arguments as a sentence.
    """
    refusals = provenance.answers.refusals
    if refusals.error is not None and (refusals.is_caught or refusals.error is not error):
        cause, where = refusals.error, refusals.place
        if isinstance(cause, CaptureError):
            return cause
        explanation = _of_a_known_cause(cause, provenance, where) or CaptureError(
            f"The model cannot be traced, in {where}: {type(cause).__name__}: {_first_line(cause)}."
        )
        text = f"{explanation} This error is caught, and eager PyTorch does not raise it."
        return CaptureError(text, explanation.fixable)
    if isinstance(error, CaptureError):
        return error
    origin = provenance.last_origin()
    frames = reversed([*traceback.walk_tb(error.__traceback__)])
    line = Provenance.users_line(frames) or origin.source
    where = "loss_fn" if of_loss else origin.module
    where += f" ({line})" if line else ""
    if isinstance(error, FxpipeError):  # of what models call of fxpipe, which says what to do
        return CaptureError(f"The model cannot be traced, in {where}: {error}")
    if (known := _of_a_known_cause(error, provenance, where)) is not None:
        return known
    if of_loss:
        return CaptureError(
            f"loss_fn cannot be traced{f', at {line}' if line else ''}: {type(error).__name__}: "
            f"{_first_line(error)}\n{of_loss}"
        )
    return CaptureError(
        f"The model cannot be traced, in {where}: {type(error).__name__}: {_first_line(error)}\n"
        "See first whether it runs on the example without fxpipe, with its loss.backward(); if it does, that "
        "line asks tensors for something that only real ones have."
    )


def _of_a_known_cause(error: Exception, provenance: Provenance, where: str) -> CaptureError | None:
    """The explanation of an error whose cause can be told from it."""
    if "at least two devices" in str(error) and "meta" in str(error):
        return CaptureError(
            f"An op reads a tensor on the meta device, in {where}, that is neither a parameter nor a buffer, "
            "so that nothing gives it values. Register it as a buffer, or make it with device='cpu'."
        )
    packs = isinstance(error, compat.DATA_DEPENDENT) and "_pack_padded_sequence" in str(error)
    if packs or ("data is not allocated" in str(error) and any("nn/modules/rnn" in x for x in _files(error))):
        return CaptureError(
            f"The model runs on packed sequences, in {where}: shapes depend on data. {_PACKED}"
        )
    if isinstance(error, compat.DATA_DEPENDENT):
        return CaptureError(
            f"The model's control flow or shapes depend on data, in {where}: {_first_line(error)}\n"
            "A pipeline program is fixed before the data is known. Replace the Python branch, .item() or "
            "boolean indexing there by tensor operations (torch.where, masks; for experts see "
            "docs/howto.md#mixtures-of-experts-moe), or move it out of the model"
            f"{provenance.answers.remedy()}.",
            provenance.answers.fixable(),
        )
    for text, what, remedy in _UNSUPPORTED:
        if text in str(error) or any(text in file for file in _files(error)):
            torch.compiler.reset()  # such an operator leaves it in an inconsistent state
            return CaptureError(f"The model uses {what}, in {where}, which a program cannot hold. {remedy}")
    if any(text in str(error) for text in _NO_DEVICE):
        return CaptureError(
            f"The model asks for a device that torch does not find here, in {where}: {_first_line(error)}. "
            "Take the device of an input or a parameter there: device=x.device."
        )
    return None


def in_another_thread(line: str) -> CaptureError:
    return CaptureError(
        f"The forward runs ops in another thread, at {line}, which a trace does not see. Run them in the "
        "thread that calls the model."
    )


def _files(error: Exception) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
