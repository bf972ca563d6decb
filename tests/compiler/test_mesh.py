"""The choice of ranks, replicas, and what replicas divide."""

import re
from dataclasses import replace

import pytest
import torch
from launch import forked
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxpipe
from fxpipe.capture.scale import LATER
from fxpipe.compiler.choice import mesh
from fxpipe.errors import FxpipeError, OptionError, ScheduleError
from fxpipe.plan.meshes import Mesh
from fxpipe.plan.saved.check import plan_of

pytestmark = pytest.mark.slow

WIDTH, ROWS, LAYERS = 4096, 4096, 8
LAYER = 4 * WIDTH * (WIDTH + 1)  # bytes of its parameters, and of their gradients
ACTIVATIONS = 4 * ROWS * WIDTH  # of a layer


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x):
        return self.layers(x).square().mean()


def compiled(rows=ROWS, **options) -> fxpipe.Pipeline:
    """For 4 devices, each on a machine of its own, and a batch of 8 microbatches, unless otherwise given."""
    with torch.device("meta"):
        model, example = Layers(), {"x": torch.randn(rows, WIDTH)}
    given = {"schedule": "1f1b", "costs": "H100", "ranks_per_machine": 1, "check": False, "effort": 0.02}
    if "ranks" not in options:
        given |= {"devices": 4, "batch": 8 * rows}
    return fxpipe.compile(model, example, **(given | options))


def chosen(pipe: fxpipe.Pipeline) -> tuple[int, int, str]:
    return pipe.plan.ranks, pipe.plan.replicas, pipe.plan.shard


def table(pipe: fxpipe.Pipeline) -> dict[str, object]:
    return {str(tried.mesh): tried for tried in pipe.plan.meshes}


def by_hand(of: Mesh, **options) -> fxpipe.Pipeline:
    sizes = {"ranks": of.ranks, "replicas": of.replicas, "microbatches": of.microbatches}
    return compiled(**sizes, shard=of.shard or None, **options)


def test_replicas_win_where_microbatches_are_few():
    """Two microbatches on each of four replicas take no bubble, and 8 on 4 ranks of 1F1B do."""
    pipe = compiled()
    assert chosen(pipe) == (1, 4, "")
    assert pipe.plan.step.microbatches == 2
    assert [(tried.mesh.ranks, tried.mesh.replicas) for tried in pipe.plan.meshes] == [(1, 4), (2, 2), (4, 1)]
    best, *others = (tried.seconds or tried.bound for tried in pipe.plan.meshes)
    assert best == pipe.plan.prediction.seconds < min(others)


def test_ranks_win_where_the_network_is_slow():
    """Between RTX 4090s, sums of the gradients of few rows take longer than the bubble."""
    assert chosen(compiled(256, costs="RTX 4090")) == (4, 1, "")


def test_more_ranks_where_memory_is_short():
    """One rank needs the bytes of the layers and their gradients, and half of that again for a microbatch,
    as its backward is one op."""
    limit = 2.5 * LAYERS * LAYER
    pipe = compiled(memory_limit=limit)
    assert chosen(pipe) == (2, 2, "")
    alone = table(pipe)["1 x 4"]
    assert alone.seconds is None
    assert alone.memory == pytest.approx(3 * LAYERS * LAYER, rel=0.05)
    assert table(pipe)["2 x 2"].memory <= limit


def test_a_level_that_memory_asks_for():
    """Parameters, gradients and AdamW's state take 4 times the parameters, and with a divided state 2.5."""
    given = {"replicas": 4, "optimizer_bytes": 8, "shard": "auto", "batch": 4 * ROWS}
    whole = LAYERS * LAYER
    free = compiled(**given)
    assert free.plan.shard in ("", "optimizer")
    memory = {tried.mesh.shard: tried.memory for tried in free.plan.meshes}
    bucket = min(64 << 20, whole)
    assert memory[""] == pytest.approx(4 * whole + bucket + LAYERS * ACTIVATIONS, rel=0.1)
    assert memory[""] - memory["optimizer"] == pytest.approx(1.5 * whole)
    pipe = compiled(**given, memory_limit=memory[""] - whole / 2)
    assert chosen(pipe) == (1, 4, "optimizer")
    assert table(pipe)["1 x 4"].seconds is None


def test_parameters_are_divided_where_nothing_else_fits():
    """With four stages on a rank two of them are whole at a time."""
    given = {"ranks": 2, "replicas": 8, "shard": "auto", "optimizer_bytes": 8, "microbatches": 2}
    given |= {"schedule": "interleaved", "stages_per_rank": 4}
    free = compiled(**given)
    limit = 0.85 * min(tried.memory for tried in free.plan.meshes)
    pipe = compiled(**given, memory_limit=limit)
    assert chosen(pipe) == (2, 8, "parameters")
    assert [tried.seconds is None for tried in pipe.plan.meshes] == [False, True, True]
    assert all(exchange.per_use for exchange in pipe.plan.costs.exchanges)


