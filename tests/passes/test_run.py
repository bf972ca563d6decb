"""The list of passes: complete, each name once, and only enabled ones run."""

import pkgutil
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import passes
from fxpipe.capture.trace import capture
from fxpipe.compiler import cut as run
from fxpipe.compiler.cut import PASSES, CutOptions, Step
from fxpipe.compiler.progress import Phases
from fxpipe.cost.analytic import analytic_seconds, seconds_on, section_costs
from fxpipe.cost.cluster import Cluster
from fxpipe.cost.known_devices import CPU
from fxpipe.cost.nodes import NodeSeconds
from fxpipe.ir.liveness import liveness
from fxpipe.ir.storage import call_nodes
from tests.models import gpt2, words

HELPERS = {"run", "mincut", "rewrite"}


def test_every_rewrite_is_on_the_list():
    names = [each.name for each in PASSES]
    assert len(set(names)) == len(names)
    modules = {module.name for module in pkgutil.iter_modules(passes.__path__)} - HELPERS
    used = {getattr(value, "__module__", "").rpartition(".")[2] for value in vars(run).values()}
    assert modules <= used
    assert len(names) == len(modules) + 2  # the vocabulary and the partition have rooms of their own


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({}, set()),
        ({"recompute": "full"}, {"recompute"}),
        ({"offload": fxpipe.Offload(bandwidth=1e12)}, {"offload"}),
    ],
)
def test_optional_passes_run_where_they_are_asked_for(options, extra, monkeypatch):
    monkeypatch.setattr("fxpipe.ir.liveness.SMALLEST", 1)
    verified = []

    def verify(graph, after):
        verified.append(after)
        assert call_nodes(graph)

    monkeypatch.setattr(run, "verify", verify)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    fxpipe.compile(
        model,
        (torch.randn(2, 4),),
        ranks=1,
        microbatches=4,
        schedule="gpipe",
        loss_fn=lambda y, x: y.square().sum(),
        **options,
    )
    optional = {"vocabulary", "recompute", "offload"}
    assert verified == [each.name for each in PASSES if each.name not in optional or each.name in extra]


class Scattered(nn.Module):
    """Sums rows by index: an op that moves fewer bytes in place."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, index):
        h = self.first(x).relu()
        return self.last(torch.zeros_like(h).index_add(0, index, h)).square().mean()


CASES = {
    "gpt2": (gpt2, lambda: words(2), {"barriers": 1}, "fuse_accumulation"),
    "index_add": (
        Scattered,
        lambda: {"x": torch.randn(256, 64), "index": torch.arange(256)},
        {"barriers": None},
        "use_inplace_ops",
    ),
}


def cluster():
    return Cluster((CPU, CPU))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_costs_do_not_depend_on_the_passes_that_only_the_chosen_cut_goes_through(name):
    build, example, options, last = CASES[name]
    captured = capture(build(), example(), None, 1.0, torch.device("cpu"))
    seconds = NodeSeconds(CPU)
    asked = CutOptions(2, 2, seconds, None, **options)
    stages = run.stages_of(run.split(Step(captured.graph, None), asked), asked, Phases(""))
    for level in (None, "norms", "full"):
        cut = run.cut(stages, level, Phases(""))
        ranks = (0, 1) if cut.vocabulary is None else cut.vocabulary.placement((0, 1))

        def costs(cut, ranks=ranks):
            live = liveness(cut.graph, cut.sections, cut.edges, ranks)
            return section_costs(live, seconds_on(cluster(), cut.graph), cluster(), ranks)

        assert cut.last_pass == last
        before = costs(cut)
        targets = [node.target for node in call_nodes(cut.graph)]
        live = liveness(cut.graph, cut.sections, cut.edges, ranks)
        cached = (analytic_seconds(cut.graph, seconds),) * 2
        assert before == section_costs(live, cached, cluster(), ranks)
        done = run.finished(cut, {})
        after = costs(done)
        assert replace(after, stages=()) == replace(before, stages=())
        for stage, as_before in zip(after.stages, before.stages, strict=True):  # but for the order of sums
            assert astuple(stage) == pytest.approx(astuple(as_before), rel=1e-12)
        if last == "fuse_accumulation":
            assert [node.target for node in call_nodes(done.graph)] != targets


@pytest.mark.parametrize("barriers", [None, 1, 2])
def test_recomputation_adds_work_to_each_stage(barriers):
    """``choose`` rewrites a cut for a level of recomputation only where the cut without it could win."""
    captured = capture(gpt2(), words(2), None, 1.0, torch.device("cpu"))
    seconds = NodeSeconds(CPU)
    asked = CutOptions(2, 2, seconds, None, barriers)
    stages = run.stages_of(run.split(Step(captured.graph, None), asked), asked, Phases(""))

    def work(level):
        found = {}
        for color, taken in analytic_seconds(run.cut(stages, level, Phases("")).graph, seconds).items():
            found[color.stage] = found.get(color.stage, 0.0) + taken
        return found

    without = work(None)
    for level in (work("norms"), work("full")):
        assert all(level[stage] >= taken * (1 - 1e-9) for stage, taken in without.items())
        assert sum(level.values()) > 1.01 * sum(without.values())


def test_phases_within_phases_count_once(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 4.0, 8.0, 10.0])
    monkeypatch.setattr("fxpipe.compiler.progress.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    phase = Phases("")
    with phase("outer"):
        for _ in range(2):
            with phase("inner"):
                pass
    assert phase.seconds == {"inner": 6.0, "outer": 4.0}
