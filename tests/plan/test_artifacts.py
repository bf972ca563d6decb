"""Saved pipelines, schedules and costs from elsewhere: whatever is in them, a clear error or they work."""

import contextlib
import copy
import io
import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file
from saved_plan import write_plan
from zoo import CASES, Case, Chain, Shape, compiled, numbers

import fxpipe
import fxpipe.ir.liveness
from fxpipe.cli import main
from fxpipe.cli.run.data import FileData
from fxpipe.cli.sources import recorded_costs
from fxpipe.errors import ArtifactError, BatchError, FxpipeError, RunError, ScheduleError
from fxpipe.plan.artifact import FORMAT, RankTensors, TensorLayout
from fxpipe.plan.rows import ShardName
from fxpipe.plan.saved import check as of_plan
from fxpipe.plan.saved.files import read_plan
from fxpipe.plan.saved.recorded import read_spans
from fxpipe.plan.step import BatchSpec, Leaf
from fxpipe.schedule.candidate_row import Tried
from fxpipe.schedule.formats.costs_file import read_costs
from fxpipe.schedule.formats.handwritten import parse_schedule, read_schedule
from fxpipe.viz.explanation import explain

MICROBATCHES = 4
Json = Any


def save_all(directory: Path) -> None:
    """Pipelines in which every field of a plan is used: offloaded, sized, and with vocabulary stages."""
    smallest = fxpipe.ir.liveness.SMALLEST
    fxpipe.ir.liveness.SMALLEST = 1  # the models are small
    chain, tied = Case(Chain, numbers), CASES["tied_head"]
    compiled(chain, chain.build(), MICROBATCHES, Shape(2, "gpipe", offload=True)).save(directory / "offload")
    compiled(tied, tied.build(), MICROBATCHES, Shape(2, "zb-h1", vocab_parallel=True)).save(
        directory / "vocabulary"
    )
    sized = fxpipe.compile(
        Chain(4), numbers(2), ranks=2, microbatches=MICROBATCHES, schedule="1f1b", dimensions={}
    )
    candidate = Tried("1f1b", 1, "plain", 0.1, 0.2, 300.0, "")
    plan = replace(sized.plan, tried=(candidate, replace(candidate, seconds=None, why="no room")))
    replace(sized, artifact=replace(sized.artifact, plan=plan)).save(directory / "sized")
    fxpipe.ir.liveness.SMALLEST = smallest


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("originals")
    save_all(directory)
    return directory


