"""Sequences over one dimension of a mesh of lanes, layers over the other: the loss and gradients of eager."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import pytest
import torch
from equality import eager_step
from test_context import ROWS, WORDS, Decoder, batch, check_against_eager
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from zoo import relative_error, too_far

import fxpipe
from fxpipe.certificate.check import check_artifact
from fxpipe.errors import OptionError
from fxpipe.integrations.transformers import parallelize
from fxpipe.runtime.torch_private import fake_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("double"),
    pytest.mark.skipif(torch.__version__ < "2.12", reason="its DTensors do not flatten divided tokens"),
]
COLUMNS, ROW = ColwiseParallel(), RowwiseParallel()
LAYERS = {"blocks.*.up": COLUMNS, "blocks.*.down": ROW}
PLAN = {**LAYERS, **{f"blocks.*.{name}": COLUMNS for name in "qkv"}, "blocks.*.o": ROW}
ALL_WORDS = {"head": ColwiseParallel(output_layouts=Replicate()), "words": ROW, **PLAN}
NAMES = ("cp", "tp")


def compiled(sizes, model: nn.Module, plan=PLAN, experts: str = "", **options) -> fxpipe.Pipeline:
    whole = copy.deepcopy(model.state_dict())
    with fxpipe.local_lanes(sizes, names=NAMES) as mesh:
        if experts:
            parallelize_module(model, mesh, {"blocks.*.experts": fxpipe.ExpertParallel(tokens=experts)})
        parallelize_module(model, mesh, fxpipe.ContextParallel({"ids": 1}, tensor=plan))
        options = {"ranks": 2, "microbatches": 3, "schedule": "zb-h1", "effort": 0.1} | options
        pipe = fxpipe.compile(model, batch(1), **options)
    pipe.load_state_dict(whole)
    return pipe


@pytest.mark.variation
@pytest.mark.parametrize(
    ("sizes", "model", "plan", "options"),
    [
        ((2, 2), {"attention": "causal", "weighted": True}, PLAN, {"recompute": "full"}),
        ((4, 2), {"attention": "window"}, PLAN, {"parts": "exchanges", "schedule": "zb-v"}),  # a head each
        pytest.param((2, 2), {"attention": "biased"}, ALL_WORDS, {}, marks=pytest.mark.variation),
        pytest.param((2, 4), {}, LAYERS, {}, marks=pytest.mark.variation),
        pytest.param((2, 2), {"attention": "by hand"}, PLAN, {}, marks=pytest.mark.variation),
        pytest.param((2, 2), {"attention": "across"}, PLAN, {}, marks=pytest.mark.variation),
        pytest.param((2, 2), {"attention": "of all"}, PLAN, {}, marks=pytest.mark.variation),
    ],
    ids=str,
)
def test_each_attention_equals_eager(sizes, model, plan, options):
    check_against_eager(compiled(sizes, Decoder(**model), plan, **options), Decoder(**model))


@pytest.fixture(scope="module")
def pipe():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    made = compiled((2, 2), Decoder())
    torch.set_default_dtype(before)
    return made


def test_what_lanes_exchange(pipe):
    """Two exchanges of heads in a layer, forward and backward, along the first dimension; gradients are
    summed along it once a step."""
    programs = "\n".join(pipe.artifact.programs)
    assert len(re.findall(r"all_to_all\(.*, 2, 2\)", programs)) == 4
    assert len(re.findall(r"= lanes\.all_gather|[^_]reduce_scatter\(", programs)) == 0
    assert set(re.findall(r"rt\.sum_over_lanes\(\d+([^)]*)\)", programs)) == {", 2, 2"}
    assert pipe.check().problems == ()


def test_a_sum_of_gradients_over_other_lanes_is_told(pipe):
    for edit in ("rt.sum_over_lanes(0, 2)", "rt.sum_over_lanes(0)"):
        program = pipe.artifact.programs[0].replace("rt.sum_over_lanes(0, 2, 2)", edit)
        assert program != pipe.artifact.programs[0]
        edited = replace(pipe.artifact, programs=(program, *pipe.artifact.programs[1:]))
        assert not check_artifact(edited).holds


@pytest.mark.variation
@pytest.mark.parametrize("tokens", ["divided", pytest.param("whole", marks=pytest.mark.variation)])
def test_experts_are_over_all_lanes(tokens):
    plan = {path: style for path, style in PLAN.items() if path not in LAYERS}
    check_against_eager(compiled((2, 2), Decoder(mixture=True), plan, tokens), Decoder(mixture=True))


@pytest.mark.variation
def test_the_vocabulary_is_split_over_the_ranks():
    check_against_eager(compiled((2, 2), Decoder(), vocab_parallel=True), Decoder())


@pytest.mark.variation
def test_models_of_transformers():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, pad_token_id=0)).double()
    model.set_experts_implementation("batched_mm")
    expected, rows = copy.deepcopy(model), {"input_ids": batch(2)["ids"], "labels": batch(2)["labels"]}
    whole = copy.deepcopy(model.state_dict())
    with fxpipe.local_lanes((2, 2), names=NAMES) as mesh:
        parallelize(model, mesh, fxpipe.ExpertParallel(tokens="divided"), context={"input_ids": 1})
        example = {name: x[:ROWS] for name, x in rows.items()}
        pipe = fxpipe.compile(model, example, ranks=2, microbatches=2, effort=0.1)
    axes = pipe.plan.lanes.axes
    assert axes[1].shards["model.layers.0.self_attn.q_proj.weight"] == 0
    assert all(axis.shards["model.layers.0.mlp.experts.down_proj"] == 0 for axis in axes)
    pipe.load_state_dict(whole)
    found = pipe.run_local(rows)
    loss, grads = eager_step(expected, rows, 1, lambda output, _: output.loss)
    assert relative_error(found.loss, loss) <= 1e-6  # transformers computes its loss in float32
    assert too_far(found.grads, grads, 1e-6) == {}


@pytest.mark.parametrize(
    ("sizes", "plan", "text"),
    [
        ((2, 2), None, r"one dimension, or of two with tensor=.*not \('cp', 'tp'\)"),
        ((2, 2), {"layers.*": COLUMNS}, r"names 'layers\.\*', and the model has no such module"),
        (
            (2, 2),
            {"blocks.*.norm": SequenceParallel()},
            r"tensor= of blocks\.0\.norm has SequenceParallel for a RMSNorm",
        ),
        ((2, 2), {"blocks.*.norm": COLUMNS}, r"tensor= of blocks\.0\.norm has ColwiseParallel for a RMSNorm"),
        (
            (2, 2),
            {"words": COLUMNS, "head": COLUMNS},
            r"head and another module share a parameter, .*two ways",
        ),
        ((2, 3), LAYERS, r"blocks\.0\.up has a parameter of shape \(16, 16\), .*3 lanes cannot share evenly"),
    ],
)
def test_plans_that_mean_nothing(sizes, plan, text):
    with pytest.raises(OptionError, match=text):
        compiled(sizes, Decoder(), plan)


def test_a_mesh_of_two_dimensions_needs_context():
    with (
        fxpipe.local_lanes((2, 2), names=NAMES) as mesh,
        pytest.raises(OptionError, match="one dimension, or of two with context="),
    ):
        parallelize(nn.Sequential(nn.Linear(4, 4)), mesh, plan={"0": "colwise"})


@pytest.mark.variation
def test_a_trace_makes_no_group_of_processes(monkeypatch):
    """Rank 0 may trace alone, and a group is made by all."""

    def new_group(*args, **kwargs):
        raise AssertionError("a group of processes is made")

    dist.init_process_group("fake", rank=0, world_size=8, store=fake_store())
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", *NAMES))["cp", "tp"]
        model = Decoder(mixture=True)
        parallelize_module(model, mesh, {"blocks.*.experts": fxpipe.ExpertParallel(tokens="divided")})
        parallelize_module(model, mesh, fxpipe.ContextParallel({"ids": 1}, tensor={"blocks.*.o": ROW}))
        monkeypatch.setattr(torch.distributed.device_mesh, "new_group", new_group)
        monkeypatch.setattr(torch.distributed.device_mesh, "split_group", new_group)
        fxpipe.compile(model, batch(1), ranks=2, microbatches=3, effort=0.1)
    finally:
        dist.destroy_process_group()
