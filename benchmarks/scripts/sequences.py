"""Ideas of public training loops in small: speech, text, answers, forecasts, worlds."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.scripts.models import INPUTS, OUTPUTS, WIDTH, WORDS, Mlp
from benchmarks.scripts.ordinary import draws, ordinary


class Transcriber(nn.Module):
    """A recurrent network under a loss over alignments."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.rnn, self.out = (
            nn.Linear(4, WIDTH),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            nn.Linear(WIDTH, 5),
        )

    def forward(self, sound, word_ids):
        logp = self.out(self.rnn(self.front(sound).tanh())[0]).log_softmax(-1)
        lengths = torch.full((len(sound),), sound.shape[1])
        each = F.ctc_loss(
            logp.transpose(0, 1), word_ids + 1, lengths, torch.full((len(sound),), 3), reduction="none"
        )
        return each.mean() / 3


ordinary("alignments", Transcriber, lambda: draws(4, sound=(8, 4), word_ids=(3, 4)), "2")


class Tracing(nn.Module):
    """Knowledge tracing: the next answer to the next question, padding masked by a row's own count."""

    def __init__(self) -> None:
        super().__init__()
        self.ask = nn.Embedding(12, WIDTH)
        self.rnn, self.out = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 6)

    def forward(self, seen_ids, next_ids, length_ids):
        logits = self.out(self.rnn(self.ask(seen_ids))[0]).gather(-1, (next_ids % 6)[..., None])[..., 0]
        mask = (torch.arange(seen_ids.shape[1]) <= length_ids[:, None]).to(logits.dtype)
        each = F.binary_cross_entropy_with_logits(logits, (next_ids // 6).to(logits.dtype), reduction="none")
        return ((each * mask).sum(-1) / mask.sum(-1)).mean()


ordinary("knowledge tracing", Tracing, lambda: draws(4, seen_ids=(6, 12), next_ids=(6, 12), length_ids=(6,)))


class Masked(nn.Module):
    """A masked autoencoder: hidden patches are rebuilt from those that are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Linear(3, WIDTH), nn.Parameter(torch.randn(WIDTH))
        layer = {"nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, **layer) for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, patch, order):
        hidden = order.argsort(-1).argsort(-1) < 4
        x = torch.where(hidden[..., None], self.token, self.embed(patch))
        for layer in self.layers:
            x = layer(x)
        each = F.mse_loss(self.out(x), patch, reduction="none").mean(-1)
        return (each * hidden).sum() / (4 * len(patch))


ordinary("masked autoencoder", Masked, lambda: draws(4, patch=(6, 3), order=(6,)))


class Contrastive(nn.Module):
    """Speech in the manner of wav2vec: a masked context finds its latent among distractors of the row."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(1, WIDTH, 4, stride=2), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 2, stride=2)
        )
        self.mask = nn.Parameter(torch.randn(WIDTH))
        self.context, self.out = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, wave):
        latent = self.front(wave[:, None]).mT
        hidden = torch.arange(latent.shape[1]) % 2 == 0
        context = self.out(self.context(torch.where(hidden[:, None], self.mask, latent))[0])
        scores = F.normalize(context, dim=-1) @ F.normalize(latent.detach(), dim=-1).mT / 0.2
        each = F.cross_entropy(
            scores.mT, torch.arange(latent.shape[1]).expand(len(wave), -1), reduction="none"
        )
        return each[:, ::2].mean()


ordinary("speech contrast", Contrastive, lambda: draws(4, wave=(30,)), "2", "2x2")


class Spike(torch.autograd.Function):
    """A threshold whose gradient is that of a smooth function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / (1 + 5 * x.abs()).square()


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((INPUTS, 8), (8, 8), (8, OUTPUTS)))

    def forward(self, x, label_ids):
        states = [torch.zeros(len(x), layer.out_features) for layer in self.layers]
        total = torch.zeros(len(x), OUTPUTS)
        for _ in range(3):
            y = x
            for i, layer in enumerate(self.layers):
                states[i] = 0.8 * states[i] + layer(y)
                y = Spike.apply(states[i] - 0.3)
                states[i] = states[i] - 0.3 * y
            total = total + y
        return F.cross_entropy(total, label_ids)


ordinary("spikes", Spiking, lambda: draws(4, x=(INPUTS,), label_ids=(OUTPUTS,)), "2")


class Translator(nn.Module):
    """An encoder and a decoder with cross attention, teacher forcing, smoothed labels."""

    def __init__(self) -> None:
        super().__init__()
        options = {"nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.source, self.target = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, **options) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, **options) for _ in range(2))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, source_ids, target_ids):
        memory, y = self.source(source_ids), self.target(target_ids[:, :-1])
        for layer in self.encoder:
            memory = layer(memory)
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
        for layer in self.decoder:
            y = layer(y, memory, tgt_mask=mask)
        return F.cross_entropy(self.out(y).flatten(0, 1), target_ids[:, 1:].flatten(), label_smoothing=0.1)


ordinary(
    "translation", Translator, lambda: draws(4, source_ids=(5, WORDS), target_ids=(4, WORDS)), "2", "4", "2x2"
)


class Forecast(nn.Module):
    """Quantiles of several horizons from a dilated causal convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv1d(1 if i == 0 else WIDTH, WIDTH, 2, dilation=2**i) for i in range(3)
        )
        self.out = nn.Linear(WIDTH, 6)

    def forward(self, past, future):
        x = past[:, None]
        for i, layer in enumerate(self.layers):
            x = layer(F.pad(x, (2**i, 0))).relu()
        error = future[..., None] - self.out(x[..., -1]).view(-1, 2, 3)
        levels = torch.tensor([0.1, 0.5, 0.9])
        return torch.maximum(levels * error, (levels - 1) * error).mean()


ordinary("quantile forecasts", Forecast, lambda: draws(4, past=(10,), future=(2,)), "2", "4", "2x2")


class WorldModel(nn.Module):
    """A recurrent state, its reconstruction and reward, and a divergence between prior and posterior."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = Mlp(INPUTS, WIDTH, depth=2), nn.GRUCell(WIDTH + 2, WIDTH)
        self.prior, self.posterior = nn.Linear(WIDTH, 6), nn.Linear(2 * WIDTH, 6)
        self.decoder = Mlp(WIDTH + 6, INPUTS + 1, depth=2)

    def forward(self, seen, action, reward):
        state, loss = torch.zeros(len(seen), WIDTH), seen.new_zeros(())
        for t in range(seen.shape[1]):
            embedded = self.encoder(seen[:, t])
            state = self.cell(torch.cat([embedded, action[:, t]], -1), state)
            prior = self.prior(state).log_softmax(-1)
            posterior = self.posterior(torch.cat([state, embedded], -1)).log_softmax(-1)
            rebuilt, gain = self.decoder(torch.cat([state, posterior.exp()], -1)).split([INPUTS, 1], -1)
            divergence = (posterior.exp() * (posterior - prior)).sum(-1).mean()
            loss = (
                loss
                + F.mse_loss(rebuilt, seen[:, t])
                + F.mse_loss(gain[:, 0], reward[:, t])
                + 0.1 * divergence
            )
        return loss / seen.shape[1]


ordinary("world model", WorldModel, lambda: draws(4, seen=(3, INPUTS), action=(3, 2), reward=(3,)), "2")
