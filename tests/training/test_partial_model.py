"""Under torchrun: the model in the hands of a script, pipelines that share one, and averages of weights."""

import json
import types
import weakref
from pathlib import Path

import partial_model_worker as worker
import pytest
import torch
from launch import forked
from torch import nn
from torch.nn import functional

import fxpipe
from fxpipe.errors import OptionError, PartitionError, RunError
from fxpipe.plan.rows import ShardName
from fxpipe.runtime.torch_private import has_step_hooks
from fxpipe.training.model import partial_model
from fxpipe.training.model.accumulators import check_rows

pytestmark = [pytest.mark.slow, pytest.mark.waits]

LIMIT = 1e-12


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("partial_model")
    run = forked(2, worker.main, directory, dtype=torch.float64, logs=directory / "logs")
    assert run.code == 0, run
    return directory


def text(directory: Path, name: str) -> list:
    return [json.loads((directory / f"{name}.{rank}.json").read_text()) for rank in range(2)]


USES = ("forward", "state_dict", "torch.save", "deepcopy", "load_state_dict", "to", "vmap")


@pytest.mark.parametrize(
    "use", [f"use {name}" for name in USES] + ["use after a step", "use after an own step"]
)
def test_a_use_of_what_other_ranks_have_names_them_and_the_remedy(ranks, use):
    for number, message in enumerate(text(ranks, use)):
        assert f"is on rank {1 - number}, and rank {number} holds" in message
        assert "pipe.full_state_dict()" in message
        assert "pipe.synchronize()" in message


@pytest.mark.parametrize("use", ["a random buffer", "a sum into a buffer"])
def test_a_buffer_is_written_where_it_is_unless_values_are_asked_for(ranks, use):
    """What is set or scaled on all ranks is in the test of scripts ("synchronized")."""
    there, here = text(ranks, use)
    assert here == "no error"
    assert "is on rank 1, and rank 0 holds" in there


def test_a_use_under_another_name(ranks):
    for number, message in enumerate(text(ranks, "use renamed")):
        assert f".other is on other ranks, and rank {number} holds" in message


@pytest.mark.parametrize("when", ["before compile", "after synchronize"])
def test_a_state_dict_is_no_mixture_of_old_and_new_values(ranks, when):
    for message in text(ranks, f"state dict of {when}"):
        assert "would keep old values, as another rank trains it" in message
        assert "copy.deepcopy(model.state_dict())" in message
    for whole in ("state dict before a step", "copy of a state dict"):
        assert text(ranks, whole) == ["no error", "no error"]


def test_weights_of_a_whole_model_are_changed_on_all_ranks(ranks):
    told = "weights changed on one rank", "weights scaled on one rank", "weights drawn by own seeds"
    for message in (message for name in told for message in text(ranks, name)):
        assert "Rank 1 has changed other weights of the model than rank 0 since pipe.synchronize()" in message
    for on in ("no rank", "all ranks"):
        assert text(ranks, f"weights changed on {on}") == ["no error", "no error"]
    for alike in ("weights drawn alike", "a step of weights drawn alike"):
        assert text(ranks, alike) == ["no error", "no error"]


@pytest.mark.parametrize("use", ["use average by hand", "use average in the model"])
def test_an_average_by_hand_is_an_error_on_each_rank(ranks, use):
    for message in text(ranks, use):
        assert message.startswith("RunError")
        assert "pipe.average(…)" in message


def test_a_norm_by_hand_is_told_once_that_it_is_of_a_part(ranks):
    for number, (of_optimizers, *told) in enumerate(text(ranks, "norm by hand")):
        assert of_optimizers == 0
        assert len(told) == 1
        assert f"has no gradient on rank {number}, as it is on rank {1 - number}" in told[0]
        assert "opt.grad_norm() is the norm of all" in told[0]


def test_weights_that_are_scaled_by_a_norm_of_a_part(ranks):
    (told,), nothing = text(ranks, "scaled by hand")
    assert told.startswith("Rank 1 has multiplied its weights by ")
    assert " before step 1, and rank 0 multiplied its weights by " in told
    assert not nothing


@pytest.mark.parametrize("fact", ["counts parameters", "part", "zeros"])
def test_shapes_are_those_of_the_whole_model(ranks, fact):
    assert text(ranks, fact) == [True, True]


SCRIPTS = (
    "synchronized", "own optimizer", "changed on all ranks", "split changed", "rows changed",
    "updated changed", "two lengths", "two players", "judged first", "two heads", "plain averages",
    "split tables averages", "divided averages", "apart taught", "divided taught",
)  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_have_the_weights_of_plain_torch(ranks, name):
    for found in text(ranks, name):
        assert max(map(abs, found if isinstance(found, list) else [found])) <= LIMIT


