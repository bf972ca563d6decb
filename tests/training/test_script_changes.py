"""What a script changes between a step and the update: one factor of a known cause, or an error."""

import copy
import gc
import io
import math
import warnings
import weakref
from functools import cache

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fxpipe
from fxpipe.errors import RunError
from fxpipe.runtime.torch_private import has_step_hooks
from fxpipe.training.optimizer import script_changes
from fxpipe.training.optimizer.batch_digest import Facts, difference, weights_of, words
from fxpipe.training.optimizer.optimizer import PipelineOptimizer
from fxpipe.training.optimizer.script_changes import Change, Kind, ScriptChanges, different_changes
from fxpipe.training.optimizer.step_loss import StepLoss
from fxpipe.training.optimizer.weight_writes import different_writes

RANKS, BATCH = 2, torch.randn(4, 8)
RESOLUTION = 1e-6


class Chain(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


@cache
def pipeline(ranks=RANKS, dtype=torch.float32):
    model = Chain(*[nn.Linear(8, 8) for _ in range(4)]).to(dtype)
    return fxpipe.compile(
        model, (BATCH[:2].to(dtype),), ranks=ranks, microbatches=2, schedule="1f1b", check=False
    )


class Rank:
    """One of two, with the gradients that a step has left it."""

    def __init__(self, number, dtype=torch.float32, allowed=False, steps=1):
        pipe = pipeline(dtype=dtype)
        self.changes = ScriptChanges(pipe.model_state, number, allowed)
        self.parameters = [pipe.parameter(name) for name in pipe.plan.tensors[number].gradients]
        generator = torch.Generator().manual_seed(number)
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        for step in range(steps):
            self.changes.compare(gradients_alone=True)
            self.changes.change(at_once=True)
            self.changes.stepped(adds=step > 0)

    @property
    def grads(self):
        return [p.grad for p in self.parameters]

    def clip(self, largest):
        nn.utils.clip_grad_norm_(self.parameters, largest)

    def mean(self, then):
        self.scale(0.5)
        getattr(self, then)(1e6)

    def noise(self):
        for grad in self.grads:
            grad.add_(0.1 * torch.randn_like(grad))

    def scale(self, factor):
        for grad in self.grads:
            grad.mul_(factor)

    def unscale(self):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.unscale_(torch.optim.SGD(self.parameters))

    def scale_data(self, factor):
        for grad in self.grads:
            grad.data.mul_(factor)

    def replace(self, factor):
        for parameter in self.parameters:
            parameter.grad = parameter.grad * factor

    def scale_one(self, factor):
        self.grads[0].mul_(factor)

    def mask(self):
        self.grads[0][0] = 0.0

    def largest(self, part):
        """All but those below a quantile of all."""
        least = torch.cat([grad.flatten() for grad in self.grads]).abs().quantile(part)
        for grad in self.grads:
            grad.mul_(grad.abs() > least)

    def bound(self, value):
        nn.utils.clip_grad_value_(self.parameters, value)

    def ascend(self):
        norm = torch.stack([grad.norm() for grad in self.grads]).norm()
        for parameter in self.parameters:
            parameter.data.add_(parameter.grad / norm, alpha=0.05)

    def leave(self):
        pass


def changed(*done, dtype=torch.float32, allowed=False, knows_norm=False, steps=1):
    """What the ranks have changed.  done: by each rank, a method and its arguments.  steps: that add up."""
    found = []
    for number, (name, *arguments) in enumerate(done):
        rank = Rank(number, dtype, allowed, steps)
        before = [p.detach().clone() for p in rank.parameters]
        if knows_norm:
            rank.changes.norm_asked()
        getattr(rank, name)(*arguments)
        rank.changes.compare()
        for parameter, value in zip(rank.parameters, before, strict=True):
            parameter.data.copy_(value)
        found.append(rank.changes.change(at_once=False))
        assert rank.changes.change(at_once=True) == Change(), "each change is told once"
    return found


def message(changes, resolution=RESOLUTION):
    return different_changes(changes, resolution, "step 7")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["scale", "scale_data", "replace"])
