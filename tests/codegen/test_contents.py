"""The contents at the top of a program list what its step does, under the names that it has there."""

import re

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.schedule.units import bytes_text

WIDTH, WORDS = 8, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Tied(nn.Module):
    """A language model whose input and output layers are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, ids, labels):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        logits = x @ self.table().t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def table(self) -> torch.Tensor:
        return self.words.weight


class ReadAtTheEnd(Tied):
    """The last rank adds nothing to the gradient."""

    def table(self) -> torch.Tensor:
        return self.words.weight.detach()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


class Bare(nn.Module):
    """A model without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return (x * self.weight).tanh().sum()


def programs(model: type[nn.Module] = Tied, **options) -> tuple[str, ...]:
    ids = torch.zeros(2, 3, dtype=torch.long)
    options = {"ranks": 2, "microbatches": 2} | options
    return fxpipe.compile(model(), {"ids": ids, "labels": ids}, **options).artifact.programs


def rows(program: str, title: str) -> list[list[str]]:
    """The cells of a table of the contents."""
    found = re.search(rf"^{title}.*:\n((?:  .+\n)+)", program, re.MULTILINE)
    return [re.split(r"  +", line.strip()) for line in found[1].splitlines()] if found else []


def ops_called(program: str) -> list[str]:
    """The ops in the lines of the schedule."""
    schedule = program[program.index("    for _ in rt.warm_up(") :]
    return [f"{name}.{m}" for name, m in re.findall(r"\b([FBW]+\d+)\((\d+)\)", schedule)]


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "zb-h1"},
        {"schedule": "zb-h1", "vocab_parallel": True},
        {"schedule": "1f1b", "backend": "inductor"},
    ],
    ids=str,
)
def test_contents_name_the_ops_of_the_step(options):
    for program in programs(**options):
        called = ops_called(program)
        assert [op for row in rows(program, "Order") for op in row[0].split()] == called
        functions = {op.partition(".")[0] for op in called}
        assert {row[0] for row in rows(program, "Sections")} <= functions
        stages = {re.sub(r"\D", "", name) for name in functions}
        arrows = [row[0].split(" -> ") for row in rows(program, "Messages")]
        assert arrows
        for ends in arrows:  # one of a message is an op of this rank, or both
            assert functions & {*ends}
            assert {name for name in ends if re.sub(r"\D", "", name) in stages} <= functions


def test_an_op_that_has_nothing_to_run_is_not_listed():
    """The input embedding of rank 0 has one backward, which takes the gradient that the rank has."""
    program, _ = programs(schedule="zb-h1", vocab_parallel=True, microbatches=4)
    assert not re.search(r"\b[BW]0\b", program)
    assert ["B2 -> BW0", "broadcast"] in [row[:2] for row in rows(program, "Messages")]


def test_what_another_rank_receives_has_the_name_of_its_op():
    first, second = programs(schedule="1f1b")
    assert rows(first, "Messages")[1][:2] == ["BW1 -> BW0", "from rank 1"]
    assert rows(second, "Messages")[1][:2] == ["BW1 -> BW0", "to rank 0"]
    assert "receive_BW0(0)" in first


@pytest.mark.parametrize("model", [Tied, ReadAtTheEnd])
def test_the_gradient_of_a_tied_parameter_is_a_message(model):
    size = f"{4 * WORDS * WIDTH} B"
    for rank, program in enumerate(programs(model, schedule="1f1b")):
        cells = ["all-reduce", f"with rank {1 - rank}", "the gradient of words.weight", size]
        assert rows(program, "Sums over ranks, at the end of the step") == [cells]
        assert 'rt.all_reduce_gradient("words.weight", ranks=(0, 1))' in program


def test_what_is_offloaded():
    options = {"ranks": 2, "microbatches": 4, "schedule": "gpipe", "offload": fxpipe.Offload(bandwidth=1e12)}
    pipe = fxpipe.compile(Wide(), {"x": torch.ones(64, 64)}, **options)
    for rank, program in enumerate(pipe.artifact.programs):
        (own,) = rows(program, "Offloaded")
        size = pipe.plan.pools[rank] / 4
        assert own == [f"F{rank} -> BW{rank}", bytes_text(size), "microbatches: 4"]


def test_what_replicas_gather_and_sum():
    for shard, gathered in ((None, ""), ("parameters", "gathered before F0.0, ")):
        program, _ = programs(schedule="1f1b", replicas=2, shard=shard)
        own, tied = rows(program, "Buckets of parameters")
        assert own[:3] == ["0", f"{gathered}summed after BW0.1", "parameters: 12"]
        assert tied == ["1", f"{gathered}summed after BW0.1", "parameters: 1", f"{4 * WORDS * WIDTH} B"]


def test_the_title_of_a_model_without_modules():
    pipe = fxpipe.compile(Bare(), {"x": torch.ones(2, WIDTH)}, ranks=1, microbatches=1, schedule="1f1b")
    assert pipe.artifact.programs[0].startswith(
        '"""Rank 0 of 1: Bare, stage 0.\n\nSchedule 1f1b, 1 microbatch.\n'
    )


def test_a_record_is_unpacked_under_the_names_of_the_forward():
    """The input of a layer, which is also the result of the layer before."""
    program = programs(schedule="1f1b", ranks=1)[0]
    forward = re.search(r"def (\w+)_forward\(params, (\w+_in)\):(.*?)\n\n", program, re.DOTALL)
    backward = re.search(rf"def {forward[1]}_backward\(.*?\n\n", program, re.DOTALL)[0]
    record = re.search(r"return \w+, \[(.*?)\]", forward[3])[1]
    assert forward[2] in record.split(", ")
    assert f"{record} = saved" in backward


def test_the_ops_of_a_model_without_a_file():
    """As in an interactive session: no line is known, and they are the model's all the same."""
    found: dict = {"Bare": Bare, "torch": torch}
    exec("class Typed(Bare):\n    def forward(self, x):\n        return (x * self.weight).exp().sum()", found)
    pipe = fxpipe.compile(found["Typed"](), {"x": torch.ones(2, WIDTH)}, ranks=1, microbatches=1)
    forward = re.search(r"def stage0_forward.*?\n\n", pipe.artifact.programs[0], re.DOTALL)[0]
    assert "exp" in forward
    assert "autograd" not in forward