SEARCHED = {"schedule": "auto", "recompute": "auto"}


@pytest.mark.parametrize(
    "options", [{"schedule": "1f1b"}, pytest.param(SEARCHED, marks=pytest.mark.variation)]
)
def test_a_choice_is_compiled_as_if_it_was_given(options):
    """One trace serves all meshes, also for other numbers of microbatches."""
    options = {**options, "memory_limit": 2.2 * LAYERS * LAYER, "optimizer_bytes": 8, "dimensions": {}}
    pipe = compiled(**options, shard="auto")
    given = Mesh(pipe.plan.ranks, pipe.plan.replicas, pipe.plan.step.microbatches, pipe.plan.shard)
    hand = by_hand(given, **options)
    assert replace(pipe.plan, meshes=()) == hand.plan
    assert pipe.artifact.programs == hand.artifact.programs
    assert pipe.artifact.captured == hand.artifact.captured
    assert str(1 / LATER) not in "".join(pipe.artifact.programs)
    assert f"{1 / given.microbatches}" in pipe.artifact.programs[-1]


def test_each_mesh_costs_what_it_does_by_hand(monkeypatch):
    """With a schedule by name, also where the schedule of another level is simulated again."""
    monkeypatch.setattr(mesh, "GAIN", -1e9)  # nothing is left out
    limit = {"memory_limit": 4.5 * LAYERS * LAYER, "optimizer_bytes": 8}
    pipe = compiled(shard="auto", **limit)
    assert len(pipe.plan.meshes) == 7
    for tried in pipe.plan.meshes:
        if tried.seconds is None:
            with pytest.raises(ScheduleError):
                by_hand(tried.mesh, **limit)
        else:
            assert by_hand(tried.mesh, **limit).plan.prediction.seconds == tried.seconds


def test_a_bound_is_no_longer_than_the_step():
    pipe = compiled()
    left_out = [tried for tried in pipe.plan.meshes if tried.bound is not None]
    assert left_out
    for tried in left_out:
        assert pipe.plan.prediction.seconds < tried.bound <= by_hand(tried.mesh).plan.prediction.seconds


def test_a_plan_with_meshes_is_saved(capsys):
    plan = compiled(shard="auto", memory_limit=3 * LAYERS * LAYER).plan
    assert plan.meshes
    assert plan_of(plan.to_json(), "a plan") == plan


def test_explain_shows_the_meshes(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    pipe = compiled(shard="auto", memory_limit=2.5 * LAYERS * LAYER)
    pipe.explain()
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if " * " in line)
    assert " ".join(row).startswith("2 x 2 * ")
    assert any(line.split()[:5] == ["1", "x", "4", "nothing", "≥"] for line in lines)


def test_batches_that_no_replicas_can_share():
    """6 microbatches are for 1 or 2 of 4 replicas."""
    tried = table(compiled(batch=6 * ROWS))
    assert f"{6 * ROWS} rows are no multiple of 4 replicas of {ROWS} rows" in tried["1 x 4"].why
    with pytest.raises(OptionError, match=r"No mesh is possible: 100 rows are no multiple of 1 replica of"):
        compiled(batch=100)