def test_one_factor_on_all_ranks_is_right(way, dtype):
    found = changed((way, 0.3), (way, 0.3), dtype=dtype, knows_norm=True)
    resolution = 4 * torch.finfo(dtype).eps
    assert [kind for kind, _ in found] == [Kind.FACTOR] * 2
    assert all(factor == pytest.approx(0.3, rel=resolution) for _, factor in found)
    assert message(found, resolution) is None
    other = changed((way, 0.3), (way, 0.35), dtype=dtype)
    assert "Rank 1 has multiplied its gradients by 0.3" in message(other, resolution)


@pytest.mark.parametrize("by_hand", [("scale", 1 / RANKS), ("scale_data", 1 / RANKS), ("unscale",)])
def test_a_factor_that_no_step_and_no_norm_explains(by_hand):
    """An average over processes of the gradient that one of them has, and a scaler."""
    text = message(changed(by_hand, by_hand))
    assert text.startswith("Rank 0 has multiplied its gradients by ")
    assert "leave out their average over processes" in text
    assert "a GradScaler" in text
    assert message(changed(by_hand, by_hand, allowed=True)) is None


def test_means_over_steps_that_add_up():
    half = changed(("scale", 0.5), ("scale", 0.5), steps=2)
    assert half == [(Kind.FACTOR, pytest.approx(0.5))] * 2
    assert message(half) is None
    assert "Rank 1 has multiplied" in message(changed(("leave",), ("scale", 0.5), steps=2))
    rank = Rank(0, steps=2)
    rank.changes.compare()
    rank.changes.change(at_once=True)
    rank.changes.stepped(adds=True)  # to gradients that zero_grad(set_to_none=False) of the model has filled
    rank.scale(0.5)
    rank.changes.compare()
    assert rank.changes.change(at_once=False) == (Kind.OTHER_FACTOR, pytest.approx(0.5))


def test_a_last_group_of_fewer_steps_is_divided_as_those_before():
    """As ``loss / 2`` divides it in plain torch."""
    rank, found = Rank(0, steps=0), []
    for steps in (1, 2, 1):
        for step in range(steps):
            rank.changes.compare(gradients_alone=True)
            rank.changes.change(at_once=True)
            rank.changes.stepped(adds=step > 0)
        rank.scale(0.5)
        rank.changes.compare()
        found.append(rank.changes.change(at_once=True).kind)
    assert found == [Kind.OTHER_FACTOR, Kind.FACTOR, Kind.FACTOR]


def test_a_last_group_of_one_step_is_divided_by_one():
    """Where the groups before were divided by the number of their steps; a norm would be a second write."""
    rank, found = Rank(0, steps=0), []
    for steps, ways in ((1, 1), (2, 1), (1, 1), (1, 2)):
        for step in range(steps):
            rank.changes.compare(gradients_alone=True)
            rank.changes.change(at_once=True)
            rank.changes.stepped(adds=step > 0)
        for _ in range(ways):
            rank.scale(1 / steps)
        rank.changes.compare()
        found.append(rank.changes.change(at_once=True).kind)
    assert found == [Kind.WRITTEN, Kind.FACTOR, Kind.NOTHING, Kind.WRITTEN]


@pytest.mark.parametrize(("processes", "collectives", "tells"), [(2, 1, True), (2, 0, False), (3, 1, False)])
def test_a_mean_over_steps_that_may_be_one_over_processes(monkeypatch, processes, collectives, tells):
    """As many processes as steps, and the script has communicated since the last one."""
    monkeypatch.setattr(script_changes.dist, "get_world_size", lambda: processes)
    rank = Rank(0, steps=2)
    monkeypatch.setattr(script_changes, "collectives_begun", lambda: collectives)
    rank.scale(0.5)
    rank.changes.compare()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert rank.changes.change(at_once=False) == (Kind.FACTOR, pytest.approx(0.5))
    assert any("their average over processes" in str(x.message) for x in given) is tells


