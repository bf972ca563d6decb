"""Steps that are replays of a captured one, by a tape of ops and storages in place of a GPU's graph."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import tensor_parallel
import torch
from launch import forked
from marks import with_variations
from tape import Tape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from zoo import captured_once

import fxpipe
from fxpipe.errors import RunError
from fxpipe.runtime.job import process as job
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.program.replicas import Bucket, Division
from fxpipe.runtime.replays import replays
from fxpipe.runtime.replays.captured_step import CapturedStep, NotReplayed
from fxpipe.runtime.replays.deterministic import Deterministic
from fxpipe.runtime.replays.replays import TRIALS
from fxpipe.training.run import local_runner

MICROBATCHES, ROWS, LENGTH, WIDTH, WORDS = 4, 2, 5, 8, 16
STEPS = TRIALS + 3


@pytest.fixture(autouse=True)
def tape() -> Iterator[None]:
    with mock.patch.object(replays, "recorder_of", return_value=Tape):
        yield


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.outer, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        normed = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(self.outer(F.gelu(self.inner(normed))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def words() -> Words:
    torch.manual_seed(0)
    return Words()


def batch(step: int, replicas: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (replicas * MICROBATCHES * ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, : 1 + step % 3] = -100  # each batch counts others
    return {"ids": ids, "labels": labels}


def compiled(model: nn.Module, **options: Any) -> fxpipe.Pipeline:
    example = {name: x[:ROWS] for name, x in batch(0).items()}
    with captured_once(type(model), model.training, options.get("loss_fn"), *options.get("outputs", ())):
        return fxpipe.compile(model, example, microbatches=MICROBATCHES, effort=0.02, check=False, **options)


def trained(replay: bool | str, steps: int = STEPS, keep: str = "", **options: Any):
    """Losses and weights of a training; keep: what the script does with gradients."""
    model = words()
    pipe = compiled(model, ranks=1, schedule="1f1b", replay=replay, **options)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2, clip_grad_norm=1.0)
    losses, kept = [], []
    for step in range(steps):
        losses.append(pipe.step(batch(step)))
        if keep == "sums" and step % 2:
            continue
        optimizer.step()
        if (keep, step) in (("one", TRIALS + 1), ("early", 1)):
            kept = [model.head.weight.grad[0], model.head.weight.grad[0].clone()]
        optimizer.zero_grad(set_to_none=keep != "zeros")
    assert not kept or torch.equal(*kept)
    return pipe, [*losses, *(x.detach().clone() for x in model.state_dict().values())]


def why(pipe: fxpipe.Pipeline) -> str:
    """Why the steps of a rank, or of all in this process, run op by op."""
    runner = pipe._runner
    known = runner._replays if runner._ranks_to_replay is None else runner._ranks_to_replay.replays
    assert known is not None
    return known.reason


class Memory:
    """A store for offloaded tensors whose copies are ops, as those of ``Host`` are on a GPU."""

    def __init__(self, size: int) -> None:
        self.pool = torch.empty(size, dtype=torch.uint8)

    def write(self, tensor: torch.Tensor, at: int) -> None:
        self.pool[at : at + tensor.numel()].copy_(tensor)

    def read(self, tensor: torch.Tensor, at: int, written: None) -> None:
        tensor.copy_(self.pool[at : at + tensor.numel()])

    def wait(self, ticket: None) -> None:
        pass


SETTINGS = {
    "1f1b": {"schedule": "1f1b"},
    "split": {"schedule": "zb-v", "vocab_parallel": "1-barrier"},
    "recomputed": {"schedule": "zb-h1", "vocab_parallel": "2-barrier", "recompute": "full"},
    "offloaded": {"schedule": "gpipe", "offload": 0.7},
    "replicas": {"schedule": "interleaved", "stages_per_rank": 2, "replicas": 2},
    "divided": {"schedule": "zb-h1", "replicas": 2, "shard": "parameters", "mean": "microbatch"},
}


@pytest.mark.in_ci("replicas")
@pytest.mark.parametrize("setting", with_variations(SETTINGS, ["1f1b"]))
def test_replays_give_the_bits_of_the_ops(setting, monkeypatch):
    monkeypatch.setattr(local_runner, "open_store", lambda tier, size, *_: Memory(size))
    options = SETTINGS[setting]
    check_replays(compiled(words(), ranks=2, **options), partial(batch, replicas=options.get("replicas", 1)))


@pytest.mark.variation
@pytest.mark.parametrize("sizes", with_variations([(2,), (2, 2)], [(2,)]))
def test_replays_of_lanes_draw_the_numbers_of_their_shares(sizes):
    """Of two dimensions, along each of them other lanes draw the same."""
    with fxpipe.local_lanes(sizes, names=("a", "b")[: len(sizes)]) as mesh:
        torch.manual_seed(0)
        model = tensor_parallel.Words(dropout=0.25, layers=len(sizes), mixture=False)
        state = {name: x.clone() for name, x in model.state_dict().items()}
        for block, name in zip(model.blocks, mesh.mesh_dim_names, strict=True):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh[name], plan)
        example = {name: x[:ROWS] for name, x in batch_of_lanes(0).items()}
        pipe = fxpipe.compile(model, example, ranks=1, microbatches=MICROBATCHES, check=False)
    assert ("lane_key(m, 2" in pipe.artifact.programs[0]) == (len(sizes) == 2)
    pipe.load_state_dict(state)
    check_replays(pipe, batch_of_lanes)


def check_replays(pipe: fxpipe.Pipeline, batch: Callable[[int], dict[str, torch.Tensor]]) -> None:
    """Compare steps of all ranks in this process with replays, with other weights in each."""
    for step in range(STEPS):
        state = {name: x.clone() for name, x in pipe.full_state_dict().items()}
        expected = pipe.run_local(batch(step), step=step)
        after = {name: x.clone() for name, x in pipe.full_state_dict().items()}
        pipe.load_state_dict(state)
        replayed = pipe.run_local(batch(step), step=step, replay=True)
        assert torch.equal(replayed.loss, expected.loss)
        assert all(torch.equal(replayed.grads[name], grad) for name, grad in expected.grads.items())
        assert all(torch.equal(x, after[name]) for name, x in pipe.full_state_dict().items())
        torch.manual_seed(step)
        moved = {name: x + 0.01 * torch.randn_like(x) for name, x in after.items() if x.is_floating_point()}
        pipe.load_state_dict({**after, **moved})
    assert why(pipe) == ""


@pytest.mark.parametrize("keep", ["", "sums", "zeros"])
def test_a_training_by_replays_is_the_same(keep):
    pipe, found = trained(True, keep=keep)
    assert why(pipe) == ""
    assert all(map(torch.equal, found, trained(False, keep=keep)[1]))


@pytest.mark.parametrize("keep", ["one", "early"])
def test_a_gradient_that_the_script_keeps_stays_and_is_named(keep):
    """Also where it keeps one while replays are on trial."""
    with pytest.warns(UserWarning, match="the gradient of head.weight lies at another address"):
        _, found = trained(True, keep=keep)
    assert all(map(torch.equal, found, trained(False, keep=keep)[1]))


def test_a_sum_is_divided_by_the_count_of_its_batch():
    def loss(output, given):
        return output * given["labels"].ne(-100).sum(), given["labels"].ne(-100).sum()

    pipe, found = trained(True, loss_fn=loss)
    assert why(pipe) == ""
    assert all(map(torch.equal, found, trained(False, loss_fn=loss)[1]))


def test_a_value_that_the_code_reads_is_checked_behind_each_replay():
    class Branch(Words):
        def forward(self, ids, labels):
            return super().forward(ids, labels) * (2 if labels.min() < 0 else 1)

    model = Branch()
    pipe = compiled(model, ranks=2, schedule="1f1b", without=["batch-branches"])
    for step in range(STEPS):
        pipe.run_local(batch(step), replay=True)
    assert why(pipe) == ""
    with pytest.raises(RunError, match="this microbatch gives False"):
        pipe.run_local({**batch(0), "labels": batch(0)["ids"]}, replay=True)


def test_ops_are_deterministic_in_a_trial_where_they_can_be():
    """An op without a deterministic kernel runs as ever: torch raises for it before it computes."""
    values = torch.zeros(3)
    with Deterministic():
        values.put_(torch.tensor([0, 2]), torch.ones(2))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()  # which attention takes for off
    assert values.tolist() == [1, 0, 1]
    assert not torch.are_deterministic_algorithms_enabled()


class Rerun:
    """A recorder that runs the function again: over gloo, whose messages no graph has."""

    def __init__(self, device: torch.device, random_ops: int) -> None:
        pass

    def record(self, run: Callable[[], object]) -> None:
        self.run = run

    def replay(self, seeds: Sequence[int]) -> None:
        self.run()

    def memory(self) -> nullcontext[None]:
        return nullcontext()


def on_ranks(replay: bool, validation: str = "barrier") -> fxpipe.Pipeline:
    return compiled(words(), ranks=2, schedule="zb-h1", replay=replay, validation=validation)


def on_replicas(replay: bool, level: str | None) -> fxpipe.Pipeline:
    return compiled(words(), ranks=1, shard=level, schedule="1f1b", replay=replay)


def on_lanes(replay: bool, plan: str) -> fxpipe.Pipeline:
    """Each lane draws other numbers for what it has a share of."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))["tp"]
    torch.manual_seed(0)
    model = tensor_parallel.Words(dropout=0.25, mixture=plan != "columns and rows")
    example = {name: x[:ROWS] for name, x in batch_of_lanes(0).items()}
    with tensor_parallel.parallelized(model, mesh, plan):
        return fxpipe.compile(model, example, ranks=1, microbatches=MICROBATCHES, replay=replay)


