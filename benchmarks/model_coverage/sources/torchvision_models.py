"""The architectures of torchvision, with few and narrow layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchvision import models as tv
from torchvision.models import optical_flow, segmentation, video

from benchmarks.model_coverage.case import Builder, Subject
from benchmarks.model_coverage.sources.shapes import CLASSES, classifier, numbers

LIBRARY = "torchvision"


def cases() -> dict[str, Builder]:
    c = {"num_classes": CLASSES}
    basic3d = video.resnet.BasicBlock
    basic, bottleneck = tv.resnet.BasicBlock, tv.resnet.Bottleneck
    image = {
        "resnet": lambda: tv.ResNet(basic, [1, 1, 1, 1], **c),
        "resnext": lambda: tv.ResNet(bottleneck, [1, 1, 1, 1], groups=4, width_per_group=4, **c),
        "wide_resnet": lambda: tv.ResNet(bottleneck, [1, 1, 1, 1], width_per_group=128, **c),
        "densenet": lambda: tv.DenseNet(8, (2, 2, 2), 16, **c),
        "densenet_checkpointed": lambda: tv.DenseNet(8, (2, 2), 16, memory_efficient=True, **c),
        "mobilenet_v2": lambda: tv.MobileNetV2(width_mult=0.25, **c),
        "mobilenet_v3_small": lambda: tv.mobilenet_v3_small(width_mult=0.25, **c),
        "mnasnet": lambda: tv.MNASNet(0.35, **c),
        "shufflenet_v2": lambda: tv.shufflenet_v2_x0_5(**c),
        "squeezenet": lambda: tv.squeezenet1_1(**c),
        "googlenet": lambda: tv.googlenet(init_weights=False, aux_logits=False, **c),
        "efficientnet_b0": lambda: tv.efficientnet_b0(**c),
        "regnet_y_400mf": lambda: tv.regnet_y_400mf(**c),
        "regnet_x_400mf": lambda: tv.regnet_x_400mf(**c),
        "convnext": lambda: tv.ConvNeXt(
            [tv.convnext.CNBlockConfig(16, 32, 1), tv.convnext.CNBlockConfig(32, None, 1)], **c
        ),
        "vit": lambda: tv.VisionTransformer(64, 16, 2, 2, 32, 48, **c),
        "swin": lambda: tv.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4], **c),
        "swin_v2": lambda: tv.SwinTransformer(
            [4, 4],
            16,
            [2, 1],
            [2, 2],
            [4, 4],
            **c,
            block=tv.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=tv.swin_transformer.PatchMergingV2,
        ),
        "maxvit": lambda: tv.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, **c),
        "alexnet": lambda: _narrow(tv.alexnet(**c)),
        "vgg11_bn": lambda: _narrow(tv.vgg11_bn(init_weights=False, **c)),
    }
    film = {
        "r3d": lambda: video.VideoResNet(
            basic3d, [video.resnet.Conv3DSimple] * 4, [1] * 4, video.resnet.BasicStem, **c
        ),
        "r2plus1d": lambda: video.VideoResNet(
            basic3d, [video.resnet.Conv2Plus1D] * 4, [1] * 4, video.resnet.R2Plus1dStem, **c
        ),
        "s3d": lambda: video.S3D(**c),
        "mvit": lambda: video.MViT(
            (32, 32),
            4,
            [video.mvit.MSBlockConfig(1, 16, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2])] * 2,
            residual_pool=True,
            residual_with_cls_embed=True,
            rel_pos_embed=False,
            proj_after_attn=False,
            **c,
        ),
        "swin3d": lambda: video.SwinTransformer3d([2, 4, 4], 16, [1, 1], [2, 2], [2, 4, 4], **c),
    }
    frames = {"s3d": (3, 16, 224, 224), "mvit": (3, 4, 32, 32)}
    maps = {
        "fcn_resnet50": lambda: segmentation.fcn_resnet50(weights_backbone=None, aux_loss=True, **c),
        "deeplabv3_mobilenet": lambda: segmentation.deeplabv3_mobilenet_v3_large(weights_backbone=None, **c),
        "lraspp_mobilenet": lambda: segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, **c),
    }
    found = {name: classifier(build, 3, 64, 64) for name, build in image.items()}
    found["inception_v3"] = classifier(lambda: tv.inception_v3(init_weights=False, **c), 3, 299, 299)
    found |= {name: classifier(build, *frames.get(name, (3, 4, 32, 32))) for name, build in film.items()}
    found |= {name: numbers(build, (3, 64, 64)) for name, build in maps.items()}
    found["raft_small"] = numbers(_Flow, (3, 128, 128), (3, 128, 128))
    found["retinanet"] = detector
    return found


def _narrow(model: nn.Module) -> nn.Module:
    """The classifier after the convolutions with 32 instead of 4096 channels."""
    convolutions = [m for m in model.features if isinstance(m, nn.Conv2d)]
    pooled = convolutions[-1].out_channels * model.avgpool.output_size[0] * model.avgpool.output_size[1]
    model.classifier = nn.Sequential(nn.Linear(pooled, 32), nn.ReLU(True), nn.Linear(32, CLASSES))
    return model


class _Flow(nn.Module):
    """Two rounds instead of twelve."""

    def __init__(self) -> None:
        super().__init__()
        self.model = optical_flow.raft_small()

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:
        return self.model(first, second, num_flow_updates=2)


class _Detector(nn.Module):
    """One box an image, as tensors with a row an image."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.detection import retinanet_resnet50_fpn

        self.model = retinanet_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=CLASSES, min_size=64, max_size=64
        )

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> Any:
        box = torch.tensor([[4.0, 4.0, 40.0, 40.0]], dtype=image.dtype)
        targets = [{"boxes": box, "labels": label[i : i + 1]} for i in range(len(label))]
        return sum(self.model(list(image), targets).values())


def detector() -> Subject:
    def batch(rows: int) -> dict[str, torch.Tensor]:
        return {"image": torch.rand(rows, 3, 64, 64), "label": torch.randint(1, CLASSES, (rows,))}

    return Subject(_Detector(), batch)
