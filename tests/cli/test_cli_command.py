"""The command line as a whole: what is mistyped, units, pictures, completion, and the small commands."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from zoo import Chain, numbers

import fxpipe
from fxpipe.cli import command, main
from fxpipe.cli.diff import differences
from fxpipe.cli.run.loop import LoopSettings, train
from fxpipe.plan.step import counted
from fxpipe.schedule.families.registry import FAMILIES

ROOT = Path(__file__).parents[2]
TIMES = ["--ranks", "2", "--microbatches", "4", "--forward", "1", "--backward-input", "1"]
TIMES += ["--backward-weight", "1"]


def refused(capsys, *arguments):
    """The line on stderr."""
    assert main([*map(str, arguments)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two pipelines of one model with different schedules."""
    folder = tmp_path_factory.mktemp("saved")
    for schedule in ("gpipe", "zb-h1"):
        pipe = fxpipe.compile(Chain(2), numbers(2), ranks=2, microbatches=4, schedule=schedule, check=False)
        pipe.save(folder / schedule)
    return folder


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["simulat"], "'simulate'"),
        (["simulate", "--shedule", "zb", *TIMES], "'--schedule'"),
        *((["simulate", "--schedule", name, *TIMES], repr(meant))
          for name, meant in (("ZB-H1", "zb-h1"), ("zb_h1", "zb-h1"), ("1F1B", "1f1b"))),
    ],
)  # fmt: skip
def test_what_was_probably_meant(capsys, typed, meant):
    assert f"Did you mean {meant}?" in refused(capsys, *typed)


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("train x", "pipe.step"),
        ("version", "fxpipe --version"),
    ],
)
def test_what_a_script_does_is_told(capsys, typed, instead):
    assert instead in refused(capsys, *typed.split())


def test_help_is_a_command_too(capsys):
    assert main(["help"]) == 0
    assert "simulate" in capsys.readouterr().out


def test_help_on_a_topic_and_on_a_command(capsys):
    assert main(["help", "schedules"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:2] + told[-2:] == [
        "fxpipe simulate   predict bubble and memory of a schedule",
        "fxpipe compare    simulate all schedules and compare them",
        "",
        "More: docs/schedules.md",
    ]
    assert [line.split()[0] for line in told[4:-2]] == [*FAMILIES]
    assert "  zb-h1        backward split, W delayed (2401.10241): at most p · M_B" in told
    assert main(["help", "planning"]) == 0
    assert "zb-h1" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["help", "export"])
    assert capsys.readouterr().out.startswith("usage: fxpipe export")
    assert refused(capsys, "help", "schedule") == (
        "fxpipe: error: there is no help on 'schedule'. Did you mean 'schedules'? Topics: schedules, "
        "planning, training, seeing, debugging\n"
    )


def test_each_command_has_a_topic():
    named = [name for commands, _ in command.TOPICS.values() for name in commands]
    assert sorted([*named, "completion"]) == sorted(command.SUBCOMMANDS)
    assert all((ROOT / page).exists() for _, page in command.TOPICS.values())


def test_each_option_has_help():
    commands = next(x for x in command.parser(command.SUBCOMMANDS)._actions if x.choices).choices
    assert [*commands] == [*command.SUBCOMMANDS]
    assert [(name, x.dest) for name, each in commands.items() for x in each._actions if not x.help] == []


def test_an_option_without_a_command(capsys):
    assert refused(capsys, "--nope") == "fxpipe: error: fxpipe has no option '--nope'. See fxpipe --help\n"


def test_the_plain_command_lists_all(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"    {name}" in out for name in command.SUBCOMMANDS)


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fxpipe.cli.simulate.simulate_schedule", interrupted)
    assert main(["simulate", "--schedule", "1f1b", *TIMES]) == 130
    assert capsys.readouterr().err == "fxpipe: interrupted\n"


