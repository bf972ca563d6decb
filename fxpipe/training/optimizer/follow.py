"""Parameters that follow others of the same model, which other ranks may have: a teacher's, a student's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from fxpipe.errors import OptionError
from fxpipe.plan.artifact import Plan, holders
from fxpipe.plan.rows import ShardName
from fxpipe.training.model.model_state import ModelState


def matched(plan: Plan, into: Mapping[str, str]) -> dict[str, str]:
    """The names of parameters that follow others, each with the name of the other one.

    into: patterns, whose ``*`` stand for the same text in both.
    Raises OptionError for names that the model does not have, or that cannot follow each other.
    """
    if not isinstance(into, Mapping) or not into:
        raise OptionError('into maps names to names, as {"teacher.*": "student.*"} does.')
    known = sorted({name.tensor for rank in plan.tensors for name in rank.parameters})
    pairs: dict[str, str] = {}
    for targets, sources in into.items():
        if targets.count("*") != sources.count("*"):
            raise OptionError(
                f"{targets!r} and {sources!r} have not as many *: each stands for the same text."
            )
        pattern = "(.*)".join(map(re.escape, targets.split("*")))
        matches = {name: match.groups() for name in known if (match := re.fullmatch(pattern, name))}
        if not matches:
            raise OptionError(f"No parameter of the model matches {targets!r}.")
        first, *rest = sources.split("*")
        for name, texts in matches.items():
            pairs[name] = first + "".join(a + b for a, b in zip(texts, rest, strict=True))
    trained = plan.trained
    for target, source in pairs.items():
        if source not in known:
            raise OptionError(f"{target} is to follow {source}, which is no parameter of the model.")
        if target in trained:
            raise OptionError(
                f"{target} is trained, and is to follow {source}: freeze it before the model is compiled."
            )
        ours, theirs = plan.layouts[target], plan.layouts[source]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise OptionError(
                f"{target}, {ours.dtype} of shape {ours.shape}, cannot follow {source}, {theirs.dtype} of "
                f"shape {theirs.shape}."
            )
        if [*plan.lanes.shares(target)] != [*plan.lanes.shares(source)]:
            raise OptionError(f"The lanes share {target} otherwise than {source}: distribute both alike.")
    return pairs


@torch.no_grad()
def follow(state: ModelState, target: str, source: str, rate: float) -> None:
    """Move a parameter this far to another one, wherever the two are.  All processes call it alike."""
    process = state.process
    if process is None:
        state.value(target).lerp_(state.value(source), rate)
        return
    pieces = holders(process_tensors.parameters for process_tensors in state.owned)
    # All processes run through the same pieces, so that their sends and receives meet in one order.
    for piece, owners in _of(target, pieces):
        for owner in owners:
            here = process.world_rank == owner
            value = state.value(piece) if here else None
            for begin, end, part, sender in _senders(state, piece, source, pieces, owner):
                if not here and process.world_rank != sender:
                    continue
                theirs = state.value(part) if process.world_rank == sender else None
                if theirs is not None:
                    rows = _rows(theirs, begin - part.begin, end - part.begin)
                else:
                    assert value is not None
                    rows = torch.empty_like(_rows(value, begin - piece.begin, end - piece.begin))
                if sender != owner:
                    process.send_to(rows, sender, owner)
                if value is not None:
                    _rows(value, begin - piece.begin, end - piece.begin).lerp_(rows, rate)


def _of(name: str, pieces: Mapping[ShardName, list[int]]) -> list[tuple[ShardName, list[int]]]:
    return [(piece, owners) for piece, owners in pieces.items() if piece.tensor == name]


def _senders(
    state: ModelState, piece: ShardName, source: str, pieces: Mapping[ShardName, list[int]], owner: int
) -> Iterator[tuple[int, int, ShardName, int]]:
    """The rows that an owner of a piece needs of another parameter: first and last, the name of what they are
    part of, and the process that sends them, itself if it has them."""
    assert state.process is not None
    number, of_replica = state.process.lanes, state.process.ranks * state.process.lanes
    holder = state.plan.lanes.holder
    shape = state.plan.layouts[source].shape
    length = shape[0] if shape else 1
    for part, have in _of(source, pieces):
        begin, end = max(piece.begin, part.begin), min(piece.end, part.end, length)
        if begin >= end:
            continue
        same_share = [k for k in have if holder(source, k % number) == holder(source, owner % number)]
        yield begin, end, part, _nearest(owner, same_share, of_replica)


def _nearest(owner: int, have: Sequence[int], of_replica: int) -> int:
    """The process itself, one of its replica, or any."""
    return min(have, key=lambda k: (k != owner, k // of_replica != owner // of_replica, k))


def _rows(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return tensor[begin:end] if tensor.dim() else tensor
