"""The ordinary loop, for models and losses of which only the model is of interest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.scripts.script import BATCH, Run, few, piped, plain

Batches = list[dict[str, Tensor]]


def draws(count: int, **shapes: tuple[int, ...] | tuple[int, int]) -> Batches:
    """Batches of normal numbers; a leaf whose name ends with ``ids`` has integers below the last number."""
    draw = torch.Generator().manual_seed(8)
    batches = []
    for _ in range(count):
        batch = {}
        for name, shape in shapes.items():
            if name.endswith("ids"):
                batch[name] = torch.randint(shape[-1], (BATCH, *shape[:-1]), generator=draw)
            else:
                batch[name] = torch.randn(BATCH, *shape, generator=draw)
        batches.append(batch)
    return batches


def ordinary(
    name: str,
    model: Callable[[], nn.Module],
    data: Callable[[], Batches],
    *settings: str,
    rate: float = 0.05,
    refused_on_4: str = "",
) -> None:
    """Register a script of the ordinary loop: AdamW, clipped, an evaluation of the last batch.

    refused_on_4: a pattern of the error with which it may end on four ranks.
    """

    def reference(run: Run) -> None:
        network, batches = model(), data()
        opt = torch.optim.AdamW(network.parameters(), lr=rate)
        for batch in batches[:-1]:
            loss = network(**batch)
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            run.note("loss", loss)
        network.eval()
        with torch.no_grad():
            run.note("evaluation", network(**batches[-1]))
        run.weights(network.state_dict())

    def script(run: Run) -> None:
        batches = data()
        pipe = fxpipe.compile(model(), few(batches[0]), **run.options, evaluation=True)
        opt = pipe.optimizer(torch.optim.AdamW, lr=rate, clip_grad_norm=1.0)
        for batch in batches[:-1]:
            run.note("loss", pipe.step(run.rows(batch)))
            opt.step()
            opt.zero_grad()
        run.note("evaluation", pipe.evaluate(run.rows(batches[-1])))
        run.weights(pipe.full_state_dict())

    reference.__name__, kind = name, model.__module__
    piped(plain(reference), *(settings or ("2", "4")), kind=kind)(script)
    if refused_on_4:
        piped(reference, "4", variant="four ranks", kind=kind, error=refused_on_4)(script)