def told_of_updates(*updates, way="leave", arguments=(), allowed=False):
    """What is told of updates, each with the gradients of so many steps; the losses by whose number they are
    divided, if any."""
    rank, told = Rank(0, allowed=allowed, steps=0), []
    for steps, divided in updates:
        for step in range(steps):
            rank.changes.compare(gradients_alone=True)
            rank.changes.change(at_once=True)
            rank.changes.stepped(adds=step > 0)
            if divided:
                loss = torch.tensor(3.0).as_subclass(StepLoss)
                loss.divisors = rank.changes.divisors
                assert float(divided(loss)) == 3.0 / steps
        getattr(rank, way)(*arguments)
        rank.changes.compare()
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            rank.changes.change(at_once=True)
        told.append([str(x.message) for x in given])
    return told


def test_gradients_of_a_batch_that_was_left_out():
    """Its loss was too large, say, and plain torch takes no backward of it."""
    first, second, third = told_of_updates((1, None), (2, None), (3, None))
    assert (first, third) == ([], [])
    assert "has the gradients of 2 steps, where earlier ones had those of 1 at most" in str(second)
    for regular in ([(4, None), (4, None), (2, None), (4, None)], [(2, None), (1, None), (1, None)]):
        assert told_of_updates(*regular) == [[] for _ in regular]
    assert told_of_updates((1, None), (2, None), allowed=True) == [[], []]


def told_of_calls(calls, allowed=False):
    """The warnings that all these calls of a script bring: steps, updates, and gradients to 0 or to None."""
    rank = Rank(0, allowed=allowed, steps=0)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for call in calls.split():
            if call == "step":
                rank.changes.compare(gradients_alone=True)
                rank.changes.change(at_once=True)
                for parameter in rank.parameters:
                    parameter.grad = torch.ones_like(parameter)
                rank.changes.stepped()
            elif call == "update":
                rank.changes.compare()
            elif call == "norm":
                rank.changes.norm_asked()
            else:
                for parameter in rank.parameters:
                    parameter.grad = None if call == "none" else torch.zeros_like(parameter)
        rank.changes.change(at_once=True)
    return [str(x.message) for x in given]


@pytest.mark.parametrize("zero", ["none", "zero"])
def test_zero_grad_between_a_step_and_the_update(zero):
    for lost in (f"step {zero} update ", f"step {zero} step update "):
        (text,) = told_of_calls(lost * 3)
        assert text.startswith(
            "Before each update so far gradients of pipe.step were set to zero, or to None"
        )
        assert told_of_calls(lost * 3, allowed=True) == [], "as for SAM"
        assert told_of_calls(f"step norm {zero} step update {zero} " * 3) == [], "a step for its norm"
        assert len(told_of_calls(f"step {zero} norm update " * 3)) == 1
        assert told_of_calls(f"{lost} step update {zero} {lost} {lost}") == [], "a batch that is left out"
    assert told_of_calls(f"step update {zero} " * 3) == told_of_calls(f"{zero} step update " * 3) == []


@pytest.mark.parametrize("divided", [lambda x: x / 4, lambda x: x * 0.25, lambda x: x.clone().div_(4)])
def test_a_loss_that_is_divided_where_its_gradients_are_not(divided):
    first, second = told_of_updates((4, divided), (4, divided))
    assert "divides the losses of 4 steps by their number, and not the gradients" in str(first)
    assert second == []
    assert told_of_updates((4, divided), (4, divided), way="scale", arguments=[0.25]) == [[], []]


def test_a_norm_of_gradients_that_were_changed_before():
    rank = Rank(0)
    rank.scale_data(0.5)
    rank.changes.norm_asked()
    rank.changes.compare()
    assert rank.changes.change(at_once=False) == (Kind.OTHER_FACTOR, pytest.approx(0.5))


def test_the_norm_of_gradients_that_another_pipeline_has_left():
    rank = Rank(0)
    other = ScriptChanges(rank.changes.state, 0)
    other.stepped()
    rank.changes.norm_asked()
    rank.scale(0.5)
    other.compare()
    assert other.change(at_once=False) == (Kind.FACTOR, pytest.approx(0.5))


