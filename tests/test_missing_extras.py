"""What an installation lacks is told with its remedy, before anything long begins."""

import importlib
import sys

import pytest

from fxpipe.cli import main, simulate

SIMULATE = (
    "simulate --ranks 2 --microbatches 4 --forward 1 --backward-input 1 --backward-weight 1 --schedule auto"
)


@pytest.mark.parametrize(
    ("module", "lacks", "extra"),
    [
        ("trainer", "transformers", "trainer"),
        ("trainer", "accelerate", "trainer"),
        ("lightning", "lightning.pytorch", "lightning"),
    ],
)
def test_an_integration_without_its_library(module, lacks, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, lacks, None)
    if lacks == "transformers":
        monkeypatch.setitem(sys.modules, "accelerate", sys)  # its import takes seconds
    monkeypatch.delitem(sys.modules, f"fxpipe.integrations.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'fxpipe\[{extra}\]'"):
        importlib.import_module(f"fxpipe.integrations.{module}")


@pytest.mark.parametrize(
    ("command", "lacks", "extra"),
    [
        ("completion bash", "shtab", "completion"),
        (f"{SIMULATE} --exact", "ortools.sat.python", "solver"),
        (f"{SIMULATE} --draw step.png", "resvg_py", "png"),
        (
            "run build/none --data none.safetensors --tensorboard board",
            "torch.utils.tensorboard",
            "tensorboard",
        ),
    ],
)
def test_a_command_without_its_extra(command, lacks, extra, monkeypatch, capsys):
    monkeypatch.setattr(simulate, "_timeline", lambda options: pytest.fail("the search has begun"))
    monkeypatch.setitem(sys.modules, lacks, None)
    assert main(command.split()) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert f"pip install 'fxpipe[{extra}]'" in line
