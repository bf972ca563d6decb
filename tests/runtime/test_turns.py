"""``run_local`` in the caller's thread: what debuggers see, what ranks keep apart, how it ends."""

import gc
import re
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.errors import DeadlockError, RunError
from fxpipe.runtime.program import losses
from fxpipe.runtime.ranks.local import LocalComm, LocalWorld, layout_of
from fxpipe.runtime.ranks.turns import run_all

RANKS, MICROBATCHES, LAYERS = 2, 3, 4


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.threads = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(LAYERS)))

    def forward(self, x):
        return self.blocks(x).square().mean()


@pytest.fixture(scope="module")
def compiled():
    torch.manual_seed(0)
    options = {"ranks": RANKS, "microbatches": MICROBATCHES, "schedule": "zb-h1", "check": False}
    pipe = fxpipe.compile(Layers(), {"x": torch.randn(2, 4)}, **options)
    return pipe, {"x": torch.randn(2 * MICROBATCHES, 4)}


def test_modes_and_the_profiler_see_the_ops_of_all_ranks(compiled):
    pipe, batch = compiled
    before = torch.get_num_threads()
    expected = pipe.run_local(batch)
    with Seen() as seen:
        assert torch.equal(pipe.run_local(batch).loss, expected.loss)
    assert seen.names.count("aten::addmm") == LAYERS * MICROBATCHES
    assert seen.threads == {threading.get_ident()}
    with DebugMode() as mode:
        pipe.run_local(batch)
    lines = mode.debug_string().splitlines()
    f1 = lines[lines.index("  [record function] F1.0") + 1 :]
    assert any("aten::addmm(" in line for line in f1[: f1.index("  [record function] F1.1")])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.run_local(batch)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["aten::addmm"] == LAYERS * MICROBATCHES
    assert counts["F0.2"] == counts["F1.2"] == 1
    assert torch.get_num_threads() == before


def in_turns(*functions):
    """Results of functions of a rank, which wait by a call."""
    world, arrived = LocalWorld(len(functions)), [0] * len(functions)

    def main(rank):
        def wait(until=None):
            """For the next turn, or until something that need not come."""
            arrived[rank] += 1
            number = arrived[rank]
            world.wait_until(until or (lambda: min(arrived) >= number), rank, f"turn {number}")

        return functions[rank](wait)

    mains = [lambda rank=rank: main(rank) for rank in range(len(functions))]
    return run_all(world, mains, lambda rank: f"F{rank}.0", 1, torch.device("cpu"))


def state():
    """Of the thread: what with-blocks change."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def test_gradients_go_with_their_result(compiled):
    """And not when Python collects its garbage: those of a large model would fill a GPU meanwhile."""
    pipe, batch = compiled
    gc.collect()
    gc.disable()
    try:
        result = pipe.run_local(batch)
        grads = [weakref.ref(grad) for grad in result.grads.values()]
        assert all(ref() is not None for ref in grads)
        del result
        assert [ref() for ref in grads if ref() is not None] == []
    finally:
        gc.enable()


def test_the_loss_is_waited_for_behind_all_ops(monkeypatch):
    """The host of an accelerator starts the backward meanwhile."""
    events = []

    def on_host(device, function):
        found = function()
        return lambda: events.append("loss") or found

    monkeypatch.setattr(losses, "on_host", on_host)
    options = {"ranks": 1, "microbatches": MICROBATCHES, "schedule": "gpipe", "check": False}
    pipe = fxpipe.compile(Layers(), {"x": torch.randn(2, 4)}, **options)
    pipe.runtime.record.at_op = events.append
    pipe.step({"x": torch.randn(2 * MICROBATCHES, 4)})
    ops = [f"{phase}.{m}" for phase in ("F0", "BW0") for m in range(MICROBATCHES)]
    assert events == [*ops, "loss"]


def test_with_blocks_of_a_rank_hold_in_its_turns():
    seen, other = Seen(), Seen()

    def first(wait):
        with torch.no_grad(), torch.autocast("cpu", torch.float16), Asked(), seen:
            wait()
            torch.ones(1).cos()
            within = state()
            wait()
        wait()
        return within

    def second(wait):
        with other:
            wait()
            torch.ones(1).sin()
            within = state()
        wait()
        wait()
        return within

    before = state()
    found = in_turns(first, second)
    assert found == [(False, True, torch.float16), before]
    assert (seen.names, other.names) == (["aten::ones", "aten::cos"], ["aten::ones", "aten::sin"])
    assert state() == before == (True, False, torch.bfloat16)


def test_a_rank_may_write_to_what_all_ranks_get():
    """As a program does, where an op is the last one to read a value."""
    world, given = LocalWorld(2), [torch.zeros(2, 3), torch.ones(2, 3)]

    def take_and_write(rank):
        comm = LocalComm(world, rank)
        pending = comm.collective("all_gather", given[rank], layout_of(given[rank]), -1, group=0)
        parts = comm.wait(pending)
        return [part.clone() for part in parts], [part.fill_(7) for part in parts]

    mains = [partial(take_and_write, rank) for rank in range(2)]
    for parts, _ in run_all(world, mains, lambda rank: f"F{rank}.0", 1, torch.device("cpu")):
        assert all(map(torch.equal, parts, given))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_ends_all_ranks(error):
    """With what they leave behind; Ctrl-C as it is, in the caller's thread."""
    ended = []

    def first(wait):
        try:
            with torch.autocast("cpu"), Seen():
                wait()
        finally:
            ended.append(0)

    def second(wait):
        with Seen():
            raise error("here")

    before = state()
    with pytest.raises(RunError if error is ValueError else error) as raised:
        in_turns(first, second)
    if error is ValueError:
        assert str(raised.value) == "Rank 1 failed in F1.0: ValueError: here"
        assert raised.value.__cause__.__traceback__ is not None
    assert (ended, state()) == ([0], before)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_all_that_wait_are_named():
    with pytest.raises(DeadlockError) as raised:
        in_turns(lambda wait: wait(lambda: False), lambda wait: wait(lambda: False), lambda wait: None)
    head, *lines = str(raised.value).splitlines()
    assert head == "All ranks wait:"
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        said = rf"  rank {rank} waits for turn 1, after F{rank}\.0 \(line \d+ of test_turns\.py\)"
        assert re.fullmatch(said, line), line
