"""What scripts of data parallel training ask torch.distributed, and what they do on one rank alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import LanguageModel, Mlp, Regressor, numbers, texts
from benchmarks.scripts.script import MICROBATCHES, Run, few, piped, plain

AS_REPLICAS = r"get_world_size|all_reduce|all_gather|torch\.distributed|replica"


class Divided(Regressor):
    """Divides its loss by the number of processes, whose gradients a wrapper would add."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return F.mse_loss(self.body(x), y, reduction="sum") / (y.numel() * world)


@plain
def divided_by_the_world(run: Run) -> None:
    model = Divided()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


def _loop(run: Run, model: nn.Module, data: list[dict[str, Tensor]]) -> None:
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(divided_by_the_world, "2", "4", equal=True, error=AS_REPLICAS)
def _(run: Run) -> None:
    _loop(run, Divided(), numbers(3))


class InLossFunction(Regressor):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x)


@piped(divided_by_the_world, variant="in the loss function", equal=True, error=AS_REPLICAS)
def _(run: Run) -> None:
    def loss_fn(output, batch):
        return F.mse_loss(output, batch["y"]) / (dist.get_world_size() if dist.is_initialized() else 1)

    data = numbers(3)
    pipe = fxpipe.compile(InLossFunction(), few(data[0]), **run.options, loss_fn=loss_fn)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(divided_by_the_world, variant="the script's own group", equal=True, error=AS_REPLICAS, alone=True)
def _(run: Run) -> None:
    dist.init_process_group("gloo")
    _loop(run, Divided(), numbers(3))


class Counting(LanguageModel):
    """Normalizes by the labels of all processes, which it adds in the forward."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(input_ids))[:, :-1]
        count = torch.as_tensor([float(labels[:, 1:].numel())])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(count)
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count[0]


@plain
def counted_over_processes(run: Run) -> None:
    model = Counting()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in texts(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(counted_over_processes, "2", "4", equal=True, error=AS_REPLICAS, alone=True)
def _(run: Run) -> None:
    _loop(run, Counting(), texts(3))


class Gathering(Regressor):
    """Negatives of all processes, as CLIP's loss gathers them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.body(x)
        if dist.is_available() and dist.is_initialized():
            every = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
            dist.all_gather(every, features)
            every[dist.get_rank()] = features
            features = torch.cat(every)
        return (features @ features.T).square().mean() + F.mse_loss(self.body(x), y)


@plain
def gathered_features(run: Run) -> None:
    model = Gathering()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in numbers(3):
        losses = [model(**{k: v[i : i + 2] for k, v in batch.items()}) / MICROBATCHES for i in range(0, 8, 2)]
        sum(losses).backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", sum(losses))
    run.weights(model.state_dict())


@piped(gathered_features, "2", equal=True, error=AS_REPLICAS, alone=True)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Gathering(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def averaged_logs(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("mean", loss)
    run.weights(model.state_dict())


@piped(averaged_logs, "2", "4", "2x2", variant="all_reduce of the loss", equal=True)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        loss = pipe.step(run.rows(batch))
        opt.step()
        opt.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        run.note("mean", mean / dist.get_world_size())
    run.weights(pipe.full_state_dict())


@piped(
    averaged_logs,
    "2",
    variant="gradients averaged by hand",
    error=r"data parallel training",
    alone=True,
)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        loss = pipe.step(batch)
        for p in model.parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        opt.step()
        opt.zero_grad()
        run.note("mean", loss)
    run.weights(pipe.full_state_dict())


@piped(averaged_logs, variant="DistributedDataParallel", error=r"DistributedDataParallel|wrap")
def _(run: Run) -> None:
    data = numbers(3)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Regressor())
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    run.note("mean", pipe.step(data[0]))


@piped(averaged_logs, variant="torch.compile", equal=True)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(torch.compile(Regressor()), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("mean", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights({k.removeprefix("_orig_mod."): v for k, v in pipe.full_state_dict().items()})


@piped(
    averaged_logs,
    variant="ranks of different seeds",
    equal=False,
    differs="the first rank's weights are trained",
)
def _(run: Run) -> None:
    torch.manual_seed(100 + run.rank)
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("mean", pipe.step(batch))
        opt.step()
        opt.zero_grad()


@piped(averaged_logs, variant="rank 0 alone saves the pipeline", error=r"calls|full_state_dict")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        pipe.step(batch)
        opt.step()
        opt.zero_grad()
        if run.rank == 0:
            torch.save(pipe.full_state_dict(), run.directory / "model.pt")


@piped(averaged_logs, variant="rank 0 alone evaluates", error=r"calls|evaluate")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        pipe.step(batch)
        opt.step()
        opt.zero_grad()
        if run.rank == 0:
            pipe.evaluate(batch)


@piped(averaged_logs, variant="rank 0 alone steps the optimizer", error=r"step\(\)|calls")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("mean", pipe.step(batch))
        if run.rank == 0:
            opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(averaged_logs, variant="barriers around the loop", equal=True)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    dist.barrier()
    for batch in data:
        run.note("mean", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        dist.barrier()
    run.weights(pipe.full_state_dict())


@piped(averaged_logs, variant="a barrier on rank 0 alone", error=r"barrier|waits|step", alone=True)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options, timeout=8)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("mean", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        if run.rank == 0:
            dist.barrier()


@piped(
    averaged_logs,
    "2",
    variant="broadcast of the parameters",
    equal=True,
    error=r"synchronize|full_state_dict",
)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    for batch in data:
        run.note("mean", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class Statistics(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.body, self.norm, self.rest = Mlp(outputs=8), norm, Mlp(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.rest(self.norm(self.body(x))), y)


@plain
def synchronized_norm(run: Run) -> None:
    model = Statistics(nn.BatchNorm1d(8))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in numbers(3):
        losses = [model(**{k: v[i : i + 2] for k, v in batch.items()}) / MICROBATCHES for i in range(0, 8, 2)]
        sum(losses).backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", sum(losses))
    run.weights(model.state_dict())


@piped(
    synchronized_norm, "2", variant="SyncBatchNorm", equal=True, error=r"SyncBatchNorm|batch|replica|CUDA|GPU"
)
def _(run: Run) -> None:
    data = numbers(3)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Statistics(nn.BatchNorm1d(8)))
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())
