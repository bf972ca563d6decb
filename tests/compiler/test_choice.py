"""Schedules of ``compile``: every family for real, given ones, ``auto``, and the memory limit."""

import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import (
    CASES,
    EFFORT,
    Chain,
    Shape,
    captured_once,
    check_against_eager,
    eager,
    in_double_precision,
    numbers,
    relative_error,
)

import fxpipe
from fxpipe.cli import main
from fxpipe.compiler.choice.costing import Costing
from fxpipe.cost.devices.known_devices import CPU
from fxpipe.errors import LimitError, OptionError, ScheduleError
from fxpipe.ir.graph import Kind, Phase
from fxpipe.runtime.program.load_program import load_program
from fxpipe.schedule.families.registry import FAMILIES
from fxpipe.schedule.ops import Schedule, parse_order

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]


def test_a_step_that_is_too_large_for_its_devices_is_told_before_it_runs() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(60_000, 60_000, bias=False, dtype=torch.float32) for _ in range(4)]
        x = torch.empty(1, 60_000, dtype=torch.float32)

    def compiled(layers: list[nn.Linear], **options) -> None:
        model = nn.Sequential(*layers)
        fxpipe.compile(
            model, (x,), loss_fn=lambda y, _: y.square().mean(), ranks=2, microbatches=2, **options
        )

    says = (
        r"rank 1 \(and 1 other\) is .* 53\.6 GiB, and 53\.6 GiB more of an AdamW; A100 SXM 40GB has 37\.3 GiB"
    )
    with pytest.warns(UserWarning, match=says):
        compiled(layers, costs="A100 40GB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(layers)  # the memory of a CPU is not known
        compiled(layers[:2], costs="A100 40GB")


@pytest.mark.in_ci(
    "1f1b-4-3",
    "gis-4-3",
    "staggered-4-3",
    "zb-h1-4-3",
    "zb-h2-4-3",
    "zb-4-3",
    "zb-1p-4-3",
    "zb-2p-4-3",
    "zb-v-4-3",
    "1f1b-v-4-3",
)
@pytest.mark.parametrize(("ranks", "microbatches"), [pytest.param(2, 5, marks=pytest.mark.variation), (4, 3)])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_one_process(name, ranks, microbatches):
    check_against_eager(CASES["unet"], microbatches, Shape(ranks, name))


def compiled(ranks=2, microbatches=4, depth=4, **options) -> fxpipe.Pipeline:
    torch.manual_seed(0)
    model, example = Chain(depth), numbers(2)
    with captured_once("chain", depth, microbatches):
        return fxpipe.compile(
            model, example, ranks=ranks, microbatches=microbatches, effort=EFFORT, **options
        )


# -- given by hand -------------------------------------------------------------------------------------

BY_HAND = """
F0.0 F0.1 B0.0 F0.2 W0.0 B0.1 B0.2 W0.1 W0.2
F1.0 B1.0 F1.1 W1.0 B1.1 F1.2 B1.2 W1.1 W1.2
"""


def check_loss(pipe: fxpipe.Pipeline, microbatches: int) -> None:
    torch.manual_seed(0)
    model, batch = Chain(4), numbers(2 * microbatches)
    expected = eager(model, batch, microbatches)
    result = pipe.run_local(batch)
    assert relative_error(result.loss, expected.loss) <= 1e-10
    assert all(relative_error(result.grads[n], g) <= 1e-10 for n, g in expected.grads.items())


def test_a_schedule_by_hand():
    given = Schedule("by-hand", (0, 1), 3, parse_order(BY_HAND))
    pipe = compiled(microbatches=3, schedule=given)
    assert pipe.schedule == given
    program = pipe.artifact.programs[0]
    assert load_program(program, "program").ops == tuple(BY_HAND.split("\n")[1].split())
    check_loss(pipe, 3)


def test_a_schedule_from_a_file(tmp_path: Path):
    file = tmp_path / "mine.txt"
    file.write_text(BY_HAND)
    pipe = compiled(microbatches=3, schedule=file)
    assert pipe.schedule == Schedule("mine", (0, 1), 3, parse_order(BY_HAND))


def test_a_schedule_of_torch(tmp_path: Path):
    file = tmp_path / "torch.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n")
    pipe = compiled(microbatches=2, schedule=file)
    assert pipe.schedule.order == parse_order("F0.0 F0.1 BW0.0 BW0.1\nF1.0 B1.0 W1.0 F1.1 BW1.1")
    check_loss(pipe, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 3}, "by-hand is for 2 ranks, and ranks is 3"),
        ({"microbatches": 4}, "by-hand is for 3 microbatches, and microbatches is 4"),
        ({"stages_per_rank": 1}, "is given whole: leave out stages_per_rank"),
        ({"placement": "v"}, "is given whole: leave out placement"),
        ({"memory_limit": "1GB"}, "is given whole: leave out memory_limit"),
    ],
)
def test_a_schedule_by_hand_that_does_not_go_with_the_rest(options, message):
    given = Schedule("by-hand", (0, 1), 3, parse_order(BY_HAND))
    with pytest.raises(OptionError, match=message):
        compiled(**{"microbatches": 3, "schedule": given, **options})


