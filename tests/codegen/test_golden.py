"""The programs of two small models, line by line, so that a review sees what a change does to them.

After a change that is meant: ``pytest tests/codegen/test_golden.py --update-golden``, then read the diff.
"""

import difflib
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import fxpipe

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_models():
    spec = importlib.util.spec_from_file_location("golden_models", GOLDEN / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def perceptron() -> fxpipe.Pipeline:
    torch.manual_seed(0)
    example = {"x": torch.randn(2, 8), "y": torch.randn(2, 4)}
    return fxpipe.compile(
        golden_models().Perceptron(),
        example,
        ranks=2,
        microbatches=3,
        schedule="zb-h1",
        split_points=["third"],
    )


def language_model() -> fxpipe.Pipeline:
    torch.manual_seed(0)
    models = golden_models()
    ids = torch.randint(models.VOCABULARY, (2, models.LENGTH))
    return fxpipe.compile(
        models.LanguageModel(),
        {"ids": ids, "labels": ids.roll(-1, 1)},
        ranks=2,
        microbatches=2,
        schedule="1f1b",
        split_points=["blocks.1"],
    )


PIPELINES = {"perceptron": perceptron, "language_model": language_model}


@pytest.fixture
def update(request) -> bool:
    return request.config.getoption("--update-golden")


@pytest.mark.parametrize("name", PIPELINES)
def test_programs(name, update):
    programs = PIPELINES[name]().artifact.programs
    files = [GOLDEN / f"{name}_rank{rank}.py.golden" for rank in range(len(programs))]
    if update:
        for file, program in zip(files, programs, strict=True):
            file.write_text(program)
    changes = [
        line
        for file, program in zip(files, programs, strict=True)
        for line in difflib.unified_diff(
            file.read_text().splitlines() if file.exists() else [],
            program.splitlines(),
            f"golden/{file.name}",
            "as generated now",
            lineterm="",
        )
    ]
    hint = "The programs have changed. If that is meant: pytest tests/codegen/test_golden.py --update-golden"
    assert not changes, "\n".join([hint, *changes])


@pytest.mark.parametrize("name", PIPELINES)
def test_programs_are_the_same_each_time(name):
    assert PIPELINES[name]().artifact.programs == PIPELINES[name]().artifact.programs


@pytest.mark.parametrize("name", PIPELINES)
def test_programs_name_source_lines_without_folders(name):
    for program in PIPELINES[name]().artifact.programs:
        assert set(re.findall(r"# .*\((.*):\d+\)", program)) == {"models.py"}
        assert str(Path(__file__).parents[2]) not in program


def test_no_golden_file_is_left_over():
    expected = {f"{name}_rank{rank}.py.golden" for name in PIPELINES for rank in range(2)}
    assert {file.name for file in GOLDEN.glob("*.golden")} == expected