@pytest.fixture
def saved(originals, tmp_path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        shutil.copytree(originals / name, tmp_path / name)
        return tmp_path / name

    return copied


def used(directory: Path) -> None:
    """All that is done with a saved pipeline without running it."""
    pipe = fxpipe.load(directory)
    pipe.simulate()
    if pipe.plan.work is not None:
        pipe.simulate(sizes=dict.fromkeys(pipe.plan.work.lengths, 3))
        _ = pipe.stages[0].expressions.forward
    explain(pipe.plan, Console(file=io.StringIO(), markup=False))


def changed(directory: Path, edit: Callable[[Json], Json]) -> None:
    plan = json.loads((directory / "plan.json").read_text())
    new = edit(plan)
    write_plan(directory, plan if new is None else new)


def put(path: str, value: Json) -> Callable[[Json], None]:
    """Another value at ``a.b[3]``."""

    def edit(plan: Json) -> None:
        *way, last = re.findall(r"[^.\[\]]+", path)
        for key in way:
            plan = plan[int(key) if isinstance(plan, list) else key]
        plan[int(last) if isinstance(plan, list) else last] = value

    return edit


def dropped(path: str) -> Callable[[Json], None]:
    def edit(plan: Json) -> None:
        *way, last = re.findall(r"[^.\[\]]+", path)
        for key in way:
            plan = plan[int(key) if isinstance(plan, list) else key]
        del plan[int(last) if isinstance(plan, list) else last]

    return edit


#: Of which pipeline, at which place, what, and what the error says of it.
EDITS: list[tuple[str, str, Json, str]] = [
    ("offload", "state[0]", ["a", "blocks.1.inner.weight"], "state lacks the parameter "),
    ("offload", "format", FORMAT - 1, f"has format {FORMAT - 1}"),
    ("offload", "format", True, "has format True"),
    ("offload", "format", "2", "has format '2'"),
    ("offload", "version", 7, "version is 7 and must be a string"),
    ("offload", "model", ["a"], "model is ['a'] and must be a string"),
    ("offload", "extra", 1, "unknown field 'extra'"),
    ("offload", "step.extra", 1, "step has the unknown field 'extra'"),
    ("offload", "step.ranks", 0, "step.ranks is 0"),
    ("offload", "step.ranks", -2, "step.ranks is -2"),
    ("offload", "step.ranks", 2.0, "step.ranks is 2.0 and must be a whole number"),
    ("offload", "step.ranks", True, "step.ranks is True"),
    ("offload", "step.ranks", 10**9, "step.ranks is 1000000000"),
    ("offload", "step.ranks", 10**30, "step.ranks is a number of 100 bits"),
    ("offload", "step.ranks", 3, "order has 2 entries and must have 3, one for each rank"),
    ("offload", "step.microbatches", 10**9, "never runs F0.4"),
    ("offload", "step.microbatches", 0, "at least one microbatch"),
    ("offload", "step.microbatches", 3, "has 2 stages and 3 microbatches"),
    ("offload", "step.microbatches", None, "step.microbatches is None"),
    ("offload", "step.leaves", [["x"]], "step.leaves has 1 entries and must have 2, one for each rank"),
    ("offload", "step.leaves[0][0]", "z", "step.leaves[0][0] is 'z'"),
    ("offload", "step.leaves[0]", ["x", "x"], "step.leaves[0] has 'x' twice"),
    ("offload", "step.loss_rank", 2, "step.loss_rank is 2 and must be from 0 to 1"),
    ("offload", "step.loss_rank", -1, "step.loss_rank is -1"),
    ("offload", "step.loss_dtype", "torch.nn", "step.loss_dtype is 'torch.nn'"),
    ("offload", "step.loss_dtype", "float32", "step.loss_dtype is 'float32'"),
    ("offload", "step.has_count", 0, "step.has_count is 0 and must be true or false"),
    ("offload", "step.seed", 0.5, "step.seed is 0.5"),
    ("offload", "step.batch.leaves[0].name", "y", "step.batch.leaves has 'y' twice"),
    ("offload", "step.batch.leaves[0].shape", "28", "step.batch.leaves[0].shape is '28' and must be a list"),
    ("offload", "step.batch.leaves[0].shape", [-2, 8], "step.batch.leaves[0].shape[0] is -2"),
    ("offload", "step.batch.leaves[0].shape", [2**40, 2**40], "step.batch.leaves[0].shape is "),
    ("offload", "step.batch.leaves[0].stride", [10**9, 1], "step.batch.leaves[0].stride is (1000000000, 1)"),
    ("offload", "step.batch.leaves[0].stride", [8], "leaves[0].stride has 1 entries and must have 2"),
    ("offload", "step.batch.leaves[0].dtype", "torch.cuda", "leaves[0].dtype is 'torch.cuda'"),
    ("offload", "placement", [0, 2], "placement[1] is 2"),
    ("offload", "placement", [0, -1], "placement[1] is -1"),
    ("offload", "placement", [], "placement is () and must be of 1 to "),
    ("offload", "placement", [1, 0], "stages[0].rank is 0 and must be 1"),
    ("offload", "placement", [0, 1, 1], "stages has 2 entries and must have 3"),
    ("offload", "order", "F0.0", "order is 'F0.0' and must be a list"),
    ("offload", "order[0]", "F0.99999999999", "'F0.99999999999' is no op"),
    ("offload", "order[0]", "F0.٣", "'F0.٣' is no op"),
    ("offload", "order[0]", "F99999999.0", "runs F99999999.0, but the schedule has 2 stages"),
    ("offload", "order[0]", "", "never runs F0.0"),
    ("offload", "order[0]", "F1.0", "stage 1 is placed on rank 1"),
    ("offload", "order[0]", 5, "order[0] is 5"),
    ("offload", "stages[1].stage", 0, "stages[1].stage is 0 and must be 1"),
    ("offload", "stages[0].parameters[0]", "nothing", "stages[0].parameters[0] is 'nothing'"),
    ("offload", "costs.stages[0].forward", -1.0, "costs.stages[0].forward is -1.0 and must be 0 or more"),
    ("offload", "costs.stages[0].forward", float("nan"), "holds NaN, which is not a number"),
    ("offload", "costs.stages[0].forward", float("inf"), "holds Infinity, which is not a number"),
    ("offload", "costs.stages[0].forward", 1e300, "costs.stages[0].forward is 1e+300"),
    ("offload", "costs.stages[0].forward", 10**400, "costs.stages[0].forward is a number of 1329 bits"),
    ("offload", "costs.stages[0].forward", False, "costs.stages[0].forward is False"),
    ("offload", "costs.edges[0].source.stage", 9, "costs.edges[0].source.stage is 9"),
    ("offload", "costs.edges[0].source.phase", "Q", "source.phase is 'Q' and must be one of F, B, W"),
    ("offload", "costs.edges[0].source.phase", {}, "source.phase is {}"),
    (
        "offload",
        "costs.edges[0].target",
        {"stage": 0, "phase": "F"},
        "the edges between the sections form a cycle",
    ),
    ("offload", "costs.link.ranks", 0, "costs.link.ranks is 0 and must be 1 or more"),
    ("offload", "costs.link", None, "has transfers, but the costs have no link"),
    ("offload", "channels[0]", [0, 7], "channels[0][1] is 7"),
    ("offload", "channels[0]", [0, 0], "channels[0] is (0, 0) and must be of two different ranks"),
    ("offload", "channels[0]", [1, 0], "channels has (1, 0) twice"),
    ("offload", "channels[0]", [0, 1, 1], "channels[0] is [0, 1, 1] and must be a list of 2"),
    ("offload", "collectives", 3, "collectives is 3 and must be from 0 to 0"),
    ("vocabulary", "collectives", 10**9, "collectives is 1000000000"),
    ("vocabulary", "vocabulary.output_shards", 3, "vocabulary.output_shards is 3 and must be 0 or 2"),
    ("vocabulary", "vocabulary.embedding_shards", 1, "vocabulary.embedding_shards is 1 and must be 0 or 2"),
    ("vocabulary", "vocabulary.barriers", 99, "vocabulary.barriers is 99"),
    ("vocabulary", "layouts.embedding.weight", None, "layouts is missing"),
    ("offload", "tensors[0].gradients[0]", "nothing", "tensors[0].gradients[0] is 'nothing'"),
    ("offload", "tensors[0].buffers", ["nothing"], "tensors[0].buffers[0] is 'nothing'"),
    ("offload", "tensors[0]", [], "tensors[0] is [] and must be an object"),
    (
        "offload",
        "layouts.x",
        {"shape": [1], "stride": [1], "dtype": "torch.int8"},
        "layouts has 'x', which no rank holds",
    ),
    ("offload", "prediction.seconds", 0, "prediction.seconds is 0.0 and must be above 0"),
    ("offload", "prediction.span_bubble", 7, "prediction.span_bubble is 7.0 and must be from 0 to 1"),
    ("offload", "prediction.peak_memory", [1.0], "prediction.peak_memory has 1 entries and must have 2"),
    ("offload", "recompute", "all", "recompute is 'all'"),
    ("offload", "tier", "tape", "tier is 'tape' and must be one of host, disk"),
    ("offload", "tier", None, "must be empty where tier is null"),
    ("offload", "pools", [1], "pools has 1 entries and must have 2"),
    ("offload", "pools[0]", -1, "pools[0] is -1"),
    ("offload", "pools[0]", 10**17, "pools[0] is 100000000000000000"),
    ("offload", "transfers[0].begin", -5, "must lie between ops"),
    ("offload", "transfers[0].end", 10**9, "must lie between ops"),
    ("offload", "transfers[0].stage", 77, "is for an op that no rank runs"),
    ("offload", "transfers[0].microbatch", -1, "is for an op that no rank runs"),
    ("offload", "transfers[0].user", "F", "must be B or W"),
    ("offload", "transfers[0].direction", "sideways", "must be one of offload, reload"),
    ("sized", "work.lengths.microbatch", 0, "work.lengths['microbatch'] is 0"),
    ("sized", "work.lengths", {}, "work.lengths is {} and must be of 1 to 16 entries"),
    ("sized", "work.edges", [], "work.edges has 0 entries and must have 2"),
    (
        "sized",
        "work.edges[0]",
        [[1, 0, 1]],
        "work.edges[0][0] is (1, 0, 1) and must be a numerator, a denominator from 1",
    ),
    ("sized", "work.edges[0]", [[1, 1]], "work.edges[0][0] is (1, 1) and must be of 3 numbers"),
    ("sized", "work.edges[0]", [[1, 1, 10**9]], "work.edges[0][0] is (1, 1, 1000000000) and must be"),
    ("sized", "work.edges[0]", [[-1, 1, 1]], "work does not give the costs of the example"),
    ("sized", "work.rates.link", 0, "work.rates.link is 0.0 and must be 1 or more"),
    ("sized", "work.rates.inter_link", 0, "work.rates.inter_link is 0.0 and must be 1 or more"),
    ("sized", "work.rates.inter_latency", -1, "work.rates.inter_latency is -1.0 and must be 0 or more"),
    (
        "sized",
        "costs.edges[0].inter_seconds",
        -1,
        "costs.edges[0].inter_seconds is -1.0 and must be 0 or more",
    ),
    ("sized", "costs.ranks_per_machine", 0, "costs.ranks_per_machine is 0 and must be 1 or more"),
    (
        "sized",
        "work.edges[0]",
        [[1, 1, 1]] * 2000,
        "work.edges[0] is a list of 2000 and must be of 0 to 1024 entries",
    ),
    ("sized", "tried[0].seconds", -1, "tried[0].seconds is -1.0"),
    ("sized", "tried[0].recompute", "x", "tried[0].recompute is 'x'"),
    ("sized", "tried[0].span_bubble", "0", "tried[0].span_bubble is '0'"),
]


@pytest.mark.parametrize(("name", "path", "value", "message"), EDITS, ids=lambda x: str(x)[:30])
def test_an_edit_of_the_plan(saved, name, path, value, message):
    directory = saved(name)
    if path == "layouts.embedding.weight":
        changed(directory, lambda plan: plan["layouts"].pop("embedding.weight") and None)
        message = "layouts['embedding.weight'] is missing"
    else:
        changed(directory, put(path, value))
    with pytest.raises(ArtifactError) as error:
        used(directory)
    assert str(directory / "plan.json") in str(error.value)
    assert message in str(error.value)
    assert len(str(error.value)) < 600
    assert main(["explain", str(directory)]) == main(["simulate", "--costs", str(directory)]) == 2


@pytest.mark.parametrize(
    "path", ["order", "step", "step.seed", "costs.edges[0].source", "layouts", "tensors"]
)
def test_a_field_that_is_missing(saved, path):
    directory = saved("offload")
    changed(directory, dropped(path))
    with pytest.raises(ArtifactError, match=re.escape(f"{path} is missing")):
        used(directory)


TEXTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda text: b"", "is not JSON"),
    "nested": (lambda text: b"[" * 10**6, "nested too deeply"),
    "nested within": (lambda text: text.replace(b'"zb-h1"', b'{"a":' * 10**5), "nested too deeply"),
    "a key twice": (lambda text: text.replace(b'"ranks": 2', b'"ranks": 2, "ranks": 3'), "key 'ranks' twice"),
    "digits": (lambda text: text.replace(b'"ranks": 2', b'"ranks": ' + b"9" * 5000), "too many digits"),
    "1e999": (lambda text: text.replace(b'"seed": 0', b'"seed": 1e999'), "step.seed is inf"),
    "latin-1": (lambda text: text.replace(b"TiedHead", b"T\xefed"), "is not UTF-8"),
    "byte order mark": (lambda text: b"\xef\xbb\xbf" + text, "is not JSON"),
    "UTF-16": (lambda text: text.decode().encode("utf-16"), "is not UTF-8"),
    "two objects": (lambda text: text * 2, "is not JSON: Extra data"),
    "too large": (lambda text: b" " * (33 << 20) + text, "is larger than 32 MiB"),
    "many values": (lambda text: b"[" + b"{}," * (8 << 20) + b"{}]", "more than 8000000 values"),
    "cut": (lambda text: text[:-2], "is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_plan_that_is_other_text(saved, name):
    edit, message = TEXTS[name]
    file = saved("vocabulary") / "plan.json"
    file.write_bytes(edit(file.read_bytes()))
    with pytest.raises(ArtifactError, match=re.escape(message)):
        fxpipe.load(file.parent)


# -- what a path leads to -----------------------------------------------------------------------------------

NAMES = ["plan.json", "rank1.py", "rank1.safetensors", "rank1.sha256"]
INSTEAD: dict[str, Callable[[Path], object]] = {
    "a directory": lambda file: file.mkdir(),
    "a pipe": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a link to nothing": lambda file: file.symlink_to("nothing"),
    "a link to itself": lambda file: file.symlink_to(file),
    "nothing": lambda file: None,
    "an empty file": lambda file: file.touch(),
    "bytes": lambda file: file.write_bytes(b"\xff\x00" * 100),
}


def load_and_run(directory: Path) -> None:
    fxpipe.load(directory).run_local(numbers(2 * MICROBATCHES))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.filterwarnings("ignore:.*was edited since")
def test_something_else_than_a_file(saved, name, instead):
    directory = saved("offload")
    (directory / name).unlink()
    INSTEAD[instead](directory / name)
    with pytest.raises(ArtifactError, match=re.escape(name)):
        load_and_run(directory)


def test_a_directory_instead_of_the_plan_does_not_stay_open(saved):
    file = saved("offload") / "plan.json"
    file.unlink()
    file.mkdir()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ArtifactError, match="Is a directory"):
        fxpipe.load(file.parent)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_names_are_printed_as_they_are(saved, capsys):
    """What looks like markup to the library that prints, or like an emoji, is a name."""
    directory = saved("sized")
    changed(directory, put("model", "[/red] :boom: [bold]"))
    changed(directory, put("tried[0].schedule", "[/x]"))
    for command in (["explain"], ["simulate", "--costs"]):
        assert main([*command, str(directory)]) == 0
        assert "[/red] :boom: [bold]" in capsys.readouterr().out


