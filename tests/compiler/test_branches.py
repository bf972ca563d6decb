"""A branch of the model on its microbatch: programs for both answers, each step by those of its batch."""

import json
from pathlib import Path
from typing import Any

import branches_worker as worker
import pytest
import torch
from branches_worker import ANSWERS, LENGTH, MICROBATCHES, RATE, Ask, Asking, batch, compiled, ignored
from equality import eager_step
from launch import forked
from safetensors.torch import load_file
from zoo import relative_error, too_far

import fxpipe
from fxpipe.errors import ArtifactError, BatchError, RunError
from fxpipe.schedule.units import seconds_text

pytestmark = pytest.mark.usefixtures("double")

ASKS: dict[str, Ask] = {
    "any": ignored,
    "not all": lambda x, labels, kind: not (labels != -100).all(),
    "a flag": lambda x, labels, kind: kind.all().item(),
    "a count": lambda x, labels, kind: (labels[:, 0] == -100).sum() > 0,
    "a share": lambda x, labels, kind: (labels == -100).float().mean() > 0.1,
    "the least": lambda x, labels, kind: labels.min() < 0,
    "twice": lambda x, labels, kind: ignored(x, labels, kind) and ignored(x, labels, kind),
}


def assert_as_eager(pipe: fxpipe.Pipeline, ask: Ask, yes: bool) -> None:
    data = batch(yes, MICROBATCHES * pipe.plan.replicas)
    result = pipe.run_local(data)
    loss, gradients = eager_step(Asking(ask), data, MICROBATCHES * pipe.plan.replicas, None)
    assert relative_error(result.loss, loss) <= 1e-12
    assert too_far(result.grads, gradients) == {}


@pytest.mark.in_ci("not all", "a flag", "a share", "twice")
@pytest.mark.parametrize("name", ASKS)
def test_each_batch_is_run_by_the_programs_of_its_answer(name: str) -> None:
    ask = ASKS[name]
    pipe = compiled(ask)
    assert pipe.assumed is not None
    assert pipe.assumed.plan.trains_as(pipe.plan)
    for yes in (False, True, False):
        assert_as_eager(pipe, ask, yes)
    assert pipe.check().holds


@pytest.mark.in_ci("zb-v", "replicas")
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb-v"},
        {"ranks": 1, "recompute": "full", "dimensions": {"sequence": LENGTH}},
        {"replicas": 2, "shard": "gradients"},
    ],
    ids=["zb-v", "any length", "replicas"],
)
def test_in_other_settings(options: dict[str, Any]) -> None:
    pipe = compiled(ignored, **options)
    for yes in (True, False):
        assert_as_eager(pipe, ignored, yes)


def test_microbatches_that_differ_are_refused() -> None:
    data = batch(True)
    data["labels"][:2] = 1
    with pytest.raises(
        BatchError, match=r"asks the leaf 'labels' at .*branches_worker.py:\d+.*give both answers"
    ):
        compiled(ignored).run_local(data)


def test_batches_that_cannot_be_asked_are_refused_as_ever() -> None:
    pipe = compiled(lambda x, labels, kind: (labels[:, LENGTH - 1] == -100).all())
    assert pipe.assumed is not None
    data = batch(False)
    for wrong in (data["labels"][:, 1:], data["labels"][0], data["labels"][1:], data["labels"].float()):
        with pytest.raises(BatchError, match="labels"):
            pipe.run_local(data | {"labels": wrong})
    with pytest.raises(BatchError, match="labels"):
        pipe.run_local({"x": data["x"], "kind": data["kind"]})


