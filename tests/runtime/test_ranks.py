"""Real processes: ranks that hold the same values and get the same batch, or say which does not; restarts."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import ranks_worker as worker
import torch
from launch import Run, forked, printed, without_agent
from ranks_worker import MICROBATCHES, RANKS
from safetensors.torch import load_file
from zoo import Shape, compiled

import fxpipe
from fxpipe.plan.rows import ShardName
from fxpipe.plan.saved.check import plan_of

pytestmark = [pytest.mark.slow, pytest.mark.waits]

SCRIPT = Path(worker.__file__)
ATTEMPTS = 3


def start(check: Callable[[worker.Rank], None], directory: Path, restarts: int = 0) -> Run:
    logs = directory / "logs"
    return forked(RANKS, worker.main, check, directory, dtype=torch.float32, logs=logs, restarts=restarts)


def tensors(directory: Path, name: str) -> list[dict[str, torch.Tensor]]:
    return [load_file(directory / f"{name}.{rank}.safetensors") for rank in range(RANKS)]


def text(directory: Path, name: str) -> list:
    return [json.loads((directory / f"{name}.{rank}.json").read_text()) for rank in range(RANKS)]


def part(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor, or the rows of one that a rank holds."""
    shard = ShardName(name)
    return shard.part_of(tensors[shard.tensor])


def of_first_holders(
    own: list[dict[str, torch.Tensor]], shape: Shape
) -> tuple[dict[str, torch.Tensor], fxpipe.Pipeline]:
    """A model in one process, each of its tensors as the first rank that holds it has built it."""
    model = worker.SHARED.build()
    pipe = compiled(worker.SHARED, model, MICROBATCHES, shape)
    named = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}
    for rank in reversed(range(RANKS)):
        held = pipe.plan.tensors[rank]
        for name in (*held.parameters, *held.buffers):
            part(named, name).copy_(part(own[rank], name))
    return named, pipe


def trained(pipe: fxpipe.Pipeline) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of the worker's steps in one process, and the norms of their gradients."""
    losses, norms = [], []
    for step in range(worker.STEPS):
        result = pipe.run_local(worker.batch_of(step), step=step)
        losses.append(result.loss)
        norms.append(torch.stack([grad.double().norm() for grad in result.grads.values()]).norm())
        with torch.no_grad():
            for name, grad in result.grads.items():
                pipe.parameter(name).add_(grad, alpha=-worker.LEARNING_RATE)
    return torch.stack(losses), torch.stack(norms)


def check_training(directory: Path, own: list[dict[str, torch.Tensor]], name: str = "trained") -> None:
    expected, pipe = of_first_holders(own, worker.SHAPES[name])
    for found in tensors(directory, f"{name} before"):
        assert [key for key, t in found.items() if not torch.equal(t, part(expected, key))] == []
    losses, norms = trained(pipe)
    for found in tensors(directory, f"{name} losses"):
        assert torch.equal(found["losses"], losses)
        assert torch.allclose(found["norms"], norms, rtol=1e-6)
    for found in tensors(directory, f"{name} after"):
        assert [key for key, t in found.items() if not torch.equal(t, part(expected, key))] == []


# -- ranks that agree -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agree(tmp_path_factory) -> tuple[Path, Run]:
    directory = tmp_path_factory.mktemp("agree")
    run = start(worker.agree, directory)
    assert run.code == 0, run
    return directory, run


def test_shared_values_are_those_of_the_first_holder(agree):
    """Parameters, losses and buffers, bit for bit; the ranks have built the model from different seeds."""
    directory, _ = agree
    own = tensors(directory, "own")
    names = {"embedding.weight", "frozen", "mask"}
    assert not any(torch.equal(own[0][name], own[rank][name]) for name in names for rank in (1, 2))
    shared = [set(found) & names for found in tensors(directory, "trained before")]
    assert shared == [names, {"frozen", "mask"}, names]
    check_training(directory, own)


def test_a_vocabulary_whose_rows_the_ranks_have_built(agree):
    directory, _ = agree
    names = {name for found in tensors(directory, "vocabulary before") for name in found}
    assert len([name for name in names if ShardName(name).is_part]) == RANKS
    check_training(directory, tensors(directory, "own"), "vocabulary")


def test_a_rank_needs_the_leaves_that_it_uses(agree):
    assert text(agree[0], "trained leaves") == [["ids"], [], ["labels"]]
    assert text(agree[0], "vocabulary leaves") == [["ids", "labels"]] * RANKS


