"""``pipe.evaluate``: the forward in eval mode, on the ranks and the tensors of a training pipeline."""

import copy
import json
import re
import shutil

import evaluation_worker as worker
import pytest
import torch
import torch.nn.functional as F
from evaluation_worker import MICROBATCHES, Noisy, evaluated, trained_alone
from launch import forked
from marks import slow_except
from safetensors.torch import load_file
from shapes import SHAPES
from torch import nn
from zoo import (
    CASES,
    EFFORT,
    WIDTH,
    Case,
    Chain,
    captured_once,
    in_double_precision,
    numbers,
    relative_error,
    too_far,
)

import fxpipe
from fxpipe.errors import ArtifactError, CaptureError, OptionError, PartitionError, RunError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]

LIMIT = 1e-12
CASE = Case(Noisy, numbers, rows=3)


def with_evaluation(case: Case, model: nn.Module, **options) -> fxpipe.Pipeline:
    options = {"ranks": 2, "schedule": "1f1b", "loss_fn": case.loss_fn, "evaluation": True} | options
    return fxpipe.compile(model, case.example(), microbatches=MICROBATCHES, effort=EFFORT, **options)


#: Other ranks and placements than "V", which an evaluation treats alike.
VARIATIONS = ("two ranks", "one rank", "four ranks", "V of three", "interleaved")


@pytest.mark.in_ci("three ranks", "offload")
@pytest.mark.parametrize("shape", slow_except(SHAPES, "V", variations=VARIATIONS))
def test_evaluation_between_training_steps(shape, monkeypatch):
    """It gives what model.eval() gives, after each step, and changes nothing."""
    monkeypatch.setattr("fxpipe.ir.liveness.SMALLEST", 1)
    model, twin, batch = CASE.build(), CASE.build(), CASE.data(MICROBATCHES)
    modes = [module.training for module in model.modules()]
    assert any(modes)
    with captured_once(CASE, "outputs"):
        pipe = with_evaluation(CASE, model, outputs=["logits"], **SHAPES[shape])
    assert [module.training for module in model.modules()] == modes
    with captured_once(CASE, "alone"):
        alone = with_evaluation(CASE, twin, evaluation=False, **SHAPES[shape])
    for step in range(2):
        result, other = pipe.run_local(batch, step=step), alone.run_local(batch, step=step)
        assert torch.equal(result.loss, other.loss)
        for name, parameter in model.named_parameters():
            for p, grad in ((parameter, result.grads[name]), (twin.get_parameter(name), other.grads[name])):
                p.data -= 0.1 * grad
        expected = evaluated(model, batch)
        before = copy.deepcopy(model.state_dict())
        found = pipe.evaluation.run_local(batch, outputs=["logits"])
        assert relative_error(found.loss, expected["loss"]) <= LIMIT
        assert too_far(found.outputs, {"logits": expected["logits"]}) == {}
        assert found.grads == {}
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.in_ci("2-barrier")
@pytest.mark.parametrize("vocab_parallel", ["1-barrier", "2-barrier"])
def test_a_split_vocabulary(vocab_parallel):
    case = CASES["tied_head"]
    model, batch = case.build(), case.data(MICROBATCHES)
    pipe = with_evaluation(case, model, vocab_parallel=vocab_parallel)
    assert relative_error(pipe.evaluation.run_local(batch).loss, model(**batch)) <= LIMIT


class LabelsInTraining(Chain):
    """A detection model, say: losses in training, results in evaluation."""

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return {"loss": F.mse_loss(x, y), "boxes": x} if self.training else {"boxes": x * 2}


def test_a_model_without_a_loss_in_evaluation():
    case = Case(LabelsInTraining, numbers)
    model, batch = case.build(), case.data(MICROBATCHES)
    pipe = with_evaluation(case, model, ranks=1, outputs=["boxes"])
    result = pipe.evaluate(batch, outputs=["boxes"])
    assert result.loss is None
    boxes = model.eval()(**batch)["boxes"]
    assert too_far(result.outputs, {"boxes": boxes}) == {}
    with pytest.raises(RunError, match="has no loss: ask for outputs"):
        pipe.evaluate(batch)
    with pytest.raises(CaptureError, match="No loss: the model returned dict"):
        with_evaluation(case, case.build())


# -- saved --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    with in_double_precision():
        path = tmp_path_factory.mktemp("evaluation") / "saved"
        model = CASE.build()
        pipe = with_evaluation(CASE, model, outputs=["logits"])
        pipe.run_local(CASE.data(MICROBATCHES))  # so that the norms' statistics are not those of a new model
        pipe.save(path)
        return path, model


