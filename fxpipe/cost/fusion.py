"""The kernels that Inductor makes of the ops of a function.

before: q = mm ──► silu ──► mul ──► mm,  mul ──► sum over the tokens
after:  mm,  silu + mul,  mm,  sum

A product, a convolution, attention and a random op are kernels of a library.  The others are loops: over the
entries of a value, or over rows of which an op makes a number or a norm.  Loops over as many entries are one
kernel if one reads what another computes, or both read the same; a sum across the rows of memory begins its
own.  A kernel reads a value once and writes what others read.  A value that only kernels read is computed
again by each, unless it needs too many inputs for that; views cost nothing.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, cast

from torch import fx

from fxpipe.cost.kinds import COMPUTING, kind_of
from fxpipe.ir.compiled import compiled_functions, computing
from fxpipe.ir.dims import dims_of
from fxpipe.ir.nodes import input_nodes
from fxpipe.ir.storage import argument, is_view, node_bytes, tensors, written_arguments
from fxpipe.plan.work import BETWEEN_LANES
from fxpipe.schedule.ops import Phase

#: A value that is computed of more inputs is written; with several readers, one of more than ``SHARED``
#: (``realize_acc_reads_threshold`` and ``realize_reads_threshold`` of Inductor's configuration).
INPUTS, SHARED = 8, 4
#: Kinds of ops that are no loops, and ops whose entries depend on others than those of their row.
_LIBRARY = {*COMPUTING, "random", BETWEEN_LANES}
_APART = {"sort", "topk", "cumsum", "cumprod", "index_put", "index_add", "scatter", "scatter_add", "nonzero"}
_APART |= {"embedding_dense_backward"}
#: Ops that read as much of their first argument as they return.
_PICKS = {"embedding", "index", "index_select", "gather", "take", "nll_loss_forward"}

Reads = dict[fx.Node, fx.Node]
"""A value that a kernel reads -> the node whose size is what it reads of it."""


class _Loop(NamedTuple):
    """Over ``rows`` of ``length`` entries, which an op reduces; a length of 1: over entries.  ``across``: the
    entries of a row lie apart in memory."""

    rows: int
    length: int = 1
    across: bool = False

    def goes_on(self, other: _Loop) -> bool:
        """Whether what reads its result can be computed in it."""
        if other.length == 1:
            return other.rows == self.rows or (not self.across and other.rows == self.rows * self.length)
        if self.length == 1:
            return not other.across and self.rows == other.rows * other.length
        return self == other and not self.across


class Kernel(NamedTuple):
    """``ops``: that it computes.  ``reads``, ``writes``: what goes through memory."""

    ops: list[fx.Node]
    reads: Reads
    writes: list[fx.Node]

    def bytes_moved(self, size: Callable[[fx.Node], Any] = node_bytes) -> Any:
        """Bytes read and written.  size: of a node's value, a number or a polynomial."""
        return sum(map(size, (*self.reads.values(), *self.writes)))


def kernels_of(
    nodes: Sequence[fx.Node], phase: Phase, compiled: Collection[Phase]
) -> tuple[list[fx.Node], list[Kernel]]:
    """The ops of a section, in the order in which they run, that run one by one, and its fused kernels.

    compiled: the phases of which sections are compiled.
    """
    functions = compiled_functions(nodes, phase) if phase in compiled else []
    inside = {node for function in functions for node in function}
    ops, fused = [node for node in nodes if node not in inside], list[Kernel]()
    for function in functions:
        fusion = _Fusion(function)
        ops += [node for node in fusion.levels if is_library(node)]
        fused += fusion.kernels()
    return ops, fused


def is_library(node: fx.Node) -> bool:
    """Whether no other op runs in the kernel of this one."""
    return (
        kind_of(node) in _LIBRARY
        or _name(node) in _APART
        or getattr(node.target, "namespace", "") not in ("aten", "prims")
        or any(written_arguments(node.target, node.args, node.kwargs))
    )