@pytest.mark.parametrize("name", ["trained", "loaded"])
def test_a_rank_has_its_own_program_and_asks_for_the_schedule_of_all(agree, name):
    directory, _ = agree
    assert text(directory, f"{name} part") == [
        [[True, True, True], RANKS],
        [[False, True, False], 0],
        [[False, False, True], 0],
    ]
    saved = fxpipe.load(directory / "saved")
    for plan, seconds in text(directory, f"{name} plan"):
        assert (plan_of(plan, name), seconds) == (saved.plan, saved.simulate().seconds)


def test_a_rank_cannot_run_the_programs_of_all(agree):
    for message in text(agree[0], "all alone"):
        assert message.startswith("RunError: run_local runs all ranks in this process")


def test_a_constant_that_cannot_be_sent(agree):
    first, *others = text(agree[0], "wide")
    assert re.match(r"ArtifactError: '\w+' is of torch\.complex128, which", first)
    assert others == [first.replace("ArtifactError: ", "RunError: Rank 0 could not compile the model: ")] * 2


def test_batches_can_be_lists(agree):
    first, *others = (found["losses"] for found in tensors(agree[0], "lists"))
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(first[0], first[1])


def test_a_model_without_values_gets_shared_ones(agree):
    found, expected = tensors(agree[0], "meta"), worker.SHARED.build(seed=10).state_dict()
    for name in ("embedding.weight", "frozen", "mask"):
        assert all(torch.equal(own[name], expected[name]) for own in found if name in own)


def test_a_model_is_initialized_as_in_one_process(agree):
    with torch.device("meta"):
        model = worker.Shared()
    pipe = compiled(worker.SHARED, model, MICROBATCHES, Shape(1, "1f1b"))
    pipe.initialize(worker.random_, seed=5)
    whole = {**pipe.parameters, **pipe.buffers}
    for found in tensors(agree[0], "initialized"):
        assert "embedding.weight[" in "".join(found)
        assert all(torch.equal(tensor, part(whole, name)) for name, tensor in found.items())
    loss = pipe.run_local(worker.batch_of(0)).loss
    assert all(torch.allclose(f["loss"], loss) for f in tensors(agree[0], "initialized loss"))


def test_ranks_that_cannot_initialize_a_model(agree):
    for message in text(agree[0], "nothing writes"):
        assert re.search(r"Nothing initializes (frozen|mask): Shared has no reset_parameters\(\)", message)
    for message in text(agree[0], "other seed"):
        assert "Rank 1 has seed=1 in pipe.initialize, and rank 0 seed=0" in message
    assert all("Keep the model until pipe.initialize()" in message for message in text(agree[0], "no model"))


def test_a_file_that_is_damaged_on_one_rank(agree):
    first, second, third = text(agree[0], "damaged")
    assert second.startswith("ArtifactError: ")
    assert "rank1.safetensors" in second
    for message in (first, third):
        assert re.match(r"ArtifactError: Rank 1 could not load .*: .*rank1\.safetensors is damaged", message)


def test_another_pipeline_on_one_rank(agree):
    assert all("Rank 1 has another" in message for message in text(agree[0], "other plan"))


def test_a_disk_that_fills(agree):
    directory, _ = agree
    first, *others = text(directory, "full disk")
    problem = f"{directory / 'full'} cannot be written: No space left on device."
    assert first == f"ArtifactError: {problem}"
    assert others == [f"ArtifactError: Rank 0 could not save: {problem}"] * (RANKS - 1)
    assert not (directory / "full").exists()
    assert not list(directory.glob(".*"))
    assert fxpipe.load(directory / "not full").plan.ranks == RANKS


def test_a_rank_that_waits_says_so(agree):
    _, run = agree
    assert re.search(r"rank 0 waits for rank 1, to run BW?0\.\d \(stage 0, microbatch \d\)", run.stderr[0]), (
        run
    )
    said = re.findall(r"rank 1 waits for rank 2, to run .* of step 1, for \d s now\. (.*)", run.stderr[1])
    assert any("Rank 2 runs F2.1 (stage 2, microbatch 1) of step 1." in each for each in said), run


def test_another_batch_on_one_rank(agree):
    messages = set(text(agree[0], "other batch"))
    assert len(messages) == 1, messages
    assert messages.pop().startswith(
        "RunError: Rank 1 has other values in 'labels' of the batch than rank 0 in step 1. "
    )


