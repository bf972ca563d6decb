"""Options of ``fxpipe replay``."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_replay(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs the functions that an op called, from the program in the directory, with the operands that "
        "record= of pipe.step or pipe.run_local has written, and compares the results with those of the "
        "step, bit for bit."
    )
    parser.set_defaults(command="replay:replay_op")
    parser.add_argument("directory", type=Path, help="of the recording")
    parser.add_argument("op", help="F1.3: forward of stage 1, microbatch 3")
    parser.add_argument("--rank", type=int, help="if several ranks have recorded the op")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--pdb", action="store_true", help="stop at the first line of each function")
    ways.add_argument("--json", action="store_true", help="print one JSON object")
