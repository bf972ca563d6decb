"""``fxpipe run``: a saved pipeline trained from the shell."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from launch import forked, torchrun
from safetensors.torch import load_file, save_file
from zoo import CASES, Shape, compiled, cut

import fxpipe
from fxpipe.api import figures
from fxpipe.cli import main
from fxpipe.cli.run import loop
from fxpipe.cli.run.data import data_from
from fxpipe.cli.run.loop import LoopSettings, train
from fxpipe.errors import BatchError, RunError
from fxpipe.training.checkpoint import files as checkpoint_files
from fxpipe.training.run.runner import Runner

pytestmark = pytest.mark.slow

CASE, MICROBATCHES = CASES["tied_head"], 4
ROWS = CASE.rows * MICROBATCHES  # of one batch


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("pipelines") / "saved"
    compiled(CASE, CASE.build(), MICROBATCHES, Shape(2, "zb-h1")).save(directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two batches, some rows that do not make a third, and a tensor that nobody needs."""
    file = tmp_path_factory.mktemp("data") / "data.safetensors"
    save_file({**rows(2 * ROWS + 3), "unused": torch.zeros(1)}, file)
    return file


def rows(number: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return CASE.batch(number)


def losses(printed: str) -> list[float]:
    lines = re.findall(r"^step (\d+)  loss (\d+\.\d+)  lr ", printed, re.MULTILINE)
    assert [int(step) for step, _ in lines] == list(range(len(lines)))
    return [float(loss) for _, loss in lines]


# -- training -----------------------------------------------------------------------------------------------


def eager_course(steps: int, lr: float, clip: float) -> tuple[list[float], torch.nn.Module]:
    model, batch = CASE.build(), rows(2 * ROWS + 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    course = []
    for step in range(steps):
        start = step % 2 * ROWS
        parts = cut({name: x[start : start + ROWS] for name, x in batch.items()}, MICROBATCHES)
        loss = torch.stack([model(**part) for part in parts]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        course.append(loss.item())
    return course, model


def test_trains_and_saves(saved, data, tmp_path):
    """The batches in turn, from the start again; the losses and weights of plain torch.  As a command, whose
    interpreters end."""
    run = torchrun(
        2, "-m", "busy_watch", "run", saved, "--data", data, "--steps", 8, "--lr", 0.02,
        "--clip-grad-norm", 0.5, "--validation", "post", "--save", tmp_path / "trained", "--timeout", 120,
        logs=tmp_path / "logs",
    )  # fmt: skip
    assert run.code == 0, run
    expected, model = eager_course(8, 0.02, 0.5)
    course = losses(run.stdout[0])
    assert course == pytest.approx(expected, abs=1e-4)
    assert course[6] < course[0]
    assert course[7] < course[1]
    assert f"saved: {tmp_path / 'trained'}" in run.stdout[0].replace("\n", "").replace("saved:/", "saved: /")
    assert (run.stdout[1], run.stderr) == ("", ("", "")), "rank 0 alone prints"
    found = fxpipe.load(tmp_path / "trained").parameters
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter, atol=1e-4), name
    assert load_file(saved / "rank0.safetensors")["embedding.weight"].equal(CASE.build().embedding.weight), (
        "what was trained from stays as it was"
    )


def test_once_through_the_data_without_options(alone, capsys):
    """A pipeline of one rank needs no torchrun."""
    assert main(["run", str(alone), "--data", "data.safetensors"]) == 0
    printed, error = capsys.readouterr()
    assert error == ""
    assert losses(printed) == pytest.approx(eager_course(2, 3e-4, 1e9)[0], abs=1e-4)


def test_ranks_that_need_no_data_make_as_many_steps(data, tmp_path):
    """The rank in the middle reads no leaf."""
    directory, ranks = tmp_path / "three", 3
    compiled(CASE, CASE.build(), MICROBATCHES, Shape(ranks, "1f1b")).save(directory)
    pipe = fxpipe.load(directory)
    assert pipe.leaves(1) == ()
    spec = pipe.plan.step.batch
    assert [data_from(str(data), spec, MICROBATCHES, pipe.leaves(rank)).once for rank in range(3)] == [
        2,
        2,
        2,
    ]
    empty = written(tmp_path, {"unused": torch.zeros(1)})
    nothing = data_from(str(empty), spec, MICROBATCHES, ())
    assert (nothing.once, nothing.batch(7)) == (None, {})
    command = ["run", str(directory), "--data", str(data), "--lr", "0.02"]
    run = forked(ranks, main, command, dtype=torch.float32, logs=tmp_path / "logs")
    assert run.code == 0, run
    assert losses(run.stdout[0]) == pytest.approx(eager_course(2, 0.02, 1e9)[0], abs=1e-4)


def test_replicas_train_on_rows_of_their_own(saved, data, tmp_path):
    """Two batches are one of two replicas."""
    command = ["run", str(saved), "--data", str(data), "--lr", "0.02", "--steps", "3"]
    run = forked(4, main, command, dtype=torch.float32, logs=tmp_path / "logs")
    assert run.code == 0, run
    assert run.stdout[0].startswith("2 replicas x 2 ranks\n")
    assert run.stdout[1:] == run.stderr[1:] == ("", "", "")
    model = CASE.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    course = []
    whole = {name: x[: 2 * ROWS] for name, x in rows(2 * ROWS + 3).items()}
    for _ in range(3):
        parts = cut(whole, 2 * MICROBATCHES)
        loss = torch.stack([model(**part) for part in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        course.append(loss.item())
    assert losses(run.stdout[0]) == pytest.approx(course, abs=1e-4)


def test_the_rows_of_replicas(saved, data, alone):
    spec = fxpipe.load(saved).plan.step.batch
    own = [data_from(str(data), spec, MICROBATCHES // 2, None, replica, 2) for replica in range(2)]
    assert [found.once for found in own] == [2, 2]
    whole = data_from(str(data), spec, MICROBATCHES)
    for step in range(3):
        halves = [found.batch(step) for found in own]
        assert all(torch.cat([h[name] for h in halves]).equal(x) for name, x in whole.batch(step).items())
    with pytest.raises(BatchError, match=f"2 replicas of this pipeline takes {4 * ROWS}: give more"):
        data_from(str(data), spec, 2 * MICROBATCHES, None, 1, 2)
    with pytest.raises(BatchError, match="loaders:plain cannot be called with the arguments replica and rep"):
        data_from("loaders:plain", spec, MICROBATCHES, None, 1, 2)
    divided = data_from("loaders:divided", spec, MICROBATCHES, None, 1, 2)
    assert divided.batch(0)["ids"].equal(load_file("data.safetensors")["ids"][ROWS : 2 * ROWS])


def test_ranks_with_other_numbers_of_batches():
    found = [b"3", b"null", b"2"]
    process = types.SimpleNamespace(gather=lambda own: found)
    data, pipe = types.SimpleNamespace(once=3), types.SimpleNamespace(process=process)
    with pytest.raises(RunError, match="Rank 2 has 2 batches of data, and rank 0 has 3"):
        loop._batches(pipe, data)
    found[:] = [b"null", b"3"]
    assert loop._batches(pipe, data) == 3
    found[:] = [b"null", b"null"]
    assert loop._batches(pipe, data) is None


LOADER = """
import torch
from safetensors.torch import load_file

class Batches:
    def __init__(self, tensors):
        self.tensors, self.next = tensors, 0
    def __iter__(self):
        while self.next < 2:
            start = self.next * %d
            self.next += 1
            yield {name: t[start : start + %d] for name, t in self.tensors.items()}
        self.next = 0

class Resumable(Batches):
    def state_dict(self):
        return {"next": self.next}
    def load_state_dict(self, state):
        self.next = state["next"]

def plain():
    return Batches({n: t for n, t in load_file("data.safetensors").items() if n != "unused"})

def resumable():
    return Resumable(plain().tensors)

def divided(replica, replicas):
    return [*plain()][replica::replicas]

def failing():
    return {}['rows']

def nothing():
    return []

def number():
    return 3
"""


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("pipelines") / "alone"
    compiled(CASE, CASE.build(), MICROBATCHES, Shape(1)).save(directory)
    return directory


@pytest.fixture
def alone(of_one_rank, data, tmp_path, monkeypatch) -> Path:
    """A pipeline of one rank; the data and a module of loaders are in the working directory."""
    (tmp_path / "data.safetensors").write_bytes(data.read_bytes())
    (tmp_path / "loaders.py").write_text(LOADER % (ROWS, ROWS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "loaders", raising=False)
    return of_one_rank


@pytest.mark.parametrize(
    ("validation", "course"), [("barrier", "s0 l0 s1 l1 s2 l2"), ("post", "s0 s1 l0 s2 l1 l2")]
)
def test_the_log_waits_for_what_is_known(alone, monkeypatch, validation, course):
    """Without a barrier for the norm of a step, which is known behind the next one."""
    found, step = [], fxpipe.Pipeline.step

    def stepped(pipe, batch):
        found.append(f"s{pipe.step_number}")
        return step(pipe, batch)

    monkeypatch.setattr(fxpipe.Pipeline, "step", stepped)
    monkeypatch.setattr(loop._Log, "add", lambda log, figures, number: found.append(f"l{number}"))
    options = ["--steps", "3", "--clip-grad-norm", "0.5", "--validation", validation]
    assert main(["run", str(alone), "--data", "data.safetensors", *options]) == 0
    assert " ".join(found) == course


@pytest.mark.parametrize("given", ["data.safetensors", "loaders:plain", "loaders:resumable"])
def test_resumed_it_is_the_same_run(alone, capsys, given):
    """With a decaying rate, from a file, and from loaders that keep their place or do not."""
    shared = ["run", str(alone), "--data", given, "--lr", "0.02", "--warmup", "2", "--decay", "cosine"]
    assert main([*shared, "--steps", "6"]) == 0
    whole = losses(capsys.readouterr().out)
    assert len(set(whole)) == 6
    resumable = [*shared, "--steps", "6", "--checkpoints", "checkpoints", "--every", "3"]
    pipe = fxpipe.load(alone)
    stopped = LoopSettings(
        steps=6, lr=0.02, warmup=2, decay="cosine", checkpoints=Path("checkpoints"), every=3
    )
    with pytest.raises(KeyboardInterrupt):
        train(pipe, Stopping(data_from(given, pipe.plan.step.batch, MICROBATCHES)), stopped)
    capsys.readouterr()
    assert main(resumable) == 0
    printed = capsys.readouterr().out
    assert "resumed after step 2" in printed
    again = [float(x) for x in re.findall(r"^step [345]  loss (\S+)", printed, re.MULTILINE)]
    assert again == whole[3:]


class Stopping:
    """Ends the run in the fifth step."""

    def __init__(self, data) -> None:
        self.data, self.once, self.state = data, data.once, data.state

    def batch(self, step: int):
        if step == 4:
            raise KeyboardInterrupt
        return self.data.batch(step)


def test_the_rate_of_learning(alone, capsys):
    shared = ["run", str(alone), "--data", "data.safetensors", "--lr", "1", "--steps", "4"]
    for decay, rates in {
        "linear": [0.5, 1, 1, 0.5],
        "cosine": [0.5, 1, 1, 0.5],
        "constant": [0.5, 1, 1, 1],
    }.items():
        assert main([*shared, "--warmup", "2", "--decay", decay]) == 0
        found = re.findall(r"lr (\S+)", capsys.readouterr().out)
        assert [float(x) for x in found] == pytest.approx(rates)


def test_the_rate_of_a_resumed_run_is_its_own(alone, capsys):
    """From its first step on: not the last of the earlier one, which was 0."""
    shared = ["run", str(alone), "--data", "data.safetensors", "--checkpoints", "kept"]
    assert main([*shared, "--lr", "0.02", "--decay", "cosine", "--steps", "3"]) == 0
    capsys.readouterr()
    assert main([*shared, "--lr", "0.5", "--decay", "linear", "--steps", "5"]) == 0
    found = re.findall(r"^step (\d)  .* lr (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert [(step, float(rate)) for step, rate in found] == [("3", 0.2), ("4", 0.1)]
    optimizer = fxpipe.read_checkpoint("kept")
    assert optimizer.groups[0]["lr"] == pytest.approx(0.1)


def test_figures_of_the_log(alone, capsys):
    assert main(["run", str(alone), "--data", "data.safetensors", "--steps", "5", "--log-every", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["0", "2", "4"]
    for line in lines:
        assert re.search(r"norm \d.*  tokens/s [\d,]+  bubble [\d.]+%  predicted 0\.00%$", line), line


def test_speed_is_that_of_training(alone, data, tmp_path, capsys, monkeypatch):
    """Two seconds a step, and a hundred for an evaluation, which do not count."""
    now, evaluated = [0.0], tmp_path / "evaluated"
    fxpipe.compile(
        CASE.build(), CASE.example(), ranks=1, microbatches=MICROBATCHES, schedule="1f1b", evaluation=True
    ).save(evaluated)

    def passed(seconds: float) -> float:
        now[0] += seconds
        return now[0]

    def slower(method, seconds: float):
        return lambda *arguments: passed(seconds) and method(*arguments)

    monkeypatch.setattr(Runner, "step", slower(Runner.step, 2.0))
    monkeypatch.setattr(Runner, "evaluate", slower(Runner.evaluate, 100.0))
    monkeypatch.setattr(figures.time, "perf_counter", lambda: passed(1e-9))
    shared = ["run", str(evaluated), "--data", str(data), "--steps", "6"]
    assert main([*shared, "--evaluate", str(data), "--evaluate-every", "2", "--log-every", "3"]) == 0
    found = re.findall(r"^step (\d)  .*  seconds (\S+)  ", capsys.readouterr().out, re.MULTILINE)
    assert found == [("0", "2"), ("3", "2"), ("5", "2")]


class Board:
    """As torch.utils.tensorboard.SummaryWriter."""

    def __init__(self, directory: str) -> None:
        self.directory, self.figures, self.open = directory, [], True
        boards.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.figures.append((name, value, step))

    def close(self) -> None:
        self.open = False


boards: list[Board] = []


def test_tensorboard(alone, capsys, monkeypatch):
    """Gets the figures of the log."""
    module = types.ModuleType("torch.utils.tensorboard")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    shared = ["run", alone, "--data", "data.safetensors", "--steps", 2, "--tensorboard", "board"]
    assert "pip install 'fxpipe[tensorboard]'" in refusal(capsys, *shared)
    module.SummaryWriter = Board
    assert main([str(a) for a in shared]) == 0
    (board,) = boards
    assert (board.directory, board.open) == ("board", False)
    assert [(name, step) for name, _, step in board.figures] == [
        (name, step)
        for step in range(2)
        for name in ("loss", "lr", "norm", "seconds", "tokens/s", "bubble", "predicted")
    ]
    printed = losses(capsys.readouterr().out)
    assert [value for name, value, _ in board.figures if name == "loss"] == pytest.approx(printed, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "steps"), [([], [5]), (["--every", "2"], [2, 4, 5]), (["--every", "5"], [5])]
)
def test_checkpoints_of_a_run(alone, capsys, monkeypatch, options, steps):
    """One at the end at least, once; the run goes on from it."""
    written = []
    complete = checkpoint_files.complete
    monkeypatch.setattr(
        checkpoint_files, "complete", lambda *given: (written.append(given[1]), complete(*given))[1]
    )
    shared = ["run", str(alone), "--data", "data.safetensors", "--checkpoints", "kept", *options]
    assert main([*shared, "--steps", "5"]) == 0
    assert written == steps
    assert sorted(p.name for p in Path("kept").iterdir()) == [f"step-{step:08d}" for step in steps]
    assert main([*shared, "--steps", "5"]) == 0
    assert written == steps, "a run that was over"
    capsys.readouterr()
    assert main([*shared, "--steps", "6"]) == 0
    assert re.findall(r"^step (\d+)", capsys.readouterr().out, re.MULTILINE) == ["5"]


def test_evaluation_on_the_way(of_one_rank, data, tmp_path, capsys):
    """The loss of other data in eval mode, as eager has it; a pipeline without its programs is refused."""
    model, other = CASE.build(), tmp_path / "other.safetensors"
    batch = CASE.batch(2 * ROWS)
    save_file(batch, other)
    directory = tmp_path / "saved"
    fxpipe.compile(
        model, CASE.example(), ranks=1, microbatches=MICROBATCHES, schedule="1f1b", evaluation=True
    ).save(directory)
    shared = ["run", str(directory), "--data", str(data), "--steps", "3", "--lr", "0.01"]
    assert main([*shared, "--evaluate", str(other), "--evaluate-every", "2"]) == 0
    found = re.findall(r"^step (\d)  evaluation (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [step for step, _ in found] == ["1", "2"]
    trained = eager_course(3, 0.01, 1e9)[1].eval()
    parts = cut(batch, 2 * MICROBATCHES)
    expected = torch.stack([trained(**part).detach() for part in parts]).mean()
    assert float(found[1][1]) == pytest.approx(float(expected), abs=1e-4)
    message = refusal(capsys, "run", of_one_rank, "--data", data, "--steps", 1, "--evaluate", other)
    assert "evaluation=True" in message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("loaders:plane", "no function loaders:plane. Did you mean 'plain'?"),
        ("nowhere:plain", "no function nowhere:plain"),
        ("loaders:number", "gives a int"),
        ("loaders:nothing", "gives no batches"),
        ("os:system", "os:system is <built-in function system>. It must be a Python function"),
        ("os:abort", "os:abort is <built-in function abort>"),
        ("os:environ", "os:environ is "),
        ("shutil:rmtree", "shutil:rmtree cannot be called without arguments: missing a required argument"),
        ("platform:node", "platform:node gives a str"),
        (":plain", "':plain' is no function: write module:function"),
    ],
)
def test_loaders_that_are_refused(alone, capsys, given, message):
    assert message in refusal(capsys, "run", alone, "--data", given, "--steps", 1)


def test_a_loader_that_fails(alone, capsys):
    """Its own lines alone, and the error last."""
    assert main(["run", str(alone), "--data", "loaders:failing", "--steps", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fxpipe: error: loaders:failing failed:"
    assert lines[1].endswith("in failing")
    assert lines[-1] == "KeyError: 'rows'"


def test_a_loader_without_a_number_of_steps(alone, capsys):
    assert "give --steps" in refusal(capsys, "run", alone, "--data", "loaders:plain")


def test_checkpoints_need_a_directory(alone, capsys):
    assert "--checkpoints" in refusal(capsys, "run", alone, "--data", "data.safetensors", "--every", 2)


# -- what is refused


def refusal(capsys, *arguments: object) -> str:
    """The one line on stderr of a command that ends with exit code 2."""
    code = main([str(a) for a in arguments])
    printed, error = capsys.readouterr()
    assert (code, printed) == (2, "")
    assert error.startswith("fxpipe")
    assert error.count("\n") == 1, error
    return error


def test_directory_without_a_plan(data, tmp_path, capsys):
    assert f"{tmp_path} holds no saved pipeline" in refusal(capsys, "run", tmp_path, "--data", data)
    assert "no such directory" in refusal(capsys, "run", tmp_path / "nothing", "--data", data)


def test_plan_of_another_version(saved, data, tmp_path, capsys):
    plan = json.loads((saved / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"format": 99}))
    assert "format 99" in refusal(capsys, "run", tmp_path, "--data", data)


def test_data_file_that_is_missing(saved, tmp_path, capsys):
    file = tmp_path / "nothing.safetensors"
    assert str(file) in refusal(capsys, "run", saved, "--data", file)


@pytest.mark.parametrize("contents", [b"", b"step,loss\n1,2\n", b"\xff" * 100])
def test_data_file_that_is_no_safetensors(saved, tmp_path, capsys, contents):
    file = tmp_path / "data"
    file.write_bytes(contents)
    assert f"{file} cannot be read as a safetensors file" in refusal(capsys, "run", saved, "--data", file)


def test_data_file_that_is_a_directory(saved, tmp_path, capsys):
    assert str(tmp_path) in refusal(capsys, "run", saved, "--data", tmp_path)


def written(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, tmp_path / "data.safetensors")
    return tmp_path / "data.safetensors"


def test_data_without_a_needed_tensor(saved, tmp_path, capsys):
    file = written(tmp_path, {"ids": rows(ROWS)["ids"], "label": rows(ROWS)["labels"]})
    message = refusal(capsys, "run", saved, "--data", file)
    assert "has no tensor 'labels'" in message
    assert "ids, label" in message


def test_too_few_rows(saved, tmp_path, capsys):
    message = refusal(capsys, "run", saved, "--data", written(tmp_path, rows(ROWS - 1)))
    assert f"{ROWS - 1} rows" in message
    assert str(ROWS) in message


def test_one_process_for_two_ranks(saved, data, capsys):
    message = refusal(capsys, "run", saved, "--data", data)
    assert "2 ranks" in message
    assert "torchrun --nproc-per-node 2" in message


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", "0"),
        ("--steps", "many"),
        ("--lr", "-1"),
        ("--lr", "nan"),
        ("--clip-grad-norm", "0"),
        ("--timeout", "0"),
    ],
)
def test_numbers_out_of_range(saved, data, capsys, option, value):
    message = refusal(capsys, "run", saved, "--data", data, option, value)
    assert option in message
    assert value in message


def test_no_data(saved, capsys):
    assert "--data" in refusal(capsys, "run", saved)


def one_line_each(run) -> list[str]:
    assert run.code != 0
    assert run.stdout == ("",) * len(run.stdout)
    lines = [line for line in "".join(run.stderr).splitlines() if line]
    assert lines, run
    # Only the first rank that fails has no "ends" before its error.
    assert all(re.match(r"fxpipe: (error|rank \d ends): ", line) for line in lines), run
    assert sum(line.startswith("fxpipe: error: ") for line in lines) == 1, run
    return lines


def test_data_of_another_shape_under_torchrun(saved, tmp_path):
    """Also where all ranks refuse at once, no rank prints a traceback."""
    file = written(tmp_path, {name: x[:, :-1].contiguous() for name, x in rows(ROWS).items()})
    command = ["run", str(saved), "--data", str(file)]
    run = forked(2, main, command, dtype=torch.float32, logs=tmp_path / "logs")
    for line in one_line_each(run):
        assert "has shape (8, 4)" in line  # of the leaf that the rank that is the first to fail reads
    assert "has shape (8, 4)" in run.own, "torchrun's summary"


def test_place_to_save_that_is_not_empty(of_one_rank, data, tmp_path, capsys):
    """Found out before training, not after it."""
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    message = refusal(capsys, "run", of_one_rank, "--data", data, "--save", full)
    assert f"{full} is not empty" in message
    assert [file.name for file in full.iterdir()] == ["file"]
