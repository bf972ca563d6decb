"""Evaluates a batch of any number of rows with programs for whole microbatches.

The rows of the last microbatch are repeated until all of them stand in whole microbatches equally often,
which count for less; what fills a step counts for nothing.  So the loss is the mean over the rows that are
there, if no row depends on the others of its microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import torch

from fxpipe.errors import BatchError, number_of
from fxpipe.plan.step import StepSpec
from fxpipe.runtime.batch.microbatches import as_dicts, batch_leaves
from fxpipe.runtime.torch_private import pytree


@dataclass(frozen=True)
class ShortBatch:
    """A batch in whole microbatches.  ``steps``: the rows of each, and what each of its microbatches counts
    for.  ``whole``: the number of whole microbatches.  ``rows``: of the batch, ``size``: of a microbatch."""

    steps: tuple[tuple[list[int], tuple[float, ...]], ...]
    rows: int
    size: int

    @property
    def whole(self) -> int:
        return self.rows // self.size

    def batches(self, spec: StepSpec, batch: object) -> list[object]:
        """The batch of each step."""
        batch = as_dicts(batch)
        sizes = {leaf.name: leaf.shape for leaf in spec.batch.leaves if not leaf.unread}
        leaves, tree = batch_leaves(batch), pytree.tree_flatten(batch)[1]
        return [
            pytree.tree_unflatten(
                [self._taken(x, rows, sizes[name][0]) if sizes.get(name) else x for name, x in leaves],  # type: ignore[index]
                tree,
            )
            for rows, _ in self.steps
        ]

    def outputs(self, spec: StepSpec, steps: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The outputs of the rows that are there, from those of all steps."""
        order = [row for rows, _ in self.steps for row in rows]
        first = [order.index(row) for row in range(self.rows)]
        shapes = {output.name: output.shape for output in spec.outputs}
        values = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
        return {
            name: self._taken(x, first, shapes[name][0]) if shapes[name] else x[: self.whole]
            for name, x in values.items()
        }

    def _taken(self, value: torch.Tensor, rows: Sequence[int], length: int) -> torch.Tensor:
        """The parts of a value that belong to these rows.  length: of a microbatch."""
        parts = value.unflatten(0, (-1, length // self.size))
        chosen: torch.Tensor = parts[torch.tensor(rows, device=value.device)]
        return chosen.flatten(0, 1)


def short_batch(spec: StepSpec, batch: object, outputs: Sequence[str]) -> ShortBatch | None:
    """Divide a batch of any number of rows into steps; None for one that makes the microbatches of a step, or
    that no number of rows would fit.

    Raises BatchError for an output that is no part of the rows.
    """
    leaves = dict(batch_leaves(batch))
    shapes = {leaf.name: leaf.shape for leaf in spec.batch.leaves if leaf.shape and not leaf.unread}
    size = min((shape[0] for shape in shapes.values()), default=1)
    lengths = {
        name: len(leaves[name])
        for name in shapes
        if isinstance(leaves.get(name), torch.Tensor) and leaves[name].dim()
    }
    numbers = {lengths[name] * size / shapes[name][0] for name in lengths}
    rows = int(max(numbers, default=0))
    even = numbers == {rows} and all(shape[0] % size == 0 for shape in shapes.values())
    if not even or rows in (0, size * spec.microbatches) or rows > size * spec.microbatches:
        return None
    for output in spec.outputs:
        has_rows = output.shape and output.shape[0] % size == 0
        if output.name in outputs and not has_rows and rows % size:
            raise BatchError(
                f"The output {output.name!r} is of a microbatch, and {number_of(rows, 'row')} make no whole "
                f"number of them, {size} in each. Leave it out, or drop the last {rows % size}."
            )
    return ShortBatch(_steps(rows, size, spec.microbatches), rows, size)


def _steps(rows: int, size: int, microbatches: int) -> tuple[tuple[list[int], tuple[float, ...]], ...]:
    """The rows of each step, and the weights of its microbatches.  Each of the last rows stands size /
    gcd(rest, size) times, the fewest that fill whole microbatches."""
    whole, rest = divmod(rows, size)
    parts = [([*range(m * size, (m + 1) * size)], 1.0) for m in range(whole)]
    if rest:
        number = rest // gcd(rest, size)
        filled = [whole * size + k % rest for k in range(number * size)]
        parts += [(filled[k * size : (k + 1) * size], rest / (size * number)) for k in range(number)]
    parts += [(parts[0][0], 0.0)] * (-len(parts) % microbatches)
    steps = (parts[k : k + microbatches] for k in range(0, len(parts), microbatches))
    return tuple(([row for order, _ in step for row in order], tuple(w for _, w in step)) for step in steps)
