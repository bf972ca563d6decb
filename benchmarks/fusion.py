"""The kernels of compiled sections as costs count them, beside those that Inductor's scheduler makes of the
same functions: their number, and the bytes that they read and write.

Inductor schedules for a GPU that need not be here, and stops before it generates code: nothing runs.

    python benchmarks/fusion.py [--recompute norms] [--output FILE] [model ...]
"""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from prediction_models import Images
from report import Report
from torch import fx, nn
from torch._inductor import compile_fx, scheduler
from torch._inductor.fx_passes import post_grad
from torch._inductor.runtime.hints import DeviceProperties
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import fxpipe
from fxpipe.cost.fusion import kernels_of
from fxpipe.cost.nodes import bytes_moved, is_free
from fxpipe.ir.storage import call_nodes, is_view
from fxpipe.passes.rewrite import kept_bytes
from fxpipe.runtime.torch_private import decompositions, fake_tensors
from fxpipe.schedule.ops import Phase

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, ROWS = 3, 256, 4, 128, 1000, 2
H200 = {"multi_processor_count": 132, "cc": 90, "major": 9, "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048, "warp_size": 32}  # fmt: skip


def words() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (ROWS, SEQUENCE))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> tuple[nn.Module, Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, vocab_size=VOCABULARY, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return GPT2LMHeadModel(config), words(), None


def llama() -> tuple[nn.Module, Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, num_key_value_heads=HEADS // 2,
                         vocab_size=VOCABULARY)  # fmt: skip
    return LlamaForCausalLM(config), words(), None


def t5_encoder() -> tuple[nn.Module, Any, Any]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=4 * HIDDEN, num_layers=LAYERS,
                      num_heads=HEADS, vocab_size=VOCABULARY, dropout_rate=0.0)  # fmt: skip
    example = {"input_ids": words()["input_ids"]}
    return T5EncoderModel(config), example, lambda output, batch: output.last_hidden_state.square().mean()


def vit() -> tuple[nn.Module, Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                       intermediate_size=4 * HIDDEN, image_size=64, patch_size=8, num_labels=10,
                       hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    example = {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(10, (ROWS,))}
    return ViTForImageClassification(config), example, None


def convolutions() -> tuple[nn.Module, Any, Any]:
    return Images(), {"images": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}, None


MODELS: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "T5's encoder": t5_encoder,
    "ViT": vit,
    "residual convolutions": convolutions,
}


class _Scheduled(BaseException):
    """Inductor has made its kernels."""


def scheduled(graph: fx.Graph) -> tuple[int, int]:
    """The fused kernels that Inductor makes of a section on a GPU, and the bytes that they move."""
    gpu = torch.device("cuda", 0)
    found: list[int] = []
    apart = scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode

    def stop(made: Any) -> None:
        fused = [node for node in made.nodes if not isinstance(node, apart)]
        found.extend((len(fused), sum(node.get_read_write_buffers_sizes() for node in fused)))
        raise _Scheduled

    def like(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        layout = tensor.shape, tensor.stride()
        return torch.empty_strided(*layout, dtype=tensor.dtype, device=device or tensor.device)

    known = SimpleNamespace(name="NVIDIA H200", gcnArchName="", **H200)
    properties = DeviceProperties(type="cuda", index=0, **H200)
    absent: list[tuple[Any, str, Any]] = [
        (torch._C, "_conv_determine_backend_memory_format", lambda *_: torch.contiguous_format),
        (torch._C, "_select_conv_backend", lambda *_, **__: torch._C._ConvBackend.Cudnn),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "get_device_properties", lambda *_: known),
        (DeviceProperties, "create", classmethod(lambda *_: properties)),
        (compile_fx.dynamo_utils, "preserve_rng_state", contextlib.nullcontext),
        (post_grad, "reinplace_inplaceable_ops", lambda *_: None),
        (scheduler, "has_triton", lambda *_: True),
        (scheduler.Scheduler, "codegen", stop),
    ]
    with contextlib.ExitStack() as stack:
        for each in absent:
            stack.enter_context(mock.patch.object(*each))
        with fake_tensors() as mode:
            # Traced where the model is: some decompositions fail on a GPU that is not here.
            here = [like(node.meta["val"]) for node in graph.find_nodes(op="placeholder")]
            traced = make_fx(fx.GraphModule(nn.Module(), graph), decomposition_table=decompositions())(*here)
            for node in traced.graph.nodes:
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": gpu}
            inputs = [like(tensor, gpu) for tensor in here]
            FakeTensorProp(traced, mode).propagate(*inputs)
        with contextlib.suppress(_Scheduled):
            compile_fx.compile_fx_inner(traced, inputs)
    number, moved = found
    return number, moved


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="all by default")
    parser.add_argument("--recompute", choices=["norms", "full"], default=False)
    parser.add_argument("--output", type=Path, help="keep what is printed in this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    report = Report(
        "Fused kernels of compiled sections, counted by costs and made by Inductor (for an H200, float32)"
    )
    report.line(
        "\nops: that are no views and no library's kernels, and the MB that they read and write one by one; "
        "then kernels and MB as costs have them, and as Inductor does"
    )
    rows = []
    for name in options.models or MODELS:
        model, example, loss = MODELS[name]()
        pipe = fxpipe.compile(model, example, loss_fn=loss, ranks=1, microbatches=2, schedule="zb-h1",
                              backend="inductor", recompute=options.recompute, check=False)  # fmt: skip
        assert pipe.sections is not None
        assert pipe.graph is not None
        report.line(f"{name}: F keeps {kept_bytes(pipe.graph) / 1e6:.1f} MB for B and W")
        for section in pipe.sections:
            if section.phase is Phase.W:
                continue
            nodes = call_nodes(section.graph)
            library, fused = kernels_of(nodes, section.phase, {*Phase})
            ops = [n for n in nodes if not (is_view(n) or is_free(n) or n in library)]
            made, moved = scheduled(section.graph)
            costs = sum(kernel.bytes_moved() for kernel in fused)
            one_by_one = sum(map(bytes_moved, ops))
            row = [f"{len(ops)}", f"{one_by_one / 1e6:.1f}", f"{len(fused)}", f"{costs / 1e6:.1f}"]
            row += [f"{made}", f"{moved / 1e6:.1f}", f"{costs / moved:.2f}"]
            rows.append([f"{name}, {section.phase.name}", *row])
    report.table(["", "ops", "MB", "kernels", "MB", "Inductor's", "MB", "MB ÷ MB"], rows)
    report.save(options.output)


if __name__ == "__main__":
    main()
