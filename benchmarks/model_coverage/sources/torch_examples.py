"""Small models in the manner of PyTorch's examples, and of training code that keeps state in buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.model_coverage.case import Builder, Subject
from benchmarks.model_coverage.sources.shapes import CLASSES, VOCABULARY, Fed, classifier, numbers, words

LIBRARY = "torch examples"


class Recurrent(nn.Module):
    """Words, a recurrent network, words."""

    def __init__(self, kind: type[nn.RNNBase], tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layers = kind(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x))[0])


class MaskedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.register_buffer("places", torch.randn(1, 32, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, VOCABULARY)
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None or len(self.mask) != x.shape[1]:
            self.mask = torch.log(torch.tril(torch.ones(x.shape[1], x.shape[1])))
        return self.head(self.layers(self.words(x) * 4 + self.places[:, : x.shape[1]], self.mask))


class Mnist(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.drop, self.hidden, self.head = nn.Dropout(0.25), nn.Linear(16 * 25, 32), nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)
        return F.log_softmax(self.head(F.relu(self.hidden(self.drop(torch.flatten(x, 1))))), dim=1)


class RowsOfImage(nn.Module):
    """An LSTM over the rows of an image, with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.norm, self.head = (
            nn.LSTM(14, 16, batch_first=True),
            nn.BatchNorm1d(16),
            nn.Linear(16, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.rows(x.reshape(-1, 14, 14))
        return F.log_softmax(self.head(self.norm(out[:, -1])), dim=1)


class Variational(nn.Module):
    """The noise is an input, so that eager draws the same."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.mean, self.spread = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.hidden(x))
        mean, log = self.mean(h), self.spread(h)
        made = torch.sigmoid(self.decode(mean + noise * torch.exp(0.5 * log)))
        fit = F.binary_cross_entropy(made, torch.sigmoid(x), reduction="sum")
        return fit - 0.5 * torch.sum(1 + log - mean.pow(2) - log.exp())


class Gan(nn.Module):
    """Generator and discriminator with batch norms, one loss of both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False),
            nn.Flatten(),
        )

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        fake = self.generator(noise)
        on_real, on_fake = self.discriminator(real), self.discriminator(fake)
        return F.softplus(-on_real).mean() + F.softplus(on_fake).mean() + 0.1 * fake.square().mean()


class GraphAttention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(8, heads * 8) / 3)
        self.left, self.right = nn.Parameter(torch.randn(heads, 8)), nn.Parameter(torch.randn(heads, 8))
        self.head, self.heads = nn.Linear(heads * 8, CLASSES), heads

    def forward(self, x: torch.Tensor, links: torch.Tensor) -> torch.Tensor:
        rows, nodes, _ = x.shape
        h = (x @ self.inner).view(rows, nodes, self.heads, 8)
        a = (h * self.left).sum(-1).unsqueeze(2) + (h * self.right).sum(-1).unsqueeze(1)
        a = F.leaky_relu(a, 0.2).masked_fill((links < 0).unsqueeze(-1), -9e15).softmax(2)
        return (
            self.head(F.elu(torch.einsum("rijh,rjhd->rihd", a, h).reshape(rows, nodes, -1))).square().mean()
        )


