"""Activations that leave their rank: the same bits, less memory, limits that are kept, what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS
from torch import fx, nn
from zoo import EFFORT, captured_once

import fxpipe
import fxpipe.ir.liveness
import fxpipe.runtime.program.offload
from fxpipe import Offload
from fxpipe.cli.command import main
from fxpipe.errors import LimitError, OptionError, RunError, ScheduleError, VerifyError
from fxpipe.ir.graph import offload, reload
from fxpipe.ir.storage import call_nodes, storage_root
from fxpipe.ir.verify import verify
from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.offload.memory_pool import pools
from fxpipe.schedule.offload.planner import offload as plan_offload
from fxpipe.schedule.offload.planner import with_link
from fxpipe.schedule.ops import Direction, Phase
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.schedule.simulation.timeline import Timeline

pytestmark = pytest.mark.slow

MICROBATCHES = 8
FAST = 1e12  # bytes a second: the tests' models are small, and so are the times that a transfer has


@pytest.fixture(autouse=True)
def small_values_too(monkeypatch):
    monkeypatch.setattr(fxpipe.ir.liveness, "SMALLEST", 1)


def compiled(name: str, schedule: str = "1f1b", **options) -> fxpipe.Pipeline:
    options = {"ranks": 2, "offload": False, **options}
    if not isinstance(options["offload"], Offload):
        options["offload"] = Offload(options["offload"], bandwidth=FAST)
    model, example = MODELS[name].build(), MODELS[name].example()
    with captured_once(name, MICROBATCHES, "dimensions" in options):
        return fxpipe.compile(
            model, example, microbatches=MICROBATCHES, schedule=schedule, effort=EFFORT, **options
        )


@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    [
        pytest.param("gpt2", "1f1b", {"ranks": 3}, marks=pytest.mark.variation),
        ("llama", "zb-h1", {"ranks": 4, "offload": 0.7}),
        pytest.param("mixtral", "zb-v", {"recompute": "norms"}, marks=pytest.mark.variation),
        pytest.param("t5", "interleaved", {}, marks=pytest.mark.variation),
        # A tied weight adds up in another order.
        pytest.param("llama", "gis", {"vocab_parallel": "1-barrier"}, marks=pytest.mark.variation),
        pytest.param(
            "t5", "zb-h1", {"vocab_parallel": "2-barrier", "recompute": "norms"}, marks=pytest.mark.variation
        ),
    ],
)
def test_the_same_bits_from_less_memory(name, schedule, options):
    batch = MODELS[name].data(MICROBATCHES)
    plain = compiled(name, schedule, **{**options, "offload": False})
    light = compiled(name, schedule, **{"offload": True, **options})
    expected = plain.run_local(batch)
    found = light.run_local(batch, measure_memory=True)
    assert light.plan.transfers
    assert torch.equal(found.loss, expected.loss)
    assert found.grads.keys() == expected.grads.keys()
    assert all(torch.equal(found.grads[key], grad) for key, grad in expected.grads.items())
    before, after = plain.simulate(), light.simulate()
    # The cuts are moved with the transfers in mind, and may be others.
    assert after.seconds == pytest.approx(before.seconds, rel=0.005)
    assert sum(after.peak_memory) < 0.99 * sum(before.peak_memory)
    assert found.peak_saved == pytest.approx(after.peak_memory, rel=0.05)


def test_a_storage_leaves_once_and_comes_back_where_it_is_needed():
    pipe = compiled("llama", "zb-h1", offload=True, ranks=3)
    nodes = call_nodes(pipe.graph)
    leaving = [n for n in nodes if n.target is offload]
    back = {n.args[0]: n for n in nodes if n.target is reload}
    assert set(leaving) == set(back)
    stages = {t.stage for t in pipe.plan.transfers}
    assert {n.meta["color"].stage for n in leaving} == stages
    per_stage = [(n.meta["color"].stage, storage_root(n)) for n in leaving]
    assert len(per_stage) == len(set(per_stage))
    users = {n: {u.meta["color"].phase for u in back[n].users} for n in leaving}
    assert all(back[n].meta["color"].phase in users[n] for n in leaving)
    assert all(Phase.B not in users[n] for n in leaving if back[n].meta["color"].phase is Phase.W)
    assert {t.user for t in pipe.plan.transfers} == {Phase.B, Phase.W}


def test_the_graph_must_match():
    pipe = compiled("llama", offload=True)
    first = next(n for n in call_nodes(pipe.graph) if n.target is offload)
    (back,) = first.users
    copy = fx.Graph()
    values = {}
    result = copy.graph_copy(pipe.graph, values)
    copy.output(result)
    verify(copy, "nothing")
    values[back].meta["color"] = values[first].meta["color"]
    with pytest.raises(VerifyError, match=f"After nothing: {first.name} is reloaded in"):
        verify(copy, "nothing")
    values[back].args = (values[first.args[0]],)
    with pytest.raises(VerifyError, match=f"{first.name} must be offloaded in F and reloaded once"):
        verify(copy, "nothing")


def weights(pipe: fxpipe.Pipeline) -> list[int]:
    """Per rank the bytes that are there whatever runs."""
    known = {**pipe.parameters, **pipe.buffers}
    return [
        sum(known[name].nbytes for name in (*held.parameters, *held.gradients, *held.buffers))
        for held in pipe.plan.tensors
    ]


def keeps(pipe: fxpipe.Pipeline, limit: float) -> bool:
    return all(
        peak + held <= limit for peak, held in zip(pipe.simulate().peak_memory, weights(pipe), strict=True)
    )


def test_auto_moves_as_much_as_the_limit_asks_for():
    roomy = compiled("llama", "gpipe")
    held, peak = max(weights(roomy)), max(roomy.simulate().peak_memory)
    limit = held + 0.5 * peak
    loose = compiled("llama", "gpipe", offload="auto", memory_limit=held + 1.01 * peak)
    tight = compiled("llama", "gpipe", offload="auto", memory_limit=limit)
    assert not loose.plan.transfers
    assert tight.plan.transfers
    assert tight.simulate().seconds == pytest.approx(roomy.simulate().seconds)
    assert keeps(tight, limit)
    found = tight.run_local(MODELS["llama"].data(MICROBATCHES), measure_memory=True)
    assert max(found.peak_saved) <= 0.6 * peak
    with pytest.raises(
        LimitError, match=r"gpipe cannot be offloaded into .*; the smallest that it can keep .* is .*bytes"
    ) as error:
        compiled("llama", "gpipe", offload="auto", memory_limit=held + 0.01 * peak)
    enough = error.value.smallest
    assert enough > held
    assert keeps(compiled("llama", "gpipe", offload="auto", memory_limit=enough), enough)


@pytest.mark.variation
def test_the_planner_offloads_where_that_is_faster(tmp_path, capsys):
    roomy = compiled("llama", "interleaved")
    limit = max(weights(roomy)) + 0.88 * max(roomy.simulate().peak_memory)
    slow, fast = (
        compiled("llama", "auto", stages_per_rank=2, placement="plain", offload=o, memory_limit=limit)
        for o in (False, "auto")
    )
    assert fast.plan.transfers
    assert fast.simulate().seconds < 0.95 * slow.simulate().seconds
    assert keeps(fast, limit)
    fitting = [candidate for candidate in fast.plan.tried if candidate.seconds is not None]
    assert {candidate.offloaded > 0 for candidate in fitting} == {True, False}
    fast.save(tmp_path / "fast")
    capsys.readouterr()
    fast.explain()
    shown = capsys.readouterr().out
    assert main(["explain", str(tmp_path / "fast")]) == 0
    told = capsys.readouterr().out
    assert told == shown
    assert "offloaded" in told
    assert re.search(r"B of the .*B that might leave the ranks in a step do, in \d+ transfers to disk", told)
    assert main(["simulate", "--costs", str(tmp_path / "fast"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["peak_memory"] == list(fast.simulate().peak_memory)
    assert sum(map(len, figures["offload"]["transfers"])) == len(fast.plan.transfers)


def test_ranks_that_share_a_link_move_less():
    alone, shared = (
        compiled("llama", "gpipe", offload=Offload(bandwidth=1e8, ranks_per_link=n)).simulate()
        for n in (1, 2)
    )
    assert 0 < shared.moved < alone.moved
    assert max(shared.stalled) == pytest.approx(0, abs=1e-9)


def test_saved_and_loaded(tmp_path):
    pipe = compiled("gpt2", offload=True)
    batch = MODELS["gpt2"].data(MICROBATCHES)
    expected = pipe.run_local(batch)
    pipe.save(tmp_path / "pipe")
    (tmp_path / "away").mkdir()
    again = fxpipe.load(tmp_path / "pipe", offload_directory=tmp_path / "away")
    assert again.plan == pipe.plan
    assert again.simulate().peak_memory == pipe.simulate().peak_memory
    found = again.run_local(batch)
    assert all(torch.equal(found.grads[name], grad) for name, grad in expected.grads.items())
    assert list((tmp_path / "away").iterdir()) == []
    lost = fxpipe.load(tmp_path / "pipe", offload_directory=tmp_path / "nowhere")
    with pytest.raises(RunError, match="nowhere: it is not a writable directory"):
        lost.run_local(batch)


@pytest.mark.variation
def test_costs_at_other_lengths():
    pipe = compiled("llama", offload=True, dimensions={"sequence": 10})
    assert pipe.simulate({"sequence": 10}).peak_memory == pytest.approx(pipe.simulate().peak_memory)
    longer = pipe.simulate({"sequence": 40})
    assert longer.moved == pytest.approx(4 * pipe.simulate().moved, rel=0.5)
    assert longer.moved > 3 * pipe.simulate().moved


# -- what goes wrong ----------------------------------------------------------------------------------------


def fails(code: int):
    def function(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return function


@pytest.mark.in_ci(
    "posix_fallocate-function-A file of \\\\d+ bytes for activations cannot be made .*No space left",
    "preadv-<lambda>-its file ends \\\\d+ bytes early",
)
@pytest.mark.parametrize(
    ("function", "replacement", "message"),
    [
        (
            "posix_fallocate",
            fails(errno.ENOSPC),
            r"A file of \d+ bytes for activations cannot be made .*No space left",
        ),
        ("pwrite", fails(errno.EIO), "Activations could not be moved to or from .*Input/output error"),
        ("preadv", fails(errno.EIO), "Activations could not be moved to or from .*Input/output error"),
        ("preadv", lambda *args: 0, r"its file ends \d+ bytes early"),
    ],
)
def test_a_disk_that_fails(function, replacement, message, monkeypatch):
    pipe = compiled("gpt2", offload=True)
    monkeypatch.setattr(os, function, replacement)
    with pytest.raises(RunError, match=message):
        pipe.run_local(MODELS["gpt2"].data(MICROBATCHES))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "some"}, "offload is 'some' and must be True, False, 'auto', or a share from 0 to 1"),
        ({"offload": 1.5}, "offload is 1.5 and must be"),
        ({"offload": -0.1}, "offload is -0.1 and must be"),
        ({"offload": "auto"}, "offload='auto' moves as much as memory_limit asks for: give one"),
        ({"offload": True, "gradients": False}, "Without gradients nothing is saved: leave out offload"),
        ({"offload": Offload(tier="tape")}, "tier of offload is 'tape' and must be 'host' or 'disk'"),
        ({"offload": Offload(bandwidth=-1)}, "bandwidth of offload is -1 and must be bytes a second"),
        (
            {"offload": Offload(ranks_per_link=0)},
            "ranks_per_link is 0 and must be a whole number, at least 1",
        ),
        (
            {"offload": 0.5, "memory_limit": 1},
            r"parameters, gradients, buffers and outputs of rank \d alone take",
        ),
    ],
)
def test_what_cannot_be_asked_for(options, message):
    with pytest.raises((OptionError, LimitError), match=message):
        compiled("gpt2", **options)


def test_places_that_activations_cannot_go_to(tmp_path):
    with pytest.raises(RunError, match="cpu cannot be offloaded to the tier 'host': use 'host' with a GPU"):
        compiled("gpt2", offload=Offload(tier="host"))
    with pytest.raises(RunError, match="nowhere: it is not a writable directory"):
        compiled("gpt2", offload=Offload(directory=tmp_path / "nowhere"))


@pytest.mark.variation
def test_a_plan_for_another_device_has_its_tier_and_runs_here():
    batch = MODELS["gpt2"].data(MICROBATCHES)
    here = compiled("gpt2", offload=True)
    there = compiled("gpt2", offload=True, costs="H100")
    assert (here.plan.tier, there.plan.tier) == ("disk", "host")
    assert there.plan.transfers
    results = [pipe.run_local(batch) for pipe in (here, there)]
    torch.testing.assert_close(results[0].loss, results[1].loss)
    assert compiled("gpt2", offload=True, costs=["EPYC 9654"] * 2).plan.tier == "disk"


def test_a_directory_in_memory(monkeypatch):
    pipe = compiled("gpt2", offload=True)
    monkeypatch.setattr(fxpipe.runtime.program.offload, "filesystem", lambda directory: "tmpfs")
    with pytest.warns(UserWarning, match="is in memory itself, so offloading to it frees no memory"):
        pipe.run_local(MODELS["gpt2"].data(MICROBATCHES))


def test_a_share_that_does_not_keep_the_limit():
    roomy = compiled("llama")
    limit = max(weights(roomy)) + 0.6 * max(roomy.simulate().peak_memory)
    with pytest.raises(ScheduleError, match=r"with 10% to offload takes \d.*Offload more, or 'auto'"):
        compiled("llama", offload=0.1, memory_limit=limit)


# -- where it goes ------------------------------------------------------------------------------------------


def timeline(name: str, ranks: int, microbatches: int, chunks: int, k: float) -> Timeline:
    """Equal stages, of whose saved bytes half are kept for W; ``k``: of the link."""
    stage = StageCost(1 / chunks, 1 / chunks, 1 / chunks, 1 / chunks, 0.5 / chunks)
    costs = chain([stage] * (ranks * chunks))
    schedule = build(name, ranks=ranks, microbatches=microbatches, costs=costs, stages_per_rank=chunks)
    return simulate(schedule, with_link(costs, k, 1))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["1f1b", "zb-h1", "interleaved", "gis"]),
    st.integers(1, 4),
    st.integers(1, 10),
    st.floats(0, 0.5),
)
def test_places_in_the_pool_do_not_overlap_while_they_are_needed(name, ranks, microbatches, k):
    chunks = 2 if name in ("interleaved", "gis") else 1
    schedule = plan_offload(timeline(name, ranks, microbatches, chunks, k), 1.0).timeline.schedule
    sizes = {(s, u): 10 + s + 3 * (u is Phase.W) for s in range(schedule.stages) for u in (Phase.B, Phase.W)}
    found = pools(schedule, lambda t: sizes[t.stage, t.user])
    times: dict[int, list] = {rank: [] for rank in range(ranks)}
    out = {t.activation: t.begin for t in schedule.transfers if t.direction is Direction.OUT}
    for t in schedule.transfers:
        if t.direction is Direction.IN:
            rank = schedule.placement[t.stage]
            at = found[rank].offsets[t.activation]
            end = at + sizes[t.stage, t.user]
            assert 0 <= at < end <= found[rank].bytes
            times[rank].append((out[t.activation], t.end, at, end))
    for own in times.values():
        for (a, b, low, high), (c, d, begin, end) in combinations(own, 2):
            assert b < c or d < a or high <= begin or end <= low


class Reused(nn.Module):
    """A value that W alone needs in one place and B in another, and an expanded one that is not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        y = torch.tanh(self.a(x))
        z = y * y[:, :1].expand(-1, 8)
        return (self.b(z.view(-1, 8)) * self.c(y).relu()).square().mean()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_views_and_values_with_two_uses(schedule):
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.Linear(8, 8), Reused()), (torch.randn(4, 8),)
    options = {"ranks": 1, "microbatches": 4, "schedule": "gpipe" if schedule == "1f1b" else schedule}
    plain, light = (
        fxpipe.compile(model, example, offload=Offload(share, bandwidth=FAST), **options)
        for share in (False, True)
    )
    batch = (torch.randn(16, 8),)
    expected, found = plain.run_local(batch), light.run_local(batch)
    assert (len(light.plan.transfers) > 0) == (schedule == "1f1b")
    assert all(torch.equal(found.grads[name], grad) for name, grad in expected.grads.items())


