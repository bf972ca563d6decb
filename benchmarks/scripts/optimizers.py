"""Optimizers of several kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxpipe
from benchmarks.scripts.models import LanguageModel, Regressor, numbers, texts
from benchmarks.scripts.script import BY_RANK, EVERYWHERE, WHOLE_MODEL, Run, few, piped, plain


class Orthogonal(torch.optim.Optimizer):
    """Updates by orthogonalized momentum, as Muon makes them."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                x = mean / (mean.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                p.add_(x, alpha=-group["lr"])


class Both(torch.optim.Optimizer):
    """Orthogonal updates or Adam's, as a flag in each group says: the shape of MuonWithAuxAdam."""

    def __init__(self, params):
        for group in params:
            assert "use_muon" in group, "each group needs use_muon"
            group.setdefault("lr", 0.02 if group["use_muon"] else 0.01)
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if group["use_muon"]:
                    mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    update = mean / (mean.norm() + 1e-7)
                    for _ in range(3):
                        update = 1.5 * update - 0.5 * update @ update.mT @ update
                else:
                    state["step"] = state.get("step", 0) + 1
                    mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad.square(), 0.05)
                    scale = (square / (1 - 0.95 ** state["step"])).sqrt() + 1e-8
                    update = mean / (1 - 0.9 ** state["step"]) / scale
                p.add_(update, alpha=-group["lr"])


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "blocks" in name


@plain
def muon_and_adam(run: Run) -> None:
    model = LanguageModel()
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if _is_matrix(name, p)]
    others = [p for name, p in named.items() if not _is_matrix(name, p)]
    opts = [Orthogonal(matrices), torch.optim.AdamW(others, lr=0.01)]
    for batch in texts(3):
        loss = model(**batch).loss
        loss.backward()
        run.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        for opt in opts:
            opt.step()
            opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(muon_and_adam, *EVERYWHERE, variant="a class for each group", equal=True)
def _(run: Run) -> None:
    data = texts(3)
    pipe = fxpipe.compile(LanguageModel(), few(data[0]), **run.options)
    matrices = {"params": ["blocks.*.weight"], "class": Orthogonal, "lr": 0.02}
    norms = {"params": ["blocks.*.norm.weight"]}
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.01, clip_grad_norm=0.5, groups=[norms, matrices])
    for batch in data:
        loss = pipe.step(run.rows(batch))
        opt.step()
        run.note("norm", opt.last_norm)
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(pipe.full_state_dict())


