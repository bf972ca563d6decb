"""``fxpipe export``: the weights of a checkpoint as files that Hugging Face's ``from_pretrained`` opens."""

from __future__ import annotations

import argparse
import json

from fxpipe.api.read_checkpoint import read_checkpoint
from fxpipe.cli.arguments import working
from fxpipe.errors import ArtifactError, printable, suggested
from fxpipe.training.model.save import new_directory
from fxpipe.training.weights.pretrained import export


def export_weights(options: argparse.Namespace) -> None:
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
