"""Runs that stop and go on: each kind of checkpoint, with the loop's own state."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import INPUTS, OUTPUTS, Regressor, numbers
from benchmarks.scripts.script import WHOLE_MODEL, Run, few, piped, plain


@plain
def resumed(run: Run) -> None:
    data = numbers(6)
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6)
    for batch in data[:3]:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        rate.step()
        run.note("loss", loss)
    state = {"model": model.state_dict(), "opt": opt.state_dict(), "rate": rate.state_dict(), "step": 3}
    torch.save(state, run.directory / "last.pt")
    model, state = Regressor(), torch.load(run.directory / "last.pt")
    model.load_state_dict(state["model"])
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    opt.load_state_dict(state["opt"])
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 6)
    rate.load_state_dict(state["rate"])
    for batch in data[state["step"] :]:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        rate.step()
        run.note("loss", loss)
    run.weights(model.state_dict())


class Trainer:
    """The script's pipeline, optimizer and scheduler, and its loop."""

    def __init__(self, run: Run, model: nn.Module, **options: object) -> None:
        self.run = run
        self.model = model
        self.pipe = fxpipe.compile(model, few(numbers(1)[0]), **run.options, **options)
        self.prepare()

    def prepare(self) -> None:
        self.opt = self.pipe.optimizer(torch.optim.AdamW, lr=0.1)
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 6)

    def train(self, data: list) -> None:
        for batch in data:
            self.run.note("loss", self.pipe.step(self.run.rows(batch)))
            self.opt.step()
            self.opt.zero_grad()
            self.rate.step()


@piped(resumed, "2", "4", "2x2", variant="Checkpointer", equal=True)
def _(run: Run) -> None:
    data = numbers(6)
    first = Trainer(run, Regressor())
    with fxpipe.Checkpointer(
        first.pipe, run.directory / "a", optimizer=first.opt, state={"rate": first.rate}
    ) as c:
        first.train(data[:3])
        c.save()
    second = Trainer(run, Regressor())
    with fxpipe.Checkpointer(
        second.pipe, run.directory / "a", optimizer=second.opt, state={"rate": second.rate}
    ) as c:
        c.resume()
        second.train(data[second.pipe.step_number :])
    run.weights(second.pipe.full_state_dict())


@piped(resumed, "2", variant="Checkpointer, other cuts and a split optimizer", equal=True)
def _(run: Run) -> None:
    data = numbers(6)
    first = Trainer(run, Regressor(), split_points=["body.2"])
    with fxpipe.Checkpointer(
        first.pipe, run.directory / "a", optimizer=first.opt, state={"rate": first.rate}
    ) as c:
        first.train(data[:3])
        c.save()
    second = Trainer(run, Regressor(), split_points=["body.6"])
    with fxpipe.Checkpointer(
        second.pipe, run.directory / "a", optimizer=second.opt, state={"rate": second.rate}
    ) as c:
        c.resume()
        second.train(data[second.pipe.step_number :])
    run.weights(second.pipe.full_state_dict())


@piped(resumed, "2", "4", variant="files of the states of ranks", equal=True)
def _(run: Run) -> None:
    data = numbers(6)
    first = Trainer(run, Regressor())
    first.train(data[:3])
    own = {"opt": first.opt.state_dict(), "rate": first.rate.state_dict()}
    torch.save(own, run.directory / f"optimizer.{run.rank}.pt")
    weights = first.pipe.full_state_dict()
    if run.rank == 0:
        torch.save(weights, run.directory / "model.pt")
    torch.distributed.barrier()
    model = Regressor()
    model.load_state_dict(torch.load(run.directory / "model.pt"))
    second = Trainer(run, model)
    own = torch.load(run.directory / f"optimizer.{run.rank}.pt", weights_only=False)
    second.opt.load_state_dict(own["opt"])
    second.rate.load_state_dict(own["rate"])
    second.train(data[3:])
    run.weights(second.pipe.full_state_dict())


@piped(resumed, "2", "4", variant="rank 0's torch.save, as in plain torch", error=WHOLE_MODEL)
def _(run: Run) -> None:
    data = numbers(6)
    first = Trainer(run, Regressor())
    first.train(data[:3])
    if run.rank == 0:
        state = {
            "model": first.model.state_dict(),
            "opt": first.opt.state_dict(),
            "rate": first.rate.state_dict(),
        }
        torch.save(state, run.directory / "last.pt")
    torch.distributed.barrier()
    state = torch.load(run.directory / "last.pt", weights_only=False)
    model = Regressor()
    model.load_state_dict(state["model"])
    second = Trainer(run, model)
    second.opt.load_state_dict(state["opt"])
    second.rate.load_state_dict(state["rate"])
    second.train(data[3:])
    run.weights(second.pipe.full_state_dict())


@piped(
    resumed,
    "2",
    "4",
    variant="whole weights and rank 0's optimizer",
    error=r"state is that of other parameters.*Checkpointer",
)
def _(run: Run) -> None:
    data = numbers(6)
    first = Trainer(run, Regressor())
    first.train(data[:3])
    weights = first.pipe.full_state_dict()
    if run.rank == 0:
        state = {"model": weights, "opt": first.opt.state_dict(), "rate": first.rate.state_dict()}
        torch.save(state, run.directory / "last.pt")
    torch.distributed.barrier()
    state = torch.load(run.directory / "last.pt", weights_only=False)
    second = Trainer(run, Regressor())
    second.pipe.load_state_dict(state["model"])
    second.opt.load_state_dict(state["opt"])
    second.rate.load_state_dict(state["rate"])
    second.train(data[3:])
    run.weights(second.pipe.full_state_dict())


