"""``fxpipe export``: the weights of a checkpoint as files that Hugging Face's ``from_pretrained`` opens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fxpipe.api.read_checkpoint import read_checkpoint
from fxpipe.cli.arguments import working
from fxpipe.errors import ArtifactError, printable, suggested
from fxpipe.training.model.save import new_directory
from fxpipe.training.weights.pretrained import export


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the weights of a checkpoint of any number of ranks as safetensors files, with what else the "
        "model's directory has (config.json, the tokenizer's files). Needs huggingface_hub."
    )
    parser.set_defaults(command=_export)
    add = parser.add_argument
    add("checkpoint", type=Path, help="a directory step-00000500, or one of several: the newest")
    add("--like", type=Path, metavar="MODEL", help="the directory of the model whose other files are copied")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="a new directory")
    add("--average", metavar="NAME", help="an average of the weights that the checkpoint has, by its name")
    add("--largest-file", default="5GB", metavar="SIZE", help="larger weights are split over several (5GB)")
    add("--json", action="store_true", help="print one JSON object")


def _export(options: argparse.Namespace) -> None:
    with working("export"), new_directory(options.output, None) as draft:
        checkpoint = read_checkpoint(options.checkpoint)
        state = checkpoint.state_dict()
        if options.average is not None:
            if options.average not in checkpoint.averages:
                known = ", ".join(checkpoint.averages) or "none"
                close = suggested(options.average, checkpoint.averages)
                raise ArtifactError(
                    f"The checkpoint has no average {options.average!r}.{close} It has: {known}."
                )
            state |= checkpoint.averages[options.average]
        export(state, draft, options.like, options.largest_file)
        size = sum(tensor.nbytes for tensor in state.values())
    step = checkpoint.step_number
    if options.json:
        record = {"directory": str(options.output), "step": step, "tensors": len(state), "bytes": size}
        print(json.dumps(record))
        return
    print(printable(f"exported: {options.output} ({len(state)} tensors of step {step})"))
