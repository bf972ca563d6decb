"""Runs the Python and the commands of pages, on names and files that their text takes for granted."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fxpipe

ROOT = Path(__file__).parents[1]
ROWS, LENGTH, WORDS, MICROBATCHES = 2, 4, 12, 16


class Model(nn.Module):
    """A language model in small: eight blocks; the loss if there are labels, and logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)) for _ in range(8)
        )
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, input_ids, labels=None):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)


class Output(dict):
    """``output.loss`` and ``output["loss"]``, as models of transformers give it."""

    def __init__(self, loss, logits):
        super().__init__(({} if loss is None else {"loss": loss}) | {"logits": logits})
        self.__dict__ = self


def fences(page: str) -> list[tuple[str, str, str]]:
    """The blocks of a page: (language, title or "", text)."""
    pattern = r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```'
    return re.findall(pattern, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def blocks(page: str, local: bool = False) -> list[str]:
    """The blocks of Python of a page that are whole: an ellipsis stands for something else.

    local: those of sections that run all ranks in one process, by ``run_local``; else those of the others.
    Those that need transformers are in test_state_of_models.py.
    """
    found = []
    for section in re.split(r"^#+ ", (ROOT / page).read_text(), flags=re.MULTILINE):
        python = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        if any("run_local" in block for block in python) == local:
            found += python
    whole = (block for block in found if "…" not in block.replace("# rank0.py … rank3.py", ""))
    return [block for block in whole if "transformers" not in block]


def commands(page: str) -> list[list[str]]:
    """The arguments of each ``fxpipe`` on a page, and of each ``torchrun … -m fxpipe``."""
    scripts = (text for language, _, text in fences(page) if language == "bash")
    lines = (line for text in scripts for line in text.replace("\\\n", "").splitlines())
    calls = (shlex.split(line, comments=True) for line in lines)
    return [
        call for call in calls if call[:1] == ["fxpipe"] or (call[:1] == ["torchrun"] and "fxpipe" in call)
    ]


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    rows = torch.randint(WORDS, (2 * MICROBATCHES * ROWS, LENGTH))
    batches = [{"input_ids": part, "labels": part} for part in rows.split(MICROBATCHES * ROWS)]
    example = {name: tensor[:ROWS] for name, tensor in batches[0].items()}
    return {
        **{"torch": torch, "F": F, "DataLoader": DataLoader, "fxpipe": fxpipe, "os": os},
        **{"model": Model(), "example": example, "loader": batches, "batch": batches[0]},
        **{"batch_of": lambda step: batches[step % 2], "steps": 3, "data": list(rows)},
    }


def run(pages: Sequence[str], directory: str, local: bool = False) -> None:
    os.chdir(directory)
    known = names()
    for page in pages:
        for block in blocks(page, local):
            exec(compile(block, page, "exec"), known)
            print("ran", block.splitlines()[0])


def run_commands(calls: Sequence[Sequence[str]], directory: str) -> None:
    """Each in the process of a rank; the arguments are those behind ``fxpipe``."""
    from fxpipe.cli import main

    os.chdir(directory)
    for call in calls:
        code = main(call)
        assert not code, (call, code)
        print("ran", *call)


#: Fewer rows and steps than on the page.
FEWER = {"1050": "146", "1000": "96", "range(5)": "range(1)", "< 150": "< 4", "% 30": "% 2"}


def tutorial() -> list[str]:
    """train.py of the tutorial before each of its commands."""
    script, scripts = "", []
    for language, title, text in fences("docs/tutorial.md"):
        if title == "train.py":
            script = text
        elif language == "diff":
            for hunk in re.split(r"^@@\n", text, flags=re.MULTILINE):
                lines = hunk.splitlines(keepends=True)
                old, new = ("".join(line[1:] for line in lines if line[0] in " \n" + sign) for sign in "-+")
                assert script.count(old) == 1, old
                script = script.replace(old, new)
        elif language == "bash" and script not in scripts:
            scripts.append(script)
    for long, short in FEWER.items():
        scripts = [text.replace(long, short) for text in scripts]
    return scripts


def run_scripts(directory: str) -> None:
    os.chdir(directory)
    for number, text in enumerate(tutorial()):
        path = Path(directory) / f"{os.environ['RANK']}train{number}.py"
        path.write_text(text)
        sys.argv = [str(path)]
        runpy.run_path(str(path), run_name="__main__")
