"""What a rank tells the others of its training, and changes of a model that its program does not see."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from zoo import Case, Shape, TiedHead, built_and_compiled, tokens

import fxpipe
from fxpipe.runtime.job.digest import MOST
from fxpipe.training.optimizer.batch_digest import ABSENT
from fxpipe.training.optimizer.optimizer import Counts
from fxpipe.training.run.rank_digests import RankDigests, _rows

MICROBATCHES = 2
CASE = Case(TiedHead, tokens)


@pytest.fixture
def one_rank():
    """A pipeline of one rank, and its course as a rank under torchrun has it."""
    _, pipe = built_and_compiled(CASE, MICROBATCHES, Shape(1))
    return pipe, RankDigests(pipe.model_state, 0, True)


def counts(course):
    facts = course.facts(1, False, "", ABSENT)
    assert course.optimizer is None or facts.calls == course.optimizer.counts.order
    return facts.updates, facts.added


def test_updates_and_gradients_that_add_up(one_rank):
    pipe, course = one_rank
    assert counts(course) == (ABSENT, 1)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    course.optimizer = optimizer
    found = []
    for zeroes in (True, False, True):
        found.append(counts(course))
        pipe.step(CASE.data(MICROBATCHES))
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()
    assert found == [(1, 1), (2, 1), (3, 2)]
    optimizer.zero_grad(set_to_none=True)
    assert counts(course) == (4, 1)
    before = optimizer.counts.order
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert optimizer.counts.order != before
    del optimizer
    assert counts(course) == (4, 1)


def test_gradients_that_the_optimizer_before_has_zeroed(one_rank):
    """On a rank that holds none of them there is nothing to add to, whoever zeroed it."""
    pipe, course = one_rank
    found = []
    for zeroes in (True, False, False):
        course.optimizer = optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        found.append(counts(course))
        pipe.step(CASE.data(MICROBATCHES))
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()
    assert found == [(1, 1), (1, 1), (1, 2)]


def test_calls_in_another_order():
    """Zeroes the gradients before they are used, or loads a state; more zeroes do not matter."""

    def order(*names):
        counts = Counts()
        for name in names:
            counts.called(name)
        return counts.order

    first = order("zero_grad", "step", "zero_grad", "step", "zero_grad")
    assert first == order("step", "zero_grad", "zero_grad", "step", "zero_grad") != 0
    assert first != order("zero_grad", "step", "zero_grad", "step")
    assert first != order("step", "zero_grad", "load_state_dict", "step", "zero_grad")


def test_options_of_now(one_rank):
    pipe, course = one_rank
    optimizer = pipe.optimizer(
        torch.optim.AdamW, lr=torch.tensor(0.5), groups=[{"params": "*.bias", "lr": 0.1}]
    )
    course.optimizer = optimizer
    first = course.facts(1, False, "", ABSENT).options
    assert course.facts(1, False, "", ABSENT).options == first
    assert optimizer.options() | {"groups[0].lr": "0.1", "class": "AdamW"} == optimizer.options()
    optimizer.param_groups[1]["lr"].fill_(0.25)
    second = course.facts(1, False, "", ABSENT).options
    torch.optim.lr_scheduler.StepLR(optimizer, 5)
    assert len({first, second, course.facts(1, False, "", ABSENT).options}) == 3


def test_digests_are_those_of_tensors_that_several_ranks_hold():
    """A step later than they are made, and none of those that the rank does not hold."""
    model, pipe = built_and_compiled(CASE, MICROBATCHES, Shape(3))
    ranks = [RankDigests(pipe.model_state, rank, True) for rank in range(3)]
    tied = {name for name, held in pipe.plan.layouts.items() if name in dict(model.named_parameters())}

    def facts(rank):
        found = rank.facts(1, False, "", ABSENT)
        rank.begin_digests()
        return found

    found = [[facts(rank) for rank in ranks] for _ in range(2)]
    assert all(facts.digests == () for facts in found[0])
    first, middle, last = found[1]
    assert set(first.names) <= tied
    assert first.names == middle.names == last.names != ()
    assert first.digests == last.digests != middle.digests == (ABSENT,) * len(first.names)
    with torch.no_grad():
        pipe.parameter(first.names[0]).mul_(1.5)
    facts(ranks[0])
    assert facts(ranks[0]).digests != first.digests
    assert RankDigests(pipe.model_state, 0, False)._shared == []


def test_all_rows_of_a_large_table_have_their_turn():
    table = torch.arange(3 * MOST - 5)
    turns = [_rows(table, turn) for turn in range(3)]
    assert max(map(len, turns)) <= MOST
    assert torch.equal(torch.cat(turns).sort()[0], table)
    assert torch.equal(_rows(table, 3), turns[0])
    assert all(_rows(x, 1) is x for x in (torch.ones(()), torch.ones(0, 3), torch.ones(MOST)))
    assert _rows(table, None) is table


# -- what changes after compile ---------------------------------------------------------------------------

CHANGES = {
    "frozen": (
        lambda m: m.requires_grad_(False),
        r"requires_grad of the parameter .* is now False, .* trains",
    ),
    "gradient": (
        lambda m: next(m.parameters()).register_hook(lambda g: g * 2),
        "The hooks of the parameter ",
    ),
    "accumulation": (
        lambda m: next(m.parameters()).register_post_accumulate_grad_hook(lambda p: None),
        "The hooks of the parameter ",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changes_after_compile(name):
    change, message = CHANGES[name]
    model, pipe = built_and_compiled(CASE, MICROBATCHES, Shape(2))
    pipe.run_local(CASE.data(MICROBATCHES))
    change(model)
    for _ in range(2):
        with pytest.raises(fxpipe.RunError, match=message):
            pipe.run_local(CASE.data(MICROBATCHES))


HOOKS = {
    "forward": (lambda m: m.head.register_forward_hook(lambda *_: None), "The hooks of the module head"),
    "before": (lambda m: m.register_forward_pre_hook(lambda *_: None), "The hooks of the model have"),
    "backward": (lambda m: m.head.register_full_backward_hook(lambda *_: None), "the module head have"),
    "all": (lambda m: register_module_forward_hook(lambda *_: None), r"all modules \(forward hook\) have"),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_modules_that_change_after_compile(name, recwarn):
    """A warning, once, as an eager forward registers some where models capture their outputs."""
    change, message = HOOKS[name]
    model, pipe = built_and_compiled(CASE, MICROBATCHES, Shape(2))
    pipe.run_local(CASE.data(MICROBATCHES))
    handle = change(model)
    with pytest.warns(UserWarning, match=message):
        pipe.run_local(CASE.data(MICROBATCHES))
    recwarn.clear()
    pipe.run_local(CASE.data(MICROBATCHES))
    handle.remove()
    assert not recwarn.list


class Recorder(nn.Module):
    """Registers a hook in its first forward, as transformers does to collect the outputs of layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.installed, self.collected = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            False,
            None,
        )

    def forward(self, x):
        if not self.installed:
            self.first.register_forward_hook(self.collect)
            self.installed = True
        hidden = self.second(self.first(x))
        return hidden.square().mean() + self.collected.abs().mean()

    def collect(self, module, args, output):
        self.collected = output


