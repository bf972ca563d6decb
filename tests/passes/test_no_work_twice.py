"""Over F, B and W of all stages, each matrix product of eager's forward and backward occurs once."""

import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from marks import with_variations
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from zoo import CASES, WIDTH, Case, Chain, Shape, built_and_compiled, numbers

import fxpipe
from fxpipe.ir.graph import Kind
from fxpipe.ir.ops import node_flops
from fxpipe.ir.storage import call_nodes, storage_root
from fxpipe.schedule.ops import OpKind, Phase

pytestmark = pytest.mark.slow

aten = torch.ops.aten

PRODUCTS = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    aten.convolution_backward,
    aten.addmm_,
}
SHAPES = {"2": Shape(2), "4-zb-h1": Shape(4, "zb-h1"), "4-zb-h1-v": Shape(4, "zb-h1", 2, "v")}
#: Ops through which a weight gradient passes on its way to its accumulator.
ON_THE_WAY = {
    aten.t,
    aten.transpose,
    aten.view,
    aten.reshape,
    aten._unsafe_view,
    aten.sum,
    aten.add,
    operator.getitem,
}


def packet(node: fx.Node):
    return getattr(node.target, "overloadpacket", node.target)


def flops(node: fx.Node) -> int:
    if packet(node) is aten.addmm_:  # the product that goes straight into an accumulator
        left, right = (argument.meta["val"] for argument in node.args[1:])
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return node_flops(node)


def flops_by_phase(pipe: fxpipe.Pipeline) -> Counter:
    count: Counter = Counter()
    for section in pipe.sections:
        count[section.phase] += sum(map(flops, call_nodes(section.graph)))
    return count


def of_attention(counted_as: Any, is_causal: int) -> Callable[..., int]:
    """FLOPs of attention, of causal attention half.  is_causal: the position of the argument."""

    def formula(*args: Any, **kwargs: Any) -> int:
        flops: int = flop_registry[counted_as](*args, **kwargs)
        return flops // 2 if len(args) > is_causal and args[is_causal] is True else flops

    return formula


#: Attention on a CPU, which torch does not count.
ON_A_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: of_attention(
        aten._scaled_dot_product_flash_attention, is_causal=4
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: of_attention(
        aten._scaled_dot_product_flash_attention_backward, is_causal=7
    ),
}


def eager_flops(case: Case) -> int:
    """Of forward and backward of one microbatch."""
    model, example = case.build(), case.example()
    with mock.patch.dict(flop_registry, ON_A_CPU), FlopCounterMode(display=False) as counter:
        output = model(*example) if isinstance(example, tuple) else model(**example)
        loss = output if case.loss_fn is None else case.loss_fn(output, example)
        (loss[0] if isinstance(loss, tuple) else loss).backward()
    return counter.get_total_flops()


NAMES = (
    "tied_thrice", "shared_layer", "unet", "encoder_decoder", "checkpointed", "frozen_and_unused",
    "transformer_layer", "experts",
)  # fmt: skip
#: Nothing of theirs is shared or recomputed otherwise than of those.
VARIATIONS = (
    "sum_of_weights", "weight_norm", "learned_tables", "teacher", "in_place", "batch_norm",
    "multihead_attention",
)  # fmt: skip


@pytest.mark.in_ci("unet-4-zb-h1-v", "checkpointed-4-zb-h1-v", "experts-4-zb-h1-v")
@pytest.mark.parametrize("shape", with_variations(["2", "4-zb-h1-v"], ["2"]))
@pytest.mark.parametrize("name", with_variations(NAMES + VARIATIONS, VARIATIONS))
def test_as_many_flops_as_eager(name, shape):
    case = CASES[name]
    _, pipe = built_and_compiled(case, 4, SHAPES[shape])
    assert sum(flops_by_phase(pipe).values()) == eager_flops(case)


class TwoLayers(nn.Module):
    """Linear, ReLU, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.outer(F.relu(self.inner(x)))


LINEAR = Case(lambda: Chain(4, TwoLayers), numbers)


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_of_each_phase(shape):
    """Of a chain of linear layers W does as much as F, and B all but the gradient of the batch; where the
    schedule has no W, B does both."""
    _, pipe = built_and_compiled(LINEAR, 4, SHAPES[shape])
    linear = 2 * 2 * WIDTH * 2 * WIDTH  # rows of the microbatch, in and out
    expected = {Phase.F: 8 * linear, Phase.B: 7 * linear, Phase.W: 8 * linear}
    if any(op.kind is OpKind.BW for ops in pipe.schedule.order for op in ops):
        expected[Phase.B] += expected.pop(Phase.W)
    assert flops_by_phase(pipe) == expected


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_stage_has_its_own_backward_and_weight_section(ranks):
    case = Case(lambda: Chain(4), numbers)
    _, pipe = built_and_compiled(case, 4, Shape(ranks, "zb-h1"))
    assert [s.color.phase for s in pipe.sections] == [Phase.F, Phase.B, Phase.W] * ranks
    for stage in pipe.stages:
        work = {s.phase: sum(map(flops, call_nodes(s.graph))) for s in stage.sections}
        assert min(work.values()) > 0, stage.index


def reached(node: fx.Node) -> set[fx.Node]:
    """All that the node leads to."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def accumulators(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that write to a gradient's accumulator."""
    mutable = [
        n for n in call_nodes(graph) if getattr(n.target, "_schema", None) and n.target._schema.is_mutable
    ]
    written = [n.args[0][0] if isinstance(n.args[0], (list, tuple)) else n.args[0] for n in mutable]
    given = [storage_root(n).meta.get("input") for n in written]
    return [n for n, i in zip(mutable, given, strict=True) if i is not None and i.kind is Kind.GRADIENT]


