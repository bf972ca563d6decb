"""Kernels that return other strides than the trace predicts, before ops that depend on them."""

import pytest
import torch
import torch.nn.functional as F
from equality import assert_equals_eager
from torch import nn

pytestmark = pytest.mark.usefixtures("double")


def images(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 3, 6, 6).to(memory_format=torch.channels_last)}


class GroupNormAtTheEnd(nn.Module):
    """The gradient of the loss comes in another layout than the group norm's input has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        x = self.norm(self.second(self.first(x)))
        return F.huber_loss(x, x.detach().flip(1))


class GroupNormBesideBatchNorm(nn.Module):
    """The batch norm is traced once more, as an op after it writes to a view, and its functional form
    predicts another layout: for the gradient that comes to the group norm, and not for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 3, 1, bias=False) for _ in range(2))
        self.group_norm, self.batch_norm = nn.GroupNorm(1, 3), nn.BatchNorm2d(3)
        self.scale = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x):
        beside = self.batch_norm(self.first(x))
        x = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0) + self.scale
        x = self.second(F.gelu(self.group_norm(x)) * beside) * self.scale
        x[:, 0].mul_(2)
        return F.huber_loss(x, x.detach().flip(1))


@torch.library.custom_op("fxpipe_tests::in_memory_order", mutates_args=())
def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,)).cumsum(0)


@in_memory_order.register_fake
def _(x):
    return x.new_empty(x.numel())


class _Reading(torch.autograd.Function):
    """A custom op that reads the gradient's memory, which its caller has made dense for it."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        read = in_memory_order(gradient).reshape(ctx.shape)
        return gradient + read


class CustomOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = _Reading.apply(self.second(self.first(x)))
        return F.huber_loss(x, x.detach().flip(1))


@pytest.mark.parametrize("model", [GroupNormAtTheEnd, GroupNormBesideBatchNorm, CustomOp])
@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_eager(model, ranks):
    assert_equals_eager(model, images, ranks=ranks, schedule="zb-h1")
