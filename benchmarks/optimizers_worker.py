"""One run of ``optimizers.py``: all optimizers on one mesh, with both validations, and in plain torch."""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from optimizers_classes import OPTIMIZERS
from torch import nn
from worker import Worker

import fxpipe
from fxpipe.training.model.speculative_update import SpeculativeUpdate
from fxpipe.training.optimizer import optimizer as optimizer_module

RANKS, REPLICAS, MICROBATCHES, ROWS, LENGTH, WORDS, WIDTH = 2, 2, 2, 2, 4, 40, 24
#: Of the loss, update by update.  With "post" ranks go ahead in updates 8 to 13 and 20 to 25; where the size
#: doubles, each finds its own gradients small enough beside the last ones of the others.
SIZES = (
    100, 1, 30, 1e-1, 10, 100, 1e-3, 3,
    100, 100, 200, 100, 1, 100,
    1e-4, 100, 0.3, 10, 1, 100,
    100, 200, 100, 1e-1, 100, 100,
)  # fmt: skip
#: Rounding errors of other orders of sums, which 26 updates amplify.
LIMIT = 1e-9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Words(nn.Module):
    """Blocks between a table and a head; the loss is scaled by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.places
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x * self.scale).flatten(0, 1), labels.flatten())
        return loss * size.mean()


def batches() -> list[dict[str, torch.Tensor]]:
    generator, rows = torch.Generator().manual_seed(3), ROWS * MICROBATCHES * REPLICAS
    found = []
    for size in SIZES:
        ids = torch.randint(WORDS, (rows, LENGTH), generator=generator)
        labels = torch.randint(WORDS, (rows, LENGTH), generator=generator)
        found.append({"ids": ids, "labels": labels, "size": torch.full((rows,), float(size))})
    return found


def largest_norm(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """The limit of the norm: of the first gradients, and half as much again."""
    grads = torch.autograd.grad(model(**batch), [*model.parameters()])
    return 1.5 * float(nn.utils.get_total_norm(grads))


def eager(name: str, model: nn.Module, limit: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the parameters at the end, of a plain loop."""
    model = copy.deepcopy(model)
    cls, options, groups = OPTIMIZERS[name]
    rest, optimizers, own = dict(model.named_parameters()), [], []
    for group in groups:
        chosen = {n: p for n, p in rest.items() if any(fnmatchcase(n, x) for x in group["params"])}
        rest = {n: p for n, p in rest.items() if n not in chosen}
        of_group = {key: x for key, x in group.items() if key != "class"} | {"params": [*chosen.values()]}
        if "class" in group:
            optimizers.append(group["class"]([of_group]))
        else:
            own.append(of_group)
    optimizers.append(cls([*own, {"params": [*rest.values()]}], **options))
    losses = []
    for batch in batches():
        for optimizer in optimizers:
            getattr(optimizer, "train", lambda: None)()
            optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    for optimizer in optimizers:
        getattr(optimizer, "eval", lambda: None)()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def trained(name: str, pipe: fxpipe.Pipeline, limit: float, validation: str) -> Any:
    """As ``eager``, by the pipeline; or the text of its refusal."""
    cls, options, groups = OPTIMIZERS[name]
    try:
        optimizer = pipe.optimizer(cls, groups=groups, clip_grad_norm=limit, validation=validation, **options)
    except fxpipe.RunError as error:
        return f"refused: {str(error).partition('. ')[0]}."
    size, losses = ROWS * MICROBATCHES, []
    optimizer.train()
    for batch in batches():
        mine = {n: x[pipe.replica * size : (pipe.replica + 1) * size] for n, x in batch.items()}
        losses.append(float(pipe.step(mine)))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.eval()
    return losses, pipe.full_state_dict(rank=None)


def compared(found: Any, expected: tuple[list[float], dict[str, torch.Tensor]]) -> str:
    if isinstance(found, str):
        return found
    apart = [abs(a - b) / (abs(b) + 1e-12) for a, b in zip(found[0], expected[0], strict=True)]
    for name, value in expected[1].items():
        apart.append(float((found[1][name] - value).abs().max() / (value.abs().max() + 1e-12)))
    return "right" if max(apart) < LIMIT else f"WRONG {max(apart):.0e}"


def main() -> None:
    worker = Worker.join()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    first, names = Words(), worker.case["names"]
    limit = largest_norm(first, batches()[0])
    expected = {name: eager(name, first, limit) for name in names} if worker.rank == 0 else {}
    updates = [0]

    class Counted(SpeculativeUpdate):
        def taken_back(self, *arguments: Any) -> Any:
            updates[0] += 1
            return super().taken_back(*arguments)

    optimizer_module.SpeculativeUpdate = Counted
    results: list[dict[str, list[str]]] = []
    for level, whole in worker.case["meshes"]:
        pipe = fxpipe.compile(
            copy.deepcopy(first), {name: x[:ROWS] for name, x in batches()[0].items()},
            ranks=RANKS, microbatches=MICROBATCHES, schedule="1f1b",
            shard=level or None, undivided=["*"] if whole else [],
        )  # fmt: skip
        results.append({name: [] for name in names})
        for name in names:
            for validation in ("barrier", "post"):
                pipe.load_state_dict(first.state_dict())
                found = trained(name, pipe, limit, validation)
                if worker.rank == 0:
                    results[-1][name].append(compared(found, expected[name]))
        print(level, whole, results[-1], flush=True)
    worker.finish({"results": results, "taken back": updates[0]})


if __name__ == "__main__":
    main()
