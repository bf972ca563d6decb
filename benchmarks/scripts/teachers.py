"""Averages of weights, teachers and students, momentum encoders, contrast within a batch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import OUTPUTS, Classifier, Mlp, Regressor, classes, numbers
from benchmarks.scripts.script import (
    BATCH,
    EVERYWHERE,
    WHOLE_MODEL,
    Run,
    few,
    microbatches,
    piped,
    plain,
)


@plain
def average_of_weights(run: Run) -> None:
    model, data = Regressor(), numbers(5)
    average = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in data[:4]:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
    with torch.no_grad():
        run.note("evaluation", average(**data[4]))
    run.weights(average.state_dict())


@piped(average_of_weights, "2", "4")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(5)
    average = copy.deepcopy(model).requires_grad_(False)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data[:4]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        for name, value in pipe.full_state_dict(rank=None).items():
            average.get_parameter(name).lerp_(value, 0.1)
    run.note("evaluation", average(**data[4]))
    run.weights(average.state_dict())


@piped(average_of_weights, "2", "4", variant="a copy of the module", error=WHOLE_MODEL)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(5)
    average = copy.deepcopy(model).requires_grad_(False)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data[:4]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
    with torch.no_grad():
        run.note("evaluation", average(**data[4]))
    run.weights(average.state_dict())


@piped(average_of_weights, *EVERYWHERE, variant="pipe.average", equal=True)
def _(run: Run) -> None:
    data = numbers(5)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    average = pipe.average(decay=0.9)
    for batch in data[:4]:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
        average.step()
    with average.applied():
        run.note("evaluation", pipe.evaluate(run.rows(data[4])))
        run.weights(pipe.full_state_dict())


@piped(average_of_weights, variant="a shadow by names", error=WHOLE_MODEL)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(5)
    shadow = {name: value.detach().clone() for name, value in model.named_parameters()}
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data[:4]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        for name, value in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * value.data
    run.weights(shadow)


@piped(average_of_weights, variant="torch's AveragedModel", error=WHOLE_MODEL)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(5)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(model)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data[:4]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        average.update_parameters(model)
    run.weights(average.module.state_dict())


class Taught(nn.Module):
    """A student and its teacher, which moves towards it between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        target = F.softmax(self.teacher(x + 0.1 * y.mean()) / 0.5, -1)
        return -(target * F.log_softmax(self.student(x), -1)).sum(-1).mean()

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.lerp_(fast, 0.2)


@plain
def teacher_that_follows(run: Run) -> None:
    model = Taught()
    opt = torch.optim.AdamW(model.student.parameters(), lr=0.05)
    for batch in [rows | {"y": rows["y"][:, :1].mean().expand(BATCH, 1)} for rows in numbers(4)]:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        model.follow()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(teacher_that_follows, "2", "4", variant="in the loop", error=WHOLE_MODEL)
def _(run: Run) -> None:
    data = [rows | {"y": rows["y"][:, :1].mean().expand(BATCH, 1)} for rows in numbers(4)]
    model = Taught()
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        model.follow()
    run.weights(pipe.full_state_dict())


