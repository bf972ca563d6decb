"""Programs whose sections Inductor compiles.

Most tests run the traced graphs op by op, where every bit is the eager program's.  One runs Inductor itself:
a C++ compiler takes seconds for each section.  ``benchmarks/inductor_models.py`` runs it on the whole zoo.
"""

import os
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import inductor_worker as worker
import pytest
import torch
import torch.nn.functional as F
from inductor_worker import MICROBATCHES, REAL
from launch import forked
from marks import with_variations
from safetensors.torch import load_file
from tensor_parallel import Words, batch, parallelized
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from zoo import (
    CASES,
    LENGTH,
    WIDTH,
    WORDS,
    Block,
    Case,
    Chain,
    Shape,
    TiedHead,
    captured_once,
    compiled,
    numbers,
    relative_error,
    tokens,
    too_far,
)

import fxpipe
import fxpipe.compiler.passes
import fxpipe.ir.compiled
import fxpipe.ir.liveness
import fxpipe.runtime.program.inductor
from fxpipe.errors import OptionError, RunError
from fxpipe.ir.compiled import is_compiled
from fxpipe.ir.graph import Section
from fxpipe.ir.nodes import call_targets
from fxpipe.ir.ops import is_between_lanes
from fxpipe.ir.storage import call_nodes, written
from fxpipe.runtime.program.checks import expect
from fxpipe.runtime.program.inductor import compiled_functions, inductor, keep_kernels
from fxpipe.runtime.program.random import keyed
from fxpipe.runtime.program.within import within
from fxpipe.runtime.ranks.dry_run import dry_run
from fxpipe.runtime.ranks.local import LocalComm, LocalWorld
from fxpipe.runtime.ranks.tracked_memory import SavedBytes
from fxpipe.runtime.torch_private import decompositions, fake_tensors
from fxpipe.schedule.ops import Color, Phase
from fxpipe.training.model.accumulators import zero_gradients

aten = torch.ops.aten

pytestmark = pytest.mark.slow


class Interpreted:
    """In the place of Inductor: runs traced graphs op by op.  ``graphs``: that were compiled."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []

    @property
    def number(self) -> int:
        return len(self.graphs)

    def __call__(self, traced: torch.fx.GraphModule, inputs: object) -> Callable[[list[torch.Tensor]], Any]:
        self.graphs.append(traced.graph)

        def run(given: list[torch.Tensor]) -> Any:
            return torch.fx.Interpreter(traced).boxed_run(given)

        return run


@pytest.fixture
def interpreted(monkeypatch) -> Interpreted:
    found = Interpreted()
    monkeypatch.setattr(fxpipe.runtime.program.inductor, "compile_by_inductor", found)
    monkeypatch.setattr(fxpipe.runtime.program.inductor, "decompositions", dict)
    return found


class Checked(Chain):
    """Branches on the data, which each microbatch is checked for."""

    def between(self, x, i):
        return x * 2 if i == 2 and (x.abs() < 100).all() else x


class Noisy(Chain):
    """Draws random numbers twice in each layer."""

    def between(self, x, i):
        return F.dropout(x + 0.1 * torch.randn_like(x), 0.3)


class Untied(TiedHead):
    """Of a tied weight gradients add up in an order that depends on costs."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = torch.nn.Parameter(self.head.weight.detach().clone())


# -- the same numbers ---------------------------------------------------------------------------------------

SAME = {
    # Of six blocks: layers that repeat are written once.
    "plain": (Case(lambda: Chain(6), numbers), Shape(2, "zb-h1")),
    "dropout": (worker.DROPOUT, Shape(2, "zb-h1", seed=3)),
    "dropout, recomputed": (worker.DROPOUT, Shape(2, "1f1b", recompute="full")),
    "offload": (CASES["sum_and_count"], Shape(2, "gpipe", offload=True)),
    "batch_norm": (CASES["batch_norm"], Shape(2, "1f1b")),
    "vocabulary": (Case(Untied, tokens), Shape(2, "zb-h1", vocab_parallel="2-barrier")),
    "views as messages": (CASES["transposed"], Shape(2, "1f1b")),
    "checked": (Case(lambda: Checked(6), numbers), Shape(2, "1f1b")),
    "forward": (worker.DROPOUT, Shape(2, "gpipe", gradients=False)),
}


