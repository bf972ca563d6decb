"""Sums of gradients over the lanes at the end of a step: edits that the certificate tells."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from zoo import EFFORT

import fxpipe
from fxpipe.certificate.check import check_artifact
from fxpipe.plan.lanes import LanePlan

pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="ContextParallel needs torch 2.12")

WIDTH, LENGTH, MICROBATCHES = 8, 4, 2


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()).square().mean()


@cache
def pipeline(shard: str | None) -> fxpipe.Pipeline:
    with fxpipe.local_lanes(2) as mesh:
        model = parallelize_module(Tokens(), mesh, fxpipe.ContextParallel({"x": 1}))
        x = torch.randn(2, LENGTH, WIDTH)
        options = {"replicas": 2, "schedule": "1f1b", "effort": EFFORT, "shard": shard}
        return fxpipe.compile(model, {"x": x}, ranks=1, microbatches=MICROBATCHES, **options)


LINE = r"( +rt\.sum_over_lanes\(0\)); (rt\.reduce_gradients\(0\))"
EDITS = {
    "left out": ((LINE, r"    \2"), "the captured step"),
    "again": ((LINE, r"\1; rt.sum_over_lanes(0); \2"), "over the lanes again"),
    "behind that over replicas": ((LINE, r"    \2\n\1"), "over the lanes behind its other sums"),
    "of no bucket": ((LINE, r"\1; rt.sum_over_lanes(1); \2"), "the bucket 1 over lanes, which the plan does"),
    "before the last is added": (
        (r"    BW0\(1\)\n    rt\.sum_over_lanes\(0\); ", "    rt.sum_over_lanes(0); BW0(1); "),
        "over the lanes before all is added to it|over the replicas before that over the lanes",
    ),
}


@pytest.mark.parametrize("shard", [None, "gradients"])
@pytest.mark.parametrize("name", EDITS)
def test_a_sum_over_lanes_that_changes_numbers_is_told(name, shard):
    (edit, put), expected = EDITS[name]
    artifact = pipeline(shard).artifact
    assert check_artifact(artifact).holds
    edited = re.sub(edit, put, artifact.programs[0])
    assert edited != artifact.programs[0], artifact.programs[0]
    found = check_artifact(replace(artifact, programs=(edited,)))
    assert not found.holds
    assert any(re.search(expected, str(each)) for each in found.problems), found


def test_a_plan_without_a_sum_does_not_hide_it():
    artifact = pipeline(None).artifact
    axes = tuple(replace(axis, summed=()) for axis in artifact.plan.lanes.axes)
    plan = replace(artifact.plan, lanes=LanePlan(axes))
    programs = (artifact.programs[0].replace("rt.sum_over_lanes(0)", "pass"),)
    assert not check_artifact(replace(artifact, plan=plan, programs=programs)).holds