class Sine(nn.Module):
    """Two LSTM cells by hand over a sequence, and some steps on their own output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(1, 12), nn.LSTMCell(12, 12), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.size(0)
        h, c, g, d = (torch.zeros(rows, 12, dtype=x.dtype) for _ in range(4))
        found = []
        for step in range(x.size(1) + 3):
            given = x[:, step : step + 1] if step < x.size(1) else found[-1]
            h, c = self.first(given, (h, c))
            g, d = self.second(h, (g, d))
            found.append(self.head(g))
        return (torch.cat(found[:-1], 1)[:, : x.size(1) - 1] - x[:, 1:]).square().mean() + found[
            -1
        ].square().mean()


class Policy(nn.Module):
    """Actor and critic; the actions are inputs."""

    def __init__(self, validate: bool) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 1)
        self.validate = validate

    def forward(self, x: torch.Tensor, action: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.body(x))
        choice = torch.distributions.Categorical(F.softmax(self.actor(h), -1), validate_args=self.validate)
        value = self.critic(h).squeeze(-1)
        advantage = gain - value.detach()
        return (-choice.log_prob(action) * advantage - 0.01 * choice.entropy()).mean() + F.smooth_l1_loss(
            value, gain
        )


class Continuous(nn.Module):
    """Clipped policy gradient with a Normal."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean = nn.Sequential(nn.Linear(4, 16), nn.Tanh()), nn.Linear(16, 2)
        self.log = nn.Parameter(torch.zeros(2))

    def forward(
        self, x: torch.Tensor, action: torch.Tensor, old: torch.Tensor, gain: torch.Tensor
    ) -> torch.Tensor:
        now = torch.distributions.Normal(self.mean(self.body(x)), self.log.exp())
        ratio = (now.log_prob(action).sum(-1) - old).exp()
        return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * now.entropy().mean()


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8)
        )
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.head(torch.cat([self.body(a), self.body(b)], 1)))


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, 1, 2),
            nn.ReLU(),
            nn.Conv2d(16, 8, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3, 1, 1),
            nn.PixelShuffle(2),
        )

    def forward(self, x: torch.Tensor, fine: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), fine)


class Style(nn.Module):
    """Reflection padding, instance norms, a residual and an upsampling; a loss of Gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3, 2), nn.InstanceNorm2d(8, affine=True), nn.ReLU()
        )
        self.middle = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True)
        )
        self.up = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(x)
        y = self.up(F.interpolate(h + self.middle(h), scale_factor=2, mode="nearest"))
        flat = y.flatten(2)
        return F.mse_loss(
            flat @ flat.transpose(1, 2) / flat.shape[-1], torch.eye(3, dtype=x.dtype).expand(len(x), 3, 3)
        )


class Translator(nn.Module):
    """nn.Transformer with causal and padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, 16), nn.Embedding(VOCABULARY, 16)
        self.inner = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        padding = x == 0
        return self.head(
            self.inner(
                self.source(x),
                self.target(x.roll(1, 1)),
                tgt_mask=causal,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )
        )


class Sequences(nn.Module):
    """Encoder and decoder of GRUs with attention, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder = nn.Embedding(VOCABULARY, 12), nn.GRU(12, 12, batch_first=True)
        self.decoder, self.head = nn.GRUCell(24, 12), nn.Linear(12, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, last = self.encoder(self.words(x))
        h, scores = last[0], []
        for step in range(x.shape[1]):
            weights = torch.bmm(states, h.unsqueeze(-1)).softmax(1)
            h = self.decoder(torch.cat([self.words(x[:, step]), (weights * states).sum(1)], -1), h)
            scores.append(self.head(h))
        return torch.stack(scores, 1)


class ForwardForward(nn.Module):
    """Layers with a loss each, and no gradient between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, good: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        losses = []
        for layer in self.layers:
            good, bad = (F.relu(layer(F.normalize(x.detach(), dim=-1))) for x in (good, bad))
            losses.append(F.softplus(torch.cat([2 - good.pow(2).mean(1), bad.pow(2).mean(1) - 2])).mean())
        return torch.stack(losses).sum()


# -- state in buffers ---------------------------------------------------------------------------------


class Momentum(nn.Module):
    """A momentum encoder, moved through ``.data`` in the forward, and a queue of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4)
        for p in self.key.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for a, b in zip(self.query.parameters(), self.key.parameters(), strict=True):
                b.data = b.data * 0.9 + a.data * 0.1
            key = F.normalize(self.key(y), dim=1)
        query = F.normalize(self.query(x), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        self.queue.copy_(torch.cat([key.T, self.queue[:, : -len(x)]], 1))
        self.at.add_(len(x)).remainder_(16)
        return F.cross_entropy(scores / 0.07, torch.zeros(len(x), dtype=torch.long))


class Scaled(nn.Module):
    """A running scale that each forward reads, then moves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.inner(x) * self.scale.clone())
        self.scale.mul_(0.5).add_(h.detach().abs().max())
        return self.outer(h / self.scale).square().mean()


