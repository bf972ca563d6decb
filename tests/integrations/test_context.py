"""Sequences over the lanes: the loss and gradients of eager, and what lanes cannot divide."""

from __future__ import annotations

import copy
import gc
import re

import pytest
import torch
from equality import eager_step
from marks import with_variations
from tensor_parallel import Experts
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from zoo import relative_error, too_far

import fxpipe
from fxpipe.errors import CaptureError, OptionError
from fxpipe.integrations import heads
from fxpipe.integrations.transformers import parallelize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("double"),
    pytest.mark.skipif(torch.__version__ < "2.12", reason="its DTensors do not flatten divided tokens"),
]
LIMIT = 1e-12
WORDS, WIDTH, HEADS, KEYS, ROWS, LENGTH = 24, 16, 4, 2, 2, 16


class Block(nn.Module):
    """Attention with fewer heads of keys than of queries, and a mixture in the place of two layers."""

    def __init__(self, attention: str, mixture: bool) -> None:
        super().__init__()
        self.attention, each = attention, WIDTH // HEADS
        self.norm, self.other = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * each, bias=False) for n in (HEADS, KEYS, KEYS))
        is_biased = attention in ("biased", "of all")
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH)) if is_biased else None
        self.o, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.router, self.experts = (nn.Linear(WIDTH, 4), Experts()) if mixture else (None, None)

    def forward(self, x, cos, sin):
        q, k, v = (
            p(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for y in [self.norm(x)]
            for p in (self.q, self.k, self.v)
        )
        q, k = (y * cos + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * sin for y in (q, k))
        x = x + self.o(self._attend(q, k, v).transpose(1, 2).flatten(2))
        y = self.other(x)
        if self.experts is None:
            return x + self.down(F.gelu(self.up(y)))
        weights, chosen = self.router(y.flatten(0, 1)).softmax(-1).topk(2)
        return x + self.experts(y.flatten(0, 1), chosen, weights).view_as(x)

    def _attend(self, q, k, v):
        if self.attention == "by hand":
            k, v = (y.repeat_interleave(HEADS // KEYS, 1) for y in (k, v))
            scores = q @ k.transpose(-1, -2) / 2
            ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            return scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v
        if self.attention == "window":
            at = torch.arange(LENGTH)
            mask = (at[:, None] >= at) & (at[:, None] < at + 3)
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        if self.attention == "biased":
            return F.scaled_dot_product_attention(q, k, v, self.bias, enable_gqa=True)
        if self.attention == "of all":  # no lane has a query of its own
            q = q.mean(2, keepdim=True)
            return F.scaled_dot_product_attention(q, k, v, self.bias[:, :1], enable_gqa=True).expand_as(
                k.repeat_interleave(HEADS // KEYS, 1)
            )
        if self.attention == "across":  # all tokens see some that no lane divides
            k, v = (y.mean(2, keepdim=True) for y in (k, v))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Decoder(nn.Module):
    def __init__(
        self, attention: str = "causal", mixture: bool = False, weighted: bool = False, blocks: int = 1
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, mixture) for _ in range(blocks))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.weights = nn.Buffer(torch.rand(WORDS)) if weighted else None

    def forward(self, ids, labels):
        x, angles = self.words(ids), torch.arange(ids.shape[1])[:, None] / torch.arange(1, 5)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        logits = self.head(self.last(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=self.weights)
        return {"loss": loss, "logits": logits}


def batch(microbatches: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(WORDS, (microbatches * ROWS, LENGTH))
    labels = ids.roll(-1, 1)
    labels[::2, :5] = -100  # the lanes have different numbers of labels
    return {"ids": ids, "labels": labels}


def compiled(lanes: int, model: nn.Module, experts: str = "", more=(), **options) -> fxpipe.Pipeline:
    """more: of what is divided beside the tokens."""
    whole = copy.deepcopy(model.state_dict())
    with fxpipe.local_lanes(lanes) as mesh:
        if experts:
            style = fxpipe.ExpertParallel(tokens=experts, counts=True)
            parallelize_module(model, mesh, {"blocks.*.experts": style})
        parallelize_module(model, mesh, fxpipe.ContextParallel(dict.fromkeys(["ids", *more], 1)))
        assert isinstance(model, Heads) or model.head.weight is model.words.weight
        options = {"ranks": 2, "microbatches": 3, "schedule": "zb-h1", "effort": 0.1} | options
        pipe = fxpipe.compile(model, batch(1), **options)
    whole |= {name: x for name, x in model.named_buffers() if "expert_" in name}
    pipe.load_state_dict(whole)
    return pipe


@pytest.mark.variation
@pytest.mark.parametrize(
    ("lanes", "model", "options"),
    [
        pytest.param(
            8, {"attention": "causal"}, {}, marks=pytest.mark.variation
        ),  # which cannot share the heads
        (4, {"attention": "window"}, {"recompute": "full", "parts": "exchanges", "schedule": "zb"}),
        (2, {"attention": "biased"}, {}),
        pytest.param(8, {"attention": "biased"}, {}, marks=pytest.mark.variation),
        pytest.param(8, {"attention": "window"}, {"schedule": "zb-v"}, marks=pytest.mark.variation),
        pytest.param(2, {"attention": "by hand"}, {}, marks=pytest.mark.variation),
        pytest.param(2, {"attention": "across"}, {}, marks=pytest.mark.variation),
        (2, {"attention": "of all"}, {"vocab_parallel": True}),
    ],
    ids=str,
)
def test_each_attention_equals_eager(lanes, model, options):
    pipe, expected = compiled(lanes, Decoder(**model), **options), Decoder(**model)
    check_against_eager(pipe, expected)


def test_layers_and_a_weighted_loss_equal_eager():
    """Each layer exchanges heads twice."""
    model = {"weighted": True, "blocks": 2}
    pipe = compiled(2, Decoder(**model))
    check_against_eager(pipe, Decoder(**model))
    programs = "\n".join(pipe.artifact.programs)
    # Forward and backward of each: one exchange of q, k, v and one of the result.
    assert programs.count("all_to_all(") == 8
    assert "all_gather(" not in programs
    assert pipe.check().problems == ()


class Heads(nn.Module):
    """Attention with such numbers of heads."""

    def __init__(self, queries: int, keys: int, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.numbers = nn.Embedding(WORDS, width), (queries, keys, keys)
        self.qkv = nn.Linear(width, width * sum(self.numbers))
        self.last = nn.Linear(width * queries, WORDS)

    def forward(self, ids, labels):
        q, k, v = self.qkv(self.words(ids)).unflatten(-1, (sum(self.numbers), -1)).split(self.numbers, 2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return {"loss": F.cross_entropy(self.last(y.transpose(1, 2).flatten(2)).transpose(1, 2), labels)}


@pytest.mark.in_ci("1-1-4-1")
@pytest.mark.parametrize(
    ("queries", "keys", "lanes", "of_lane"),
    [
        (6, 2, 4, 2),  # of 2 x 4 heads, 2 x 3 of them the model's
        pytest.param(3, 3, 4, 1, marks=pytest.mark.variation),
        pytest.param(5, 1, 4, 2, marks=pytest.mark.variation),
        pytest.param(12, 4, 8, 2, marks=pytest.mark.variation),
        (4, 2, 8, 1),  # of 8 heads, one on each lane
        (1, 1, 4, 1),  # of each lane for its own tokens: a gather computes less
    ],
)
def test_heads_that_lanes_do_not_divide(queries, keys, lanes, of_lane):
    pipe = compiled(lanes, Heads(queries, keys), ranks=1, schedule="1f1b")
    check_against_eager(pipe, Heads(queries, keys))
    tokens = LENGTH if queries > 1 else LENGTH // lanes
    attention = rf"attention_for_cpu\(  # f64\[{ROWS}, {of_lane}, {tokens}, 4\]"
    assert re.search(attention, pipe.artifact.programs[0])


@pytest.mark.parametrize(
    ("queries", "keys", "lanes", "expected"),
    [
        (8, 8, 4, (8, 1, 1)),
        (8, 2, 4, (2, 4, 2)),
        (14, 2, 4, (2, 8, 2)),
        (28, 4, 8, (4, 8, 2)),
        (12, 12, 8, (16, 1, 1)),
        (7, 1, 2, (1, 8, 2)),
        (1, 1, 4, (4, 1, 1)),
    ],
)
def test_as_few_heads_as_lanes_share(queries, keys, lanes, expected):
    assert heads.Heads.over(queries, keys, lanes) == expected


@pytest.mark.variation
def test_a_mixture_without_a_style_equals_eager():
    check_against_eager(compiled(2, Decoder(mixture=True)), Decoder(mixture=True))


@pytest.mark.variation
@pytest.mark.parametrize("tokens", ["divided", pytest.param("whole", marks=pytest.mark.variation)])
def test_experts_of_divided_tokens_equal_eager(tokens):
    pipe, expected = compiled(2, Decoder(mixture=True), tokens), Decoder(mixture=True)
    check_against_eager(pipe, expected)
    loads = pipe.full_state_dict()["blocks.0.experts.expert_loads"]
    assert loads.sum() == 3 * ROWS * LENGTH * 2
    gathers = pipe.artifact.programs[0].count("all_gather(")
    assert tokens == "whole" or gathers <= 3  # numbers and weights of experts, no hidden states


def check_against_eager(pipe: fxpipe.Pipeline, expected: nn.Module) -> None:
    found = pipe.run_local(batch(3))
    loss, grads = eager_step(expected, batch(3), 1, lambda outputs, _: outputs["loss"])
    assert relative_error(found.loss, loss) <= LIMIT
    assert found.grads.keys() == grads.keys()
    assert too_far(found.grads, grads, LIMIT) == {}


@pytest.mark.variation
def test_labels_may_be_divided_and_outputs_are_whole():
    pipe, expected = compiled(2, Decoder(), more=["labels"], outputs=["logits"]), Decoder()
    check_against_eager(pipe, expected)
    found = pipe.run_local(batch(3), outputs=["logits"]).outputs["logits"]
    assert relative_error(found, expected(**batch(3))["logits"]) <= LIMIT


@pytest.mark.variation
def test_models_of_transformers():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, pad_token_id=0)).double()
    model.set_experts_implementation("batched_mm")
    expected, rows = copy.deepcopy(model), {"input_ids": batch(2)["ids"], "labels": batch(2)["labels"]}
    whole = copy.deepcopy(model.state_dict())
    with fxpipe.local_lanes(2) as mesh:
        parallelize(model, mesh, fxpipe.ExpertParallel(tokens="divided"), context={"input_ids": 1})
        example = {name: x[:ROWS] for name, x in rows.items()}
        pipe = fxpipe.compile(model, example, ranks=2, microbatches=2, effort=0.1)
    pipe.load_state_dict(whole)
    found = pipe.run_local(rows)
    loss, grads = eager_step(expected, rows, 1, lambda output, _: output.loss)
    assert relative_error(found.loss, loss) <= 1e-6  # transformers computes its loss in float32
    assert too_far(found.grads, grads, 1e-6) == {}


@pytest.mark.parametrize(
    ("inputs", "length", "text"),
    [
        ({}, LENGTH, "each with the dimension of the sequence"),
        ({"tokens": 1}, LENGTH, "has no argument 'tokens'.*It has ids, labels"),
        ({"ids": 2}, LENGTH, "no dimension 2"),
        ({"ids": 1}, LENGTH - 1, "15 tokens in its dimension 1, which 2 lanes cannot share.*multiple of 2"),
    ],
    ids=str,
)
def test_what_lanes_cannot_divide(inputs, length, text):
    rows = {name: x[:, :length] for name, x in batch(1).items()}

    def compile_on(mesh):
        model = parallelize_module(Decoder(), mesh, fxpipe.ContextParallel(inputs))
        fxpipe.compile(model, rows, ranks=2, microbatches=2)

    with fxpipe.local_lanes(2) as mesh, pytest.raises((OptionError, CaptureError), match=f"(?s){text}"):
        compile_on(mesh)


class Biased(nn.Module):
    """The mean of the lanes' means, as torch before 2.14 takes it for the loss of DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mesh = nn.Linear(WIDTH, WORDS), None

    def forward(self, x, labels):
        logits, labels = (
            DTensor.from_local(y, self.mesh, [Replicate()], run_check=False)
            .redistribute(placements=[Shard(0)])
            .to_local()
            for y in (self.up(x), labels)
        )
        mean = F.cross_entropy(logits, labels)
        return DTensor.from_local(mean, self.mesh, [Partial("avg")], run_check=False).full_tensor()


def test_a_mean_over_the_labels_of_one_lane_is_refused():
    model, rows = Biased(), {"x": torch.randn(4, WIDTH), "labels": torch.randint(WORDS, (4,))}
    with fxpipe.local_lanes(2) as model.mesh:
        parallelize_module(model, model.mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
        with pytest.raises(CaptureError, match="mean over the labels of one lane"):
            fxpipe.compile(model, rows, ranks=1, microbatches=2)


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.up(x).renorm(2, 0, 1.0).sum()


def test_an_op_without_a_rule_is_named():
    """And is not tried on copies of the parts of DTensors, which have no values in a trace."""
    with fxpipe.local_lanes(2) as mesh:
        model = parallelize_module(Renormed(), mesh, fxpipe.ContextParallel({"x": 1}))
        with pytest.raises(CaptureError, match=r"test_context.py:\d+.*aten.renorm"):
            fxpipe.compile(model, {"x": torch.randn(2, 4, WIDTH)}, ranks=1, microbatches=2)
    gc.collect()


class Computed(nn.Module):
    """What a function makes of two layers."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.up(x), self.down(x))


RIGHT = {
    "squares": F.mse_loss,
    "smooth": lambda y, z: F.smooth_l1_loss(y, z, beta=0.5),
    "weighted squares": lambda y, z: F.mse_loss(y, z, weight=z.detach().abs()),
    "norms along the sequence": lambda y, z: (torch.linalg.vector_norm(y, dim=1) * z.amax(1)).sum(),
    "half of the tokens": lambda y, z: (y.chunk(2, 1)[1] * z.chunk(2, 1)[0].sin()).sum(),
    "neighbors": lambda y, z: (y[:, 1:] * z[:, :-1]).sum() + (y - y.mean(1, keepdim=True)).square().mean(),
    "marks of the largest": lambda y, z: (
        (
            z.flatten(0, 1)
            * torch.zeros_like(y).flatten(0, 1).scatter_(1, y.flatten(0, 1).topk(3).indices, 1.0)
        ).sum()
        + y.sum()
    ),
    "sums so far": lambda y, z: (y.cumsum(1) * z).sum() + (y * z.flip(1)).sum(),
}


@pytest.mark.in_ci("half of the tokens")
@pytest.mark.parametrize("name", with_variations(RIGHT, ["squares"]))
def test_values_along_the_sequence_equal_eager(name):
    model, rows = Computed(RIGHT[name]), {"x": torch.randn(4, 8, WIDTH)}
    whole = copy.deepcopy(model.state_dict())
    with fxpipe.local_lanes(2) as mesh:
        parallelize_module(model, mesh, fxpipe.ContextParallel({"x": 1}))
        pipe = fxpipe.compile(model, {"x": rows["x"][:2]}, ranks=1, microbatches=2, schedule="1f1b")
    pipe.load_state_dict(whole)
    found = pipe.run_local(rows)
    loss, grads = eager_step(Computed(RIGHT[name]), rows, 2, None)
    assert relative_error(found.loss, loss) <= LIMIT
    assert too_far(found.grads, grads, LIMIT) == {}


def written(y, z):
    result = torch.zeros(y.shape)
    result[..., :2] = y[..., :2]
    return (result * z).sum()


def mean_of_a_lane(y, z):
    return torch.ops.aten.mse_loss(y, z)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (written, "__setitem__ writes what lanes divide to a tensor of shape"),
        (mean_of_a_lane, r"a mean over the elements of one lane.*reduction='none'"),
    ],
)
def test_what_would_give_other_numbers_is_refused(function, text):
    with fxpipe.local_lanes(2) as mesh:
        model = parallelize_module(Computed(function), mesh, fxpipe.ContextParallel({"x": 1}))
        with pytest.raises(CaptureError, match=text):
            fxpipe.compile(model, {"x": torch.randn(2, 8, WIDTH)}, ranks=1, microbatches=2)


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.up(x)
        return (y * torch.zeros_like(y).uniform_()).sum() + 0 * y.new_zeros(2).sum()


def test_numbers_drawn_for_a_share_are_those_of_its_lane():
    """Also where they are drawn in the place of zeros, which are the same on all lanes."""
    with fxpipe.local_lanes(2) as mesh:
        model = parallelize_module(Drawn(), mesh, fxpipe.ContextParallel({"x": 1}))
        pipe = fxpipe.compile(model, {"x": torch.randn(2, 4, WIDTH)}, ranks=1, microbatches=2)
    assert "keyed(lane_key, " in pipe.artifact.programs[0]
