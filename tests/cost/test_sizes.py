"""Costs at other sizes than the example's: as a fresh compilation at those sizes gives them."""

import re
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from marks import with_variations
from torch import nn
from zoo import Chain, numbers

import fxpipe
from fxpipe import SizeError
from fxpipe.cost.devices.known_devices import CPU
from fxpipe.ir.ops import node_flops

MICROBATCH, SEQUENCE = sympy.symbols("microbatch sequence")


def two_stages(model: nn.Module, example: Any, split: str, **options: Any) -> fxpipe.Pipeline:
    return fxpipe.compile(
        model, example, ranks=2, microbatches=4, schedule="zb-h1", split_points=[split], **options
    )


def flops(pipe: fxpipe.Pipeline, stage: int) -> int:
    return sum(node_flops(n) for s in pipe.stages[stage].sections for n in s.graph.nodes)


def check_against_fresh(pipe: fxpipe.Pipeline, fresh: fxpipe.Pipeline, sizes: Mapping[str, int]) -> None:
    """``fresh`` was compiled for an example of these sizes."""
    here, there = pipe.simulate(sizes), fresh.simulate()
    for stage, (found, expected) in enumerate(zip(here.costs.stages, there.costs.stages, strict=True)):
        assert (found.saved_activations, found.saved_for_weight) == (
            expected.saved_activations,
            expected.saved_for_weight,
        )
        for phase in ("forward", "backward", "weight"):
            assert getattr(found, phase) == pytest.approx(getattr(expected, phase), rel=1e-9)
        expressions = pipe.stages[stage].expressions
        assert expressions.flops.subs(sizes) == flops(fresh, stage)
        assert expressions.saved_activations.subs(sizes) == expected.saved_activations
        assert expressions.weight.subs(sizes) == pytest.approx(expected.weight, rel=1e-9)
    assert [(e.source, e.target, e.bytes, e.seconds) for e in here.costs.edges] == [
        (e.source, e.target, e.bytes, e.seconds) for e in there.costs.edges
    ]
    assert here.peak_memory == there.peak_memory
    assert here.seconds == pytest.approx(there.seconds, rel=1e-9)
    assert here.span_bubble == pytest.approx(there.span_bubble, rel=1e-6)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def perceptron(**options: Any) -> fxpipe.Pipeline:
    return two_stages(Perceptron(), {"x": torch.randn(2, 12, 8)}, "second", **options)


def test_expressions():
    first, second = (stage.expressions for stage in perceptron(dimensions={"sequence": 12}).stages)
    rows = MICROBATCH * SEQUENCE
    assert first.flops == 2 * 2 * rows * 8 * 16  # no gradient of x
    assert second.flops == 3 * 2 * rows * 16 * 4
    assert first.saved_activations == 4 * rows * 16  # relu's result
    assert second.saved_activations == 4 * rows * (16 + 4) + 4  # the share of a microbatch in the mean
    assert {s.name for s in second.forward.free_symbols} == {"microbatch", "sequence"}
    assert second.forward.atoms(sympy.Max)


def test_every_op_takes_a_launch_beside_its_work():
    """Large enough, and the time grows with the size; below that it is nearly the same for all."""
    pipe = perceptron(dimensions={"sequence": 12})
    small, same, large, double = (
        pipe.simulate({"sequence": n}).costs.stages[1] for n in (1, 12, 10**6, 2 * 10**6)
    )
    assert same.forward == pytest.approx(pipe.stages[1].costs.forward)
    assert small.forward < same.forward < 1.1 * small.forward
    overhead = 3 * CPU.stage_overhead  # of F, B and W, at every size
    assert double.total - overhead == pytest.approx(2 * (large.total - overhead), rel=1e-3)


