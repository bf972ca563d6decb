"""Loss, gradients and buffers of the zoo's models against one process, in double precision."""

import copy
import itertools
from dataclasses import replace

import pytest
from zoo import (
    CASES,
    LIMIT,
    Shape,
    built_and_compiled,
    captured_once,
    check_against_eager,
    compiled,
    eager,
    relative_error,
)

MICROBATCHES = 4
SHAPES = {
    "2-1f1b-v": Shape(2, "1f1b", 2, "v"),
    "4-zb-h1-v": Shape(4, "zb-h1", 2, "v"),
}


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]


#: The layer, the loss or the arguments of another case in another form, which capture's own tests meet too.
FORMS = ("batch_norm_eval", "gru", "multihead_attention", "sum_and_integer")


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=[pytest.mark.variation] if x in FORMS else []) for x in CASES],
)
def name(request) -> str:
    """All tests of one name, then those of the next: each is captured once."""
    return request.param


@pytest.mark.in_ci(
    "tied_head-4-zb-h1-v",
    "tied_thrice-4-zb-h1-v",
    "shared_layer-4-zb-h1-v",
    "scalar_parameter-4-zb-h1-v",
    "sum_of_weights-4-zb-h1-v",
    "learned_tables-4-zb-h1-v",
    "weight_norm-4-zb-h1-v",
    "unet-4-zb-h1-v",
    "channels_last-4-zb-h1-v",
    "losses_on_the_way-4-zb-h1-v",
    "integer_crossing-4-zb-h1-v",
    "transposed-4-zb-h1-v",
    "expanded-4-zb-h1-v",
    "multi_output-4-zb-h1-v",
    "straight_through-4-zb-h1-v",
    "teacher-4-zb-h1-v",
    "tensor_hook-4-zb-h1-v",
    "checkpointed-4-zb-h1-v",
    "checkpointed_reentrant-4-zb-h1-v",
    "reversible-4-zb-h1-v",
    "frozen_and_unused-4-zb-h1-v",
    "batch_norm-4-zb-h1-v",
    "reassigned_buffers-4-zb-h1-v",
    "nested_arguments-4-zb-h1-v",
    "tuple_of_arguments-4-zb-h1-v",
    "loss_attribute-4-zb-h1-v",
    "keeps_input-4-zb-h1-v",
    "loss_outside-4-zb-h1-v",
    "sum_and_count-4-zb-h1-v",
    "sum_and_given-4-zb-h1-v",
    "experts-4-zb-h1-v",
)
@pytest.mark.parametrize("shape", [pytest.param("2-1f1b-v", marks=pytest.mark.variation), "4-zb-h1-v"])
def test_equals_one_process(name, shape):
    check_against_eager(CASES[name], MICROBATCHES, SHAPES[shape])


#: Buffers, random numbers, ties, sums and counts, several inputs: what an evaluation could do otherwise.
EVALUATED = (
    "batch_norm", "dropout", "encoder_decoder", "experts", "frozen_and_unused", "in_place", "lstm",
    "reassigned_buffers", "sum_and_count", "tied_head", "unet",
)  # fmt: skip


@pytest.mark.in_ci("tied_head", "batch_norm", "reassigned_buffers", "sum_and_count")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in EVALUATED else [pytest.mark.variation]) for name in CASES],
    indirect=True,
)
def test_evaluation(name):
    """By turns in a V and on four ranks; and the same forward compiled for itself, cut by its own costs."""
    case, shape = CASES[name], (Shape(2, "zb-v"), Shape(4, "1f1b"))[list(CASES).index(name) % 2]
    model, pipe = built_and_compiled(case, MICROBATCHES, replace(shape, evaluation=True))
    batch, twin = case.data(MICROBATCHES), copy.deepcopy(model).eval()
    expected = eager(twin, batch, MICROBATCHES, case.loss_fn).loss
    with captured_once(case, MICROBATCHES):
        alone = compiled(case, twin, MICROBATCHES, Shape(1, gradients=False))
    for found in (pipe.evaluation, alone):
        assert relative_error(found.run_local(batch).loss, expected) <= LIMIT
    for held, own in zip(pipe.plan.tensors, pipe.evaluation.plan.tensors, strict=True):
        assert {*own.parameters} <= {*held.parameters}
        assert {*own.buffers} <= {*held.buffers}
        assert own.gradients == ()


GRID = list(itertools.product((2, 4), ("gpipe", "1f1b", "zb-h1"), ((1, "plain"), (2, "plain"), (2, "v"))))


#: Each number of ranks, each schedule and each placement; test_structures.py has all families in each.
SHOWN = [(2, "zb-h1", (2, "plain")), (4, "gpipe", (2, "v")), (4, "1f1b", (1, "plain"))]


@pytest.mark.parametrize(
    ("ranks", "schedule", "stages"),
    [pytest.param(*x, marks=[] if x in SHOWN else [pytest.mark.variation]) for x in GRID],
    ids=lambda x: str(x) if x != (1, "plain") else "1",
)
def test_every_shape(ranks, schedule, stages):
    check_against_eager(CASES["unet"], 4, Shape(ranks, schedule, *stages))


# Each number and each schedule: the other diagonals of this square are variations.
@pytest.mark.in_ci("2-1f1b")
@pytest.mark.parametrize(
    ("microbatches", "schedule"),
    [
        pytest.param(*x, marks=[pytest.mark.variation] * (k not in (2, 4, 6)))
        for k, x in enumerate(itertools.product((1, 2, 3), ("gpipe", "1f1b", "zb-h1")))
    ],
)
def test_fewer_microbatches_than_ranks(microbatches, schedule):
    check_against_eager(CASES["encoder_decoder"], microbatches, Shape(4, schedule))


@pytest.mark.parametrize("placement", ["plain", "v"])
def test_one_microbatch_and_two_stages_a_rank(placement):
    check_against_eager(CASES["tied_thrice"], 1, Shape(4, "zb-h1", 2, placement))


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize("name", ["tied_thrice", "batch_norm", "sum_and_count"])
def test_one_rank(name, stages_per_rank):
    check_against_eager(CASES[name], 3, Shape(1, "1f1b", stages_per_rank))