def both(case: Case, shape: Shape) -> tuple[fxpipe.Pipeline, fxpipe.Pipeline]:
    """Pipelines of two equal models: run op by op, and compiled."""
    with captured_once(case, MICROBATCHES):
        models = (replace(shape, backend=backend) for backend in ("eager", "inductor"))
        eager, pipe = (compiled(case, case.build(), MICROBATCHES, each) for each in models)
        return eager, pipe


@pytest.mark.in_ci("views as messages")
@pytest.mark.parametrize("name", with_variations(SAME, ("plain", "dropout", "offload", "forward")))
def test_the_traced_graphs_compute_the_same_bits(name, interpreted, monkeypatch):
    """Loss, gradients, buffers and saved bytes of two steps, each function compiled once."""
    monkeypatch.setattr(fxpipe.ir.liveness, "SMALLEST", 1)
    # By the same costs both are cut at the same places.
    monkeypatch.setattr(fxpipe.compiler.passes, "seconds_of_ops", lambda graph, seconds, compiled: seconds)
    eager, pipe = both(*SAME[name])
    programs = pipe._runner._local_programs
    batch = SAME[name][0].data(MICROBATCHES)
    for step in (0, 1):
        expected, found = (each.run_local(batch, step=step, measure_memory=True) for each in (eager, pipe))
        assert torch.equal(found.loss, expected.loss)
        assert too_far(found.grads, expected.grads, 0.0) == {}
        assert too_far(pipe.buffers, eager.buffers, 0.0) == {}
        # Kernels repeat what a split head would keep.
        assert all(a <= b for a, b in zip(found.peak_saved, expected.peak_saved, strict=True))
    assert interpreted.number == sum(len(compiled_functions(program.step)) for program in programs) > 0


@pytest.mark.variation
def test_ops_between_lanes_stay_in_the_order_of_the_program(interpreted):
    """Each function is compiled in pieces between them; no piece has one."""
    found = []
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model = Words(dropout=0.25)
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        with fxpipe.local_lanes(2) as mesh, parallelized(model, mesh, "sequence"):
            pipe = fxpipe.compile(model, batch(2), ranks=2, microbatches=2, schedule="zb-h1", backend=backend)
        pipe.load_state_dict(whole)
        found.append(pipe.run_local(batch(4), measure_memory=True))
    eager, compiled = found
    assert torch.equal(compiled.loss, eager.loss)
    assert too_far(compiled.grads, eager.grads, 0.0) == {}
    # What dropout draws is kept as truth values.
    assert all(a <= b for a, b in zip(compiled.peak_saved, eager.peak_saved, strict=True))
    assert interpreted.number > sum(len(compiled_functions(p.step)) for p in pipe._runner._local_programs) > 0
    assert not any(is_between_lanes(n.target) for graph in interpreted.graphs for n in graph.nodes)


