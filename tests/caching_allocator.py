"""A model of torch's allocator for GPUs, fed with the tensors that programs make and drop on the CPU.

It rounds, splits and merges blocks as CUDACachingAllocator does, and counts how often it asks the driver.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

KIB, MIB = 1 << 10, 1 << 20
#: Of all blocks a multiple; of small blocks the largest, and the segment; of blocks in the same segments the
#: largest, and the segment; of other segments a multiple.
ROUND, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT, LARGE_ROUND = 10 * MIB, 20 * MIB, 2 * MIB


def rounded(size: int, to: int) -> int:
    return max(1, -(-size // to)) * to


@dataclass(eq=False)
class Block:
    """Part of a segment, beside the parts before and behind it."""

    pool: list[Block]  # the free blocks of the same kind
    address: int
    size: int
    before: Block | None = None
    behind: Block | None = None
    is_free: bool = False


@dataclass
class CachingAllocator:
    """``asked``: how often it has asked the driver for memory.  ``pool``: from which it allocates now."""

    asked: int = 0
    pool: str = ""
    _pools: dict[tuple[str, bool], list[Block]] = field(default_factory=dict)
    _end: int = 0

    def allocate(self, size: int) -> Block:
        size = rounded(size, ROUND)
        small = size <= SMALL
        free = self._pools.setdefault((self.pool, small), [])
        fitting = [block for block in free if block.size >= size]
        block = min(fitting, key=lambda b: (b.size, b.address), default=None)
        if block is None:
            block = self._segment(free, size, small)
        else:
            free.remove(block)
        block.is_free = False
        left = block.size - size
        if left >= ROUND if small else left > SMALL:
            rest = Block(free, block.address + size, left, block, block.behind, is_free=True)
            if block.behind is not None:
                block.behind.before = rest
            block.behind, block.size = rest, size
            free.append(rest)
        return block

    def _segment(self, free: list[Block], size: int, small: bool) -> Block:
        self.asked += 1
        if small:
            size = SMALL_SEGMENT
        elif size < MEDIUM:
            size = MEDIUM_SEGMENT
        block = Block(free, self._end, rounded(size, LARGE_ROUND))
        self._end += block.size
        return block

    def release(self, block: Block) -> None:
        block.is_free = True
        for other in (block.before, block.behind):
            if other is None or not other.is_free:
                continue
            block.pool.remove(other)
            block.address = min(block.address, other.address)
            block.size += other.size
            if other is block.before:
                block.before = other.before
                if block.before is not None:
                    block.before.behind = block
            else:
                block.behind = other.behind
                if block.behind is not None:
                    block.behind.before = block
        block.pool.append(block)


class Driver(TorchDispatchMode):
    """While entered, the tensors of this thread have memory of the model, ``scale`` times their bytes.

    ``pool``: of the blocks of ``steps``, which are steps unless ``is_dry`` is set in them.  ``in_steps``: for
    each of them, how often the driver was asked for memory.  ``first_used``: the ops that were used there for
    the first time.
    """

    def __init__(self, scale: int, pool: str = "steps") -> None:
        super().__init__()
        self.allocator, self.scale, self.pool = CachingAllocator(), scale, pool
        self.is_dry = self._in_step = False
        self.in_steps: list[int] = []
        self.first_used: list[str] = []
        self._used: set[Any] = set()
        self._thread = threading.current_thread()
        self._live: dict[int, tuple[StorageWeakRef, Block]] = {}

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give memory to tensors that were there before."""
        for tensor in tensors:
            self._watch(tensor)

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        self._drop()
        before, self.allocator.pool = self.allocator.asked, self.pool
        self._in_step = True
        try:
            yield
        finally:
            self._drop()
            if not self.is_dry:
                self.in_steps.append(self.allocator.asked - before)
            self.allocator.pool = ""
            self.is_dry = self._in_step = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.current_thread() is not self._thread:  # of gloo, which inherit the mode
            return func(*args, **(kwargs or {}))
        self._drop()
        if func not in self._used:
            self._used.add(func)
            if self._in_step and not self.is_dry and func.namespace != "c10d":
                self.first_used.append(str(func))
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor)
        return result

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._live and storage.nbytes():
            block = self.allocator.allocate(storage.nbytes() * self.scale)
            self._live[reference.cdata] = reference, block

    def _drop(self) -> None:
        gone = [key for key, (reference, _) in self._live.items() if reference.expired()]
        for key in gone:
            self.allocator.release(self._live.pop(key)[1])
