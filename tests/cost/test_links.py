"""Messages within a machine and between machines, and plans for devices that are not here."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.api.compile import _torchrun_ranks
from fxpipe.cli import main
from fxpipe.cost.devices.known_devices import device_named
from fxpipe.cost.nodes import is_free
from fxpipe.cost.plan_costs import costs_of
from fxpipe.errors import OptionError, ScheduleError, SizeError
from fxpipe.ir.storage import is_view
from fxpipe.plan.work import PlanWork, Rates, StageWork, Work
from fxpipe.schedule.bound import lower_bound
from fxpipe.schedule.costs import Costs, Edge, StageCost, chain
from fxpipe.schedule.engine.arrays import schedule_arrays
from fxpipe.schedule.formats.costs_file import read_costs
from fxpipe.schedule.ops import Color, Phase
from fxpipe.schedule.placement import place
from fxpipe.schedule.search.build import build
from fxpipe.schedule.simulation.simulator import simulate
from fxpipe.strict import unstructure

STAGE = StageCost(1, 1, 1, 1, 1)


def messages(costs: Costs, placement: tuple[int, ...]) -> list[float]:
    return [costs.message_seconds(edge, placement) for edge in costs.edges]


def test_an_edge_takes_the_time_of_its_link():
    costs = chain([STAGE] * 4, 0.25, 8, inter_seconds=2.0, ranks_per_machine=2)
    assert messages(costs, (0, 1, 2, 3)) == [0.25, 0.25, 2.0, 2.0, 0.25, 0.25]
    assert messages(costs, (0, 1, 1, 0)) == [0.25, 0.25, 0.0, 0.0, 0.25, 0.25]
    assert messages(costs, (0, 2, 4, 5)) == [2.0] * 4 + [0.25] * 2
    assert messages(replace(costs, ranks_per_machine=None), (0, 1, 2, 3)) == [0.25] * 6
    assert messages(chain([STAGE] * 2, 0.25, ranks_per_machine=1), (0, 1)) == [0.25] * 2  # as in older files


def test_what_lanes_exchange_grows_with_the_lengths():
    """An edge of 16 bytes at the example's length, of which 8 more are held until all is there."""
    rates = Rates(
        memory=1e9, link=1e9, launch=0, latency=0, stage_overhead=0, inter_link=1e9, inter_latency=0
    )
    op = Work(1, ((1, 1, 1),), ((1, 1, 1),), 1e9, "float32", "move")
    stage = StageWork((op,), (), (), ((1, 1, 1),), ())
    work = PlanWork({"sequence": 8}, (stage, stage), (((2, 1, 1),),), rates)
    edge = Edge(Color(0, Phase.F), Color(1, Phase.F), 24.0, exchange=3.0)
    costs = Costs((StageCost(1, 0, 0, 8),) * 2, (edge,))
    for sizes, (held, seconds) in (({}, (24.0, 3.0)), ({"sequence": 16}, (48.0, 6.0))):
        (there,) = work.costs(costs, sizes).edges
        assert (there.bytes, there.exchange) == (held, seconds)


def test_simulated():
    """F, message, F, backward, message, backward."""
    near, far = (chain([STAGE] * 2, 0.25, inter_seconds=2.0, ranks_per_machine=size) for size in (2, 1))
    for costs, seconds in ((near, 0.25), (far, 2.0)):
        schedule = build("1f1b", ranks=2, microbatches=1, costs=costs)
        timeline = simulate(schedule, costs)
        assert timeline.seconds == 6 + 2 * seconds
        assert lower_bound(costs, (0, 1), 1) == 5 + 2 * seconds  # with the last W behind its B
        assert timeline.exposed_communication == (seconds, seconds)


@pytest.mark.parametrize("name", ["plain", "v"])
def test_the_arrays_of_the_search_have_the_delay_of_each_edge(name):
    placement = place(name, 4, 2)
    costs = chain([STAGE] * 8, 0.25, inter_seconds=2.0, ranks_per_machine=2)
    arrays = schedule_arrays(costs, placement, 1)
    for stage in range(1, 8):
        found = dict(arrays.needs[3 * stage])[3 * (stage - 1)]
        source, target = placement[stage - 1], placement[stage]
        far = source // 2 != target // 2
        assert found == (0.0 if source == target else 2.0 if far else 0.25)


