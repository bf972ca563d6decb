"""Several models that train by turns: adversaries, two heads, target networks, actor and critic."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import INPUTS, OUTPUTS, WIDTH, Mlp, numbers
from benchmarks.scripts.script import (
    BATCH,
    TWO_PIPELINES,
    Run,
    few,
    piped,
    plain,
)


class Critic(nn.Module):
    """The loss of the discriminator, without gradients of the generator."""

    def __init__(self, generator: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.generator, self.judge = generator, judge

    def forward(self, z: Tensor, real: Tensor) -> Tensor:
        with torch.no_grad():
            fake = self.generator(z)
        return F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake)).mean()


class Forger(nn.Module):
    """The loss of the generator; the judge's gradients are thrown away."""

    def __init__(self, generator: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.generator, self.judge = generator, judge

    def forward(self, z: Tensor, real: Tensor) -> Tensor:
        return F.softplus(-self.judge(self.generator(z))).mean()


#: By ranks: where the two pipelines are cut, each in another way.
CUTS = {
    2: (["judge.2"], ["judge.0"]),
    4: (["generator.4", "judge.0", "judge.4"], ["generator.2", "generator.6", "judge.2"]),
}


def _players() -> tuple[nn.Module, nn.Module]:
    return Mlp(INPUTS, OUTPUTS), Mlp(OUTPUTS, 1)


def _games(count: int = 3) -> list[dict[str, Tensor]]:
    return [{"z": batch["x"], "real": batch["y"]} for batch in numbers(count)]


@plain
def adversaries(run: Run) -> None:
    generator, judge = _players()
    opt_judge = torch.optim.AdamW(judge.parameters(), lr=0.05)
    opt_generator = torch.optim.AdamW(generator.parameters(), lr=0.05)
    for batch in _games():
        loss = Critic(generator, judge)(**batch)
        loss.backward()
        opt_judge.step()
        opt_judge.zero_grad()
        run.note("judge", loss)
        loss = Forger(generator, judge)(**batch)
        loss.backward()
        opt_generator.step()
        opt_generator.zero_grad()
        opt_judge.zero_grad()
        run.note("generator", loss)
    run.weights(generator.state_dict(), "generator")
    run.weights(judge.state_dict(), "judge")


def _adversaries(run: Run, *, exchanged: bool) -> None:
    """Two pipelines of shared tensors; an optimizer of torch for each player."""
    generator, judge = _players()
    data = _games()
    players = Critic(generator, judge), Forger(generator, judge)
    critic, forger = (
        fxpipe.compile(player, few(data[0]), **run.options, split_points=at)
        for player, at in zip(players, CUTS[run.ranks], strict=True)
    )
    opt_judge = torch.optim.AdamW(judge.parameters(), lr=0.05)
    opt_generator = torch.optim.AdamW(generator.parameters(), lr=0.05)
    for batch in data:
        run.note("judge", critic.step(batch))
        opt_judge.step()
        opt_judge.zero_grad()
        if exchanged:
            critic.synchronize()
        run.note("generator", forger.step(batch))
        opt_generator.step()
        opt_generator.zero_grad()
        opt_judge.zero_grad()
        if exchanged:
            forger.synchronize()
    if run.rank == 0:
        run.weights(generator.state_dict(), "generator")
        run.weights(judge.state_dict(), "judge")


@piped(adversaries, "2", "4", variant="synchronize between", equal=True, error=TWO_PIPELINES)
def _(run: Run) -> None:
    _adversaries(run, exchanged=True)


@piped(adversaries, "2", "4", variant="two pipelines", error=TWO_PIPELINES)
def _(run: Run) -> None:
    _adversaries(run, exchanged=False)


@piped(adversaries, "4", variant="two optimizers of pipelines", error=TWO_PIPELINES)
def _(run: Run) -> None:
    generator, judge = _players()
    data = _games()
    players = Critic(generator, judge), Forger(generator, judge)
    critic, forger = (
        fxpipe.compile(player, few(data[0]), **run.options, split_points=at)
        for player, at in zip(players, CUTS[run.ranks], strict=True)
    )
    opt_judge = critic.optimizer(torch.optim.AdamW, lr=0.05)
    opt_generator = forger.optimizer(torch.optim.AdamW, lr=0.05, groups=[{"params": ["judge.*"], **STILL}])
    for batch in data:
        run.note("judge", critic.step(batch))
        opt_judge.step()
        opt_judge.zero_grad()
        run.note("generator", forger.step(batch))
        opt_generator.step()
        opt_generator.zero_grad()
    run.weights({k.partition(".")[2]: v for k, v in critic.full_state_dict().items() if k[0] == "j"}, "judge")
    run.weights(
        {k.partition(".")[2]: v for k, v in forger.full_state_dict().items() if k[0] == "g"}, "generator"
    )


STILL = {"lr": 0.0, "weight_decay": 0.0}


@piped(adversaries, "2", "4", variant="like=", equal=True)
def _(run: Run) -> None:
    generator, judge = _players()
    data = _games()
    players = Critic(generator, judge), Forger(generator, judge)
    forger = fxpipe.compile(players[1], few(data[0]), **run.options)
    critic = fxpipe.compile(players[0], few(data[0]), **run.options, like=forger)
    _by_turns(run, data, critic, forger)


@piped(adversaries, "2", "4", variant="like= the discriminator's", equal=True)
def _(run: Run) -> None:
    generator, judge = _players()
    data = _games()
    critic = fxpipe.compile(Critic(generator, judge), few(data[0]), **run.options)
    forger = fxpipe.compile(Forger(generator, judge), few(data[0]), **run.options, like=critic)
    _by_turns(run, data, critic, forger)


def _by_turns(
    run: Run, data: list[dict[str, Tensor]], critic: fxpipe.Pipeline, forger: fxpipe.Pipeline
) -> None:
    """Train two pipelines by an optimizer for each player."""
    opts = {
        player: forger.optimizer(torch.optim.AdamW, lr=0.05, groups=[{"params": [f"{other}.*"], **STILL}])
        for player, other in (("judge", "generator"), ("generator", "judge"))
    }
    for batch in data:
        for player, pipe in (("judge", critic), ("generator", forger)):
            run.note(player, pipe.step(batch))
            opts[player].step()
            opts["judge"].zero_grad()
            opts["generator"].zero_grad()
    for player in opts:
        state = forger.full_state_dict()
        run.weights({k.partition(".")[2]: v for k, v in state.items() if k.startswith(player)}, player)


class Game(nn.Module):
    """Both players in one model, whose loss a flag of the batch selects."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = _players()

    def forward(self, z: Tensor, real: Tensor, forge: Tensor) -> Tensor:
        fake = self.generator(z)
        honest = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake.detach())).mean()
        return torch.where(forge.bool(), F.softplus(-self.judge(fake)).mean(), honest)


@piped(adversaries, "2", "4", variant="one pipeline and a flag in the batch", equal=True)
def _(run: Run) -> None:
    data = [batch | {"forge": torch.zeros(())} for batch in _games()]
    pipe = fxpipe.compile(Game(), few(data[0]) | {"forge": torch.zeros(())}, **run.options)
    opts = {
        player: pipe.optimizer(torch.optim.AdamW, lr=0.05, groups=[{"params": [f"{other}.*"], **STILL}])
        for player, other in (("judge", "generator"), ("generator", "judge"))
    }
    for batch in data:
        for flag, player in enumerate(("judge", "generator")):
            run.note(player, pipe.step(batch | {"forge": torch.tensor(float(flag))}))
            opts[player].step()
            for opt in opts.values():
                opt.zero_grad()
    for player in opts:
        state = pipe.full_state_dict()
        run.weights({k.partition(".")[2]: v for k, v in state.items() if k.startswith(player)}, player)


class Shared(nn.Module):
    """One model with two heads, trained by two losses in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = (
            Mlp(INPUTS, WIDTH),
            nn.Linear(WIDTH, OUTPUTS),
            nn.Linear(WIDTH, OUTPUTS),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).tanh()
        return self.first(hidden), self.second(hidden)


class OneHead(nn.Module):
    def __init__(self, model: Shared, head: int) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x)[self.head], y)


