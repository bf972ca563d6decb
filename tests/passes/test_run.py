"""The list of passes: complete, each name once, each runs where it stands; the graph printed after one."""

import pkgutil
from contextlib import suppress
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

import fxpipe
from fxpipe import passes
from fxpipe.capture.trace import capture
from fxpipe.compiler import passes as listed
from fxpipe.compiler.choice import cut as run
from fxpipe.compiler.passes import PASS_NAMES, PASSES, CutOptions, Pass, Passes, StepGraphs, run_passes
from fxpipe.compiler.progress import Phases
from fxpipe.cost.analytic import analytic_seconds, seconds_on, section_costs
from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.devices.known_devices import CPU
from fxpipe.cost.nodes import NodeSeconds
from fxpipe.errors import OptionError, PartitionError, VerifyError
from fxpipe.ir.graph import Input, Kind, Origin, Outputs
from fxpipe.ir.liveness import liveness
from fxpipe.ir.storage import call_nodes
from fxpipe.ir.verify import verify
from fxpipe.schedule.ops import Color, Phase
from tests.models import gpt2, words

HELPERS = {"identities", "max_flow", "mincut", "rewrite"}


def test_every_rewrite_is_on_the_list():
    assert len(set(PASS_NAMES)) == len(PASS_NAMES)
    files = pkgutil.walk_packages(passes.__path__, f"{passes.__name__}.")
    modules = {each.name.rpartition(".")[2] for each in files if not each.ispkg} - HELPERS
    used = {getattr(value, "__module__", "").rpartition(".")[2] for value in vars(listed).values()}
    assert modules <= used
    assert len(PASS_NAMES) == len(modules) + 4  # the partition and three of the vocabulary are elsewhere


def compiled(**options):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    given = {"ranks": 1, "microbatches": 4, "schedule": "gpipe", "loss_fn": lambda y, x: y.square().sum()}
    return fxpipe.compile(model, (torch.randn(2, 4),), **given | options)


@pytest.mark.parametrize("costs", ["analytic", "measured"])
def test_a_pass_runs_once_at_any_place_of_the_list(costs, monkeypatch):
    ran = []

    def noting(group, k):
        return Pass(f"{group} {k}", lambda step, options: ran.append(f"{group} {k}"))

    def with_more(group, own):
        first, *rest = own
        return (noting(group, 0), first, noting(group, 1), *rest, noting(group, 2))

    more = Passes(*(with_more(group, own) for group, own in PASSES._asdict().items()))
    monkeypatch.setattr(run, "PASSES", more)
    monkeypatch.setattr(listed, "verify", lambda graph, after, colored: None)
    compiled(costs=costs)
    *groups, scheduled = PASSES._fields
    for_costs = groups[-1:] if costs == "measured" else []  # on a copy
    assert ran == [f"{group} {k}" for group in (*groups, *for_costs, scheduled) for k in range(3)]


def test_the_graph_after_a_pass_is_printed(capsys):
    compiled(print_after="split_backward")
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "After split_backward, stages: 1"
    assert '    _0 = batch["0"] : f32[2, 4]' in lines
    assert "F0  model_0_t = t(_0_weight) : f32[4, 4]" in lines
    with pytest.raises(OptionError, match=f"print_after is 'unite' and .*: {', '.join(PASS_NAMES)}"):
        compiled(print_after="unite")


