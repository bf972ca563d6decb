"""Rules that give compiled sections other kernels: what the plan tells of them, and what leaves them out."""

from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import fxpipe
import fxpipe.ir.compiled
from fxpipe.ir.storage import call_nodes
from fxpipe.passes.rewrite import kept_bytes
from fxpipe.plan.rewrites import ASKED, RULES, Rewrite
from fxpipe.viz.explanation import explain

WIDTH = 16


class Layer(nn.Module):
    """A norm, with a scale whose gradient is a sum of products, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
        up = self.up(normed)
        y: torch.Tensor = self.down(up * up.tanh().exp())
        return x + y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y.square().mean()


def compiled(**options: Any) -> fxpipe.Pipeline:
    given = {"ranks": 1, "microbatches": 2, "schedule": "zb-h1", "backend": "inductor"} | options
    return fxpipe.compile(Net(), {"x": torch.randn(8, WIDTH)}, **given)


def of(pipe: fxpipe.Pipeline) -> dict[str, Rewrite]:
    return {rewrite.rule: rewrite for rewrite in pipe.plan.rewrites}


def told(pipe: fxpipe.Pipeline) -> str:
    with (console := Console(width=200)).capture() as shown:
        explain(pipe.plan, console)
    return shown.get()


@pytest.fixture(autouse=True)
def small_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of any size are worth a compiled function."""
    monkeypatch.setattr(fxpipe.ir.compiled, "LEAST", 1)


def test_a_plan_tells_what_the_backward_repeats() -> None:
    on, off = compiled(), compiled(without=["repeat-in-kernels"])
    repeated = of(on)["repeat-in-kernels"]
    assert "repeat-in-kernels" not in of(off)
    assert repeated.ops > 2
    assert on.graph is not None
    assert off.graph is not None
    assert repeated.bytes == kept_bytes(off.graph) - kept_bytes(on.graph) > 0
    kept = [pipe.plan.costs.stages[0].saved_activations for pipe in (on, off)]
    assert kept[0] < kept[1]
    assert f"repeat-in-kernels: {repeated.ops} ops of the forward, again in kernels" in told(on)
    assert len(call_nodes(on.graph)) > len(call_nodes(off.graph))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.words(ids).tanh()).flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), ids.flatten())


def test_a_split_vocabulary_repeats_its_exponentials() -> None:
    """Its backward reads logits of 16 bits, and not what the forward makes of them in 32."""
    ids, options = torch.arange(32).view(2, 16), {"backend": "inductor", "vocab_parallel": "1-barrier"}
    on, off = (
        fxpipe.compile(
            Words().bfloat16(),
            {"ids": ids},
            ranks=2,
            microbatches=4,
            schedule="1f1b",
            without=rules,
            **options,
        )
        for rules in ((), ("repeat-in-kernels",))
    )
    assert on.graph is not None
    repeated = [n for n in call_nodes(on.graph) if n.meta.get("fused")]
    assert repeated
    shards = on.plan.ranks
    kept = [[stage.saved_activations for stage in pipe.plan.costs.stages[-shards:]] for pipe in (on, off)]
    assert all(a < b for a, b in zip(*kept, strict=True))


def test_a_plan_tells_what_of_the_weight_gradients_is_compiled() -> None:
    on, off = compiled(), compiled(without=["compiled-weights"])
    compiled_ops = of(on)["compiled-weights"]
    assert "compiled-weights" not in of(off)
    # Of each layer the gradient of the norm's scale, and what of the normed input it needs.
    assert compiled_ops.ops >= 2 * 2
    faster = off.plan.costs.stages[0].weight - on.plan.costs.stages[0].weight
    assert compiled_ops.seconds == pytest.approx(faster)
    assert faster > 0
    assert f"compiled-weights: {compiled_ops.ops} ops between additions to gradients" in told(on)
    functions = [pipe.artifact.programs[0].count("@inductor") for pipe in (on, off)]
    assert functions[0] > functions[1] >= 2  # F and B


def test_op_by_op_no_rule_of_kernels_is_applied() -> None:
    assert not compiled(backend="eager").plan.rewrites


def test_saved_plans_keep_them(tmp_path: Any) -> None:
    pipe = compiled()
    pipe.save(tmp_path / "saved")
    assert fxpipe.load(tmp_path / "saved").plan.rewrites == pipe.plan.rewrites


def test_each_rule_can_be_left_out() -> None:
    """By its name, or by the option that asks for it."""
    assert ASKED.keys() < RULES.keys()
    assert compiled(without=[rule for rule in RULES if rule not in ASKED]).plan.rewrites == ()


class Dropped(nn.Module):
    """Attention with dropout, which a CPU computes by single ops, and dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()[:, None]
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.25)[:, 0]
        return F.dropout(self.last(y), 0.5).square().mean()


@pytest.mark.variation
def test_dropout_keeps_truth_values() -> None:
    """A byte for each element instead of four; the numbers are those that are drawn without the rule."""
    length = 128
    batch = {"x": torch.randn(4, length, WIDTH)}
    example = {"x": batch["x"][:2]}
    options: dict[str, Any] = {"ranks": 1, "microbatches": 2, "schedule": "gpipe", "backend": "inductor"}
    on, off = (
        fxpipe.compile(Dropped(), example, **options, without=without)
        for without in ((), ["repeat-in-kernels"])
    )
    results = [pipe.run_local(batch, measure_memory=True) for pipe in (on, off)]
    for name, grad in results[0].grads.items():
        torch.testing.assert_close(grad, results[1].grads[name])
    drawn = 2 * length * (length + WIDTH)  # in a microbatch
    assert kept_bytes(off.graph) - kept_bytes(on.graph) >= 3 * drawn
    assert results[1].peak_saved[0] - results[0].peak_saved[0] >= 2 * 3 * drawn
    assert on.check().holds
