"""Edits of a saved plan, with its checksum, as one who edits it by hand has to write it."""

import json
from pathlib import Path
from typing import Any

from fxpipe.plan.saved.files import checksum


def write_plan(directory: Path, plan: Any) -> None:
    (directory / "plan.json").write_text(json.dumps(plan))
    accept(directory)


def accept(directory: Path) -> None:
    """Take the plan as it is now for the one that was saved."""
    sums = directory / "rank0.sha256"
    others = [line for line in sums.read_text().splitlines() if not line.endswith("plan.json")]
    sums.write_text("\n".join([*others, f"{checksum(directory / 'plan.json')}  plan.json\n"]))