@piped(teacher_that_follows, "2", "4", variant="in a hook of the optimizer", error=WHOLE_MODEL)
def _(run: Run) -> None:
    data = [rows | {"y": rows["y"][:, :1].mean().expand(BATCH, 1)} for rows in numbers(4)]
    model = Taught()
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    opt.register_step_post_hook(lambda *_: model.follow())
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(teacher_that_follows, *EVERYWHERE, variant="pipe.average", equal=True)
def _(run: Run) -> None:
    data = [rows | {"y": rows["y"][:, :1].mean().expand(BATCH, 1)} for rows in numbers(4)]
    pipe = fxpipe.compile(Taught(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    average = pipe.average(decay=0.8, into={"teacher.*": "student.*"})
    for batch in data:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
        average.step()
    run.weights(pipe.full_state_dict())


@piped(teacher_that_follows, "2", "4", variant="by whole weights", equal=True)
def _(run: Run) -> None:
    data = [rows | {"y": rows["y"][:, :1].mean().expand(BATCH, 1)} for rows in numbers(4)]
    pipe = fxpipe.compile(Taught(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        state = pipe.full_state_dict(rank=None)
        for name in [name for name in state if name.startswith("teacher.")]:
            state[name].lerp_(state[name.replace("teacher", "student")], 0.2)
        pipe.load_state_dict(state)
    run.weights(pipe.full_state_dict())


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Mlp(depth=4), Mlp(width=12, depth=4).requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            target = F.softmax(self.teacher(x) / 2, -1)
        logits = self.student(x)
        soft = F.kl_div(F.log_softmax(logits / 2, -1), target, reduction="batchmean") * 4
        return 0.5 * soft + 0.5 * F.cross_entropy(logits, labels)


@plain
def distillation(run: Run) -> None:
    model = Distilled()
    opt = torch.optim.AdamW(model.student.parameters(), lr=0.05)
    for batch in classes(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.student.state_dict())


@piped(distillation, "2", "4", "2x2")
def _(run: Run) -> None:
    data = classes(3)
    pipe = fxpipe.compile(Distilled(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    state = pipe.full_state_dict()
    run.weights({k.removeprefix("student."): v for k, v in state.items() if k.startswith("student.")})


class Student(nn.Module):
    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student

    def forward(self, x: Tensor, labels: Tensor, target: Tensor) -> Tensor:
        logits = self.student(x)
        soft = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(target / 2, -1), reduction="batchmean") * 4
        return 0.5 * soft + 0.5 * F.cross_entropy(logits, labels)


@piped(distillation, "2", "4", variant="the teacher's own pipeline", equal=True)
def _(run: Run) -> None:
    model, data = Distilled(), classes(3)
    logits = {"input": data[0]["x"][:2]}
    teacher = fxpipe.compile(model.teacher.eval(), logits, **run.options, gradients=False, outputs=["output"])
    target = torch.zeros(BATCH, OUTPUTS)
    pipe = fxpipe.compile(Student(model.student), few(data[0] | {"target": target}), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        result = teacher.evaluate({"input": batch["x"]}, outputs=["output"], outputs_on="all")
        run.note("loss", pipe.step(batch | {"target": result.outputs["output"]}))
        opt.step()
        opt.zero_grad()
    state = pipe.full_state_dict()
    run.weights({k.removeprefix("student."): v for k, v in state.items()})


class Momentum(nn.Module):
    """A momentum encoder that its forward moves, and a queue of keys: both change with each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Mlp()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, OUTPUTS), dim=-1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            keys = F.normalize(self.key(x + 0.05), dim=-1)
        queries = F.normalize(self.query(x), dim=-1)
        logits = torch.cat([(queries * keys).sum(-1, keepdim=True), queries @ self.queue.clone().T], -1)
        self.queue.copy_(torch.cat([keys, self.queue[: -len(keys)]]))
        return F.cross_entropy(logits / 0.5, torch.zeros(len(x), dtype=torch.long)) + 0 * y.sum()


@plain
def momentum_encoder(run: Run) -> None:
    model = Momentum()
    opt = torch.optim.SGD(model.query.parameters(), lr=0.3)
    for batch in numbers(3):
        losses = [model(**rows) / 4 for rows in microbatches(batch)]
        sum(losses).backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", sum(losses))
    run.weights(model.state_dict())


@piped(momentum_encoder, "2", error=r"buffer|cut|stage|writ", equal=True)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Momentum(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class Cosine(nn.Module):
    """BYOL's loss of one view against the slow network's projection of another."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.predictor = Mlp(), nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(x)), target).mean()


@plain
def bootstrapped_latents(run: Run) -> None:
    model = Cosine()
    slow = copy.deepcopy(model.online)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for batch in numbers(3):
        with torch.no_grad():
            target = slow(batch["x"] + 0.1)
        loss = model(batch["x"], target)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for a, b in zip(slow.parameters(), model.online.parameters(), strict=True):
                a.lerp_(b, 0.1)
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(bootstrapped_latents, "2", "4")
def _(run: Run) -> None:
    model, data = Cosine(), numbers(3)
    slow = copy.deepcopy(model.online)
    pipe = fxpipe.compile(model, few({"x": data[0]["x"], "target": data[0]["y"]}), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3, momentum=0.9)
    for batch in data:
        with torch.no_grad():
            target = slow(batch["x"] + 0.1)
        run.note("loss", pipe.step({"x": batch["x"], "target": target}))
        opt.step()
        opt.zero_grad()
        state = pipe.full_state_dict(rank=None)
        with torch.no_grad():
            for name, value in slow.named_parameters():
                value.lerp_(state[f"online.{name}"], 0.1)
    run.weights(pipe.full_state_dict())


@piped(bootstrapped_latents, variant="follows the module", error=WHOLE_MODEL + r"|batch")
def _(run: Run) -> None:
    model, data = Cosine(), numbers(3)
    slow = copy.deepcopy(model.online)
    pipe = fxpipe.compile(model, few({"x": data[0]["x"], "target": data[0]["y"]}), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3, momentum=0.9)
    for batch in data:
        with torch.no_grad():
            target = slow(batch["x"] + 0.1)
        run.note("loss", pipe.step({"x": batch["x"], "target": target}))
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for a, b in zip(slow.parameters(), model.online.parameters(), strict=True):
                a.lerp_(b, 0.1)
    run.weights(pipe.full_state_dict())


@plain
def contrast_in_the_batch(run: Run) -> None:
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in numbers(3):
        loss = contrast(model(batch["x"]), model(batch["x"] + 0.1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


def contrast(a: Tensor, b: Tensor) -> Tensor:
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.5
    return F.cross_entropy(logits, torch.arange(len(logits)))


class Views(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return contrast(self.body(x), self.body(x + 0.1)) + 0 * y.sum()


def _contrast(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Views(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(contrast_in_the_batch, warning="makes each row of several")
def _(run: Run) -> None:
    _contrast(run)


@plain
def contrast_in_microbatches(run: Run) -> None:
    model = Views()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in numbers(3):
        losses = [model(**rows) / 4 for rows in microbatches(batch)]
        sum(losses).backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", sum(losses))
    run.weights(model.state_dict())


@piped(contrast_in_microbatches, "2", "4")
def _(run: Run) -> None:
    _contrast(run)
