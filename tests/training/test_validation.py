"""``validation="post"``: updates ahead of the other ranks' verdict, with the bits of "barrier"."""

import re

import pytest
import torch
import validation_worker as worker
from launch import forked
from marks import with_variations
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxpipe.errors import RunError
from fxpipe.training.model.pending_update import PendingUpdate
from fxpipe.training.model.rollback import Rollback
from fxpipe.training.model.speculative_update import SpeculativeUpdate
from fxpipe.training.optimizer.clipping import Clipping
from fxpipe.training.optimizer.groups import Group
from fxpipe.training.optimizer.optimizer import PipelineOptimizer
from fxpipe.training.optimizer.optimizer_trial import Table, check_groups
from fxpipe.training.optimizer.speculation_policy import BLOCK, BLOCKS, FIRST, PERIOD, SpeculationPolicy

CPU = torch.device("cpu")


def taken_back(run):
    assert run.code == 0, run
    assert not any("differs" in out for out in run.stdout), run
    return [int(n) for n in re.findall(r"taken back: (\d+)", "".join(run.stdout))]


@pytest.mark.slow
def test_faults_are_caught(tmp_path):
    """In settings in which nothing differs without them."""
    given = worker.PIPELINES["zb-h1"]
    run = forked(
        4,
        worker.check,
        [9, 10, 1053, 6],
        *given,
        [*worker.FAULTS],
        dtype=torch.float32,
        logs=tmp_path / "logs",
    )
    assert min(taken_back(run)) > 0
    assert re.findall(r"caught: (\w+)", run.stdout[0]) == [*worker.FAULTS], run


#: The first one is above; another one of these is tied, and another one has replicas.
VARIATIONS = ("zb-v, tied", "2 replicas, ZeRO 1")


@pytest.mark.in_ci("2 replicas, ZeRO 3, tied")
@pytest.mark.slow
@pytest.mark.parametrize("name", with_variations([*worker.PIPELINES][1:], VARIATIONS))
def test_the_values_are_those_of_a_barrier(name, tmp_path):
    run = forked(
        4, worker.check, range(100, 102), *worker.PIPELINES[name], dtype=torch.float32, logs=tmp_path / "logs"
    )
    assert sum(taken_back(run)) > 0


def parameter_with_gradient(value=1.0):
    parameter = Parameter(torch.full((3,), 2.0))
    parameter.grad = torch.full((3,), value)
    return parameter


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad, worker.Drifting])
def test_an_update_is_taken_back(cls):
    parameter = parameter_with_gradient()
    optimizer = cls([parameter], lr=0.25)
    optimizer.step()
    before = parameter.detach().clone()
    undo = Rollback.of(optimizer)
    state = {key: repr(value) for key, value in optimizer.state[parameter].items()}
    kept = {key: x for key, x in optimizer.state[parameter].items() if isinstance(x, torch.Tensor)}
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    with undo.options_of_then(optimizer):
        assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["lr"] == 0.5
    undo.take_back(optimizer)
    assert torch.equal(parameter, before)
    assert {key: repr(value) for key, value in optimizer.state[parameter].items()} == state
    assert all(optimizer.state[parameter][key] is x for key, x in kept.items()), "in its memory"
    (copies,) = undo.state.values()
    tensors = [*undo.values, *(x for x in copies.values() if isinstance(x, torch.Tensor))]
    assert sum(x.nbytes for x in tensors) == before.nbytes + sum(x.nbytes for x in kept.values())


def test_copies_take_the_memory_of_earlier_ones():
    parameter = parameter_with_gradient()
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    first = Rollback.of(optimizer)
    optimizer.step()
    again = Rollback.of(optimizer, first)
    assert again.values[0].data_ptr() == first.values[0].data_ptr()
    assert torch.equal(again.values[0], parameter)
    for key, value in optimizer.state[parameter].items():
        assert again.state[parameter][key] is first.state[parameter][key] is not value
        assert torch.equal(again.state[parameter][key], value)
    del optimizer.state[parameter]["exp_avg"]
    again.take_back(optimizer)
    assert optimizer.state[parameter]["exp_avg"] is not again.state[parameter]["exp_avg"]


TRIAL = BLOCKS * BLOCK


def taken(pace: SpeculationPolicy, number: int, seconds: dict[bool, float], wait: float = 1.0) -> list[bool]:
    """What a pace decides for so many updates, of steps that take these seconds behind each kind."""
    found = list[bool]()
    for _ in range(number):
        found.append(pace.goes_ahead())
        pace.measured(seconds[found[-2] if len(found) > 1 else False])
        if not found[-1]:
            pace.waited(wait)
    return found