def test_a_schedule_that_cannot_progress():
    order = parse_order("F0.0 B0.0 W0.0 F0.1 B0.1 W0.1\nF1.1 B1.1 W1.1 F1.0 B1.0 W1.0")
    with pytest.raises(fxpipe.FxpipeError, match=r"rank 0, at B0\.0, waits for B1\.0 of rank 1"):
        compiled(microbatches=2, schedule=Schedule("crossed", (0, 1), 2, order))


# -- auto ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def automatic() -> fxpipe.Pipeline:
    with in_double_precision():
        return compiled(microbatches=4)


def test_auto_is_no_slower_than_what_it_tried(automatic):
    tried = automatic.plan.tried
    assert {a.stages_per_rank for a in tried} == {1, 2, 4}
    for stages in (2, 4):
        assert {a.placement for a in tried if a.stages_per_rank == stages} == {"plain", "v"}
    assert len({a.schedule for a in tried}) >= 8
    for name, stages_per_rank, placement in (
        ("gpipe", 1, "plain"),
        ("1f1b", 1, "plain"),
        ("interleaved", 2, "plain"),
        ("zb-h1", 1, "plain"),
        ("zb-h1", 2, "v"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Costing, "lighter", lambda *_: None)  # auto moves cuts of what it chose alone
            alone = compiled(schedule=name, stages_per_rank=stages_per_rank, placement=placement)
        assert automatic.simulate().seconds <= alone.simulate().seconds * (1 + 1e-9)
        setting = name, stages_per_rank, placement
        (seconds,) = (a.seconds for a in tried if (a.schedule, a.stages_per_rank, a.placement) == setting)
        assert seconds == pytest.approx(alone.simulate().seconds)
    check_loss(automatic, 4)


def test_auto_with_what_is_given():
    pipe = compiled(stages_per_rank=2, placement="v", schedule="auto")
    assert pipe.schedule.placement == (0, 1, 1, 0)
    assert {(a.stages_per_rank, a.placement) for a in pipe.plan.tried} == {(2, "v")}


def test_more_stages_do_not_win_by_nothing():
    """With ops of no time left, each further stage costs its overhead."""
    overhead = CPU.stage_overhead
    busy = {
        stages: sum(
            cost.total
            for cost in compiled(depth=6, schedule="1f1b", stages_per_rank=stages).plan.costs.stages
        )
        for stages in (1, 2, 3)
    }
    assert busy[2] - busy[1] == pytest.approx(3 * 2 * overhead)  # F, B and W of two stages more
    assert busy[3] - busy[2] == pytest.approx(3 * 2 * overhead)
    tried = compiled(depth=6, schedule="auto").plan.tried
    least = {n: min(a.seconds for a in tried if a.stages_per_rank == n and a.seconds) for n in (1, 2, 4)}
    assert least[1] < least[2] < least[4]


def test_auto_where_the_model_can_be_cut_into_few_stages_only():
    """Six at most, and two on each of four ranks would be eight."""
    pipe = compiled(ranks=4, depth=1, schedule="auto")
    assert {a.stages_per_rank for a in pipe.plan.tried} == {1}


def test_explain(automatic, tmp_path, capsys):
    automatic.save(tmp_path / "auto")
    assert main(["explain", str(tmp_path / "auto")]) == 0
    printed = capsys.readouterr().out
    assert f"Chain on 2 ranks, 4 microbatches: {automatic.schedule.name}, as its simulated step" in printed
    assert "1f1b" in printed
    assert "zb-h1" in printed


def test_explain_a_named_one(tmp_path, capsys):
    compiled(schedule="gpipe").save(tmp_path / "named")
    assert main(["explain", str(tmp_path / "named")]) == 0
    assert "gpipe, as it was asked for" in capsys.readouterr().out


def test_explain_nothing(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("fxpipe: error: ")


# -- the memory limit ----------------------------------------------------------------------------------


def held(pipe: fxpipe.Pipeline) -> list[int]:
    """Bytes of parameters and gradients of each rank."""
    size = {name: p.nbytes for name, p in pipe.parameters.items()}
    return [sum(size[n] for n in (*t.parameters, *t.gradients)) for t in pipe.plan.tensors]


@pytest.mark.in_ci("v-half")
@pytest.mark.parametrize("schedule", ["auto", "zb", "v-half"])
def test_the_limit_is_kept(schedule):
    free = compiled(ranks=4, microbatches=8, depth=12, schedule=schedule)
    limit = 0.8 * max(map(sum, zip(held(free), free.simulate().peak_memory, strict=True)))
    bound = compiled(ranks=4, microbatches=8, depth=12, schedule=schedule, memory_limit=limit)
    for weights, peak in zip(held(bound), bound.simulate().peak_memory, strict=True):
        assert weights + peak <= limit * (1 + 1e-9)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (100, "of rank . alone take"),
        ("16 XB", r"give a number of bytes above 0 or a text such as '16GiB' \(units: B, kB"),
        (0, "above 0"),
        (-5, "above 0"),
        ("GiB", "'GiB'"),
    ],
)
def test_limits_that_cannot_be(limit, message):
    with pytest.raises((OptionError, LimitError), match=message):
        compiled(schedule="auto", memory_limit=limit)


