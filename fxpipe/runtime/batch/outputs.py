"""The outputs that the user asks for: collected by microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from fxpipe.errors import RunError, number_of
from fxpipe.plan.step import OutputSpec
from fxpipe.plan.tensors import dtype_of

On = int | Literal["all"] | None
"""The rank that is to have the outputs; ``"all"``: every rank; None: each output's own rank."""


Listed = dict[str, list[torch.Tensor]]
"""The values of outputs for each microbatch of a list, by name."""


@dataclass(frozen=True, eq=False, repr=False)
class StepResult:
    """The result of a step that was asked for outputs.

    ``loss``: of the whole batch, 0-d, on every rank; None if the model has none.
    ``outputs``: name -> the microbatches' values in order: joined along their leading dimension, or stacked
    if they are 0-d.  ``listed``: of a batch that was a list of microbatches, name -> their values, in the
    list's order; then there are no ``outputs``.
    """

    loss: torch.Tensor | None
    outputs: dict[str, torch.Tensor]
    listed: Listed = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"StepResult({', '.join(shown(self.loss, self.outputs, self.listed))})"


MOST_SHOWN = 8


def shown(
    loss: torch.Tensor | None,
    outputs: Mapping[str, torch.Tensor],
    listed: Mapping[str, Sequence[torch.Tensor]],
) -> list[str]:
    """A result as texts: the loss, and outputs with their shapes."""
    texts = [f"{name}: {tuple(x.shape)} {x.dtype}" for name, x in outputs.items()]
    texts += [f"{name}: of {number_of(len(each), 'microbatch')}" for name, each in listed.items()]
    more = [f"… {len(texts) - MOST_SHOWN} more"] if len(texts) > MOST_SHOWN else []
    return ["no loss" if loss is None else f"loss={float(loss):.6g}", *texts[:MOST_SHOWN], *more]


@dataclass(eq=False)
class Collected:
    """The outputs of one step on one rank.

    ``wanted``: those to collect, from all ranks, by name.  ``is_list``: whether the values of each microbatch
    are kept apart.  ``any_length``: whether they may have other shapes than the example's.
    """

    wanted: Mapping[str, OutputSpec] = field(default_factory=dict)
    is_list: bool = False
    any_length: bool = False
    values: dict[str, torch.Tensor] = field(default_factory=dict)  # with a dimension of microbatches in front
    listed: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    _times: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(
        wanted: Mapping[str, OutputSpec],
        rank: int,
        microbatches: int,
        device: torch.device | None,
        is_list: bool,
        any_length: bool,
    ) -> Collected:
        """New memory for the outputs of a rank, which the caller keeps after the step."""
        mine = (spec for spec in wanted.values() if spec.rank == rank and not any_length)
        values = {spec.name: empty(spec, microbatches, device) for spec in mine}
        return Collected(wanted, is_list, any_length, values)

    def add(self, name: str, value: torch.Tensor, microbatch: int, microbatches: int) -> None:
        """Raises RunError if an edited program gives another value than the plan has."""
        spec = self.wanted.get(name)
        if spec is None:
            return
        shape, expected = tuple(value.shape), spec.shape
        if self.any_length:
            shape, expected = (-1,) * len(shape), (-1,) * len(expected)
        if (shape, str(value.dtype)) != (expected, spec.dtype):
            raise RunError(
                f"The program gives the output {name!r} as {value.dtype} of shape {tuple(value.shape)}; the "
                f"plan has {spec.dtype} of shape {spec.shape}. Undo the edit, or compile again."
            )
        if self.is_list:
            self.listed.setdefault(name, {})[microbatch] = value.clone(memory_format=torch.contiguous_format)
        else:
            if name not in self.values:
                self.values[name] = value.new_empty((microbatches, *value.shape))
            self.values[name][microbatch].copy_(value)
        self._times[name] += 1

    def forget(self) -> None:
        """Let all microbatches come again."""
        self._times.clear()
        self.listed.clear()

    def joined(self, rank: int, microbatches: int) -> dict[str, torch.Tensor]:
        """The outputs of this rank.  Raises RunError if an edited program left one out."""
        for name, spec in self.wanted.items():
            times = self._times[name]
            if times != (microbatches if spec.rank == rank else 0):
                raise RunError(
                    f"The program of rank {rank} gives the output {name!r} for {times} microbatches of "
                    f"{microbatches}, and the plan has it on rank {spec.rank}. Undo the edit, or compile "
                    "again."
                )
        return {name: joined(value) for name, value in self.values.items()}

    def in_order(self, rank: int) -> Listed:
        """The outputs of this rank by microbatch, behind ``joined``."""
        mine = [name for name, spec in self.wanted.items() if self.is_list and spec.rank == rank]
        return {name: [x for _, x in sorted(self.listed.get(name, {}).items())] for name in mine}


def empty(spec: OutputSpec, microbatches: int, device: torch.device | None) -> torch.Tensor:
    """Memory for all microbatches, their dimension in front."""
    return torch.empty((microbatches, *spec.shape), dtype=dtype_of(spec.dtype), device=device)


def joined(value: torch.Tensor) -> torch.Tensor:
    """A value without the dimension of microbatches, if it has another one."""
    return value.flatten(0, 1) if value.dim() > 1 else value


def requested(asked: Sequence[str], on: On, known: Iterable[OutputSpec], ranks: int) -> dict[str, OutputSpec]:
    """The outputs with these names.

    Raises RunError for one that the pipeline was not compiled for, and for a rank ``on`` that it lacks.
    """
    if on not in (None, "all") and not (isinstance(on, int) and 0 <= on < ranks):
        raise RunError(f"outputs_on is {on!r} and must be a rank from 0 to {ranks - 1}, 'all' or None.")
    if isinstance(asked, str):
        raise RunError(f"outputs is a list of names: give [{asked!r}].")
    by_name = {spec.name: spec for spec in known}
    for name in asked:
        if name not in by_name:
            has = f"It gives {', '.join(by_name)}." if by_name else "It gives none."
            raise RunError(
                f"The pipeline was not compiled to give the output {name!r}. {has} Name it in outputs=[…] of "
                "fxpipe.compile."
            )
    return {name: by_name[name] for name in asked}
