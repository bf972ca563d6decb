"""The list of passes: complete, each name once, and only enabled ones run."""

import pkgutil

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe import passes
from fxpipe.ir.storage import call_nodes
from fxpipe.passes import run
from fxpipe.passes.run import PASSES

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
