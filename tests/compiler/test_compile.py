"""What a compilation leaves as it was beside the model, and which programs it refuses."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.codegen.program import program_source
from fxpipe.compiler import generate
from fxpipe.errors import CaptureError, VerifyError


@pytest.fixture(params=[True, False])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_is_off_meanwhile_and_then_as_it_was(enabled: bool, fails: bool) -> None:
    seen = mock.Mock()  # compile restores what the loss function's own code changes

    def loss_fn(output: torch.Tensor, example: Any) -> torch.Tensor:
        seen(gc.isenabled())
        return output.detach().sum() if fails else output.sum()

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with pytest.raises(CaptureError) if fails else contextlib.nullcontext():
        fxpipe.compile(model, (torch.zeros(2, 4),), ranks=2, microbatches=2, schedule="1f1b", loss_fn=loss_fn)
    assert {call.args for call in seen.call_args_list} == {(False,)}
    assert gc.isenabled() == enabled


def test_programs_that_are_not_the_captured_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pass that changes a number: here each tanh is a sine."""

    def wrong(plan: Any) -> str:
        return program_source(plan).replace("aten.tanh.out", "aten.sin.out")

    monkeypatch.setattr(generate, "program_source", wrong)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def compiled(**options: Any) -> fxpipe.Pipeline:
        kept = {"ranks": 2, "microbatches": 2, "schedule": "1f1b", "loss_fn": lambda y, _: y.square().mean()}
        return fxpipe.compile(model, (torch.zeros(2, 4),), **kept, **options)

    with pytest.raises(VerifyError, match=r"rank\d.py:\d+: .*sin"):
        compiled()
    assert "sin" in "".join(compiled(check=False).artifact.programs)
