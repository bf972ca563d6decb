"""The rows of a table that each rank holds, and their names."""

import pickle
from itertools import pairwise

import pytest
import torch

from fxpipe.plan.rows import ShardName, joined
from fxpipe.strict import Mismatch, structure, unstructure
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


def test_the_rows_of_a_tensor_and_of_all_its_parts() -> None:
    whole, first, last = map(ShardName, ("a", "a[0:2]", "a[2:3]"))
    assert (last, last.tensor, last.begin, last.end, last.is_part) == ("a[2:3]", "a", 2, 3, True)
    assert (whole.tensor, whole.begin, whole.is_part) == ("a", 0, False)
    assert ShardName.of_rows("a", 2, 3) == last
    assert [whole.contains(other) for other in (whole, first, ShardName("b[0:1]"))] == [True, True, False]
    assert [first.contains(other) for other in (whole, first, last, ShardName("a[1:2]"))] == [
        False,
        True,
        False,
        True,
    ]
    table = torch.tensor([1.0, 2.0, 3.0])
    assert last.part_of(table).tolist() == [3]
    assert whole.part_of(table) is table
    found = joined({"a[2:3]": last.part_of(table), "b": torch.ones(2), "a[0:2]": first.part_of(table)})
    assert {name: value.tolist() for name, value in found.items()} == {"a": [1, 2, 3], "b": [1, 1]}


def test_the_name_of_rows_is_a_text_in_files() -> None:
    names = structure(["a[0:2]", "b"], tuple[ShardName, ...])
    assert [type(name) for name in names] == [ShardName, ShardName]
    assert [type(name) for name in unstructure(names)] == [str, str]
    assert pickle.loads(pickle.dumps(names[0])).begin == names[0].begin
    with pytest.raises(Mismatch, match=r"\[0\] is 1 and must be a string"):
        structure([1], tuple[ShardName, ...])
