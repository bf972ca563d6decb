"""State that a forward keeps in plain attributes of modules: as in eager PyTorch."""

import kept_worker as worker
import pytest
import torch
from equality import LIMIT, attributes
from kept_worker import ROWS, WIDTH, batch_of, build, pipeline, state_of, step_eager, train_beside_eager
from launch import forked
from marks import slow_except
from safetensors.torch import load_file
from torch import nn
from zoo import relative_error, too_far

import fxpipe
from fxpipe.api.rank_tensors import held_of

pytestmark = pytest.mark.usefixtures("double")

MODELS = [
    worker.Recurrent,
    worker.InANamedTuple,
    worker.InADataClass,
    worker.Nested,
    worker.DetachedWhenRead,
    worker.InPlace,
    worker.Moves,
    worker.Swaps,
]
#: As Recurrent, in other containers; as Moves.
ALIKE = [worker.InANamedTuple, worker.Nested, worker.Swaps]


@pytest.mark.in_ci("Recurrent")
@pytest.mark.parametrize(
    "model", slow_except(MODELS, worker.Recurrent, worker.InPlace, worker.Moves, variations=ALIKE)
)
def test_it_trains_as_in_eager(model):
    own, expected = build(model), build(model)
    before, values = attributes(own), state_of(own)
    pipe = pipeline(own)
    assert attributes(own) == before
    assert all(torch.equal(x, values[name]) for name, x in state_of(own).items())
    train_beside_eager(pipe, own, expected)
    assert pipe.state_dict().keys() == own.state_dict().keys()


@pytest.mark.parametrize("options", [{}, pytest.param({"recompute": "full"}, marks=pytest.mark.slow)])
def test_memories_are_on_the_ranks_of_their_layers(options):
    """Although the forward writes all of them at its end."""
    model = build(worker.Memories)
    pipe = pipeline(model, ranks=4, schedule="zb-h1", **options)
    assert len([held for held in pipe.plan.tensors if held.buffers]) > 2
    train_beside_eager(pipe, model, build(worker.Memories))


@pytest.mark.slow
def test_state_of_the_first_batch():
    model, expected = build(worker.OnTheFirstBatch), build(worker.OnTheFirstBatch)
    with pytest.raises(fxpipe.CaptureError, match=r"in the model's hidden, .*run the model on one batch"):
        pipeline(model)
    assert model.hidden is None
    for either in (model, expected):
        either(batch_of(9, ROWS)[0])
    train_beside_eager(pipeline(model), model, expected)


@pytest.mark.slow
def test_a_saved_pipeline_and_a_reset(tmp_path):
    model, expected = build(worker.Recurrent), build(worker.Recurrent)
    pipe = pipeline(model)
    train_beside_eager(pipe, model, expected, steps=1)
    earlier, value = model.hidden[0], model.hidden[0].clone()
    pipe.save(tmp_path / "saved")
    loss, _ = step_eager(build_like(expected), 1)
    loaded = fxpipe.load(tmp_path / "saved")
    assert relative_error(loaded.run_local(batch_of(1), step=1).loss, loss) <= LIMIT
    loaded.synchronize(model)
    losses = [one.run_local(batch_of(2), step=2).loss for one in (loaded, pipe)]
    assert relative_error(*losses) <= LIMIT
    assert torch.equal(earlier, value)  # code may have kept it
    for either in (model, expected):
        either.keep(worker.zeros() + 1, worker.zeros())
    expected.load_state_dict(model.state_dict())
    train_beside_eager(pipe, model, expected, steps=1)
    model.hidden = None
    with pytest.raises(fxpipe.RunError, match=r"hidden\.0, .*is gone. Put such a tensor there, or compile"):
        pipe.run_local(batch_of(0))


def build_like(model: worker.Recurrent) -> nn.Module:
    other = build(type(model))
    other.load_state_dict(model.state_dict())
    other.keep(*model.hidden)
    return other


@pytest.mark.variation
@pytest.mark.slow
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    losses = {"whole": run(tmp_path / "a", 4)}
    run(tmp_path / "b", 2)
    losses["resumed"] = run(tmp_path / "b", 4)
    assert torch.equal(losses["whole"], losses["resumed"])
    (file,) = (tmp_path / "b").glob("step-*4/*.safetensors")
    assert load_file(file)["model.hidden.0"].any()


