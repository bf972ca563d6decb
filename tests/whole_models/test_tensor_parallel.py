"""Models with DTensors: all lanes of all ranks, in one process, against the plain model in eager."""

from __future__ import annotations

import pytest
import torch
from equality import eager_step
from marks import with_variations
from tensor_parallel import LENGTH, PLANS, WORDS, Words, batch, parallelized
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo import captured_once, relative_error, too_far

import fxpipe
from fxpipe.errors import ArtifactError, CaptureError, VocabularyError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]
LIMIT = 1e-12
#: Plans of models without experts: that of the loss divides the same layers, beside experts that are whole.
DENSE = ("columns and rows", "prepared output", "vocabulary")


def compiled(plan: str, lanes: int = 2, ranks: int = 2, dropout: float = 0.0, **options) -> fxpipe.Pipeline:
    """With the values of the first of the seeds; microbatches of 2 rows."""
    torch.manual_seed(0)
    model = Words(dropout, mixture=plan not in DENSE)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    given = {"microbatches": 3, "schedule": "zb-h1"} | options
    with fxpipe.local_lanes(lanes) as mesh, parallelized(model, mesh, plan):
        pipe = fxpipe.compile(model, batch(2), ranks=ranks, **given)
    pipe.load_state_dict(whole)
    return pipe


def check_against_eager(pipe: fxpipe.Pipeline, microbatches: int = 3) -> None:
    torch.manual_seed(0)
    has_experts = any("experts" in name for name in pipe.full_state_dict())
    expected, data = Words(mixture=has_experts), batch(2 * microbatches)
    loss, grads = eager_step(expected, data, microbatches, None)
    found = pipe.run_local(data)
    assert relative_error(found.loss, loss) <= LIMIT
    assert found.grads.keys() == grads.keys()
    assert too_far(found.grads, grads, LIMIT) == {}


#: Tests below have columns and rows, the vocabulary over three lanes, and uneven shares over five.
VARIATIONS = ("columns and rows", "embedding by columns", "uneven", "vocabulary")


@pytest.mark.in_ci("experts")
@pytest.mark.parametrize("plan", with_variations(PLANS, VARIATIONS))
def test_each_plan_of_torch_equals_eager(plan):
    check_against_eager(compiled(plan))


@pytest.mark.variation
def test_every_family_equals_eager():
    with captured_once("lanes"):
        for schedule in ("interleaved", "zb-h1", "zb-v"):  # below: 1f1b
            check_against_eager(compiled("columns and rows", schedule=schedule))


def test_ranks_share_a_vocabulary_that_lanes_do_not():
    check_against_eager(compiled("columns and rows", vocab_parallel="1-barrier", schedule="1f1b"))
    with pytest.raises(VocabularyError, match=r"A vocabulary is split once.*embedding\.weight"):
        compiled("embedding by columns", vocab_parallel=True)


@pytest.mark.variation
def test_three_lanes_share_what_three_divides():
    check_against_eager(compiled("vocabulary", lanes=3))


@pytest.mark.variation
def test_five_lanes_share_what_five_does_not_divide():
    pipe = compiled("uneven", lanes=5, ranks=1, schedule="1f1b")
    check_against_eager(pipe)
    lanes = pipe.plan.lanes
    assert lanes.lengths == {
        "embedding.weight": WORDS, "head.weight": WORDS, "blocks.0.up.weight": 64, "blocks.0.up.bias": 64,
        "blocks.0.down.weight": 64, **{f"blocks.0.attention.{name}.weight": 16 for name in "qkvo"},
        **{f"blocks.0.mixture.experts.{name}": 4 for name in ("up", "bias", "down")},
    }  # fmt: skip
    # Each computes one of four heads, the last zeros, and one of four experts.
    assert pipe.plan.layouts["blocks.0.mixture.experts.up"].shape[0] == 1
    assert pipe.plan.layouts["head.weight"].shape == (5, 16)
    kernels = [node for node in pipe.graph.nodes if "for_cpu.default" in str(node.target)]
    assert {node.args[0].meta["val"].shape for node in kernels} == {(2, 1, LENGTH, 4)}
    torch.manual_seed(0)
    expected = Words().state_dict()
    for name, value in pipe.full_state_dict().items():
        assert torch.equal(value, expected[name])
    with pytest.raises(ArtifactError, match=r"head\.weight, of shape \(24, 16\), has shape \(25, 16\)"):
        pipe.load_state_dict(expected | {"head.weight": torch.zeros(25, 16)})


