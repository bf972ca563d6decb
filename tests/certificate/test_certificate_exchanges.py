"""What replicas exchange, and what the plan says: edits that the certificate tells."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from zoo import EFFORT

import fxpipe
from fxpipe.certificate.check import check_artifact
from fxpipe.certificate.problems import Certificate
from fxpipe.plan.artifact import Plan

WIDTH, MICROBATCHES, STAGES = 32, 2, 8


class Layers(nn.Module):
    """Eight layers alike, with a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))
        self.shift = torch.linspace(0, 1, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.shift)
        return (x - y).square().mean()


@cache
def pipeline() -> fxpipe.Pipeline:
    """Each replica has rows of the parameters, and gathers those of the stage that runs and of the next."""
    x = torch.randn(2, WIDTH)
    return fxpipe.compile(
        Layers(),
        {"x": x, "y": x},
        ranks=2,
        replicas=2,
        microbatches=MICROBATCHES,
        shard="parameters",
        schedule="interleaved",
        stages_per_rank=4,
        split_points=[f"layers.{k}" for k in range(1, STAGES)],
        memory_limit=42_000,
        effort=EFFORT,
    )


def certificate(edit: str, put: str, count: int = 0) -> Certificate:
    """Of the programs, with an edit of the first one's."""
    artifact = pipeline().artifact
    first, *others = artifact.programs
    edited = re.sub(edit, put, first, count=count)
    assert edited != first
    return check_artifact(replace(artifact, programs=(edited, *others)))


def test_the_pipeline_gathers_and_frees_for_each_use() -> None:
    text = pipeline().artifact.programs[0]
    assert [text.count(f"rt.{verb}_parameters(2)") for verb in ("gather", "wait", "free")] == [2, 2, 2]
    holds = check_artifact(pipeline().artifact)
    assert holds.holds
    assert holds.otherwise == ()


PROBLEMS = {
    "gathered twice": (
        (r"rt\.gather_parameters\(1\); ", r"rt.gather_parameters(1); rt.gather_parameters(1); ", 1),
        "gathers the parameters of bucket 1 again before it has waited for them",
    ),
    "not waited for": (
        (r"    rt\.wait_gradients\(\)", r"    rt.gather_parameters(0)\n\g<0>"),
        "gathers the parameters of bucket 0 and does not wait for them",
    ),
    "freed on their way": (
        (r"rt\.gather_parameters\(1\); ", r"rt.gather_parameters(1); rt.free_parameters(1); ", 1),
        "frees the parameters of bucket 1, which are on their way",
    ),
    "freed twice": (
        (r"rt\.free_parameters\(3\); ", r"\g<0>\g<0>"),
        "frees the parameters of bucket 3, which are not its to free",
    ),
    "freed before the second microbatch": (
        (r"(rt\.wait_parameters\(2\); )F2\(0\)", r"\1F2(0); rt.free_parameters(2)"),
        r"reads the parameter 'layers.2.\w+' before its rows of other replicas are there",
    ),
    "waited for before the warm-up": (
        (
            r"(    for _ in rt\.warm_up.*\n        )rt\.wait_parameters\(3\); ",
            r"    rt.wait_parameters(3)\n\1",
        ),
        "waits for the parameters of bucket 3 before its warm-up, which an update that is undone changes",
    ),
    "not summed": ((r"rt\.reduce_gradients\(1\); ", ""), "layers.4.weight are not summed over the replicas"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_exchange_that_changes_numbers_is_told(name: str) -> None:
    edit, expected = PROBLEMS[name]
    found = certificate(*edit)
    assert not found.holds
    assert any(re.search(expected, str(problem)) for problem in found.problems), found


OTHERWISE = {
    "never freed": (
        (r"rt\.free_parameters\(\d\); ", ""),
        r"has \d+ bytes of parameters, and the plan has \d+",
    ),
    "kept to the end": ((r"rt\.free_parameters\(0\); ", ""), "bucket 0 and does not free them"),
    "kept for the backward": (
        (r"rt\.free_parameters\(1\); ", "", 1),
        "gathers the parameters of bucket 1, which are there",
    ),
    "summed again": (
        (r"    rt\.wait_gradients\(\)", r"    rt.reduce_gradients(0)\n\g<0>"),
        "sums bucket 0, to which nothing was added",
    ),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_an_exchange_that_takes_memory_alone_is_otherwise(name: str) -> None:
    edit, expected = OTHERWISE[name]
    found = certificate(*edit)
    assert found.holds
    assert any(re.search(expected, str(each)) for each in found.otherwise), found


def _of_first_rank(plan: Plan, **changes: object) -> Plan:
    return replace(plan, tensors=(replace(plan.tensors[0], **changes), *plan.tensors[1:]))


def _first_bucket(plan: Plan, names: slice) -> Plan:
    first, *others = plan.tensors[0].buckets
    return _of_first_rank(plan, buckets=(replace(first, gradients=first.gradients[names]), *others))


def _layout(plan: Plan, **changes: object) -> Plan:
    name = plan.tensors[0].parameters[0]
    return replace(plan, layouts={**plan.layouts, name: replace(plan.layouts[name], **changes)})


def _leaves(plan: Plan) -> Plan:
    leaves = tuple(replace(leaf, shape=(2, WIDTH + 1)) for leaf in plan.step.batch.leaves)
    return replace(plan, step=replace(plan.step, batch=replace(plan.step.batch, leaves=leaves)))


PLANS = {
    "a bucket lacks a gradient": (lambda p: _first_bucket(p, slice(1, None)), "in 0 buckets of rank 0"),
    "another dtype": (
        lambda p: _layout(p, dtype="torch.bfloat16"),
        r"parameter 'layers.0.bias' as bfloat16\[32\]",
    ),
    "another shape": (lambda p: _layout(p, shape=(WIDTH + 1,)), r"'layers.0.bias' as float\d\d\[33\]"),
    "another loss": (
        lambda p: replace(p, step=replace(p.step, loss_dtype="torch.float16")),
        "the plan has a loss of torch.float16",
    ),
    "no loss": (lambda p: replace(p, step=replace(p.step, has_loss=False)), r"no loss \(step.has_loss\)"),
    "another batch": (_leaves, r"the batch 'x' as float\d\d\[2, 33\]"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_says_otherwise_than_the_captured_step_is_told(name: str) -> None:
    edit, expected = PLANS[name]
    artifact = pipeline().artifact
    found = check_artifact(replace(artifact, plan=edit(artifact.plan)))
    assert re.search(expected, str(found.problems[0])), found


def test_a_constant_with_other_values_is_told() -> None:
    artifact = pipeline().artifact
    (name,) = artifact.constants
    changed = {name: artifact.constants[name] + 1}
    found = check_artifact(replace(artifact, constants=changed))
    assert not found.holds
    assert "the constant 'constant_0' has other values than in the captured step" in str(found)