def run(directory, steps: int) -> torch.Tensor:
    """The loss of the last step, and the state after it."""
    model = build(worker.Recurrent)
    pipe = pipeline(model, ranks=1)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.3)
    with fxpipe.Checkpointer(pipe, directory, optimizer=optimizer, every=2) as checkpoints:
        checkpoints.resume()
        while pipe.step_number < steps:
            loss = pipe.step(batch_of(pipe.step_number))
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.step()
    return torch.cat([loss.reshape(1), *(x.flatten() for x in model.hidden)])


@pytest.mark.in_ci("InTraining")
@pytest.mark.slow
@pytest.mark.parametrize("model", [worker.Recurrent, worker.InTraining])
def test_evaluation(model):
    """It reads the state of training, and changes it where the forward does."""
    own, expected = build(model), build(model)
    pipe = pipeline(own, evaluation=True)
    for _ in range(2):
        train_beside_eager(pipe, own, expected, steps=1)
        expected.eval()
        with torch.no_grad():
            losses = [expected(x) for x in batch_of(7)[0].split(ROWS)]
        expected.train()
        found = pipe.evaluation.run_local(batch_of(7)).loss
        assert relative_error(found, torch.stack(losses).mean()) <= LIMIT
        assert too_far(state_of(own), state_of(expected), LIMIT) == {}


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(WIDTH, WIDTH), torch.zeros(ROWS, 1, WIDTH)

    def forward(self, x):
        y = self.linear(x) + self.memory.mean()
        self.memory = torch.cat([self.memory, x], 1)
        return y.square().mean()


class SetOnce(Grows):
    def forward(self, x):
        if not hasattr(self, "is_set"):
            self.memory, self.is_set = self.memory + x.mean(), True
        return (self.linear(x) + self.memory).square().mean()


class WritesWithHistory(Grows):
    def forward(self, x):
        y = self.linear(x)
        self.memory[:, 0] = y[:, 0]
        return (y + self.memory).square().mean()


class Trained(Grows):
    def __init__(self) -> None:
        super().__init__()
        self.memory.requires_grad_()

    def forward(self, x):
        y = self.linear(x) + self.memory
        self.memory = self.memory * 0.5
        return y.square().mean()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            worker.WithHistory,
            r"keeps 'hidden\.0' with .*kept_worker.py:\d+.*without \(\.detach\(\)\)",
        ),
        (WritesWithHistory, r"keeps 'memory' with .*test_attribute_state.py:\d+.*\.detach\(\)"),
        (Grows, r"in the model's memory, .*'memory' from shape \(2, 1, 4\), .* to shape \(2, 4, 4\)"),
        (SetOnce, r"run the model on one batch before .*runs other ops when it runs again"),
        (Trained, r"uses a trainable tensor .*test_attribute_state.py:\d+"),
    ],
)
def test_state_that_is_refused(model, said):
    built = build(model)
    before = attributes(built)
    with pytest.raises(fxpipe.CaptureError, match=said):
        pipeline(built)
    assert attributes(built) == before
    assert built.memory.requires_grad == (model is Trained) if isinstance(built, Grows) else True


class Records(worker.Recurrent):
    def forward(self, x):
        self.seen, self.first.out = x.detach(), (x, x.mean())
        return super().forward(x)


def test_records_are_no_state():
    model = build(Records)
    model(*batch_of(9, ROWS))
    seen = model.seen
    pipe = pipeline(model)
    assert {name for held in pipe.plan.tensors for name in held.buffers} == {"hidden.0", "hidden.1"}
    pipe.run_local(batch_of(0))
    assert model.seen is seen


@pytest.mark.slow
def test_a_model_of_another_rank_without_the_state():
    pipe, other = pipeline(build(worker.Recurrent)), build(worker.OnTheFirstBatch)
    with pytest.raises(fxpipe.CaptureError, match=r"has no hidden\.0.*on all ranks"):
        held_of(other, pipe.plan, None)


def test_names():
    """They are those of no other tensor."""
    model = nn.Module()
    model.register_buffer("a", torch.zeros(1))
    model.__dict__["a"] = torch.zeros(2)
    model.b = {"c": torch.zeros(3), 0: torch.zeros(4), "0": torch.zeros(5), ("x",): torch.zeros(6)}
    model.self = [model.b]
    found = worker.kept_slots(model)
    assert {name: len(slot.get()) for name, slot in found.items()} == {"a_": 2, "b.c": 3, "b.0": 4, "b.0_": 5}


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    run = forked(2, worker.main, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    expected = build(worker.Memories)
    for step in range(3):
        if step == 2:
            expected.memories = [torch.ones_like(memory) for memory in expected.memories]
        step_eager(expected, step)
    for rank in range(2):
        assert too_far(load_file(tmp_path / f"kept.{rank}.safetensors"), state_of(expected), LIMIT) == {}