@pytest.mark.parametrize("style", [ColwiseParallel, fxpipe.PaddedParallel])
def test_a_padded_weight_that_layers_share(style):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    rows, columns = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    styles = {"0": fxpipe.PaddedParallel(rows), "1": columns if style is ColwiseParallel else style(columns)}
    options = {"ranks": 1, "microbatches": 2, "loss_fn": lambda output, _: output.logsumexp(-1).mean()}
    with fxpipe.local_lanes(2) as mesh:
        parallelize_module(model, mesh, styles)
        model[1].weight = model[0].weight
        if style is ColwiseParallel:
            with pytest.raises(
                CaptureError, match=r"'1\.weight' is '0\.weight', which has zeros behind its 5"
            ):
                fxpipe.compile(model, (torch.tensor([[1]]),), **options)
            return
        pipe = fxpipe.compile(model, (torch.tensor([[1]]),), **options)
    weight = torch.randn(5, 4)
    pipe.load_state_dict({"0.weight": weight, "1.weight": weight})
    expected = (weight[[1, 4]] @ weight.T).logsumexp(-1).mean()
    torch.testing.assert_close(pipe.run_local((torch.tensor([[1], [4]]),)).loss, expected)


@pytest.mark.variation
def test_random_numbers_depend_on_neither_ranks_nor_replicas_nor_recomputation():
    data = batch(8)
    options = {"ranks": 1, "microbatches": 4, "schedule": "1f1b"}
    first = compiled("columns and rows", dropout=0.5, **options).run_local(data)
    for options in ({"replicas": 2, "microbatches": 2}, {"microbatches": 4, "recompute": "full"}):
        found = compiled("columns and rows", dropout=0.5, **options).run_local(data)
        assert relative_error(found.loss, first.loss) <= LIMIT
        assert too_far(found.grads, first.grads, LIMIT) == {}


def test_sharded_values_draw_by_lane_and_replicated_ones_alike():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(), nn.Linear(64, 64), nn.Dropout())
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    with fxpipe.local_lanes(2) as mesh:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        pipe = fxpipe.compile(
            model, (torch.ones(1, 4),), ranks=1, microbatches=1, loss_fn=lambda output, _: output.sum()
        )
    pipe.load_state_dict(whole)
    found = pipe.run_local((torch.ones(1, 4),))
    kept = found.grads["0.bias"] != 0  # what the first mask has left
    assert 16 < kept.sum() < 48
    assert not torch.equal(*kept.view(2, -1))
    of_lanes = [rt.grads["2.bias"] for rt in found.runtimes]  # where the second mask kept the sum
    assert torch.equal(*of_lanes)
    assert 0 < (of_lanes[0] != 0).sum() < 64


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_all_lanes_hold_changes_alike(in_place):
    class Counting(nn.Sequential):
        def forward(self, x):
            found = super().forward(x)
            if in_place:
                self.steps.add_(1)
            else:
                self.steps = self.steps + 1
            return found.square().mean()

    model = Counting(nn.Linear(4, 8), nn.Linear(8, 4))
    model.register_buffer("steps", torch.zeros(2))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    with fxpipe.local_lanes(2) as mesh:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model.steps = distribute_tensor(model.steps, mesh, [Replicate()])
        pipe = fxpipe.compile(model, (torch.ones(1, 4),), ranks=2, microbatches=3, schedule="1f1b")
    pipe.load_state_dict(whole)
    pipe.run_local((torch.ones(3, 4),))
    assert pipe.full_state_dict()["steps"].tolist() == [3, 3]


def test_evaluation_and_the_whole_state():
    pipe = compiled("vocabulary", evaluation=True)
    torch.manual_seed(0)
    model, data = Words(mixture=False), batch(6)
    assert relative_error(pipe.evaluation.run_local(data).loss, model(**data)) <= LIMIT
    for name, value in pipe.full_state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
