"""``fxpipe compile`` saves the pipeline of a function; ``fxpipe export`` the weights of a checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from zoo import Chain, numbers, relative_error

import fxpipe
from fxpipe.cli import main

ROWS, MICROBATCHES = 2, 2
OPTIONS = ["--ranks", "2", "--microbatches", str(MICROBATCHES), "--schedule", "1f1b"]


def chain():
    torch.manual_seed(0)
    return Chain(2), numbers(ROWS)


def with_loss():
    return nn.Linear(8, 8), (torch.zeros(ROWS, 8),), lambda y, x: y.square().mean()


def of_any_length():
    return nn.Linear(8, 8), (torch.zeros(ROWS, 12, 8),), lambda y, x: y.square().mean()


def only_a_model():
    return Chain(2)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)[:, None]
        for mask in (torch.ones(6, 6, dtype=torch.bool), torch.ones(6, 6, dtype=torch.bool).tril()):
            x = F.scaled_dot_product_attention(x, x, x, mask)
        return x.square().mean()


def masked():
    return Masked(), {"x": torch.randn(2, 6, 8)}


def refused(capsys, *arguments) -> str:
    assert main([*map(str, arguments)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_a_function_becomes_a_saved_pipeline(capsys, tmp_path):
    directory = tmp_path / "saved"
    assert main(["compile", f"{__name__}:chain", "-o", str(directory), *OPTIONS, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["directory"], record["model"], record["schedule"]) == (str(directory), "Chain", "1f1b")
    assert (record["ranks"], record["replicas"], record["microbatches"], record["stages"]) == (2, 1, 2, 2)
    pipe = fxpipe.load(directory)
    assert record["seconds"] == pipe.plan.prediction.seconds
    batch, (model, _) = numbers(ROWS * MICROBATCHES), chain()
    assert relative_error(pipe.run_local(batch).loss, model(**batch).detach()) < 1e-6

    assert "--overwrite" not in refused(capsys, "compile", f"{__name__}:chain", "-o", tmp_path, *OPTIONS)
    again = ["compile", f"{__name__}:with_loss", "-o", str(directory), "--ranks", "1", "--microbatches", "3"]
    assert "or give --overwrite" in refused(capsys, *again)
    assert main([*again, "--overwrite", "--schedule", "gpipe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("schedule gpipe")
    assert lines[1].startswith("  predicted: step ")
    assert "torchrun --nproc-per-node 1 -m fxpipe run " in lines[-1]
    assert fxpipe.load(directory).plan.step.microbatches == 3


def test_rules_that_are_left_out(tmp_path):
    out = ["-o", str(tmp_path / "saved"), "--ranks", "1", "--microbatches", "2"]
    assert main(["compile", f"{__name__}:masked", *out]) == 0
    rules = [each.rule for each in fxpipe.load(tmp_path / "saved").plan.rewrites]
    assert rules == ["causal-masks", "empty-masks"]
    without = [word for rule in rules for word in ("--without", rule)]
    assert main(["compile", f"{__name__}:masked", *out, "--overwrite", *without]) == 0
    assert not fxpipe.load(tmp_path / "saved").plan.rewrites


def test_a_pipeline_for_microbatches_of_several_lengths(capsys, tmp_path):
    given = ["-o", str(tmp_path / "saved"), "--ranks", "1", "--microbatches", "2", "--dimension", "time=12"]
    assert main(["compile", f"{__name__}:of_any_length", *given]) == 0
    (length,) = fxpipe.load(tmp_path / "saved").lengths
    assert (length.name, length.example) == ("time", 12)
    capsys.readouterr()
    assert main(["simulate", "--costs", str(tmp_path / "saved"), "--lengths", "3,12,7"]) == 0
    assert "time" in capsys.readouterr().out


def test_what_cannot_be_compiled_is_told_before_anything_long_begins(capsys, tmp_path, monkeypatch):
    given = ["-o", tmp_path / "saved", *OPTIONS]
    for function, words in (
        ("chains", "Did you mean 'chain'?"),
        ("only_a_model", "gives a Chain; it must give (model, example)"),
    ):
        assert words in refused(capsys, "compile", f"{__name__}:{function}", *given)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tests")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "runs in one process" in refused(capsys, "compile", f"{__name__}:chain", *given)
    assert not (tmp_path / "saved").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of one rank with an average, and its weights."""
    directory = tmp_path_factory.mktemp("checkpoints")
    model, example = chain()
    pipe = fxpipe.compile(model, example, ranks=1, microbatches=MICROBATCHES, check=False)
    optimizer, average = pipe.optimizer(torch.optim.SGD, lr=0.1), pipe.average(0.5)
    with fxpipe.Checkpointer(pipe, directory, optimizer=optimizer, state={"average": average}) as saved:
        pipe.step(numbers(ROWS * MICROBATCHES))
        optimizer.step()
        average.step()
        saved.save()
    return directory, pipe.full_state_dict()


def test_weights_of_a_checkpoint(capsys, tmp_path, checkpoint):
    directory, expected = checkpoint
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text('{"kind": "chain"}')
    (like / "model.safetensors").write_text("of the model before it was trained")
    target = tmp_path / "exported"
    assert main(["export", str(directory), "--like", str(like), "-o", str(target), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["tensors"]) == (1, len(expected))
    assert record["bytes"] == sum(tensor.nbytes for tensor in expected.values())
    found = load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((target / "config.json").read_text()) == {"kind": "chain"}


def test_an_average_of_a_checkpoint(capsys, tmp_path, checkpoint):
    directory, expected = checkpoint
    target, (start, _) = tmp_path / "exported", chain()
    assert main(["export", str(directory), "-o", str(target), "--average", "average"]) == 0
    found = load_file(target / "model.safetensors")
    for name, before in start.state_dict().items():
        assert relative_error(found[name], 0.5 * before + 0.5 * expected[name]) < 1e-6, name
    wrong = ["export", directory, "-o", tmp_path / "other", "--average", "averag"]
    assert "Did you mean 'average'? It has: average." in refused(capsys, *wrong)
    assert "is not empty" in refused(capsys, "export", directory, "-o", target)
    assert "holds no checkpoint" in refused(capsys, "export", tmp_path, "-o", tmp_path / "other")
    assert not (tmp_path / "other").exists()
