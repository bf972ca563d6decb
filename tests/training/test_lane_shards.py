"""What lanes have alike, divided over them and the replicas (ZeRO), trains as one process does."""

from __future__ import annotations

import copy
import sys
from math import prod
from pathlib import Path

import pytest
import torch
from launch import forked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from zoo import relative_error

import fxpipe
from fxpipe.errors import RunError
from fxpipe.plan.lanes import LaneAxis, LaneGroup, LanePlan
from fxpipe.plan.rows import ShardName
from fxpipe.runtime.ranks.replicas import DistributedReplicas

sys.path.append(str(Path(__file__).parent.parent / "integrations"))
from test_context import Decoder
from test_context_beside_tensor import PLAN, WORDS

STEPS, CLIP, M = 3, 0.4, 2
#: replicas, ranks, lanes of sequences, lanes of layers; options
SETTINGS = {
    "state": ((1, 1, 4, 1), {"shard": "optimizer"}),
    "gradients": ((2, 1, 2, 1), {"shard": "gradients", "validation": "post"}),
    "parameters": ((1, 1, 2, 2), {"shard": "parameters", "frozen": True}),
    "for each use": ((1, 1, 4, 1), {"shard": "parameters", "memory_limit": 130_000}),
    "vocabulary": ((1, 2, 2, 1), {"shard": "optimizer", "vocab_parallel": True, "schedule": "zb-h1"}),
    "whole matrices": ((2, 1, 2, 1), {"shard": "gradients", "undivided": ["blocks.*.weight"]}),
}
#: Those that are tried together, and where each goes on from the checkpoint behind the first step.
RUNS = [
    (["gradients", "parameters"], {"gradients": "for each use"}),
    pytest.param(
        [*SETTINGS],
        {"for each use": "gradients", "state": "vocabulary", "vocabulary": "for each use"},
        marks=pytest.mark.variation,
    ),
]


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(WORDS, (8, 16), generator=generator) for _ in range(STEPS)]
    return [{"ids": each, "labels": each.roll(-1, 1).index_fill(1, torch.arange(3), -100)} for each in ids]


def made(frozen: bool = False) -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and ("blocks.0" in name or "norm" in name)))
    return model


