"""The memory of each rank in figures, and pipelines and results in a few lines."""

import io
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from zoo import Chain, NoLoss, numbers

import fxpipe
from fxpipe.plan.lanes import LaneAxis, LanePlan
from fxpipe.plan.memory import rank_memory
from fxpipe.viz.explanation import explain
from fxpipe.viz.summary import summary

MICROBATCHES, LIMIT = 4, 16_000


def compiled(model, **options):
    given = {"ranks": 2, "microbatches": MICROBATCHES, "schedule": "1f1b", "check": False, **options}
    return fxpipe.compile(model, numbers(2), **given)


@pytest.fixture(scope="module")
def limited():
    return compiled(Chain(2), memory_limit="100 kB")


@pytest.fixture(scope="module")
def free():
    return compiled(Chain(2))


def text_of(pipe):
    out = io.StringIO()
    explain(pipe.plan, Console(file=out, width=80, markup=False))
    return out.getvalue()


def test_what_each_rank_holds():
    model = NoLoss(4).to(torch.bfloat16)
    batch = {name: x.bfloat16() for name, x in numbers(2).items()}
    pipe = fxpipe.compile(
        model, batch, ranks=2, microbatches=MICROBATCHES, schedule="1f1b", check=False, outputs=["last"],
        grad_dtype=torch.float32, loss_fn=lambda output, _: output["last"].float().square().mean(),
    )  # fmt: skip
    memory = rank_memory(pipe.plan, pipe.simulate().peak_memory)
    elements = sum(p.numel() for p in model.parameters())
    assert sum(own.fixed.parameters for own in memory) == 2 * elements
    assert sum(own.fixed.gradients for own in memory) == 4 * elements
    assert sum(own.adamw for own in memory) == 2 * 2 * elements
    assert [own.other for own in memory] == [0, MICROBATCHES * 2 * 8 * 2]
    assert [own.activations for own in memory] == list(pipe.simulate().peak_memory)
    assert all(
        own.peak == own.fixed.parameters + own.fixed.gradients + own.other + own.activations for own in memory
    )


def test_the_limit_leaves_the_rest_to_activations():
    pipe = compiled(Chain(2), memory_limit="100 kB", validation="post", optimizer_bytes=12)
    memory = rank_memory(pipe.plan, pipe.simulate().peak_memory)
    assert pipe.plan.limits == tuple(100_000 - own.fixed.total for own in memory)
    trained = [own.fixed.parameters for own in memory]
    assert [own.fixed.optimizer for own in memory] == [3 * own for own in trained]
    assert [own.fixed.copies for own in memory] == [3 * own for own in trained]  # with AdamW's state
    assert [own.adamw for own in memory] == [0, 0]  # counted already


@pytest.mark.parametrize(
    ("shard", "parameters"), [(None, 1), ("optimizer", 1), ("gradients", 1), ("parameters", 1.5)]
)
def test_what_replicas_hold_in_a_step(shard, parameters):
    """Of two, in shares of what one alone holds: with ZeRO-3 its own rows beside all that it gathers."""
    pipe = compiled(Chain(2), replicas=2, shard=shard)
    whole = sum(pipe.plan.layouts[name].nbytes for name in pipe.plan.tensors[0].parameters)
    held = rank_memory(pipe.plan, pipe.simulate().peak_memory)[0].fixed
    assert (held.parameters, held.gradients) == (parameters * whole, whole)
    assert held.exchange == whole  # of the stage's one bucket


def test_parameters_that_are_gathered_for_each_use():
    pipe = compiled(
        Chain(8), replicas=2, shard="parameters", schedule="interleaved", stages_per_rank=4,
        split_points=[f"blocks.{k}" for k in range(1, 8)], memory_limit=LIMIT,
    )  # fmt: skip
    assert any(exchange.per_use for exchange in pipe.plan.costs.exchanges)
    stages = [sum(pipe.plan.layouts[n].nbytes for n in stage.parameters) for stage in pipe.plan.stages]
    for rank, own in enumerate(rank_memory(pipe.plan, pipe.simulate().peak_memory)):
        of_rank = sorted(stages[rank::2])
        assert own.fixed.parameters == own.fixed.gradients == sum(of_rank) // 2 + sum(of_rank[-2:])
        assert own.fixed.exchange == of_rank[-1]
        assert own.peak <= LIMIT


def test_explain_speaks_of_a_limit_where_there_is_one(limited, free, tmp_path):
    limited.save(tmp_path / "saved")
    for pipe in (limited, fxpipe.load(tmp_path / "saved")):
        text = " ".join(text_of(pipe).split())
        assert "within the memory limit" in text
        assert "The memory limit is 100 kB on each rank." in text
        assert " kB " in text  # in the user's units
        assert "KiB" not in text
    assert "limit" not in text_of(free)
    assert " KiB " in text_of(free)


def test_percentages_agree():
    """In the reason and in the table, which fits a terminal."""
    text = text_of(compiled(Chain(4), schedule="auto", effort=0.1))
    rows = {line: re.split(r"\s{2,}", line.strip()) for line in text.splitlines()}
    rows = {line: row for line, row in rows.items() if len(row) == 5}
    times = [longer for _, step, longer, *_ in rows.values() if step.endswith("s")]
    assert times[0] == "0.0%"
    assert f"is the shortest; the next one takes {times[1]} longer" in " ".join(text.split())
    assert max(map(len, rows)) <= 80


def test_a_pipeline_in_a_few_lines(limited, free):
    lines = repr(limited).splitlines()
    assert len(lines) <= 10
    assert lines[0] == "Pipeline of Chain on 2 ranks: 2 stages, 4 microbatches, schedule 1f1b"
    assert "limit 100 kB" in repr(limited)
    assert "limit" not in repr(free)
    assert all(len(repr(stage)) < 200 for stage in free.stages)
    for found in (free.schedule, free.simulate(), free.simulate_steps(3)):
        assert len(repr(found)) < 300
    assert repr(free.plan) == "<Plan of Chain: 2 ranks, 4 microbatches, 2 stages, schedule 1f1b>"
    mesh = replace(free.plan, replicas=3, shard="optimizer", lanes=LanePlan((LaneAxis(2),)))
    assert summary(mesh)[0].startswith("Chain on 2 ranks of 2 lanes, 3 replicas, shard optimizer: 2 stages")
    html = free._repr_html_()
    assert html.count("<tr>") == 3
    assert "Chain on 2 ranks" in html


def test_results_in_a_few_lines(free):
    result = free.run_local(numbers(2 * MICROBATCHES), measure_memory=True)
    assert repr(result).startswith(f"LocalResult(loss={float(result.loss):.6g}, grads of ")
    assert len(repr(result)) < 200
    step = fxpipe.StepResult(None, {f"x{k}": torch.zeros(100, 100) for k in range(20)})
    assert repr(step).endswith("x7: (100, 100) torch.float32, … 12 more)")


def test_names_for_completion(free):
    assert {"step", "run_local", "save", "parameters", "stages"} <= set(dir(free))
    assert not {"artifact", "of", "let_model_go", "process"} & set(dir(free))
    assert dir(fxpipe) == sorted(fxpipe.__all__)
