"""Tensors in files by parts: rows, shares of other dimensions, or both; any part of them is read."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fxpipe.plan.spans import PartSpan
from fxpipe.strict import Mismatch
from fxpipe.training.checkpoint import tensor_store

WHOLE = torch.arange(24.0).view(4, 6)


def written(directory, *parts: tuple[slice, slice]) -> list[str]:
    """A file for each of these parts of ``WHOLE``."""
    names = []
    for number, place in enumerate(parts):
        names.append(f"{number}.safetensors")
        offsets = {"w": {"saved_offsets": [own.start for own in place]}}
        tensor = {"w": WHOLE[place].contiguous()}
        save_file(tensor, directory / names[-1], {"DCP_SHARDING_INFO": json.dumps(offsets)})
    return names


def box(begin: int, end: int, first: int, last: int) -> tuple[slice, slice]:
    return slice(begin, end), slice(first, last)


GRID = (box(0, 1, 0, 3), box(1, 4, 0, 3), box(0, 3, 3, 6), box(3, 4, 3, 6))


@pytest.mark.parametrize(
    "parts",
    [GRID, GRID[::-1], (box(0, 4, 0, 6),), (box(0, 4, 0, 2), box(0, 4, 2, 6)), (*GRID, box(2, 2, 0, 6))],
)
def test_any_part_is_read_whatever_parts_were_written(tmp_path, parts):
    stored = tensor_store.stored(tmp_path, written(tmp_path, *parts))
    assert (stored["w"].shape, stored["w"].dtype) == ((4, 6), torch.float32)
    asked = (
        {0: PartSpan(1, 2, 4)},
        {1: PartSpan(2, 3, 6)},
        {0: PartSpan(0, 2, 4), 1: PartSpan(3, 3, 6)},
        {},
        {0: PartSpan(1, 0, 4)},
    )
    expected = WHOLE[1:3], WHOLE[:, 2:5], WHOLE[:2, 3:], WHOLE, WHOLE[1:1]
    for found, wanted in zip(tensor_store.read(stored, [("w", own) for own in asked]), expected, strict=True):
        assert torch.equal(found, wanted)


def test_of_a_dimension_of_another_length_all_is_read(tmp_path):
    """As of an optimizer's state of a parameter that has one number for each row."""
    stored = tensor_store.stored(tmp_path, written(tmp_path, box(0, 4, 0, 6)))
    (found,) = tensor_store.read(
        stored, [("w", {0: PartSpan(0, 2, 4), 1: PartSpan(0, 3, 12), 2: PartSpan(0, 1, 2)})]
    )
    assert torch.equal(found, WHOLE[:2])


@pytest.mark.parametrize(
    "parts",
    [GRID[:-1], GRID[1:], (*GRID, box(0, 1, 0, 1)), (box(0, 4, 0, 4), box(0, 4, 3, 6)), (box(1, 4, 0, 6),)],
)
def test_parts_that_overlap_or_leave_holes_are_refused(tmp_path, parts):
    with pytest.raises(Mismatch, match=r"\d\.safetensors has a part of .*w.* that does not fit the others"):
        tensor_store.stored(tmp_path, written(tmp_path, *parts))
