"""Replicas of a pipeline train as one pipeline that takes all of their microbatches."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import replicas_worker as worker
import torch
from launch import forked
from marks import slow_except, with_variations
from replicas_worker import CASES, MICROBATCHES, RANKS, REPLICAS, Case
from safetensors.torch import load_file
from torch import nn
from zoo import relative_error

import fxpipe
from fxpipe.errors import OptionError, RunError
from fxpipe.plan.artifact import Bucket, TensorLayout
from fxpipe.plan.rows import ShardName
from fxpipe.training.model.shards import divide, owned

LIMIT = 1e-12
NEEDS_DIVIDED_TOKENS = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="its DTensors do not flatten divided tokens"
)
PROCESSES = RANKS * REPLICAS


#: Each of their options is another case's as well.
VARIATIONS = (
    "optimizer", "gradients", "parameters", "counts, optimizer", "counts, parameters",
    "undivided, parameters", "half",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory) -> Path:
    """Of the cases whose tests run, in one launch."""
    directory = tmp_path_factory.mktemp("replicas")
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {item.callspec.params.get("name") for item in here} | {worker.FROZEN_EACH_USE}
    asked = [name for name in CASES if name in names], directory
    run = forked(PROCESSES, worker.train, *asked, dtype=torch.float64, logs=directory / "logs")
    assert run.code == 0, str(run)
    return directory


@pytest.fixture(scope="module")
def alone() -> Callable[[Case], dict[str, torch.Tensor]]:
    """What one rank gets in this process, once for the cases that differ in their mesh alone."""
    known: list[tuple[Case, dict[str, torch.Tensor]]] = []

    def trained(case: Case) -> dict[str, torch.Tensor]:
        asked = worker.of_one_rank(case)
        for other, values in known:
            if other == asked:
                return values
        known.append((asked, worker.trained_on_one_rank(asked)))
        return known[-1][1]

    return trained


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", with_variations(CASES, VARIATIONS))
def test_replicas_train_as_one_pipeline(runs, alone, name):
    case = CASES[name]
    expected = alone(case)
    limit = LIMIT if case.dtype == torch.float64 else 2e-2
    for process in range(PROCESSES):
        found = load_file(runs / f"{name} {process}")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if "running" in key or "num_batches" in key or key in ("evaluated", "first mean"):
                continue  # below
            assert relative_error(found[key].double(), value.double()) < limit, (process, key)


@pytest.mark.in_ci("False")
@pytest.mark.slow
@pytest.mark.parametrize("on_lanes", [False, pytest.param(True, marks=NEEDS_DIVIDED_TOKENS)])
def test_the_memory_between_steps_is_that_of_each_level(tmp_path, on_lanes):
    levels = ["parameters"] if on_lanes else [*worker.RESIDENT]
    measure = worker.measure_resident, levels, on_lanes
    run = forked(2, *measure, dtype=torch.float32, logs=tmp_path / "logs")
    assert run.code == 0, str(run)


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_frozen_layers_that_replicas_divide_train_as_eager(runs):
    case = CASES[worker.FROZEN_EACH_USE]
    model, found = case.made(), load_file(runs / f"{worker.FROZEN_EACH_USE} 3")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=worker.OPTIONS["lr"])
    for step, batch in enumerate(case.batches()):
        loss = model(**batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, worker.OPTIONS["clip_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        assert relative_error(found[f"loss {step}"], loss) < LIMIT
        assert relative_error(found[f"norm {step}"], norm) < LIMIT
    for name, value in model.state_dict().items():
        assert relative_error(found[name], value) < LIMIT


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", ["batch norm", "parameters, evaluation"])
def test_buffers_are_those_of_the_first_replica(runs, name):
    """As DistributedDataParallel has them: after one step, what replica 0 has seen of it."""
    found = [load_file(runs / f"{name} {process}") for process in range(PROCESSES)]
    case = CASES[name]
    model = case.made()
    for x in case.batches()[0]["x"][: worker.ROWS * MICROBATCHES].split(worker.ROWS):
        model.layers(x)
    assert relative_error(found[0]["first mean"], model.layers[1].running_mean) < LIMIT
    assert int(found[0]["layers.1.num_batches_tracked"]) == worker.STEPS * MICROBATCHES
    assert all(own.keys() == found[0].keys() for own in found)
    assert all(torch.equal(own[key], value) for own in found for key, value in found[0].items())


@pytest.mark.parametrize("schedule", slow_except(["zb-h1", "1f1b", "interleaved", "zb-v"], "1f1b"))
@pytest.mark.usefixtures("double")
def test_the_gradients_of_replicas_in_one_process(schedule):
    case = Case(worker.Tied, options={"schedule": schedule, "shard": "optimizer"})
    model, batch = case.made(), case.batches()[0]
    alone = case.compiled(model, 1).run_local(batch)
    found = case.compiled(model, REPLICAS).run_local(batch)
    assert relative_error(found.loss, alone.loss) < LIMIT
    assert found.grads.keys() == alone.grads.keys()
    for name, grad in alone.grads.items():
        assert relative_error(found.grads[name], grad) < LIMIT, name


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["gradients", "counts, parameters", worker.EACH_USE], "gradients", variations=["counts, parameters"]
    ),
)
@pytest.mark.usefixtures("double")
def test_in_one_process_shards_give_the_same_bits(name):
    case = CASES[name]
    model, batch = case.made(), case.batches()[0]
    whole = replace(
        case, options={n: x for n, x in case.options.items() if n not in ("shard", "memory_limit")}
    )
    pipe, undivided = case.compiled(model, REPLICAS), whole.compiled(model, REPLICAS)
    found, expected = pipe.run_local(batch), undivided.run_local(batch)
    assert found.loss.equal(expected.loss)
    assert found.grads.keys() == expected.grads.keys()
    assert all(found.grads[n].equal(grad) for n, grad in expected.grads.items())
    owned = found.runtimes[0].buckets[0]
    assert 0 < owned.summed.numel() < owned.division.size
    # A step whose memory is measured has activations alone.
    saved = [each.run_local(batch, measure_memory=True).peak_saved for each in (pipe, undivided)]
    assert saved[0] == saved[1]


@pytest.mark.usefixtures("double")
def test_rows_of_others_are_not_there_before_they_are_gathered():
    case = CASES["optimizer"]
    pipe, batch = case.compiled(case.made(), REPLICAS), case.batches()[0]
    programs = [re.sub(r"rt\.wait_parameters\(\d+\); ", "", program) for program in pipe.artifact.programs]
    edited = replace(pipe, artifact=replace(pipe.artifact, programs=tuple(programs)))
    assert edited.run_local(batch).loss.isnan()


@pytest.mark.usefixtures("double")
def test_other_keys_for_each_replica():
    """With the keys of the first replica on both, dropout would drop the same values of other rows."""
    case = Case(worker.Tied)
    pipe, batch = case.compiled(case.made(), REPLICAS), case.batches()[0]
    keys = [rt.key(0) for rt in pipe.run_local(batch).runtimes]
    assert keys[0] == keys[1] != keys[RANKS] == keys[RANKS + 1]


def test_the_number_of_another_bucket_is_an_error():
    """Python would take the last bucket for -1, and a sum of frozen parameters would be one of zeros."""
    case = Case(worker.Tied)
    rt = case.compiled(case.made(), REPLICAS).run_local(case.batches()[0]).runtimes[0]
    for number in (-1, len(rt.buckets)):
        with pytest.raises(RunError, match=f"the bucket {number} of {len(rt.buckets)}"):
            rt.reduce_gradients(number)
    rt.buckets[0].is_frozen = True
    with pytest.raises(RunError, match="no gradients to sum"):
        rt.reduce_gradients(0)


def test_shards_are_of_whole_rows():
    layouts = {
        "a": TensorLayout((6, 4), (4, 1), "torch.float32"),
        "b": TensorLayout((), (), "torch.float32"),
        "c[8:12]": TensorLayout((4, 2), (2, 1), "torch.float32"),
        "across": TensorLayout((3, 3), (1, 3), "torch.float32"),
    }
    division = divide([*map(ShardName, layouts)], layouts, 3)
    assert division.begins == (0, 16, 29, 42)
    names = [[piece.name for piece in own] for own in division.pieces]
    assert names == [["a[0:4]"], ["a[4:6]", "b", "c[8:10]"], ["c[10:12]", "across"]]
    assert [(p.begin, p.end) for p in division.pieces[1]] == [(16, 24), (24, 25), (25, 29)]


def test_more_replicas_than_rows():
    layouts = {
        "a": TensorLayout((2, 8), (8, 1), "torch.float32"),
        "none": TensorLayout((0,), (1,), "torch.float32"),
    }
    division = divide([*map(ShardName, layouts)], layouts, 4)
    names = [piece.name for own in division.pieces for piece in own]
    assert sorted(names) == ["a[0:1]", "a[1:2]", "none"]


def test_a_bucket_of_empty_tensors_behind_buckets_that_owners_share_alike():
    layouts = {"none": TensorLayout((0, 4), (4, 1), "torch.float32")}
    division = divide([ShardName("none")], layouts, 2, {"none"}, [8, 8])
    assert division.begins == (0, 0, 0)
    assert [piece.name for own in division.pieces for piece in own] == ["none"]


def test_undivided_parameters_are_spread_over_the_replicas():
    """Of each bucket, and over all buckets of a rank; a parameter that two ranks have is divided alike."""
    matrix = TensorLayout((6, 4), (4, 1), "torch.float32")
    layouts = dict.fromkeys(["a", "b", "c", "d", "e", "tied"], matrix)
    division = divide([*map(ShardName, "abcde")], layouts, 2, {"a", "b", "d", "e"})
    names = [[piece.name for piece in own] for own in division.pieces]
    assert names == [["a", "b", "c[0:3]"], ["c[3:6]", "d", "e"]]

    def compiled(undivided):
        return fxpipe.compile(
            nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)]),
            {"input": torch.ones(2, 8)},
            loss_fn=lambda y, _: y.square().mean(),
            **{"ranks": 1, "replicas": 3, "microbatches": 2, "schedule": "1f1b"},
            shard="optimizer",
            undivided=undivided,
        )

    pipe = compiled(["*.weight"])
    (tensors,) = pipe.plan.tensors
    assert pipe.plan.undivided == tuple(f"{k}.weight" for k in range(6))
    apart = replace(tensors, buckets=tuple(Bucket("F0.0", "B0.0", (name,)) for name in tensors.gradients))
    for own in (tensors, apart):
        replicas = owned(replace(pipe.plan, tensors=(own,)), 3)
        assert all(sum(name.endswith("weight") for name in each.gradients) == 2 for each in replicas)
        assert sorted({name.tensor for each in replicas for name in each.gradients}) == sorted(own.gradients)
    two = replace(
        pipe.plan, tensors=(apart, replace(apart, buckets=apart.buckets[::-1])), undivided=("0.weight",)
    )
    whole = [each.gradients for each in owned(two, 3)]
    assert [{*whole[2 * k]} == {*whole[2 * k + 1]} for k in range(3)] == [True] * 3
    with pytest.raises(OptionError, match="undivided has 'weights', which no parameter of the model matches"):
        compiled(["weights"])


def test_an_unknown_level():
    case = Case(worker.Normed, worker.numbers, options={"shard": "weights"})
    with pytest.raises(
        OptionError,
        match="shard is 'weights' and must be 'optimizer', 'gradients', 'parameters', 'auto' or None",
    ):
        case.compiled(case.made(), 2)
