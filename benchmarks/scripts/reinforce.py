"""Learning from preferences and rewards: frozen references, rollouts by the model that trains, early ends."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from benchmarks.scripts.models import INPUTS, OUTPUTS, WORDS, LanguageModel, Mlp, texts
from benchmarks.scripts.script import BATCH, Run, few, piped, plain

SAMPLES = r"full_state_dict|synchronize|same batches"


def logp_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Log probabilities of a text, summed over its tokens."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].sum(-1)


class Preferred(nn.Module):
    """Direct preference optimization, with the reference's log probabilities in the batch."""

    def __init__(self, policy: LanguageModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, chosen: Tensor, rejected: Tensor, by_reference: Tensor) -> Tensor:
        better = logp_of(self.policy(chosen).logits, chosen) - by_reference[:, 0]
        worse = logp_of(self.policy(rejected).logits, rejected) - by_reference[:, 1]
        return -F.logsigmoid(0.1 * (better - worse)).mean()


def _pairs(count: int) -> list[dict[str, Tensor]]:
    return [
        {"chosen": a["input_ids"], "rejected": b["input_ids"]}
        for a, b in zip(texts(count), texts(count, seed=9), strict=True)
    ]


@torch.no_grad()
def _by_reference(reference: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    each = [logp_of(reference(batch[name]).logits, batch[name]) for name in ("chosen", "rejected")]
    return batch | {"by_reference": torch.stack(each, -1)}


@plain
def preferences(run: Run) -> None:
    policy = LanguageModel()
    reference = copy.deepcopy(policy)
    model = Preferred(policy)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    for batch in _pairs(3):
        loss = model(**_by_reference(reference, batch))
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(preferences, "2", "4", "2x2")
def _(run: Run) -> None:
    policy, data = LanguageModel(), _pairs(3)
    reference = copy.deepcopy(policy)
    pipe = fxpipe.compile(Preferred(policy), few(_by_reference(reference, data[0])), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.02)
    for batch in data:
        run.note("loss", pipe.step(run.rows(_by_reference(reference, batch))))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class WithReference(nn.Module):
    """Both models in one module, the reference without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LanguageModel()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = torch.cat([chosen, rejected])
        with torch.no_grad():
            wanted = logp_of(self.reference(both).logits, both)
        better, worse = (logp_of(self.policy(both).logits, both) - wanted).chunk(2)
        return -F.logsigmoid(0.1 * (better - worse)).mean()


@piped(preferences, "2", "4", variant="the reference in the model", equal=True)
def _(run: Run) -> None:
    data = _pairs(3)
    pipe = fxpipe.compile(WithReference(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.02)
    for batch in data:
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
    run.weights({k: v for k, v in pipe.full_state_dict().items() if k.startswith("policy.")})


class Reward(nn.Module):
    """A pairwise model of rewards (Bradley and Terry)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = LanguageModel(), nn.Linear(WORDS, 1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        better, worse = (self.score(self.body(ids).logits[:, -1])[:, 0] for ids in (chosen, rejected))
        return -F.logsigmoid(better - worse).mean()


@plain
def model_of_rewards(run: Run) -> None:
    model = Reward()
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    for batch in _pairs(3):
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
    run.weights(model.state_dict())


@piped(model_of_rewards, "2", "4", "2x2")
def _(run: Run) -> None:
    data = _pairs(3)
    pipe = fxpipe.compile(Reward(), few(data[0]), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.02)
    for batch in data:
        run.note("loss", pipe.step(run.rows(batch)))
        opt.step()
        opt.zero_grad()
    run.weights(pipe.full_state_dict())


class Grouped(nn.Module):
    """Group relative policy optimization: clipped ratios of tokens, and a divergence from a reference."""

    def __init__(self, policy: LanguageModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, ids: Tensor, advantage: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        new = tokens(self.policy(ids).logits, ids)
        ratio = (new - old).exp()
        gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
        divergence = (reference - new).exp() - (reference - new) - 1
        return -(gain - 0.04 * divergence).mean()


def tokens(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def rewards(ids: Tensor) -> Tensor:
    """How many words of a text are even, relative to its group of four."""
    right = (ids % 2 == 0).double().mean(-1).view(-1, 4)
    return ((right - right.mean(-1, keepdim=True)) / (right.std(-1, keepdim=True) + 1e-4)).flatten()


@torch.no_grad()
def sampled(model: nn.Module, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.zeros(BATCH, 1, dtype=torch.long)
    for _ in range(4):
        share = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(share, 1, generator=draw)], -1)
    return ids


@plain
def group_relative(run: Run) -> None:
    policy = LanguageModel()
    reference = copy.deepcopy(policy)
    model = Grouped(policy)
    opt = torch.optim.AdamW(model.parameters(), lr=0.02)
    for round in range(3):
        ids = sampled(policy, round)
        with torch.no_grad():
            batch = {"old": tokens(policy(ids).logits, ids), "reference": tokens(reference(ids).logits, ids)}
        for _ in range(2):
            loss = model(ids, rewards(ids), **batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            run.note("loss", loss)
    run.weights(model.state_dict())


def _group_relative(run: Run, *, whole: bool) -> None:
    policy = LanguageModel()
    reference = copy.deepcopy(policy)
    model = Grouped(policy)
    ids = torch.zeros(BATCH, 5, dtype=torch.long)
    old = torch.zeros(BATCH, 4)
    example = {"ids": ids, "advantage": torch.zeros(BATCH), "old": old, "reference": old}
    pipe = fxpipe.compile(model, few(example), **run.options)
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.02)
    for round in range(3):
        if whole:
            pipe.synchronize()
        ids = sampled(policy, round)
        with torch.no_grad():
            batch = {"old": tokens(policy(ids).logits, ids), "reference": tokens(reference(ids).logits, ids)}
        for _ in range(2):
            run.note("loss", pipe.step(batch | {"ids": ids, "advantage": rewards(ids)}))
            opt.step()
            opt.zero_grad()
    run.weights(pipe.full_state_dict())


@piped(group_relative, "2", "4")
def _(run: Run) -> None:
    _group_relative(run, whole=True)


@piped(group_relative, "2", "4", variant="samples of the module", error=SAMPLES)
def _(run: Run) -> None:
    _group_relative(run, whole=False)


class Outlook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Mlp(INPUTS, 8)
        self.policy, self.value = nn.Linear(8, OUTPUTS), nn.Linear(8, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(state).tanh()
        return self.policy(hidden).log_softmax(-1), self.value(hidden)[:, 0]


class Proximal(nn.Module):
    """Proximal policy optimization with a clipped value and an entropy bonus."""

    def __init__(self, network: Outlook) -> None:
        super().__init__()
        self.network = network

    def forward(self, state, action, old, advantage, gain, value):
        logp, now = self.network(state)
        change = logp.gather(1, action[:, None])[:, 0] - old
        ratio = change.exp()
        policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        near = value + (now - value).clamp(-0.2, 0.2)
        error = torch.maximum((now - gain).square(), (near - gain).square()).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        return {"loss": policy + 0.5 * error - 0.01 * entropy, "change": ((ratio - 1) - change).mean()}


def world(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """The next state and the reward of a small deterministic world."""
    push = F.one_hot(action, INPUTS).double()
    return torch.tanh(0.7 * state.roll(1, -1) + push), (state[:, 0] * push[:, 1] - 0.1 * state[:, 2]).clone()


@torch.no_grad()
def rolled_out(network: Outlook, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    state = torch.randn(BATCH // 4, INPUTS, generator=draw)
    kept: dict[str, list[Tensor]] = {"state": [], "action": [], "old": [], "value": []}
    gains: list[Tensor] = []
    for _ in range(4):
        logp, value = network(state)
        action = torch.multinomial(logp.exp(), 1, generator=draw)[:, 0]
        old = logp.gather(1, action[:, None])[:, 0]
        for name, leaf in {"state": state, "action": action, "old": old, "value": value}.items():
            kept[name].append(leaf)
        state, reward = world(state, action)
        gains.append(reward)
    for i in reversed(range(3)):
        gains[i] = gains[i] + 0.9 * gains[i + 1]
    batch = {name: torch.cat(leaves) for name, leaves in kept.items()} | {"gain": torch.cat(gains)}
    advantage = batch["gain"] - batch["value"]
    return batch | {"advantage": (advantage - advantage.mean()) / (advantage.std() + 1e-8)}


@plain
def proximal_policy(run: Run) -> None:
    network = Outlook()
    model = Proximal(network)
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    for round in range(2):
        batch = rolled_out(network, round)
        for _ in range(6):
            output = model(**batch)
            output["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
            run.note("loss", output["loss"])
            if output["change"] > 0.02:
                break
    run.weights(model.state_dict())


@piped(proximal_policy, "2", "4")
def _(run: Run) -> None:
    network = Outlook()
    model = Proximal(network)
    pipe = fxpipe.compile(model, few(rolled_out(network, 0)), **run.options, outputs=["change"])
    opt = pipe.optimizer(torch.optim.Adam, lr=0.05, clip_grad_norm=0.5)
    for round in range(2):
        pipe.synchronize()
        batch = rolled_out(network, round)
        for _ in range(6):
            result = pipe.step(batch, outputs=["change"], outputs_on="all")
            opt.step()
            opt.zero_grad()
            run.note("loss", result.loss)
            if result.outputs["change"].mean() > 0.02:
                break
    run.weights(pipe.full_state_dict())


@piped(
    proximal_policy, variant="each rank stops by its own output", error="All ranks must make the same calls"
)
def _(run: Run) -> None:
    network = Outlook()
    model = Proximal(network)
    batch = rolled_out(network, 0)
    pipe = fxpipe.compile(model, few(batch), **run.options, outputs=["change"])
    opt = pipe.optimizer(torch.optim.Adam, lr=0.05, clip_grad_norm=0.5)
    for _ in range(6):
        result = pipe.step(batch, outputs=["change"])
        opt.step()
        opt.zero_grad()
        if result.outputs.get("change", torch.zeros(1)).mean() > 0.0:
            break
    pipe.synchronize()


class Returned(nn.Module):
    """Policy gradient with returns as weights; outputs the policy."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Mlp()

    def forward(self, state: Tensor, action: Tensor, gain: Tensor) -> dict[str, Tensor]:
        logp = self.policy(state).log_softmax(-1)
        return {"loss": -(logp.gather(1, action[:, None])[:, 0] * gain).mean(), "logp": logp}


@plain
def policy_gradient(run: Run) -> None:
    model = Returned()
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(3)
    for _ in range(3):
        state = torch.randn(BATCH, INPUTS, generator=draw)
        with torch.no_grad():
            share = model.policy(state).softmax(-1)
        action = torch.multinomial(share, 1, generator=draw)[:, 0]
        loss = model(state, action, world(state, action)[1])["loss"]
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.note("loss", loss)
        run.note("share", share)
    run.weights(model.state_dict())


@piped(policy_gradient, "2", "4")
def _(run: Run) -> None:
    draw = torch.Generator().manual_seed(3)
    nothing = torch.zeros(BATCH)
    example = {"state": torch.zeros(BATCH, INPUTS), "action": nothing.long(), "gain": nothing}
    pipe = fxpipe.compile(Returned(), few(example), **run.options, evaluation=True, outputs=["logp"])
    opt = pipe.optimizer(torch.optim.AdamW, lr=0.05)
    for _ in range(3):
        state = torch.randn(BATCH, INPUTS, generator=draw)
        result = pipe.evaluate(example | {"state": state}, outputs=["logp"], outputs_on="all")
        share = result.outputs["logp"].exp()
        action = torch.multinomial(share, 1, generator=draw)[:, 0]
        run.note("loss", pipe.step({"state": state, "action": action, "gain": world(state, action)[1]}))
        opt.step()
        opt.zero_grad()
        run.note("share", share)
    run.weights(pipe.full_state_dict())


class SelfPlayed(nn.Module):
    """The loss of AlphaZero: a policy's cross-entropy with visits, and a value's squared error."""

    def __init__(self, network: Outlook) -> None:
        super().__init__()
        self.network = network

    def forward(self, state: Tensor, visits: Tensor, winner: Tensor) -> Tensor:
        logp, value = self.network(state)
        return -(visits * logp).sum(-1).mean() + F.mse_loss(value.tanh(), winner)


def _played(network: nn.Module, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    state = torch.randn(BATCH, INPUTS, generator=draw)
    with torch.no_grad():
        logp, value = network(state)
    return {"state": state, "visits": (logp * 1.5).softmax(-1), "winner": (value + state[:, 0]).sign()}


@plain
def self_play(run: Run) -> None:
    network = Outlook()
    model, best = SelfPlayed(network), copy.deepcopy(network)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    for round in range(4):
        batch = _played(best, round)
        loss = model(**batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            score = (network(batch["state"])[1] * batch["winner"]).mean()
        run.note("loss", loss)
        run.note("score", score)
        if score > 0:
            best.load_state_dict(network.state_dict())
    run.weights(model.state_dict())


@piped(self_play, "2", "4")
def _(run: Run) -> None:
    network = Outlook()
    model, best = SelfPlayed(network), copy.deepcopy(network)
    pipe = fxpipe.compile(model, few(_played(best, 0)), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-3)
    for round in range(4):
        batch = _played(best, round)
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        pipe.synchronize()
        with torch.no_grad():
            score = (network(batch["state"])[1] * batch["winner"]).mean()
        run.note("score", score)
        if score > 0:
            best.load_state_dict(network.state_dict())
    run.weights(pipe.full_state_dict())


@piped(self_play, "2", "4", variant="without synchronize", error=SAMPLES)
def _(run: Run) -> None:
    network = Outlook()
    model, best = SelfPlayed(network), copy.deepcopy(network)
    pipe = fxpipe.compile(model, few(_played(best, 0)), **run.options)
    opt = pipe.optimizer(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=1e-3)
    for round in range(4):
        batch = _played(best, round)
        run.note("loss", pipe.step(batch))
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            score = (network(batch["state"])[1] * batch["winner"]).mean()
        run.note("score", score)
        if score > 0:
            best.load_state_dict(network.state_dict())
    run.weights(pipe.full_state_dict())


class Soft(nn.Module):
    """A policy with entropy; its temperature is trained beside the model, from the log probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Mlp()

    def forward(self, state: Tensor, value: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        logp = self.policy(state).log_softmax(-1)
        return {
            "loss": (logp.exp() * (alpha * logp - value)).sum(-1).mean(),
            "entropy": -(logp.exp() * logp).sum(-1),
        }


@plain
def trained_temperature(run: Run) -> None:
    model = Soft()
    log_alpha = torch.zeros((), requires_grad=True)
    opt, opt_alpha = torch.optim.AdamW(model.parameters(), lr=0.05), torch.optim.AdamW([log_alpha], lr=0.1)
    for batch in _transitions(3):
        output = model(**batch, alpha=log_alpha.detach().exp())
        output["loss"].backward()
        opt.step()
        opt.zero_grad()
        (log_alpha * (output["entropy"].detach().mean() - 0.5)).backward()
        opt_alpha.step()
        opt_alpha.zero_grad()
        run.note("loss", output["loss"])
        run.note("alpha", log_alpha)
    run.weights(model.state_dict())


def _transitions(count: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(6)
    return [
        {
            "state": torch.randn(BATCH, INPUTS, generator=draw),
            "value": torch.randn(BATCH, OUTPUTS, generator=draw),
        }
        for _ in range(count)
    ]


@piped(trained_temperature, "2", "4")
def _(run: Run) -> None:
    data = _transitions(3)
    log_alpha = torch.zeros((), requires_grad=True)
    pipe = fxpipe.compile(
        Soft(), few(data[0] | {"alpha": torch.ones(())}), **run.options, outputs=["entropy"]
    )
    opt, opt_alpha = pipe.optimizer(torch.optim.AdamW, lr=0.05), torch.optim.AdamW([log_alpha], lr=0.1)
    for batch in data:
        result = pipe.step(batch | {"alpha": log_alpha.detach().exp()}, outputs=["entropy"], outputs_on="all")
        opt.step()
        opt.zero_grad()
        (log_alpha * (result.outputs["entropy"].mean() - 0.5)).backward()
        opt_alpha.step()
        opt_alpha.zero_grad()
        run.note("loss", result.loss)
        run.note("alpha", log_alpha)
    run.weights(pipe.full_state_dict())
