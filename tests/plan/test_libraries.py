"""Ops that other libraries than torch register: a program imports the module, or who loads it is told."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import ArtifactError
from fxpipe.ir.compat import registrar
from fxpipe.plan.libraries import check_libraries, import_libraries

PACKAGE = {
    "__init__": "",
    "decorated": """
import torch


@torch.library.custom_op("some_library::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: twice(gradient))
""",
    "by_schema": """
import torch

library = torch.library.Library("some_other_library", "DEF")
library.define("half(Tensor x) -> Tensor")
library.impl("half", lambda x: x / 2, "CompositeExplicitAutograd")
torch.library.define("some_library::third", "(Tensor x) -> Tensor")
torch.library.impl("some_library::third", "CompositeExplicitAutograd", lambda x: x / 3)
""",
}

LOADS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import fxpipe

pipe = fxpipe.load(sys.argv[2])
assert "some_library_of_ops" not in sys.modules, "loading imports nothing"
print(float(pipe.run_local((torch.ones(4, 4),)).loss), pipe.check().holds)
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.ops.some_library.twice(self.first(x)) + torch.ops.some_other_library.half(x)
        return self.last(h).square().mean()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a package that registers ops, which is imported."""
    root = tmp_path_factory.mktemp("libraries")
    (root / "some_library_of_ops").mkdir()
    for name, text in PACKAGE.items():
        (root / "some_library_of_ops" / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        for name in PACKAGE:
            __import__(f"some_library_of_ops.{name}")
    return root


@pytest.mark.variation
def test_another_process_runs_ops_of_a_library(package: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pipe = fxpipe.compile(Net(), (torch.ones(2, 4),), ranks=1, microbatches=2)
    assert pipe.plan.libraries == {
        "some_library.twice": "some_library_of_ops.decorated",
        "some_other_library.half": "some_library_of_ops.by_schema",
    }
    loss = float(pipe.run_local((torch.ones(4, 4),)).loss)
    pipe.save(tmp_path / "saved")
    arguments = [sys.executable, "-c", LOADS, str(package), str(tmp_path / "saved")]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert run.stdout.split() == [repr(loss), "True"], run.stderr


class OfThisScript(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.ops.some_library.third(self.first(x).detach())).square().mean()


def test_save_says_which_ops_it_cannot_import(package: Path, tmp_path: Path) -> None:
    pipe = fxpipe.compile(OfThisScript(), (torch.ones(2, 4),), ranks=1, microbatches=2)
    with pytest.warns(
        UserWarning, match=r"some_library\.third, which a module that torch does not tell.*import"
    ):
        pipe.save(tmp_path / "saved")
    assert "# Who loads this program registers torch.ops.some_library before." in pipe.artifact.programs[0]
    assert pipe.check().holds
    pipe.artifact = replace(pipe.artifact, plan=replace(pipe.plan, libraries={"nowhere.f": "rich.missing"}))
    with pytest.raises(ArtifactError, match=r"The pipeline calls .*nowhere\.f, .*cannot be imported"):
        pipe.check()


def test_ops_of_torch_need_no_import() -> None:
    for op in (
        torch.ops.aten.add.Tensor,
        torch.ops.prims.sum.default,
        torch.ops.mkldnn._linear_pointwise.binary,
    ):
        assert registrar(op) is None


@pytest.mark.parametrize(
    ("libraries", "says"),
    [
        (
            {"nowhere.f": "no_such_package.ops"},
            "torch.ops.nowhere.f, which no_such_package.ops registers: .*pip",
        ),
        ({"mine.f": "__main__"}, "mine.f, which the script that compiled registers: .* register it before"),
        ({"nowhere.f": ""}, "a module that torch does not tell registers: .* register it before"),
    ],
)
def test_a_library_that_is_missing_is_named(libraries: dict[str, str], says: str) -> None:
    for check in (check_libraries, import_libraries):
        with pytest.raises(ArtifactError, match=f"build/it calls .*{says}"):
            check(libraries, "build/it")


def test_a_module_that_registers_its_op_no_longer_is_named() -> None:
    check_libraries({"nowhere.f": "rich.text"}, "build/it")  # the program imports it, and says more
    with pytest.raises(ArtifactError, match=r"the import of rich\.text no longer registers"):
        import_libraries({"nowhere.f": "rich.text"}, "build/it")
    with pytest.raises(
        ArtifactError, match=r"rich\.missing, which registers it, cannot be imported: No module"
    ):
        import_libraries({"nowhere.f": "rich.missing"}, "build/it")


def test_a_plan_runs_no_module_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_this_folder.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArtifactError, match=r"of_this_folder registers, and that belongs to no installed"):
        import_libraries({"nowhere.f": "of_this_folder"}, "build/it")
