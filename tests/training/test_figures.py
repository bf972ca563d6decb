"""Figures of the last steps, as loggers take them."""

import json
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.api import figures
from fxpipe.cost.devices.known_devices import peak_rate
from fxpipe.errors import BatchError, RunError
from fxpipe.ir.ops import node_flops


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(16, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


IDS = torch.arange(10).reshape(2, 5)
TOKENS = 2 * 10  # of two microbatches


@pytest.fixture(scope="module")
def pipe():
    torch.manual_seed(0)
    return fxpipe.compile(Words(), {"ids": IDS}, ranks=1, microbatches=2, schedule="1f1b", evaluation=True)


def test_what_does_not_count_as_a_step_may_fail(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(figures, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = figures.StepClock()
    with clock.step(lambda: 1.0):
        now[0] += 2.0
    with suppress(BatchError), clock.stopped():
        now[0] += 50.0
        raise BatchError("as of an evaluation")
    assert clock.take() == (2.0, 1.0)


def test_figures_of_steps(pipe, monkeypatch):
    with pytest.raises(RunError, match="No step has run yet"):
        pipe.figures()
    now = [100.0]
    monkeypatch.setattr(figures, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    batch = {"ids": IDS.repeat(2, 1)}
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, clip_grad_norm=1.0)
    for _ in range(3):
        pipe.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        now[0] += 2.0
    found = pipe.figures()
    assert found.pop("norm") == float(optimizer.last_norm) > 0
    assert 0.0 <= found.pop("bubble") < 1.0
    assert found == {"step": 2, "seconds": 2.0, "tokens/s": TOKENS / 2.0, "predicted": 0.0}
    pipe.step(batch)
    now[0] += 7.0
    evaluate = pipe._runner.evaluate
    monkeypatch.setattr(
        pipe._runner, "evaluate", lambda *given: now.append(now.pop() + 50.0) or evaluate(*given)
    )
    pipe.evaluate(batch)
    assert pipe.figures()["seconds"] == 7.0
    assert pipe.figures()["seconds"] == 7.0, "those of the last call"


def test_loggers_take_them(pipe, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pipe.step({"ids": IDS.repeat(2, 1)})
    found = pipe.figures()
    with tensorboard.SummaryWriter(str(tmp_path)) as board:
        for name, number in found.items():
            board.add_scalar(name, number, pipe.step_number)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = {name: events.Scalars(name)[0] for name in events.Tags()["scalars"]}
    assert {x.step for x in written.values()} == {pipe.step_number}
    assert {name: x.value for name, x in written.items()} == pytest.approx(found, rel=1e-6)
    assert json.loads(json.dumps(found)) == found


def test_the_share_of_the_peak(pipe, monkeypatch):
    """By a device of the table, whose data sheet counts."""
    monkeypatch.setattr(figures, "is_accelerator", lambda device: True)
    monkeypatch.setattr(figures, "identity", lambda device: ("NVIDIA H200", ""))
    monkeypatch.setattr(figures, "memory_size", lambda device: 141 * 10**9)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 12345)
    flops = sum(node_flops(node) for node in pipe.graph.nodes if node.op == "call_function")
    assert flops == sum(pipe.plan.flops.values()) > 0
    spans = [("F0.0", 1.0, 2.0), ("B0.0", 3.0, 5.0)]
    found = figures.figures_of(pipe.plan, 3, 1e-9, spans, 4, torch.device("cuda"))
    assert found["MFU"] == pytest.approx(2 * flops / peak_rate("H200", "float32") / 1e-9)
    assert (found["memory"], found["bubble"], found["tokens/s"]) == (12345, 0.25, 4 * TOKENS / 1e-9)
