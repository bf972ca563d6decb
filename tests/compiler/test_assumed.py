"""The programs for batches without padding: each step runs those that its batch allows."""

import shutil
from pathlib import Path
from typing import Any

import assumed_worker as worker
import pytest
import torch
from assumed_worker import LENGTH, MICROBATCHES, PADDED, RATE, Decoder, batch_of, compiled
from equality import eager_step
from launch import forked
from marks import with_variations
from safetensors.torch import load_file
from zoo import relative_error, too_far

import fxpipe
from fxpipe.cli.command import main as command
from fxpipe.errors import ArtifactError, BatchError, RunError
from fxpipe.training.run.local_runner import LocalRunner

pytestmark = pytest.mark.usefixtures("double")

LIMIT = 1e-12
SHAPES: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": 1},
    "V, split backward": {"ranks": 2, "schedule": "zb-v"},
    "recompute, of any length": {"ranks": 2, "recompute": "full", "dimensions": {"sequence": LENGTH}},
    "offload, measured": {"ranks": 2, "offload": 0.5, "schedule": "1f1b", "costs": "measured"},
    "replicas": {"ranks": 2, "replicas": 2, "shard": "gradients"},
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each local run, whether it was one of the programs for batches without padding."""
    runs: list[bool] = []
    run = LocalRunner._run_locally

    def recorded(self: LocalRunner, *args: Any, **kwargs: Any) -> Any:
        runs.append(bool(self.plan.assumed))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(LocalRunner, "_run_locally", recorded)
    return runs


def assert_as_eager(pipe: fxpipe.Pipeline, padded: bool) -> None:
    rows = 2 * MICROBATCHES * pipe.plan.replicas
    batch = batch_of(0, 0, padded, rows)
    result = pipe.run_local(batch)
    loss, gradients = eager_step(Decoder(), batch, rows // 2, None)
    assert relative_error(result.loss, loss) <= LIMIT
    assert too_far(result.grads, gradients) == {}


@pytest.mark.in_ci("replicas")
@pytest.mark.parametrize("shape", with_variations(SHAPES, ["V, split backward"]))
def test_each_batch_is_run_by_its_programs(
    shape: str, ran: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "measured" in shape and torch.__version__ < "2.13":
        pytest.skip("torch's fake attention on a CPU has its sums in float32, and the kernel in float64")
    monkeypatch.setattr("fxpipe.ir.liveness.SMALLEST", 1)
    pipe = compiled(Decoder(), **SHAPES[shape])
    for padded in (False, True, False):
        assert_as_eager(pipe, padded)
    assert ran == [True, False, True]
    assert pipe.assumed is not None
    assert pipe.assumed.plan.trains_as(pipe.plan)
    # Neither the mask of attention nor that of the loss is read.
    assert not any("mask" in leaves for leaves in pipe.assumed.plan.step.leaves)
    assert "is_causal" not in pipe.artifact.programs[0]


def test_the_plan_tells_it_and_the_rule_can_be_left_out() -> None:
    pipe = compiled(Decoder(), ranks=1)
    (rewrite,) = pipe.plan.rewrites
    assert (rewrite.rule, rewrite.ops) == ("batch-masks", 4)
    assert rewrite.seconds > 0
    alone = compiled(Decoder(), ranks=1, without=["batch-masks"])
    assert (alone.assumed, alone.plan.rewrites) == (None, ())
    assert alone.artifact.programs == pipe.artifact.programs


class InBuffer(Decoder):
    """It keeps the mask that that of the batch is joined with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("triangle", super().lower(LENGTH + 2), persistent=False)

    def lower(self, length: int) -> torch.Tensor:
        return self.triangle[:length, :length]


def test_a_part_of_the_mask_may_lie_in_a_buffer(ran: list[bool]) -> None:
    pipe = compiled(InBuffer(), ranks=2, schedule="zb-h1")
    for padded in (False, True):
        assert_as_eager(pipe, padded)
    assert ran == [True, False]
    pipe.buffers["triangle"][0, 1] = True
    with pytest.raises(RunError, match="made from triangle was causal"):
        pipe.run_local(batch_of(0, 0, False))
    pipe.run_local(batch_of(0, 0, True))  # whose programs read the mask


class FromData(Decoder):
    """Its mask is made from what it computes with, of which no two batches are alike."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x[..., 0] > -1) + 0 * mask.sum()


class Windowed(Decoder):
    """Without padding its mask is none that a kernel knows."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x, mask * (torch.arange(worker.LENGTH) > 3))


@pytest.mark.parametrize("model", [FromData, Windowed])
def test_programs_that_would_not_be_used_are_not_compiled(model: type[Decoder]) -> None:
    assert compiled(model(), ranks=1).assumed is None


def test_a_saved_pipeline_has_both(tmp_path: Path, ran: list[bool], capsys: Any) -> None:
    pipe = compiled(Decoder(), ranks=2, evaluation=True)
    pipe.save(tmp_path / "saved")
    loaded = fxpipe.load(tmp_path / "saved")
    for padded in (False, True):
        batch = batch_of(0, 0, padded)
        assert torch.equal(loaded.run_local(batch).loss, pipe.run_local(batch).loss)
        assert loaded.evaluation.run_local(batch).loss is not None
    assert ran == [True, True, False, False, False, False]
    capsys.readouterr()
    command(["check", str(tmp_path / "saved")])
    assert capsys.readouterr().out.count("The programs of all ranks compute") == 3
    # The forward alone in the place of programs that train.
    shutil.rmtree(tmp_path / "saved" / "assumed")
    shutil.copytree(tmp_path / "saved" / "evaluation", tmp_path / "saved" / "assumed")
    with pytest.raises(ArtifactError, match="has the programs of another directory"):
        fxpipe.load(tmp_path / "saved")


def test_a_batch_without_the_mask_is_refused() -> None:
    pipe = compiled(Decoder(), ranks=1)
    batch = batch_of(0, 0, False)
    with pytest.raises(BatchError, match=r"this rank needs"):
        pipe.step({"x": batch["x"]})
    pipe.step(batch)
    assert pipe.step_number == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"validation": "post"}, marks=pytest.mark.variation),
        {"shard": "parameters", "schedule": "zb-v"},
    ],
)
def test_replicas_agree_on_the_programs(options: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks of two replicas, of which one alone has padding in the third step, as eager trains."""
    options = {"ranks": 2, "replicas": 2, **options}
    run = forked(4, worker.train, tmp_path, options, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step, padded in enumerate(PADDED):
        losses = [eager_step(model, batch_of(step, k, p), MICROBATCHES, None) for k, p in enumerate(padded)]
        for name, parameter in model.named_parameters():
            parameter.grad = sum(gradients[name] for _, gradients in losses) / 2
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(4):
            found = load_file(tmp_path / f"{rank}.safetensors")
            assert found["ran"].tolist() == [not any(each) for each in PADDED]
            assert int(found["steps"]) == len(PADDED)
            assert relative_error(found["losses"][step], sum(loss for loss, _ in losses) / 2) <= LIMIT
    first = load_file(tmp_path / "0.safetensors")  # full_state_dict gives it to rank 0
    state = {n: x for n, x in first.items() if n in model.state_dict()}
    assert too_far(state, model.state_dict()) == {}
