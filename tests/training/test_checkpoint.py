"""Checkpoints: the same bits on any number of ranks, and what is refused."""

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import edits
import pytest
import run_worker as worker
import torch
import torch.distributed.checkpoint as dcp
from launch import forked
from recorded_disk import RecordedDisk
from run_worker import Options, Reader, batch_of, pipeline
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import fxpipe
from fxpipe.errors import ArtifactError, OptionError, RunError
from fxpipe.training.checkpoint import files
from fxpipe.training.checkpoint.restore import contents_for, restore
from fxpipe.training.checkpoint.training_state import CheckpointRecord, tensors_of
from fxpipe.training.optimizer.optimizer import PipelineOptimizer

pytestmark = pytest.mark.slow

FOUR_RANKS = Options(steps=4, vocab_parallel=True)


def run(ranks: int, directory: Path, *options: Options, main=worker.main) -> list[dict]:
    """Train under torchrun; return the ranks' reports."""
    logs = directory / "logs"
    found = forked(ranks, main, directory, *options, dtype=torch.float32, logs=logs)
    assert found.code == 0, found
    return [json.loads((directory / f"report.{rank}.json").read_text()) for rank in range(ranks)]


def full(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "full.safetensors")


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(t, expected[n]) for n, t in found.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "pipe"
    pipeline(Reader(), Options(steps=5, schedule="1f1b"), 1).save(directory)
    return directory


@pytest.fixture
def pipe(saved) -> fxpipe.Pipeline:
    """A pipeline of one rank, before its first step."""
    return fxpipe.load(saved)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Six steps on four ranks, with a vocabulary that is split over them."""
    directory = tmp_path_factory.mktemp("trained")
    reports = run(4, directory, replace(FOUR_RANKS, steps=6))
    for rank, report in enumerate(reports):
        assert not report["resumed"]
        assert not report["model alive"]
        # It keeps the rows that it trains, and not the table.
        assert "embed.weight" not in report["parameters"]
        assert f"embed.weight[{rank * 16}:{rank * 16 + 16}]" in report["parameters"]
        assert "does not see what rank 0 writes" in report["blind"], "the directory is not on a common disk"
        assert report["saved"] == ([] if rank else ["saved on disk 0"]), "rank 0 writes for all"
    return directory


def copied(trained: Path, tmp_path: Path, step: int = 4) -> Path:
    """A directory in which the run got no further than a step."""
    name = files.path_of(trained / "checkpoints", step).name
    shutil.copytree(trained / "checkpoints" / name, tmp_path / "checkpoints" / name)
    return tmp_path


def test_a_few_are_kept(trained):
    assert [path.name for path in sorted((trained / "checkpoints").iterdir())] == [
        "step-00000004",
        "step-00000006",
    ]


def test_resumed_with_the_same_plan_it_is_the_same_run(trained, tmp_path):
    directory = copied(trained, tmp_path)
    reports = run(4, directory, replace(FOUR_RANKS, steps=6))
    assert all(report["resumed"] for report in reports)
    assert same(full(directory), full(trained))


def test_opened_on_three_ranks_it_holds_the_same_bits(trained, tmp_path):
    """With the table in other rows."""
    directory = copied(trained, tmp_path)
    assert all(report["resumed"] for report in run(3, directory, FOUR_RANKS))
    assert same(full(directory), expected_at_four(trained))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, Options(steps=4, schedule="1f1b", stages_per_rank=2)),
        (3, Options(steps=4, schedule="zb-v", stages_per_rank=2)),
        (2, FOUR_RANKS),
    ],
)
def test_restored_for_each_rank_of_another_plan_it_holds_the_same_bits(trained, ranks, options):
    """With other stages, another placement, with and without a split vocabulary."""
    model = Reader()
    pipe = pipeline(model, options, ranks)
    path = files.path_of(trained / "checkpoints", 4)
    record = CheckpointRecord.from_json(files.read_state(path), path)
    for rank in range(ranks):
        contents = contents_for(pipe.model_state, None, {}, path, record, rank)
        restore(pipe.model_state, None, {}, contents)
    assert same(model.state_dict(), expected_at_four(trained))


def expected_at_four(trained: Path) -> dict[str, torch.Tensor]:
    return fxpipe.read_checkpoint(trained / "checkpoints" / "step-00000004").state_dict()


def test_opened_in_plain_eager(trained):
    found = fxpipe.read_checkpoint(trained / "checkpoints")
    model = Reader()
    model.load_state_dict(found.state_dict())
    assert [*found.model] == [*model.state_dict()]
    assert same(model.state_dict(), full(trained))
    assert found.step_number == 6
    assert model.seen == 6 * worker.MICROBATCHES
    assert found.state["rate"]["last_epoch"] == 6
    assert found.groups[0]["weight_decay"] == 0.0
    assert found.optimizer["embed.weight"]["exp_avg"].shape == (worker.SIZE, worker.WIDTH)
    assert found.optimizer["embed.weight"]["step"] == 6


class Positions(torch.nn.Module):
    """A buffer that is not persistent, and a tensor with two names."""

    def __init__(self):
        super().__init__()
        self.first = self.again = torch.nn.Linear(4, 4)
        self.register_buffer("positions", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.again(self.first(x) * self.positions).square().mean()


def test_its_tensors_are_those_of_a_state_dict(tmp_path):
    """Read by fxpipe, and by torch's own reader."""
    pipe = fxpipe.compile(Positions(), (torch.ones(2, 4),), ranks=1, microbatches=2)
    with fxpipe.Checkpointer(pipe, tmp_path) as checkpoints:
        path = checkpoints.save()
    model = Positions()
    model.load_state_dict(fxpipe.read_checkpoint(tmp_path).state_dict())
    assert same(model.state_dict(), pipe.state_dict())
    assert not model.state_dict().keys() & {"positions"}
    read = {
        f"model.{name}": torch.empty_like(t) for name, t in model.first.state_dict(prefix="first.").items()
    }
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(path)))
    assert same({name.removeprefix("model.first."): t for name, t in read.items()}, model.first.state_dict())