@plain
def losses_in_turns(run: Run) -> None:
    model = Shared()
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for i, batch in enumerate(numbers(4)):
        loss = OneHead(model, i % 2)(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(losses_in_turns, "2", "4", equal=True, error=TWO_PIPELINES, variant="two pipelines")
def _(run: Run) -> None:
    model, data = Shared(), numbers(4)
    heads = [OneHead(model, head) for head in range(2)]
    pipes = [fxpipe.compile(head, few(data[0]), **run.options) for head in heads]
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for i, batch in enumerate(data):
        run.note("loss", pipes[i % 2].step(batch))
        opt.step()
        opt.zero_grad()
    states = [pipe.full_state_dict() for pipe in pipes]
    states[0].update({k: v for k, v in states[1].items() if "second" in k})
    run.weights({k.removeprefix("model."): v for k, v in states[0].items()})


def _transitions(count: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(4)
    return [
        {
            "state": torch.randn(BATCH, INPUTS, generator=draw),
            "action": torch.randint(OUTPUTS, (BATCH,), generator=draw),
            "reward": torch.randn(BATCH, generator=draw),
            "after": torch.randn(BATCH, INPUTS, generator=draw),
        }
        for _ in range(count)
    ]


class Values(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, state: Tensor, action: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(self.network(state).gather(1, action[:, None])[:, 0], target)


@piped(losses_in_turns, "2", "4", variant="like=", equal=True)
def _(run: Run) -> None:
    model, data = Shared(), numbers(4)
    heads = [OneHead(model, head) for head in range(2)]
    first = fxpipe.compile(heads[0], few(data[0]), **run.options)
    pipes = [first, fxpipe.compile(heads[1], few(data[0]), **run.options, like=first)]
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for i, batch in enumerate(data):
        run.note("loss", pipes[i % 2].step(batch))
        opt.step()
        opt.zero_grad()
    run.weights({k.removeprefix("model."): v for k, v in first.full_state_dict().items()})


@piped(losses_in_turns, "2", "4", variant="the optimizer of one pipeline", warning="no optimizer has used")
def _(run: Run) -> None:
    model, data = Shared(), numbers(4)
    heads = [OneHead(model, head) for head in range(2)]
    first = fxpipe.compile(heads[0], few(data[0]), **run.options)
    pipes = [first, fxpipe.compile(heads[1], few(data[0]), **run.options, like=first)]
    opt = first.optimizer(torch.optim.SGD, lr=0.3, momentum=0.9)
    for i, batch in enumerate(data):
        run.note("loss", pipes[i % 2].step(batch))
        opt.step()
        opt.zero_grad()
    run.weights({k.removeprefix("model."): v for k, v in first.full_state_dict().items()})


@plain
def target_network(run: Run) -> None:
    network = Mlp()
    target = copy.deepcopy(network)
    opt = torch.optim.AdamW(network.parameters(), lr=0.05)
    for step, batch in enumerate(_transitions(5)):
        with torch.no_grad():
            wanted = batch["reward"] + 0.9 * target(batch["after"]).max(-1).values
        loss = Values(network)(batch["state"], batch["action"], wanted)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 2 == 1:
            target.load_state_dict(network.state_dict())
        run.note("loss", loss)
    run.weights(network.state_dict())


def _target_network(run: Run, *, whole: bool) -> None:
    network = Mlp()
    target = copy.deepcopy(network)
    data = _transitions(5)
    example = {k: data[0][k] for k in ("state", "action")} | {"target": data[0]["reward"]}
    model = Values(network)
    pipe = fxpipe.compile(model, few(example), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for step, batch in enumerate(data):
        with torch.no_grad():
            wanted = batch["reward"] + 0.9 * target(batch["after"]).max(-1).values
        run.note("loss", pipe.step({"state": batch["state"], "action": batch["action"], "target": wanted}))
        opt.step()
        opt.zero_grad()
        if step % 2 == 1:
            if whole:
                pipe.synchronize()
            target.load_state_dict(network.state_dict())
    run.weights({k.removeprefix("network."): v for k, v in pipe.full_state_dict().items()})


@piped(target_network, "2", "4")
def _(run: Run) -> None:
    _target_network(run, whole=True)


@piped(target_network, "2", "4", variant="without synchronize", error=r"full_state_dict|synchronize|batch")
def _(run: Run) -> None:
    _target_network(run, whole=False)


class Quality(nn.Module):
    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, state: Tensor, action: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.critic(torch.cat([state, action], -1))[:, 0], target)


class Acting(nn.Module):
    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic

    def forward(self, state: Tensor) -> Tensor:
        return -self.critic(torch.cat([state, self.actor(state).tanh()], -1)).mean()


@plain
def actor_and_critic(run: Run) -> None:
    actor, critic = Mlp(INPUTS, OUTPUTS), Mlp(INPUTS + OUTPUTS, 1)
    slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    opt_actor = torch.optim.AdamW(actor.parameters(), lr=0.02)
    opt_critic = torch.optim.AdamW(critic.parameters(), lr=0.05)
    for batch in _transitions(3):
        action = F.one_hot(batch["action"], OUTPUTS).double()
        with torch.no_grad():
            after = torch.cat([batch["after"], slow_actor(batch["after"]).tanh()], -1)
            wanted = batch["reward"] + 0.9 * slow_critic(after)[:, 0]
        loss = Quality(critic)(batch["state"], action, wanted)
        loss.backward()
        opt_critic.step()
        run.note("critic", loss)
        loss = Acting(actor, critic)(batch["state"])
        loss.backward()
        opt_actor.step()
        run.note("actor", loss)
        opt_actor.zero_grad()
        opt_critic.zero_grad()
        with torch.no_grad():
            for slow, fast in ((slow_actor, actor), (slow_critic, critic)):
                for a, b in zip(slow.parameters(), fast.parameters(), strict=True):
                    a.lerp_(b, 0.1)
    run.weights(actor.state_dict(), "actor")
    run.weights(critic.state_dict(), "critic")


@piped(actor_and_critic, "2", "4", variant="a critic of each pipeline", equal=True)
def _(run: Run) -> None:
    """The actor's pipeline has a frozen copy of the critic, which gets its weights in each round."""
    actor, critic = Mlp(INPUTS, OUTPUTS), Mlp(INPUTS + OUTPUTS, 1)
    slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    judge = copy.deepcopy(critic).requires_grad_(False)
    data = _transitions(3)
    example = {"state": data[0]["state"], "action": torch.zeros(BATCH, OUTPUTS), "target": data[0]["reward"]}
    quality = fxpipe.compile(Quality(critic), few(example), **run.options)
    acting = fxpipe.compile(Acting(actor, judge), few({"state": data[0]["state"]}), **run.options)
    opt_actor = acting.optimizer(torch.optim.AdamW, lr=0.02)
    opt_critic = quality.optimizer(torch.optim.AdamW, lr=0.05)
    for batch in data:
        action = F.one_hot(batch["action"], OUTPUTS).double()
        with torch.no_grad():
            after = torch.cat([batch["after"], slow_actor(batch["after"]).tanh()], -1)
            wanted = batch["reward"] + 0.9 * slow_critic(after)[:, 0]
        run.note("critic", quality.step({"state": batch["state"], "action": action, "target": wanted}))
        opt_critic.step()
        opt_critic.zero_grad()
        weights = quality.full_state_dict(rank=None)
        acting.load_state_dict(weights, strict=False)
        run.note("actor", acting.step({"state": batch["state"]}))
        opt_actor.step()
        opt_actor.zero_grad()
        moved = weights | {
            k: v for k, v in acting.full_state_dict(rank=None).items() if k.startswith("actor.")
        }
        for slow, prefix in ((slow_actor, "actor."), (slow_critic, "critic.")):
            with torch.no_grad():
                for name, value in slow.named_parameters():
                    value.lerp_(moved[prefix + name], 0.1)
    run.weights(
        {k.removeprefix("actor."): v for k, v in acting.full_state_dict().items() if "actor" in k}, "actor"
    )
    run.weights({k.removeprefix("critic."): v for k, v in quality.full_state_dict().items()}, "critic")


def _deeper(run: Run) -> list[str]:
    return ["critic.2"] if run.ranks == 2 else ["actor.4", "critic.2", "critic.4"]


@piped(actor_and_critic, "2", "4", variant="shared critic", error=TWO_PIPELINES + r"|zero_grad")
def _(run: Run) -> None:
    actor, critic = Mlp(INPUTS, OUTPUTS), Mlp(INPUTS + OUTPUTS, 1)
    slow_actor, slow_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    data = _transitions(3)
    example = {"state": data[0]["state"], "action": torch.zeros(BATCH, OUTPUTS), "target": data[0]["reward"]}
    quality = fxpipe.compile(Quality(critic), few(example), **run.options)
    acting = fxpipe.compile(
        Acting(actor, critic), few({"state": data[0]["state"]}), **run.options, split_points=_deeper(run)
    )
    opt_actor = torch.optim.AdamW(actor.parameters(), lr=0.02)
    opt_critic = torch.optim.AdamW(critic.parameters(), lr=0.05)
    for batch in data:
        action = F.one_hot(batch["action"], OUTPUTS).double()
        with torch.no_grad():
            after = torch.cat([batch["after"], slow_actor(batch["after"]).tanh()], -1)
            wanted = batch["reward"] + 0.9 * slow_critic(after)[:, 0]
        run.note("critic", quality.step({"state": batch["state"], "action": action, "target": wanted}))
        opt_critic.step()
        run.note("actor", acting.step({"state": batch["state"]}))
        opt_actor.step()
        opt_actor.zero_grad()
        opt_critic.zero_grad()