def test_links_to_files(saved, tmp_path):
    directory = saved("offload")
    for name in NAMES:
        (directory / name).rename(tmp_path / name)
        (directory / name).symlink_to(tmp_path / name)
    used(directory)


# -- programs and weights that are not as they were saved ---------------------------------------------------


def test_nothing_is_told_of_what_is_as_it_was_saved(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used(saved("vocabulary"))


def test_an_edited_program_is_told_and_runs(saved):
    directory = saved("offload")
    batch = numbers(2 * MICROBATCHES)
    before = fxpipe.load(directory).run_local(batch).loss
    program = directory / "rank1.py"
    program.write_text(program.read_text() + "\n# mine: å\n")
    with pytest.warns(UserWarning, match=r"rank1\.py was edited since it was saved, and runs as it is now"):
        pipe = fxpipe.load(directory)
    assert torch.equal(pipe.run_local(batch).loss, before)


def test_the_first_line_that_cannot_be_proved_is_told(saved):
    program = saved("offload") / "rank1.py"
    source = program.read_text()
    program.write_text(f"{source}\nassert step\nif step:\n    raise KeyError\n")
    number = source.count("\n") + 4
    wanted = rf"as it is now\. fxpipe check cannot prove line {number}: a raise\.$"
    with pytest.warns(UserWarning, match=wanted):
        fxpipe.load(program.parent)


PROGRAMS: dict[str, tuple[Callable[[str], bytes], str]] = {
    "latin-1": (lambda source: source.encode() + b"# \xe9", "is not UTF-8"),
    "null": (lambda source: (source + "\0").encode(), "is no Python program"),
    "nested": (lambda source: ("(" * 5000 + ")" * 5000 + "\n" + source).encode(), "is no Python program"),
    "deep": (lambda source: ("x = " + "-" * 50000 + "1\n" + source).encode(), "is no Python program"),
    "head fails": (lambda source: (source + "\nno_such_name\n").encode(), "fails before its step: NameError"),
    "no layouts": (lambda source: (source + "\nMESSAGES = 3\n").encode(), "MESSAGES is a int"),
    "odd layout": (lambda source: (source + "\nMESSAGES['x'] = 3\n").encode(), "MESSAGES['x'] is 3"),
    "no step": (lambda source: source.replace("def step(", "def stop(").encode(), "no step(rt, batch)"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:.*was edited since")
def test_a_program_that_cannot_run(saved, name):
    edit, message = PROGRAMS[name]
    program = saved("offload") / "rank1.py"
    program.write_bytes(edit(program.read_text()))
    with pytest.raises((ArtifactError, RunError), match=re.escape(message)):
        load_and_run(program.parent)


@pytest.mark.filterwarnings("ignore:.*was edited since")
def test_a_message_in_another_layout_than_is_expected(saved):
    """Where the program no longer says beforehand what it will expect."""
    program = saved("offload") / "rank1.py"
    other = "((4, 4), (4, 1), torch.float32)"
    source, edits = re.subn(r"rt\.receive\(MESSAGES\[\"\w+\"\]", f"rt.receive({other}", program.read_text())
    assert edits == 1
    program.write_text(source)
    message = (
        "Rank 0 sent a tensor of shape, strides and dtype (2, 8) (8, 1) torch.float32, and rank 1 expects "
        "(4, 4) (4, 1) torch.float32"
    )
    with pytest.raises(RunError, match=re.escape(message)):
        load_and_run(program.parent)


def test_loaded_tensors_begin_where_torchs_allocator_lets_them(saved):
    """At the addresses that they have in a file the last bits of products differ."""
    parameters = fxpipe.load(saved("offload")).parameters
    assert parameters
    assert {tensor.data_ptr() % 64 for tensor in parameters.values()} == {0}


def test_candidates_that_were_left_out_are_a_line_of_each_kind(saved):
    plan = fxpipe.load(saved("sized")).plan
    unfit = [
        Tried(name, 1, "plain", peak_memory=1024.0 * k, why="needs more") for k, name in enumerate("abcde", 4)
    ]
    others = [
        replace(unfit[0], schedule="f", offloads=True),
        *(
            replace(unfit[0], schedule=name, peak_memory=None, least=60.0 * k)
            for k, name in enumerate("hg", 2)
        ),
        *(replace(unfit[0], schedule=name, peak_memory=None, why="has an odd number") for name in "ij"),
    ]
    plan = replace(plan, tried=(plan.tried[0], *unfit, *others), memory_limit="3KiB")
    written = io.StringIO()
    explain(plan, Console(file=written, markup=False, width=200))
    assert written.getvalue().count("needs more") == 0
    lines = written.getvalue().splitlines()
    begin = lines.index(next(x for x in lines if x.startswith("Do not fit")))
    assert lines[begin : begin + 4] == [
        "Do not fit the memory limit: "
        "a x 1 from 4 KiB on; b x 1 from 5 KiB on; c x 1 from 6 KiB on; 2 others from more on.",
        "Do not fit the memory limit with as much offload as the links carry: f x 1 from 4 KiB on.",
        "Left out, as they take longer by a bound or an estimate: h x 1 from 120 s on; g x 1 from 180 s on.",
        "i x 1; j x 1: has an odd number",
    ]


def test_loading_runs_no_program(saved, tmp_path):
    directory = saved("offload")
    for rank in range(2):
        program = directory / f"rank{rank}.py"
        program.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + program.read_text())
    with pytest.warns(UserWarning, match="was edited"):
        used(directory)
    assert main(["explain", str(directory)]) == main(["simulate", "--costs", str(directory)]) == 0
    assert not (tmp_path / "ran").exists()


def test_a_plan_that_was_changed_is_refused(saved):
    """Also where its fields fit each other, and training would go on with other numbers."""
    directory = saved("offload")
    plan = json.loads((directory / "plan.json").read_text())
    plan["step"]["seed"] += 1
    (directory / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(
        ArtifactError, match=r"plan\.json is damaged: its checksum .*rank0\.safetensors plan\.json >"
    ):
        fxpipe.load(directory)


def test_damaged_weights_are_refused_until_their_checksum_is_written(saved):
    directory = saved("offload")
    file = directory / "rank0.safetensors"
    weights = {name: t + 1 for name, t in load_file(file).items()}
    save_file(weights, file)
    with pytest.raises(
        ArtifactError, match=r"rank0\.safetensors is damaged: its checksum .*: sha256sum"
    ) as told:
        fxpipe.load(directory)
    subprocess.run(str(told.value).rpartition(": ")[2], shell=True, check=True, cwd=directory)
    pipe = fxpipe.load(directory)
    assert all(torch.equal(pipe.parameters[name], weight) for name, weight in weights.items())


WEIGHTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "another dtype": (lambda w: w.update({n: t.half() for n, t in w.items()}), "torch.float16"),
    "another shape": (lambda w: w.update({n: t[None].clone() for n, t in w.items()}), "in shape (1, "),
    "one too many": (lambda w: w.update(extra=torch.ones(1)), "'extra'"),
    "one too few": (lambda w: w.popitem(), "does not hold"),
    "none": (lambda w: w.clear(), "does not hold"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_something_else(saved, name):
    edit, message = WEIGHTS[name]
    file = saved("offload") / "rank0.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file)
    with pytest.raises(ArtifactError, match=re.escape(message)) as error:
        fxpipe.load(file.parent)
    assert str(file) in str(error.value)


def test_weights_of_another_rank(saved):
    directory = saved("offload")
    shutil.copy(directory / "rank1.safetensors", directory / "rank0.safetensors")
    with pytest.raises(ArtifactError, match=r"rank0\.safetensors"):
        fxpipe.load(directory)


class Transposed(Chain):
    """A weight whose memory runs along its columns, which the step asks for."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[1].inner.weight.data = self.blocks[1].inner.weight.data.t().contiguous().t()

    def between(self, x, i):
        return x * self.blocks[1].inner.weight.t().view(-1)[: x.shape[-1]] if i == 1 else x


@pytest.mark.slow
def test_strides_are_kept(tmp_path):
    case = Case(Transposed, numbers)
    pipe = compiled(case, case.build(), MICROBATCHES, Shape(2))
    pipe.save(tmp_path / "strides")
    loaded = fxpipe.load(tmp_path / "strides")
    assert loaded.parameters["blocks.1.inner.weight"].stride() == (1, 16)
    batch = case.data(MICROBATCHES)
    assert torch.equal(loaded.run_local(batch).loss, pipe.run_local(batch).loss)


# -- any edit -----------------------------------------------------------------------------------------------

ODD: list[Json] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 10**9, -(10**9), 10**18, 2**63, 10**40, 0.5, -0.5, 1e-300,
    1e30, 1e308, float("nan"), float("inf"), "", "0", "F", "B0.0", "F0.0 F0.0", "torch.float32",
    "torch.int64", "disk", "[/red]", "\0", "\ud800", "٣", "x" * 10**5, [], {}, [[]], [0], ["x"], [None],
    {"x": 0}, {"stage": 0, "phase": "F"},
]  # fmt: skip


def places(data: Json) -> list[tuple[Json, Any]]:
    """Each container with each of its keys."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    return [(data, key) for key in keys] + [place for key in keys for place in places(data[key])]


def mutate(plan: Json, draw: Callable[[int], int]) -> None:
    """One edit; ``draw(n)`` gives a number below n."""
    found = places(plan)
    container, key = found[draw(len(found))]
    other, other_key = found[draw(len(found))]
    way = draw(8)
    if way == 0:
        del container[key]
    elif way == 1:
        container[key] = copy.deepcopy(other[other_key])
    elif way == 2 and isinstance(container, list):
        container.insert(draw(len(container) + 1), copy.deepcopy(container[key]))
    elif way == 3 and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    elif way == 4 and type(container[key]) in (int, float):
        container[key] = container[key] * (-1, 2, 1000, 10**6)[draw(4)] + (0, 1, -1, 0.5)[draw(4)]
    elif way == 5 and isinstance(container, list):
        container.reverse()
    else:
        container[key] = copy.deepcopy(ODD[draw(len(ODD))])


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_edit_of_a_plan(originals, data):
    name = data.draw(st.sampled_from(["offload", "vocabulary", "sized"]))
    plan = json.loads((originals / name / "plan.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(plan, lambda n: data.draw(st.integers(0, max(n - 1, 0))))
    directory = originals / f"{name} edited"
    shutil.copytree(originals / name, directory, dirs_exist_ok=True)
    write_plan(directory, plan)
    with contextlib.suppress(FxpipeError):  # any other error fails
        used(directory)


def test_rows_of_a_table_follow_each_other_by_their_numbers():
    """As texts ``"a[10:12]"`` comes before ``"a[2:10]"``."""
    parts = [ShardName.of_rows("a", *rows) for rows in ((0, 2), (2, 10), (10, 12))]
    lengths = {"a": 12} | {part: part.end - part.begin for part in parts}
    layouts = {name: TensorLayout((rows, 4), (4, 1), "torch.float32") for name, rows in lengths.items()}
    tensors = [RankTensors((part,), (), (), ()) for part in parts]
    of_plan._tensors(SimpleNamespace(layouts=layouts, tensors=tensors, order=[]))


# -- data to train on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("instead", [name for name in INSTEAD if name != "nothing"])
def test_data_that_is_something_else(saved, tmp_path, instead):
    INSTEAD[instead](tmp_path / "data")
    with pytest.raises(BatchError, match=r"data (cannot be read|is not a regular file)"):
        FileData(tmp_path / "data", read_plan(saved("offload")).step.batch, 2)


@pytest.mark.parametrize("value", ["<object>", "(" * 10**5, "1+", "[" * 5000 + "]" * 5000])
def test_a_fixed_value_that_is_no_text(value, tmp_path):
    with pytest.raises(BatchError, match=r"'times' was .* which cannot be parsed"):
        FileData(tmp_path / "data", BatchSpec((Leaf("times", None, (), "", value),)), 2)


# -- schedules, costs and records ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.99999999999 BW0.0", "'F0.99999999999' is no op"),
        ("F0.999999999 BW0.999999999", "rank 0 never runs F0.0"),
        ("F99999999.0", "no rank runs stage 0"),
        ("F0.0 BW0.0 F0.999999999", "rank 0 never runs F0.1"),
        ("F0.٣", "'F0.٣' is no op"),
        ("٣F٣", "'٣F٣' is no op"),
        ("0F٣", "row 0: '0F٣' is not an action"),
        ("F" + "0" * 10**6 + ".0", "is no op"),
        ("0SEND_F0,0RECV_B0\n1UNSHARD\n", "has no ops"),
        ("0F0,0B0\n1UNSHARD\n", "the line of rank 1 has no ops"),
        ("0F0," + "(" * 10**4 + "0B0" + ")OVERLAP_F_B" * 10**4, "is not an action"),
        ("0F0," + "1" * 10**6, "is not valid CSV: field larger than"),
        ('0F0,"' + "x," * 10**6, "is not valid CSV"),
        ("0F99999999999", "is not an action"),
        ("F0.0\x00", "is no op"),
    ],
    ids=lambda x: x[:20],
)
def test_schedules_that_are_none(text, message):
    with pytest.raises(ScheduleError, match=re.escape(message)) as error:
        parse_schedule(text, "x")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("read", [read_schedule, read_costs])
def test_something_else_than_a_schedule_or_costs(tmp_path, read, instead):
    INSTEAD[instead](tmp_path / "file")
    with pytest.raises(ScheduleError, match="file"):
        read(tmp_path / "file")


def test_a_schedule_file_that_is_too_large(tmp_path):
    (tmp_path / "file").write_bytes(b"F0.0 " * (4 << 20))
    with pytest.raises(ScheduleError, match="is larger than 16 MiB"):
        read_schedule(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"spans": 3}', "spans is 3 and must be a list"),
        ('{"spans": [["F0.0", 0]]}', "spans[0] is ['F0.0', 0] and must be a list of 3"),
        ('{"spans": [["F0.0", 1, 0]]}', "spans[0] ends at 0.0, before it starts"),
        ('{"spans": [["F0.0", "a", 0]]}', "spans[0][1] is 'a'"),
        ('{"spans": [["F0.0", NaN, 0]]}', "holds NaN"),
        ("[" * 10**6, "nested too deeply"),
        ('{"spans": [["F0.0", true, 2]]}', "spans[0][1] is True"),
        ('{"spans": [["F9.0", 1, 2]]}', "holds F9.0, which rank 0 does not run"),
        ('{"spans": [["hello", 1, 2]]}', "'hello' is no op"),
        ("[]", "is [] and must be an object"),
    ],
)
def test_records_that_are_none(saved, text, message):
    directory = saved("offload")
    for rank in range(2):
        (directory / f"measured{rank}.json").write_text(text)
    with pytest.raises(ArtifactError, match=re.escape(message)):
        recorded_costs(read_plan(directory), read_spans(directory, 2) or ())
    assert main(["simulate", "--costs", str(directory)]) == 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    class Spectrum(Chain):
        def __init__(self):
            super().__init__(depth=2)
            self.filter = torch.nn.Parameter(torch.randn(5, dtype=dtype))

        def between(self, x, i):
            return torch.fft.irfft(torch.fft.rfft(x) * self.filter, x.shape[-1]).to(x.dtype)

    case = Case(Spectrum, numbers)
    pipe, batch = compiled(case, case.build(), 2, Shape(2)), case.data(2)
    if dtype == torch.complex128:
        with pytest.raises(ArtifactError, match=r"'filter' is of torch\.complex128.* complex64"):
            pipe.save(tmp_path / "pipe")
        return
    expected = pipe.run_local(batch)
    pipe.save(tmp_path / "pipe")
    found = fxpipe.load(tmp_path / "pipe").run_local(batch)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.grads["filter"], expected.grads["filter"])
