"""Write a schedule by hand, run it, draw it, and compare it with others, in one process.

    python examples/custom_schedule.py        # leaves build/custom/

A schedule is text: a line for each rank, with its ops in order. ``F2.5`` is the forward of stage 2 for
microbatch 5, ``B2.5`` the gradients of its inputs, ``W2.5`` those of its weights, ``BW2.5`` both at once.
fxpipe checks that the schedule is complete and cannot deadlock, and adds the messages.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import fxpipe

RANKS = 4


def patient_1f1b(ranks: int, microbatches: int) -> str:
    """1F1B with one forward more ahead on every rank, so that late messages do not stop it.

    B and W are apart: the first ranks, which end last, put off fewer W than the last ones.
    """
    lines = []
    for rank in range(ranks):
        ahead = min(ranks - rank + 1, microbatches)
        late = rank  # microbatches between a B and its W
        ops = [f"F{rank}.{m}" for m in range(ahead)]
        for m in range(microbatches):
            ops.append(f"B{rank}.{m}")
            if m + ahead < microbatches:
                ops.append(f"F{rank}.{m + ahead}")
            if m >= late:
                ops.append(f"W{rank}.{m - late}")
        ops += [f"W{rank}.{m}" for m in range(max(0, microbatches - late), microbatches)]
        lines.append(" ".join(ops))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--build", type=Path, default=Path("build/custom"))
    options = parser.parse_args()
    options.build.mkdir(parents=True, exist_ok=True)
    file = options.build / "patient.txt"
    file.write_text("# 1F1B, one forward more ahead\n" + patient_1f1b(RANKS, options.microbatches))

    torch.manual_seed(0)
    width = options.width
    layers = [(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(2 * RANKS)]
    model = nn.Sequential(*(module for layer in layers for module in layer))
    batch = (torch.randn(8 * options.microbatches, width),)
    example = (batch[0][:8],)

    def loss_fn(output: torch.Tensor, microbatch: tuple[torch.Tensor]) -> torch.Tensor:
        return (output - microbatch[0]).square().mean()

    print(f"{'schedule':14} {'step':>9} {'span bubble':>12} {'peak memory':>12}  loss")
    for schedule in (file, "1f1b", "zb-h1", "auto"):
        pipe = fxpipe.compile(
            model, example, ranks=RANKS, microbatches=options.microbatches, schedule=schedule, loss_fn=loss_fn
        )
        timeline = pipe.simulate()
        loss = pipe.run_local(batch).loss  # the order of ops changes no gradient
        name = schedule if isinstance(schedule, str) else schedule.name
        print(
            f"{name:14} {timeline.seconds * 1e3:6.2f} ms {timeline.span_bubble:11.1%}"
            f" {max(timeline.peak_memory) / 2**20:8.2f} MiB  {loss:.9f}"
        )
        if schedule is file:
            pictures = pipe.draw(options.build / "pictures")
    print("pictures of it:", *sorted(path.name for path in pictures))


if __name__ == "__main__":
    main()