def batch_of_lanes(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return tensor_parallel.batch(MICROBATCHES * ROWS)


def batch_of_replica(step: int, pipe: fxpipe.Pipeline) -> dict[str, torch.Tensor]:
    size = MICROBATCHES * ROWS
    return {name: x[pipe.replica * size :][:size] for name, x in batch(step, pipe.replicas).items()}


PROCESSES: dict[str, Callable[[bool], fxpipe.Pipeline]] = {
    "ranks": on_ranks,
    "ranks, post": partial(on_ranks, validation="post"),
    "replicas": partial(on_replicas, level=None),
    **{
        f"replicas, {level}": partial(on_replicas, level=level)
        for level in ("optimizer", "gradients", "parameters")
    },
    **{
        f"lanes, {plan}": partial(on_lanes, plan=plan) for plan in ("columns and rows", "sequence", "context")
    },
}


FEW = ["replicas", "replicas, parameters", "lanes, columns and rows"]


def rank_of_two(names: Sequence[str], broken: int, zeroes: bool) -> None:
    """broken: the process whose step cannot be captured.  zeroes: whether gradients keep their memory."""
    torch.distributed.init_process_group("gloo")
    recorder = (
        mock.Mock(side_effect=NotReplayed("broken")) if torch.distributed.get_rank() == broken else Rerun
    )
    for name in names:
        results = {}
        for replay in (False, True):
            pipe = PROCESSES[name](replay)
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, clip_grad_norm=0.5)
            results[replay] = losses = []
            with mock.patch.object(replays, "recorder_of", return_value=recorder):
                for step in range(STEPS):
                    data = batch_of_lanes(step) if name.startswith("lanes") else batch_of_replica(step, pipe)
                    losses.append(pipe.step(data).item())
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=not zeroes)
            losses += [x.tolist() for x in pipe.full_state_dict(rank=None).values()]
        assert results[True] == results[False], name
        print("why:", why(pipe))


