"""Lengths of samples as arguments, and what their steps take: padded, and packed."""

import argparse
from collections.abc import Mapping

import pytest

from fxpipe.cli.lengths import Listed, LogNormal, drawn, lengths
from fxpipe.cost.batch_order import BatchPlanner
from fxpipe.cost.samples import Packer, Way
from fxpipe.errors import SizeError
from fxpipe.plan.step import NamedLength
from fxpipe.schedule.costs import Costs, StageCost, chain
from fxpipe.schedule.search.build import build

RANKS, LONGEST, MICROBATCHES = 4, 512, 8
STEP = [500, 30, 40, 100, 200, 120, 60, 90]


def test_lengths_of_numbers_and_files(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text('731\n\n{"length": 64}\n{"input_ids": [5, 6, 7]}\n[1, 2]\n')
    assert lengths(str(file)) == Listed(str(file), (731, 64, 3, 2))
    assert lengths("7, 64,2048").lengths == (7, 64, 2048)


def test_more_lengths_than_the_name_of_a_file_has_characters():
    assert lengths(",".join(["731"] * 2000)).lengths == (731,) * 2000
    with pytest.raises(argparse.ArgumentTypeError, match="is no distribution"):
        lengths("normal:" + "m" * 5000)


def test_drawn_lengths():
    source = lengths("lognormal:mean=600,sigma=1.0,min=50")
    assert source == LogNormal("lognormal:mean=600,sigma=1.0,min=50", 600, 1, 50)
    steps = drawn(source, 8192, 5000, seed=1)
    found = [n for step in steps for n in step]
    assert sum(found) / len(found) == pytest.approx(600, rel=0.05)
    assert (min(found), max(found)) == (50, 8192)
    assert steps == drawn(source, 8192, 5000, seed=1) != drawn(source, 8192, 5000, seed=2)
    listed = Listed("", tuple(range(1, 101)))
    assert all(len({*step}) == 100 for step in drawn(listed, 512, 100, seed=0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3,x", "'3,x' is no list of lengths, and no file"),
        ("3,0", "'3,0' is no list of lengths"),
        ("lognormal:mean=600", "lognormal takes mean and sigma"),
        ("lognormal:mean=600,sigma=1,mode=3", "lognormal takes mean and sigma"),
        ("lognormal:mean=600 sigma=1", "could not convert string to float"),
        ("normal:mean=600,sigma=1", "is no distribution"),
        ("lognormal:mean=0,sigma=1", "mean is above 0"),
        ("lognormal:mean=9,sigma=1,max=3,min=5", "min from 1 to max"),
        ("lognormal:mean=nan,sigma=1", "mean is above 0"),
    ],
)
def test_lengths_that_are_none(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        lengths(text)


@pytest.mark.parametrize("line", ["many", '{"text": "a"}', "-3", "1.5", "true"])
def test_a_file_that_has_something_else(tmp_path, line):
    (tmp_path / "lengths").write_text(f"12\n{line}\n")
    with pytest.raises(argparse.ArgumentTypeError, match=r"line 2: .* is no length: write 731"):
        lengths(str(tmp_path / "lengths"))
    (tmp_path / "lengths").write_text("\n")
    with pytest.raises(argparse.ArgumentTypeError, match="has no lengths"):
        lengths(str(tmp_path / "lengths"))


class ByToken(BatchPlanner):
    def costs(self, lengths: Mapping[str, int], share: float = 1.0) -> Costs:
        n = lengths["time"]
        return chain([StageCost(n, n, n, n, n / 2)] * RANKS)


def packer(memory: float, **more: int) -> Packer:
    costs = chain([StageCost(*[LONGEST] * 4, LONGEST / 2)] * RANKS)
    schedule = build("zb-h1", ranks=RANKS, microbatches=MICROBATCHES, costs=costs)
    planner = ByToken(schedule, costs, None, (memory * LONGEST,) * RANKS)
    return Packer(planner, NamedLength("time", LONGEST, 16, 16), **{"rows": 1, **more})


def lengths_of(way: Way) -> list[int]:
    (step,) = way.steps
    return [each.length for each in step]


@pytest.mark.variation
def test_ways_to_put_samples_into_microbatches():
    longest, buckets, *packed = packer(RANKS).ways([STEP], (128, 256))
    assert lengths_of(longest) == [512] * 8
    assert sorted(lengths_of(buckets)) == [32, 64, 64, 128, 128, 128, 256, 512]
    # In multiples of 16: 500 alone, 200, 120, 100, 90 and 30, 60 and 40.
    assert lengths_of(packed[0]) == [512, 208, 128, 128, 112, 112]
    assert (packed[0].tokens, packed[0].places, packed[0].limit) == (128, 1200, "longest sample")
    assert longest.seconds > buckets.seconds > packed[0].seconds
    with pytest.raises(SizeError, match="A sample has 513 tokens, and the example 512"):
        packer(RANKS).ways([[3, 513]])


@pytest.mark.variation
def test_rows_and_replicas_have_microbatches_in_common():
    (way,) = [way for way in packer(RANKS, rows=2, replicas=2).ways([STEP], (128,)) if way.tokens]
    assert lengths_of(way) == [512, 112]
    squares = sum(n * n for n in (500, 200, 120, 90, 30))
    assert way.steps[0][0].share == pytest.approx(squares / 2 / (2 * 512) ** 2)
    assert way.places == 4 * (512 + 112)


def test_what_limits_a_step():
    def limits(memory: float, step: list[int]) -> dict[str, str]:
        return {way.name: way.limit for way in packer(memory).ways([step], (128, 512))}

    assert limits(RANKS, STEP) == {
        "padded to the longest": "longest sample",
        "padded to buckets": "longest sample",
        "packed to 128": "longest sample",
        "packed to 512": "tokens",
    }
    tight = packer(1.05).ways([[100] * 16], (128, 512))
    assert [way.limit for way in tight[2:]] == ["tokens", "memory"]
    (none,) = packer(0.5).ways([[100] * 16], (512,))[2:]
    assert (none.seconds, none.limit) == (None, "memory")