class Uniform(nn.Module):
    """Whose stages have tensors of the same shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *[part for _ in range(4) for part in (nn.Linear(INPUTS, INPUTS), nn.Tanh())]
        )

    def forward(self, x, y):
        return F.mse_loss(self.body(x), F.pad(y, (0, INPUTS - OUTPUTS)))


@plain
def resumed_alike(run: Run) -> None:
    data = numbers(6)
    model = Uniform()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for batch in data:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
        torch.save(opt.state_dict(), run.directory / "last.pt")
    run.weights(model.state_dict())


@piped(
    resumed_alike,
    "2",
    "4",
    variant="rank 0's optimizer on all ranks",
    error=r"state is that of other parameters.*Checkpointer",
)
def _(run: Run) -> None:
    data = numbers(6)
    pipe = fxpipe.compile(Uniform(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for step, batch in enumerate(data):
        if step == 3:
            if run.rank == 0:
                torch.save(opt.state_dict(), run.directory / "last.pt")
            torch.distributed.barrier()
            opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
            opt.load_state_dict(torch.load(run.directory / "last.pt"))
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(
    resumed,
    "2",
    variant="the weights alone, a new optimizer",
    differs="the script leaves the optimizer's state out",
)
def _(run: Run) -> None:
    data = numbers(6)
    first = Trainer(run, Regressor())
    first.train(data[:3])
    weights = first.pipe.full_state_dict(rank=None)
    second = Trainer(run, Regressor())
    second.pipe.load_state_dict(weights)
    second.train(data[3:])
    run.weights(second.pipe.full_state_dict())


@piped(resumed, "2", "4", variant="torch's distributed checkpoint of the model", error=WHOLE_MODEL)
def _(run: Run) -> None:
    import torch.distributed.checkpoint as dcp

    data = numbers(6)
    first = Trainer(run, Regressor())
    first.train(data[:3])
    dcp.save({"model": first.model.state_dict()}, checkpoint_id=run.directory / "dcp")
    model = Regressor()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=run.directory / "dcp")
    model.load_state_dict(state["model"])
    second = Trainer(run, model)
    second.opt.load_state_dict(first.opt.state_dict())
    second.rate.load_state_dict(first.rate.state_dict())
    second.train(data[3:])
    run.weights(second.pipe.full_state_dict())


@plain
def saved_and_loaded(run: Run) -> None:
    data = numbers(5)
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for batch in data[:4]:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
        if batch is data[1]:
            opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():
        run.note("evaluation", model(**data[4]))
    run.weights(model.state_dict())


@piped(saved_and_loaded, "2", "4")
def _(run: Run) -> None:
    data = numbers(5)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for batch in data[:2]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    pipe.save(run.directory / "saved")
    pipe = fxpipe.load(run.directory / "saved")
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for batch in data[2:4]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.note("evaluation", pipe.evaluate(data[4]))
    run.weights(pipe.full_state_dict())


@piped(saved_and_loaded, "2", "4", variant="exported", equal=True)
def _(run: Run) -> None:
    from safetensors.torch import load_file

    data = numbers(5)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    for batch in data[:4]:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        if batch is data[1]:
            opt = pipe.optimizer(torch.optim.AdamW, lr=0.1)
    pipe.export(run.directory / "exported")
    state = load_file(run.directory / "exported" / "model.safetensors")
    model = Regressor()
    model.load_state_dict(state)
    with torch.no_grad():
        run.note("evaluation", model(**data[4]))
    run.weights(model.state_dict())


@plain
def two_trials(run: Run) -> None:
    """A search over learning rates in one process, each from the same weights."""
    data = numbers(4)
    start = Regressor().state_dict()
    for rate in (0.02, 0.1):
        model = Regressor()
        model.load_state_dict(start)
        opt = torch.optim.AdamW(model.parameters(), lr=rate)
        for batch in data[:3]:
            loss = model(**batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            run.note("evaluation", model(**data[3]))


@piped(two_trials, "2", "4")
def _(run: Run) -> None:
    data = numbers(4)
    model = Regressor()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    pipe = fxpipe.compile(model, few(data[0]), **run.options, evaluation=True)
    for rate in (0.02, 0.1):
        pipe.load_state_dict(start)
        opt = pipe.optimizer(torch.optim.AdamW, lr=rate)
        for batch in data[:3]:
            pipe.step(batch)
            opt.step()
            opt.zero_grad()
        run.note("evaluation", pipe.evaluate(data[3]))


@piped(
    two_trials,
    "2",
    "4",
    variant="model.load_state_dict(start)",
    equal=True,
    error=r"pipe\.load_state_dict|synchronize",
)
def _(run: Run) -> None:
    data = numbers(4)
    model = Regressor()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    pipe = fxpipe.compile(model, few(data[0]), **run.options, evaluation=True)
    for rate in (0.02, 0.1):
        model.load_state_dict(start)
        opt = pipe.optimizer(torch.optim.AdamW, lr=rate)
        for batch in data[:3]:
            pipe.step(batch)
            opt.step()
            opt.zero_grad()
        run.note("evaluation", pipe.evaluate(data[3]))


@piped(
    two_trials,
    "2",
    variant="deepcopy of the start's state dict",
    equal=True,
    error=r"pipe\.load_state_dict|full_state_dict|synchronize",
)
def _(run: Run) -> None:
    data = numbers(4)
    model = Regressor()
    pipe = fxpipe.compile(model, few(data[0]), **run.options, evaluation=True)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for rate in (0.02, 0.1):
        model.load_state_dict(start)
        opt = pipe.optimizer(torch.optim.AdamW, lr=rate)
        for batch in data[:3]:
            pipe.step(batch)
            opt.step()
            opt.zero_grad()
        run.note("evaluation", pipe.evaluate(data[3]))