# -- ranks that disagree ----------------------------------------------------------------------------------

COMPILE = "in the arguments of fxpipe.compile, and rank 0"
DISAGREE = {
    "another seed": f"Rank 1 has seed=1 {COMPILE} seed=0. Call it with the same",
    "another model": f"Rank 1 has model=Linear {COMPILE} model=Shared. ",
    "frozen on one": f"Rank 1 has model.frozen=torch.float32 (8,), frozen {COMPILE} model.frozen=torch",
    "another class": "Rank 1 has class=SGD in its optimizer, and rank 0 class=AdamW. Give all ranks the same",
    "another rate": "Rank 1 has lr=0.2 in its optimizer, and rank 0 lr=0.1. ",
    "other groups": "Rank 1 has groups=['*.bias'] in its optimizer, and rank 0 groups=['*.weight']. ",
    "groups of one": "Rank 1 has groups=['*.bias'] in its optimizer, and rank 0 groups=[]. ",
    "local": "run_local runs all ranks in this process, which under torchrun holds the tensors of one of",
    "two pipelines": "Rank 1 calls Pipeline.save of pipeline 2 (Shared), and rank 0 calls Pipeline.save of p",
    "two calls": "Rank 1 calls Pipeline.synchronize of pipeline 1 (Shared), and rank 0 calls Pipeline.full_s",
    "first steps": "Rank 1 calls Pipeline.evaluate of the evaluation of pipeline 1 (Shared), and rank 0 cal",
    "one checkpointer": "Rank 1 calls Checkpointer.__init__ of pipeline 1 (Shared), and rank 0 calls Pipelin",
    "an optimizer": "Rank 1 has optimizer=given in its Checkpointer, and rank 0 optimizer=None. Give all ran",
    "every": "Rank 1 has every=2 in its Checkpointer, and rank 0 every=1. ",
    "no norm": "Rank 1 calls PipelineOptimizer.grad_norm of pipeline 1 (Shared), and rank 0 calls Pipeline.f",
    "updates": "Rank 1 has called step() of its optimizer 1 times, and rank 0 0 times, before Pipeline.save.",
    "values": "Rank 1 has other values of mask than rank 0, before Pipeline.full_state_dict began: ",
}


