"""Models of packages that have a few each: quantizers with moving codebooks, spiking neurons, flows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.model_coverage.case import Builder, Subject, leaves_loss
from benchmarks.model_coverage.sources.shapes import CLASSES, VOCABULARY, classifier, numbers, words

LIBRARY = "small packages"
WIDTH = 16


class Between(nn.Module):
    """A layer between two linear ones, which makes a sequence of numbers a model with something to cut."""

    def __init__(self, layer: nn.Module, take: Callable[[Any], Any] = lambda result: result) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)
        self.take = take

    def forward(self, x: torch.Tensor) -> Any:
        result = self.take(self.layer(torch.tanh(self.first(x))))
        return (self.last(result[0]), *result[1:]) if isinstance(result, tuple) else self.last(result)


def made(path: str, /, *args: Any, **kwargs: Any) -> nn.Module:
    """An object of a class, by the path of the class: its package is imported only if the case is built."""
    module, _, name = path.rpartition(".")
    found: nn.Module = getattr(importlib.import_module(module), name)(*args, **kwargs)
    return found


def quantizer(name: str, **given: Any) -> Builder:
    def build() -> nn.Module:
        layer = made(f"vector_quantize_pytorch.{name}", **given)
        # Some give the loss of the codes, some none.
        return Between(layer, lambda result: (result[0], *(x for x in result[2:] if x.requires_grad)))

    return numbers(build, (6, WIDTH))


QUANTIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vq_ema": ("VectorQuantize", {"dim": WIDTH, "codebook_size": 8}),
    "vq_ema_fast": (
        "VectorQuantize",
        {"dim": WIDTH, "codebook_size": 8, "decay": 0.5},
    ),
    "vq_cosine": ("VectorQuantize", {"dim": WIDTH, "codebook_size": 8, "use_cosine_sim": True}),
    "vq_kmeans": (
        "VectorQuantize",
        {"dim": WIDTH, "codebook_size": 4, "kmeans_init": True, "kmeans_iters": 2},
    ),
    "vq_dead_codes": (
        "VectorQuantize",
        {"dim": WIDTH, "codebook_size": 8, "threshold_ema_dead_code": 2},
    ),
    "vq_small_codes": ("VectorQuantize", {"dim": WIDTH, "codebook_size": 8, "codebook_dim": 4}),
    "vq_heads": (
        "VectorQuantize",
        {"dim": WIDTH, "codebook_size": 8, "heads": 2, "codebook_dim": 4, "separate_codebook_per_head": True},
    ),
    "vq_learned": (
        "VectorQuantize",
        {"dim": WIDTH, "codebook_size": 8, "ema_update": False, "learnable_codebook": True},
    ),
    "vq_orthogonal": (
        "VectorQuantize",
        {"dim": WIDTH, "codebook_size": 8, "orthogonal_reg_weight": 1.0, "accept_image_fmap": False},
    ),
    "vq_rotation": ("VectorQuantize", {"dim": WIDTH, "codebook_size": 8, "rotation_trick": True}),
    "residual_vq": ("ResidualVQ", {"dim": WIDTH, "num_quantizers": 3, "codebook_size": 8}),
    "residual_vq_shared": (
        "ResidualVQ",
        {"dim": WIDTH, "num_quantizers": 2, "codebook_size": 8, "shared_codebook": True},
    ),
    "residual_vq_dropped": (
        "ResidualVQ",
        {"dim": WIDTH, "num_quantizers": 3, "codebook_size": 8, "quantize_dropout": True},
    ),
    "grouped_residual_vq": (
        "GroupedResidualVQ",
        {"dim": WIDTH, "num_quantizers": 2, "groups": 2, "codebook_size": 8},
    ),
    "fsq": ("FSQ", {"levels": [5, 3], "dim": WIDTH}),
    "residual_fsq": ("ResidualFSQ", {"dim": WIDTH, "levels": [5, 3], "num_quantizers": 2}),
    "lfq": ("LFQ", {"dim": WIDTH, "codebook_size": 16, "entropy_loss_weight": 0.1}),
    "residual_lfq": ("ResidualLFQ", {"dim": WIDTH, "codebook_size": 16, "num_quantizers": 2}),
    "sim_vq": ("SimVQ", {"dim": WIDTH, "codebook_size": 8}),
    "residual_sim_vq": ("ResidualSimVQ", {"dim": WIDTH, "num_quantizers": 2, "codebook_size": 8}),
}

SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "performer": partial(made, "performer_pytorch.Performer", dim=WIDTH, depth=2, heads=2, dim_head=8),
    "performer_redraws": partial(
        made,
        "performer_pytorch.Performer",
        dim=WIDTH,
        depth=2,
        heads=2,
        dim_head=8,
        feature_redraw_interval=1,
    ),
    "performer_general": partial(
        made, "performer_pytorch.Performer", WIDTH, 2, 2, 8, generalized_attention=True, use_rezero=True
    ),
    "performer_reversible": lambda: Between(
        made("performer_pytorch.Performer", WIDTH, 2, 2, 8, reversible=True)
    ),
    "linformer": partial(made, "linformer.Linformer", dim=WIDTH, seq_len=6, depth=2, heads=2, k=4),
    "linformer_reversible": lambda: Between(
        made("linformer.Linformer", dim=WIDTH, seq_len=6, depth=2, heads=2, k=4, reversible=True)
    ),
    "nystromformer": partial(
        made, "nystrom_attention.Nystromformer", dim=WIDTH, dim_head=8, heads=2, depth=2, num_landmarks=3
    ),
    "soft_moe": lambda: Between(made("soft_moe_pytorch.SoftMoE", dim=WIDTH, seq_len=6, num_experts=3)),
    "soft_moe_dynamic": lambda: Between(
        made("soft_moe_pytorch.DynamicSlotsSoftMoE", dim=WIDTH, num_experts=3, geglu=True)
    ),
    "conformer": partial(
        made, "conformer.Conformer", WIDTH, depth=2, dim_head=8, heads=2, conv_kernel_size=3
    ),
    "local_attention": lambda: Between(
        made("local_attention.LocalMHA", dim=WIDTH, window_size=3, dim_head=8, heads=2, causal=True)
    ),
    "mamba": lambda: made("mambapy.mamba.Mamba", made("mambapy.mamba.MambaConfig", WIDTH, n_layers=2)),
    "mamba_in_turns": lambda: made(
        "mambapy.mamba.Mamba", made("mambapy.mamba.MambaConfig", WIDTH, n_layers=2, pscan=False)
    ),
    "colt5": lambda: Between(
        made(
            "colt5_attention.ConditionalRoutedFeedForward",
            WIDTH,
            num_heavy_tokens=2,
            light_ff_mult=0.5,
            heavy_ff_mult=2,
        )
    ),
    "liquid_cfc": lambda: Between(made("ncps.torch.CfC", WIDTH, WIDTH), lambda result: result[0]),
    "liquid_ltc": lambda: Between(
        made("ncps.torch.LTC", WIDTH, made("ncps.wirings.FullyConnected", WIDTH)), lambda result: result[0]
    ),
    "entmax15": lambda: Between(made("entmax.Entmax15", dim=-1)),
    "sparsemax": lambda: Between(made("entmax.Sparsemax", dim=-1)),
    "entmax_bisect": lambda: Between(made("entmax.EntmaxBisect", alpha=1.3, n_iter=20)),
    "ode_rk4": lambda: Between(OfTime("rk4", adjoint=False)),
    "ode_adjoint": lambda: Between(OfTime("rk4", adjoint=True)),
    "ode_adaptive": lambda: Between(OfTime("dopri5", adjoint=False)),
    "ema": lambda: Between(made("ema_pytorch.EMA", nn.Linear(WIDTH, WIDTH), update_every=1)),
    "orthogonal": lambda: Between(parametrized("orthogonal")),
    "low_rank": lambda: Between(parametrized("low_rank", rank=3)),
    "sphere": lambda: Between(parametrized("sphere")),
    "symmetric": lambda: Between(parametrized("symmetric")),
}


class OfTime(nn.Module):
    """A neural ordinary differential equation."""

    def __init__(self, method: str, adjoint: bool) -> None:
        super().__init__()
        self.rate = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.method, self.solver = method, "odeint_adjoint" if adjoint else "odeint"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        solve = getattr(importlib.import_module("torchdiffeq"), self.solver)
        times = torch.linspace(0, 1, 3, dtype=x.dtype)
        given = {"adjoint_params": tuple(self.rate.parameters())} if "adjoint" in self.solver else {}
        result: torch.Tensor = solve(lambda _, y: self.rate(y), x, times, method=self.method, **given)[-1]
        return result


def parametrized(name: str, **given: Any) -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    getattr(importlib.import_module("geotorch"), name)(layer, "weight", **given)
    return layer


def spiking(name: str, *args: Any, **given: Any) -> Builder:
    """Two layers of neurons over four times; their membranes are the modules' own, reset in each forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.neurons = made(f"snntorch.{name}", *args, init_hidden=True, **given)
            self.out = made("snntorch.Leaky", beta=0.8, init_hidden=True, output=True, learn_beta=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            importlib.import_module("snntorch.utils").reset(self)
            found = [self.out(self.last(self.neurons(self.first(x)).to(x)))[1] for _ in range(4)]
            return torch.stack(found).mean(0)

    return classifier(Net, WIDTH)


def stateful_spiking() -> nn.Module:
    """The membrane goes on from batch to batch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.neurons = made("snntorch.Leaky", beta=0.9, init_hidden=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.neurons.detach_hidden()
            result: torch.Tensor = self.last(self.neurons(self.first(x)).to(x))
            return result

    net = Net()
    net.double()(torch.zeros(2, WIDTH, dtype=torch.float64))  # as the documentation says: run it before
    return net


def flow(kind: str) -> nn.Module:
    transforms = importlib.import_module("nflows.transforms")
    layers: list[nn.Module] = []
    for k in range(2):
        if kind == "actnorm":
            layers += [transforms.ActNorm(WIDTH), transforms.LULinear(WIDTH)]
        elif kind == "batch_norm":
            layers += [transforms.BatchNorm(WIDTH), transforms.QRLinear(WIDTH, 4)]
        elif kind == "spline":
            layers.append(
                transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
                    WIDTH, 16, num_bins=4, tails="linear", tail_bound=3.0
                )
            )
        else:
            mask = torch.arange(WIDTH) % 2 == k
            net = partial(made, "nflows.nn.nets.ResidualNet", hidden_features=16, num_blocks=1)
            layers.append(transforms.AffineCouplingTransform(mask, net))
        layers.append(transforms.ReversePermutation(WIDTH))
    base = made("nflows.distributions.StandardNormal", [WIDTH])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.flow = made("nflows.flows.Flow", transforms.CompositeTransform(layers), base)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -self.flow.log_prob(self.first(x)).mean()

    return Net()


def tagger() -> Subject:
    """A conditional random field over the scores of tags."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.score = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, CLASSES)
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.crf = made("torchcrf.CRF", CLASSES, batch_first=True)

        def forward(self, x: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = self.score(self.rnn(self.embed(x))[0])
            return -self.crf(scores, tags, mask=mask, reduction="mean")

    def batch(rows: int) -> dict[str, torch.Tensor]:
        lengths = torch.randint(3, 7, (rows, 1))
        return {
            "x": torch.randint(VOCABULARY, (rows, 6)),
            "tags": torch.randint(CLASSES, (rows, 6)),
            "mask": torch.arange(6) < lengths,
        }

    return Subject(Net(), batch)


def points() -> Subject:
    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(VOCABULARY, (rows, 5)), torch.randn(rows, 5, 3)

    model = made(
        "egnn_pytorch.EGNN_Network", num_tokens=VOCABULARY, dim=WIDTH, depth=2, num_nearest_neighbors=2
    )
    return Subject(model, batch, leaves_loss)


def equivariant() -> nn.Module:
    """Tensor products, which e3nn writes as code and compiles with TorchScript."""
    irreps = "4x0e + 4x1o"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = made("e3nn.o3.Linear", irreps, irreps)
            self.square = made("e3nn.o3.FullyConnectedTensorProduct", irreps, irreps, irreps)
            self.last = made("e3nn.o3.Linear", irreps, irreps)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            result: torch.Tensor = self.last(self.square(x, x))
            return result

    return Net()


def segmentation(name: str, encoder: str = "resnet18") -> Builder:
    made_ = partial(made, f"segmentation_models_pytorch.{name}", encoder, encoder_weights=None, classes=2)
    return numbers(made_, (3, 64, 64))


def clip() -> Subject:
    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16}
    text = {"context_length": 8, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 2}
    model = made("open_clip.model.CLIP", 16, vision, text)

    def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 3, 32, 32), torch.randint(1, VOCABULARY, (rows, 8))

    return Subject(model, batch, leaves_loss)