class Counting(Layers):
    """Has a tensor that no state dict has, which each replica would change by itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.count += 1
        return super().forward(x)


def test_a_model_that_replicas_cannot_train():
    with torch.device("meta"):
        model, example = Counting(), {"x": torch.randn(ROWS, WIDTH)}
    given = {"devices": 2, "batch": 8 * ROWS, "schedule": "1f1b", "costs": "H100", "check": False}
    pipe = fxpipe.compile(model, example, **given)
    assert chosen(pipe) == (2, 1, "")
    assert "changes count, which is in no state dict" in table(pipe)["1 x 2"].why


def in_turns(model, mesh):
    styles = {f"layers.{k}": RowwiseParallel() if k % 2 else ColwiseParallel() for k in range(LAYERS)}
    parallelize_module(model, mesh, styles)


@pytest.mark.variation
def test_lanes_win_where_there_is_one_microbatch(capsys):
    on_a_machine = {"batch": ROWS, "devices": 4, "ranks_per_machine": 4}
    pipe = compiled(**on_a_machine, parallelize=in_turns)
    assert chosen(pipe) == (1, 1, "")
    assert pipe.plan.lanes.number == 4
    seconds = {name: tried.seconds or tried.bound for name, tried in table(pipe).items()}
    assert set(seconds) == {"1 x 4", "2 x 2", "4 x 1", "1 x 2 x 2", "2 x 1 x 2", "1 x 1 x 4"}
    assert seconds["1 x 1 x 4"] < 0.5 * seconds["4 x 1"]
    pipe.explain()
    assert re.search(r"1 x 1 x 4 \*  nothing +1f1b", capsys.readouterr().out)

    def whole(model, mesh):
        parallelize_module(model, mesh, {"layers.0": ColwiseParallel(output_layouts=Replicate())})

    ways = compiled(**on_a_machine, parallelize={"one": whole, "all": in_turns}, lanes=[4])
    assert [*table(ways)] == ["1 x 1 x 4 all", "1 x 1 x 4 one"]
    assert len(ways.plan.lanes.shared) == 12
    ways.explain()
    assert re.search(r"1 x 1 x 4 all \*  nothing +1f1b", capsys.readouterr().out)
    alone = compiled(**on_a_machine, parallelize=in_turns, lanes=(1, 3))
    assert chosen(alone) == (4, 1, "")
    assert alone.plan.lanes.number == 1


@pytest.mark.variation
def test_lanes_are_chosen_with_the_values_of_the_model():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(4, 8)
    expected = model(x).square().mean()
    styles = {"0": fxpipe.PaddedParallel(ColwiseParallel()), "2": fxpipe.PaddedParallel(RowwiseParallel())}
    pipe = fxpipe.compile(
        model, (x[:2],), loss_fn=lambda output, _: output.square().mean(), batch=4, devices=4, lanes=[4],
        parallelize=lambda model, mesh: parallelize_module(model, mesh, styles),
    )  # fmt: skip
    assert pipe.plan.lanes.lengths == {"0.weight": 6, "0.bias": 6, "2.weight": 6}
    torch.testing.assert_close(pipe.run_local((x,)).loss, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": None, "microbatches": 2}, "parallelize, a function .* It needs batch"),
        ({"devices": None}, "without torchrun devices"),
        ({"lanes": [3]}, r"lanes=\[3\]: none of these divides 4 devices of a machine"),
        ({"lanes": [0]}, "Each of lanes is 0 and must be"),
        ({"lanes": 2}, "lanes is 2 and must be a list of the numbers to compare"),
        ({"lanes": [2], "parallelize": None}, r"lanes=\[2\] needs parallelize"),
        (
            {"lanes": [2], "parallelize": lambda model, mesh: nn.Linear(2, 2)},
            "1 x 2 x 2: .*distributes the model in",
        ),
    ],
)
def test_what_leaves_no_choice_of_lanes(options, message):
    with pytest.raises(FxpipeError, match=message):
        compiled(**({"parallelize": in_turns} | options))


def test_nothing_fits():
    with pytest.raises(
        ScheduleError, match=r"No mesh \(ranks x replicas\) fits: the least memory is needed by"
    ):
        compiled(memory_limit=LAYER, shard="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 4}, "Give microbatches, of each replica, or batch"),
        ({"batch": None}, "Give microbatches, of each replica, or batch"),
        ({"batch": None, "microbatches": 4}, "their number is to be chosen: give batch"),
        ({"devices": None}, "Give ranks, or devices"),
        ({"devices": 0}, "devices is 0 and must be a whole number"),
        ({"ranks": 3, "devices": 4, "batch": ROWS}, "ranks=3 is no mesh of 4 devices"),
        ({"replicas": 3}, "is no mesh of 4 devices"),
        ({"shard": "weights"}, "shard is 'weights' and must be 'optimizer', 'gradients'"),
        ({"optimizer_bytes": -1}, "optimizer_bytes is -1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(OptionError, match=message):
        compiled(**options)


def test_an_option_that_no_mesh_has():
    with pytest.raises(OptionError, match="Unknown schedule '2f2b'"):
        compiled(schedule="2f2b")


def test_a_batch_for_given_ranks():
    """Rows instead of microbatches; nothing is chosen."""
    plan = compiled(ranks=2, replicas=2, batch=8 * ROWS).plan
    assert (plan.ranks, plan.replicas, plan.step.microbatches, plan.meshes) == (2, 2, 4, ())


def trained() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.randn(8, 8)
    given = {"loss_fn": lambda y, x: y.square().mean(), "batch": 8, "schedule": "1f1b", "costs": "H100"}
    pipe = fxpipe.compile(model, (x[:1],), **given)
    rows = x.chunk(pipe.replicas)[pipe.replica]
    loss = pipe.step((rows,))
    print("mesh", pipe.plan.ranks, pipe.replicas, pipe.plan.step.microbatches, len(pipe.plan.meshes))
    print("same", torch.allclose(loss, model(x).square().mean()))


@pytest.mark.waits
def test_torchrun_says_how_many_devices_there_are(tmp_path):
    """Small products take their launches, so that no rank waits: two replicas."""
    ran = forked(2, trained, dtype=torch.float32, logs=tmp_path)
    assert ran.code == 0, ran
    assert all("mesh 1 2 4 2" in out and "same True" in out for out in ran.stdout), ran
