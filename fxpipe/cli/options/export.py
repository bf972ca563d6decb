"""Options of ``fxpipe export``."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the weights of a checkpoint of any number of ranks as safetensors files, with what else the "
        "model's directory has (config.json, the tokenizer's files). Needs huggingface_hub."
    )
    parser.set_defaults(command="export:export_weights")
    add = parser.add_argument
    add("checkpoint", type=Path, help="a directory step-00000500, or one of several: the newest")
    add("--like", type=Path, metavar="MODEL", help="the directory of the model whose other files are copied")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="a new directory")
    add("--average", metavar="NAME", help="an average of the weights that the checkpoint has, by its name")
    add("--largest-file", default="5GB", metavar="SIZE", help="larger weights are split over several (5GB)")
    add("--json", action="store_true", help="print one JSON object")
