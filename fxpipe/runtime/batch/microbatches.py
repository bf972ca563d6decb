"""Checks whole batches against the example of the compilation, and cuts them into microbatches."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from types import FunctionType
from typing import Any

import torch

from fxpipe.errors import BatchError, number_of
from fxpipe.plan.step import ASKED_NOTHING, Asked, BatchSpec, Leaf
from fxpipe.plan.tensors import in_strides, is_dense, share_memory
from fxpipe.runtime.torch_private import pytree

#: Types whose values are determined by their ``repr``.
_PLAIN = (
    type(None), Number, str, bytes, Enum, range, slice, type, FunctionType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def batch_spec(
    example: object, asked: Asked = ASKED_NOTHING, written: Collection[str] = (), unread: Collection[str] = ()
) -> BatchSpec:
    """The description of an example microbatch.

    asked: what the forward decides by.  written: the leaves it writes to.  unread: those of which neither it
    nor the loss reads anything.
    """
    leaves = []
    for name, leaf in batch_leaves(example):
        if isinstance(leaf, torch.Tensor):
            dense = leaf if is_dense(leaf) else leaf.contiguous()
            known = Leaf(
                name,
                tuple(leaf.shape),
                dense.stride(),
                str(leaf.dtype),
                value="",
                requires_grad=leaf.requires_grad if asked.requires_grad else None,
                written=name in written,
                strided=asked.strides and dense is leaf,
                unread=name in unread,
            )
            leaves.append(known)
        else:
            leaves.append(Leaf(name, None, (), "", repr(leaf), unread=name in unread))
    return BatchSpec(tuple(leaves))


def check_batch(spec: BatchSpec, batch: object, microbatches: int, needed: Collection[str]) -> dict[str, Any]:
    """The leaves of a batch that are there, after a check that they are like the example's.

    needed: the leaves that must be there.  Raises BatchError, naming the leaf.
    """
    leaves = given_leaves(spec, batch)
    if not leaves.keys() >= set(needed):
        known = [leaf.name for leaf in spec.leaves]
        raise BatchError(
            f"The batch has {_names(leaves)}, but the pipeline was compiled for {_names(known)}, of which "
            f"this rank needs {_names(needed)}."
        )
    check_unshared(leaves, {leaf.name for leaf in spec.leaves if leaf.written}, microbatches)
    _check_is_whole(spec, leaves, microbatches)
    for leaf in spec.leaves:
        if leaf.unread or leaf.name not in leaves:
            continue
        value = leaves[leaf.name]
        if leaf.shape is not None:
            _check(leaf, value, microbatches)
        elif isinstance(value, torch.Tensor) or repr(value) != leaf.value:
            raise _another_value(leaf, value)
    return leaves


def microbatches_of(
    spec: BatchSpec, batch: object, microbatches: int, needed: Collection[str], device: torch.device | None
) -> list[dict[str, torch.Tensor]]:
    """Cut a batch along the leading dimension, and move it to the device.

    needed: the leaves that must be there; others are checked and cut, but not moved.
    Raises BatchError, naming the leaf, if the batch is unlike the example.
    """
    leaves = check_batch(spec, batch, microbatches, needed)
    cut: list[dict[str, torch.Tensor]] = [{} for _ in range(microbatches)]
    for leaf in spec.leaves:
        if leaf.unread or leaf.shape is None or leaf.name not in leaves:
            continue
        value = leaves[leaf.name]
        if device is not None and leaf.name in needed:
            value = value.to(device, non_blocking=value.is_pinned())
        pieces = [value] * microbatches if not leaf.shape else value.split(leaf.shape[0])
        if leaf.strided and pieces[0].stride() != leaf.stride:
            warnings.warn(
                f"A microbatch of {leaf.name!r} has the strides {pieces[0].stride()}, and the forward asks "
                f"for strides: the program has decided by those of the example, {leaf.stride}. Give "
                "x.contiguous() in both, or compile again with such an example.",
                stacklevel=2,
            )
        for microbatch, piece in zip(cut, pieces, strict=True):
            # A program may take views that only the example's strides allow.
            microbatch[leaf.name] = in_strides(piece, leaf.stride)
    return cut


def _another_value(leaf: Leaf, value: object) -> BatchError:
    text = (
        f"{leaf.name!r} is {_described(value)} and was {leaf.value} in the example. Values that are not "
        "tensors are fixed at compilation: "
    )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return BatchError(
            f"{text}give torch.tensor({value!r}), in the example too, for a number that the model computes "
            "with, or compile again for this one if it decides what the model runs."
        )
    return BatchError(f"{text}compile again for this one.")


def check_unshared(leaves: Mapping[str, object], written: Collection[str], microbatches: int) -> None:
    """Raise BatchError where the forward writes to memory that it reads as another leaf, or in another
    microbatch: a program gives each its own."""
    tensors = {name: x for name, x in leaves.items() if isinstance(x, torch.Tensor)}
    for name in sorted(tensors.keys() & written):
        tensor, problem = tensors[name], ""
        others = [other for other, x in tensors.items() if other != name and share_memory(tensor, x)]
        if others:
            problem = f"shares memory with the leaf {others[0]!r}"
        elif not tensor.dim() and microbatches > 1:
            problem = "has no dimensions, so that all microbatches have the same"
        if problem:
            raise BatchError(
                f"The forward writes in place to the leaf {name!r}, which {problem}. A program would "
                "write to a copy: take one in the forward (.clone()), or in the batch."
            )


def rows_of_replicas(spec: BatchSpec, batch: object, microbatches: int, replicas: int) -> list[object]:
    """The rows that each replica takes of the batch of all replicas.

    microbatches: of each replica.  Raises BatchError, naming the leaf, if the batch is unlike the example.
    """
    if replicas == 1:
        return [batch]
    whole = microbatches_of(spec, batch, microbatches * replicas, (), None)
    kinds = {leaf.name: () if leaf.unread else leaf.shape for leaf in spec.leaves}
    tree = pytree.tree_flatten(as_dicts(batch))[1]

    def joined(name: str, value: Any, pieces: Sequence[Mapping[str, torch.Tensor]]) -> Any:
        if not kinds[name]:
            return value
        return torch.cat([one[name] for one in pieces]).requires_grad_(value.requires_grad)

    return [
        pytree.tree_unflatten(
            [joined(name, value, whole[k : k + microbatches]) for name, value in batch_leaves(batch)], tree
        )
        for k in range(0, len(whole), microbatches)
    ]


def given_leaves(spec: BatchSpec, batch: object) -> dict[str, object]:
    """The leaves of a batch that are there; None in the place of a tensor stands for one that is not.

    Raises BatchError for a leaf that the example does not have, or that has no values.
    """
    kinds = {leaf.name: leaf.shape for leaf in spec.leaves}
    leaves = dict(batch_leaves(batch))
    if not leaves.keys() <= kinds.keys():
        has = _names(leaves)
        raise BatchError(
            f"The batch has {has}, but the pipeline was compiled for {_names(kinds)}."
            f"{_of_list({*leaves} - {*kinds}, kinds)}"
        )
    for name, x in leaves.items():
        if isinstance(x, torch.Tensor) and x.is_meta:
            raise BatchError(
                f"{name!r} is a tensor on the meta device, without values. Give a dense tensor with values."
            )
    return {name: x for name, x in leaves.items() if x is not None or kinds[name] is None}


def _of_list(others: Iterable[str], known: Iterable[str]) -> str:
    """What to do with a list that has an item for each row; nothing if the other leaves are none of one."""
    lists = {name.rpartition(".")[0] for name in known if name.rpartition(".")[2].isdigit()} - {""}
    longer = sorted(lists & {name.rpartition(".")[0] for name in others})
    return f" Give {longer[0]!r} as one tensor of all rows, torch.stack of the list." if longer else ""


def as_dicts(batch: object) -> Any:
    """A batch with dicts for mappings of other classes, as tokenizers give them, and for a dataclass."""

    def converted(leaf: object) -> object:
        return {key: as_dicts(value) for key, value in leaf.items()} if isinstance(leaf, Mapping) else leaf

    if is_dataclass(batch) and not isinstance(batch, type | Mapping):
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return pytree.tree_map(converted, batch)


def batch_leaves(example: object) -> list[tuple[str, Any]]:
    """The leaves of a (micro)batch with readable names: ``input_ids``, ``0``, ``image.pixels``."""
    example = as_dicts(example)
    if not isinstance(example, (Mapping, tuple, list)):
        raise BatchError(
            "A batch, or an example, is a mapping of keyword arguments, or a tuple or list of arguments, not "
            f"{type(example).__name__}. Of one argument it is (x,)."
        )
    paths, _ = pytree.tree_flatten_with_path(example)
    leaves = [(".".join(_key_name(key) for key in path), leaf) for path, leaf in paths]
    twice = [name for name, times in Counter(name for name, _ in leaves).items() if times > 1]
    if twice:
        raise BatchError(f"Two leaves of the batch are both called {twice[0]!r}. Rename one of the keys.")
    for name, leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise BatchError(
                f"{name!r} is a {type(leaf).__name__}, which fxpipe cannot look into: what it holds would be "
                "fixed in the program and not be compared. Give tensors (torch.from_numpy), numbers and "
                "texts, in tuples, lists and dicts, or register its class with torch.utils._pytree."
            )
    return leaves


def _key_name(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


_REMEDY = (
    "Drop the last batch of an epoch, or pad it with rows that the loss does not count (labels of -100, a "
    "mask of zeros); pipe.evaluate takes it as it is."
)


def _check_is_whole(spec: BatchSpec, leaves: Mapping[str, object], microbatches: int) -> None:
    """Raise BatchError for a batch of the size of the example, which is often the batch of a whole step."""
    rows = [(leaf, leaves.get(leaf.name)) for leaf in spec.leaves if leaf.shape and not leaf.unread]
    shapes = [x.shape if isinstance(x, torch.Tensor) and not x.is_nested else None for _, x in rows]
    if microbatches == 1 or shapes != [leaf.shape for leaf, _ in rows]:
        return
    for leaf, _ in rows[:1]:
        assert leaf.shape is not None
        number, rest = divmod(leaf.shape[0], microbatches)
        smaller = f"with an example of {number_of(number, 'row')}" if not rest else "with a smaller example"
        raise BatchError(
            f"The batch is as long as the example, {number_of(leaf.shape[0], 'row')} of {leaf.name!r}, and "
            f"the example is one of {number_of(microbatches, 'microbatch')}, which have "
            f"{leaf.shape[0] * microbatches}. Give the batch of a whole step; or compile {smaller}, if this "
            "is one."
        )


def _check(leaf: Leaf, value: object, microbatches: int) -> None:
    assert leaf.shape is not None
    if not isinstance(value, torch.Tensor):
        raise BatchError(f"{leaf.name!r} is {_described(value)}; a tensor of dtype {leaf.dtype} is expected.")
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else f"of layout {value.layout}"
        raise BatchError(f"{leaf.name!r} is a tensor {kind}. Give a dense tensor with values.")
    if str(value.dtype) != leaf.dtype:
        raise BatchError(f"{leaf.name!r} has dtype {value.dtype}; the example has {leaf.dtype}.")
    if leaf.requires_grad not in (None, value.requires_grad):
        raise BatchError(
            f"requires_grad of {leaf.name!r} is {value.requires_grad} and was {leaf.requires_grad} in the "
            f"example, and the forward asks for it: give x.requires_grad_({leaf.requires_grad}), or compile "
            "again with such an example."
        )
    if not leaf.shape:
        if value.shape:
            raise BatchError(f"{leaf.name!r} has shape {tuple(value.shape)}; the example has a 0-d tensor.")
        return
    rows = leaf.shape[0] * microbatches
    if value.dim() == len(leaf.shape) and tuple(value.shape[1:]) == leaf.shape[1:] and value.shape[0] != rows:
        there, remedy = value.shape[0], _REMEDY
        if there == leaf.shape[0]:
            remedy = (
                "If all rows share this tensor, make it a buffer of the model, which may get other values "
                "between steps, or repeat it for each row, here and in the example."
            )
        elif there and there % microbatches == 0:
            example = f"an example of {there // microbatches}"
            others = f"{remedy[0].lower()}{remedy[1:]}"
            remedy = f"If all batches have {there} rows, compile with {example}; else {others}"
        raise BatchError(
            f"{leaf.name!r} has {number_of(there, 'row')}, which do not make "
            f"{number_of(microbatches, 'microbatch')} of {leaf.shape[0]}: {rows} are needed. {remedy}"
        )
    if tuple(value.shape) != (rows, *leaf.shape[1:]):
        raise BatchError(
            f"{leaf.name!r} has shape {tuple(value.shape)}; {number_of(microbatches, 'microbatch')} of "
            f"{leaf.shape} make {(rows, *leaf.shape[1:])}. What has no name in dimensions= of fxpipe.compile "
            "has one length: pad the batch to it."
        )


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _names(names: Any) -> str:
    return "leaves " + ", ".join(sorted(names)) if names else "no leaves"
