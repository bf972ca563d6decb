"""The training loop of ``fxpipe run``: a loaded pipeline trained on tensors from a file."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open

from fxpipe.errors import BatchError
from fxpipe.names import terminal
from fxpipe.runtime.batch import BatchSpec, Leaf
from fxpipe.strict import Misfit, open_regular, shown
from fxpipe.training.recorded import write_spans

if TYPE_CHECKING:
    from fxpipe.pipeline import Pipeline


def train(
    pipe: Pipeline,
    data: Path,
    *,
    steps: int | None,
    lr: float,
    clip: float | None,
    record: Path | None = None,
    save: Path | None = None,
) -> None:
    """Train with AdamW and print the losses on rank 0; all ranks must call it with the same arguments.

    data: a safetensors file with one tensor for each leaf of the batch, under the leaf's name.  Each step
        takes the next rows; after the last whole batch it continues with the first.
    steps: the number of steps; None takes every whole batch once.
    record: the directory for the times of the last step; see :mod:`fxpipe.training.recorded`.
    save: the directory for the trained pipeline.
    """
    tensors = read_data(data, pipe.plan.step.batch)
    rows = rows_of_batch(pipe)
    total = min((t.shape[0] for t in tensors.values() if t.dim()), default=rows)
    count = total // rows
    if count == 0:
        raise BatchError(
            f"{data} has {total} rows, but one batch of this pipeline takes {rows}: give more rows, or "
            "compile for fewer microbatches."
        )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=lr, clip_grad_norm=clip)
    rank = pipe.runtime.rank
    console = Console(quiet=rank != 0, markup=False, emoji=False)
    hidden = rank != 0 or not console.is_terminal
    for step in track(range(steps or count), "train", console=console, disable=hidden):
        start = step % count * rows
        batch = {name: t[start : start + rows] if t.dim() else t for name, t in tensors.items()}
        loss = pipe.step({**batch, **fixed_values(pipe.plan.step.batch)})
        optimizer.step()
        optimizer.zero_grad()
        console.print(f"step {step}  loss {float(loss):.6f}")
    if record is not None:
        write_spans(record, rank, pipe.runtime.record.spans)
    if save is not None:
        pipe.save(save)
        console.print(terminal(f"saved: {save}"))


def read_data(path: Path, spec: BatchSpec) -> dict[str, torch.Tensor]:
    """Read the tensors of the batch's leaves.  Raises BatchError if the file cannot be read or lacks one."""
    wanted = [leaf.name for leaf in spec.leaves if leaf.shape is not None]
    try:
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            held = set(file.keys())
            missing = [name for name in wanted if name not in held]
            tensors = {name: file.get_tensor(name) for name in wanted if name in held}
    except (Misfit, OSError, SafetensorError) as error:
        raise BatchError(f"{path} cannot be read as a safetensors file: {error}") from error
    if missing:
        raise BatchError(f"{path} has no tensor {missing[0]!r}; it holds {', '.join(sorted(held))}.")
    return tensors


def fixed_values(spec: BatchSpec) -> dict[str, Any]:
    """The leaves that are not tensors, with their values in the example.

    Raises BatchError for a value that cannot be parsed from its ``repr``.
    """
    return {leaf.name: _fixed_value(leaf) for leaf in spec.leaves if leaf.shape is None}


def _fixed_value(leaf: Leaf) -> Any:
    try:
        return ast.literal_eval(leaf.value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise BatchError(
            f"{leaf.name!r} was {shown(leaf.value)} in the example, which cannot be parsed. Train "
            "with pipe.step, and give it in the batch."
        ) from error


def rows_of_batch(pipe: Pipeline) -> int:
    step = pipe.plan.step
    return step.microbatches * next((leaf.shape[0] for leaf in step.batch.leaves if leaf.shape), 1)
