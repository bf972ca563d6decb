"""Which modules are loaded: by the help no torch, by programs no compiler, by saved pipelines no search."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import fxpipe

#: The modules outside of runtime/ that a program needs.
CONTRACT = {
    "fxpipe",
    "fxpipe.errors",
    "fxpipe.plan.field_types",
    "fxpipe.plan.program.parse",
    "fxpipe.plan.program.performed",
    "fxpipe.plan.program.records",
    "fxpipe.plan.program.shown",
    "fxpipe.plan.program.verbs",
    "fxpipe.plan.step",
    "fxpipe.plan.tensors",
    "fxpipe.plan.version",
    "fxpipe.strict",
}
HEAVY = {"numba", "networkx", "graphviz", "sympy", "rich"}


REPORT = """
import json, sys
files = [n for n, m in sys.modules.items() if not hasattr(m, '__path__')]
print('\\n' + json.dumps(files + [n for n in sys.modules if '.' not in n]), flush=True)
"""


def loaded(code: str, *arguments: object) -> set[str]:
    """The modules that are loaded after a program, in a process of its own; no folders of modules."""
    command = [sys.executable, "-c", code + REPORT, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


#: Each line of its input is code with its arguments, for a fork of a process that has imported torch alone.
BEHIND_TORCH = """
import json, os, sys
import torch
for line in sys.stdin:
    code, arguments = json.loads(line)
    if not os.fork():
        sys.argv[1:] = arguments
        exec(code, {'__name__': '__main__'})
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


@pytest.fixture(scope="module")
def loaded_behind_torch() -> Iterator[Callable[..., set[str]]]:
    """``loaded``, for programs that import torch anyway, which takes seconds."""
    command = [sys.executable, "-c", BEHIND_TORCH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def loaded(code: str, *arguments: object) -> set[str]:
            print(json.dumps([code + REPORT, [*map(str, arguments)]]), file=process.stdin, flush=True)
            for line in process.stdout:
                if line.startswith("["):
                    return set(json.loads(line))
            raise AssertionError("the program has failed; stderr says why")

        yield loaded
        process.stdin.close()


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_needs_no_torch(argument):
    modules = loaded(
        "import contextlib, sys\nfrom fxpipe.cli import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])",
        argument,
    )
    assert not modules & {"torch", *HEAVY}


def test_the_help_of_each_command_needs_no_torch():
    """Nor what refuses an option that a command does not have; all of them in one process."""
    modules = loaded(
        "import contextlib\nfrom fxpipe.cli.command import SUBCOMMANDS, main\n"
        "for name in SUBCOMMANDS:\n"
        "    with contextlib.suppress(SystemExit): main([name, '--help'])\n"
        "    assert main([name, '--nope']) == 2\n"
        "main(['help', 'schedules'])"
    )
    assert not modules & {"torch", "safetensors", *HEAVY}


def test_the_package_by_itself_loads_nothing():
    assert not loaded("import fxpipe") & {"torch", *HEAVY}


def test_a_compilation_without_a_terminal_loads_no_pictures(loaded_behind_torch):
    code = "import fxpipe, sys\nfxpipe.compile\nfrom fxpipe.compiler.progress import Phases\nPhases('')"
    assert not loaded_behind_torch(code) & {"rich", "fxpipe.viz.timeline_picture", "fxpipe.vocabulary.split"}


@pytest.mark.variation
@pytest.mark.slow
def test_a_script_called_cuda_may_import_torch_and_the_package(tmp_path):
    """Torch imports a module of that name, and finds the script first."""
    script = tmp_path / "cuda.py"
    script.write_text("import torch, fxpipe\nif __name__ == '__main__': print(fxpipe.compile.__name__)")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "compile\n"), run.stderr


def test_every_public_name_can_be_had():
    assert all(getattr(fxpipe, name) is not None for name in fxpipe.__all__)
    assert set(fxpipe.__all__) <= set(dir(fxpipe))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fxpipe.nothing


