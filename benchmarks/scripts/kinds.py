"""The files of scripts, by kind."""

import importlib

KINDS = (
    "supervised",
    "schedules",
    "loops",
    "changing",
    "gradients",
    "optimizers",
    "finetune",
    "language",
    "adversaries",
    "teachers",
    "reinforce",
    "habits",
    "watched",
    "rows",
    "world",
    "resume",
    "generative",
    "sequences",
    "structures",
)


def load() -> None:
    """Import all files, which register their scripts."""
    for kind in KINDS:
        importlib.import_module(f"benchmarks.scripts.{kind}")