@pytest.mark.variation
def test_a_reader_that_has_read_enough():
    """As ``| head -1``: no traceback, neither of the command nor of Python's end."""
    command = [sys.executable, "-m", "fxpipe", "simulate", "--ranks", "2", "--microbatches", "2"]
    command += ["--schedule", "1f1b", "--forward", "1", "--backward-input", "1", "--backward-weight", "1"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run.stdout.close()
    assert run.stderr.read() == ""
    assert run.wait() == 1


def test_a_schedule_as_a_file(capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("F0.0 F0.1 BW0.0 BW0.1\nF1.0 BW1.0 F1.1 BW1.1\n")
    times = [*TIMES[4:]]
    assert main(["simulate", "--schedule", str(tmp_path / "mine.txt"), *times, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == "mine"
    assert "cannot be read" in refused(capsys, "simulate", "--schedule", tmp_path / "no.txt", *TIMES)


def test_memory_limits_with_units(capsys, saved):
    gpipe = ["simulate", "--costs", saved / "zb-h1", "--schedule", "gpipe"]
    assert "and the limit is 100 B;" in refused(capsys, *gpipe, "--memory-limit", "100B")
    assert "and the limit is 500 B;" in refused(capsys, *gpipe, "--memory-limit", "0.5kB")
    assert main([*map(str, gpipe), "--memory-limit", "1GiB"]) == 0
    simulate = ["simulate", "--schedule", "1f1b", *TIMES, "--memory-limit"]
    assert "1GiB is in bytes, and without --costs" in refused(capsys, *simulate, "1GiB")
    assert "'1XB' is no size such as 16GiB" in refused(capsys, *simulate, "1XB")


def test_pictures(capsys, saved, tmp_path):
    simulate = ["simulate", "--schedule", "1f1b", *TIMES, "--draw"]
    assert main([*simulate, str(tmp_path / "step.png")]) == 0
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["draw", str(saved / "gpipe"), str(tmp_path / "step.svg")]) == 0
    assert "gpipe" in (tmp_path / "step.svg").read_text()
    assert "must end with .svg or .png" in refused(capsys, *simulate, tmp_path / "step.jpg")
    assert "cannot be written" in refused(capsys, *simulate, tmp_path / "no" / "step.png")


def test_differences_of_two_plans(capsys, saved):
    first, second = (fxpipe.load(saved / name).plan for name in ("gpipe", "zb-h1"))
    found = {name: (a, b) for name, a, b in differences(first, second)}
    assert found["schedule"] == ("gpipe", "zb-h1")
    assert found["order of rank 1"] == ("op 1: F1.1 F1.2 F1.3 BW1.0 …", "op 1: B1.0 F1.1 B1.1 W1.0 …")
    assert not {"model", "ranks", "stage 0", "rank 0 holds"} & found.keys()
    assert [*differences(first, first)] == []
    assert main(["diff", str(saved / "gpipe"), str(saved / "zb-h1")]) == 0
    assert "order of rank 1" in capsys.readouterr().out


def test_json_of_saved_pipelines(capsys, saved, tmp_path):
    def printed(*arguments, code=0):
        assert main([*map(str, arguments), "--json"]) == code
        return json.loads(capsys.readouterr().out)

    found = {
        row["what"]: (row["first"], row["second"])
        for row in printed("diff", saved / "gpipe", saved / "zb-h1")
    }
    assert found["schedule"] == ("gpipe", "zb-h1")
    record = printed("explain", saved / "zb-h1")
    assert record["schedule"] == "zb-h1"
    assert record["prediction"]["seconds"] == fxpipe.load(saved / "zb-h1").plan.prediction.seconds
    for name, file in (("trace", "trace.json"), ("report", "report.html"), ("draw", "step.svg")):
        output = [tmp_path / file] if name == "draw" else ["--output", tmp_path / file]
        assert printed(name, saved / "gpipe", *output) == {"file": str(tmp_path / file)}
        assert (tmp_path / file).exists()
    assert printed("check", saved / "gpipe") == [
        {"directory": str(saved / "gpipe"), "holds": True, "problems": [], "otherwise": []}
    ]
    shutil.copytree(saved / "gpipe", tmp_path / "edited")
    program = tmp_path / "edited" / "rank0.py"
    program.write_text(program.read_text().replace("1e-05)", "1e-04)", 1))
    (row,) = printed("check", tmp_path / "edited", code=2)
    assert not row["holds"]
    assert row["problems"][0]["rank"] == 0


def test_costs_that_are_not_there(capsys):
    assert "nope does not exist: --costs is a JSON file or" in refused(capsys, "simulate", "--costs", "nope")


@pytest.mark.parametrize(
    "words", [["check"], ["run", "--data", "x"], ["simulate", *TIMES, "--schedule", "1f1b", "--draw"]]
)
def test_a_name_that_is_longer_than_those_of_files(capsys, words):
    assert "File name too long" in refused(capsys, *words, "a" * 300 + ".svg")


def test_running_several_ranks_in_one_process(capsys, saved, tmp_path):
    save_file(numbers(8), tmp_path / "data.safetensors")
    line = refused(capsys, "run", saved / "gpipe", "--data", tmp_path / "data.safetensors")
    assert f"torchrun --nproc-per-node 2 -m fxpipe run {saved / 'gpipe'}" in line


def test_tensorboard_is_missed_before_anything_runs(capsys, saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = "run", saved / "no", "--data", "x", "--tensorboard", "y"
    assert "pip install 'fxpipe[tensorboard]'" in refused(capsys, *run)


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_completion(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert {"bash": "--memory-limit", "fish": "-l memory-limit", "zsh": "--memory-limit"}[shell] in script


def test_completion_knows_files_and_choices(capsys):
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()

    def of(command, option):
        (line,) = (x for x in lines if f"using {command}'" in x and f"-l {option} " in x)
        return line.split(f"-l {option} ")[1]

    assert of("simulate", "schedule-file").startswith('-xka "(__fish_complete_path ')
    assert of("compile", "recompute").startswith('-xka "norms full auto"')
    assert of("run", "lr").endswith("-d 'learning rate of AdamW (default 3e-4)'")


@pytest.mark.parametrize(
    ("tensors", "counted_as"),
    [
        ([((4, 12), "torch.int64"), ((4,), "torch.int64")], ("tokens", (4, 12))),
        ([((4, 3, 8, 8), "torch.uint8"), ((4,), "torch.int64")], ("samples", (4,))),  # pixels
        ([((4, 3, 8, 8), "torch.float32"), ((4, 10), "torch.int64")], ("samples", (4,))),  # labels of classes
        ([((4, 12), "torch.bool")], ("samples", (4,))),
        ([((), "torch.int64")], ("samples", (1,))),
    ],
)
def test_units_of_speed(tensors, counted_as):
    assert counted(tensors) == counted_as


class Batches:
    once, state = 3, {}

    def batch(self, step):
        return numbers(4)


def test_a_log_of_json_lines(tmp_path):
    pipe = fxpipe.compile(Chain(2), numbers(2), ranks=1, microbatches=2, schedule="1f1b", check=False)
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": -1}\n')
    train(pipe, Batches(), LoopSettings(steps=2, lr=0.1, log_file=file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [-1, 0, 1]
    assert lines[2].keys() >= {"time", "loss", "lr", "norm", "samples/s", "bubble"}


def test_the_log_as_json(tmp_path, capsys, caplog):
    pipe = fxpipe.compile(Chain(2), numbers(2), ranks=1, microbatches=2, schedule="1f1b", check=False)
    train(pipe, Batches(), LoopSettings(steps=2, lr=0.1, json_lines=True))
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [0, 1]
    assert "loss" not in caplog.text


def test_a_run_without_steps_leaves_the_recorded_one(tmp_path):
    for begun in (0, 1):
        pipe = fxpipe.compile(Chain(2), numbers(2), ranks=1, microbatches=2, schedule="1f1b", check=False)
        pipe.step_number = begun
        train(pipe, Batches(), LoopSettings(steps=1, lr=0.1, record=tmp_path))
        assert json.loads((tmp_path / "measured0.json").read_text())["spans"]


def test_an_error_before_the_ranks_know_each_other(monkeypatch, tmp_path, capsys):
    """Torchrun's summary, which is printed last, has its message."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    message = refused(capsys, "explain", tmp_path / "none")
    found = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message == f"fxpipe: error: {found.removeprefix('ArtifactError: ')}\n"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "option.json"))
    refused(capsys, "run", tmp_path)
    assert "required: --data" in (tmp_path / "option.json").read_text()