def test_rows_that_other_replicas_have_updated_are_not_read(ranks):
    for message in text(ranks, "updated use"):
        assert message.startswith("RunError: Other replicas have newer values of rows of ")


def test_a_pipeline_that_is_cut_otherwise_names_both_places(ranks):
    for message in text(ranks, "cut otherwise"):
        assert "would be on process 0, and another pipeline" in message
        assert "has it on process 1" in message
        assert "like=pipe" in message


def test_like_places_tensors_and_counts_steps_as_the_other_pipeline(ranks):
    assert text(ranks, "like") == [True, True]
    assert text(ranks, "steps") == [[4, 4], [4, 4]]


def test_gradients_that_no_optimizer_has_are_told(ranks):
    for number, messages in enumerate(text(ranks, "unused gradients")):
        assert len(messages) == 1, number
        assert "Head makes gradients of model.second." in messages[0]
        assert "make one of this pipeline too" in messages[0]


def test_the_model_is_not_left_with_the_values_of_an_average(ranks):
    for message in text(ranks, "plain use"):
        assert "pipe.synchronize()" in message
    for message in text(ranks, "trained inside"):
        assert "as before the block again" in message


def test_an_average_is_resumed(ranks):
    for name in ("plain", "split tables", "divided"):
        assert text(ranks, f"{name} updates") == [2, 2]
    found = fxpipe.read_checkpoint(ranks / "split tables checkpoints")
    assert found.state == {"average": {"updates": 2}}
    assert found.averages["average"].keys() == found.optimizer.keys()


# -- in one process ---------------------------------------------------------------------------------------


def test_an_optimizer_of_the_models_parameters_does_not_leave_out_rows():
    parameters = {ShardName(name): torch.nn.Parameter(torch.ones(2)) for name in ("a", "b", "table[0:2]")}
    owned = types.SimpleNamespace(gradients=(*parameters,))
    state = types.SimpleNamespace(owned_by=lambda rank: owned, parameter=parameters.get)
    check_rows(state, 0)
    for parameter in parameters.values():
        parameter.grad = torch.ones(2)
    check_rows(state, 0)  # another step is added
    parameters["a"].grad = None
    check_rows(state, 0)  # one of several optimizers
    parameters["b"].grad = None
    with pytest.raises(RunError, match=r"table\[0:2\] was not zeroed, and that of a was.*pipe\.optimizer"):
        check_rows(state, 0)


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({}, "into maps names to names"),
        ({"teacher.*": "student"}, r"as many \*"),
        ({"master.*": "student.*"}, "No parameter of the model matches 'master"),
        ({"teacher.*": "pupil.*"}, "which is no parameter of the model"),
        ({"student.*": "teacher.*"}, "is trained, and is to follow"),
        ({"teacher.0.0.weight": "last.bias"}, "cannot follow"),
    ],
)
def test_names_that_cannot_follow_others(taught, into, message):
    with pytest.raises(OptionError, match=message):
        taught.average(0.9, into=into)


@pytest.fixture(scope="module")
def taught() -> fxpipe.Pipeline:
    return fxpipe.compile(worker.Taught(), (torch.randn(1, worker.WIDTH),), ranks=2, **worker.SHAPE)


@pytest.mark.parametrize("decay", [1.5, -0.1, True, "0.9", lambda updates: 2])
def test_a_decay_that_is_none(taught, decay):
    with pytest.raises(OptionError, match="from 0 to 1"):
        taught.average(decay)


def test_an_average_of_all_ranks_in_one_process(taught):
    average, into = taught.average(0.5), taught.average(0.5, into={"teacher.*": "student.*"})
    before = {name: value.clone() for name, value in taught.full_state_dict().items()}
    with torch.no_grad():
        for name, parameter in taught.parameters.items():
            if name.startswith("student"):
                parameter.add_(1)
    average.step()
    into.step()
    now = {name: value.clone() for name, value in taught.full_state_dict().items()}
    with average.applied():
        found = taught.full_state_dict()
    for name in filter(lambda name: name.startswith("student"), before):
        torch.testing.assert_close(found[name], before[name] + 0.5)
        other = name.replace("student", "teacher")
        torch.testing.assert_close(now[other], before[other] + 0.5 * (now[name] - before[other]))
    assert all(torch.equal(value, now[name]) for name, value in taught.full_state_dict().items())
    with pytest.raises(RunError, match="without applied"), into.applied():
        pass


class Backwards(worker.Taught):
    """Uses its parts in another order."""

    def __init__(self, other: worker.Taught) -> None:
        nn_module = torch.nn.Module
        nn_module.__init__(self)
        self.student, self.teacher, self.last = other.student, other.teacher, other.last

    def forward(self, x):
        return (self.student(self.last(x)) - self.teacher(x)).square().mean()


