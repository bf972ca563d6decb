"""Each rank of a pipeline as the only process of Hugging Face's Trainer: all ranks take the same batches.

``process_index`` stays the rank's number, by which the first one alone logs and saves.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

import fxpipe
from fxpipe.errors import OptionError


def ranks_of(model: nn.Module, ranks: int | None, args: Any) -> int:
    """The number of ranks of a model's pipeline; raises OptionError unless it has all processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and args.distributed_state.backend is None:
        raise OptionError(
            f"{processes} processes were started, and TrainingArguments takes each for the only one: without "
            "an accelerator give it use_cpu=True."
        )
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    # Parameters may be on parts of one mesh.
    sizes = {
        each
        for mesh in meshes
        for each in zip(mesh.mesh_dim_names or range(mesh.ndim), mesh.shape, strict=True)
    }
    lanes = prod(size for _, size in sizes)
    if ranks is None:
        ranks = max(1, processes // lanes)
    if ranks * lanes != processes:
        raise OptionError(
            f"A pipeline of ranks={ranks} has {ranks * lanes} processes, and {processes} were started: the "
            "Trainer trains one pipeline, without replicas. Start as many processes as it has."
        )
    return ranks


def as_only_process(args: Any) -> None:
    """Let Trainer and accelerate see one process."""
    state = args.distributed_state  # accelerate's, one object for all of it
    state.num_processes, state.distributed_type = 1, DistributedType.NO
    args._n_gpu = min(args.n_gpu, 1)  # as Trainer sets it for a model on several devices
    args.accelerator_config.dispatch_batches = False  # each rank reads its batches by itself


def together(pipe: fxpipe.Pipeline, what: str) -> AbstractContextManager[None]:
    """All ranks of a pipeline leave a block together; an error in it on one is an error on all."""
    return nullcontext() if pipe.process is None else pipe.process.agreed(what)


def as_first(args: Any) -> AbstractContextManager[object]:
    """Give what is made in the block the number of the first process."""
    return mock.patch.object(args.distributed_state, "process_index", 0)


@contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Give the generators of Python, numpy and torch back the states that they have now."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