@pytest.mark.in_ci("names0--1-False")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "broken", "zeroes"),
    [(FEW, -1, False), pytest.param([*PROCESSES], -1, True, marks=pytest.mark.variation),
     (["ranks"], 1, False), pytest.param([*PROCESSES], 1, False, marks=pytest.mark.variation)],
)  # fmt: skip
def test_processes_that_replay_exchange_what_others_do(names, broken, zeroes, tmp_path):
    """With those that do not, too."""
    run = forked(2, rank_of_two, names, broken, zeroes, dtype=torch.float64, logs=tmp_path)
    assert run.code == 0, run
    for rank, out in enumerate(run.stdout):
        expected = "why: broken" if rank == broken else "why:"
        assert [line.strip() for line in out.splitlines() if "why:" in line] == [expected] * len(names), run


def rank_whose_messages_pass_through_the_host() -> None:
    pipe = on_ranks(True)
    with mock.patch.object(job, "is_accelerator", return_value=True):
        assert pipe._runner._replays.never
    with mock.patch.object(replays, "recorder_of", return_value=Rerun):
        pipe.step(batch_of_replica(0, pipe))
    print("why:", why(pipe))


@pytest.mark.slow
def test_messages_that_pass_through_the_host_are_not_captured(tmp_path):
    """A capture would send and receive them, and the ranks would no longer agree on their number."""
    run = forked(2, rank_whose_messages_pass_through_the_host, dtype=torch.float64, logs=tmp_path)
    assert run.code == 0, run
    assert all("why: the ranks exchange messages over gloo" in out for out in run.stdout), run


def replica_that_keeps(level: str | None) -> None:
    """The script keeps a gradient beyond the step in which replays have begun."""
    pipe = on_replicas(True, level)
    optimizer, kept = pipe.optimizer(torch.optim.SGD, lr=0.1), []
    with mock.patch.object(replays, "recorder_of", return_value=Rerun):
        for step in range(STEPS):
            pipe.step(batch_of_replica(step, pipe))
            optimizer.step()
            if step == TRIALS + 1:
                kept = [x for group in optimizer.param_groups for x in (group["params"][-1].grad,)]
                kept += [x.clone() for x in kept]
            optimizer.zero_grad(set_to_none=True)
    assert torch.equal(*kept)
    print("why:", why(pipe))


