"""Orders of F and B without W, per rank; each names its source.

An order is built for a number of microbatches that suits its pattern, and surplus microbatches are removed:
microbatches do not depend on each other, so the rest can still progress.
``backward`` is B, if W ops are to be inserted later, or BW.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from fxpipe.schedule.ops import Op, OpKind, RankOps
from fxpipe.schedule.placement import stages_of


def breadth_first(placement: tuple[int, ...], microbatches: int, backward: OpKind, group: int) -> RankOps:
    """All forwards, a stage at a time, then all backwards (GPipe, 1811.06965; looped: 2211.05953); of each
    ``group`` of microbatches before those of the next."""
    groups = [range(first, min(first + group, microbatches)) for first in range(0, microbatches, group)]
    return tuple(
        tuple(
            Op(kind, stage, j)
            for members in groups
            for kind, in_turn in ((OpKind.F, stages), (backward, reversed(stages)))
            for stage in in_turn
            for j in members
        )
        for stages in stages_of(placement)
    )


def interleaved(
    placement: tuple[int, ...],
    microbatches: int,
    backward: OpKind,
    in_flight: Callable[[int], int],
    group: int | None = None,
) -> RankOps:
    """One forward, one backward, over any number of chunks per rank (2104.04473).

    Microbatches run in groups of ``group`` (default p), each group through one chunk after the other.
    ``in_flight(rank)``: how many forwards may be without their backward; with one chunk and p - rank in
    flight this is 1F1B.
    """
    size = group or max(placement) + 1
    groups = range(0, microbatches, size)
    order = []
    for rank, stages in enumerate(stages_of(placement)):
        down = [Op(OpKind.F, stage, i + j) for i in groups for stage in stages for j in range(size)]
        up = [Op(backward, stage, i + j) for i in groups for stage in reversed(stages) for j in range(size)]
        warm = min(in_flight(rank) - 1, len(down))
        pairs = zip(down[warm:], up, strict=False)  # the last B have no F beside them
        ops = (*down[:warm], *(op for pair in pairs for op in pair), *up[len(down) - warm :])
        order.append(tuple(op for op in ops if op.microbatch < microbatches))
    return tuple(order)


def zero_bubble_v(ranks: int, microbatches: int, backward: OpKind) -> RankOps:
    """The order of ZB-V (2401.10241): two chunks a rank in V placement, at most 2p of them in flight."""
    return tuple(_zero_bubble_v(rank, ranks, microbatches, backward) for rank in range(ranks))


def _zero_bubble_v(rank: int, ranks: int, microbatches: int, backward: OpKind) -> tuple[Op, ...]:
    f, b = OpKind.F, backward
    whole = max(microbatches, 2 * ranks - 1)
    stage = (rank, 2 * ranks - 1 - rank)
    ops: list[Op] = []
    count: Counter[tuple[OpKind, int]] = Counter()

    def run(*steps: tuple[OpKind, int], times: int = 1) -> None:
        for _ in range(times):
            for kind, chunk in steps:
                ops.append(Op(kind, stage[chunk], count[kind, chunk]))
                count[kind, chunk] += 1

    # Three lines of warm-up, the steady state, and the end, as F of one chunk after the other run out.
    run((f, 0), times=2 * (ranks - rank) - 1)
    run((f, 1), (f, 0), times=rank)
    run((f, 1), (b, 1), times=ranks - rank)
    run((f, 0), (b, 0), (f, 1), (b, 1), times=whole - count[f, 0])
    run((b, 0), (f, 1), (b, 1), times=whole - count[f, 1])
    run((b, 0), (b, 1), times=rank)
    run((b, 0), times=ranks - rank)
    return tuple(op for op in ops if op.microbatch < microbatches)


def dual_pipe_v(ranks: int, microbatches: int) -> RankOps:
    """DualPipeV (DeepSeek's DualPipe, cut in half): V placement, one model copy, two chunks a rank.

    Overlapped forwards and backwards run one after the other here.  A backward is one BW, unless the
    published order delays its W.
    """
    return tuple(_dual_pipe_v(rank, ranks, microbatches) for rank in range(ranks))


def _dual_pipe_v(rank: int, ranks: int, microbatches: int) -> tuple[Op, ...]:
    whole = max(microbatches, 2 * ranks)
    stage = (rank, 2 * ranks - 1 - rank)
    ops: list[Op] = []
    count: Counter[tuple[bool, int]] = Counter()
    delayed: deque[Op] = deque()

    def forward(chunk: int) -> None:
        ops.append(Op(OpKind.F, stage[chunk], count[True, chunk]))
        count[True, chunk] += 1

    def backward(chunk: int, delay: bool = False) -> None:
        microbatch = count[False, chunk]
        ops.append(Op(OpKind.B if delay else OpKind.BW, stage[chunk], microbatch))
        if delay:
            delayed.append(Op(OpKind.W, stage[chunk], microbatch))
        count[False, chunk] += 1

    # The eight steps of the published code: F0; F0 F1; B1 W1 F1; F0 B1 F1 B0, the steady state; B1 F1 B0;
    # B1 B0; W B0; W.
    after = ranks - rank - 1
    for _ in range(2 * after):
        forward(0)
    for _ in range(rank + 1):
        forward(0)
        forward(1)
    for _ in range(after):
        backward(1, delay=True)
        ops.append(delayed.popleft())
        forward(1)
    for _ in range(whole - 2 * ranks + rank + 1):
        forward(0)
        backward(1)
        forward(1)
        backward(0)
    for _ in range(after):
        backward(1)
        forward(1)
        backward(0)
    half = (rank + 1) // 2
    for step in range(rank + 1):
        backward(1, delay=step > half or (step == half and rank % 2 == 1))
        backward(0, delay=step >= half)
    for _ in range(after):
        if delayed:
            ops.append(delayed.popleft())
        backward(0, delay=True)
    return tuple(op for op in (*ops, *delayed) if op.microbatch < microbatches)
