"""PyTorch's own layers, losses and parametrizations, each inside a small network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from benchmarks.model_coverage.case import Builder, Subject
from benchmarks.model_coverage.sources.shapes import CLASSES, VOCABULARY, Fed, numbers, words

LIBRARY = "torch.nn"
WIDTH = 8

ACTIVATIONS = (
    "CELU",
    "ELU",
    "GELU",
    "GLU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LogSigmoid",
    "LogSoftmax",
    "Mish",
    "PReLU",
    "ReLU",
    "ReLU6",
    "RReLU",
    "SELU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softmin",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
    "Threshold",
)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "Threshold": (0.1, 0.2),
    "Softmax": (-1,),
    "Softmin": (-1,),
    "LogSoftmax": (-1,),
    "RReLU": (0.2, 0.2),
}

#: Layers on maps of 8 channels, 8 × 8.
ON_MAPS: dict[str, Callable[[], nn.Module]] = {
    "Conv2d_groups": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=4),
    "Conv2d_dilated": lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2),
    "Conv2d_circular": lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(8, 8, 2, stride=2),
    "MaxPool2d": lambda: nn.MaxPool2d(2),
    "AvgPool2d": lambda: nn.AvgPool2d(2),
    "LPPool2d": lambda: nn.LPPool2d(2, 2),
    "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d(3),
    "AdaptiveMaxPool2d": lambda: nn.AdaptiveMaxPool2d(3),
    "BatchNorm2d": lambda: nn.BatchNorm2d(8),
    "BatchNorm2d_cumulative": lambda: nn.BatchNorm2d(8, momentum=None),
    "BatchNorm2d_no_stats": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(8, affine=True),
    "InstanceNorm2d_stats": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(3),
    "PixelShuffle": lambda: nn.PixelShuffle(2),
    "PixelUnshuffle": lambda: nn.PixelUnshuffle(2),
    "ChannelShuffle": lambda: nn.ChannelShuffle(2),
    "Unfold": lambda: nn.Unfold(3),
    "Upsample_nearest": lambda: nn.Upsample(scale_factor=2),
    "Upsample_bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "Upsample_bicubic": lambda: nn.Upsample(scale_factor=2, mode="bicubic", align_corners=True),
    "ReflectionPad2d": lambda: nn.ReflectionPad2d(2),
    "ReplicationPad2d": lambda: nn.ReplicationPad2d(2),
    "ZeroPad2d": lambda: nn.ZeroPad2d(2),
    "CircularPad2d": lambda: nn.CircularPad2d(2),
    "Softmax2d": lambda: nn.Softmax2d(),
    "Dropout2d": lambda: nn.Dropout2d(0.0),
    "channels_last": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)).to(
        memory_format=torch.channels_last
    ),
    "spectral_norm": lambda: spectral_norm(nn.Conv2d(8, 8, 3)),
    "weight_norm_old": lambda: weight_norm(nn.Conv2d(8, 8, 3)),
}
#: Layers on rows of 8 numbers.
ON_ROWS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "AlphaDropout": lambda: nn.AlphaDropout(0.0),
    "parametrize_weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "parametrize_spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "parametrize_orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "Sequential_shared": lambda: nn.Sequential(*[nn.Linear(8, 8)] * 3),
    "BatchNorm1d_shared": lambda: nn.Sequential(
        *[m for n in [nn.BatchNorm1d(8)] for m in (n, nn.Linear(8, 8), n)]
    ),
    "Unflatten": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Flatten()),
    "ParameterDict": lambda: _Parameters(),
}
#: Layers on sequences of 6 rows of 8 numbers.
ON_SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "RNN": lambda: nn.RNN(8, 8, 2, batch_first=True),
    "RNN_relu": lambda: nn.RNN(8, 8, nonlinearity="relu", batch_first=True),
    "LSTM": lambda: nn.LSTM(8, 8, 2, batch_first=True),
    "LSTM_bidirectional": lambda: nn.LSTM(8, 8, bidirectional=True, batch_first=True),
    "LSTM_projection": lambda: nn.LSTM(8, 8, proj_size=4, batch_first=True),
    "GRU": lambda: nn.GRU(8, 8, 2, batch_first=True),
    "GRU_bidirectional": lambda: nn.GRU(8, 8, bidirectional=True, batch_first=True),
    "TransformerEncoder": lambda: nn.TransformerEncoder(_encoder_layer(), 2),
    "TransformerEncoder_causal": lambda: _Causal(nn.TransformerEncoder(_encoder_layer(), 2)),
    "TransformerEncoder_norm_first": lambda: nn.TransformerEncoder(
        _encoder_layer(norm_first=True), 2, enable_nested_tensor=False
    ),
    "TransformerDecoder": lambda: _Decoded(),
    "Transformer": lambda: _Translator(),
    "MultiheadAttention": lambda: _Attended(),
    "MultiheadAttention_bias_kv": lambda: _Attended(add_bias_kv=True, add_zero_attn=True),
    "Conv1d": lambda: nn.Conv1d(6, 8, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(6, 8, 3),
    "MaxPool1d": lambda: nn.MaxPool1d(2),
    "Bilinear": lambda: _Paired(nn.Bilinear(8, 8, 8)),
    "CosineSimilarity": lambda: _Paired(nn.CosineSimilarity(dim=-1)),
    "PairwiseDistance": lambda: _Paired(nn.PairwiseDistance()),
}
#: Layers on words, which give a row for each.
ON_WORDS: dict[str, Callable[[], nn.Module]] = {
    "Embedding": lambda: nn.Embedding(VOCABULARY, 8),
    "Embedding_padding": lambda: nn.Embedding(VOCABULARY, 8, padding_idx=0),
    "Embedding_max_norm": lambda: nn.Embedding(VOCABULARY, 8, max_norm=1.0),
    "Embedding_by_freq": lambda: nn.Embedding(VOCABULARY, 8, scale_grad_by_freq=True),
    "Embedding_sparse": lambda: nn.Embedding(VOCABULARY, 8, sparse=True),
    "EmbeddingBag_mean": lambda: _Bag("mean"),
    "EmbeddingBag_max": lambda: _Bag("max"),
}
#: Losses of scores (8 numbers a row) and a target of this kind.
LOSSES: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "CrossEntropy": (nn.CrossEntropyLoss(), "class"),
    "CrossEntropy_smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), "class"),
    "CrossEntropy_weights": (nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1, 8)), "class"),
    "CrossEntropy_sum": (nn.CrossEntropyLoss(reduction="sum"), "class"),
    "CrossEntropy_soft": (lambda x, y: F.cross_entropy(x, y.softmax(-1)), "numbers"),
    "NLL": (lambda x, y: F.nll_loss(x.log_softmax(-1), y), "class"),
    "MultiMargin": (nn.MultiMarginLoss(), "class"),
    "MSE": (nn.MSELoss(), "numbers"),
    "L1": (nn.L1Loss(), "numbers"),
    "SmoothL1": (nn.SmoothL1Loss(), "numbers"),
    "Huber": (nn.HuberLoss(), "numbers"),
    "BCEWithLogits": (nn.BCEWithLogitsLoss(), "bits"),
    "BCE": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), "bits"),
    "MultiLabelSoftMargin": (nn.MultiLabelSoftMarginLoss(), "bits"),
    "SoftMargin": (lambda x, y: F.soft_margin_loss(x, 2 * y - 1), "bits"),
    "HingeEmbedding": (lambda x, y: F.hinge_embedding_loss(x, 2 * y - 1), "bits"),
    "KLDiv": (lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), "numbers"),
    "PoissonNLL": (nn.PoissonNLLLoss(), "bits"),
    "GaussianNLL": (lambda x, y: F.gaussian_nll_loss(x, y, x.square() + 0.1), "numbers"),
    "CosineEmbedding": (lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(len(x))), "numbers"),
    "MarginRanking": (lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x)), "numbers"),
    "TripletMargin": (lambda x, y: F.triplet_margin_loss(x, y, y.flip(0)), "numbers"),
    "AdaptiveLogSoftmax": (None, "class"),
    "CTC": (None, "class"),
}  # type: ignore[dict-item]


def _encoder_layer(**given: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, **given)


class _Parameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ParameterDict({name: torch.randn(8) for name in ("scale", "shift")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table["scale"] + self.table["shift"]


class _Causal(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.inner(x, mask=mask)


class _Decoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x, x.flip(1))


class _Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.inner(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)


class _Attended(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, weights = self.attention(x, x, x)
        return output + weights.sum()


class _Paired(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x.flip(1).sin())


class _Bag(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 8, mode=mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bag(x).unsqueeze(1).expand(-1, x.shape[1], -1)


class _Around(nn.Module):
    """The layer between two others, whatever shapes it makes."""

    def __init__(self, before: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.before, self.layer = before, layer
        self.after = nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(self.before(x))
        found = found[0] if isinstance(found, tuple) else found
        return self.after(found.tanh().flatten(1).unsqueeze(-1))


class _Words(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.inner, self.head = layer, nn.Linear(8, 16), nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.layer(x)).relu())


def _loss_case(name: str) -> Subject:
    loss, kind = LOSSES[name]
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    if name == "AdaptiveLogSoftmax":
        model = _Adaptive()
        loss = None
    elif name == "CTC":
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6 * 8), nn.Unflatten(1, (6, 8)))
        loss = _ctc

    def batch(rows: int) -> dict[str, torch.Tensor]:
        x = torch.randn(rows, 8)
        targets = {
            "class": torch.randint(1, 8, (rows,)),
            "numbers": torch.randn(rows, 8),
            "bits": torch.randint(2, (rows, 8)).to(x.dtype),
        }
        return {"x": x, "target": targets[kind]}

    if loss is None:
        return Subject(model, batch)
    return Subject(Fed(model), batch, lambda output, given: loss(output, given["target"]))


def _ctc(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    rows = len(target)
    lengths = torch.full((rows,), 6), torch.ones(rows, dtype=torch.long)
    return F.ctc_loss(scores.log_softmax(-1).transpose(0, 1), target.unsqueeze(1), *lengths)


class _Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x).tanh(), target).loss


def _activation(name: str) -> nn.Module:
    wide = 16 if name == "GLU" else 8
    layer = getattr(nn, name)(*ARGUMENTS.get(name, ()))
    return nn.Sequential(nn.Linear(8, wide), layer, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def cases() -> dict[str, Builder]:
    found = {f"activation_{name}": numbers(partial(_activation, name), (8,)) for name in ACTIVATIONS}
    for name, make in ON_MAPS.items():
        found[name] = numbers(lambda make=make: _Around(nn.Conv2d(3, 8, 3, padding=1), make()), (3, 8, 8))
    for name, make in ON_ROWS.items():
        found[name] = numbers(lambda make=make: _Around(nn.Linear(8, 8), make()), (8,))
    for name, make in ON_SEQUENCES.items():
        found[name] = numbers(lambda make=make: _Around(nn.Linear(8, 8), make()), (6, 8))
    for name, make in ON_WORDS.items():
        found[name] = words(lambda make=make: _Words(make()), length=6)
    found["Conv3d"] = numbers(lambda: _Around(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4)), (1, 6, 6, 6))
    found["MaxUnpool2d"] = numbers(_Unpooled, (3, 8, 8))
    found["LSTMCell"] = numbers(_Cells, (6, 8))
    found |= {f"loss_{name}": partial(_loss_case, name) for name in LOSSES}
    return found


class _Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, at = self.pool(self.first(x))
        return self.last(self.unpool(pooled.tanh(), at))


class _Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LSTMCell(8, 8), nn.GRUCell(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = g = x.new_zeros(x.shape[0], 8)
        outputs = []
        for step in x.unbind(1):
            h, c = self.first(step, (h, c))
            g = self.second(h, g)
            outputs.append(self.head(g))
        return torch.stack(outputs, 1)