@piped(muon_and_adam, "2", "4", variant="two optimizers of torch", error=BY_RANK)
def _(run: Run) -> None:
    model, data = LanguageModel(), texts(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if _is_matrix(name, p)]
    others = [p for name, p in named.items() if not _is_matrix(name, p)]
    opts = [Orthogonal(matrices), torch.optim.AdamW(others, lr=0.01)]
    for batch in data:
        run.note("loss", pipe.step(batch))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def flags_in_groups(run: Run) -> None:
    model = LanguageModel()
    named = dict(model.named_parameters())
    opt = Both([
        {"params": [p for name, p in named.items() if _is_matrix(name, p)], "use_muon": True},
        {"params": [p for name, p in named.items() if not _is_matrix(name, p)], "use_muon": False},
    ])  # fmt: skip
    for batch in texts(3):
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(flags_in_groups, "2", "4")
def _(run: Run) -> None:
    data = texts(3)
    pipe = fxpipe.compile(LanguageModel(), few(data[0]), **run.options)
    opt = pipe.optimizer(Both, groups=[
        {"params": ["blocks.*.norm.weight"], "use_muon": False},
        {"params": ["blocks.*.weight"], "use_muon": True},
        {"params": ["*"], "use_muon": False},
    ])  # fmt: skip
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule: gradients at an interpolation, evaluation at the average."""

    def __init__(self, params, lr=0.3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def _move(self, group, weight):
        for p in group["params"]:
            if "z" in self.state[p]:
                p.lerp_(self.state[p]["z"], weight)

    def eval(self):
        for group in self.param_groups:
            if group["training"]:
                self._move(group, 1 - 1 / group["beta"])
            group["training"] = False

    def train(self):
        for group in self.param_groups:
            if not group["training"]:
                self._move(group, 1 - group["beta"])
            group["training"] = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            share = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


@plain
def schedule_free(run: Run) -> None:
    model, data = Regressor(), numbers(5)
    opt = ScheduleFree(model.parameters())
    for batch in data[:4]:
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
        opt.eval()
        with torch.no_grad():
            run.note("evaluation", model(**data[4]))
        opt.train()
    opt.eval()
    run.weights(model.state_dict())


@piped(schedule_free, *EVERYWHERE)
def _(run: Run) -> None:
    data = numbers(5)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options, evaluation=True)
    opt = pipe.optimizer(ScheduleFree)
    for batch in data[:4]:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
        opt.eval()
        run.note("evaluation", pipe.evaluate(run.rows(data[4])))
        opt.train()
    opt.eval()
    run.weights(pipe.full_state_dict())


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimization: a step up by the norm of all gradients, a second backward, a step."""

    def __init__(self, params, base=torch.optim.SGD, rho=0.2, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def first_step(self):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "old" in self.state[p]:
                    p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        loss = torch.enable_grad()(closure)()
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()
        return loss


@plain
def sharpness(run: Run) -> None:
    model = Regressor()
    opt = Sharp(model.parameters(), lr=0.3)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.first_step()
        model(**batch).backward()
        opt.second_step()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(sharpness, "2", "4", variant="an optimizer of the model's parameters", error=BY_RANK)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = Sharp(model.parameters(), lr=0.3)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.first_step()
        pipe.step(batch)
        opt.second_step()
    run.weights(pipe.full_state_dict())


@piped(
    sharpness,
    "2",
    "4",
    variant="pipe.optimizer with a closure",
    error=r"closure|values of other ranks|other ranks",
)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(Sharp, lr=0.3)
    for batch in data:
        opt.zero_grad()
        run.note("loss", opt.step(lambda batch=batch: pipe.step(batch)))
    run.weights(pipe.full_state_dict())


@plain
def closures(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in numbers(3):

        def closure(batch=batch):
            opt.zero_grad()
            loss = model(**batch)
            loss.backward()
            return loss

        run.note("loss", opt.step(closure))
    run.weights(model.state_dict())


@piped(closures, "2", "4")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:

        def closure(batch=batch):
            opt.zero_grad()
            return pipe.step(batch)

        run.note("loss", opt.step(closure))
    run.weights(pipe.full_state_dict())


@plain
def limited_memory_bfgs(run: Run) -> None:
    model, batch = Regressor(), numbers(1)[0]
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        opt.zero_grad()
        loss = model(**batch)
        loss.backward()
        return loss

    for _ in range(2):
        run.note("loss", opt.step(closure))
    run.weights(model.state_dict())


@piped(limited_memory_bfgs, variant="pipe.optimizer", error=r"LBFGS|closure")
def _(run: Run) -> None:
    batch = numbers(1)[0]
    pipe = fxpipe.compile(Regressor(), few(batch), **run.options)
    opt = pipe.optimizer(torch.optim.LBFGS, lr=0.1, max_iter=3)

    def closure():
        opt.zero_grad()
        return pipe.step(batch)

    for _ in range(2):
        run.note("loss", opt.step(closure))


@piped(
    limited_memory_bfgs,
    variant="of the model's parameters",
    error=r"LBFGS|pipe\.optimizer|batch|gradient|values",
)
def _(run: Run) -> None:
    model, batch = Regressor(), numbers(1)[0]
    pipe = fxpipe.compile(model, few(batch), **run.options)
    opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        opt.zero_grad()
        return pipe.step(batch)

    for _ in range(2):
        run.note("loss", opt.step(closure))
    run.weights(pipe.full_state_dict())


class Ahead(torch.optim.Optimizer):
    """Lookahead: slow weights follow each second step, fast ones return to them."""

    def __init__(self, params, lr=0.3):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                slow = self.state[p].setdefault("slow", p.clone())
                p.sub_(p.grad, alpha=group["lr"])
                if group["k"] % 2 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


@plain
def lookahead(run: Run) -> None:
    model = Regressor()
    opt = Ahead(model.parameters())
    for batch in numbers(4):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(lookahead, *EVERYWHERE)
def _(run: Run) -> None:
    data = numbers(4)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(Ahead)
    for batch in data:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def rates_by_depth(run: Run) -> None:
    model = LanguageModel()
    groups = [
        {"params": block.parameters(), "lr": 0.01 * 0.5**i} for i, block in enumerate(reversed(model.blocks))
    ]
    groups.append({"params": [*model.embedding.parameters(), *model.head.parameters()]})
    opt = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
    for batch in texts(3):
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(rates_by_depth, "2", "4")
def _(run: Run) -> None:
    data = texts(3)
    pipe = fxpipe.compile(LanguageModel(), few(data[0]), **run.options)
    groups = [{"params": [f"blocks.{3 - i}.*"], "lr": 0.01 * 0.5**i} for i in range(4)]
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.02, betas=(0.9, 0.95), groups=groups)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def sharded_state(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(sharded_state, "2x2", variant="shard", equal=True)
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options, shard="optimizer")
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(
    sharded_state,
    "2",
    "2x2",
    variant="ZeroRedundancyOptimizer",
    error=rf"shard=|ZeroRedundancy|{WHOLE_MODEL}",
)
def _(run: Run) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class Averaged(torch.optim.SGD):
    """Averages its updates over all processes, as optimizers of data parallel libraries do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    torch.distributed.all_reduce(p.grad)
                    p.grad /= torch.distributed.get_world_size()
        return super().step(closure)


@piped(sharded_state, "2", variant="an optimizer with collectives", error=r"shard=|all_reduce|collective")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(Averaged, lr=0.05)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@plain
def foreach_and_hooks(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.Adam(model.parameters(), lr=0.05, foreach=True, amsgrad=True)
    counts = []
    opt.register_step_post_hook(lambda *_: counts.append(1))
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.note("calls", len(counts))
    run.weights(model.state_dict())


@piped(foreach_and_hooks, "2", "4")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Regressor(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.Adam, lr=0.05, foreach=True, amsgrad=True)
    counts = []
    opt.register_step_post_hook(lambda *_: counts.append(1))
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.note("calls", len(counts))
    run.weights(pipe.full_state_dict())


@plain
def decay_by_hand(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in numbers(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99).clamp_(-0.3, 0.3)
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(decay_by_hand, "2", "4", equal=True, error=r"synchronize")
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99).clamp_(-0.3, 0.3)
    run.weights(pipe.full_state_dict())


@plain
def penalty_on_weights(run: Run) -> None:
    model = Regressor()
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in numbers(3):
        loss = model(**batch) + 0.01 * sum(p.abs().sum() for p in model.parameters())
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


class Penalized(Regressor):
    def forward(self, x, y):
        return super().forward(x, y) + 0.01 * sum(p.abs().sum() for p in self.parameters())


@piped(penalty_on_weights, "2", "4")
def _(run: Run) -> None:
    data = numbers(3)
    pipe = fxpipe.compile(Penalized(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(penalty_on_weights, variant="added to the loss of a step", equal=True, error=WHOLE_MODEL)
def _(run: Run) -> None:
    model, data = Regressor(), numbers(3)
    pipe = fxpipe.compile(model, few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.3)
    for batch in data:
        loss = pipe.step(batch)
        (loss + 0.01 * sum(p.abs().sum() for p in model.parameters())).backward()
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())
