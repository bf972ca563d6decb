"""Runs the Python and the commands of pages, on names and files that their text takes for granted."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from small_samples import make_samples_small
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader
from zoo import EFFORT

import fxpipe
from fxpipe.cli import main

ROOT = Path(__file__).parents[1]
ROWS, LENGTH, WORDS, MICROBATCHES = 2, 4, 12, 16


class Model(nn.Module):
    """A language model in small: eight blocks; the loss if there are labels, and logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8))
        self.head = nn.Linear(8, WORDS, bias=False)

    def forward(self, input_ids, labels=None, position_ids=None):
        hidden = self.embedding(input_ids)
        if position_ids is not None:
            hidden = hidden + position_ids.unsqueeze(-1) / LENGTH
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


@dataclass(frozen=True)
class Block:
    """A block of code of a page.  ``reason``: the page's, why tests do not run it; empty if they do.

    ``local``: whether its section runs all ranks in one process, by ``run_local``.
    """

    reason: str
    language: str
    title: str
    text: str
    local: bool

    @property
    def is_whole(self) -> bool:
        """An ellipsis stands for something else, but for one in a comment."""
        return "…" not in re.sub(r"#.*", "", self.text)


FENCE = re.compile(
    r"^(?:<!-- not run by tests: (.*?) -->\n)?( *)```(\w+)(?: title=\"(.*?)\")?\n(.*?)^\2```$",
    re.MULTILINE | re.DOTALL,
)


@functools.cache
def blocks(page: str) -> list[Block]:
    found = []
    for section in re.split(r"^#+ (?=[A-Z0-9`])", (ROOT / page).read_text(), flags=re.MULTILINE):
        fences = FENCE.findall(section)
        local = any("run_local" in text for *_, text in fences)
        for reason, indent, language, title, text in fences:
            found.append(Block(reason, language, title, re.sub(f"^{indent}", "", text, flags=re.M), local))
    return found


def python(page: str, local: bool | None = None) -> list[str]:
    """The whole blocks of Python that are run; local: those of such sections, or of the others.

    Those that need transformers are in test_state_of_models.py.
    """
    return [
        block.text
        for block in blocks(page)
        if block.language == "python" and block.is_whole and not block.reason and not block.title
        if "transformers" not in block.text and local in (None, block.local)
    ]


def commands(page: str) -> list[list[str]]:
    """The arguments of each command of a page's blocks of bash that are run."""
    scripts = (block.text for block in blocks(page) if block.language == "bash" and not block.reason)
    lines = (line for text in scripts for line in text.replace("\\\n", "").splitlines())
    return [call for line in lines if (call := shlex.split(line, comments=True))]


def shown(page: str) -> list[tuple[list[str], list[str]]]:
    """The commands of a page with what they print: the lines of it that the page has."""
    found = []
    for block in blocks(page):
        if block.language == "console":
            command, _, output = block.text.removeprefix("$ ").replace("\\\n", "").partition("\n")
            found.append((shlex.split(command), [x.rstrip() for x in output.splitlines() if x != "…"]))
    return found


def names() -> dict[str, Any]:
    torch.manual_seed(0)
    rows = torch.randint(WORDS, (2 * MICROBATCHES * ROWS, LENGTH))
    batches = [{"input_ids": part, "labels": part} for part in rows.split(MICROBATCHES * ROWS)]
    example = {name: tensor[:ROWS] for name, tensor in batches[0].items()}
    return {
        **{"torch": torch, "nn": nn, "F": F, "DataLoader": DataLoader, "fxpipe": fxpipe, "os": os},
        **{"model": Model(), "example": example, "loader": batches, "batch": batches[0]},
        **{"batch_of": lambda step: batches[step % 2], "steps": 3, "data": list(rows)},
        **{"plan": {"blocks.*.0": ColwiseParallel(output_layouts=Replicate())}},
        **{"parallelize_module": parallelize_module, "pairwise": pairwise},
        **{"short_example": example, "long_example": {name: rows[:2, :2] for name, rows in example.items()}},
    }


LENGTHS = """
ids = labels = torch.randint(12, (2, 2048))
parts = [ids[:, :n] for n in (64, 31, 2048, *[8] * 13)]
loader = [[{"input_ids": part, "labels": part} for part in parts] for _ in range(2)]
dataset = [{"input_ids": ids[0, :n], "labels": ids[0, :n]} for n in (900, 700, 1500, *[40] * 60)]
"""
#: What the text of a page says that its blocks begin with.
BEFORE = {
    "docs/lengths.md": LENGTHS,
    "docs/lanes.md": "import copy",
    "docs/large_models.md": 'with torch.device("meta"):\n    model = type(model)()\n'
    "pipe = fxpipe.compile(model, example, ranks=4, microbatches=16)",
}


def run(pages: Iterable[str], local: bool | None = None, **defaults: Any) -> None:
    """Run the Python of pages in this directory, with little effort for searches.

    defaults: of ``compile``, instead of its own.
    """
    with _compiled_with(defaults):
        known: dict[str, Any] = {}
        for page in pages:
            known |= names()
            exec(BEFORE.get(page, ""), known)
            for block in python(page, local):
                if local is False and "fxpipe.compile(model" in block:  # each has the page's model to itself
                    known["model"] = Model()
                exec(compile(block, page, "exec"), known)
                print("ran", block.splitlines()[0])


@contextlib.contextmanager
def _compiled_with(defaults: Mapping[str, Any]) -> Iterator[None]:
    """Within, ``compile`` has these defaults, and little effort for searches."""
    whole: Callable[..., fxpipe.Pipeline] = fxpipe.compile

    def compiled(*given: Any, **options: Any) -> fxpipe.Pipeline:
        return whole(*given, **{"effort": EFFORT, **defaults, **options})

    with mock.patch.object(fxpipe, "compile", compiled):
        yield


def run_on_ranks(pages: Sequence[str], calls: Sequence[Sequence[str]], directory: str) -> None:
    """What each rank of torchrun does: the pages' Python, then each call, the arguments behind ``fxpipe``."""
    os.chdir(directory)
    run(pages, local=False, schedule="1f1b", check=False)
    make_samples_small()
    for call in calls:
        code = main(fewer(call))
        assert not code, (call, code)
        print("ran", *call)


#: Fewer rows and steps than on the pages.
FEWER = {"1050": "146", "1000": "96", "range(5)": "range(1)", "< 150": "< 4", "% 30": "% 2"}
FEWER_OF_COMMANDS = {"--steps": "3", "--every": "2", "--devices": "4", "--nodes": "2", "--batch": "32"}


def fewer(call: Sequence[str]) -> list[str]:
    """The arguments behind ``fxpipe``, for less of the same."""
    effort = ["--effort", "0.05"] if call[0] in ("plan", "compare") and "--effort" not in call else []
    values = (FEWER_OF_COMMANDS.get(option, value) for option, value in pairwise(call))
    return [call[0], *values, *effort]


def tutorial() -> list[str]:
    """train.py of the tutorial before each of its commands."""
    script, scripts = "", []
    for block in blocks("docs/tutorial.md"):
        if block.title == "train.py":
            script = block.text
        elif block.language == "diff":
            for hunk in re.split(r"^@@\n", block.text, flags=re.MULTILINE):
                lines = hunk.splitlines(keepends=True)
                old, new = ("".join(line[1:] for line in lines if line[0] in " \n" + sign) for sign in "-+")
                assert script.count(old) == 1, old
                script = script.replace(old, new)
        elif block.language == "bash" and script not in scripts:
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
        with _compiled_with({}):
            runpy.run_path(str(path), run_name="__main__")
