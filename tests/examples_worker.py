"""Runs the examples of training on the ranks of one start, one after the other, each in a small size."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"

#: The options that make each small.
SMALL = {
    "train_text.py": ["--steps", "2", "--every", "2", "--layers", "2", "--bytes", "20000"],
    "train_vision.py": ["--steps", "1", "--width", "4", "--blocks", "3", "--test-images", "40"],
    "train_mtp.py": ["--steps", "1", "--width", "8", "--layers", "2", "--bytes", "20000"],
    "train_chats.py": ["--steps", "2", "--layers", "2", "--bytes", "40000"],
    "train_lora.py": ["--steps", "2", "--layers", "2", "--bytes", "20000"],
}


def run(directory: str, examples: Mapping[str, Sequence[str]] = SMALL) -> None:
    os.chdir(directory)
    sys.path.insert(0, str(EXAMPLES))
    for name, options in examples.items():
        sys.argv = [name, *options]
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