@pytest.mark.slow
def test_a_saved_pipeline_knows_them(tmp_path):
    pipe = perceptron(dimensions={"sequence": 12})
    pipe.save(tmp_path / "saved")
    loaded = fxpipe.load(tmp_path / "saved")
    sizes = {"microbatch": 3, "sequence": 500}
    assert loaded.simulate(sizes).costs == pipe.simulate(sizes).costs != pipe.simulate().costs
    assert loaded.stages[1].expressions == pipe.stages[1].expressions


@pytest.mark.variation
@pytest.mark.slow
def test_measured_times_grow_as_the_analytic_ones():
    pipe = perceptron(dimensions={"sequence": 12}, costs="measured")
    analytic = perceptron(dimensions={"sequence": 12})
    sizes = {"sequence": 10**6}
    assert pipe.simulate({}).costs == pipe.plan.costs
    for stage in (0, 1):
        before, after = pipe.plan.costs.stages[stage], pipe.simulate(sizes).costs.stages[stage]
        expected = analytic.simulate(sizes).costs.stages[stage]
        growth = expected.forward / analytic.plan.costs.stages[stage].forward
        assert after.forward / before.forward == pytest.approx(growth)
        assert after.saved_activations == expected.saved_activations


class NextWord(nn.Module):
    """Sizes of two terms: ``sequence - 1``, and ``sequence + 3`` for the words put before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.prompt = nn.Embedding(11, 8), nn.Parameter(torch.randn(3, 8))
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        prompt = self.prompt.expand(len(ids), -1, -1)
        q, k, v = self.mix(torch.cat([prompt, self.embed(ids)], 1)).split(8, -1)
        mixed = (q @ k.mT).softmax(-1) @ v
        logits = self.head(mixed[:, 3:])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Strided(nn.Module):
    """The length is halved, twice, by a convolution and by a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = nn.Conv1d(4, 8, 3, stride=2, padding=1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(x).mT[:, ::2]).square().mean()


