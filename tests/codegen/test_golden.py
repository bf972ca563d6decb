"""The programs of small models, line by line, so that a review sees what a change does to them.

After a change that is meant: ``pytest tests/codegen/test_golden.py --update-golden``, then read the diff.
"""

import difflib
import importlib.util
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxpipe
import fxpipe.ir.liveness

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def golden_models():
    spec = importlib.util.spec_from_file_location("golden_models", GOLDEN / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(width: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 8), "y": torch.randn(2, width)}


def words() -> dict[str, torch.Tensor]:
    models = golden_models()
    ids = torch.randint(models.VOCABULARY, (2, models.LENGTH))
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def programs(
    model: Callable[[], nn.Module], example: dict[str, torch.Tensor], split_points: list[str], **options: Any
) -> tuple[str, ...]:
    """One program a rank, of two ranks."""
    torch.manual_seed(0)
    options = {"ranks": 2, "microbatches": 2, "schedule": "zb-h1", "split_points": split_points} | options
    return fxpipe.compile(model(), example, **options).artifact.programs


def perceptron(**options: Any) -> tuple[str, ...]:
    return programs(golden_models().Perceptron, numbers(), ["third"], **options)


def language_model(**options: Any) -> tuple[str, ...]:
    return programs(golden_models().LanguageModel, words(), ["blocks.1"], schedule="1f1b", **options)


def counts() -> tuple[str, ...]:
    models = golden_models()
    return programs(models.Counted, numbers(), ["second"], loss_fn=models.sum_and_count)


def outputs() -> tuple[str, ...]:
    models = golden_models()
    names = ["output", "loss", "largest"]
    return programs(models.Counted, numbers(), ["second"], loss_fn=models.with_a_metric, outputs=names)


#: Name of the golden files -> what makes the programs.
PROGRAMS: dict[str, Callable[[], tuple[str, ...]]] = {
    "perceptron": lambda: perceptron(microbatches=3),
    "language_model": language_model,
    "vocabulary": lambda: language_model(vocab_parallel="1-barrier"),
    "offload": lambda: perceptron(microbatches=3, schedule="gpipe", offload=fxpipe.Offload(bandwidth=1e12)),
    "recompute": lambda: perceptron(recompute="full"),
    "random": lambda: programs(golden_models().Noisy, numbers(), ["second"]),
    "inductor": lambda: programs(golden_models().Noisy, numbers(), ["second"], backend="inductor"),
    "counts": counts,
    "outputs": outputs,
    "layers": lambda: programs(golden_models().Layers, numbers(), ["blocks.4"]),
    "mixed": lambda: programs(golden_models().Mixed, numbers(8), ["last"]),
    "v_placement": lambda: programs(
        golden_models().Deep,
        numbers(8),
        ["layers.1", "layers.2", "layers.3"],
        stages_per_rank=2,
        placement="v",
    ),
}


@pytest.fixture(autouse=True)
def small_values_are_offloaded_too(monkeypatch):
    monkeypatch.setattr(fxpipe.ir.liveness, "SMALLEST", 1)


@pytest.fixture
def update(request) -> bool:
    return request.config.getoption("--update-golden")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, update):
    """As they were, the same each time, and with the names of source files but not of their folders."""
    programs = PROGRAMS[name]()
    assert PROGRAMS[name]() == programs
    for program in programs:
        assert set(re.findall(r"# .*\((.*):\d+\)", program)) == {"models.py"}
        assert str(Path(__file__).parents[2]) not in program
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


def test_no_golden_file_is_left_over():
    expected = {f"{name}_rank{rank}.py.golden" for name in PROGRAMS for rank in range(2)}
    assert {file.name for file in GOLDEN.glob("*.golden")} == expected


def test_a_further_op_is_a_further_line():
    """And no line of the contents, which shortens a long order."""
    found = [perceptron(microbatches=m) for m in (8, 32, 64)]
    for fewest, few, many in zip(*found, strict=True):
        kinds = len(set(re.findall(r"rt\.op\(f\"(\w+)\.", few)))
        assert [few.count("\n") - fewest.count("\n"), many.count("\n") - few.count("\n")] == [
            24 * kinds,
            32 * kinds,
        ]
        assert " more …" not in fewest
        assert "… 64 more …" in few
        assert "… 160 more …" in many