def test_a_pipeline_may_end_while_hooks_of_an_update_run():
    """As the garbage collector ends one at any time."""
    ranks = [Rank(0)]
    known = weakref.ref(ranks[0].changes)

    def ends(*_):
        ranks.clear()
        gc.collect()

    # Another one behind it, to which torch goes on.
    handles = [register_optimizer_step_pre_hook(hook) for hook in (ends, lambda *_: None)]
    try:
        torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    finally:
        for handle in handles:
            handle.remove()
    assert known() is None


def test_what_changes_nothing():
    found = changed(("leave",), ("leave",))
    assert found == [Change(Kind.NOTHING)] * 2
    assert message(found) is None
    assert message([Change(), *found]) is None, "a rank without gradients"
    assert "Rank 1 has multiplied its gradients by 0.5" in message(changed(("leave",), ("scale", 0.5)))


def test_each_rank_clips_by_its_own_norm():
    text = message(changed(("clip", 1.0), ("clip", 1.0)))
    factors = [1.0 / float(nn.utils.get_total_norm(Rank(number).grads)) for number in range(RANKS)]
    assert f"Rank 1 has multiplied its gradients by {factors[1]:.4f}" in text
    assert f"before step 7, and rank 0 by {factors[0]:.4f}" in text
    assert "clip_grad_norm=" in text
    assert "changes_gradients=True" in text


def test_norms_below_the_limit_on_each_rank_alone():
    """Together they may be above it, and no value shows that; a script that has the norm of all may do so."""
    found = changed(("clip", 1e6), ("clip", 1e6))
    assert found == [Change(Kind.WRITTEN)] * 2
    assert "Rank 0 has written to gradients between pipe.step and the update before step 7" in message(found)
    assert message(changed(("clip", 1e6), ("clip", 1e6), knows_norm=True)) is None
    divided = changed(("mean", "clip"), ("mean", "clip"), steps=2)
    assert divided == [Change(Kind.WRITTEN)] * 2, "behind a mean over steps too"
    clipped = changed(("clip", 1.0), ("clip", 1.0), knows_norm=True)
    assert "Rank 1 has multiplied" in message(clipped)


@pytest.mark.parametrize("way", [("noise",), ("scale_one", 0.5), ("mask",)])
def test_other_changes_are_to_be_declared(way):
    found = changed(("leave",), way)
    assert found[1].kind in (Kind.GRADIENTS, Kind.WRITTEN)
    assert message(found).startswith("Rank 1 has ")
    assert message(changed(("leave",), way, allowed=True)) is None


def test_gradients_of_which_no_element_is_compared(monkeypatch):
    """Of each tensor it is known whether it was written to."""
    monkeypatch.setattr(script_changes, "TENSORS", 1)
    kinds = set()
    for k in range(len(Rank(0).grads)):
        rank = Rank(0)
        rank.grads[k].mul_(0.5)
        rank.changes.compare()
        kinds.add(rank.changes.change(at_once=False).kind)
    assert kinds == {Kind.GRADIENTS, Kind.WRITTEN}


def test_parameters_that_are_moved_and_moved_back():
    """SAM's gradients are those of other values than are updated."""
    found = changed(("leave",), ("ascend",))
    assert "Rank 1 has changed parameters between pipe.step and the update before step 7, as SAM" in message(
        found
    )


def test_gradients_to_which_a_step_adds():
    """Between two steps parameters may change: a script may update by itself."""
    rank = Rank(0)
    rank.ascend()
    rank.changes.compare(gradients_alone=True)
    assert rank.changes.change(at_once=False) == Change(Kind.NOTHING)
    rank.changes.stepped()
    rank.scale(0.0)
    rank.changes.compare(gradients_alone=True)
    assert rank.changes.change(at_once=False) == Change(Kind.FACTOR, 0.0)


def test_an_optimizer_of_the_users_own():
    rank = Rank(0)
    first, second = torch.optim.SGD(rank.parameters[:1], lr=0.0), torch.optim.SGD(rank.parameters[1:], lr=0.0)
    rank.scale(0.5)
    first.step()
    rank.scale(3.0)  # of what the first has used, too: that is no change before an update
    second.step()
    assert rank.changes.change(at_once=False) == Change(Kind.GRADIENTS)
    rank.changes.stepped()
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    rank.scale(0.5)
    for optimizer in (first, second):
        optimizer.step()
    assert rank.changes.change(at_once=False) == (Kind.OTHER_FACTOR, pytest.approx(0.5))


