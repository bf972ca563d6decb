"""Real processes: what ranks compute, and how they fail together."""

import contextlib
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchrun_worker as worker
from launch import Run, forked
from safetensors.torch import load_file
from torchrun_worker import MICROBATCHES
from zoo import Case, built_and_compiled, compiled, cut, eager, numbers, relative_error, too_far

import fxpipe
from fxpipe.errors import RunError
from fxpipe.plan.rows import ShardName, joined

pytestmark = pytest.mark.slow


def start(check: Callable[[worker.Rank], None], ranks: int, directory: Path) -> Run:
    return forked(ranks, worker.main, check, directory, dtype=torch.float32, logs=directory / "logs")


def tensors(directory: Path, name: str, ranks: int) -> list[dict[str, torch.Tensor]]:
    return [load_file(directory / f"{name}.{rank}.safetensors") for rank in range(ranks)]


def text(directory: Path, name: str, ranks: int) -> list[str]:
    return [json.loads((directory / f"{name}.{rank}.json").read_text()) for rank in range(ranks)]


def flat(result, pipe: fxpipe.Pipeline) -> dict[str, torch.Tensor]:
    """What all ranks hold after a step of ``run_local``."""
    found = {"loss": result.loss} | {f"grad {name}": g for name, g in result.grads.items()}
    held = {name for ranks in pipe.plan.tensors for name in ranks.buffers}
    return found | {f"buffer {name}": pipe.buffers[name].clone() for name in held}