RUN = """
import sys
from pathlib import Path
import torch
from fxpipe.runtime.batch.microbatches import batch_spec
from fxpipe.runtime.ranks.local import LocalComm, LocalWorld
from fxpipe.runtime.program.load_program import load_program
from fxpipe.runtime.program.rank import Runtime
from fxpipe.plan.step import StepSpec
from safetensors.torch import load_file

directory = Path(sys.argv[1])
example = {"x": torch.ones(2, 4), "y": torch.ones(2, 3)}
params = load_file(directory / "rank0.safetensors")
grads = {name: torch.zeros_like(p) for name, p in params.items()}
spec = StepSpec(1, 2, batch_spec(example), 0, "torch.float32", False, 0, "torch.float32", (("x", "y"),))
comm = LocalComm(LocalWorld(1), 0)
rt = Runtime(rank=0, spec=spec, comm=comm, params=params, grads=grads, buffers={}, constants={})
program = load_program((directory / "rank0.py").read_text(), "rank0.py")
rt.start()
loss = program.step(rt, {name: x.repeat(2, 1) for name, x in example.items()})
assert loss.isfinite() and all(g.abs().sum() > 0 for g in grads.values())
"""


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, y):
        return (nn.functional.dropout(self.linear(x), 0.1) - y).square().mean()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    example = {"x": torch.randn(2, 4), "y": torch.randn(2, 3)}
    directory = tmp_path_factory.mktemp("light") / "saved"
    fxpipe.compile(Dropped(), example, ranks=1, microbatches=2, schedule="1f1b").save(directory)
    return directory


def test_a_program_runs_on_the_runtime_alone(saved, loaded_behind_torch):
    modules = loaded_behind_torch(RUN, saved)
    own = {name for name in modules if name.split(".")[0] == "fxpipe"}
    assert {name for name in own if not name.startswith("fxpipe.runtime")} <= CONTRACT
    assert len(own) <= 30, "\n".join(sorted(own))
    assert not modules & {*HEAVY, "torch._inductor"}


INTERPRETED = """
import torch
import fxpipe.runtime.program.inductor
run = lambda traced, inputs: torch.fx.Interpreter(traced).boxed_run
fxpipe.runtime.program.inductor.compile_by_inductor = run
fxpipe.runtime.program.inductor.decompositions = dict
"""


@pytest.mark.slow
def test_a_compiled_program_runs_on_the_runtime_alone(tmp_path, loaded_behind_torch):
    example = {"x": torch.randn(2, 4), "y": torch.randn(2, 3)}
    options = {"ranks": 1, "microbatches": 2, "schedule": "1f1b", "backend": "inductor"}
    fxpipe.compile(Dropped(), example, **options).save(tmp_path / "saved")
    assert (tmp_path / "saved" / "rank0.py").read_text().count("@inductor") == 2
    modules = loaded_behind_torch(INTERPRETED + RUN, tmp_path / "saved")
    own = {name for name in modules if name.split(".")[0] == "fxpipe"}
    assert {name for name in own if not name.startswith("fxpipe.runtime")} <= CONTRACT
    assert len(own) <= 30, "\n".join(sorted(own))
    assert not modules & (HEAVY - {"sympy"})  # torch's traces use it


@pytest.mark.slow
def test_a_saved_pipeline_trains_without_the_compiler(saved, loaded_behind_torch):
    modules = loaded_behind_torch(
        "import sys, torch, fxpipe\npipe = fxpipe.load(sys.argv[1])\n"
        "pipe.step({'x': torch.ones(4, 4), 'y': torch.ones(4, 3)})",
        saved,
    )
    compiler = {"compiler", "capture", "partition", "passes", "codegen"}
    rooms = {name.split(".")[1] for name in modules if name.startswith("fxpipe.")}
    assert not rooms & compiler
    assert not modules & HEAVY