def plain(frozen: bool, matrices: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the last weights of one process."""
    model, losses = made(frozen), []
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_muon = [p for name, p in trained.items() if matrices and is_matrix(name, p)]
    optimizers = [
        torch.optim.AdamW([p for p in trained.values() if not any(p is q for q in by_muon)], lr=1e-2)
    ]
    if by_muon:
        optimizers.append(torch.optim.Muon(by_muon, lr=1e-2))
    for batch in batches():
        loss = model(**batch)["loss"]
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return name.startswith("blocks.") and name.endswith(".weight") and parameter.dim() == 2


def compiled(name: str) -> tuple[fxpipe.Pipeline, fxpipe.PipelineOptimizer]:
    (replicas, ranks, *lanes), options = SETTINGS[name]
    options = dict(options)
    validation, model = options.pop("validation", "barrier"), made(options.pop("frozen", False))
    whole = copy.deepcopy(model.state_dict())
    with torch.no_grad():  # compile gives all lanes the values of the first
        for parameter in model.parameters():
            parameter.add_(torch.distributed.get_rank())
    sizes = (replicas, ranks, *lanes) if lanes[1] > 1 else (replicas, ranks, lanes[0])
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "cp", "tp")[: len(sizes)])
    along = mesh["cp", "tp"] if lanes[1] > 1 else mesh["cp"]
    parallelize_module(
        model, along, fxpipe.ContextParallel({"ids": 1}, tensor=PLAN if lanes[1] > 1 else None)
    )
    rows = 8 // replicas // M
    example = {key: value[:rows] for key, value in batches()[0].items()}
    options = {"schedule": "gpipe", "loss_fn": lambda output, _: output["loss"]} | options
    pipe = fxpipe.compile(model, example, ranks=mesh, microbatches=M, **options)
    pipe.load_state_dict(whole)
    groups = {}
    if "undivided" in options:
        matrices = [n for n, p in made().named_parameters() if is_matrix(n, p)]
        groups = {"groups": [{"params": matrices, "class": torch.optim.Muon, "lr": 1e-2}]}
    optimizer = pipe.optimizer(
        torch.optim.AdamW, lr=1e-2, clip_grad_norm=CLIP, validation=validation, **groups
    )
    return pipe, optimizer


def trained(pipe, optimizer, last: int) -> list[float]:
    losses = []
    for batch in batches()[pipe.step_number : last]:
        rows = 8 // pipe.replicas
        own = slice(pipe.replica * rows, (pipe.replica + 1) * rows)
        losses.append(pipe.step({key: value[own] for key, value in batch.items()}).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(name: str, losses: list[float], state: dict[str, torch.Tensor]) -> None:
    expected, weights = plain("frozen" in SETTINGS[name][1], "undivided" in SETTINGS[name][1])
    assert losses == pytest.approx(expected[STEPS - len(losses) :], rel=1e-13), (name, losses, expected)
    assert max(relative_error(state[key], value) for key, value in weights.items()) < 1e-12


def run(directory: Path, names: list[str], goes_on: dict[str, str]) -> None:
    torch.distributed.init_process_group("gloo")
    for name in names:
        pipe, optimizer = compiled(name)
        (replicas, _, sequences, _), options = SETTINGS[name]
        of_rank = pipe.plan.tensors[pipe.process.rank].gradients
        share = sum(prod(pipe.plan.layouts[each].shape) for each in of_rank) / (replicas * sequences)
        owned = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        assert owned < (1.5 if "undivided" in options else 1.1) * share, name
        losses = trained(pipe, optimizer, 1)
        if name in goes_on:
            with fxpipe.Checkpointer(pipe, directory / name, optimizer=optimizer) as checkpoints:
                checkpoints.save()
        check(name, losses + trained(pipe, optimizer, STEPS), pipe.full_state_dict(rank=None))
    for name, other in goes_on.items():
        pipe, optimizer = compiled(other)
        with fxpipe.Checkpointer(pipe, directory / name, optimizer=optimizer) as checkpoints:
            assert checkpoints.resume()
        check(other, trained(pipe, optimizer, STEPS), pipe.full_state_dict(rank=None))
    print("equal")


@pytest.mark.variation
@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="its DTensors do not flatten divided tokens")
@pytest.mark.parametrize(("names", "goes_on"), RUNS, ids=str)
def test_what_lanes_have_alike_is_divided_and_trains_as_one_process(tmp_path, names, goes_on):
    result = forked(4, run, tmp_path, names, goes_on, dtype=torch.float64, logs=tmp_path / "logs")
    assert result.code == 0, result
    assert all("equal" in out for out in result.stdout)


@pytest.mark.usefixtures("double")
@pytest.mark.skipif(torch.__version__ < "2.12", reason="its DTensors do not flatten divided tokens")
@pytest.mark.parametrize(
    "shard",
    [
        "parameters",
        *(pytest.param(level, marks=pytest.mark.variation) for level in ("optimizer", "gradients")),
    ],
)
def test_in_one_process_the_bits_are_those_without_shards(shard):
    def compiled(**options: str) -> fxpipe.Pipeline:
        model, example = made(), {key: value[:2] for key, value in batches()[0].items()}
        whole = copy.deepcopy(model.state_dict())
        with fxpipe.local_lanes((2, 2), names=("cp", "tp")) as mesh:
            parallelize_module(model, mesh, fxpipe.ContextParallel({"ids": 1}, tensor=PLAN))
            options = {"schedule": "1f1b", "replicas": 2, "loss_fn": lambda out, _: out["loss"]} | options
            pipe = fxpipe.compile(model, example, ranks=1, microbatches=M, **options)
        pipe.load_state_dict(whole)
        return pipe

    expected = compiled().run_local(batches()[0])
    found = compiled(shard=shard).run_local(batches()[0])
    assert found.loss.equal(expected.loss)
    assert found.grads.keys() == expected.grads.keys()
    assert all(found.grads[name].equal(grad) for name, grad in expected.grads.items())
    assert {bucket.division.lanes for bucket in found.runtimes[0].buckets} >= {LaneGroup(2, 2)}


def test_the_only_replica_keeps_buffers_of_its_own():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("steps", torch.zeros(()), persistent=False)

        def forward(self, x):
            self.steps += 1
            return self.layer(x).square().mean()

    pipe = fxpipe.compile(Counts(), (torch.ones(2, 4),), ranks=1, microbatches=1)
    rt = pipe.runtime
    rt.buffers = {"steps": torch.ones(())}
    rt.replicas = DistributedReplicas.alone(torch.device("cpu"))
    pipe.model_state.follow_first_replica(rt)  # an error with several
    rt.replicas.number = 2
    with pytest.raises(RunError, match="steps"):
        pipe.model_state.follow_first_replica(rt)


def test_the_lanes_that_divide_parameters():
    """Those along which gradients are summed; else all that have the same, or the most of them."""
    columns = LaneAxis(2, {"up": 0, "both": 0}, ("norm",))
    lanes = LanePlan((LaneAxis(3, {"both": 1}, ("up",)), columns))
    along, across, everyone = LaneGroup(3, 2), LaneGroup(2), LaneGroup(6)
    expected = {"up": along, "norm": across, "bias": everyone, "both": LaneGroup(1)}
    assert {name: lanes.dividing([ShardName(name)]) for name in expected} == expected
    # A bucket of an earlier version may have several kinds.
    assert lanes.dividing([ShardName("up"), ShardName("bias")]) == LaneGroup(1)
    assert lanes.dividing([ShardName("up[0:4]"), ShardName("up[4:8]")]) == along
    assert LanePlan().dividing([ShardName("up")]) == LaneGroup(1)


def test_the_first_process_with_each_share():
    """Two replicas of one rank with 2 x 2 lanes: rows of a tensor that the second dimension shares out."""
    lanes = LanePlan((LaneAxis(2), LaneAxis(2, {"up": 0})))
    assert lanes.firsts("up", range(8)) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert lanes.firsts("up", [6, 7]) == {0: 6, 1: 7, 2: 6, 3: 7}
    assert lanes.firsts("norm", [5, 6]) == dict.fromkeys(range(4), 5)
    assert lanes.firsts("up", [5]) == {1: 5, 3: 5}