@pytest.mark.parametrize("kinds", [(worker.Makes, worker.Judges), (worker.Judges, worker.Makes)])
def test_a_judge_of_made_and_of_real_ones_is_cut_as_the_makers_step_or_before_it(kinds):
    """The judge, which is called twice in one of the steps, is on both ranks."""
    torch.manual_seed(0)
    maker, judge = (part.double() for part in worker.players())
    batch = tuple(torch.randn(worker.ROWS, worker.WIDTH, dtype=torch.float64) for _ in range(2))
    steps = [kind(maker, judge) for kind in kinds]
    options = {**worker.SHAPE, "check": True}
    cut = {"split_points": ["judge.1"]} if kinds[0] is worker.Makes else {}
    first = fxpipe.compile(steps[0], worker.rows_of(batch, 0, 1), ranks=2, **options, **cut)
    second = fxpipe.compile(steps[1], worker.rows_of(batch, 0, 1), like=first, **options)
    if kinds[0] is worker.Makes:
        assert len(second.stages) == 2
    for pipe, step in ((first, steps[0]), (second, steps[1])):
        step.zero_grad()
        step(*batch).backward()
        grads = pipe.run_local(batch).grads
        for name, parameter in step.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-12)


class JudgesRealFirst(worker.Judges):
    """It makes between two calls of the judge, and without gradients."""

    def forward(self, noise, real):
        of_real = functional.softplus(-self.judge(real)).mean()
        with torch.no_grad():
            made = self.maker(noise)
        return of_real + functional.softplus(self.judge(made)).mean()


def test_gradients_of_ops_behind_which_the_cut_moves_others_stay_with_them():
    """Ops without a gradient have autograd's number of the op before them, and are moved before it."""
    torch.manual_seed(0)
    maker, judge = (part.double() for part in worker.players())
    batch = tuple(torch.randn(worker.ROWS, worker.WIDTH, dtype=torch.float64) for _ in range(2))
    example, options = worker.rows_of(batch, 0, 1), {**worker.SHAPE, "check": True}
    makes, judges = worker.Makes(maker, judge), JudgesRealFirst(maker, judge)
    first = fxpipe.compile(makes, example, ranks=2, split_points=["judge"], **options)
    second = fxpipe.compile(judges, example, like=first, **options)
    judges(*batch).backward()
    grads = second.run_local(batch).grads
    for name, parameter in judge.named_parameters():
        torch.testing.assert_close(grads[f"judge.{name}"], parameter.grad, rtol=1e-12, atol=1e-12)


def test_a_step_that_cannot_be_cut_as_another_one_names_the_tensor():
    model = worker.Taught()
    x = torch.randn(1, worker.WIDTH)
    pipe = fxpipe.compile(model, (x,), ranks=2, split_points=["last"], **worker.SHAPE)
    with pytest.raises(PartitionError, match=r"is left for .*student\.0\.0\.weight.*like=this"):
        fxpipe.compile(Backwards(model), (x,), like=pipe, **worker.SHAPE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"like": "pipe"}, "must be a pipeline that fxpipe.compile has made"),
        ({"ranks": 4}, "ranks is 4, and 2 in the pipeline"),
        ({"grad_dtype": torch.float64}, "grad_dtype"),
    ],
)
def test_options_that_are_not_those_of_the_other_pipeline(taught, options, message):
    x = torch.randn(1, worker.WIDTH)
    with pytest.raises(OptionError, match=message):
        fxpipe.compile(taught.of(), (x,), **{"like": taught, **worker.SHAPE, **options})


def test_another_model_is_not_like_a_pipeline(taught):
    with pytest.raises(OptionError, match="has no tensor of the pipeline"):
        fxpipe.compile(worker.Taught(), (torch.randn(1, worker.WIDTH),), like=taught, **worker.SHAPE)


def test_an_update_by_a_scripts_own_optimizer_changes_all_whole_models():
    """Each stops to watch within the loop of torch over its hooks; one that is gone stays out of it."""

    class Whole:
        def __init__(self, tensors):
            self.registered = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
            self.times = 0
            partial_model.watch_updates(self)

        def of(self):
            return None

        def changed(self):
            self.times += 1
            partial_model.unwatch_updates(self)

    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    states = [Whole(dict(model.named_parameters())) for model in (first, second, first, first)]
    del states[2]
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    assert not has_step_hooks(optimizer)
    for _ in range(2):
        first.weight.grad = torch.ones(2, 2)
        optimizer.step()
    assert [state.times for state in states] == [1, 0, 1]
