"""The time of an update and of its verdicts, the copies that undo it, and plans made for many steps."""

import json
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch
from saved_plan import write_plan
from torch import nn

import fxpipe
from fxpipe.compiler.tensor_ownership import copy_bytes
from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.devices.known_devices import CPU, device_named
from fxpipe.cost.update import Trained, update_costs
from fxpipe.errors import ArtifactError, OptionError, ScheduleError
from fxpipe.schedule.costs import Update
from fxpipe.training.model.rollback import Rollback

SINGLE, HALF, MASTERED = Trained(1000, 4, 4), Trained(1000, 2, 2), Trained(1000, 2, 4)
SUMMED = Trained(1000, 4, 8)  # gradients of float64 are handed over in single precision
H100, A100 = device_named("H100"), device_named("A100")


def test_bytes_of_an_update():
    """Gradients are read for the norm and the update and set to zero; parameter and two states change."""
    assert [one.moved for one in (SINGLE, HALF, MASTERED, SUMMED)] == [36_000, 18_000, 38_000, 48_000]


def test_bytes_that_undo_an_update():
    assert [one.copied for one in (SINGLE, HALF, MASTERED, SUMMED)] == [12_000, 6_000, 12_000, 12_000]
    assert copy_bytes([[SINGLE, HALF], [MASTERED], [MASTERED]]) == (18_000, 12_000, 12_000)
    halves = SINGLE.of_owner(2), HALF.of_owner(2)
    assert copy_bytes([halves, halves[:1]]) == (9_000, 6_000)
    assert copy_bytes([[SINGLE._replace(lanes=4).of_owner(2)]]) == (1_500,)


def test_copies_have_the_bytes_that_are_predicted():
    parameter = nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    steps = optimizer.state[parameter]["step"].nbytes
    undo = Rollback.of(optimizer)
    kept = [*undo.values, *undo.state[parameter].values()]
    assert sum(x.nbytes for x in kept) == SINGLE.copied + steps


def test_each_rank_updates_on_its_own_device():
    large = Trained(10**9, 2, 4)
    found = update_costs(Cluster((H100, A100, A100)), [[large], [large, SINGLE], []])
    assert found.seconds == pytest.approx(
        (
            H100.stage_overhead + 38e9 / H100.memory_bandwidth,
            A100.stage_overhead + (38e9 + SINGLE.moved) / A100.memory_bandwidth,
            0.0,
        )
    )
    assert found.copies[0] == pytest.approx(H100.stage_overhead + 2 * 12e9 / H100.memory_bandwidth)
    assert found.copies[2] == 0.0
    assert found.message == max(H100.intra.seconds(32), A100.intra.seconds(32))
    assert found.inter_message == max(H100.inter.seconds(32), A100.inter.seconds(32))
    halves = update_costs(Cluster((H100,)), [[large.of_owner(2)]])
    assert halves.seconds[0] == pytest.approx(H100.stage_overhead + 19e9 / H100.memory_bandwidth)


class Net(nn.Module):
    def __init__(self, *widths: int):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise(widths)])

    def forward(self, x):
        return self.layers(x).square().mean()


def compiled(*widths: int, ranks: int = 2, **options) -> fxpipe.Pipeline:
    example = {"x": torch.randn(2, widths[0])}
    given = {"microbatches": 4, "effort": 0.05, "check": False, "stages_per_rank": 1} | options
    return fxpipe.compile(Net(*widths), example, ranks=ranks, **given)


@pytest.fixture(scope="module")
def post() -> fxpipe.Pipeline:
    return compiled(*[64] * 5, validation="post", dimensions={})


def test_the_plan_has_the_updates_of_its_ranks(post):
    there = post.simulate(device="H100").costs.update
    layers = [len(held.gradients) for held in post.plan.tensors]
    assert sum(layers) == 4
    for device, update in ((CPU, post.plan.costs.update), (H100, there)):
        layer = 36 * 64 * 64 / device.memory_bandwidth
        assert update.seconds == pytest.approx([device.stage_overhead + number * layer for number in layers])
        copied = 24 * 64 * 64 / device.memory_bandwidth  # 12 bytes, read and written
        assert update.copies == pytest.approx([device.stage_overhead + number * copied for number in layers])
        assert update.message == device.intra.seconds(32)


def test_auto_is_for_many_steps(post):
    plan = post.plan
    assert plan.validation == "post"
    periods = [row.period for row in plan.tried if row.period is not None]
    assert min(periods) == pytest.approx(post.simulate_steps().period)
    assert post.simulate_steps().period < post.simulate_steps(validation="barrier").period
    assert all(row.period is None for row in compiled(*[64] * 5).plan.tried)


def test_explain_compares_by_it(post, capsys):
    post.explain()
    said = " ".join(capsys.readouterr().out.split())
    assert "one of many, is the shortest" in said
    assert "Many steps:" in said
    assert "it was made for post-validation" in said
    assert "of many" in said


def test_pictures_of_two_steps(post, tmp_path):
    (file,) = [file for file in post.draw(tmp_path, steps=2) if file.name == "timeline.svg"]
    drawn = [box.get("class") for box in ET.parse(file).iter("{http://www.w3.org/2000/svg}rect")]
    assert drawn.count("update") == 2 * 2 + 1  # with that of the legend
    forwards = post.schedule.stages * post.schedule.microbatches
    assert sum(look in ("F", "F late") for look in drawn) == 2 * forwards + 1


def test_saved_plans(post, tmp_path):
    post.save(tmp_path / "saved")
    plan = fxpipe.load(tmp_path / "saved").plan
    assert (plan.validation, plan.costs.update) == ("post", post.plan.costs.update)
    data = json.loads((tmp_path / "saved" / "plan.json").read_text())
    data["costs"]["update"]["seconds"] = [1.0]
    write_plan(tmp_path / "saved", data)
    with pytest.raises(ArtifactError, match=r"costs.update.seconds.*one number for each rank"):
        fxpipe.load(tmp_path / "saved")
    del data["costs"]["update"], data["validation"]  # as earlier versions saved it
    write_plan(tmp_path / "saved", data)
    plan = fxpipe.load(tmp_path / "saved").plan
    assert (plan.validation, plan.costs.update) == ("barrier", Update())


def test_a_family_by_name_takes_it():
    pipe = compiled(*[16] * 5, schedule="zb-2p", validation="post")
    assert (pipe.plan.schedule, pipe.plan.validation) == ("zb-2p", "post")


def test_copies_count_in_the_memory_limit():
    """Weights and gradients of a layer of 1 MiB take 2 MiB, the copies of AdamW 3 MiB."""
    options = {"schedule": "1f1b", "split_points": ["layers.1"], "memory_limit": "3MiB", "microbatches": 2}
    compiled(2**15, 8, 8, **options)
    with pytest.raises(ScheduleError, match=rf"rank 0 alone take 5 MiB \({5 * 2**20} bytes\)"):
        compiled(2**15, 8, 8, validation="post", **options)
    compiled(2**15, 8, 8, validation="post", **options | {"memory_limit": "7MiB"})


def test_refused():
    with pytest.raises(OptionError, match="validation is 'late' and must be 'barrier' or 'post'"):
        compiled(8, 8, 8, validation="late")
    with pytest.raises(OptionError, match="Without gradients nothing is updated"):
        compiled(8, 8, 8, validation="post", gradients=False)
