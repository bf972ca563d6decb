"""Options of ``fxpipe calibrate``."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxpipe.cli.arguments import output, positive_int, whole_number
from fxpipe.cost.devices.device_file import SUFFIX

ARITHMETIC = ("float64", "float32", "tf32", "bfloat16", "float16")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures the device at hand: the seconds of each kind of op by its size, and the copies to the "
        "offload store; under torchrun also the messages between ranks, with all ranks busy. The file "
        'stands for a device\'s name: fxpipe.compile(…, costs="FILE.json"), fxpipe plan --device FILE.json.'
    )
    parser.set_defaults(command="calibrate:calibrate")
    add = parser.add_argument
    add("file", type=_device_file, metavar="FILE.json", help="is written when all is measured")
    add("--name", help="of the device in plans (that which torch reports)")
    add(
        "--arithmetic",
        nargs="+",
        choices=ARITHMETIC,
        metavar="DTYPE",
        help=f"that products are measured in, of {', '.join(ARITHMETIC)} (a CPU: float32; a GPU: tf32 and "
        "bfloat16 too)",
    )
    add("--threads", type=positive_int, default=1, metavar="N", help="of a rank on a CPU (1, as of torchrun)")
    add(
        "--busy",
        type=whole_number,
        default=0,
        metavar="N",
        help="compute in so many other threads meanwhile, as ranks share memory; not under torchrun, where "
        "all ranks measure at once (0)",
    )
    add("--json", action="store_true", help="print one JSON object: the file and what it says")


def _device_file(text: str) -> Path:
    if not text.endswith(SUFFIX):
        raise argparse.ArgumentTypeError(f"{text} must end with {SUFFIX}")
    return output(text)