class Momentum(nn.Module):
    """A copy of the weights that follows them, as buffers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        for k, layer in enumerate(self.layers):
            self.register_buffer(f"slow{k}", layer.weight.detach().clone())

    def forward(self, x):
        y = x
        for k, layer in enumerate(self.layers):
            with torch.no_grad():
                slow = getattr(self, f"slow{k}")
                slow.lerp_(layer.weight, 0.1)
                y = y @ slow.T
            x = layer(x).tanh()
        return (x - y).square().mean()


def test_a_memory_limit_holds_the_new_values_of_buffers():
    """Until the step has succeeded a rank holds old and new values."""
    batch, example = {"x": torch.randn(6, 32)}, {"x": torch.randn(2, 32)}
    make = {"ranks": 2, "microbatches": 3, "schedule": "1f1b"}
    roomy = fxpipe.compile(Momentum(), example, **make)
    new = [sum(roomy.buffers[name].nbytes for name in held.buffers) for held in roomy.plan.tensors]
    both = [held + more for held, more in zip(weights(roomy), new, strict=True)]
    found = roomy.run_local(batch, measure_memory=True)
    for more, saved, peak in zip(new, roomy.simulate().peak_memory, found.peak_saved, strict=True):
        assert more < peak <= more + saved + 64  # the losses
    limit = max(both) + 2 * max(roomy.simulate().peak_memory)
    assert keeps(fxpipe.compile(Momentum(), example, **make, memory_limit=limit), limit)
    with pytest.raises(LimitError, match=rf"outputs of rank 0 alone take .* \({max(both)} bytes\)"):
        fxpipe.compile(Momentum(), example, **make, memory_limit=max(both))