def test_a_saved_pipeline_evaluates(saved):
    path, model = saved
    assert load_file(path / "evaluation" / "rank0.safetensors") == {}
    pipe, batch = fxpipe.load(path), CASE.data(MICROBATCHES)
    found = pipe.evaluation.run_local(batch, outputs=["logits"])
    expected = evaluated(model, batch)
    assert relative_error(found.loss, expected["loss"]) <= LIMIT
    assert too_far(found.outputs, {"logits": expected["logits"]}) == {}
    for name, parameter in pipe.parameters.items():
        parameter.data.mul_(0.9)
        model.get_parameter(name).data.mul_(0.9)
    assert relative_error(pipe.evaluation.run_local(batch).loss, evaluated(model, batch)["loss"]) <= LIMIT


def test_an_edited_program_of_evaluation(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "edited")
    program = tmp_path / "edited" / "evaluation" / "rank0.py"
    text = program.read_text()
    assert "1e-05" in text
    program.write_text(text.replace("1e-05", "0.25"))
    with pytest.warns(match=r"evaluation/rank0\.py was edited"):
        pipe = fxpipe.load(tmp_path / "edited")
    batch = CASE.data(MICROBATCHES)
    before = fxpipe.load(saved[0]).evaluation.run_local(batch).loss
    assert relative_error(pipe.evaluation.run_local(batch).loss, before) > 1e-3
    assert torch.equal(pipe.run_local(batch).loss, fxpipe.load(saved[0]).run_local(batch).loss)


@pytest.mark.parametrize(
    ("line", "edited", "said"),
    [
        (
            'rt.add_output("logits", {0}, microbatch=m)',
            'if m != 2: rt.add_output("logits", {0}, microbatch=m)',
            "for 3 microbatches of 4, and the plan has it on rank 1",
        ),
        (
            'rt.add_output("logits", {0}, microbatch=m)',
            'rt.add_output("logits", {0}[:1] if m == 2 else {0}, microbatch=m)',
            r"of shape \(1, 8\); the plan has torch.float64 of shape \(3, 8\)",
        ),
    ],
)
def test_an_edit_of_an_output(saved, tmp_path, line, edited, said):
    shutil.copytree(saved[0], tmp_path / "edited")
    program = tmp_path / "edited" / "evaluation" / "rank1.py"
    text = program.read_text()
    variable = re.search(r'rt.add_output\("logits", (\w+), microbatch=m\)', text)[1]
    program.write_text(text.replace(line.format(variable), edited.format(variable)))
    with pytest.warns(match=r"evaluation/rank1\.py was edited"):
        pipe = fxpipe.load(tmp_path / "edited").evaluation
    assert pipe.run_local(CASE.data(MICROBATCHES)).outputs == {}
    with pytest.raises(RunError, match=said):
        pipe.run_local(CASE.data(MICROBATCHES), outputs=["logits"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda plan: plan["tensors"][0]["parameters"].append("blocks.3.0.inner.weight"),
            "needs .* which rank 0 does not hold",
        ),
        (
            lambda plan: plan["layouts"]["blocks.0.0.inner.bias"].update(dtype="torch.float32"),
            "another layout",
        ),
        (lambda plan: plan["step"].update(ranks=3), "must have 3"),
        (lambda plan: plan["step"]["outputs"][0].update(rank=2), r"step.outputs\[0\].rank is 2"),
        (lambda plan: plan["step"]["outputs"][0].update(shape=[-1]), r"step.outputs\[0\].shape\[0\] is -1"),
        (
            lambda plan: plan["step"]["outputs"][0].update(dtype="float"),
            r"step.outputs\[0\].dtype is 'float'",
        ),
        (lambda plan: plan["step"]["outputs"].append(plan["step"]["outputs"][0]), "'logits' twice"),
    ],
)
def test_a_damaged_plan_of_evaluation(saved, tmp_path, change, said):
    shutil.copytree(saved[0], tmp_path / "damaged")
    file = tmp_path / "damaged" / "evaluation" / "plan.json"
    plan = json.loads(file.read_text())
    change(plan)
    file.write_text(json.dumps(plan))
    with pytest.raises(ArtifactError, match=said):
        fxpipe.load(tmp_path / "damaged")


def test_the_evaluation_of_another_pipeline(saved, tmp_path):
    case = CASES["loss_outside"]
    with_evaluation(case, case.build()).save(tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "evaluation")
    shutil.copytree(saved[0] / "evaluation", tmp_path / "other" / "evaluation")
    with pytest.raises(ArtifactError, match=r"needs 'blocks.*which rank 0 does not hold"):
        fxpipe.load(tmp_path / "other")