class Shifted(nn.Module):
    """Scores by distance, read in rows that are one shorter, as in XLNet."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x.mT)
        rows, length, _ = x.shape
        scores = (x @ torch.cat([x, -x], 1).mT).reshape(rows, 2 * length, length)
        shifted = scores[:, 1:].reshape(rows, length, 2 * length - 1)[..., :length]
        return self.out(shifted @ x).square().mean()


def signals(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 4, length)}


def words(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(11, (rows, length))}


@pytest.mark.variation
@pytest.mark.parametrize(
    ("model", "batch", "split"),
    [(NextWord, words, "head"), (Strided, signals, "out")],
    ids=["next", "strided"],
)
@pytest.mark.parametrize("rows", with_variations([1, 2], [2]))
@pytest.mark.slow
def test_sums_and_fractions_of_a_length(model, batch, split, rows):
    check_at_other_lengths(model(), batch, split, rows)


@pytest.mark.variation
@pytest.mark.slow
def test_a_stride_that_is_no_multiple_of_the_one_below():
    check_at_other_lengths(Shifted(), signals, "out", 2)


def check_at_other_lengths(built: nn.Module, batch: Any, split: str, rows: int) -> None:
    pipe = two_stages(built, batch(rows, 16), split, dimensions={"sequence": 16})
    for length in (40, 24):
        sizes = {"sequence": length} | ({"microbatch": rows} if rows > 1 else {})
        fresh = two_stages(built, batch(rows, length), split, dimensions={"sequence": length})
        check_against_fresh(pipe, fresh, sizes)


def test_a_convolution_splits_over_the_two_backward_phases():
    pipe = two_stages(Strided(), signals(2, 16), "out", dimensions={"sequence": 16})
    rows = MICROBATCH * SEQUENCE
    assert (
        pipe.stages[0].expressions.flops == 2 * (rows / 2) * 8 * 4 * 3 * 2
    )  # forward, gradient of the weight


# -- what it takes, and what goes wrong -------------------------------------------------------------------


def test_the_model_is_traced_again_only_if_dimensions_are_named():
    call = mock.Mock()  # compile restores what the model's own code changes

    class Counted(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            call(x.shape)
            return super().forward(x)

    model = Counted()
    two_stages(model, {"x": torch.randn(2, 12, 8)}, "second")
    once = call.call_count
    two_stages(model, {"x": torch.randn(2, 12, 8)}, "second", dimensions={})
    assert call.call_count == 4 * once


@pytest.mark.slow
def test_the_microbatch_alone():
    pipe = two_stages(Chain(4), numbers(2), "blocks.2", dimensions={})
    fresh = two_stages(Chain(4), numbers(64), "blocks.2")
    assert pipe.simulate({"microbatch": 64}).peak_memory == fresh.simulate().peak_memory


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ({"sequence": 13}, "'sequence' is to be 13 long, and no dimension.* x \\(2, 12, 8\\)"),
        ({"sequence": 1}, "'sequence' is to be 1 long"),
        ({"sequence": "12"}, "'sequence' is to be '12' long"),
        ({"source": 12, "target": 12}, "Two names for one length cannot be told apart"),
        (["sequence"], "dimensions maps names to lengths.*it is \\['sequence'\\]"),
        ({"microbatch": 12}, "'microbatch' is always the leading dimension"),
    ],
)
def test_dimensions_that_the_example_has_not(dimensions, message):
    with pytest.raises(SizeError, match=message):
        perceptron(dimensions=dimensions)


@pytest.mark.in_ci(
    "sizes0-'length'. Known: microbatch \\\\(2 in the example\\\\), sequence \\\\(12 in the example\\\\)",
    "sizes3-microbatch is 1\\\\.5 and must be",
)
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"length": 3}, r"'length'. Known: microbatch \(2 in the example\), sequence \(12 in the example\)"),
        ({"sequence": 0}, "sequence is 0 and must be a whole number, at least 1"),
        ({"microbatch": -1}, "microbatch is -1 and must be"),
        ({"microbatch": 1.5}, r"microbatch is 1\.5 and must be"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(SizeError, match=message):
        perceptron(dimensions={"sequence": 12}).simulate(sizes)


def test_no_sizes_without_dimensions():
    with pytest.raises(SizeError, match="Name its dimensions when you compile"):
        perceptron().simulate({"sequence": 3})
    with pytest.raises(SizeError, match="Name its dimensions when you compile"):
        _ = perceptron().stages[0].expressions


def test_an_example_of_one_row_has_no_named_microbatch():
    with pytest.raises(SizeError, match="an example of two rows or more"):
        two_stages(Chain(4), numbers(1), "blocks.2", dimensions={})


def test_rows_that_differ():
    with pytest.raises(SizeError, match=r"no one leading length.*x \(2, 8\), y \(1, 8\)"):
        two_stages(Chain(4), {"x": torch.randn(2, 8), "y": torch.randn(1, 8)}, "blocks.2", dimensions={})


class Unrolled(Perceptron):
    """As many ops as there are positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.first(x[:, 0])
        for step in x.unbind(1):
            state = state + self.first(step)
        return self.second(state).square().mean()


class Thirds(Perceptron):
    """A size that is rounded up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, ::5] * 2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Unrolled,
            r"from aten\.unbind\.int on, in the model itself .* of a loop over it\. Leave sequence out of "
            r"dimensions, and pad to one length, or to a few, each with a pipeline of its own \(like=\)\.",
        ),
        (
            Thirds,
            r"aten\.\w+\.\w+, in .* has a size that is no simple polynomial of microbatch, sequence.* Leave "
            r"dimensions out\.",
        ),
    ],
)
@pytest.mark.slow
def test_a_step_that_is_another_at_other_sizes(model, message):
    with pytest.raises(SizeError, match=message) as caught:
        two_stages(model(), {"x": torch.randn(2, 12, 8)}, "second", dimensions={"sequence": 12})
    assert re.search(r"test_sizes\.py:\d+", str(caught.value))