class ClipsAll(torch.optim.SGD):
    """Clips by the norm of all that it updates."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class NeedsMore(ClipsAll):
    """Cannot be made again by its options."""

    def __init__(self, params, base, **options):
        super().__init__(params, **options)
        self.base = base


class ClipsByItsAttribute(torch.optim.SGD):
    """Made by its options alone, it clips no gradients of a trial."""

    def __init__(self, params, lr, largest=1e20):
        super().__init__(params, lr=lr)
        self.largest = largest

    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.largest)
        return super().step(closure)


def test_an_optimizer_of_the_users_own_that_needs_what_other_ranks_have():
    rank = Rank(0)
    before = [p.detach().clone() for p in rank.parameters]
    with pytest.raises(RunError, match="ClipsAll updates a parameter by the values of others, which other r"):
        ClipsAll(rank.parameters, lr=0.1).step()
    assert all(map(torch.equal, before, rank.parameters))
    ClipsAll(rank.parameters[:2], lr=0.0).step()  # what it updates may be here alone
    rank = Rank(0)
    NeedsMore(rank.parameters, base=(x for x in ()), lr=0.0).step()  # which cannot be copied
    assert rank.changes.change(at_once=False) == Change(Kind.NOTHING)


def test_an_optimizer_of_the_users_own_that_needs_a_closure():
    rank = Rank(0)
    before = [p.detach().clone() for p in rank.parameters]
    with pytest.raises(
        RunError, match="LBFGS updates a parameter by the values of others, which other ranks"
    ):
        torch.optim.LBFGS(rank.parameters, lr=0.1).step(lambda: 1.0)
    assert all(map(torch.equal, before, rank.parameters))


def test_an_optimizer_of_the_users_own_is_tried_with_its_attributes():
    rank, log = Rank(0), []
    scheduled = NeedsMore(rank.parameters, base=log, lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(scheduled)  # puts another step into its attributes
    before = [p.detach().clone() for p in rank.parameters]
    for optimizer in (scheduled, ClipsByItsAttribute(rank.parameters, lr=0.1, largest=0.1)):
        rank.changes.stepped()
        with pytest.raises(RunError, match="updates a parameter by the values of others, which other r"):
            optimizer.step()
        assert all(map(torch.equal, before, rank.parameters))
    assert not log


def test_an_optimizer_compares_once_before_each_update(monkeypatch):
    rank, compared = Rank(0), []
    monkeypatch.setattr(ScriptChanges, "compare", lambda _, optimizer: compared.append(optimizer))
    optimizer = torch.optim.SGD(rank.parameters, lr=0.0)
    for _ in range(3):
        optimizer.step()
    assert compared == [optimizer] * 3


@pytest.mark.parametrize("own", [True, False])
def test_a_hook_of_an_optimizer_changes_gradients(own):
    rank = Rank(0)
    optimizer = torch.optim.SGD(rank.parameters, lr=0.0)
    if not own:
        names = {parameter: str(k) for k, parameter in enumerate(rank.parameters)}
        optimizer = PipelineOptimizer(optimizer, names, [], None, script_changes=rank.changes)
    optimizer.register_step_pre_hook(lambda *_: rank.clip(1e-2))
    optimizer.step()
    change = rank.changes.change(at_once=False)
    assert change.kind is Kind.OTHER_FACTOR
    assert change.factor < 1e-2
    optimizer.step()
    assert rank.changes.change(at_once=False) == Change()
    assert not has_step_hooks(torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def test_values_that_are_not_finite():
    rank = Rank(0)
    for value in (math.nan, math.inf):
        rank.grads[0].fill_(value)
        rank.changes.stepped()
        rank.scale(0.5)
        rank.changes.compare()
        change = rank.changes.change(at_once=False)
        assert (change.kind, round(change.factor, 9)) == (Kind.OTHER_FACTOR, 0.5)


def test_a_process_that_has_all_gradients_compares_nothing():
    pipe = pipeline(1)
    changes = ScriptChanges(pipe.model_state, 0)
    for parameter in pipe.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    changes.stepped()
    next(iter(pipe.parameters.values())).grad.zero_()
    changes.compare()
    assert changes.change(at_once=True) == Change()


def test_factors_that_a_script_has_declared_are_compared():
    """Of several tensors: they may be by a norm of all of a rank."""

    def told(*done):
        each = []
        for number, (way, *arguments) in enumerate(done):
            rank = Rank(number, allowed=True)
            getattr(rank, way)(*arguments)
            rank.changes.compare()
            assert rank.changes.change(at_once=True) == Change()
            each.append(rank.changes.declared)
        rows = torch.stack([words(Facts(1, weights=written), [], {}) for written in each])
        assert weights_of(rows) == each
        return different_writes(each, "step 3") or ""

    assert told(("clip", 1e-2), ("clip", 1e-2)).startswith("Rank 1 has multiplied its gradients by 0.00")
    assert told(("largest", 0.9), ("largest", 0.5)).startswith("Rank 1 has zeroed its gradients up to ")
    assert told(("bound", 0.9), ("bound", 0.5)).startswith("Rank 1 has bounded its gradients by ")
    for way in (("scale", 0.5), ("bound", 1.0), ("noise",), ("mask",), ("leave",), ("scale_one", 0.5)):
        assert not told(way, way)
        assert ("multiplied" in told(way, ("leave",))) == (way[0] == "scale")


def test_a_loop_that_divides_gradients_reads_those_of_other_ranks(recwarn):
    """And one that takes their norm, which is told when the gradients are compared."""
    read = "b has no gradient on rank 0", "train.py", 7
    for steps, factor, told in ((2, 0.5, 0), (2, 1.0, 1), (1, 1.0, 1)):
        rank = Rank(0, steps=steps)
        rank.changes.state.reads.append(read)
        rank.scale(factor)
        rank.changes.compare()
        rank.changes.change(at_once=True)
        assert [str(w.message) for w in recwarn.list if w.lineno == 7] == [read[0]] * told
        assert not rank.changes.state.reads
        recwarn.clear()
    rank.changes.state.reads.append(read)  # the gradients are gone
    rank.changes.change(at_once=True)
    assert [str(w.message) for w in recwarn.list] == [read[0]]


def test_changes_travel_with_a_step():
    table = torch.stack([words(Facts(1, changed=Change(Kind.FACTOR, x)), [], {}) for x in (0.137, 0.272)])
    text = difference(table, [], "step 3", resolution=RESOLUTION)
    assert text.startswith("Rank 1 has multiplied its gradients by 0.272 between pipe.step")
    assert "rank 0 by 0.137" in text
    assert difference(table[[0, 0]], []) is None


# -- the loss of a step ------------------------------------------------------------------------------------


def test_the_backward_has_run():
    pipe = pipeline(1)
    loss = pipe.step((BATCH,))
    scaler = torch.amp.GradScaler("cpu")
    for wrong in (loss, loss / 4, scaler.scale(loss), loss.clone()):
        with pytest.raises(RunError, match=r"The backward has run, in pipe\.step, .* go on with opt\.step"):
            wrong.backward()
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.0)
    with pytest.raises(RunError, match=r"A GradScaler has nothing to scale.*skip_nonfinite=True"):
        scaler.step(optimizer)
    assert f"{loss:.3f}" == f"{loss.item():.3f}" == f"{float(loss):.3f}"
    assert type(torch.stack([loss, loss])) is torch.Tensor
    file = io.BytesIO()
    torch.save([loss, copy.deepcopy(loss)], file)
    file.seek(0)
    assert [type(x) for x in torch.load(file)] == [torch.Tensor] * 2, "without a class of fxpipe"
    other = torch.ones((), requires_grad=True)
    (loss + 3 * other + loss.detach() * other).backward()
    assert other.grad == 3.0 + loss
    for wrong in (0.5 * loss + other, other - loss, torch.add(other, loss, alpha=2), (loss + other) / 2):
        with pytest.raises(RunError, match=r"no summand with the factor 1: its gradients, which pipe\.step"):
            wrong.backward()
