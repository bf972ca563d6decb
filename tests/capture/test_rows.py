"""Losses as people write them: one that is not the mean of its microbatches is told, and no other one.

What is one is measured: each loss and its gradient of a batch beside the means over its microbatches.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.capture import trace
from fxpipe.capture.rows import families

ROWS, MICROBATCHES = 4, 3
WIDTH, WORDS, LENGTH = 6, 5, 4
LOSSES: dict[str, Callable[..., torch.Tensor]] = {}


class Net(nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.conv, self.lstm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.codes, self.scale = nn.Parameter(torch.randn(8, WIDTH)), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("bank", torch.randn(7, WIDTH))
        self.register_buffer("kinds", torch.zeros(1, 8, dtype=torch.int64))
        self.loss = loss

    def forward(self, x, z, y, w, mask):
        """x: [rows, length, width].  z: [rows, width].  y: a class of each row, w a number.  mask: of x."""
        return self.loss(self, x, z, y, w, mask)


def loss(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    LOSSES[function.__name__] = function
    return function


def each_loss(net, z, y):
    return F.cross_entropy(net.head(z), y, reduction="none")


def each_by_itself(net, z, y):
    return [F.cross_entropy(net.head(row), label) for row, label in zip(z, y, strict=True)]


@loss
def weighted_by_the_largest(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * (w / w.max())).mean()


@loss
def weighted_by_the_sum(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * (w / w.sum())).sum()


@loss
def contrast(net, x, z, y, w, mask):
    one, other = F.normalize(net.body(x).mean(1), dim=-1), F.normalize(net.body(z), dim=-1)
    return F.cross_entropy(one @ other.T * net.scale, torch.arange(len(one)))


@loss
def signs_of_pairs(net, x, z, y, w, mask):
    logits = net.body(x).mean(1) @ net.body(z).T
    return -F.logsigmoid((2 * torch.eye(len(z)) - 1) * logits).sum() / len(z)


@loss
def queue(net, x, z, y, w, mask):
    own = (net.body(z) * x[:, 0]).sum(-1, keepdim=True)
    logits = torch.cat([own, net.body(z) @ net.bank.T], 1)
    return F.cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))


@loss
def cross_correlation(net, x, z, y, w, mask):
    one, other = ((h - h.mean(0)) / h.std(0) for h in (net.body(z), net.body(x[:, 0])))
    return (one.T @ other / len(z) - torch.eye(WIDTH)).square().sum()


@loss
def hardest_of_the_batch(net, x, z, y, w, mask):
    far, same = torch.cdist(net.body(z), net.body(z)), y[:, None] == y[None]
    return F.relu((far * same).max(1).values - (far + 1e3 * same).min(1).values + 1).mean()


@loss
def ranks_of_pairs(net, x, z, y, w, mask):
    score = net.head(z)[:, 0]
    return F.softplus((score[None] - score[:, None]) * torch.sign(w[:, None] - w[None])).mean()


@loss
def share_of_variance(net, x, z, y, w, mask):
    return (net.head(z)[:, 0] - w).square().sum() / (w - w.mean()).square().sum()


@loss
def root_of_each(net, x, z, y, w, mask):
    return (net.body(x) - x).square().mean((1, 2)).sqrt().mean()


@loss
def overlap(net, x, z, y, w, mask):
    p = net.head(x)[..., 0].sigmoid()
    return 1 - (2 * (p * mask).sum() + 1) / (p.sum() + mask.sum() + 1)


@loss
def overlap_of_each(net, x, z, y, w, mask):
    p = net.head(x)[..., 0].sigmoid()
    return (1 - (2 * (p * mask).sum(1) + 1) / (p.sum(1) + mask.sum(1) + 1)).mean()


@loss
def seen_tokens(net, x, z, y, w, mask):
    return ((net.body(x) - x).square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)


@loss
def balance(net, x, z, y, w, mask):
    shares = net.head(x).softmax(-1).flatten(0, 1)
    chosen = F.one_hot(shares.argmax(-1), WORDS).to(shares.dtype).mean(0)
    return net.body(x).square().mean() + (chosen * shares.mean(0)).sum()


@loss
def batch_norm(net, x, z, y, w, mask):
    return F.batch_norm(net.body(z), None, None, training=True).sin().sum(1).square().mean()


@loss
def group_norm(net, x, z, y, w, mask):
    return F.group_norm(net.body(z), 2).sin().mean()


@loss
def over_time(net, x, z, y, w, mask):
    h = net.lstm(x)[0] + net.conv(x.transpose(1, 2)).transpose(1, 2) + net.attention(x, x, x)[0]
    return h.cumsum(1).square().mean()


@loss
def over_rows(net, x, z, y, w, mask):
    return net.lstm(x.transpose(0, 1))[0].square().mean()


def one_sequence(x):
    """All rows behind each other, and a mask that lets each see itself."""
    q = x.reshape(1, 1, -1, WIDTH)
    mask = torch.full((q.shape[2], q.shape[2]), torch.finfo(x.dtype).min)
    for row in range(len(x)):
        mask[row * LENGTH : (row + 1) * LENGTH, row * LENGTH : (row + 1) * LENGTH] = 0
    return q, mask


@loss
def rows_in_one_sequence(net, x, z, y, w, mask):
    q, of_blocks = one_sequence(net.body(x))
    h = F.scaled_dot_product_attention(q, q, q, attn_mask=of_blocks)[0, 0]
    return torch.cat([net.head(row).cumsum(0) for row in h.split([LENGTH] * len(x))]).square().mean()


@loss
def rows_that_look_at_the_next(net, x, z, y, w, mask):
    q, of_blocks = one_sequence(net.body(x))
    return F.scaled_dot_product_attention(q, q, q, attn_mask=of_blocks.roll(1, 1)).square().mean()


@loss
def last_token(net, x, z, y, w, mask):
    place = mask.sum(1).clamp(min=1) - 1
    h = net.body(x)
    one, other = h[torch.arange(len(x)), place], h.flatten(0, 1)[torch.arange(len(x)) * LENGTH + place]
    third = h.gather(1, place[:, None, None].expand(-1, 1, WIDTH)).squeeze(1)
    return F.cross_entropy(net.head(one + 2 * other - third), y)


@loss
def mixed_rows(net, x, z, y, w, mask):
    return each_loss(net, 0.7 * z + 0.3 * z.flip(0), y).mean()


@loss
def hardest(net, x, z, y, w, mask):
    losses = each_loss(net, z, y)
    return losses[losses.argmax()]


@loss
def above_the_mean(net, x, z, y, w, mask):
    losses = each_loss(net, z, y)
    return torch.where(losses > losses.mean().detach(), losses, losses * 0.5).mean()


@loss
def by_counts_of_bins(net, x, z, y, w, mask):
    counts = F.one_hot(y, WORDS).sum(0)
    return (each_loss(net, z, y) / counts[y]).mean()


@loss
def means_of_groups(net, x, z, y, w, mask):
    sums = torch.zeros(WORDS).index_add(0, y, each_loss(net, z, y))
    return (sums / (1e-9 + torch.zeros(WORDS).index_add(0, y, torch.ones_like(w)))).mean()


@loss
def sums_by_steps(net, x, z, y, w, mask):
    place = (x[..., 0] * 3).long().abs() % 3
    sums = torch.zeros(len(x), 3, WIDTH).scatter_add(1, place[..., None].expand(-1, -1, WIDTH), net.body(x))
    return sums.square().mean()


@loss
def sums_by_rows(net, x, z, y, w, mask):
    rows = torch.arange(len(x)).repeat_interleave(LENGTH)
    return torch.zeros(len(x), WIDTH).index_add(0, rows, net.body(x).flatten(0, 1)).square().mean()


@loss
def survival(net, x, z, y, w, mask):
    risk = net.head(z)[:, 0][w.argsort(descending=True)]
    return -(risk - risk.logcumsumexp(0)).mean()


@loss
def codebook(net, x, z, y, w, mask):
    h = net.body(z)
    return (h - net.codes[torch.cdist(h, net.codes).argmin(1)]).square().mean()


@loss
def kernels(net, x, z, y, w, mask):
    h = net.body(z)
    return torch.exp(-torch.cdist(h, h).square()).mean()


@loss
def slopes(net, x, z, y, w, mask):
    z = z.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net.head(net.body(z).tanh()).sum(), z, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@loss
def against_the_mean(net, x, z, y, w, mask):
    return F.softplus(net.head(x[:, 0])[:, 0].mean() - net.head(z)[:, 0]).mean()


@loss
def added_to_all(net, x, z, y, w, mask):
    return (each_loss(net, z, y) + 0.1 * net.body(x).square().mean()).mean()


@loss
def added_and_squared(net, x, z, y, w, mask):
    return (each_loss(net, z, y) + 0.1 * net.body(x).square().mean()).square().mean()


@loss
def added_and_masked(net, x, z, y, w, mask):
    return torch.where(mask[:, 0], each_loss(net, z, y) + net.body(x).square().mean(), 0.0).mean()


@loss
def row_by_row(net, x, z, y, w, mask):
    return sum(F.mse_loss(net.body(row), row) for row in x) / len(x)


@loss
def row_by_row_undivided(net, x, z, y, w, mask):
    return sum(F.mse_loss(net.body(row), row) for row in x)


@loss
def neighbours(net, x, z, y, w, mask):
    h = net.body(z).view(-1, 2, WIDTH)
    return (h[:, 0] - h[:, 1]).square().mean()


@loss
def two_terms(net, x, z, y, w, mask):
    one, other = F.mse_loss(net.body(z), z), each_loss(net, z, y).mean()
    return one + other * (one / other).detach()


@loss
def of_matrices(net, x, z, y, w, mask):
    return (
        torch.linalg.matrix_norm(net.body(x), "nuc").mean() + torch.fft.rfft(net.body(x), dim=1).abs().mean()
    )


@loss
def volume(net, x, z, y, w, mask):
    return torch.logdet(net.body(z).T @ net.body(z) + torch.eye(WIDTH))


@loss
def times_the_rows(net, x, z, y, w, mask):
    return each_loss(net, z, y).mean() * len(z)


@loss
def times_their_root(net, x, z, y, w, mask):
    return each_loss(net, z, y).sum() / z.shape[0] ** 0.5


@loss
def times_a_tensor_of_rows(net, x, z, y, w, mask):
    return each_loss(net, z, y).mean() * torch.tensor(float(len(z)))


@loss
def times_a_tensor_of_their_logarithm(net, x, z, y, w, mask):
    return each_loss(net, z, y).mean() * torch.tensor(1 + math.log(len(z)))


@loss
def by_a_tensor_of_rows(net, x, z, y, w, mask):
    return each_loss(net, z, y).sum() / torch.tensor(len(z))


@loss
def by_ones(net, x, z, y, w, mask):
    return each_loss(net, z, y).sum() / torch.ones(len(z)).sum()


@loss
def weights_that_add_up_to_one(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * torch.full((len(z),), 1 / len(z))).sum()


@loss
def some_part_of_the_mean(net, x, z, y, w, mask):
    return (net.body(x) - x).square().sum() / (4 * len(x))


@loss
def by_the_rows_of_today(net, x, z, y, w, mask):
    return each_loss(net, z, y).sum() / ROWS


@loss
def plus_their_logarithm(net, x, z, y, w, mask):
    return each_loss(net, z, y).mean() - math.log(len(z))


@loss
def within_a_function(net, x, z, y, w, mask):
    return (net.body(z) / len(z)).tanh().square().mean()


@loss
def a_norm_by_the_rows(net, x, z, y, w, mask):
    return F.normalize(net.body(z) / len(z), dim=1).sin().mean()


@loss
def smoothed_by_the_rows(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * (1 - 1 / len(z)) + net.head(z).square().mean(1) / len(z)).mean()


@loss
def in_a_loop_by_the_rows(net, x, z, y, w, mask):
    total = 0.0
    for row, label in zip(z, y, strict=True):
        total = total + F.cross_entropy(net.head(row), label) / len(z)
    return total


@loss
def in_a_loop_with_weights(net, x, z, y, w, mask):
    return sum(F.cross_entropy(net.head(z[i]), y[i]) * 0.5**i for i in range(len(z))) / len(z)


@loss
def a_share_of_each(net, x, z, y, w, mask):
    return each_loss(net, z, y).div(y.numel()).sum() + 0.1 * net.codes.square().sum()


@loss
def a_term_times_the_rows(net, x, z, y, w, mask):
    return each_loss(net, z, y).mean() + 0.1 * net.codes.square().sum() * len(z)


@loss
def a_term_by_the_rows(net, x, z, y, w, mask):
    return each_loss(net, z, y).mean() + net.codes.square().sum() / len(z)


@loss
def a_sum_of_two(net, x, z, y, w, mask):
    return each_loss(net, z, y).sum() + net.body(x).square().mean()


@loss
def slope_of_a_mean(net, x, z, y, w, mask):
    z = z.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net.head(net.body(z).tanh()).mean(), z, create_graph=True)
    return (slope.norm(dim=1) * len(z) - 1).square().mean()


@loss
def with_a_mask_of_its_own(net, x, z, y, w, mask):
    weights = torch.where(mask, 1.0, torch.zeros(())).masked_fill(mask, 0.5)
    return ((net.body(x) - x).square().mean(-1) * weights / len(x)).sum()


@loss
def put_together_again(net, x, z, y, w, mask):
    return torch.stack(
        [F.cross_entropy(net.head(row), label) for row, label in zip(z, y, strict=True)]
    ).mean()


@loss
def put_together_and_summed(net, x, z, y, w, mask):
    return torch.cat(
        [F.cross_entropy(net.head(row), label)[None] for row, label in zip(z, y, strict=True)]
    ).sum()


@loss
def the_largest_of_a_list(net, x, z, y, w, mask):
    return torch.stack(each_by_itself(net, z, y)).max()


@loss
def the_first_alone(net, x, z, y, w, mask):
    return each_loss(net, z, y)[0]


@loss
def each_by_its_place(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * torch.arange(len(z))).mean()


@loss
def rising_weights(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * torch.linspace(0, 1, len(z) + 1)[1:]).mean()


@loss
def centered(net, x, z, y, w, mask):
    return F.mse_loss(net.body(z), z - z.mean(0))


@loss
def moved_by_a_mean(net, x, z, y, w, mask):
    return F.huber_loss(net.body(z) + z.mean(), z)


@loss
def logs_moved_by_classes(net, x, z, y, w, mask):
    return F.nll_loss(net.head(z).log_softmax(-1) + F.one_hot(y, WORDS).double().mean(0), y)


@loss
def weighted_logs_moved_by_a_mean(net, x, z, y, w, mask):
    return F.nll_loss(net.head(z).log_softmax(-1) + w.mean(), y, weight=net.bank[0, :WORDS].abs())


@loss
def by_a_guarded_sum(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * w).sum() / w.sum().clamp(min=1e3)


@loss
def by_a_guarded_share(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * w).mean() / (w.sum() / len(w)).clamp(min=0.05)


@loss
def by_a_sum_and_the_rows(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * w).sum() / (w.sum() + len(w))


@loss
def a_mean_by_a_guarded_sum(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * w).mean() / (w.sum() + 1)


@loss
def by_a_sum_and_a_parameter(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * w).sum() / (w.sum() + net.scale)


@loss
def by_a_mean_or_a_sum(net, x, z, y, w, mask):
    return (each_loss(net, z, y) * w).mean() / torch.maximum(w.mean(), w.sum())


def cosines(*shape: int) -> torch.Tensor:
    return torch.cos(torch.arange(math.prod(shape))).reshape(shape)


@loss
def weights_in_another_shape(net, x, z, y, w, mask):
    return (net.body(z).square().mean(1).expand(2, -1) * cosines(2, len(z))).mean()


@loss
def the_first_half_alone(net, x, z, y, w, mask):
    n = len(z) // 2
    return (net.body(z).square().mean(1) * torch.cat([torch.zeros(n), torch.ones(len(z) - n)])).mean()


@loss
def a_window_over_rows(net, x, z, y, w, mask):
    return (net.body(z).square().mean(1) * torch.hann_window(len(z))).mean()


@loss
def a_parameter_of_each_place(net, x, z, y, w, mask):
    return (net.body(z) * torch.stack([net.codes[i % 8] for i in range(len(z))])).square().mean()


@loss
def a_parameter_repeated(net, x, z, y, w, mask):
    return (net.body(z).flatten() * net.codes[0].repeat(len(z))).square().mean()


@loss
def matrices_of_each_place(net, x, z, y, w, mask):
    return torch.bmm(cosines(len(z), WIDTH, WIDTH), net.body(z).unsqueeze(2)).tanh().mean()


@loss
def entries_of_each_place(net, x, z, y, w, mask):
    return (cosines(len(z), WORDS)[torch.arange(len(z)), y] * net.body(z).mean(1)).mean()


@loss
def places_beside_rows(net, x, z, y, w, mask):
    return torch.cat([net.body(z), cosines(len(z), 1)], 1).prod(1).mean()


@loss
def a_triangle_of_rows(net, x, z, y, w, mask):
    return torch.tril(net.body(z)).square().mean()


@loss
def learned_queries(net, x, z, y, w, mask):
    queries, keys = net.codes.expand(len(x), 1, -1, -1), net.body(x).unsqueeze(1)
    return F.scaled_dot_product_attention(queries, keys, keys).square().mean()


@loss
def learned_queries_spread(net, x, z, y, w, mask):
    queries, keys = net.codes.expand(len(x), 1, -1, -1), net.body(x).unsqueeze(1)
    return F.scaled_dot_product_attention(queries, keys, keys).std(0).mean()


@loss
def one_less_the_others(net, x, z, y, w, mask):
    first, *rest = net.body(z).tanh().mean(1)
    return first - sum(rest)


@loss
def a_moving_average_of_rows(net, x, z, y, w, mask):
    total = 0.0
    for row in net.body(z).square().mean(1):
        total = 0.9 * total + 0.1 * row
    return total


@loss
def subtracted_in_turn(net, x, z, y, w, mask):
    total = 0.0
    for row, label in zip(z, y, strict=True):
        total = total - F.cross_entropy(net.head(row), label)
    return -total / len(z)


@loss
def by_a_parameter_of_the_turn(net, x, z, y, w, mask):
    return torch.stack([(row * net.codes[i % 8]).tanh().mean() for i, row in enumerate(z)]).mean()


@loss
def kernels_of_rows(net, x, z, y, w, mask):
    return F.conv1d(net.body(x), net.body(z)[:, :LENGTH, None]).square().mean()


@loss
def less_the_mean_of_two(net, x, z, y, w, mask):
    pairs = w.view(-1, 2)
    return ((pairs - pairs.mean(1, keepdim=True)).flatten() * net.body(z).mean(1)).mean()


@loss
def spread_over_pairs(net, x, z, y, w, mask):
    return (w.view(-1, 2).mean(1).std() * net.body(z)).mean()


@loss
def in_two_parts(net, x, z, y, w, mask):
    parts = w.view(2, -1)
    return ((parts - parts.mean(1, keepdim=True)).flatten() * net.body(z).mean(1)).mean()


@loss
def of_pairs_by_their_place(net, x, z, y, w, mask):
    return (net.body(z).view(-1, 2, WIDTH).mean(1) * cosines(len(z) // 2, 1)).tanh().mean()


@loss
def beside_numbers_of_pairs(net, x, z, y, w, mask):
    best = w.view(-1, 2).amax(1).repeat_interleave(2)
    return torch.cat([net.body(z), best.unsqueeze(1)], 1).prod(1).mean()


@loss
def a_mask_in_the_shape_of_rows(net, x, z, y, w, mask):
    places = torch.arange(len(x)).unsqueeze(1), torch.arange(LENGTH)
    return (net.body(x).mean(2) * torch.ones_like(mask)[places]).square().mean()


@loss
def zeros_where_a_mask_says(net, x, z, y, w, mask):
    h = net.body(x).mean(2)
    h[mask] = 0.0
    return h.square().mean()


@loss
def solved_by_one_matrix(net, x, z, y, w, mask):
    triangle = torch.eye(WIDTH) + torch.tril(net.body.weight, -1)
    return torch.linalg.solve_triangular(triangle, net.body(z).T, upper=False).square().mean()


@loss
def a_matrix_for_each_row(net, x, z, y, w, mask):
    return (torch.diag_embed(net.body(z)) @ z.unsqueeze(2)).square().mean()


@loss
def a_signal_in_windows(net, x, z, y, w, mask):
    """It pads all rows as one value of as many channels."""
    spectrum = torch.stft(net.body(x).flatten(1), 8, window=torch.ones(8), return_complex=True)
    return torch.view_as_real(spectrum).square().mean()


@loss
def kinds_of_a_buffer(net, x, z, y, w, mask):
    kinds = net.kinds.gather(1, torch.arange(LENGTH).unsqueeze(0)).expand(len(x), -1)
    return (net.body(x) + F.embedding(kinds, net.codes)).square().mean()


@loss
def sorted_by_experts(net, x, z, y, w, mask):
    """On a CPU ``histc`` counts floats alone."""
    experts, order = y.sort()
    ends = torch.histc(experts.float(), WORDS, 0, WORDS - 1).cumsum(0, dtype=torch.int32)
    expert = torch.searchsorted(ends, torch.arange(len(z), dtype=torch.int32), right=True)
    return (net.body(z)[order] * net.codes[expert]).square().mean()


def behind_experts(net, z):
    """Experts take the rows that chose them, and add to these."""
    choice = net.head(z).argmax(-1)
    order = choice.argsort()
    made = net.body(z[order]) * net.codes[choice[order]]
    return z + torch.zeros_like(z).index_add(0, order, made)


@loss
def a_mean_behind_experts(net, x, z, y, w, mask):
    return F.cross_entropy(net.head(behind_experts(net, z)), y)


@loss
def centered_behind_experts(net, x, z, y, w, mask):
    made = net.body(behind_experts(net, z))
    return (made - made.mean(0)).square().mean()


def places_in_experts(net, z):
    """[rows, experts]: how many of the rows before chose the same expert, and whether a row did."""
    chosen = F.one_hot(net.head(z).argmax(-1), WORDS)
    return chosen.cumsum(0) - 1, chosen


@loss
def experts_with_a_capacity(net, x, z, y, w, mask):
    places, chosen = places_in_experts(net, z)
    taken = chosen * torch.lt(places, 2)
    return (net.body(z)[:, :WORDS] * taken.to(z.dtype)).square().mean()


@loss
def experts_with_a_capacity_of_each(net, x, z, y, w, mask):
    places, chosen = places_in_experts(net, z)
    return (net.body(z)[:, :WORDS] * ((places * chosen).sum(-1, keepdim=True) < 1)).square().mean()


def with_a_separator(net, x):
    """Of each row a value of its own, between parameters."""
    for row in net.body(x):
        grid = torch.cat([row.reshape(2, -1, WIDTH), net.codes[:1].expand(2, 1, -1)], dim=1)
        yield torch.cat([grid.reshape(-1, WIDTH), net.codes[:1]])


@loss
def with_a_separator_and_undivided(net, x, z, y, w, mask):
    return sum(row.square().mean() for row in with_a_separator(net, x))


@loss
def with_a_separator_and_divided(net, x, z, y, w, mask):
    return sum(row.square().mean() for row in with_a_separator(net, x)) / len(x)


@loss
def a_mean_and_rows_one_by_one(net, x, z, y, w, mask):
    total = each_loss(net, z, y).mean()
    for row in net.body(x):
        total = total + row.square().mean() / len(x)
    return total


@loss
def a_mean_and_rows_undivided(net, x, z, y, w, mask):
    total = each_loss(net, z, y).mean()
    for row in net.body(x):
        total = total + row.square().mean()
    return total


@loss
def a_mean_added_to_each_row(net, x, z, y, w, mask):
    mean = each_loss(net, z, y).mean()
    return sum((row.square().mean() + mean).tanh() for row in net.body(x)) / len(x)


@loss
def a_mean_for_each_row(net, x, z, y, w, mask):
    mean = each_loss(net, z, y).mean()
    return sum(row.square().mean() / len(x) + mean for row in net.body(x))


@loss
def bags_of_words(net, x, z, y, w, mask):
    return F.embedding_bag(mask.long(), net.codes, mode="sum").square().mean()


@loss
def bags_of_words_by_frequency(net, x, z, y, w, mask):
    return F.embedding_bag(mask.long(), net.codes, mode="sum", scale_grad_by_freq=True).square().mean()


@loss
def balance_of_counts(net, x, z, y, w, mask):
    shares = torch.histc(net.head(z).argmax(-1).float(), WORDS, 0, WORDS - 1) / len(z)
    return net.body(x).square().mean() + (shares * net.head(z).softmax(-1).mean(0)).sum()


@loss
def put_into_the_first_rows(net, x, z, y, w, mask):
    words = torch.arange(WIDTH).expand(len(z) // 2, -1)
    return net.body(z).scatter_add(1, words, cosines(len(z) // 2, WIDTH)).square().mean()


@loss
def a_sum_by_itself(net, x, z, y, w, mask):
    total = sum(row.tanh().mean() for row in net.body(z)) / len(z)
    return total * total


def batch_of(rows: int) -> tuple[torch.Tensor, ...]:
    x, z, w = torch.randn(rows, LENGTH, WIDTH), torch.randn(rows, WIDTH), torch.rand(rows)
    return x, z, torch.randint(WORDS, (rows,)), w, torch.rand(rows, LENGTH) > 0.4


@pytest.fixture
def _in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


#: Where a microbatch is one row, and the rows could lie in any dimension of one entry.
OF_ONE_ROW = ["balance", "over_rows", "row_by_row", "the_first_alone"]
OTHERS_OF_ONE_ROW = [
    "by_a_guarded_share", "by_a_parameter_of_the_turn", "by_a_sum_and_the_rows", "centered",
    "each_by_its_place", "in_a_loop_by_the_rows", "last_token", "overlap_of_each", "places_beside_rows",
    "put_together_again", "put_together_and_summed", "rising_weights", "row_by_row_undivided",
    "some_part_of_the_mean", "sums_by_rows", "times_the_rows", "within_a_function",
]  # fmt: skip


@pytest.mark.usefixtures("_in_double")
@pytest.mark.parametrize(
    ("rows", "name"),
    [
        *((ROWS, name) for name in LOSSES),
        *((1, name) for name in OF_ONE_ROW),
        *(pytest.param(1, name, marks=pytest.mark.variation) for name in OTHERS_OF_ONE_ROW),
    ],
)
def test_a_loss_that_is_no_mean_of_microbatches_is_told(rows, name):
    torch.manual_seed(0)
    net, batch = Net(LOSSES[name]), batch_of(rows * MICROBATCHES)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        pipe = fxpipe.compile(
            net,
            tuple(t[:rows] for t in batch),
            ranks=1,
            microbatches=MICROBATCHES,
            schedule="1f1b",
            check=False,
        )
    result, expected = pipe.run_local(batch), net(*batch)
    expected.backward()
    off = [(result.loss - expected).abs() / expected.abs()]
    for key, value in net.named_parameters():
        if value.grad is not None:
            off.append((result.grads[key] - value.grad).abs().max() / (1e-3 + value.grad.abs().max()))
    is_told = any("whole batch" in str(x.message) for x in given)
    assert (max(off) > 1e-8) == is_told


@pytest.mark.parametrize(("name", "traces"), [("weighted_by_the_sum", 0), ("the_first_alone", 1)])
def test_one_row_is_traced_again_where_an_op_may_do_another_thing_with_two(name, traces):
    """And where numbers may follow from how many rows there are; it takes a quarter of a compilation."""
    example = tuple(t[:1] for t in batch_of(1))
    with mock.patch.object(trace, "capture", wraps=trace.capture) as again, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace.capture(Net(LOSSES[name]), example, None, 0.5, torch.device("cpu"))
    assert again.call_count == 1 + traces


def test_a_leaf_without_rows():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, nothing):
            return self.layer(x).square().mean() + nothing.sum()

    model, batch = Both(), (torch.randn(2, WIDTH), torch.zeros(0, 3))
    pipe = fxpipe.compile(model, batch, ranks=1, microbatches=1, schedule="1f1b")
    torch.testing.assert_close(pipe.run_local(batch).loss, model(*batch).detach())


def test_families_of_a_torch_without_one_of_their_ops():
    """torch 2.14 has no ``aten.cholesky``; each other name is that of an op."""
    text = Path(families.__file__).read_text()
    names = set(re.findall(r"\baten\.(\w+)", text.partition("aten = _Ops()")[2]))
    assert len(names) > 150
    assert {name for name in names if families.aten.__getattr__(name) == name} <= {"cholesky"}
    assert families.aten.mm is torch.ops.aten.mm
    assert families.aten.no_such_op == "no_such_op"
