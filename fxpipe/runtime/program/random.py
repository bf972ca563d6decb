"""Random ops with an explicit key, so that the numbers of a run depend on the key alone.

A key is made from (seed, step, microbatch); each op adds its position in the model.  The number of ranks, the
schedule, recomputation and offload do not change the numbers that an op draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from fxpipe.runtime.program.accelerator import generator, is_accelerator
from fxpipe.runtime.program.captured import captured
from fxpipe.runtime.torch_private import schema_of

_MASK = (1 << 64) - 1
_library = torch.library.Library("fxpipe", "FRAGMENT")


def fold(key: int, number: int) -> int:
    """Mix a number into a key (the finalizer of splitmix64)."""
    z = (key + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def keyed(
    key: int | torch.Tensor,
    position: int | torch.Tensor,
    op: Callable[..., object],
    /,
    *args: object,
    **kwargs: object,
) -> object:
    """Run a random op as if its device's generator had been seeded with ``key`` and ``position``.

    The generator's state is restored.  In a trace the key is a tensor (0-d, int64), and so is a position that
    differs from layer to layer: the trace sees one op, whose result depends on its arguments alone.
    """
    if isinstance(key, torch.Tensor):
        kind = "Tensor" if isinstance(position, torch.Tensor) else "int"
        return _as_one_op(op, kind)(key, position, *args, **kwargs)
    run, device = partial(op, *args, **kwargs), _device(args, kwargs)
    capture = captured.get()
    if capture is not None:
        return capture.draw(key & _MASK, int(position), run, device)  # a tensor's is signed
    return seeded(run, seed_of(key, int(position)), device)


def seeded(op: Callable[[], object], seed: int, device: torch.device) -> object:
    """Run a random op behind a seed of its device's generator, whose state is restored."""
    drawn_from = generator(device)
    before = drawn_from.get_state()
    drawn_from.manual_seed(seed)
    try:
        return op()
    finally:
        drawn_from.set_state(before)


def seed_of(key: int, position: int) -> int:
    """The seed by which the random op of a position draws."""
    return fold(key, position) & 0x7FFFFFFFFFFFFFFF


def as_tensor(key: int) -> torch.Tensor:
    """A key or a position as a trace takes it: ``fold`` mixes the same bits."""
    return torch.tensor(key - (1 << 64) if key >> 63 else key)


@cache
def _as_one_op(op: Any, kind: str) -> Any:
    """``keyed`` of an ATen op as an op of its own, with the key and the position before its arguments, under
    names that no op has: attentions have a ``key``.

    ``kind``: of the position, "int" or "Tensor".
    """
    name = f"keyed{'_at' if kind == 'Tensor' else ''}_{re.sub(r'[^a-zA-Z0-9]+', '_', op.name())}"
    arguments_and_result = str(schema_of(op)).partition("(")[2]
    _library.define(f"{name}(Tensor random_key, {kind} random_position, {arguments_and_result}")

    def run(key: torch.Tensor, position: int | torch.Tensor, /, *args: object, **kwargs: object) -> object:
        return keyed(int(key), position, op, *args, **kwargs)

    def fake(key: torch.Tensor, position: int | torch.Tensor, /, *args: object, **kwargs: object) -> object:
        return op(*args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxpipe::{name}", fake, lib=_library)
    return getattr(torch.ops.fxpipe, name).default


def _device(args: tuple[object, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device whose generator an op draws from: that of its tensors, or the one it makes tensors on."""
    device = None
    for value in (*args, *kwargs.values()):
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                device = tensor.device
                if is_accelerator(device):  # beside it there may be numbers in tensors of the CPU
                    return device
    return device or torch.device(kwargs.get("device") or "cpu")
