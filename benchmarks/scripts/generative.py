"""Ideas of public training loops in small: samples, densities, fields, equations, inner gradients."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.scripts.models import INPUTS, WIDTH, Mlp
from benchmarks.scripts.ordinary import draws, ordinary


class Denoiser(nn.Module):
    """Predicts the noise that was added to a sample at a step of diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Embedding(10, 4), Mlp(INPUTS + 4, INPUTS, depth=5)
        self.register_buffer("kept", torch.linspace(0.99, 0.02, 10))

    def forward(self, x, noise, step_ids):
        share = self.kept[step_ids][:, None]
        noisy = share.sqrt() * x + (1 - share).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noisy, self.time(step_ids)], -1)), noise)


ordinary(
    "diffusion", Denoiser, lambda: draws(4, x=(INPUTS,), noise=(INPUTS,), step_ids=(10,)), "2", "4", "2x2"
)


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulate, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, condition):
        shift, scale, gate = self.modulate(F.silu(condition))[:, None].chunk(3, -1)
        return x + gate * self.mix(F.gelu(self.norm(x) * (1 + scale) + shift))


class FlowMatching(nn.Module):
    """A transformer with adaptive norms that matches the velocity between noise and data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.label = nn.Linear(3, WIDTH), nn.Embedding(5, WIDTH)
        self.blocks, self.out = nn.ModuleList(DiTBlock() for _ in range(4)), nn.Linear(WIDTH, 3)

    def forward(self, x, noise, t, label_ids):
        t = t.sigmoid()[:, None]
        y = self.embed((1 - t) * noise + t * x)
        condition = self.label(label_ids) + t[:, 0].sin()
        for block in self.blocks:
            y = block(y, condition)
        return F.mse_loss(self.out(y), x - noise)


ordinary("flow matching", FlowMatching, lambda: draws(4, x=(4, 3), noise=(4, 3), t=(1,), label_ids=(5,)))


class Variational(nn.Module):
    """An autoencoder whose noise comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Mlp(INPUTS, 6), Mlp(3, INPUTS)

    def forward(self, x, noise):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        rebuilt = self.decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        return F.mse_loss(rebuilt, x, reduction="sum") / len(x) + 0.1 * divergence


ordinary("variational autoencoder", Variational, lambda: draws(4, x=(INPUTS,), noise=(3,)), "2", "4", "2x2")


class Codebook(nn.Module):
    """A vector-quantized autoencoder with a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = Mlp(INPUTS, 3), nn.Embedding(7, 3), Mlp(3, INPUTS)

    def forward(self, x):
        latent = self.encoder(x)
        near = torch.cdist(latent[None], self.codes.weight[None])[0].argmin(-1)
        code = self.codes(near)
        commit = F.mse_loss(latent, code.detach()) + F.mse_loss(code, latent.detach())
        return F.mse_loss(self.decoder(latent + (code - latent).detach()), x) + 0.25 * commit


ordinary("vector quantization", Codebook, lambda: draws(4, x=(INPUTS,)))


class Coupled(nn.Module):
    """A normalizing flow of affine couplings, trained by likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(3, 6, depth=2) for _ in range(4))

    def forward(self, x):
        total = torch.zeros(len(x))
        for i, layer in enumerate(self.layers):
            a, b = x.chunk(2, -1) if i % 2 else x.flip(-1).chunk(2, -1)
            scale, shift = layer(a).chunk(2, -1)
            x = torch.cat([a, b * scale.tanh().exp() + shift], -1)
            total = total + scale.tanh().sum(-1)
        return (0.5 * x.square().sum(-1) - total).mean() + 3 * math.log(2 * math.pi)


ordinary("normalizing flow", Coupled, lambda: draws(4, x=(INPUTS,)), "2", "4", "2x2")


class Radiance(nn.Module):
    """A field of density and color, rendered along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.field = Mlp(3 * 5, 4, depth=5)

    def forward(self, origin, direction, color):
        depth = torch.linspace(0.1, 2.0, 6)
        points = origin[:, None] + F.normalize(direction, dim=-1)[:, None] * depth[:, None]
        encoded = torch.cat(
            [points, *(f(points * 2**i) for i in range(2) for f in (torch.sin, torch.cos))], -1
        )
        density, rgb = self.field(encoded).split([1, 3], -1)
        alpha = 1 - torch.exp(-F.softplus(density[..., 0]) * 0.38)
        through = torch.cumprod(torch.cat([torch.ones(len(alpha), 1), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return F.mse_loss(((alpha * through)[..., None] * rgb.sigmoid()).sum(1), color.sigmoid())


ordinary(
    "radiance field", Radiance, lambda: draws(4, origin=(3,), direction=(3,), color=(3,)), "2", "4", "2x2"
)


class Physics(nn.Module):
    """The residual of a heat equation, by derivatives of the network in its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp(2, 1, depth=4)

    def forward(self, at, boundary):
        at = at.detach().requires_grad_()
        u = self.net(at)
        first = torch.autograd.grad(u.sum(), at, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), at, create_graph=True)[0][:, 0]
        residual = first[:, 1] - 0.1 * second
        edge = self.net(torch.stack([boundary[:, 0], torch.zeros(len(boundary))], -1))[:, 0]
        return residual.square().mean() + F.mse_loss(edge, boundary[:, 0].sin())


