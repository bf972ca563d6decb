"""Forward values made again in the backward: the same bits, less memory, and the choice of how much."""

from __future__ import annotations

from functools import cache

import models
import pytest
import torch
from models import MODELS, own_loss
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from zoo import EFFORT, captured_once, eager

import fxpipe
from fxpipe.errors import OptionError
from fxpipe.ir.ops import node_flops
from fxpipe.passes.rewrite import clone_into
from fxpipe.schedule.ops import Color, Phase

pytestmark = pytest.mark.slow

MICROBATCHES = 4


@cache
def built(name: str) -> nn.Module:
    return MODELS[name].build()


def compiled(model: nn.Module, name: str, schedule: str, recompute: str | bool, **options) -> fxpipe.Pipeline:
    with captured_once(model, name, MICROBATCHES):
        return fxpipe.compile(
            model,
            MODELS[name].example(),
            ranks=2,
            microbatches=MICROBATCHES,
            schedule=schedule,
            recompute=recompute,
            effort=EFFORT,
            **options,
        )


@pytest.mark.parametrize(
    ("name", "schedule", "vocab_parallel"),
    [
        ("llama", "1f1b", False),
        pytest.param("gpt2", "zb-h1", "1-barrier", marks=pytest.mark.variation),
        pytest.param("mixtral", "zb-v", False, marks=pytest.mark.variation),
        pytest.param("t5", "interleaved", False, marks=pytest.mark.variation),
    ],
)
def test_the_same_gradients_from_less_memory(name, schedule, vocab_parallel):
    model, batch = built(name), MODELS[name].data(MICROBATCHES)
    plain = compiled(model, name, schedule, False, vocab_parallel=vocab_parallel)
    expected = plain.run_local(batch)
    most = max(plain.simulate().peak_memory)
    for level, share_saved, share_of_peak in (("norms", 0.8, 0.85), ("full", 0.25, 0.5)):
        again = compiled(model, name, schedule, level, vocab_parallel=vocab_parallel)
        found = again.run_local(batch, measure_memory=True)
        assert torch.equal(found.loss, expected.loss), level
        for key, grad in expected.grads.items():
            atol = 1e-7 * float(grad.abs().max())
            assert torch.allclose(found.grads[key], grad, rtol=1e-6, atol=atol), (level, key)
        saved = [sum(cost.saved_activations for cost in pipe.plan.costs.stages) for pipe in (plain, again)]
        assert saved[1] <= share_saved * saved[0], level
        for measured, simulated in zip(found.peak_saved, again.simulate().peak_memory, strict=True):
            assert measured == pytest.approx(simulated, abs=0.05 * most), level
        if schedule in ("1f1b", "interleaved"):  # where W follows its B at once
            assert max(again.simulate().peak_memory) < share_of_peak * most, level


def with_dropout() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**small())).train()


def small() -> dict[str, int]:
    return {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": models.VOCABULARY, "n_positions": 32}


def test_dropout_made_again_drops_the_same():
    model = with_dropout()
    batch = MODELS["gpt2"].data(MICROBATCHES)
    plain, again = (compiled(model, "gpt2", "zb-h1", level) for level in (False, "full"))
    expected, found = plain.run_local(batch, step=3), again.run_local(batch, step=3)
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(found.grads[name], grad) for name, grad in expected.grads.items())
    assert not torch.equal(expected.loss, eager(model.eval(), batch, MICROBATCHES, own_loss).loss)


@pytest.mark.variation
def test_w_gets_a_product_instead_of_its_factors():
    """B needs the factors alone, of which an activation is the product: gelu, and SwiGLU."""
    for name in ("gpt2", "llama"):
        costs = compiled(built(name), name, "zb-h1", "norms").plan.costs.stages
        plain = compiled(built(name), name, "zb-h1", False).plan.costs.stages
        # What F has saved for W before, B makes again: no more bytes.
        ours, theirs = (sum(cost.saved_for_weight for cost in each) for each in (costs, plain))
        assert ours <= theirs, name


@pytest.mark.variation
def test_norms_repeat_no_matrix_product():
    def products(level: str | bool) -> int:
        sections = compiled(built("llama"), "llama", "zb-h1", level).sections
        behind = [n for s in sections if s.phase is not Phase.F for n in s.graph.nodes]
        return sum(node_flops(n) for n in behind if n.op == "call_function")

    assert products("norms") == products(False)
    assert products("full") > products(False)


def test_auto_makes_again_as_much_as_the_limit_asks_for():
    """Nothing where there is room, something where there is not, and what was tried can be read."""
    model = with_dropout()

    def chosen(limit: float | None) -> fxpipe.Pipeline:
        return compiled(model, "gpt2", "auto", "auto", memory_limit=limit)

    roomy = chosen(None)
    assert {attempt.recompute for attempt in roomy.plan.tried} == {roomy.plan.recompute} == {""}
    weights = max(
        sum(roomy.parameters[n].nbytes for n in (*held.parameters, *held.gradients))
        for held in roomy.plan.tensors
    )
    tight = chosen(weights + 0.35 * max(roomy.simulate().peak_memory))
    assert tight.plan.recompute in ("norms", "full")
    assert tight.simulate().seconds > roomy.simulate().seconds
    assert {attempt.recompute for attempt in tight.plan.tried} == {"", "norms", "full"}
    named = compiled(model, "gpt2", "1f1b", "auto")
    assert named.plan.recompute == ""


def test_an_unknown_level():
    with pytest.raises(OptionError, match="recompute is 'some' and must be 'norms', 'full', 'auto' or False"):
        compiled(built("gpt2"), "gpt2", "1f1b", "some")


def test_the_way_of_a_deep_model_is_made_again():
    """It has more ops than Python's limit of calls."""
    graph = torch.fx.Graph()
    last = graph.placeholder("x")
    last.meta["color"] = Color(0, Phase.F)
    ops = []
    for _ in range(1500):
        last = graph.call_function(torch.tanh, (last,))
        last.meta["color"] = Color(0, Phase.F)
        ops.append(last)
    end = graph.output(last)
    clones = {}
    made = clone_into(last, Color(0, Phase.W), end, clones, {*ops}, {*ops[:500]})
    assert made is clones[Color(0, Phase.W), last]
    phases = [Phase.B] * 500 + [Phase.W] * 1000
    copies = [clones[Color(0, phase), op] for phase, op in zip(phases, ops, strict=True)]
    assert [n.args[0] for n in copies[1:]] == copies[:-1]
    assert [n.meta["color"].phase for n in copies] == phases
    assert [*graph.nodes][1501:-1] == copies