WEIGHTS = [
    "tied_head",
    "unet",
    "encoder_decoder",
    "learned_tables",
    "weight_norm",
    "transformer_layer",
    "experts",
]


@pytest.fixture(scope="module", params=WEIGHTS)
def split(request) -> fxpipe.Pipeline:
    """A case on four ranks, its backward split."""
    return built_and_compiled(CASES[request.param], 4, SHAPES["4-zb-h1"])[1]


@pytest.mark.in_ci("tied_head", "learned_tables", "weight_norm")
def test_weight_sections_hold_weight_gradients_alone(split):
    """Every product in W ends in an accumulator, and W gives nothing to any other section."""
    products = 0
    for section in split.sections:
        if section.phase is Phase.W:
            ends = set(accumulators(section.graph))
            assert section.outputs == ()
            for node in call_nodes(section.graph):
                assert node in ends or reached(node) & ends, node
                products += packet(node) in PRODUCTS
        else:
            assert accumulators(section.graph) == []
    assert products > 0


@pytest.mark.in_ci("tied_head", "unet", "learned_tables", "weight_norm", "experts")
def test_no_product_for_a_weight_alone_is_done_in_the_backward_section(split):
    """A product that leads to accumulators only, through views and sums, belongs to W."""
    ends = set(accumulators(split.graph))
    for node in call_nodes(split.graph):
        if packet(node) in PRODUCTS and node.meta["color"].phase is Phase.B:
            assert any(
                n.op != "output" and n not in ends and packet(n) not in ON_THE_WAY for n in reached(node)
            ), node


def test_each_parameter_has_its_own_accumulator_in_each_stage_that_uses_it():
    case = CASES["tied_thrice"]
    _, pipe = built_and_compiled(case, 4, Shape(4, "zb-h1"))
    uses = Counter(
        (value.name, section.stage)
        for section in pipe.sections
        for value in section.inputs
        if value.kind is Kind.GRADIENT
    )
    assert set(uses.values()) == {1}
    assert len([stage for name, stage in uses if name == "embedding.weight"]) >= 3


# -- what is held ------------------------------------------------------------------------------------------

FLOAT = 4


def saved_and_kept(model: nn.Module, rows: int, **options) -> list[tuple[float, float]]:
    pipe = fxpipe.compile(model, numbers(rows), ranks=2, microbatches=2, schedule="1f1b", **options)
    return [(stage.costs.saved_activations, stage.costs.saved_for_weight) for stage in pipe.stages]


def test_bytes_saved_by_hand():
    rows = 32
    found = saved_and_kept(Chain(2, TwoLayers), rows, split_points=["blocks.1"])
    activation, output = 16 * rows * FLOAT, WIDTH * rows * FLOAT
    loss = FLOAT
    # Stage 0: the ReLU's result, for its own derivative and for the weight of the layer after it; what
    # came in is the batch. W needs it and the gradients of what both layers gave out.
    assert found[0] == (activation, activation + activation + output)
    # Stage 1: what came in, the ReLU's result, and the last output for the loss.
    saved, kept = found[1]
    assert output + activation + output <= saved <= output + activation + output + loss
    assert kept == output + activation + activation + output


class Gated(nn.Module):
    """Both factors are views of one linear layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.back = nn.Linear(WIDTH, 32), nn.Linear(16, WIDTH)

    def forward(self, x):
        a, b = self.linear(x).chunk(2, -1)
        return self.back(a * b)


def test_views_of_one_storage_count_once():
    rows = 32
    found = saved_and_kept(Chain(2, Gated), rows, split_points=["blocks.1"])
    # The one result that both factors are views of, and their product (or the product is made again).
    both, product, output = 32 * rows * FLOAT, 16 * rows * FLOAT, WIDTH * rows * FLOAT
    assert found[0][0] in (both, both + product)
    assert found[1][0] - output - output in (both, both + product, both + FLOAT, both + product + FLOAT)


def test_expanded_values_count_what_they_hold():
    class Expanded(Chain):
        def between(self, x, i):
            return x.mean(-1, keepdim=True).expand(-1, WIDTH) if i == 0 else x

    rows = 32
    pipe = fxpipe.compile(Expanded(2, TwoLayers), numbers(rows), ranks=1, microbatches=2, schedule="1f1b")
    activation = 16 * rows * FLOAT
    mean, last = rows * FLOAT, WIDTH * rows * FLOAT
    assert math.isclose(pipe.stages[0].costs.saved_activations, 2 * activation + mean + last, abs_tol=FLOAT)