def speech(name: str, *shapes: tuple[int, ...], **given: Any) -> Builder:
    return numbers(partial(made, f"torchaudio.models.{name}", **given), *shapes)


def diffusion() -> nn.Module:
    unet = made(
        "denoising_diffusion_pytorch.Unet", dim=8, dim_mults=(1, 2), flash_attn=False, attn_dim_head=8
    )
    return made("denoising_diffusion_pytorch.GaussianDiffusion", unet, image_size=16, timesteps=10)


def one_dimensional() -> Subject:
    unet = made("denoising_diffusion_pytorch.Unet1D", dim=8, dim_mults=(1, 2), channels=4)
    return Subject(unet, lambda rows: (torch.randn(rows, 4, 16), torch.randint(10, (rows,))), leaves_loss)


WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "performer_lm": (
        "performer_pytorch.PerformerLM",
        {"max_seq_len": 16, "heads": 2, "dim_head": 8, "tie_embed": True},
    ),
    "linformer_lm": ("linformer.LinformerLM", {"seq_len": 16, "heads": 2, "k": 4}),
    "reformer_lm": (
        "reformer_pytorch.ReformerLM",
        {"max_seq_len": 16, "heads": 2, "bucket_size": 4, "n_hashes": 2, "causal": True},
    ),
    "local_transformer": (
        "local_attention.LocalTransformer",
        {"max_seq_len": 16, "heads": 2, "dim_head": 8, "local_attn_window_size": 4, "use_xpos": True},
    ),
}
JAMBA = {
    "d_model": WIDTH,
    "n_layers": 2,
    "mlp_size": 32,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
PERCEIVER = {
    "num_freq_bands": 2,
    "depth": 2,
    "max_freq": 4.0,
    "input_channels": 3,
    "input_axis": 2,
    "num_latents": 4,
    "latent_dim": WIDTH,
    "cross_heads": 1,
    "latent_heads": 2,
    "cross_dim_head": 8,
    "latent_dim_head": 8,
    "num_classes": CLASSES,
    "weight_tie_layers": True,
}
TASNET = {
    "enc_num_feats": 16,
    "msk_num_feats": 8,
    "msk_num_hidden_feats": 8,
    "msk_num_layers": 2,
    "msk_num_stacks": 1,
}


def jamba() -> nn.Module:
    return made("mambapy.jamba.JambaLM", made("mambapy.jamba.JambaLMConfig", **JAMBA))


def tabnet(kind: str) -> nn.Module:
    groups = torch.eye(8)
    given = {"mask_type": kind, "group_attention_matrix": groups}
    return made("pytorch_tabnet.tab_network.TabNet", 8, CLASSES, 4, 4, 2, **given)


def with_own_swish() -> nn.Module:
    given = {"num_classes": CLASSES, "image_size": 32, "drop_connect_rate": 0.0, "dropout_rate": 0.0}
    net = importlib.import_module("efficientnet_pytorch").EfficientNet
    found: nn.Module = net.from_name("efficientnet-b0", **given)
    return found


def cases() -> dict[str, Builder]:
    found = {name: quantizer(kind, **given) for name, (kind, given) in QUANTIZERS.items()}
    found |= {name: numbers(build, (6, WIDTH)) for name, build in SEQUENCES.items()}
    for name, (path, given) in WORDS.items():
        model = partial(made, path, num_tokens=VOCABULARY, dim=WIDTH, depth=2, **given)
        found[name] = words(model, length=16)
    for kind in ("actnorm", "batch_norm", "spline", "coupling"):
        found[f"flow_{kind}"] = numbers(partial(flow, kind), (WIDTH,), loss=None)
    return found | {
        "jamba": words(jamba),
        "perceiver": numbers(partial(made, "perceiver_pytorch.Perceiver", **PERCEIVER), (8, 8, 3)),
        "spiking_leaky": spiking("Leaky", beta=0.9, learn_threshold=True),
        "spiking_synaptic": spiking("Synaptic", alpha=0.9, beta=0.8),
        "spiking_lapicque": spiking("Lapicque", beta=0.8),
        "spiking_alpha": spiking("Alpha", alpha=0.9, beta=0.8),
        "spiking_lstm": spiking("SLSTM", WIDTH, WIDTH),
        "spiking_goes_on": numbers(stateful_spiking, (WIDTH,)),
        "crf": tagger,
        "egnn": points,
        "e3nn": numbers(equivariant, (16,)),
        "clip": clip,
        "tabnet": numbers(partial(tabnet, "sparsemax"), (8,)),
        "tabnet_entmax": numbers(partial(tabnet, "entmax"), (8,)),
        "efficientnet_swish": classifier(with_own_swish, 3, 32, 32),
        "diffusion": numbers(diffusion, (3, 16, 16), loss=None),
        "unet_1d": one_dimensional,
        "smp_unet": segmentation("Unet"),
        "smp_unet_plus_plus": segmentation("UnetPlusPlus"),
        "smp_fpn": segmentation("FPN"),
        "smp_linknet": segmentation("Linknet"),
        "smp_deeplab": segmentation("DeepLabV3Plus"),
        "smp_segformer": segmentation("Segformer"),
        "speech_conv_tasnet": speech("ConvTasNet", (1, 256), **TASNET),
        "speech_deepspeech": speech("DeepSpeech", (1, 6, 8), n_feature=8, n_hidden=16, n_class=CLASSES),
        "speech_wav2letter": speech(
            "Wav2Letter", (4, 64), num_classes=CLASSES, input_type="mfcc", num_features=4
        ),
    }