@pytest.mark.parametrize("better", [False, True])
def test_ranks_go_ahead_where_a_trial_has_found_shorter_steps(better):
    found = taken(SpeculationPolicy(), FIRST + 2 * PERIOD, {better: 1.0, not better: 1.1})
    in_turns = ([False] * BLOCK + [True] * BLOCK) * (BLOCKS // 2)
    assert found == [False] * FIRST + 2 * (in_turns + [better] * (PERIOD - TRIAL))


def test_a_rank_that_copies_for_longer_than_it_waits_does_not_go_ahead():
    assert not any(taken(SpeculationPolicy(copies=0.2), PERIOD, {False: 1.0, True: 0.5}, wait=0.1))
    assert any(taken(SpeculationPolicy(copies=0.05), PERIOD, {False: 1.0, True: 0.5}, wait=0.1))


def test_another_trial_may_come_to_another_result():
    pace = SpeculationPolicy()
    assert taken(pace, FIRST + PERIOD, {False: 1.0, True: 0.5})[-1]
    assert not taken(pace, PERIOD, {False: 0.5, True: 1.0})[-1]


def test_the_first_update_is_taken_back():
    parameter = parameter_with_gradient()
    optimizer = torch.optim.AdamW([parameter])
    undo = Rollback.of(optimizer)
    optimizer.step()
    undo.take_back(optimizer)
    assert parameter not in optimizer.state
    assert torch.equal(parameter, torch.full((3,), 2.0))


class Counting(torch.optim.SGD):
    """Its rate depends on an attribute."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.calls
        super().step()


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p))


class ByGroup(torch.optim.Optimizer):
    """Subclasses make the update of a group; ``counts``: of its own."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, "limit": 0, "rare": False} | options)
        self.counts = [0] * len(self.param_groups)

    @torch.no_grad()
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                p.sub_(group["lr"] * self.factor(number, group, p) * p.grad)

    def factor(self, number, group, p):
        """Counts what exceeds the limit of its group, alone from the 15th update on."""
        steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        exceeds = float(p.grad.abs().max()) > group["limit"]
        if group["limit"] and exceeds and (steps > 14 or not group["rare"]):
            self.counts[number] += 1
        return 1 / (1 + self.counts[number])


class NoisyOnes(ByGroup):
    def factor(self, number, group, p):
        return torch.rand_like(p) if p.numel() > 1000 else 1.0


def check_undone(cls, *options, shapes=((4, 4),), **defaults):
    groups = [Group(cls, defaults, own) for own in options or [{}]]
    check_groups(groups, [{Table(shape) for shape in shapes}] * len(groups), CPU, ranks=1, undone=True)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (Counting, [], r"Counting .* outside of its state_dict .* \(in calls, lr\)"),
        (Noisy, [], "Noisy .* draws random numbers"),
        (NoisyOnes, [], "NoisyOnes .* draws random numbers"),
        (ByGroup, [{}, {"limit": 30.0}], r"ByGroup .* \(in counts\)"),
        (ByGroup, [{"limit": 1e4, "rare": True}, {}], r"ByGroup .* \(in counts\)"),
    ],
)
def test_what_cannot_be_undone(cls, options, message):
    """Also what a class does for one group, a large table, a large gradient or a late update alone."""
    with pytest.raises(RunError, match=message + r'.*Take validation="barrier"'):
        check_undone(cls, *options, shapes=[(4,), (40, 40)])


@pytest.mark.parametrize(
    "cls", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam, worker.Drifting, ByGroup]
)
def test_what_can_be_undone(cls):
    check_undone(cls, {}, {"lr": 0.2}, shapes=[(4,), (40, 40)])


@pytest.mark.parametrize("what", ["parameter", "gradient"])
def test_a_change_before_the_verdict(what):
    parameter = parameter_with_gradient()
    ahead = SpeculativeUpdate(lambda: torch.zeros(1, 2), None, [parameter.grad])
    ahead.watch("The parameter w", parameter)
    ahead.watch("The gradient of w", parameter.grad)
    ahead.check()
    with torch.no_grad():
        (parameter if what == "parameter" else parameter.grad).mul_(2)
    with pytest.raises(RunError, match=f"The {what} .*w was changed after .* Call optimizer.settle"):
        ahead.check()


def test_settling_early_leaves_the_repetition_to_the_step():
    updates, asked = PendingUpdate(), []
    assert updates.stand()
    updates.begin(lambda: bool(asked.append(1)), lambda: None)
    assert not updates.are_settled
    updates.settle()
    updates.settle()
    assert (asked, updates.are_settled) == ([1], True)
    assert not updates.stand()
    assert updates.stand()


class TwoRanks:
    """Rank 0 of two, of which the other one has infinities in the last of its updates."""

    world_rank, numbers = 0, iter(())

    def begin_gather(self, words, call):
        other = torch.tensor([next(self.numbers), 1.0], dtype=torch.float64).view(torch.int64)
        return lambda: torch.stack([words, torch.cat([other, words[2:]])[: len(words)]])


@pytest.mark.parametrize("where", ["own", "wrapped", "all"])
def test_hooks_see_updates_that_stand(where):
    number, seen, updates = FIRST + 2 * BLOCK, {}, PendingUpdate()
    for validation in ("barrier", "post"):
        ranks, parameter = TwoRanks(), parameter_with_gradient()
        ranks.numbers = iter([0.0] * (number - 1) + [float("inf")])
        wrapped = torch.optim.SGD([parameter], lr=0.1)
        names = {parameter: "w"}
        optimizer = PipelineOptimizer(
            wrapped, names, [parameter], ranks, Clipping(None, 2.0, True), None, validation, updates
        )
        found = seen[validation] = []

        def hook(*_, parameter=parameter, found=found):
            found.append(float(parameter[0].detach()))

        register = {"own": optimizer.register_step_post_hook, "wrapped": wrapped.register_step_post_hook}
        handle = register.get(where, register_optimizer_step_post_hook)(hook)
        for _ in range(number):
            optimizer.step()
        handle.remove()
        optimizer.settle()
        assert optimizer.skipped == 1
    assert seen["post"] == seen["barrier"]


@pytest.mark.parametrize(
    ("largest", "skips", "norm", "plain", "left_out"),
    [
        (None, True, 5.0, True, False),
        (None, True, float("inf"), False, True),
        (1.0, False, 0.5, True, False),
        (1.0, False, 1.5, False, False),
        (1.0, False, float("nan"), False, False),
        (1.0, True, float("nan"), False, True),
    ],
)
def test_clipping(largest, skips, norm, plain, left_out):
    clipping, norm = Clipping(largest, 2.0, skips), torch.tensor(norm, dtype=torch.float64)
    assert (clipping.is_plain(norm), clipping.leaves_out(norm)) == (plain, left_out)