class PhysicsLoss(Physics):
    """In evaluation the residual is left out, as validation loops under no_grad do."""

    def forward(self, at, boundary):
        if self.training:
            return super().forward(at, boundary)
        edge = self.net(torch.stack([boundary[:, 0], torch.zeros(len(boundary))], -1))[:, 0]
        return F.mse_loss(edge, boundary[:, 0].sin())


ordinary(
    "physics informed",
    PhysicsLoss,
    lambda: draws(4, at=(2,), boundary=(1,)),
    "2",
    refused_on_4=r"In eval mode: .* split_points= that cut the model in the order in which this one uses",
)


class Densities(nn.Module):
    """A mixture density network."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(INPUTS, 9)

    def forward(self, x, y):
        weight, mean, scale = self.body(x).chunk(3, -1)
        each = torch.distributions.Normal(mean, F.softplus(scale) + 0.1).log_prob(y)
        return -torch.logsumexp(weight.log_softmax(-1) + each, -1).mean()


ordinary("mixture densities", Densities, lambda: draws(4, x=(INPUTS,), y=(1,)))


class Integrated(nn.Module):
    """An ordinary differential equation by steps of Runge and Kutta with shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.rate, self.read = (
            nn.Linear(INPUTS, WIDTH),
            Mlp(WIDTH, WIDTH, depth=2),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, x, y):
        state = self.lift(x)
        for _ in range(4):
            middle = state + 0.05 * self.rate(state)
            state = state + 0.1 * self.rate(middle)
        return F.mse_loss(self.read(state), y)


ordinary("differential equation", Integrated, lambda: draws(4, x=(INPUTS,), y=(1,)), "2")


class Adapted(nn.Module):
    """One inner step of gradient descent on a task's support before its loss on the query (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Mlp(INPUTS, WIDTH), nn.Parameter(torch.randn(WIDTH) * 0.3)

    def forward(self, support, support_y, query, query_y):
        a, b = self.body(support), self.body(query)
        head = self.head.expand(len(support), -1)
        error = torch.einsum("bnd,bd->bn", a, head) - support_y
        head = head - 0.2 * torch.einsum("bn,bnd->bd", error, a) / a.shape[1]
        return F.mse_loss(torch.einsum("bnd,bd->bn", b, head), query_y)


ordinary(
    "inner steps",
    Adapted,
    lambda: draws(4, support=(4, INPUTS), support_y=(4,), query=(4, INPUTS), query_y=(4,)),
)


class Generated(nn.Module):
    """A hypernetwork: the weights of a small network are another's output."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper, self.task = Mlp(4, WIDTH * INPUTS + WIDTH), nn.Embedding(5, 4)

    def forward(self, x, task_ids, y):
        first, second = self.hyper(self.task(task_ids)).split([WIDTH * INPUTS, WIDTH], -1)
        hidden = torch.bmm(first.view(-1, WIDTH, INPUTS), x[..., None]).tanh()[..., 0]
        return F.mse_loss((hidden * second).sum(-1, keepdim=True), y)


ordinary("generated weights", Generated, lambda: draws(4, x=(INPUTS,), task_ids=(5,), y=(1,)))


class Scores(nn.Module):
    """Denoising score matching at several noise levels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp(INPUTS + 1, INPUTS)
        self.register_buffer("levels", torch.logspace(-1, 0, 5))

    def forward(self, x, noise, level_ids):
        level = self.levels[level_ids][:, None]
        score = self.net(torch.cat([x + level * noise, level.log()], -1)) / level
        return (0.5 * level.square() * (score + noise / level).square()).sum(-1).mean()


ordinary("score matching", Scores, lambda: draws(4, x=(INPUTS,), noise=(INPUTS,), level_ids=(5,)))


class Advantage(nn.Module):
    """A wake-sleep game of energies: real rows low, rows that descended the energy high, by create_graph."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Mlp(INPUTS, 1)

    def forward(self, x, start):
        sample = start
        with torch.enable_grad():
            for _ in range(2):
                sample = sample.detach().requires_grad_()
                slope = torch.autograd.grad(self.energy(sample).sum(), sample)[0]
                sample = sample - 0.1 * slope
        low, high = self.energy(x), self.energy(sample.detach())
        return (low - high).mean() + 0.1 * (low.square() + high.square()).mean()


ordinary("energies", Advantage, lambda: draws(4, x=(INPUTS,), start=(INPUTS,)), "2")