@pytest.mark.parametrize("ran_before", [False, True])
def test_a_hook_that_the_forward_registers_itself_is_no_change(ran_before, recwarn):
    """The trace has run it; another one is one all the same."""
    model, batch = Recorder(), {"x": torch.randn(4, 4)}
    if ran_before:
        model(**batch)
        model.collected = None
    pipe = fxpipe.compile(model, {"x": batch["x"][:2]}, ranks=1, microbatches=2, schedule="1f1b", check=False)
    recwarn.clear()
    before = pipe.step(batch)
    expected = torch.stack([model(half) for half in batch["x"].split(2)]).mean()
    model.collected = None
    assert torch.allclose(pipe.step(batch), before)
    assert torch.allclose(before, expected)
    assert not recwarn.list
    model.first.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="The hooks of the module first have changed"):
        pipe.step(batch)


def test_a_hook_that_is_removed_after_compile():
    model = CASE.build()
    handle = model.head.register_forward_hook(lambda module, args, output: output * 2)
    pipe = fxpipe.compile(model, CASE.example(), ranks=1, microbatches=MICROBATCHES, schedule="1f1b")
    before = pipe.step(CASE.data(MICROBATCHES))
    handle.remove()
    with pytest.warns(UserWarning, match="The hooks of the module head have changed"):
        pipe.step(CASE.data(MICROBATCHES))
    assert before.isfinite()


def test_a_parameter_that_is_trained_only_later():
    model = CASE.build()
    frozen = next(p for name, p in model.named_parameters() if name.endswith("weight")).requires_grad_(False)
    pipe = fxpipe.compile(model, CASE.example(), ranks=1, microbatches=MICROBATCHES, schedule="1f1b")
    pipe.step(CASE.data(MICROBATCHES))
    frozen.requires_grad_(True)
    with pytest.raises(fxpipe.RunError, match=r"is now True, .* does not train it\. Compile the model again"):
        pipe.step(CASE.data(MICROBATCHES))


def test_what_evaluation_does_not_mind():
    model = CASE.build()
    pipe = fxpipe.compile(
        model, CASE.example(), ranks=1, microbatches=MICROBATCHES, schedule="1f1b", evaluation=True
    )
    expected = pipe.evaluate(CASE.data(MICROBATCHES))
    model.requires_grad_(False)
    nn.Linear(2, 2).register_forward_hook(lambda *_: None)  # of another model
    assert torch.equal(pipe.evaluate(CASE.data(MICROBATCHES)), expected)
    model.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="The hooks of the model have changed"):
        pipe.evaluate(CASE.data(MICROBATCHES))


def test_an_error_of_an_evaluation_is_not_one_of_a_step():
    pipe = fxpipe.compile(
        CASE.build(), CASE.example(), ranks=1, microbatches=MICROBATCHES, schedule="1f1b", evaluation=True
    )
    batch = CASE.data(MICROBATCHES)
    pipe.step(batch)
    pipe.evaluate(batch)
    wrong = batch | {"ids": batch["ids"] + 1000}
    with pytest.raises(fxpipe.RunError, match=r"Rank 0 failed in F0\.0 of evaluation 1, in .*: IndexError"):
        pipe.evaluate(wrong)
    with pytest.raises(fxpipe.RunError, match=r"Rank 0 failed in F0\.0 of step 1, in .*: IndexError"):
        pipe.step(wrong)
