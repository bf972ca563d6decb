"""MONAI's networks for medical images, on small ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from monai.networks import nets
from torch import nn

from benchmarks.model_coverage.case import Builder
from benchmarks.model_coverage.sources.shapes import CLASSES, classifier, numbers

LIBRARY = "monai"
FLAT = {"spatial_dims": 2, "in_channels": 1, "out_channels": CLASSES}

MAPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "UNet": (lambda: nets.UNet(**FLAT, channels=(8, 16, 32), strides=(2, 2), num_res_units=1), (1, 32, 32)),
    "UNet_3d": (
        lambda: nets.UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)),
        (1, 16, 16, 16),
    ),
    "BasicUNet": (lambda: nets.BasicUNet(2, 1, CLASSES, features=(8, 8, 16, 16, 16, 8)), (1, 32, 32)),
    "BasicUNetPlusPlus": (
        lambda: nets.BasicUNetPlusPlus(2, 1, CLASSES, features=(8, 8, 16, 16, 16, 8)),
        (1, 32, 32),
    ),
    "AttentionUnet": (lambda: nets.AttentionUnet(**FLAT, channels=(8, 16, 32), strides=(2, 2)), (1, 32, 32)),
    "DynUNet": (
        lambda: nets.DynUNet(
            **FLAT, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[8, 16, 16]
        ),
        (1, 32, 32),
    ),
    "VNet": (lambda: nets.VNet(**FLAT), (1, 32, 32)),
    "SegResNet": (
        lambda: nets.SegResNet(**FLAT, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
        (1, 32, 32),
    ),
    "SegResNetVAE": (
        lambda: nets.SegResNetVAE((32, 32), **FLAT, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
        (1, 32, 32),
    ),
    "SegResNetDS": (lambda: nets.SegResNetDS(**FLAT, init_filters=8, blocks_down=(1, 1)), (1, 32, 32)),
    "HighResNet": (lambda: nets.HighResNet(spatial_dims=2, in_channels=1, out_channels=CLASSES), (1, 32, 32)),
    "UNETR": (lambda: nets.UNETR(1, CLASSES, (32, 32), 8, 32, 64, 4, spatial_dims=2), (1, 32, 32)),
    "SwinUNETR": (
        lambda: nets.SwinUNETR(
            1, CLASSES, 4, depths=(1, 1), num_heads=(1, 2), feature_size=12, spatial_dims=2
        ),
        (1, 64, 64),
    ),
    "AutoEncoder": (lambda: nets.AutoEncoder(**FLAT, channels=(8, 16), strides=(2, 2)), (1, 32, 32)),
    "VarAutoEncoder": (
        lambda: nets.VarAutoEncoder(2, (1, 32, 32), 1, 8, channels=(8, 16), strides=(2, 2)),
        (1, 32, 32),
    ),
    "AutoencoderKL": (
        lambda: nets.AutoencoderKL(2, 1, 1, (1, 1), (8, 16), (False, True), norm_num_groups=4),
        (1, 16, 16),
    ),
    "VQVAE": (
        lambda: nets.VQVAE(
            2,
            1,
            1,
            (8, 16),
            1,
            (8, 8),
            ((2, 4, 1, 1), (2, 4, 1, 1)),
            ((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
            num_embeddings=8,
            embedding_dim=8,
        ),
        (1, 16, 16),
    ),
    "ViTAutoEnc": (
        lambda: nets.ViTAutoEnc(
            1, (32, 32), (4, 4), hidden_size=32, mlp_dim=48, num_layers=2, num_heads=4, spatial_dims=2
        ),
        (1, 32, 32),
    ),
    "MedNeXt": (
        lambda: nets.MedNeXt(
            2,
            8,
            1,
            CLASSES,
            encoder_expansion_ratio=2,
            decoder_expansion_ratio=2,
            bottleneck_expansion_ratio=2,
            blocks_down=(1, 1),
            blocks_bottleneck=1,
            blocks_up=(1, 1),
        ),
        (1, 32, 32),
    ),
    "RegUNet": (lambda: nets.RegUNet(2, 1, 8, 2, out_channels=2), (1, 32, 32)),
    "FlexibleUNet": (lambda: nets.FlexibleUNet(1, CLASSES, "resnet18", spatial_dims=2), (1, 64, 64)),
}
CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "DenseNet": (lambda: nets.DenseNet(2, 1, CLASSES, 8, 8, (2, 2)), (1, 32, 32)),
    "EfficientNetBN": (
        lambda: nets.EfficientNetBN("efficientnet-b0", False, True, 2, 1, CLASSES),
        (1, 64, 64),
    ),
    "ResNet": (
        lambda: nets.ResNet(
            "basic", [1, 1, 1, 1], [8, 16, 16, 16], spatial_dims=2, n_input_channels=1, num_classes=CLASSES
        ),
        (1, 32, 32),
    ),
    "ViT": (
        lambda: nets.ViT(
            1, (32, 32), (8, 8), 32, 48, 2, 4, classification=True, num_classes=CLASSES, spatial_dims=2
        ),
        (1, 32, 32),
    ),
    "Classifier": (lambda: nets.Classifier((1, 32, 32), CLASSES, (8, 16), (2, 2)), (1, 32, 32)),
    "Critic": (lambda: nets.Critic((1, 32, 32), (8, 16), (2, 2)), (1, 32, 32)),
    "PatchDiscriminator": (lambda: nets.PatchDiscriminator(2, 8, 1, num_layers_d=2), (1, 32, 32)),
    "FullyConnectedNet": (lambda: nets.FullyConnectedNet(16, CLASSES, [16, 16]), (16,)),
    "Regressor": (lambda: nets.Regressor((1, 32, 32), 2, (8, 16), (2, 2)), (1, 32, 32)),
    "Generator": (lambda: nets.Generator((8,), (16, 4, 4), (8, 1), (2, 2)), (8,)),
}


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unet = nets.DiffusionModelUNet(
            2, 1, 1, (1, 1), (8, 16), (False, True), norm_num_groups=4, num_head_channels=8
        )

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.unet(x, t[:, 0])


def cases() -> dict[str, Builder]:
    found = {name: numbers(build, shape) for name, (build, shape) in MAPS.items()}
    found |= {name: classifier(build, *shape) for name, (build, shape) in CLASSIFIERS.items()}
    return found | {"DiffusionModelUNet": numbers(_Denoiser, (1, 16, 16), (1,))}