# -- what is refused ----------------------------------------------------------------------------------------


def test_a_pipeline_that_trains_alone():
    pipe = with_evaluation(CASE, CASE.build(), evaluation=False)
    assert pipe.evaluation is None
    with pytest.raises(RunError, match=r"compile it with evaluation=True"):
        pipe.evaluate(CASE.data(MICROBATCHES))


def test_an_evaluation_of_an_evaluation():
    with pytest.raises(OptionError, match="leave out evaluation"):
        with_evaluation(CASE, CASE.build(), gradients=False)


class Backwards(Chain):
    """Evaluates its blocks in the opposite order."""

    def forward(self, x, y):
        for block in self.blocks if self.training else reversed(self.blocks):
            x = block(x)
        return F.mse_loss(x, y)


class Averaged(Chain):
    """Adds a table in evaluation alone, which training does not hold on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y) if self.training else F.mse_loss(x * self.table, y)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Backwards, r"no stage that has its tensors is left for .*blocks\..*by itself, with gradients=False"),
        (Averaged, r"is left for .*, which uses table \("),
    ],
)
def test_a_forward_that_does_not_fit_the_ranks(model, said):
    with pytest.raises(PartitionError, match=said):
        with_evaluation(Case(model, numbers), model())


def test_a_forward_beside_training_is_no_step_of_it():
    """Dropout's numbers, which depend on the number of the step, go on as without the evaluation."""
    model, options = CASE.model(), {"ranks": 1, "microbatches": 2}
    example, batch = CASE.data(1), CASE.data(2)
    pipe = fxpipe.compile(model, example, **options)
    pipe.step(batch)
    number = pipe.step_number
    beside = fxpipe.compile(model.eval(), example, gradients=False, like=pipe, **options)
    assert torch.equal(beside.evaluate(batch), beside.evaluate(batch))
    assert (pipe.step_number, beside.step_number) == (number, 2)


# -- under torchrun -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluation_under_torchrun(tmp_path):
    """After each training step, on the ranks' own weights, and of the saved pipeline."""
    ranks = 2
    run = forked(ranks, worker.main, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    for name, case in worker.TRAINED.items():
        expected = trained_alone(case)
        for rank in range(ranks):
            found = load_file(tmp_path / f"{name}.{rank}.safetensors")
            assert found.keys() == {"training", "evaluation", "loaded"}
            assert too_far(found, expected | {"loaded": expected["evaluation"][-1]}) == {}, (name, rank)
        saved, again = tmp_path / name, tmp_path / f"{name} again"
        for file in (f"{part}rank{rank}.sha256" for part in ("", "evaluation/") for rank in range(ranks)):
            first, second = ((path / file).read_text().splitlines() for path in (saved, again))
            assert first[:2] == second[:2]  # the programs and tensors; a plan may write 1 as 1.0
    for part in ("", "evaluation"):
        held = load_file(tmp_path / "constants again" / part / "rank1.safetensors")
        values = [float(t[0]) for name, t in sorted(held.items()) if "constant" in name]
        assert values[-2:] == [1.25, 1.375]


@pytest.mark.slow
def test_replicas_evaluate_batches_of_several_lengths(tmp_path):
    """Of which only one is shorter than a step's: the loss is that of all rows."""
    run = forked(2, worker.of_replicas, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    one, other = map(worker.rows_of, range(2))
    expected = worker.Guarded()(**{name: torch.cat([one[name], other[name]]) for name in one})
    for rank in range(2):
        assert relative_error(load_file(tmp_path / f"{rank}.safetensors")["loss"], expected) <= LIMIT


class Core(nn.Module):
    """Attention with a mask that is causal by its value, as programs check."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.core, self.last = nn.Linear(4, 12), Core(), nn.Linear(4, 4)

    def forward(self, x):
        q, k, v = self.first(x)[:, None].chunk(3, -1)
        return self.last(self.core(q, k, v)).square().mean()


def test_a_mask_is_checked_on_the_rank_that_has_it():
    """The forward alone would send less if the first rank computed the attention too."""
    model, x = Attends(), torch.randn(4, 5, 4)
    pipe = fxpipe.compile(
        model, {"x": x[:2]}, ranks=2, microbatches=2, split_points=["core"], schedule="1f1b", evaluation=True
    )
    torch.testing.assert_close(pipe.evaluation.run_local({"x": x}).loss, model(x).detach())
