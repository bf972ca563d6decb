"""One run of ``length_runs.py``: a model trained on lists, and again from a checkpoint."""

from __future__ import annotations

import hashlib
import random
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from masks import ERRORS, loss_and_count
from torch import nn
from worker import Worker

import fxpipe
from benchmarks.model_coverage.case import without_dropout
from benchmarks.model_coverage.sources.hugging_face import build

ROWS, LONGEST, RATE, MOMENTUM, NORM = 2, 24, 0.05, 0.9, 0.5
Lists = list[list[list[dict[str, torch.Tensor]]]]
"""Per step and replica, microbatches."""


def microbatch(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 90, (ROWS, length))
    labels = ids.clone()
    labels[0, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


def model_of(kind: str, name: str, *, has_dropout: bool) -> nn.Module:
    torch.manual_seed(0)
    model = build(kind, name, "CAUSAL_LM").model
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("batched_mm")  # torch's grouped product knows no doubles
    return (model if has_dropout else without_dropout(model)).to(torch.float64).train()


def trained(
    pipe: fxpipe.Pipeline, lists: Lists, directory: Path, validation: str, *, ahead: bool
) -> list[float]:
    """Losses of the steps that are left.  ahead: of a run that resumes; another one writes a checkpoint."""
    optimizer = pipe.optimizer(
        torch.optim.SGD, lr=RATE, momentum=MOMENTUM, clip_grad_norm=NORM, validation=validation
    )
    losses = []
    with fxpipe.Checkpointer(pipe, directory, optimizer=optimizer, asynchronous=False) as checkpoints:
        checkpoints.resume()
        while pipe.step_number < len(lists):
            number = pipe.step_number
            losses.append(float(pipe.step(lists[number][pipe.replica])))
            optimizer.step()
            optimizer.zero_grad()
            if ahead and number + 1 < len(lists):
                pipe.prepare(lists[number + 1][pipe.replica])
            if pipe.step_number == len(lists) // 2 and not ahead:
                checkpoints.save()
    return losses


def eager(model: nn.Module, lists: Lists) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses = []
    for replicas in lists:
        batch = [one for replica in replicas for one in replica]
        count = sum(int((one["labels"][:, 1:] != -100).sum()) for one in batch)
        optimizer.zero_grad()
        loss = sum(loss_and_count(model(input_ids=one["input_ids"]), one)[0] / count for one in batch)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        losses.append(float(loss))
    return losses


def digest(pipe: fxpipe.Pipeline, model: nn.Module) -> str:
    pipe.synchronize(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return hashlib.sha256(
        b"".join(tensors[name].detach().numpy().tobytes() for name in sorted(tensors))
    ).hexdigest()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    worker = Worker.join()
    case, setting = worker.case, dict(worker.case["setting"])
    has_dropout, validation = bool(setting.pop("dropout", False)), setting.get("validation", "barrier")
    setting = {"ranks": worker.ranks, "microbatches": 3} | setting

    def compiled() -> tuple[fxpipe.Pipeline, nn.Module]:
        model = model_of(case["kind"], case["name"], has_dropout=has_dropout)
        example = microbatch(LONGEST)
        return fxpipe.compile(
            model, example, loss_fn=loss_and_count, dimensions={"sequence": LONGEST}, **setting
        ), model

    try:
        pipe, model = compiled()
    except (*ERRORS, StrictDataclassError) as error:
        return worker.finish([f"not compiled: {type(error).__name__}: {str(error)[:40]}", "", "", ""])
    if not pipe.lengths:
        return worker.finish([f"the example's alone: {pipe.artifact.plan.step.one_length[:50]}", "", "", ""])
    (known,) = pipe.lengths
    able = range(known.least, known.example + 1, known.step)
    draw = random.Random(case["seed"])
    torch.manual_seed(case["seed"])
    lists: Lists = []
    for _ in range(case["lists"]):
        number = draw.randint(1, 6)
        lists.append([[microbatch(draw.choice(able)) for _ in range(number)] for _ in range(pipe.replicas)])
    name = [tempfile.mkdtemp() if worker.rank == 0 else ""]
    dist.broadcast_object_list(name)
    directory = Path(name[0])
    losses = trained(pipe, lists, directory, validation, ahead=False)
    first = digest(pipe, model)
    error = ""
    if not has_dropout:
        reference = model_of(case["kind"], case["name"], has_dropout=False)
        theirs = eager(reference, lists)
        apart = max(abs(a - b) for a, b in zip(losses, theirs, strict=True)) / max(map(abs, theirs))
        ours = dict(model.named_parameters())
        for key, p in reference.named_parameters():
            apart = max(apart, float((ours[key] - p).abs().max() / p.abs().max().clamp(min=1e-3)))
        error = f"{apart:.1e}"
    again, other = compiled()
    resumed = trained(again, lists, directory, validation, ahead=True)
    same = digest(again, other) == first and resumed == losses[len(lists) // 2 :]
    all_same = all(worker.gather(same))
    worker.finish(
        [f"{able[0]} to {able[-1]}", str(len(lists)), error, "same bits" if all_same else "OTHER BITS"]
    )


if __name__ == "__main__":
    main()