@pytest.mark.usefixtures("double")
def test_inductor_itself(tmp_path):
    """The eager numbers up to rounding, with the same dropout; ranks compute the bits of one process.

    All graphs can be kept in Inductor's cache, where later processes find them.
    """
    from torch._dynamo.utils import counters

    case, shape = REAL
    eager, pipe = both(case, shape)
    batch = case.data(MICROBATCHES)
    uncached = counters["inductor"]["fxgraph_cache_bypass"]
    results = [pipe.run_local(batch, step=step) for step in (0, 1)]
    for step, found in enumerate(results):
        expected = eager.run_local(batch, step=step)
        assert relative_error(found.loss, expected.loss) <= 1e-13
        assert too_far(found.grads, expected.grads, 1e-13) == {}
    assert counters["inductor"]["fxgraph_cache_bypass"] == uncached
    run = forked(2, worker.main, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    for step, result in enumerate(results):
        expected = {"loss": result.loss} | result.grads
        found = [load_file(tmp_path / f"{step}.{rank}.safetensors") for rank in range(2)]
        assert {name for rank in found for name in rank} == expected.keys()
        assert [n for rank in found for n, t in rank.items() if not torch.equal(t, expected[n])] == []
    assert [(tmp_path / f"anew.{rank}").read_text() for rank in range(2)] == ["0", "0"]
    own, others = ((tmp_path / f"error.{rank}").read_text() for rank in (1, 0))
    assert own.startswith("Inductor cannot compile blocks_forward (OSError: no compiler). ")
    assert others == f"Rank 1 could not run its program alone: {own}"


def test_kernels_are_kept_in_a_folder_of_the_user(tmp_path, monkeypatch):
    """Not below /tmp, unless there is no other; a folder that the user names stays."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    keep_kernels()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_kernels()
    (folder,) = tmp_path.glob("fxpipe/inductor/*")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "chosen")
    keep_kernels()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "chosen"


def test_the_folder_that_torch_writes_to_the_environment_is_no_choice(tmp_path, monkeypatch):
    """As an import of transformers does it, through that of Inductor."""
    from torch._inductor.runtime import cache_dir_utils

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    torch_own = cache_dir_utils.cache_dir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == torch_own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_kernels()
    (folder,) = tmp_path.glob("fxpipe/inductor/*")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)


# -- programs -----------------------------------------------------------------------------------------------


def functions(program: str) -> dict[str, bool]:
    """The functions of a program, and whether Inductor compiles them."""
    lines = program.splitlines()
    found = [k for k, line in enumerate(lines) if line.startswith("def ")]
    return {lines[k].split("(")[0].removeprefix("def "): lines[k - 1] == "@inductor" for k in found}


def test_what_is_compiled_is_marked_in_the_program():
    """Forward and backward of what repeats, of the stretches beside it, and of a section without loops; one
    op alone, the loss, runs as it is."""
    _, pipe = both(*SAME["plain"])
    whole = {"stage0_forward": True, "stage0_backward": True, "stage0_weight": False, "step": False}
    layers = {"blocks_forward": True, "blocks_backward": True, "stage1_backward_1": True}
    eager = ["blocks_weight", "stage1_forward", "stage1_backward", "stage1_weight", "step"]
    assert [functions(p) for p in pipe.artifact.programs] == [whole, layers | dict.fromkeys(eager, False)]
    assert "\n    model_mse_loss = mse_loss(" in pipe.artifact.programs[1]


class Scaled(Block):
    """Its scale has a gradient that W computes, of two ops: a product and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return super().forward(x).tanh() * self.scale


def test_weight_gradients_are_compiled_between_their_additions(interpreted, monkeypatch):
    """In layers that repeat and beside them; what writes to gradients is not, nor what gives small values."""
    case, shape = Case(lambda: Chain(6, Scaled), numbers), Shape(2, "zb-h1")
    _, plain = both(case, shape)
    assert not any("_weight_1(" in program for program in plain.artifact.programs)
    monkeypatch.setattr(fxpipe.ir.compiled, "LEAST", 1)
    eager, pipe = both(case, shape)
    assert pipe.check().problems == ()
    _, of_weights = pipe.artifact.programs[0].split("def blocks_weight_1(carry):")
    compiled = {name: yes for name, yes in functions(pipe.artifact.programs[0]).items() if "weight" in name}
    layers = {"blocks_weight_1": True, "blocks_weight": False}
    assert compiled == layers | {"stage0_weight_1": True, "stage0_weight": False}
    for text in re.findall(r"\ndef \w+_weight\(.*?\n\n\n", of_weights, re.DOTALL):
        assert "_weight_1(carry)" in text
        assert "= mul" not in text
    batch = case.data(MICROBATCHES)
    expected, found = (each.run_local(batch, measure_memory=True) for each in (eager, pipe))
    assert too_far(found.grads, expected.grads, 0.0) == {}
    assert found.peak_saved == expected.peak_saved
    graphs = [graph for graph in interpreted.graphs if any(written(n.target) for n in call_nodes(graph))]
    assert graphs == []


class Language(TiedHead):
    """In bfloat16, and with a head of its own, whose gradient is added to in one order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.to(torch.bfloat16)

    def forward(self, ids, labels):
        logits = self.head(self.blocks(self.embedding(ids)))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@pytest.mark.variation
@pytest.mark.parametrize("barriers", with_variations(["1-barrier", "2-barrier"], ["1-barrier"]))
def test_a_split_head_keeps_its_logits_and_not_their_exponentials(barriers, interpreted, monkeypatch):
    """They have half of the bytes, and the kernels that need the exponentials compute them again."""
    monkeypatch.setattr(fxpipe.ir.compiled, "LEAST", 1)
    case = Case(Language, tokens)
    eager, pipe = both(case, Shape(2, "zb-h1", vocab_parallel=barriers))
    assert pipe.check().problems == ()
    batch = case.data(MICROBATCHES)
    expected, found = (each.run_local(batch) for each in (eager, pipe))
    assert torch.equal(found.loss, expected.loss)
    assert too_far(found.grads, expected.grads, 0.0) == {}
    for rank, program in enumerate(pipe.artifact.programs):
        by_op, fused = (each.plan.costs.stages[rank - 2] for each in (eager, pipe))
        entries = case.rows * LENGTH * (WORDS // 2 + rank)
        assert by_op.saved_activations - fused.saved_activations >= 2 * entries
        assert fused.weight <= by_op.weight
        of_weight = re.search(rf"\ndef stage{rank + 4}_weight\(.*?\n\n\n", program, re.DOTALL)
        assert "mul(" not in of_weight[0]


def test_measured_costs_are_of_what_is_compiled(interpreted, monkeypatch):
    """Forward, backward, and the one stretch of W."""
    monkeypatch.setattr(fxpipe.ir.compiled, "LEAST", 1)
    case = Case(lambda: Chain(1, Scaled), numbers)
    options = {"schedule": "zb-h1", "costs": "measured", "backend": "inductor"}
    fxpipe.compile(case.build(), case.example(), ranks=1, microbatches=2, **options)
    products = [any(n.target is aten.mm.default for n in graph.nodes) for graph in interpreted.graphs]
    assert len(products) == 3
    assert not products[-1]


def test_a_section_forgets_what_its_stretch_frees():
    _, pipe = both(*SAME["plain"])
    assert (
        "    carry = [blocks_5_add]\n"
        "    del blocks_5_add\n"
        "    d_blocks_5_add = stage1_backward_1(batch, carry)\n"
    ) in pipe.artifact.programs[1]


def test_layers_are_compiled_once(interpreted):
    """As many functions for eight layers as for four, of layers that draw random numbers, too; and the
    programs are proved to be the step."""
    numbers_compiled = []
    for depth in (4, 8):
        case, shape = Case(lambda depth=depth: Noisy(depth), numbers), Shape(1, "zb-h1", backend="inductor")
        pipe = compiled(case, case.build(), MICROBATCHES, shape)
        assert pipe.check().problems == ()
        interpreted.graphs.clear()
        pipe.run_local(case.data(MICROBATCHES))
        numbers_compiled.append(interpreted.number)
    assert numbers_compiled == [5, 5]


def test_a_section_of_views_alone_is_not_compiled():
    graph = torch.fx.Graph()
    graph.output((graph.call_function(aten.t.default, (graph.placeholder("x"),)),))
    section = Section(Color(0, Phase.F), (), (), lambda: graph)
    assert not is_compiled(section, {*Phase})
    (view,) = call_nodes(graph)
    view.target = aten.neg.default
    assert is_compiled(section, {*Phase})
    assert not is_compiled(section, set())
    assert not is_compiled(replace(section, color=Color(0, Phase.W)), {*Phase})


def test_what_is_compiled_is_not_rewritten_in_place():
    _, pipe = both(*SAME["vocabulary"])
    writing = {
        (s.phase, s.stage < 2) for s in pipe.sections for n in call_nodes(s.graph) if written(n.target)
    }
    assert writing == {(Phase.B, True), (Phase.W, False)}  # of the embedding's two shards, and of the others


def test_a_saved_program_is_compiled_when_it_is_loaded_and_edits_hold(interpreted, tmp_path):
    case, shape = SAME["plain"]
    eager, pipe = both(case, shape)
    pipe.save(tmp_path / "saved")
    batch = case.data(MICROBATCHES)
    expected = eager.run_local(batch).grads
    assert too_far(fxpipe.load(tmp_path / "saved").run_local(batch).grads, expected, 0.0) == {}
    assert interpreted.number == 5
    file = tmp_path / "saved" / "rank1.py"
    file.write_text(file.read_text().replace("@inductor\ndef blocks_forward", "def blocks_forward"))
    with pytest.warns(UserWarning, match="was edited"):
        edited = fxpipe.load(tmp_path / "saved")
    assert too_far(edited.run_local(batch).grads, expected, 0.0) == {}
    assert interpreted.number == 9


def test_a_dry_run_compiles_every_function(interpreted):
    case, shape = SAME["plain"]
    _, pipe = both(case, shape)
    batch, runner = case.data(MICROBATCHES), pipe._runner
    for rank in range(2):
        rt = runner._runtime_of(rank, LocalComm(LocalWorld(2), rank), {}, None)
        dry_run(rt, runner._local_programs[rank].step, batch, zero_gradients(runner.state, rank))
    assert interpreted.number == 5
    pipe.run_local(batch)
    assert interpreted.number == 5


# -- functions ----------------------------------------------------------------------------------------------


def doubled(params: dict[str, torch.Tensor], saved: list[torch.Tensor]) -> list[torch.Tensor]:
    first, second = saved
    saved.clear()
    return [aten.mul.Tensor(aten.add.Tensor(first, params["w"]), 2.0), second]


def test_lists_are_emptied_and_their_tensors_freed(interpreted):
    params = {"w": torch.ones(3), "other": torch.ones(5)}
    saved = [torch.zeros(3), torch.ones(2)]
    first = weakref.ref(saved[0])
    result, passed_on = inductor(doubled)(params, saved)
    assert saved == []
    assert first() is None
    assert result.tolist() == [2.0] * 3
    assert passed_on.tolist() == [1.0] * 2


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("entries", [1, 2])
def test_an_addition_to_one_entry_of_each_row_is_elementwise(dim, entries, interpreted):
    """So that it is fused with what computes the rows; one to several entries, which may be equal, stays."""
    total, sizes = torch.randn(4, 5), [4, 5]
    sizes[dim] = entries
    index, summand = torch.randint(total.shape[dim], sizes), torch.randn(sizes)
    added = inductor(lambda *inputs: aten.scatter_add(inputs[0], dim, *inputs[1:]))(total, index, summand)
    assert torch.equal(added, total.scatter_add(dim, index, summand))
    (graph,) = interpreted.graphs
    assert any(n.target is aten.scatter_add.default for n in call_nodes(graph)) == (entries > 1)


def test_views_fit_the_strides_of_inductors_own_ops(interpreted, monkeypatch):
    """A ``cat`` with an empty tensor, as caches of keys and values begin with, is a copy in other strides."""
    monkeypatch.setattr(fxpipe.runtime.program.inductor, "decompositions", decompositions)

    def joined(x: torch.Tensor, empty: torch.Tensor) -> list[torch.Tensor]:
        keys = aten.cat.default([empty, aten.transpose.int(x, 1, 2)], -2)
        return [keys, aten.reshape.default(aten.transpose.int(keys, -2, -1), [24, 8, 16])]

    function, given = inductor(joined), (torch.randn(2, 16, 12, 8), torch.empty(0))
    found = function(*given)
    assert all(torch.equal(a, b) for a, b in zip(found, joined(*given), strict=True))
    assert interpreted.number == 1


class Halved(Chain):
    """The layers read weights that are made of the parameters alone."""

    def __init__(self, depth: int = 4):
        super().__init__(depth)
        for block in self.blocks:
            for layer in (block.inner, block.outer):
                weight_norm(layer)


def test_weights_are_made_once_a_step_by_a_compiled_function(interpreted):
    with torch.random.fork_rng():
        model, batch = Halved(), numbers(12)
    given = {"ranks": 2, "microbatches": 3, "schedule": "zb-h1", "loss_fn": None}
    with captured_once("halved"):
        pipes = [
            fxpipe.compile(model, numbers(4), **given, backend=backend) for backend in ("eager", "inductor")
        ]
    assert pipes[1].check().holds
    assert all("@inductor\ndef once_a_step(params" in program for program in pipes[1].artifact.programs)
    assert not any("@inductor" in program for program in pipes[0].artifact.programs)
    eager, compiled = (pipe.run_local(batch) for pipe in pipes)
    assert torch.equal(eager.loss, compiled.loss)
    assert all(torch.equal(grad, compiled.grads[name]) for name, grad in eager.grads.items())
    of_weights = [g for g in interpreted.graphs if aten._weight_norm_interface.default in call_targets(g)]
    assert len(of_weights) == 2, "one of each rank"


def test_a_function_with_checks_alone(interpreted):
    def positive(batch: dict[str, torch.Tensor]) -> None:
        expect(aten.gt.Scalar(batch["x"], 0.0), [True, True], "model.py:7")

    function = inductor(positive)
    with SavedBytes([]):
        assert function({"x": torch.ones(2)}) is None
    with pytest.raises(RunError, match=r"reads a value of the data at model\.py:7"):
        function({"x": torch.tensor([1.0, -1.0])})
    assert interpreted.number == 1


def test_another_layout_is_compiled_anew(interpreted):
    function = inductor(doubled)
    for weight in (
        torch.ones(2, 3),
        torch.ones(3, 2).t(),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3),
    ):
        result, _ = function({"w": weight}, [torch.zeros(2, 3), torch.ones(2)])
        assert result.dtype == weight.dtype
        assert result.tolist() == [[2.0] * 3] * 2
    assert interpreted.number == 3


def shifted(params: dict[str, torch.Tensor], key: int, position: int, rate: float) -> list[torch.Tensor]:
    drawn = keyed(key, position + 1, aten.bernoulli.p, params["w"], 0.5)
    return [aten.add.Tensor(drawn, rate), aten.mul.Tensor(params["w"], 2.0)]


def test_layers_with_their_own_tensors_and_positions_are_compiled_once(interpreted):
    """Random bits are those of the op run alone; a key of 64 bits, too."""
    params = {f"layers.{k}.w": torch.full((64,), float(k)) for k in range(4)} | {"other": torch.ones(2)}
    function, key = inductor(shifted), (1 << 64) - 5
    for k in range(4):
        module = within(params, f"layers.{k}")
        drawn, doubled = function(module, key, 3 * k, 0.25)
        assert torch.equal(drawn, keyed(key, 3 * k + 1, aten.bernoulli.p, module["w"], 0.5) + 0.25)
        assert doubled.tolist() == [2.0 * k] * 64
    assert interpreted.number == 1


@pytest.mark.parametrize("kind", ["int", "Tensor"])
def test_an_attention_draws_with_a_key_beside_its_own_argument_key(kind):
    """Attentions of GPUs draw themselves; Inductor takes an op by the names of its arguments."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.operator_schemas import get_signature_for_torch_op

    attention = aten._scaled_dot_product_efficient_attention.default

    def attended(key: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        at = position if kind == "Tensor" else 3
        return keyed(key, at, attention, x, value=x, key=x, attn_bias=None, compute_log_sumexp=True)[0]

    with fake_tensors():
        number = torch.empty((), dtype=torch.int64)
        traced = make_fx(attended)(number, number.clone(), torch.empty(1, 1, 8, 8, device="cuda"))
    (node,) = (n for n in traced.graph.nodes if getattr(n.target, "namespace", "") == "fxpipe")
    (signature,) = get_signature_for_torch_op(node.target)
    assert [*signature.parameters][:5] == ["random_key", "random_position", "query", "key", "value"]


def test_another_float_is_compiled_anew(interpreted):
    """It is a part of the kernel; 0.0 and -0.0 differ."""
    function = inductor(shifted)
    for rate in (0.5, 0.0, -0.0, 0.5):
        drawn, _ = function({"w": torch.ones(64)}, 1, 2, rate)
        assert torch.equal(drawn, keyed(1, 3, aten.bernoulli.p, torch.ones(64), 0.5) + rate)
    assert interpreted.number == 3


# -- errors -------------------------------------------------------------------------------------------------


def test_an_unknown_backend():
    with pytest.raises(OptionError, match="backend is 'triton' and must be 'eager' or 'inductor'"):
        fxpipe.compile(Chain(), numbers(2), ranks=2, microbatches=2, backend="triton")


def test_what_inductor_cannot_compile(monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("no compiler found\nmore lines")

    monkeypatch.setattr(fxpipe.runtime.program.inductor, "compile_by_inductor", fail)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kept")
    _, pipe = both(*SAME["plain"])
    expected = (
        r"^Inductor cannot compile stage0_forward \(ValueError: no compiler found\)\. It needs a C\+\+ "
        r"compiler .* may be damaged: delete the folder /kept\. Or take the line @inductor above "
        r"stage0_forward out of the program"
    )
    with pytest.raises(RunError, match=expected):
        pipe.run_local(SAME["plain"][0].data(MICROBATCHES))


def test_an_edit_that_cannot_be_traced():
    def branches(x: torch.Tensor) -> list[torch.Tensor]:
        return [x if x.sum() > 0 else -x]

    with pytest.raises(RunError, match=r"Inductor cannot compile branches .*out of the program"):
        inductor(branches)(torch.ones(3))


def test_a_failed_check_names_its_line(interpreted):
    case, shape = SAME["checked"]
    _, pipe = both(case, shape)
    batch = case.data(MICROBATCHES)
    batch["x"] *= 1e4
    with pytest.raises(RunError, match=rf"reads a value of the data at .*{Path(__file__).name}"):
        pipe.run_local(batch)