class _Fusion:
    """``levels``: of what is in memory, how many kernels must run before; along an edge from one kernel to
    another it grows, so that fused ones never wait for each other.  ``loops``: of ops that are no library's,
    and that are written or reduce.  ``reads``: of all others as well.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        works = {*computing(nodes)}
        self.inside = {n for n in nodes if n in works or n.target is operator.getitem or is_view(n)}
        self.levels: dict[fx.Node, int] = {}
        self.loops: dict[fx.Node, _Loop] = {}
        self.reads: dict[fx.Node, Reads] = {}
        self._parent: dict[fx.Node, fx.Node] = {}
        self._alike: dict[tuple[object, ...], fx.Node] = {}
        self._before: list[Kernel] = []  # beside the kernels of the loops
        for node in nodes:
            if node in works:
                self._take(node)
        self._delay()

    def kernels(self) -> list[Kernel]:
        groups = self._groups()
        outside = {node for node in self.loops if any(map(self._is_apart, self._users(node)))}
        read = {
            source
            for node in self.loops
            for source in map(self._source, self.reads[node])
            if source in self.loops and self._group(source) is not self._group(node)
        }
        made = [
            Kernel(ops, self._reads_of(ops), [op for op in ops if op in outside or op in read])
            for ops in groups.values()
        ]
        return [*self._before, *(kernel for kernel in made if kernel.writes)]

    def _take(self, node: fx.Node) -> None:
        if is_library(node):
            inputs = [y for x in input_nodes(node) for y in self._read_for(x)]
            self.levels[node] = 1 + max((self.levels.get(self._source(x), 0) for x in inputs), default=0)
            return
        reads: Reads = {}
        for x in input_nodes(node):
            picks = x is node.args[0] and _name(node) in _PICKS
            reads |= {x: node} if picks else self._read_for(x)
        self.reads[node] = reads
        loop = _loop(node)
        if loop.length == 1 and not self._is_written(node):
            return
        sources = {self._source(x) for x in reads} & self.levels.keys()
        fused = [s for s in sources if s in self.loops and self.loops[s].goes_on(loop)]
        level = max((self.levels[s] + (s not in fused) for s in sources), default=0)
        if loop.across and loop.rows * loop.length == tensors(node)[0].numel():
            # A norm across the rows has to read all of its input before its loop over the entries.
            self._before.append(Kernel([node], reads, []))
            loop, fused, level = _Loop(loop.rows * loop.length), [], level + 1
        elif _sums_across(node):
            self._before.append(Kernel([node], reads, []))
        self.levels[node], self._parent[node] = level, node
        joined = [s for s in fused if self.levels[s] == level]
        for s in joined:
            self._parent[self._group(s)] = node
        self.loops[node] = max((loop, *(self.loops[s] for s in joined)), key=lambda one: one.length)
        size = loop.rows * loop.length
        for x in reads:
            alike = self._alike.setdefault((x, level, size, loop.across), node)
            self._parent[self._group(alike)] = self._group(node)

    def _groups(self) -> dict[fx.Node, list[fx.Node]]:
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in self.loops:
            groups.setdefault(self._group(node), []).append(node)
        return groups

    def _delay(self) -> None:
        """Let a kernel wait for one that reads what it computes, or the same as it: what B computes again of
        the forward is in the kernel of the gradient, whatever that waits for."""
        groups, read_by = self._groups(), defaultdict[fx.Node, list[fx.Node]](list)
        for node in self.loops:
            for x in self.reads[node]:
                read_by[self._source(x)].append(node)
        for first in sorted(groups, key=self.levels.__getitem__, reverse=True):
            ops = groups[first]
            near = [r for op in ops for r in self._readers(op) if r in self.loops]
            near += [n for op in ops for x in self.reads[op] for n in read_by[self._source(x)]]
            later: dict[fx.Node, int] = {}  # a kernel -> bytes that are not read twice
            for other in dict.fromkeys(map(self._group, near)):
                if self.levels[other] > self.levels[first] and self._may_join(ops, groups[other]):
                    read = {self._source(x) for op in groups[other] for x in self.reads[op]}
                    of_both = self._reads_of(ops).keys() & self._reads_of(groups[other]).keys()
                    later[other] = sum(map(node_bytes, of_both | (read & {*ops})))
            best = max(later, key=later.__getitem__, default=first)
            if later.get(best):
                self.levels |= dict.fromkeys(ops, self.levels[best])
                self._parent[first] = best
                groups[best] += groups.pop(first)

    def _may_join(self, ops: Sequence[fx.Node], later: Sequence[fx.Node]) -> bool:
        """Whether one kernel can compute both, with nothing in between that waits for the first."""
        level = self.levels[later[0]]
        for op in ops:
            for reader in self._readers(op):
                if reader in later:
                    if not self.loops[op].goes_on(self.loops[reader]):
                        return False
                elif reader not in ops and self.levels.get(reader, level + 1) <= level:
                    return False
        one, two = self._shape(ops), self._shape(later)
        return one == two or (1 in (one.length, two.length) and prod(one[:2]) == prod(two[:2]))

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """The ops that read the value, or what others compute of it for themselves."""
        readers, seen, todo = list[fx.Node](), set[fx.Node](), self._users(node)[::-1]
        while todo:
            user = todo.pop()
            # Each once: the ways through ops that are computed there double wherever two of them meet again.
            if user in seen:
                continue
            seen.add(user)
            if user in self.reads and user not in self.loops:
                todo += reversed(self._users(user))
            else:
                readers.append(user)
        return readers

    def _shape(self, group: Sequence[fx.Node]) -> _Loop:
        return max((self.loops[op] for op in group), key=lambda loop: loop.length)

    def _is_written(self, node: fx.Node) -> bool:
        users, count = self._users(node), len(self.reads[node])
        too_many = count > (INPUTS if len(users) == 1 else SHARED)
        return too_many or not users or any(map(self._is_apart, users))

    def _is_apart(self, user: fx.Node) -> bool:
        """Whether a user reads from memory in any case."""
        return user not in self.inside or is_library(user)

    def _users(self, node: fx.Node) -> list[fx.Node]:
        """The ops that read the value or a view of it."""
        users = list[fx.Node]()
        for user in node.users:
            is_part = user in self.inside and (user.target is operator.getitem or is_view(user))
            users += self._users(user) if is_part else [user]
        return users

    def _source(self, value: fx.Node) -> fx.Node:
        """The op of the function whose memory a value is in; a value of another function itself."""
        while value in self.inside and (value.target is operator.getitem or is_view(value)):
            value = cast(fx.Node, value.args[0])
        return value

    def _read_for(self, value: fx.Node) -> Reads:
        """What a kernel reads that needs a value."""
        source = self._source(value)
        return self.reads[source] if source in self.reads and source not in self.loops else {value: value}

    def _group(self, node: fx.Node) -> fx.Node:
        while (parent := self._parent[node]) is not node:
            self._parent[node] = node = self._parent[parent]
        return node

    def _reads_of(self, ops: Iterable[fx.Node]) -> Reads:
        computed, views = {*ops}, dict[fx.Node, Reads]()
        for op in ops:
            for value, size in self.reads[op].items():
                if (source := self._source(value)) not in computed:
                    views.setdefault(source, {})[value] = size
        reads: Reads = {}
        for source, of_it in views.items():
            # Of several views of one memory, all of it.
            picked = all(size is not value for value, size in of_it.items())
            reads |= of_it if picked or len(of_it) == 1 else {source: source}
        return reads


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "").removesuffix("_")


def _loop(node: fx.Node) -> _Loop:
    """The loop in which an op is computed."""
    kind, results = kind_of(node), tensors(node)
    size = results[0].numel()
    in_training = argument(node, "training", True) and argument(node, "train", True)
    if kind not in ("reduction", "norm") or not in_training:
        return _Loop(size)
    read = next(t for x in input_nodes(node) for t in tensors(x))
    if kind == "norm" and (shape := argument(node, "normalized_shape")) is not None:
        length = prod(cast(list[int], shape))
        return _Loop(read.numel() // length, length)
    if kind == "norm" and (groups := argument(node, "group")) is not None:
        rows = read.shape[0] * cast(int, groups)
        return _Loop(rows, read.numel() // rows)
    if kind == "norm" and argument(node, "dim") is None:  # of a batch
        return _Loop(read.shape[1], read.numel() // read.shape[1], across=True)
    named = dims_of(node, read.dim()) if read.dim() else None
    reduced = {*range(read.dim())} if named is None else named
    length = prod(read.shape[d] for d in reduced)
    kept = [d for d in range(read.dim()) if d not in reduced and read.shape[d] > 1]
    across = any(k > d for k in kept for d in reduced if read.shape[d] > 1)
    return _Loop(read.numel() // max(length, 1), length, across)


def _sums_across(node: fx.Node) -> bool:
    """Whether the backward of a norm adds up the gradients of its scale and shift over all rows."""
    mask = argument(node, "output_mask")
    return isinstance(mask, (list, tuple)) and any(mask[1:])
