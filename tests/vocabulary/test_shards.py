"""The rows of a table that each rank holds, and their names."""

from itertools import pairwise

import pytest
import torch

from fxpipe.plan.rows import rows_of, whole
from fxpipe.vocabulary.split import shard_bounds


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("size", [32000, 32768, 50257, 151936, 256000])
def test_shards_are_even(size: int, ranks: int) -> None:
    bounds = shard_bounds(size, ranks)
    rows = [end - begin for begin, end in pairwise(bounds)]
    assert sum(rows) == size
    assert max(rows) <= 1.01 * size / ranks
    assert all(begin % 16 == 0 for begin in bounds[:-1])


def test_small_vocabularies_are_cut_to_the_row() -> None:
    assert shard_bounds(7, 3) == [0, 2, 4, 7]


def test_rows_and_tables() -> None:
    assert rows_of("head.weight") is None
    parts = {"a[2:3]": torch.tensor([3.0]), "b": torch.ones(2), "a[0:2]": torch.tensor([1.0, 2.0])}
    assert whole(parts)["a"].tolist() == [1, 2, 3]
    assert set(whole(parts)) == {"a", "b"}