def test_files(tmp_path: Path):
    costs = chain([STAGE] * 2, 0.25, 3, inter_seconds=2.0, ranks_per_machine=1)
    (tmp_path / "costs.json").write_text(json.dumps(unstructure(costs)))
    assert read_costs(tmp_path / "costs.json") == costs
    data = {"stages": [{"forward": 1, "backward": 1, "weight": 1}] * 2, "ranks_per_machine": 1}
    (tmp_path / "costs.json").write_text(json.dumps(data))
    found = read_costs(tmp_path / "costs.json", 0.25, 2.0)
    assert messages(found, (0, 1)) == [2.0, 2.0]
    for field, value in (("ranks_per_machine", 0), ("edges", [_edge(inter_seconds=-1)])):
        (tmp_path / "costs.json").write_text(json.dumps(data | {field: value}))
        with pytest.raises(ScheduleError, match=rf"{field}.* is -?\d.* and must be \d or more"):
            read_costs(tmp_path / "costs.json")


def _edge(**values: float) -> dict[str, Any]:
    ends = {"source": {"stage": 0, "phase": "F"}, "target": {"stage": 1, "phase": "F"}}
    return ends | values


# -- the command line ----------------------------------------------------------------------------------


TIMES = ("--schedule", "1f1b", "--forward", "1", "--backward-input", "1", "--backward-weight", "1")