class Annealed(nn.Module):
    """A step counter that sets the strength of a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        strength = torch.sigmoid(self.steps.to(x.dtype) - 2)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * strength
        return x.square().mean() + strength * sum(p.square().sum() for p in self.parameters())


class Quantized(nn.Module):
    """A codebook that follows its inputs by exponential averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        hot = F.one_hot(chosen, 6).to(z.dtype)
        code = hot @ self.codes
        with torch.no_grad():
            self.counts.mul_(0.9).add_(0.1 * hot.sum(0))
            self.sums.mul_(0.9).add_(0.1 * hot.T @ z)
            self.codes.copy_(self.sums / self.counts.unsqueeze(1))
        return F.mse_loss(self.decode(z + (code - z).detach()), x) + 0.25 * F.mse_loss(z, code.detach())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)
        )
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layers[0](x)
        for layer in self.layers[1:]:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


class Named(nn.Module):
    """One layer and one buffer under two names, and a table that the first forward caches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.layers = nn.ModuleList([nn.Linear(8, 8)] * 3)
        self.register_buffer("shift", torch.randn(8))
        self.register_buffer("same", self.shift)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(8, dtype=x.dtype).cos()
        x = self.again(self.first(x) * self.table + self.shift)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.same
        self.shift.mul_(0.5)
        return x.square().mean()


class Routed(nn.Module):
    """Each word to its two best experts, all of which compute; a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)) for _ in range(4)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        share = torch.zeros(*h.shape[:2], 4, dtype=h.dtype).scatter_(-1, chosen, weights)
        return self.head(h + sum(share[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts)))


def _siamese() -> Subject:
    def batch(rows: int) -> dict[str, torch.Tensor]:
        a, b = torch.randn(rows, 1, 14, 14), torch.randn(rows, 1, 14, 14)
        return {"a": a, "b": b, "target": torch.randint(2, (rows, 1)).to(a.dtype)}

    return Subject(Fed(Siamese()), batch, lambda out, given: F.binary_cross_entropy(out, given["target"]))


def _policy(validate: bool) -> Callable[[], Subject]:
    def batch(rows: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(rows, 4), "action": torch.randint(3, (rows,)), "gain": torch.randn(rows)}

    return lambda: Subject(Policy(validate), batch)


def cases() -> dict[str, Builder]:
    return {
        "word_language_model_lstm": words(lambda: Recurrent(nn.LSTM)),
        "word_language_model_gru": words(lambda: Recurrent(nn.GRU)),
        "word_language_model_rnn": words(lambda: Recurrent(nn.RNN)),
        "word_language_model_tied": words(lambda: Recurrent(nn.LSTM, tied=True)),
        "word_language_model_transformer": words(MaskedTransformer),
        "mnist": classifier(Mnist, 1, 14, 14),
        "mnist_rnn": classifier(RowsOfImage, 1, 14, 14),
        "vae": numbers(Variational, (16,), (4,), loss=None),
        "dcgan": numbers(Gan, (8, 1, 1), (3, 16, 16), loss=None),
        "gat": numbers(GraphAttention, (5, 8), (5, 5), loss=None),
        "time_sequence": numbers(Sine, (8,), loss=None),
        "actor_critic": _policy(False),
        "actor_critic_validated": _policy(True),
        "ppo": numbers(Continuous, (4,), (2,), (), (), loss=None),
        "siamese": _siamese,
        "super_resolution": numbers(SuperResolution, (1, 8, 8), (1, 16, 16), loss=None),
        "fast_neural_style": numbers(Style, (3, 16, 16), loss=None),
        "language_translation": words(Translator),
        "seq2seq_attention": words(Sequences, length=5),
        "forward_forward": numbers(ForwardForward, (8,), (8,), loss=None),
        "momentum_encoder": numbers(Momentum, (8,), (8,), loss=None),
        "running_scale": numbers(Scaled, (8,), loss=None),
        "annealed_by_counter": numbers(Annealed, (8,), loss=None),
        "vq_ema": numbers(Quantized, (8,), loss=None),
        "checkpoint": numbers(lambda: Checkpointed(False), (8,), loss=None),
        "checkpoint_reentrant": numbers(lambda: Checkpointed(True), (8,), loss=None),
        "two_names_and_a_cache": numbers(Named, (8,), loss=None),
        "mixture_of_experts": words(Routed),
    }