def test_a_limit_that_nothing_keeps_names_what_is_needed():
    pipe = compiled(schedule="1f1b")
    limit = max(held(pipe)) + 1
    with pytest.raises(ScheduleError, match=r"the smallest that one can keep is .*\(\d+ bytes\).*offload"):
        compiled(schedule="auto", memory_limit=limit, stages_per_rank=1)


def test_units_of_the_limit():
    from fxpipe.compiler.options import limit_of

    assert [limit_of(x) for x in ("16GiB", "1.5 kB", "2mb", 7, "8")] == [16 * 2**30, 1500.0, 2e6, 7.0, 8.0]


def test_a_v_placement_with_a_large_head_gets_a_cut_that_balances_ranks(monkeypatch):
    with torch.device("meta"):
        layers = [nn.Linear(512, 512) for _ in range(8)]
        model = nn.Sequential(*layers, nn.Linear(512, 2048))
        x = torch.empty(2048, 512)

    def found() -> fxpipe.Pipeline:
        return fxpipe.compile(
            model,
            (x,),
            loss_fn=lambda y, _: y.square().mean(),
            ranks=2,
            microbatches=4,
            placement="v",
            stages_per_rank=2,
            costs="H100",
            effort=0.01,
        )

    def work(pipe: fxpipe.Pipeline) -> list[float]:
        own = [0.0, 0.0]
        for rank, cost in zip(pipe.plan.placement, pipe.plan.costs.stages, strict=True):
            own[rank] += cost.total
        return own

    after = found()
    monkeypatch.setattr(Costing, "balanced", lambda *_: None)
    before = found()
    assert after.plan.prediction.seconds < 0.98 * before.plan.prediction.seconds
    assert max(work(after)) < 0.98 * max(work(before))
    assert min(row.seconds for row in after.plan.tried if row.seconds) == after.plan.prediction.seconds


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(640), nn.Linear(640, 2560), nn.Linear(2560, 640)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def test_a_cut_inside_an_mlp_moves_to_its_border_where_the_message_costs_more(monkeypatch):
    with torch.device("meta"):
        model, x = nn.Sequential(_Mlp(), _Mlp(), _Mlp()), torch.empty(128, 640)

    def found() -> tuple[float, int, float]:
        pipe = fxpipe.compile(
            model,
            (x,),
            loss_fn=lambda y, _: y.square().mean(),
            ranks=2,
            microbatches=2,
            schedule="1f1b",
            costs="L40S",
        )
        (section,) = (s for s in pipe.sections if (s.stage, s.phase) == (1, Phase.F))
        values = [v for v in section.inputs if v.kind is Kind.VALUE]
        return pipe.plan.prediction.seconds, len(values), pipe.plan.costs.edges[0].bytes

    after = found()
    monkeypatch.setattr(Costing, "lighter", lambda *_: None)
    before = found()
    rows = 8 * 128
    assert (before[1:], after[1:]) == ((2, rows * (640 + 2560)), (1, rows * 640))
    assert after[0] < 0.95 * before[0]


@pytest.mark.in_ci("widths0-zb-h1-plain-balanced", "widths2-zb-v-v-lighter")
@pytest.mark.parametrize("step", ["balanced", "lighter"])
@pytest.mark.parametrize(
    ("widths", "schedule", "placement"),
    [
        ((64, 2560, 64, 640, 640, 1280), "zb-h1", "plain"),
        ((640, 640, 2560, 2560, 640), "1f1b-v", "v"),
        ((640, 2560, 5120, 640, 1280, 2560), "zb-v", "v"),
    ],
)
def test_other_cuts_make_no_step_slower(step, widths, schedule, placement, monkeypatch):
    """In the last two cases, balanced ranks have a slower schedule, which is not taken."""
    with torch.device("meta"):
        layers = [nn.Linear(a, b, dtype=torch.float32) for a, b in pairwise((640, *widths))]
        model, x = (
            nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU()))),
            torch.empty(256, 640, dtype=torch.float32),
        )

    def seconds() -> float:
        pipe = fxpipe.compile(
            model,
            (x,),
            loss_fn=lambda y, _: y.square().mean(),
            ranks=2,
            microbatches=3,
            schedule=schedule,
            placement=placement,
            costs="L40S",
            effort=0.01,
        )
        assert pipe.plan.prediction.seconds == pytest.approx(pipe.simulate().seconds)
        return pipe.plan.prediction.seconds

    after = seconds()
    monkeypatch.setattr(Costing, step, lambda *_: None)
    assert after <= seconds() * (1 + 1e-9)