@pytest.mark.slow
@pytest.mark.parametrize("level", with_variations([None, "gradients"], ["gradients"]))
def test_a_gradient_of_replicas_that_the_script_keeps_stays(level, tmp_path):
    run = forked(2, replica_that_keeps, level, dtype=torch.float64, logs=tmp_path)
    assert run.code == 0, run
    expected = "lies at another address" if level is None else "why:"
    assert all(expected in out for out in run.stdout), run


def test_a_sum_over_replicas_stays_when_a_captured_step_makes_another():
    """The memory of gradients that no step keeps is the graph's."""
    ours, of_graph = (
        Bucket(("a",), (((2,), (1,)),), torch.float64, torch.device("cpu"), Division((0, 2))) for _ in "ab"
    )
    of_graph.summed = torch.ones(2)
    ours.take_sum(of_graph)
    of_graph.summed.zero_()
    assert torch.equal(ours.summed, torch.ones(2))


def _frozen_key(step, now):
    return step._keys.setdefault(key := now(), partial(int, key))()


def _with_a_number(rt, loss, *counts):
    add_loss(rt, loss * (1 + rt.step_number), *counts)


def _with_a_wait(rt, loss, *counts):
    loss.item()
    add_loss(rt, loss, *counts)


add_loss = Runtime.add_loss
FAULTS = {
    "a number of the host": (Runtime, "add_loss", _with_a_number, "another gradient|the loss"),
    "a wait for the device": (Runtime, "add_loss", _with_a_wait, "the host reads a tensor"),
    "the key of a step": (CapturedStep, "key", _frozen_key, "another gradient|the loss"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_replay_would_freeze_is_found(fault, monkeypatch):
    *place, why_not = FAULTS[fault]
    monkeypatch.setattr(*place)
    with pytest.warns(UserWarning, match=f"run op by op, and are not replayed: .*({why_not})"):
        _, found = trained(True)
    assert all(map(torch.equal, found, trained(False)[1]))


def test_a_parameter_that_the_script_replaces_is_named():
    model = words()
    pipe = compiled(model, ranks=1, schedule="1f1b", replay=True)
    for step in range(STEPS):
        pipe.step(batch(step))
        model.zero_grad(set_to_none=True)
    model.head.weight.data = model.head.weight.data.clone()
    with pytest.warns(UserWarning, match="the parameter head.weight lies at another address"):
        pipe.step(batch(STEPS))


def test_a_batch_that_lies_otherwise_is_named():
    """Its ops would be others than the captured ones."""
    model = words()
    pipe = compiled(model, ranks=1, schedule="1f1b", replay=True)
    for step in range(STEPS):
        pipe.step(batch(step))
        model.zero_grad(set_to_none=True)
    turned = {name: x.t().contiguous().t() for name, x in batch(STEPS).items()}
    with pytest.warns(UserWarning, match="the leaf 'ids' has another layout"):
        pipe.step(turned)


def test_a_step_that_is_asked_for_more_runs_op_by_op_between_replays():
    model = words()
    pipe = compiled(model, ranks=1, schedule="1f1b", replay=True, outputs=["head"])
    for step in range(STEPS):
        pipe.step(batch(step))
        model.zero_grad(set_to_none=True)
    asked = pipe.step(batch(STEPS), outputs=["head"])
    assert asked.outputs["head"].shape == (MICROBATCHES * ROWS, LENGTH, WORDS)
    model.zero_grad(set_to_none=True)
    pipe.step(batch(STEPS), check="finite")
    pipe.step(batch(STEPS))
    assert why(pipe) == ""


def test_a_short_batch_of_an_evaluation_counts_its_rows():
    model = words().eval()
    pipes = [compiled(model, ranks=1, gradients=False, replay=replay) for replay in (False, True)]
    for step in range(STEPS):
        plain, replayed = (pipe.evaluate(batch(step)) for pipe in pipes)
        assert torch.equal(plain, replayed)
    short = {name: x[: 3 * ROWS + 1] for name, x in batch(0).items()}
    plain, replayed = (pipe.evaluate(short) for pipe in pipes)
    assert torch.equal(plain, replayed)
    assert why(pipes[1]) == ""


def test_replays_that_are_not_faster_are_left_out(monkeypatch):
    monkeypatch.setattr(replays, "WORTH", 0.0)
    pipe, found = trained("auto")
    assert "a replay takes" in why(pipe)
    assert all(map(torch.equal, found, trained(False)[1]))


def test_a_device_without_graphs_is_said(monkeypatch):
    monkeypatch.setattr(replays, "recorder_of", lambda device: None)
    with pytest.warns(UserWarning, match="not replayed: a cpu has no graphs"):
        trained(True, steps=1)
    with pytest.raises(RunError, match="leave out replay=True"):
        compiled(words(), ranks=1).run_local(batch(0), replay=True, measure_memory=True)