def test_resumed_on_one_rank_it_trains_as_eager(trained, tmp_path):
    """The optimizer's state too: AdamW's next step of the whole model, in eager, is that of the pipeline."""
    directory = copied(trained, tmp_path)
    model = Reader()
    pipe = pipeline(model, Options(steps=5, schedule="1f1b"), 1)
    assert worker.train(pipe, Options(steps=5, every=100), directory)
    expected = eager_step(trained / "checkpoints" / "step-00000004", pipe)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-6)


def eager_step(path: Path, pipe: fxpipe.Pipeline) -> dict[str, torch.Tensor]:
    """The parameters after one more step, with the gradients of the pipeline, as its dropout is its own."""
    found = fxpipe.read_checkpoint(path)
    model = Reader()
    model.load_state_dict(found.state_dict())
    fresh = pipeline(model, Options(steps=5, schedule="1f1b"), 1)
    grads = fresh.run_local(batch_of(4), step=4).grads
    named = dict(model.named_parameters())
    biases = [n for n in named if n.endswith(".bias")]
    others = [n for n in named if n not in biases]
    optimizer = torch.optim.AdamW([{"params": [named[n] for n in names]} for names in (biases, others)])
    options = [{k: v for k, v in group.items() if k != "params"} for group in found.groups]
    numbers = {n: k for k, n in enumerate([*biases, *others])}
    optimizer.load_state_dict(
        {
            "state": {numbers[n]: state for n, state in found.optimizer.items()},
            "param_groups": [
                {**o, "params": [numbers[n] for n in names]}
                for o, names in zip(options, (biases, others), strict=True)
            ],
        }
    )
    for name, parameter in named.items():
        parameter.grad = grads[name]
    torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
    optimizer.step()
    return {name: p.detach() for name, p in named.items()}


# -- what is damaged, or of another model -----------------------------------------------------------------