def other_bits(found: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> list[str]:
    """Where some rank differs from what is expected in a single bit; all together must hold everything."""
    assert joined({name: t for rank in found for name, t in rank.items()}).keys() == expected.keys()
    return [
        f"rank {r}: {name}"
        for r, rank in enumerate(found)
        for name, t in rank.items()
        if t.dtype != part(expected, name).dtype or not torch.equal(t, part(expected, name))
    ]


def part(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor, or the rows of one that a rank holds."""
    shard = ShardName(name)
    return shard.part_of(tensors[shard.tensor])


def one_message(texts: list[str]) -> str:
    assert len(set(texts)) == 1, texts
    return texts[0]


# -- the same bits ----------------------------------------------------------------------------------------


def check_bits(ranks: int, directory: Path, variations: bool = False) -> None:
    """Loss on every rank, gradients and buffers of two steps; a weight held by several ranks on each."""
    for name in worker.names_of(ranks, variations):
        case, _ = worker.SAME_BITS[ranks][name]
        pipe = fxpipe.load(directory / f"{name} saved")
        for step in (0, 1):
            result = pipe.run_local(case.data(MICROBATCHES), step=step)
            found = tensors(directory, f"{name} {step}", ranks)
            assert other_bits(found, flat(result, pipe)) == [], (name, step)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("two_ranks")
    save_misfit(directory, "another shape")
    run = start(worker.on_two_ranks, 2, directory)
    assert run.code == 0, run
    return directory


def test_the_same_bits_as_in_one_process_on_two_ranks(two_ranks):
    check_bits(2, two_ranks)


@pytest.mark.variation
def test_the_same_bits_as_in_one_process_on_four_ranks(tmp_path):
    run = start(worker.same_bits, 4, tmp_path)
    assert run.code == 0, run
    check_bits(4, tmp_path)


@pytest.mark.variation
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_bits_in_other_settings(ranks, tmp_path):
    run = start(worker.same_bits_of_variations, ranks, tmp_path)
    assert run.code == 0, run
    check_bits(ranks, tmp_path, variations=True)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", worker.ADDED)
def test_gradients_of_steps_add_up(two_ranks, name):
    case, _ = worker.ADDED[name]
    expected = eager(case.build(), case.data(MICROBATCHES), MICROBATCHES, case.loss_fn).grads
    for step in (0, 1):
        for found in tensors(two_ranks, f"added {name} {step}", 2):
            del found["loss"]
            wanted = {key: (step + 1) * part(expected, key.removeprefix("grad ")) for key in found}
            assert too_far(found, wanted) == {}, f"step {step}"


# -- training ---------------------------------------------------------------------------------------------


def trained_in_one_process():
    """The model after the same steps in plain torch, with their losses and gradient norms."""
    model = worker.TRAINED.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=worker.LEARNING_RATE)
    losses, norms = [], []
    for seed in worker.BATCHES:
        parts = [model(**part) for part in cut(worker.batch_of(seed), MICROBATCHES)]
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), worker.CLIP))
        optimizer.step()
    return model, torch.stack(losses), torch.stack(norms)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", worker.TRAINED_SHAPES)
def test_training_is_that_of_one_process(two_ranks, name):
    """AdamW with clipping by the norm of the whole model, a tied weight counted once in it."""
    model, losses, norms = trained_in_one_process()
    assert (norms > worker.CLIP).all()
    expected = dict(model.named_parameters())
    held: dict[str, torch.Tensor] = {}
    for course in tensors(two_ranks, f"{name} course", 2):
        assert relative_error(course["losses"], losses) <= 1e-10
        assert relative_error(course["norms"], norms) <= 1e-6  # clip_grad_norm_ is free to be less exact
    for parameters in tensors(two_ranks, f"{name} parameters", 2):
        assert too_far(parameters, {key: part(expected, key) for key in parameters}) == {}
        held |= parameters
    assert joined(held).keys() == expected.keys()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", worker.TRAINED_SHAPES)
def test_the_whole_model_after_training_and_its_evaluation(two_ranks, name):
    """Each rank has all that the others trained, and a pipeline without gradients runs on it."""
    model, _, _ = trained_in_one_process()
    expected = model.state_dict()
    assert "pipe.full_state_dict()" in one_message(text(two_ranks, f"{name} part", 2))
    full = load_file(two_ranks / f"{name} full.0.safetensors")
    assert load_file(two_ranks / f"{name} full.1.safetensors") == {}
    loss = eager(model, worker.batch_of(8), MICROBATCHES).loss
    for whole_state in tensors(two_ranks, f"{name} whole", 2):
        assert too_far(whole_state, expected) == {}
        assert all(torch.equal(tensor, full[key]) for key, tensor in whole_state.items())
    for found in tensors(two_ranks, f"{name} evaluation", 2):
        assert relative_error(found["loss"], loss) <= 1e-10


@pytest.mark.parametrize("name", worker.MASTER_SHAPES)
def test_master_weights_are_those_of_one_process(two_ranks, name):
    """Gradients in float32, clipped by the norm of the whole model, and an update in float32; resumed."""
    model, pipe = built_and_compiled(worker.LOW, MICROBATCHES, worker.MASTER_SHAPES[name])
    masters = {key: torch.nn.Parameter(p.float()) for key, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=worker.LEARNING_RATE)
    for step, seed in enumerate(worker.BATCHES):
        for key, grad in pipe.run_local(worker.batch_of(seed), step=step).grads.items():
            masters[key].grad = grad
        assert torch.nn.utils.clip_grad_norm_(masters.values(), worker.CLIP) > worker.CLIP
        optimizer.step()
        for key, parameter in model.named_parameters():
            parameter.data.copy_(masters[key])
    held: dict[str, torch.Tensor] = {}
    for found in tensors(two_ranks, f"{name} masters", 2):
        assert {t.dtype for t in found.values()} == {torch.float32}
        assert too_far(found, {key: part(masters, key).detach() for key in found}, 1e-5) == {}
        held |= found
    saved = fxpipe.read_checkpoint(two_ranks / f"{name} steps").optimizer
    assert joined(held).keys() == masters.keys() == saved.keys()
    assert all(torch.equal(saved[key]["master_weight"], master) for key, master in joined(held).items())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", worker.TRAINED_SHAPES)
def test_saved_under_torchrun_and_loaded_in_one_process(two_ranks, name):
    pipe = fxpipe.load(two_ranks / name)
    for parameters in tensors(two_ranks, f"{name} parameters", 2):
        assert all(torch.equal(pipe.parameter(key), value) for key, value in parameters.items())
    assert not list(two_ranks.glob(".*")), "the draft is gone"
    model, _, _ = trained_in_one_process()
    batch = worker.batch_of(8)
    result, expected = pipe.run_local(batch), eager(copy.deepcopy(model), batch, MICROBATCHES)
    assert relative_error(result.loss, expected.loss) <= 1e-10
    assert too_far(result.grads, expected.grads, 1e-9) == {}


@pytest.mark.usefixtures("double")
def test_an_edited_program_runs_as_edited(two_ranks):
    """Another epsilon in the norms of rank 0."""
    source, edited = ((two_ranks / name / "rank0.py").read_text() for name in ("whole", "edited"))
    assert source.count(worker.OTHER_NORMS[0]) >= 2
    assert edited == source.replace(*worker.OTHER_NORMS)
    batch, losses = worker.batch_of(worker.BATCHES[0]), []
    for name in ("vocabulary", "whole", "edited"):
        with warns_of_edits() if name == "edited" else contextlib.nullcontext():
            pipe = fxpipe.load(two_ranks / name)
        result = pipe.run_local(batch)
        assert other_bits(tensors(two_ranks, name, 2), flat(result, pipe)) == []
        losses.append(result.loss.item())
    plain, held = worker.TRAINED.build(), pipe.plan.tensors[0].parameters
    plain.load_state_dict(pipe.state_dict())
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.LayerNorm) and f"{name}.weight" in held:
            module.eps = 0.25
    assert losses[2] == pytest.approx(eager(plain, batch, MICROBATCHES).loss.item(), rel=1e-10)
    assert abs(losses[2] - losses[1]) > 1e-4


# -- edited programs that do not fit together ---------------------------------------------------------------

LAYOUT = "(2, 8) (8, 1) torch.float32"
MISFITS = {
    "another shape": (
        lambda source: source.replace("((2, 8), (8, 1)", "((4, 4), (4, 1)", 1),
        r"Message '\w+' is \(4, 4\) \(4, 1\) torch\.float32 in the program of rank 0, and "
        rf"{re.escape(LAYOUT)} in that of rank 1",
    ),
    "one message less": (
        lambda source: re.sub(r" +rt\.send\(.*\n", "", source, count=1),
        rf"Message 0 of a step from rank 0 to rank 1 is none in the program of rank 0, and '\w+', "
        rf"{re.escape(LAYOUT)}, in that of rank 1",
    ),
}


def save_misfit(directory: Path, name: str) -> None:
    edit, _ = MISFITS[name]
    case = worker.ADDED["plain"][0]
    compiled(case, case.build(), MICROBATCHES, worker.Shape(2)).save(directory / "misfit")
    program = directory / "misfit" / "rank0.py"
    source = program.read_text()
    assert edit(source) != source
    program.write_text(edit(source))


def check_misfit(directory: Path, name: str) -> None:
    _, message = MISFITS[name]
    for error in text(directory, "misfit", 2):
        assert error.startswith("RunError: ")
        assert re.search(message, error), error
    with warns_of_edits(), pytest.raises(RunError, match=message):
        fxpipe.load(directory / "misfit").run_local(worker.ADDED["plain"][0].data(MICROBATCHES))


def test_a_message_in_another_shape(two_ranks):
    """As many bytes would arrive and give wrong numbers."""
    check_misfit(two_ranks, "another shape")


def test_a_message_less(tmp_path):
    """It would hang."""
    save_misfit(tmp_path, "one message less")
    run = start(worker.misfit, 2, tmp_path)
    assert run.code == 0, run
    check_misfit(tmp_path, "one message less")


def warns_of_edits():
    return pytest.warns(UserWarning, match=r"rank0\.py was edited since")


def test_constants_that_share_memory(two_ranks):
    case = Case(worker.Cached, numbers)
    expected = eager(case.build(), case.data(MICROBATCHES), MICROBATCHES).loss
    for found in tensors(two_ranks, "shared", 2):
        assert relative_error(found["loss"], expected) <= 1e-6
    pipe = fxpipe.load(two_ranks / "shared")
    assert relative_error(pipe.run_local(case.data(MICROBATCHES)).loss, expected) <= 1e-6


# -- what is refused: one clear error on each rank ----------------------------------------------------------


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("refused")
    (directory / "full").mkdir()
    (directory / "full" / "file").write_text("mine")
    run = start(worker.refused, 2, directory)
    assert run.code == 1, run
    return directory


def test_world_size_unlike_ranks(refused):
    message = one_message(text(refused, "world size", 2))
    assert message.startswith("RunError: The pipeline has 3 ranks and there are 2 processes.")
    assert "--nproc-per-node 3" in message


def test_model_that_cannot_be_traced(refused):
    first, second = text(refused, "untraceable", 2)
    error, _, message = first.partition(": ")
    assert error == "CaptureError"
    assert re.search(r"torchrun_worker\.py:\d+", message)
    assert second == f"RunError: Rank 0 could not compile the model: {message}"


def test_options_that_are_wrong(refused):
    for name in ("schedule", "too few blocks"):
        first, second = text(refused, name, 2)
        assert "no error" not in (first, second)
        assert first.partition(": ")[2] in second
    assert "zb-h1" in text(refused, "schedule", 2)[1]


def test_the_same_processes_can_still_compile_and_run(refused):
    case = worker.ADDED["plain"][0]
    pipe = compiled(case, case.build(), MICROBATCHES, worker.Shape(2))
    result = pipe.run_local(case.data(MICROBATCHES))
    assert [t["loss"].item() for t in tensors(refused, "fine", 2)] == [result.loss.item()] * 2


def test_directory_that_is_not_empty(refused):
    first, second = text(refused, "not empty", 2)
    problem = f"{refused / 'full'} is not empty. Name a new directory, or remove it first."
    assert first == f"ArtifactError: {problem}"
    assert second == f"ArtifactError: Rank 0 could not save: {problem}"
    assert [file.name for file in (refused / "full").iterdir()] == ["file"]
    assert (refused / "full" / "file").read_text() == "mine"
    assert not list(refused.glob(".*"))


def test_directory_that_is_a_file_or_no_pipeline(refused):
    assert all("is a file. Name a new directory" in message for message in text(refused, "a file", 2))
    assert "no plan.json" in one_message(text(refused, "loaded", 2))


def test_saved_after_what_was_refused(refused):
    assert fxpipe.load(refused / "new").plan.ranks == 2


def test_what_all_ranks_refuse_leaves_the_run_as_it_was(refused):
    assert one_message(text(refused, "bad batches", 2)).startswith("BatchError: 'x' has shape (8, 9)")
    assert "logits" in one_message(text(refused, "unknown output", 2))
    (loss,) = {t["loss"].item() for t in tensors(refused, "fine", 2)}
    assert text(refused, "refused", 2) == [[1, False, loss]] * 2


def test_a_bad_batch_on_one_rank(refused):
    """After two steps that went well."""
    first, second = text(refused, "one bad batch", 2)
    failure = "Rank 1 failed at the start of step 2: BatchError: 'x' has shape (8, 9)"
    assert second.startswith("BatchError: 'x' has shape (8, 9)")
    assert first.startswith(f"RunError: {failure}")
    for message in text(refused, "after a failure", 2):
        assert message.startswith(f"RunError: {failure}")
        assert message.endswith("The run has failed: no step can follow.")


# -- what fails in the middle -------------------------------------------------------------------------------

BOOM = "Rank 2 failed in B2.1 of step 1, in the model itself, line [0-9]+ of rank2.py: ValueError: boom"


def seconds_to_end(directory: Path, run: Run) -> float:
    return run.ended - json.loads((directory / "failed.2.json").read_text())


def test_a_rank_that_raises_in_the_middle_of_a_step(tmp_path):
    """Every rank gets the message, and none needs torchrun to end it."""
    run = start(worker.raises, 3, tmp_path)
    assert run.code != 0
    assert re.search(f"RunError: {BOOM}\n", run.stderr[2])
    for rank in (0, 1):
        doing = rf"\(Rank {rank} waits for rank \d, to run .* of step 1\.\)"
        assert re.search(f"{BOOM} {doing}", run.stderr[rank]), run
    assert 'raise ValueError("boom")' in run.stderr[2], "the traceback leads to the place"
    assert re.search(BOOM, run.own[-700:]), "torchrun's summary"
    assert "Traceback" not in run.stderr[0] + run.stderr[1], "one rank shows it, the others say so in a line"
    assert seconds_to_end(tmp_path, run) < 30


def test_ranks_end_even_if_the_failing_one_lives_on(tmp_path):
    run = start(worker.raises_and_stays, 3, tmp_path)
    assert run.code != 0
    message = BOOM.replace("B2.1", "F2.2")
    assert any(re.search(message, run.stderr[rank]) for rank in (0, 1)), run
    assert seconds_to_end(tmp_path, run) < 30


def test_a_disk_that_fails_on_one_rank(tmp_path):
    run = start(worker.disk_fails, 2, tmp_path)
    assert run.code == 1, run
    for rank, message in enumerate(text(tmp_path, "disk", 2)):
        assert message.startswith("RunError: Activations" if rank == 1 else "RunError: Rank 1 failed in ")
        assert "bytes early" in message