class Scattered(nn.Module):
    """Sums rows by index: an op that moves fewer bytes in place."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, index):
        h = self.first(x).relu()
        return self.last(torch.zeros_like(h).index_add(0, index, h)).square().mean()


CASES = {
    "gpt2": (gpt2, lambda: words(2), {"barriers": 1}, False),
    "index_add": (
        Scattered,
        lambda: {"x": torch.randn(256, 64), "index": torch.arange(256)},
        {"barriers": None},
        True,
    ),
}


def cluster():
    return Cluster((CPU, CPU))


@pytest.mark.in_ci("index_add")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_costs_do_not_depend_on_the_passes_that_only_the_chosen_cut_goes_through(name):
    build, example, options, depend = CASES[name]
    captured = capture(build(), example(), None, 1.0, torch.device("cpu"))
    seconds = NodeSeconds(CPU)
    asked = CutOptions(2, 2, seconds, None, **options)
    stages = run.stages_of(run.split(StepGraphs(captured.graph, None), asked), asked, Phases(""))
    for level in (None, "norms", "full"):
        cut = run.cut(stages, level, Phases(""))
        ranks = (0, 1) if cut.step.vocabulary is None else cut.step.vocabulary.placement((0, 1))

        def costs(cut, ranks=ranks):
            live = liveness(cut.graph, cut.sections, cut.edges, ranks)
            return section_costs(live, seconds_on(cluster(), cut.graph), cluster(), ranks)

        assert (cut.graph is not cut.before_chosen) == depend
        before = costs(cut)
        targets = [node.target for node in call_nodes(cut.graph)]
        live = liveness(cut.graph, cut.sections, cut.edges, ranks)
        cached = (analytic_seconds(cut.graph, seconds),) * 2
        assert before == section_costs(live, cached, cluster(), ranks)
        done = run.finished(cut, frozenset(), {})
        after = costs(done)
        assert replace(after, stages=()) == replace(before, stages=())
        for stage, as_before in zip(after.stages, before.stages, strict=True):  # but for the order of sums
            assert astuple(stage) == pytest.approx(astuple(as_before), rel=1e-12)
        if not depend:
            assert [node.target for node in call_nodes(done.graph)] != targets


@pytest.mark.in_ci("1")
@pytest.mark.slow
@pytest.mark.parametrize("barriers", [None, 1, 2])
def test_recomputation_adds_work_to_each_stage(barriers):
    """``choose`` rewrites a cut for a level of recomputation only where the cut without it could win."""
    captured = capture(gpt2(), words(2), None, 1.0, torch.device("cpu"))
    seconds = NodeSeconds(CPU)
    asked = CutOptions(2, 2, seconds, None, barriers)
    stages = run.stages_of(run.split(StepGraphs(captured.graph, None), asked), asked, Phases(""))

    def work(level):
        found = {}
        for color, taken in analytic_seconds(run.cut(stages, level, Phases("")).graph, seconds).items():
            found[color.stage] = found.get(color.stage, 0.0) + taken
        return found

    without = work(None)
    for level in (work("norms"), work("full")):
        assert all(level[stage] >= taken * (1 - 1e-9) for stage, taken in without.items())
        assert sum(level.values()) > 1.01 * sum(without.values())


def test_a_graph_without_colors_is_verified():
    """As after each pass of ``captured``."""

    def graph(op=torch.ops.aten.exp.default):
        new = fx.Graph()
        x = new.placeholder("x")
        node = new.call_function(op, (x,))
        node.meta.update(val=torch.ones(2), origin=Origin())
        new.output(Outputs(node, None, {}, {}, {}))
        return new, node

    verify(graph()[0], "a pass", colored=False)
    for key in ("val", "origin"):
        new, node = graph()
        del node.meta[key]
        with pytest.raises(VerifyError, match=f"After a pass: exp_default has no {key}"):
            verify(new, "a pass", colored=False)
    with pytest.raises(VerifyError, match="has no color"):
        verify(graph()[0], "a pass")
    with pytest.raises(VerifyError, match=r"exp__default \(aten.exp_.default\) writes to an argument"):
        verify(graph(torch.ops.aten.exp_.default)[0], "a pass", colored=False)


def test_the_pass_that_breaks_a_graph_is_found(capsys):
    """The error names the passes since the last check; ``print_after`` adds a check."""

    def color(step, options):
        for node in step.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default):
            node.meta["color"] = Color(0, Phase.F)

    def forget(step, options):
        for node in step.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default):
            del node.meta["origin"]

    nothing = Pass("nothing", lambda step, options: None)
    group = (Pass("color", color), Pass("forget", forget), nothing)
    for printed, last in ((None, "nothing"), ("color", "nothing"), ("forget", "forget")):
        new = fx.Graph()
        x = new.placeholder("x")
        x.meta.update(input=Input(Kind.BATCH, "x"), val=torch.ones(2), origin=Origin())
        node = new.call_function(torch.ops.aten.exp.default, (x,))
        node.meta.update(val=torch.ones(2), origin=Origin())
        new.output(Outputs(node, None, {}, {}, {}))
        options = CutOptions(1, 1, NodeSeconds(CPU), None, None, print_after=printed)
        with pytest.raises(VerifyError, match=f"After color … {last}: exp_default has no origin"):
            run_passes(group, StepGraphs(new, None), options)
        assert ("After color, stages: 1" in capsys.readouterr().out) == (printed == "color")


def test_phases_within_phases_count_once(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 4.0, 8.0, 10.0])
    monkeypatch.setattr("fxpipe.compiler.progress.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    phase = Phases("")
    with phase("outer"):
        for _ in range(2):
            with phase("inner"):
                pass
    assert phase.seconds == {"inner": 6.0, "outer": 4.0}


def test_phases_that_fail_within_phases_count_once(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 4.0, 8.0, 10.0])
    monkeypatch.setattr("fxpipe.compiler.progress.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    phase = Phases("")
    with phase("outer"):
        with phase("inner"):
            pass
        with suppress(PartitionError), phase("inner"):
            raise PartitionError("as of a candidate")
    assert phase.seconds == {"inner": 6.0, "outer": 4.0}
