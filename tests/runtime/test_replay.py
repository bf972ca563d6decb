"""``record=`` and ``fxpipe replay``: an op of a step alone, with its operands, bit for bit."""

import json
import pdb
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import fxpipe
from fxpipe.cli.command import INTERRUPTED, main
from fxpipe.errors import ArtifactError, OptionError
from fxpipe.runtime.debug.recording import RECORDED, copied_in_strides
from fxpipe.runtime.debug.replay import read_recorded

OPS = ("F0.1", "F1.3", "B1.0", "W0.2")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.layer(x).relu()).transpose(0, 1).expand(4, 4).transpose(0, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x):
        return self.blocks(x).square().mean()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    torch.manual_seed(0)
    options = {"ranks": 2, "microbatches": 4, "schedule": "zb-h1", "check": False}
    pipe = fxpipe.compile(Net(), {"x": torch.randn(4, 4)}, **options)
    batch, directory = {"x": torch.randn(16, 4)}, tmp_path_factory.mktemp("recorded")
    plain = pipe.run_local(batch, step=5)
    found = pipe.run_local(batch, step=5, record=dict.fromkeys(OPS, directory))
    assert torch.equal(found.loss, plain.loss)
    assert all(torch.equal(found.grads[name], grad) for name, grad in plain.grads.items())
    return pipe, batch, directory


@pytest.mark.parametrize("op", OPS)
def test_results_are_those_of_the_step(recorded, op, capsys):
    *_, directory = recorded
    assert main(["replay", str(directory), op]) == 0
    head, function, *results = capsys.readouterr().out.splitlines()
    rank = op[1]
    assert head == f"{op} of rank {rank} in step 5"
    assert function.startswith(f"stage{rank}_")
    assert main(["replay", str(directory), op, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["op"], told["rank"], told["step"]) == (op, int(rank), 5)
    assert told["functions"][0]["function"] == function.split(" ")[0]
    assert {result["same"] for result in told["functions"][0]["results"]} == {True}
    assert f"{directory}/rank{rank}.py:" in function
    assert results
    assert all(line.endswith("as in the step") for line in results)
    assert any("grads['blocks." in line for line in results) == (op[0] == "W")


def test_operands_are_those_that_the_op_was_given(recorded):
    """Of the third microbatch, and of the parameters only those that the op reads, before it adds to any."""
    pipe, batch, directory = recorded
    found, tensors = read_recorded(directory, "F0.1", None)
    (call,) = found.calls
    given = [tensors[str(x.tensor)].view(torch.float32).view(x.shape) for x in call.operands if x.shape]
    assert any(torch.equal(x, batch["x"][4:8]) for x in given)
    own = pipe.plan.tensors[0].parameters
    assert len([x for x in given if any(torch.equal(x, pipe.parameters[name]) for name in own)]) == len(own)
    first, tensors = read_recorded(directory, "W0.2", 0)
    names = {result.name for call in first.calls for result in call.results}
    assert names == {f"grads[{name!r}]" for name in own}


def test_an_edited_program_differs(recorded, tmp_path, capsys):
    pipe, batch, _ = recorded
    pipe.run_local(batch, record={"F1.3": tmp_path / "new"})
    program = tmp_path / "new" / "rank1.py"
    text = program.read_text()
    program.write_text(re.sub(r"(= mean\(.*\))", r"\1 * 2", text))
    assert program.read_text() != text
    assert main(["replay", str(tmp_path / "new"), "F1.3", "--rank", "1"]) == 2
    given = capsys.readouterr()
    assert [line.split()[0] for line in given.out.splitlines() if line.endswith("DIFFERS")] == ["[0]"]
    assert "1 of the results above differ from the step's" in given.err


def test_the_debugger_stops_at_the_first_line(recorded, monkeypatch, capsys):
    *_, directory = recorded
    stops = []

    def interaction(self, frame, *rest):
        stops.append((frame.f_code.co_name, sorted(frame.f_locals)))
        self.set_continue()

    monkeypatch.setattr(pdb.Pdb, "interaction", interaction)
    assert main(["replay", str(directory), "F1.3", "--pdb"]) == 0
    assert "as in the step" in capsys.readouterr().out
    ((name, given),) = stops
    assert name == "stage1_forward"
    assert "params" in given


def test_an_op_that_is_left_in_the_debugger_has_no_results(recorded, monkeypatch, capsys):
    *_, directory = recorded
    monkeypatch.setattr(pdb.Pdb, "interaction", lambda self, *frame: self.do_quit(""))
    assert main(["replay", str(directory), "F1.3", "--pdb"]) == INTERRUPTED
    given = capsys.readouterr()
    assert given.err == "fxpipe: the op was left before its results were known\n"
    assert "DIFFERS" not in given.out


def test_errors(recorded, tmp_path):
    pipe, batch, directory = recorded
    for record, says in [
        ({"F1.4": "x"}, r"No program runs the op 'F1\.4' of record\. Did you mean 'F1\.\d'\?"),
        ({"forward": "x"}, "record has the op 'forward'; ops are called F1.3"),
        (["F1.3"], "must map ops to directories"),
    ]:
        with pytest.raises(OptionError, match=says):
            pipe.run_local(batch, record=record)
    with pytest.raises(ArtifactError, match=r"no recording of F1\.2\. Did you mean 'F1\.3'\? It has B1"):
        read_recorded(directory, "F1.2", None)
    with pytest.raises(ArtifactError, match=r"no recording of F1\.3 of rank 0"):
        read_recorded(directory, "F1.3", 0)
    file = directory / "F1.3-rank1.safetensors"
    with safe_open(file, "pt") as opened:
        text = opened.metadata()[RECORDED]
    for damaged in (text[:-9], text.replace('"step": 5', '"step": "x"'), "{}"):
        save_file({}, tmp_path / file.name, {RECORDED: damaged})
        with pytest.raises(ArtifactError, match=r"is damaged: .* Record the op again"):
            read_recorded(tmp_path, "F1.3", 1)
    assert not [*directory.glob(".*")]


def test_other_files_beside_a_recording(recorded, tmp_path):
    _, _, directory = recorded
    for name in ("F1.3-rank1.safetensors", "F1.3-rank1 (copy).safetensors", "of-rank.safetensors"):
        (tmp_path / name).write_bytes((directory / "F1.3-rank1.safetensors").read_bytes())
    found, _ = read_recorded(tmp_path, "F1.3", None)
    assert (found.op, found.rank) == ("F1.3", 1)
    with pytest.raises(ArtifactError, match=r"no recording of F1\.4\..* It has F1\.3\."):
        read_recorded(tmp_path, "F1.4", None)


@pytest.mark.parametrize("stride", [(4, 1), (1, 3), (0, 1), (8, 2), (0, 0)])
def test_strides_are_kept(stride):
    given = torch.randn(3, 4)
    given = given[:1].expand(3, 4) if stride[0] == 0 else given
    given = given[:, :1].expand(3, 4) if stride[1] == 0 else given
    found = copied_in_strides(given, stride)
    assert torch.equal(found, given)
    assert found.stride() == stride