def flip_a_bit(path: Path) -> str:
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return f"{file.name} is damaged"


def cut_a_file(path: Path) -> str:
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    return f"{file.name} is damaged"


def change_the_state(path: Path) -> str:
    file = path / "state.json"
    file.write_text(file.read_text().replace('"step_number": 4', '"step_number": 5'))
    return "state.json is damaged"


def remove_a_file(path: Path) -> str:
    file = next(path.glob("*.safetensors"))
    file.unlink()
    return f"'{file.name}' is missing"


def change_the_sums(path: Path) -> str:
    file = path / "SHA256SUMS"
    file.write_text(file.read_text() + "garbage\n")
    return f"line {len(file.read_text().splitlines())} is no checksum"


def remove_the_sums(path: Path) -> str:
    (path / "SHA256SUMS").unlink()
    return "SHA256SUMS cannot be read"


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, cut_a_file, change_the_state, remove_a_file, change_the_sums, remove_the_sums],
    ids=lambda f: f.__name__,
)
def test_damage_is_named_and_nothing_changes(pipe, trained, tmp_path, damage):
    directory = copied(trained, tmp_path)
    path = files.path_of(directory / "checkpoints", 4)
    message = damage(path)
    with fxpipe.Checkpointer(pipe, directory / "checkpoints") as checkpoints:
        with pytest.raises(ArtifactError) as caught:
            checkpoints.resume()
        assert message in str(caught.value)
        assert str(path) in str(caught.value)
        assert "There is no older checkpoint" in str(caught.value)
    assert same(pipe.state_dict(), Reader().state_dict())
    assert pipe.step_number == 0
    if damage is not remove_the_sums:
        with pytest.raises(ArtifactError) as caught:
            fxpipe.read_checkpoint(path)
        assert message in str(caught.value)


@pytest.mark.parametrize("number", range(len(edits.EDITS)))
def test_an_edit_is_refused_before_anything_changes_or_is_no_change(trained, edited, tmp_path, number):
    """With checksums that are right; of every kind one."""
    run, expected = edited
    path, edit = files.path_of(trained / "checkpoints", 4), edits.EDITS[number]
    found = edits.outcome(run, expected, path, edit, random.Random(number), tmp_path)
    assert found.kind in ("refused", "equal"), found
    if found.kind == "refused":
        assert str(tmp_path) in found.message


@pytest.fixture(scope="module")
def edited(trained, tmp_path_factory) -> tuple[edits.Run, dict]:
    """A run, and what it holds after it was resumed."""
    run = edits.Run()
    run.resume(copied(trained, tmp_path_factory.mktemp("whole")) / "checkpoints")
    return run, run.held()


def test_objects_that_do_not_take_their_state_change_nothing(trained, tmp_path):
    """Neither those before them, nor weights and optimizer."""

    class Picky(Stepped):
        def load_state_dict(self, state):
            raise KeyError("position")

    run, first, picky = edits.Run(), Stepped(), Picky()
    with fxpipe.Checkpointer(run.pipe, tmp_path, state={"first": first, "picky": picky}) as checkpoints:
        first.number = 7
        checkpoints.save()
    first.number = 3
    run.pipe.parameter("embed.weight").data.add_(1.0)
    before = run.held()
    state = {"first": first, "picky": picky}
    with (
        fxpipe.Checkpointer(run.pipe, tmp_path, state=state) as checkpoints,
        pytest.raises(ArtifactError, match=r"state\['picky'\] \(Picky\) does not take its state: KeyError"),
    ):
        checkpoints.resume()
    assert first.number == 3
    assert edits.same(run.held(), before)


def test_a_checkpoint_that_one_rank_refuses_changes_none(tmp_path):
    for report in run(2, tmp_path, main=worker.does_not_fit_one_rank):
        assert "state['picky'] (Picky) does not take its state: ValueError: not mine" in report["message"]
        assert report["steps"] == 2
        assert report["unchanged"]


