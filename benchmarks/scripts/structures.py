"""Ideas of public training loops in small: images, graphs, sets, ranking, two views."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.scripts.models import INPUTS, WIDTH, WORDS, Mlp
from benchmarks.scripts.ordinary import draws, ordinary


class Detector(nn.Module):
    """Boxes and classes of anchors: a focal loss of classes, an overlap loss of the positive boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        )
        self.classes, self.boxes = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def forward(self, image, box, class_ids):
        hidden = self.body(image)
        logits = self.classes(hidden).flatten(2).mT
        target = F.one_hot(class_ids, 4)[..., :3].to(logits.dtype)
        each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        right = (logits.sigmoid() - (1 - target)).abs()
        focal = (each * (1 - right).square()).mean()
        size = self.boxes(hidden).flatten(2).mT.exp()
        wanted, positive = box.exp(), (class_ids < 3).to(size.dtype)
        inside = torch.minimum(size, wanted).prod(-1)
        overlap = inside / (size.prod(-1) + wanted.prod(-1) - inside + 1e-6)
        return focal + ((1 - overlap) * positive).mean()


ordinary("detection", Detector, lambda: draws(4, image=(2, 4, 4), box=(16, 4), class_ids=(16, 4)))


class Segmenter(nn.Module):
    """An encoder and decoder with a skip; cross-entropy and the dice of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(6, 6, 2, stride=2), nn.Conv2d(12, 3, 1)

    def forward(self, image, mask_ids):
        skip = self.down(image).relu()
        logits = self.out(torch.cat([skip, self.up(self.deep(F.max_pool2d(skip, 2)).relu())], 1))
        share, target = logits.softmax(1), F.one_hot(mask_ids, 3).movedim(-1, 1).to(logits.dtype)
        both = 2 * (share * target).sum((2, 3)) + 1
        dice = both / (share.sum((2, 3)) + target.sum((2, 3)) + 1)
        return F.cross_entropy(logits, mask_ids) + 1 - dice.mean()


ordinary("segmentation", Segmenter, lambda: draws(4, image=(2, 4, 4), mask_ids=(4, 4, 3)), "2", "2x2")


class Graph(nn.Module):
    """Messages over dense adjacency, two layers of attention, a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4 if i == 0 else WIDTH, WIDTH) for i in range(4))
        self.scores, self.out = nn.ModuleList(nn.Linear(2 * WIDTH, 1) for _ in range(4)), nn.Linear(WIDTH, 1)

    def forward(self, node, edge_ids, target):
        joined = edge_ids.bool() | torch.eye(node.shape[1], dtype=torch.bool)
        x = node
        for layer, score in zip(self.layers, self.scores, strict=True):
            x = layer(x)
            pairs = torch.cat(
                [x[:, :, None].expand(-1, -1, x.shape[1], -1), x[:, None].expand(-1, x.shape[1], -1, -1)], -1
            )
            weight = score(pairs)[..., 0].masked_fill(~joined, -math.inf).softmax(-1)
            x = F.elu(weight @ x)
        return F.mse_loss(self.out(x.mean(1)), target)


ordinary(
    "graph attention", Graph, lambda: draws(4, node=(4, 4), edge_ids=(4, 4, 2), target=(1,)), "2", "4", "2x2"
)


class Triplet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, anchor, positive, negative):
        a, p, n = (F.normalize(self.body(x), dim=-1) for x in (anchor, positive, negative))
        return F.triplet_margin_loss(a, p, n, margin=0.5)


ordinary("triplets", Triplet, lambda: draws(4, anchor=(INPUTS,), positive=(INPUTS,), negative=(INPUTS,)))


class Ranking(nn.Module):
    """Bayesian personalized ranking of a factorization with a small network behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(9, WIDTH), nn.Embedding(14, WIDTH)
        self.body = Mlp(2 * WIDTH, 1)

    def forward(self, user_ids, liked_ids, other_ids):
        user = self.user(user_ids)
        liked, other = (self.body(torch.cat([user, self.item(ids)], -1)) for ids in (liked_ids, other_ids))
        return -F.logsigmoid(liked - other).mean() + 1e-3 * user.square().sum(-1).mean()


ordinary(
    "recommendation",
    Ranking,
    lambda: draws(4, user_ids=(9,), liked_ids=(14,), other_ids=(14,)),
    "2",
    "4",
    "2x2",
)


class Listwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(INPUTS, 1)

    def forward(self, document, relevance):
        score = self.body(document)[..., 0]
        return -(relevance.softmax(-1) * score.log_softmax(-1)).sum(-1).mean()


ordinary("listwise ranking", Listwise, lambda: draws(4, document=(5, INPUTS), relevance=(5,)))


class Quantized(nn.Module):
    """Weights and activations are rounded in the forward; gradients pass straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((INPUTS, 8), (8, 8), (8, 8), (8, 1)))

    @staticmethod
    def rounded(x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 7
        return x + ((x / scale).round() * scale - x).detach()

    def forward(self, x, y):
        for i, layer in enumerate(self.layers):
            x = F.linear(self.rounded(x), self.rounded(layer.weight), layer.bias)
            x = x.tanh() if i < 3 else x
        return F.mse_loss(x, y)


ordinary("quantization aware", Quantized, lambda: draws(4, x=(INPUTS,), y=(1,)))


class Redundancy(nn.Module):
    """VICReg's three terms of two views, over the rows of a microbatch's token axis."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(INPUTS, 4)

    def forward(self, crops, noise):
        a, b = self.body(crops), self.body(crops + 0.1 * noise)
        loss = F.mse_loss(a, b)
        for z in (a, b):
            z = z - z.mean(1, keepdim=True)
            covariance = z.mT @ z / (z.shape[1] - 1)
            variance = torch.diagonal(covariance, dim1=-2, dim2=-1)
            loss = loss + F.relu(1 - (variance + 1e-4).sqrt()).mean()
            loss = loss + 0.04 * (covariance.square().sum((1, 2)) - variance.square().sum(-1)).mean()
        return loss


ordinary("variance and covariance", Redundancy, lambda: draws(4, crops=(8, INPUTS), noise=(8, INPUTS)))


class Sets(nn.Module):
    """Deep sets with attention pooling, and a matching of predictions to targets by sorting."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.seed = Mlp(3, WIDTH), nn.Parameter(torch.randn(4, WIDTH))
        self.attend, self.out = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, points, targets):
        x = self.each(points)
        pooled, _ = self.attend(self.seed.expand(len(x), -1, -1), x, x, need_weights=False)
        predicted = self.out(pooled)[..., 0].sort(-1).values
        return F.smooth_l1_loss(predicted, targets.sort(-1).values)


ordinary("sets", Sets, lambda: draws(4, points=(6, 3), targets=(4,)))


class TwoTowers(nn.Module):
    """Images and texts in one space, with a trained temperature and negatives from the row."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words, self.text = Mlp(INPUTS, WIDTH), nn.Embedding(WORDS, WIDTH), Mlp(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text_ids):
        a = F.normalize(self.image(image), dim=-1)
        b = F.normalize(self.text(self.words(text_ids).mean(-2)), dim=-1)
        logits = self.temperature.exp() * a @ b.mT
        target = torch.arange(logits.shape[1]).expand(len(logits), -1)
        return 0.5 * (F.cross_entropy(logits.mT, target) + F.cross_entropy(logits, target))


ordinary("two towers", TwoTowers, lambda: draws(4, image=(4, INPUTS), text_ids=(4, 3, WORDS)))
