"""The pipelines of one model in a trainer: one for each size of a step, on the tensors of the first one.

a step of 4 microbatches of 8 rows          the first pipeline: all steps of an epoch but its last one
…  of 2 microbatches of 8 rows and 1 of 3   one of 2 and one of 1 microbatches, compiled when they are needed,
                                            whose gradients add up
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxpipe
from fxpipe.errors import OptionError
from fxpipe.runtime.torch_private import tensors_by_kind

Microbatch = Mapping[str, Any]
Loss = Callable[[Any, Any], torch.Tensor]

#: Options that only the first pipeline of a model has: the others go by its tensors.
_OF_FIRST = ("ranks", "split_points", "vocab_parallel", "grad_dtype")


_OF_STEP = ("example", "microbatches")  # which are given otherwise


@dataclass(eq=False)
class Sizes:
    """The pipelines of a model by the sizes of their steps.

    ``options``: of ``fxpipe.compile``, and ``example``, a microbatch; ``microbatches`` of a step where
    batches are lists.  ``loss``: (output, microbatch) -> that
    of the microbatch.  ``context``: in which the model is traced.  ``weights``: a directory with those that
    the model gets when it is cut; by default its own.  ``first``: the pipeline whose tensors are those of
    all; None before the first step.
    """

    model: nn.Module
    options: Mapping[str, Any]
    loss: Loss
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    weights: Path | None = None
    first: fxpipe.Pipeline | None = None
    _others: dict[object, fxpipe.Pipeline] = field(default_factory=dict)

    @property
    def takes_lists(self) -> bool:
        """Whether a batch may be a list of microbatches, in any number."""
        return "microbatches" in self.options

    def compile_first(self, example: Microbatch, microbatches: int, *, is_mean: bool) -> fxpipe.Pipeline:
        """Compile for a whole step.  is_mean: see ``step``."""
        if self.takes_lists:
            return self._of_lists(1, is_mean, example)
        return self._trains(example, microbatches, 1.0 if is_mean else float(microbatches))

    def step(self, batches: Sequence[Sequence[Microbatch]], *, is_mean: bool) -> torch.Tensor:
        """Run forward and backward of a step; gradients are added to those that are there.

        batches: of one microbatch each, or lists of them.  is_mean: whether the loss is the mean of those of
        the batches, each by its own; else their sum, as where each has divided by the number of labels of the
        whole step.
        Raises OptionError for microbatches of several lengths, where these have no name.
        """
        microbatches = [each for batch in batches for each in batch]
        total, losses = len(microbatches), []
        if self.takes_lists:
            lists = batches if is_mean else [microbatches]
            pipe = self._of_lists(len(lists), is_mean, microbatches[0])
            return torch.stack([_number(pipe.step([*map(dict, each)])) for each in lists]).sum()
        for part in (list(part) for _, part in groupby(microbatches, self._rows_of_pipeline)):
            factor = len(part) / total if is_mean else float(len(part))
            losses.append(self._of_size(part, factor, total).step(self._joined(part)))
        return torch.stack([*map(_number, losses)]).sum()

    def evaluate_list(self, microbatches: Sequence[Microbatch]) -> torch.Tensor:
        """The loss of a list of microbatches in eval mode, on all ranks."""
        key = ("a list", *microbatches[0])
        if key not in self._others:
            example = {**microbatches[0], **self.options["example"]}
            others = {"gradients": False, "loss_fn": self.loss}
            self._others[key] = self._compiled(example, self.options["microbatches"], others)
        return self._others[key].evaluate([*map(dict, microbatches)])

    def evaluate(
        self,
        batch: Microbatch,
        rows: int,
        most: int,
        outputs: Sequence[str],
        *,
        has_loss: bool,
        divisor: str | None = None,
    ) -> fxpipe.StepResult:
        """Run the forward in eval mode; all ranks get the result.

        rows: of a microbatch.  most: the largest number of rows of a batch.  divisor: the leaf, if there is
        one, with a number of the batch by which a loss may divide.
        """
        number, rows = rows_of(batch), min(rows, most)
        if number > most:
            raise OptionError(f"A batch of the evaluation has {number} rows, and {most} were announced.")
        with warnings.catch_warnings(record=True) as warned:
            pipe = self._evaluates(batch, rows, most, outputs, has_loss)
        step = pipe.plan.step
        divides = any(divisor in names for names in step.leaves)
        joins = bool(pipe.plan.own_means) and number > rows
        if joins or (divides and not step.totals):
            # The number is of these rows, or the loss no mean over them: they are one microbatch.
            pipe = self._evaluates(batch, number, number, outputs, has_loss)
        else:
            for each in warned:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return pipe.evaluate(dict(batch), outputs=outputs, outputs_on="all")

    def _evaluates(
        self, batch: Microbatch, rows: int, most: int, outputs: Sequence[str], has_loss: bool
    ) -> fxpipe.Pipeline:
        """The pipeline that evaluates batches like this one, of at most so many rows."""
        shapes = () if self._has_names else tuple((name, *_shape(x)[1:]) for name, x in batch.items())
        key = (tuple(batch), tuple(outputs), has_loss, shapes, rows, most)
        if key not in self._others:
            given = self.options.get("example")
            example = {n: _repeated(x, rows_of(batch), rows) for n, x in batch.items()}
            example |= {n: x for n, x in (given or {}).items() if n in batch}
            others = {"gradients": False, "outputs": (*outputs,), "loss_fn": self.loss if has_loss else None}
            self._others[key] = self._compiled(example, -(-most // rows), others)
        return self._others[key]

    @property
    def _has_names(self) -> bool:
        """Whether lengths have names, so that microbatches may be shorter than the example."""
        return bool(self.options.get("dimensions"))

    def _joined(self, microbatches: Sequence[Microbatch]) -> object:
        """Microbatches of as many rows as the batch of a step."""
        if self._has_names:
            return [dict(each) for each in microbatches]
        names = [name for name, x in microbatches[0].items() if _shape(x)]
        assert self.first is not None, "it is compiled before the first step"
        of_first = {leaf.name: leaf.shape for leaf in self.first.plan.step.batch.leaves if leaf.shape}
        for name in names:
            sizes = [
                *([of_first[name]] if name in of_first else []),
                *(_shape(m[name]) for m in microbatches),
            ]
            shapes = sorted({size[1:] for size in sizes})
            if len(shapes) > 1:
                raise OptionError(
                    f"Microbatches have rows of {name!r} of the shapes {shapes[0]} and "
                    f"{shapes[-1]}. Pad all to one length, or name the length: pipeline="
                    '{"dimensions": {"sequence": the longest}, "example": a microbatch of that}.'
                )
        return {**microbatches[0], **{n: torch.cat([each[n] for each in microbatches]) for n in names}}

    def _of_size(self, part: Sequence[Microbatch], factor: float, total: int) -> fxpipe.Pipeline:
        """The pipeline for a part of a step, of microbatches with the same number of rows."""
        assert self.first is not None, "it is compiled before the first step"
        spec, rows = self.first.plan.step, self._rows_of_pipeline(part[0])
        of_first = next(leaf.shape[0] for leaf in spec.batch.leaves if leaf.shape)
        if len(part) == total == spec.microbatches and rows == of_first:
            return self.first
        key = (rows, len(part), factor)
        if key not in self._others:
            given = self.options.get("example")
            example = (
                part[0] if given is None else {n: _repeated(x, of_first, rows) for n, x in given.items()}
            )
            self._others[key] = self._trains({**part[0], **example}, len(part), factor)
        return self._others[key]

    def _rows_of_pipeline(self, microbatch: Microbatch) -> int:
        """The rows of the example of the pipeline for a microbatch: its own, or those of the first pipeline,
        where that takes other numbers."""
        assert self.first is not None, "it is compiled before the first step"
        rows, named = rows_of(microbatch), [each for each in self.first.lengths if each.leading]
        return next((each.example for each in named if each.least <= rows <= each.example), rows)

    def _of_lists(self, lists: int, is_mean: bool, example: Microbatch) -> fxpipe.Pipeline:
        """The pipeline for lists of microbatches, so many in a step: its loss is the mean over what counts in
        a list, or what all of it is where that divides by the number of labels of the step."""
        factor = 1 / lists if is_mean else 1.0
        if self.first is None or ("lists", factor) not in self._others:
            longest = {**example, **self.options["example"]}
            others = {"loss_fn": self._times(factor)}
            pipe = self._compiled(longest, self.options["microbatches"], others)
            if not pipe.lengths or not (is_mean or pipe.plan.step.totals):
                why = pipe.plan.step.one_length or (
                    "a loss is a sum over labels, divided by num_items_in_batch, and this one is another"
                )
                raise OptionError(f"The loss has no mean over microbatches of a list: {why.rstrip('.')}.")
            self._others["lists", factor] = pipe
        return self._others["lists", factor]

    def _times(self, factor: float) -> Loss:
        loss = self.loss
        return loss if factor == 1 else lambda output, microbatch: loss(output, microbatch) * factor

    def _trains(self, example: Microbatch, microbatches: int, factor: float) -> fxpipe.Pipeline:
        """A pipeline whose loss is the mean of those of microbatches, each times the factor."""
        others = {"mean": "microbatch", "loss_fn": self._times(factor)}
        return self._compiled(example, microbatches, others)

    def _compiled(self, example: Microbatch, microbatches: int, others: Mapping[str, Any]) -> fxpipe.Pipeline:
        options = {name: x for name, x in self.options.items() if name not in _OF_STEP} | dict(others)
        if self.first is not None:
            options = {name: x for name, x in options.items() if name not in _OF_FIRST} | {"like": self.first}
            if not isinstance(options.get("schedule", ""), str):  # one that is written for other numbers
                del options["schedule"]
            unlike = [x.name for x in self.first.lengths if x.leading and x.example != rows_of(example)]
            if unlike:
                options["dimensions"] = {n: x for n, x in options["dimensions"].items() if n not in unlike}
        trains = options.get("gradients", True)
        was = self.model.training
        self.model.train(trains)
        with self.context():
            pipe = fxpipe.compile(self.model, dict(example), microbatches=microbatches, **options)
        self.model.train(trains or was)  # a step warns of a model in another mode
        if self.first is None:
            self.first = pipe
            if self.weights is not None:
                pipe.load_state_dict(self.weights)
                _give_values(self.model, pipe)
        return pipe


def _give_values(model: nn.Module, pipe: fxpipe.Pipeline) -> None:
    """Give a model on the meta device the tensors of its pipeline: those of other sizes get the same."""
    tensors = {**pipe.parameters, **pipe.buffers}
    names = {id(x): name for name, x in (*model.named_parameters(), *model.named_buffers()) if x.is_meta}
    for module in model.modules():
        for kind in tensors_by_kind(module):
            for own, x in kind.items():
                if id(x) in names:
                    kind[own] = tensors.get(names[id(x)], x)


def rows_of(microbatch: Microbatch) -> int:
    """The rows of a microbatch, or a batch: the leading dimension of its first tensor that has one."""
    rows = next((_shape(x)[0] for x in microbatch.values() if _shape(x)), None)
    if rows is None:
        raise OptionError(f"A batch has no tensor with rows, only {', '.join(microbatch) or 'nothing'}.")
    return rows


def _number(loss: torch.Tensor) -> torch.Tensor:
    """A loss as a tensor like others."""
    return loss.as_subclass(torch.Tensor)


def _shape(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _repeated(value: Any, number: int, rows: int) -> Any:
    """A leaf of so many rows, made of those of a leaf of another number."""
    if not _shape(value):
        return value
    return value.unflatten(0, (number, -1))[torch.arange(rows) % number].flatten(0, 1)