class Stepped:
    number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def test_a_model_on_the_meta_device_gets_its_values(trained, tmp_path):
    directory = copied(trained, tmp_path)
    with torch.device("meta"):
        model = Reader()
    pipe = pipeline(model, Options(steps=5, schedule="1f1b"), 1)
    with fxpipe.Checkpointer(pipe, directory / "checkpoints") as checkpoints:
        assert checkpoints.resume()
    assert same(pipe.state_dict(), expected_at_four(trained))
    assert pipe.optimizer(torch.optim.AdamW).param_groups[-1]["params"][0] is pipe.parameter("embed.weight")
    assert torch.isfinite(pipe.step(batch_of(4)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_on_the_meta_device_gets_the_rows_of_each_rank(trained, ranks):
    with torch.device("meta"):
        model = Reader()
    pipe = pipeline(model, replace(FOUR_RANKS), ranks)
    path = files.path_of(trained / "checkpoints", 4)
    record = CheckpointRecord.from_json(files.read_state(path), path)
    for rank in range(ranks):
        restore(pipe.model_state, None, {}, contents_for(pipe.model_state, None, {}, path, record, rank))
    assert same(pipe.state_dict(), expected_at_four(trained))


# -- two runs ---------------------------------------------------------------------------------------------


def test_a_run_does_not_write_among_the_checkpoints_of_another(pipe, trained, tmp_path):
    """Where those are newer it would lose its own."""
    directory = copied(trained, tmp_path) / "checkpoints"
    before = sorted(directory.iterdir())
    with fxpipe.Checkpointer(pipe, directory) as checkpoints:
        for write in (checkpoints.step, checkpoints.save):
            with pytest.raises(ArtifactError, match=r"step-00000004 is of another run. Call resume\(\)"):
                write()
        assert checkpoints.resume()
        checkpoints.save()
    assert sorted(directory.iterdir()) == before
    with fxpipe.Checkpointer(pipe, directory) as checkpoints:  # the same run
        checkpoints.save()


def test_a_directory_is_locked(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.3)
    checkpoints = fxpipe.Checkpointer(pipe, tmp_path)
    with pytest.raises(
        ArtifactError, match=r"in use by another Checkpointer of this process.*close it first"
    ):
        fxpipe.Checkpointer(pipe, tmp_path)
    checkpoints.close()
    code = "import sys, pathlib; from fxpipe.training.checkpoint.files import Lock; "
    code += "lock = Lock(pathlib.Path(sys.argv[1])); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(
            ArtifactError, match=rf"another run \(process {other.pid} on .*Name another directory"
        ):
            fxpipe.Checkpointer(pipe, tmp_path)
        other.kill()
    with fxpipe.Checkpointer(pipe, tmp_path) as checkpoints:
        checkpoints.save()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    with monkeypatch.context() as patched:
        patched.setattr(files, "put_back", lambda directory: (tmp_path / "none" / "below").touch())
        with pytest.raises(ArtifactError, match="below") as kept:
            fxpipe.Checkpointer(pipe, tmp_path)
    closed = fxpipe.Checkpointer(pipe, tmp_path)  # while the error, and so its frames, is kept
    assert kept
    closed.close()
    with pytest.raises(RunError, match=r"is closed\. Make another one"):
        closed.save()


class Other(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = torch.nn.Linear(worker.WIDTH, worker.WIDTH, bias=False)


def test_another_model(trained, tmp_path):
    directory = copied(trained, tmp_path)
    pipe = pipeline(Other(), Options(steps=5, schedule="1f1b"), 1)
    with (
        fxpipe.Checkpointer(pipe, directory / "checkpoints") as checkpoints,
        pytest.raises(ArtifactError, match=r"another model: layers\.2\.bias has no such tensor in this one"),
    ):
        checkpoints.resume()


@pytest.mark.parametrize(
    ("edit", "wrong"),
    [
        ({"lr": -1.0}, "AdamW fails with: ValueError.*Invalid learning rate: -1.0"),
        ({"betas": {"tuple": [1.5, 0.9]}}, "AdamW fails with: ValueError.*Invalid beta"),
        ({"capturable": True}, "AdamW fails with: AssertionError"),
        ({"amsgrad": True}, "need 'max_exp_avg_sq', which the state of .* lacks"),
        ({"lr": 0.25, "weight_decay": 0.5}, ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_with_which_the_optimizer_cannot_update(tmp_path, edit, wrong):
    torch.manual_seed(0)
    pipe = fxpipe.compile(
        torch.nn.Linear(4, 4),
        (torch.zeros(2, 4),),
        ranks=1,
        microbatches=2,
        loss_fn=lambda out, _: out.square().mean(),
    )
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    with fxpipe.Checkpointer(pipe, tmp_path, optimizer=optimizer) as checkpoints:
        pipe.step((torch.ones(4, 4),))
        optimizer.step()
        checkpoints.save()
    (path,) = tmp_path.glob("step-*")
    state = json.loads((path / "state.json").read_text())
    state["groups"][0]["dict"] |= edit
    (path / "state.json").write_text(json.dumps(state))
    edits.make_sums(path)
    before = [p.detach().clone() for p in pipe.parameters.values()]
    with fxpipe.Checkpointer(pipe, tmp_path, optimizer=optimizer) as checkpoints:
        if wrong:
            with pytest.raises(ArtifactError, match=rf"state.json: groups\[0\] has options that {wrong}"):
                checkpoints.resume()
            assert optimizer.param_groups[0]["lr"] == 0.1
        else:
            assert checkpoints.resume()
            assert optimizer.param_groups[0]["weight_decay"] == 0.5
    assert all(torch.equal(p, old) for p, old in zip(pipe.parameters.values(), before, strict=True))


def test_state_that_is_left_in_the_checkpoint_is_told(tmp_path):
    model, loss = torch.nn.Linear(4, 4), lambda out, _: out.square().mean()
    pipe = fxpipe.compile(model, (torch.zeros(2, 4),), ranks=1, microbatches=2, loss_fn=loss)
    optimizer = pipe.optimizer(torch.optim.AdamW)
    state = {"rate": torch.optim.lr_scheduler.ConstantLR(optimizer)}
    with fxpipe.Checkpointer(pipe, tmp_path, optimizer=optimizer, state=state) as checkpoints:
        checkpoints.save()
    with (
        fxpipe.Checkpointer(pipe, tmp_path, optimizer=optimizer) as checkpoints,
        pytest.warns(UserWarning, match="also holds the state rate, which stays there") as told,
    ):
        checkpoints.resume()
    assert [one.filename for one in told] == [__file__]


def test_an_optimizer_that_is_not_kept_is_told_once(pipe, tmp_path):
    with fxpipe.Checkpointer(pipe, tmp_path) as checkpoints:
        checkpoints.save()  # without an optimizer there is nothing to tell
        optimizer = pipe.optimizer(torch.optim.AdamW)
        pipe.step(batch_of(0))
        optimizer.step()
        with pytest.warns(UserWarning, match="hold no state of the optimizer.*optimizer=opt") as told:
            _ = checkpoints.save(), checkpoints.save()
    assert [one.filename for one in told] == [__file__]


def test_what_was_not_kept(pipe, trained, tmp_path):
    directory = copied(trained, tmp_path)
    optimizer = pipe.optimizer(torch.optim.AdamW)
    checkpoints = fxpipe.Checkpointer(pipe, directory / "checkpoints", optimizer=optimizer)
    with pytest.raises(ArtifactError, match="2 groups, and this one has 1"):
        checkpoints.resume()
    checkpoints.close()
    other = pipe.optimizer(torch.optim.SGD)
    checkpoints = fxpipe.Checkpointer(pipe, directory / "checkpoints", optimizer=other)
    with pytest.raises(ArtifactError, match="has the state of AdamW, and this run has SGD"):
        checkpoints.resume()
    checkpoints.close()
    loader = torch.optim.lr_scheduler.ConstantLR(optimizer)
    checkpoints = fxpipe.Checkpointer(pipe, directory / "checkpoints", state={"loader": loader})
    with pytest.raises(ArtifactError, match="no state 'loader'; it holds rate"):
        checkpoints.resume()
    checkpoints.close()


def test_a_directory_that_cannot_be_written(pipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="file"):
        fxpipe.Checkpointer(pipe, tmp_path / "file" / "checkpoints")
    with pytest.raises(OptionError, match="at least 1"):
        fxpipe.Checkpointer(pipe, tmp_path, every=0)
    for write in (pipe.save, pipe.export, lambda path: fxpipe.Checkpointer(pipe, path)):
        with pytest.raises(ArtifactError, match=r"'.*a\\x00b' is no path"):
            write(tmp_path / "a\0b")


class Bad:
    def state_dict(self):
        return {"stream": object()}

    def load_state_dict(self, state):
        raise AssertionError


def test_state_that_a_checkpoint_does_not_hold(pipe, tmp_path):
    checkpoints = fxpipe.Checkpointer(pipe, tmp_path, state={"loader": Bad()})
    with pytest.raises(RunError, match=r"state\['loader'\]\['stream'\] is a object"):
        checkpoints.save()
    checkpoints.close()
    assert list(files.checkpoints(tmp_path)) == []


def test_a_kill_while_a_checkpoint_takes_the_place_of_another(pipe, tmp_path, monkeypatch):
    """Of the same step, where one alone is kept."""
    pipe.step(batch_of(0))
    checkpoints = fxpipe.Checkpointer(pipe, tmp_path, keep=1)
    first = checkpoints.save()
    expected = fxpipe.read_checkpoint(first).model
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.endswith(".draft"):
            raise RuntimeError("as if it were killed")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(RunError, match="as if it were killed"):
        checkpoints.save()
    checkpoints.close()
    monkeypatch.undo()
    assert list(files.checkpoints(tmp_path)) == []
    with fxpipe.Checkpointer(pipe, tmp_path, keep=1) as checkpoints:
        assert checkpoints.resume()
        assert same(fxpipe.read_checkpoint(tmp_path).model, expected)
        checkpoints.save()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_all_is_on_the_disk_before_a_name_appears(pipe, tmp_path, monkeypatch):
    """Also in the place of another checkpoint, and of a saved pipeline."""
    optimizer = pipe.optimizer(torch.optim.SGD)
    disk = RecordedDisk(monkeypatch)
    with fxpipe.Checkpointer(pipe, tmp_path / "run", optimizer=optimizer, keep=1) as checkpoints:
        for step in (0, 0, 1):
            pipe.step_number = step
            path = checkpoints.save()
            assert path / files.SUMS in disk.appeared[path]
    pipe.save(tmp_path / "saved")
    pipe.save(tmp_path / "saved", overwrite=True)
    pipe.export(tmp_path / "exported")
    disk.check()
    assert {path.name for path in disk.appeared} == {"step-00000001", "saved", "exported"}


def test_a_wait_ends_and_what_is_closed_or_dropped_is_gone(tmp_path):
    run = forked(2, worker.dropped_and_late, tmp_path, dtype=torch.float32, logs=tmp_path / "logs", limit=60)
    assert run.code == 1
    reports = [json.loads((tmp_path / f"report.{rank}.json").read_text()) for rank in (0, 1)]
    for report in reports:
        before, after = report["after 1"], report["after 3"]
        assert after["files"] <= before.pop("files") + 2  # a few of gloo's sockets come and go
        assert {**after, **before} == after
    late = reports[0]
    assert "no answer" in late["message"] or "could not" in late["message"], late
    assert late["seconds"] < worker.LATE + 5


class ByRow(torch.optim.Optimizer):
    """Adagrad with one number for each row."""

    def __init__(self, params, lr=0.1, key="sum"):
        super().__init__(params, {"lr": lr})
        self.key = key

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault(self.key, torch.zeros(len(p)))
                state[self.key] += p.grad.flatten(1).square().sum(1) if p.dim() > 1 else p.grad.square()
                rate = group["lr"] / state[self.key].sqrt().clamp(1e-3)
                p.data -= rate.reshape(-1, *[1] * (p.dim() - 1)) * p.grad


def test_an_optimizer_with_state_for_each_row(tmp_path):
    """Rows of a split table have rows of its state."""
    whole = pipeline(Reader(), Options(steps=5, schedule="1f1b"), 1)
    optimizer = whole.optimizer(ByRow)
    whole.step(batch_of(0))
    optimizer.step()
    with fxpipe.Checkpointer(whole, tmp_path, optimizer=optimizer) as checkpoints:
        path = checkpoints.save()
    expected = fxpipe.read_checkpoint(path).optimizer["embed.weight"]["sum"]
    assert expected.shape == (worker.SIZE,)
    record = CheckpointRecord.from_json(files.read_state(path), path)
    pipe = pipeline(Reader(), FOUR_RANKS, 4)
    for rank in range(4):
        held = {name: pipe.parameter(name) for name in pipe.plan.tensors[rank].gradients}
        own = PipelineOptimizer(ByRow(held.values()), {p: name for name, p in held.items()}, [], None)
        contents = contents_for(pipe.model_state, own, {}, path, record, rank)
        restore(pipe.model_state, own, {}, contents)
        assert all(pipe.parameter(name) is parameter for name, parameter in held.items())
        rows = f"embed.weight[{rank * 16}:{rank * 16 + 16}]"
        assert torch.equal(own.state[held[rows]]["sum"], expected[rank * 16 : rank * 16 + 16])
        part = tensors_of(pipe.model_state, own, rank)["optimizer.embed.weight.sum"]
        assert (part.offsets, part.whole) == ((rank * 16,), (worker.SIZE,))
        assert torch.equal(part.tensor, own.state[held[rows]]["sum"])


def test_state_of_an_optimizer_that_a_checkpoint_does_not_hold(pipe, tmp_path):
    pipe.step(batch_of(0))
    optimizer = pipe.optimizer(ByRow, key="sum.fast")
    optimizer.step()
    with fxpipe.Checkpointer(pipe, tmp_path, optimizer=optimizer) as checkpoints:
        with pytest.raises(RunError, match=r"embed\.weight has the key 'sum\.fast'"):
            checkpoints.save()
        first = optimizer.param_groups[0]["params"][0]
        optimizer.state.clear()
        optimizer.state[first]["factors"] = [torch.ones(2)]
        with pytest.raises(RunError, match=r"\['embed\.weight'\]\['factors'\]\[0\] is a Tensor"):
            checkpoints.save()
    assert list(files.checkpoints(tmp_path)) == []


def test_a_disk_that_is_full_on_one_rank(tmp_path):
    """All ranks raise after the same step, the earlier checkpoints are whole, and the run can go on."""
    for report in run(2, tmp_path, main=worker.on_a_full_disk):
        assert "could not be written: rank 1: [Errno 27] File too large" in report["message"]
        assert report["steps"] == 4
    left = tmp_path / "checkpoints"
    assert sorted(path.name for path in left.iterdir()) == ["step-00000001", "step-00000002"]
    for step in (1, 2):
        found = fxpipe.read_checkpoint(files.path_of(left, step))
        assert int(found.model["seen"]) == step * worker.MICROBATCHES


def test_a_disk_that_is_full(pipe, tmp_path, monkeypatch):
    """The earlier checkpoint stays whole."""
    checkpoints = fxpipe.Checkpointer(pipe, tmp_path)
    first = checkpoints.save()
    pipe.step_number = 7

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.distributed.checkpoint.filesystem.os, "fsync", full_disk)
    with pytest.raises(RunError, match=r"could not be written: .*No space left on device"):
        checkpoints.save()
    checkpoints.close()
    assert fxpipe.read_checkpoint(tmp_path).step_number == 0
    assert list(tmp_path.iterdir()) == [first]