def test_the_plan_tells_it_and_has_the_memory_of_the_larger(capsys: pytest.CaptureFixture[str]) -> None:
    pipe, alone = compiled(ignored), compiled(ignored, without=["batch-branches"])
    (rewrite,) = pipe.plan.rewrites
    assert (rewrite.rule, rewrite.ops) == ("batch-branches", 1)
    # One answer has a sine, the other three more ops between the layers, and their backward.
    assert 0 < rewrite.seconds < sum(stage.total for stage in pipe.plan.costs.stages)
    assert pipe.assumed is not None
    assert alone.assumed is None
    pipe.explain()
    text = (
        "batch-branches: 1 question of the model's code has programs of its own for each answer of a batch, "
        f"without the ops of the other: {seconds_text(rewrite.seconds)} less for a microbatch."
    )
    assert text in capsys.readouterr().out.replace("\n", " ")
    peaks = [each.prediction.peak_memory for each in (pipe.plan, pipe.assumed.plan, alone.plan)]
    assert peaks[0] == tuple(map(max, *peaks[1:]))
    assert peaks[0] != peaks[2]  # the answer of the example needs less
    with pytest.raises(RunError, match=r"compiled for False, and this microbatch gives True"):
        alone.run_local(batch(True))
    # A limit that leaves enough for the example's answer alone.
    needed = max(held.total + peak for held, peak in zip(alone.plan.held, peaks[2], strict=True))
    limited = compiled(ignored, memory_limit=needed)
    assert limited.assumed is None
    assert_as_eager(limited, ignored, False)


OTHERS: dict[str, tuple[Ask, ...]] = {
    "two questions": (ignored, lambda x, labels, kind: (labels == 3).all()),
    "two leaves": (lambda x, labels, kind: (labels < -kind[:, None].long()).any(),),
    "an integer": (lambda x, labels, kind: (labels == -100).sum().item() in (1, 2),),
    "a value that was written": (lambda x, labels, kind: (labels.clone().clamp_(min=-1) == -1).any(),),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_branches_are_those_of_the_example(name: str) -> None:
    pipe = compiled(*OTHERS[name])
    assert pipe.assumed is None
    pipe.run_local(batch(False))
    with pytest.raises(RunError, match="this microbatch gives"):
        pipe.run_local(batch(True))


def test_an_answer_that_cannot_be_compiled_is_refused_in_the_step() -> None:
    """It leaves a layer without a gradient, so the pipeline would train other parameters."""
    pipe = compiled(ignored, model=Asking(ignored, unused=True))
    assert pipe.assumed is None
    with pytest.raises(RunError, match="this microbatch gives True"):
        pipe.run_local(batch(True))


def test_a_saved_pipeline_has_both(tmp_path: Path) -> None:
    pipe = compiled(ignored)
    pipe.save(tmp_path / "pipe")
    loaded = fxpipe.load(tmp_path / "pipe")
    for yes in (True, False):
        assert_as_eager(loaded, ignored, yes)
    file = tmp_path / "pipe" / "assumed" / "plan.json"
    plan = json.loads(file.read_text())
    assert plan["branch"]["ops"] == ["eq.Scalar(-100)", "any()"]
    for op in ("system(1)", "any(", "any", 'to("load")', "eq.Scalar(x)"):
        plan["branch"]["ops"][1] = op
        file.write_text(json.dumps(plan))
        with pytest.raises(ArtifactError, match=r"branch\.ops\[1\]"):
            fxpipe.load(tmp_path / "pipe")


@pytest.mark.slow
def test_ranks_agree_on_the_answer(tmp_path: Path) -> None:
    """Two replicas of two ranks."""
    run = forked(4, worker.train, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    model = Asking(ignored)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step, yes in enumerate(ANSWERS):
        of_replicas = [batch(yes, seed=2 * step + replica) for replica in (0, 1)]
        loss = model(**{name: torch.cat([each[name] for each in of_replicas]) for name in of_replicas[0]})
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    losses.append(model(**batch(True)).detach())
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 4
    for file in files:
        state = load_file(file)
        torch.testing.assert_close(state.pop("losses"), torch.stack(losses), rtol=1e-12, atol=0)
        assert state.keys() <= model.state_dict().keys()  # full_state_dict gives it to rank 0
        for name, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-15)