@pytest.fixture(scope="module")
def disagree(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("disagree")
    run = start(worker.disagree, directory)
    assert run.code == 0, run
    return directory


@pytest.mark.parametrize("name", DISAGREE)
def test_ranks_that_disagree_outside_of_steps(disagree, name):
    (message,) = set(text(disagree, name))
    assert message.partition(": ")[2].startswith(DISAGREE[name])


def test_an_error_of_one_rank_is_that_of_all(disagree):
    first, second, third = text(disagree, "a wrong option")
    assert second == "OptionError: seed is '1' and must be a whole number of 64 bits."
    assert first == third == "RunError: Rank 1 could not compile: " + second.partition(": ")[2]
    first, second, third = text(disagree, "a wrong norm")
    assert second == "OptionError: clip_grad_norm is -1 and must be a number above 0."
    assert first == third == "RunError: Rank 1 could not make its optimizer: " + second.partition(": ")[2]


def test_ranks_go_on_after_it(disagree):
    assert text(disagree, "names")[1:] == [[], []]
    assert "mask" in text(disagree, "names")[0]


def test_a_scheduler_on_one_rank(tmp_path):
    run = start(worker.other_options, tmp_path)
    assert run.code == 0, run
    (message,) = set(text(tmp_path, "other options"))
    assert message.startswith("RunError: Rank 2 has lr=0.5 in the optimizer in step 1, and rank 0 lr=0.1. ")


def test_messages_of_two_pipelines_in_two_orders(tmp_path):
    """No rank takes one for another, and none waits for long."""
    run = start(worker.other_messages, tmp_path)
    assert run.code == 1, run
    assert all("Rank 1 calls step 1 of pipeline 2 (Shared), and rank 0 c" in text for text in run.stderr), run


# -- ranks that fail and start again ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def attempts(tmp_path_factory) -> tuple[Path, Run]:
    directory = tmp_path_factory.mktemp("attempts")
    run = start(worker.attempts, directory, restarts=ATTEMPTS - 1)
    assert run.code == 0, run
    return directory, run


def failed(directory: Path, rank: int) -> float:
    return json.loads((directory / f"failed.{rank}.json").read_text())


def errors(directory: Path) -> list[tuple[str, float]]:
    """The messages that ranks have raised in their steps, and when."""
    return [tuple(json.loads(file.read_text())) for file in sorted(directory.glob("error.*.json"))]


def test_a_loader_that_fails_is_named_on_all_ranks(attempts):
    directory, _ = attempts
    raising = 'raise ValueError("a bad row")'
    line = SCRIPT.read_text().split("\n").index(" " * 16 + raising) + 1
    message = f"Rank 1 failed at ranks_worker.py:{line} ({raising}), after 1 step: ValueError: a bad row"
    for rank, printed_by in enumerate(printed(directory / "logs", "stderr", RANKS, attempt=0)):
        assert (message in printed_by) == (rank != 1), printed_by
    assert all(when - failed(directory / "0", 1) < 5 for _, when in errors(directory / "0"))


def test_a_rank_that_is_killed_is_named_with_what_others_waited_for(attempts):
    directory, _ = attempts
    messages = errors(directory / "1")
    assert messages
    assert all(when - failed(directory / "1", 2) < 5 for _, when in messages)
    for message, _ in messages:
        assert message.startswith("Rank 2 gives no sign of life any more (killed, or out of memory)")
        assert re.search(
            r"Rank 1 waits for rank 2, to run BW?1\.\d \(.*\) of step 1, and got no answer", message
        )
        assert re.search(r"Rank 0 waits for rank 1, to run BW?0\.\d", message)


def test_the_last_attempt_is_not_disturbed(attempts):
    """By the failures of the earlier ones, or by a compilation that takes longer than the time limit."""
    directory, _ = attempts
    assert not list((directory / "2").glob("error.*"))
    own = [worker.SHARED.build(seed=rank).state_dict() for rank in range(RANKS)]
    check_training(directory / "2", own)


def test_a_rank_that_is_stopped_is_waited_for_and_one_that_is_killed_is_not(tmp_path):
    """Without torchrun, where a connection that breaks reports nothing."""
    run = without_agent(
        RANKS, worker.main, worker.silent, tmp_path, dtype=torch.float32, logs=tmp_path / "logs", limit=30.0
    )
    assert text(tmp_path, "went on") == [True] * RANKS
    assert json.loads((tmp_path / "stopped.2.json").read_text()) > worker.STOPPED - 0.5
    assert run.ended - json.loads((tmp_path / "killed.2.json").read_text()) < 10.0
    for rank in (0, 1):
        assert (
            "Rank 2 gives no sign of life any more (killed, or out of memory); the last" in run.stderr[rank]
        )


def test_ranks_end_though_the_one_that_has_the_store_is_stopped(tmp_path):
    """Torch's calls of a store have no time limit."""
    given = RANKS, worker.main, worker.stopped_store, tmp_path
    run = without_agent(*given, dtype=torch.float32, logs=tmp_path / "logs", limit=30.0)
    stopped = json.loads((tmp_path / "stopped.0.json").read_text())
    for rank in (1, 2):
        message, _ = json.loads((tmp_path / f"error.{rank}.json").read_text())
        assert "Rank 0 gives no sign of life (stopped, or in a long call); the last was that it" in message
        assert json.loads((tmp_path / f"ended.{rank}.json").read_text()) - stopped < worker.SHORT + 8.0, run


def test_a_script_that_communicates_on_one_rank_alone(tmp_path):
    """Its data does not meet that of fxpipe, and it is told what the others do."""
    run = start(worker.calls_alone, tmp_path)
    assert run.code == 1, run
    assert re.search(r"all_gather_object.*\n(.*\n)+.*[Tt]imed out.*\n.*Rank 2 waits for", run.stderr[1]), run
    assert "call it on every rank, between the same steps" in run.stderr[1]


ENDING = """
import os, signal, sys, torch
from datetime import timedelta
from fxpipe.runtime.job.process import Process
process = Process.join(torch.device("cpu"), timedelta(seconds=60))
process.gather(b"")
if process.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
process.begin_gather(torch.zeros(4, dtype=torch.int64), "a test")
process.missing
"""


def test_a_rank_that_failed_ends_though_another_one_never_answers(tmp_path):
    """The destructor of a process group waits for its messages, without Python."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen([sys.executable, "-c", ENDING], env={**common, "RANK": str(rank)}, stderr=-1)
        for rank in (0, 1)
    ]
    try:
        _, error = ranks[0].communicate(timeout=40)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 1
    assert b"has no attribute 'missing'" in error