def figures(capsys, *arguments: object) -> dict[str, Any]:
    assert main(["simulate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments: object) -> str:
    assert main(["simulate", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_machines_in_simulate(capsys):
    both = (*TIMES, "--ranks", 2, "--microbatches", 1, "--comm", 0.25)
    assert figures(capsys, *both)["seconds"] == 6.5
    assert figures(capsys, *both, "--inter-comm", 2, "--ranks-per-machine", 1)["seconds"] == 10
    assert figures(capsys, *both, "--inter-comm", 2, "--ranks-per-machine", 2)["seconds"] == 6.5
    assert "--inter-comm needs --ranks-per-machine" in refusal(capsys, *both, "--inter-comm", 2)


def test_machines_and_vocabulary(capsys):
    """The barrier of a split output layer crosses machines too."""
    both = (*TIMES, "--ranks", 2, "--microbatches", 4, "--comm", 0.25, "--vocab-time", 0.5)
    near, far = (
        figures(capsys, *both, "--inter-comm", 2, "--ranks-per-machine", size)["seconds"] for size in (2, 1)
    )
    assert near == figures(capsys, *both)["seconds"]
    assert far > near + 2 * 1.75


# -- compile -------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def compiled(**options: Any) -> fxpipe.Pipeline:
    given: Mapping[str, Any] = {"ranks": 4, "microbatches": 4, "schedule": "1f1b", **options}
    return fxpipe.compile(Perceptron(), {"x": torch.randn(4, 64)}, **given)


def test_the_links_of_a_named_device():
    device, pipe = device_named("H100"), compiled(costs="H100", ranks_per_machine=2)
    costs, moved = pipe.plan.costs, 4 * 64 * 4
    assert costs.ranks_per_machine == 2
    links = device.intra.seconds(moved), device.inter.seconds(moved)
    assert Edge(Color(0, Phase.F), Color(1, Phase.F), moved, *links) in costs.edges
    between = [(e.source.stage, e.target.stage) for e in costs.edges if _is_far(costs, e, pipe)]
    assert sorted(between) == [(1, 2), (2, 1)]
    near = compiled(costs="H100").simulate()
    assert pipe.simulate().seconds > near.seconds
    assert pipe.plan.device == "H100 SXM"


def _is_far(costs: Costs, edge: Edge, pipe: fxpipe.Pipeline) -> bool:
    return costs.message_seconds(edge, pipe.plan.placement) == edge.inter_seconds


def test_a_plan_for_another_device_has_its_times():
    """Ops this small take little more than a launch each."""
    pipe, device = compiled(costs="B200"), device_named("B200")
    (stage,) = [s for s in pipe.stages if s.index == 1]
    ops = sum(not is_free(n) and not is_view(n) for section in stage.sections for n in section.graph.nodes)
    assert ops >= 6  # two layers, F, B and W
    launches = ops * device.launch + 3 * device.stage_overhead
    assert stage.costs.total == pytest.approx(launches, rel=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": "H1000"}, "costs is 'H1000' and must be 'analytic', 'measured' or .*H100 SXM.*RTX 4090"),
        ({"costs": None}, "costs is None and must be 'analytic'"),
        ({"ranks_per_machine": 0}, "ranks_per_machine is 0 and must be a whole number, at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=message):
        compiled(**options)


@pytest.mark.parametrize(("environment", "expected"), [({}, None), ({"LOCAL_WORLD_SIZE": "8"}, 8)])
def test_torchrun_says_how_many_ranks_a_machine_has(monkeypatch, environment, expected):
    monkeypatch.setattr(os, "environ", {"WORLD_SIZE": "16", **environment})
    assert _torchrun_ranks(lanes=1) == expected


def test_without_torchrun_there_is_one_machine(monkeypatch):
    monkeypatch.setattr(os, "environ", {"LOCAL_WORLD_SIZE": "8"})
    assert _torchrun_ranks(lanes=1) is None


# -- plans of one device on another --------------------------------------------------------------------


@pytest.mark.variation
@pytest.mark.slow
def test_on_another_device_and_at_other_sizes():
    """As a compilation for it."""
    pipe = compiled(dimensions={}, ranks_per_machine=2)
    for name in ("B200", "RTX 4090", "cpu"):
        there = compiled(costs=name, dimensions={}, ranks_per_machine=2)
        for sizes in (None, {"microbatch": 4096}):
            found, expected = pipe.simulate(sizes, device=name), there.simulate(sizes)
            assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
            for one, other in zip(found.costs.stages, expected.costs.stages, strict=True):
                assert one.total == pytest.approx(other.total, rel=1e-9)
            assert found.costs.edges == expected.costs.edges
    assert pipe.simulate(device="B200").seconds < pipe.simulate().seconds


@pytest.mark.in_ci("optimizer")
@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_replicas_on_another_device_exchange_over_its_links(shard):
    """Within its machines where these have all replicas, else between them."""
    replicas = {"replicas": 2, "shard": shard, "dimensions": {}, "check": False}
    pipe = compiled(**replicas, ranks_per_machine=8)
    for size in (4, 8):
        expected = compiled(**replicas, costs="A100", ranks_per_machine=size).plan.costs.exchanges
        assert costs_of(pipe.plan, device="A100", ranks_per_machine=size).exchanges == expected
    on_cpu = pipe.plan.costs.exchanges[0].sum
    assert pipe.simulate(device="A100").costs.exchanges[0].sum < on_cpu


def test_a_measured_plan_on_another_device():
    """What was measured here says nothing about another device."""
    pipe = compiled(dimensions={}, costs="measured")
    expected = compiled(costs="H100").simulate()
    assert pipe.simulate(device="H100").seconds == pytest.approx(expected.seconds, rel=1e-9)


def test_the_offload_link_of_another_device():
    pipe = compiled(dimensions={}, offload=fxpipe.Offload(0.5, ranks_per_link=2))
    link = pipe.simulate(device="H100").costs.link
    assert link is not None
    assert 1 / link.seconds == pytest.approx(device_named("H100").offload_bandwidth)
    assert link.ranks == 2


def test_a_saved_pipeline_on_another_device(tmp_path, capsys):
    pipe = compiled(dimensions={})
    pipe.save(tmp_path / "saved")
    expected = pipe.simulate(device="B200").seconds
    assert fxpipe.load(tmp_path / "saved").simulate(device="B200").seconds == expected
    at = ("--costs", tmp_path / "saved")
    assert figures(capsys, *at, "--device", "b200")["seconds"] == expected
    far = figures(capsys, *at, "--device", "B200", "--ranks-per-machine", 1)
    assert far["seconds"] > expected
    assert main(["simulate", *map(str, at), "--device", "B200"]) == 0
    assert "planned times on B200" in capsys.readouterr().out
    assert "No device is called 'B2000'. Did you mean 'B200'?" in refusal(capsys, *at, "--device", "B2000")
    both = (*TIMES, "--ranks", 2, "--microbatches", 1, "--device", "B200")
    assert "--device needs --costs" in refusal(capsys, *both)


def test_a_plan_that_knows_no_sizes():
    with pytest.raises(SizeError, match=r"for the device of the compilation.*dimensions=\{\}"):
        compiled().simulate(device="B200")


def test_explained(capsys):
    from rich.console import Console

    from fxpipe.viz.explanation import explain

    pipe = compiled(costs="MI300X", ranks_per_machine=2)
    explain(pipe.plan, Console(width=200))
    assert "Costs of the device MI300X, 2 ranks on each machine." in capsys.readouterr().out
    explain(compiled().plan, Console(width=200))
    assert "Costs of the device cpu." in capsys.readouterr().out
    explain(compiled(costs="measured").plan, Console(width=200))
    assert "Costs of the device cpu, sections measured." in capsys.readouterr().out


@pytest.mark.slow
def test_the_search_sees_the_network(capsys):
    """More stages a rank shorten the bubble, and each crosses the network once more."""
    asked = ("--schedule", "auto", *TIMES[2:], "--ranks", 4, "--microbatches", 4, "--effort", 1)
    machines = (*asked, "--comm", 0, "--ranks-per-machine", 1, "--inter-comm")
    fast, slow = (figures(capsys, *machines, seconds) for seconds in (0, 3))
    assert fast == figures(capsys, *asked, "--comm", 0)
    assert len(slow["placement"]) == 4 < len(fast["placement"])
