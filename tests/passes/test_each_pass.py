"""Each pass on a tiny model: the lines of the graph that it changes, as ``golden/<pass>.txt`` has them.

After a change that is meant: ``pytest tests/passes/test_each_pass.py --update-golden``, then read the diff.
"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.capture.capture_options import CaptureOptions
from fxpipe.capture.trace import capture
from fxpipe.certificate.terms import identities
from fxpipe.compiler import passes
from fxpipe.compiler.choice import cut
from fxpipe.compiler.passes import PASS_NAMES, PASSES, CutOptions, Pass, StepGraphs, run_passes
from fxpipe.cost.devices.known_devices import CPU
from fxpipe.cost.nodes import NodeSeconds
from fxpipe.ir.text import graph_text
from fxpipe.plan.lanes import NO_LANES, LaneAxis, LanePlan
from fxpipe.runtime.program import lanes
from fxpipe.schedule.ops import Phase

ROOT, GOLDEN = Path(__file__).parents[2], Path(__file__).parent / "golden"
WIDTH = 4
MOST = 30  # lines of a file


class Net(nn.Module):
    """Two layers, on two stages if there are two, and an op between them, of the first stage."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.tanh, bias: bool = False):
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(2))
        self.between = between

    def forward(self, x):
        return self.last(self.between(self.first(x))).sum()


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.first.weight


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return (1j * (self.weight * x)).imag.sum()


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class Remembers(Net):
    """Its memory of the first layer gets its new value at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(2, WIDTH))

    def forward(self, x):
        y = self.first(x)
        loss = self.last(y + self.memory).sum()
        self.memory = y.detach() * 2
        return loss


class Labeled(Net):
    def forward(self, x):
        return {"loss": super().forward(x), "labels": x}


class Residual(Net):
    """Layers on three dimensions compute in two; the gradient of a sum is one of three, which both have."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, False)

    def forward(self, x):
        x = self.first(x.view(1, 2, WIDTH)).tanh()
        return self.head(x + self.last(x)).sum()


class Early(Net):
    """The loss is the first stage's; the second computes an output."""

    def forward(self, x):
        x = self.first(x)
        return {"loss": x.sum(), "logits": self.last(x)}


class Masked(Net):
    def forward(self, x):
        mask = x > 0
        return (self.last(self.first(x) * mask) * mask).sum()


class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Exchange(torch.autograd.Function):
    """To each lane its share of the rows; the gradient back."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return lanes.all_to_all(x, 2)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return lanes.all_to_all(gradient, 2)


class Summed(torch.autograd.Function):
    """The weight itself; the sum over the lanes of its gradients."""

    @staticmethod
    def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return lanes.all_reduce(gradient, "sum", 2)


class Alike(nn.Module):
    """A parameter that all lanes have, and use on values of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(x * Summed.apply(self.weight)).sum()


def exchanged_often(x: torch.Tensor) -> torch.Tensor:
    """At last a mask, which is too small to cut a stage for."""
    y = Exchange.apply(Exchange.apply(x).tanh()).tanh()
    return y * lanes.all_to_all(y[:, :1] > 0, 2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 6, bias=False)

    def forward(self, x):
        return F.cross_entropy(self.head(x), torch.ones(len(x), dtype=torch.int64))


class Total(Words):
    def forward(self, x):
        return F.cross_entropy(self.head(x), torch.ones(len(x), dtype=torch.int64), reduction="sum")


class Picked(Words):
    """Of all rows but the last."""

    def forward(self, x):
        logs = self.head(x.view(1, 2, WIDTH))[:, :-1].log_softmax(-1)
        return -logs.gather(-1, torch.ones(1, 1, 1, dtype=torch.int64)).sum()


@dataclass(frozen=True)
class Case:
    """offloaded: name of a value of stage 0 that its B reloads.  joined: stages whose B and W are one op.
    options: of ``CutOptions``.  lanes: of ``StepGraphs``."""

    model: Callable[[], nn.Module] = Net
    stages: int = 1
    gradients: bool = True
    loss_fn: Callable[..., Any] | None = None
    outputs: tuple[str, ...] = ()
    offloaded: str = ""
    joined: frozenset[int] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    lanes: LanePlan = NO_LANES


CASES = {
    "compute_marked_values": Case(Wave),
    "key_random_ops": Case(lambda: Net(F.dropout)),
    "tensors_for_numbers": Case(Wave),
    "read_once": Case(Counter),
    "hoist_updates": Case(Remembers),
    "simplify": Case(lambda: Net(lambda x: torch.cat([x[:0], x.view(4, 2).view(2, 4)]) * 1)),
    "join_sums_over_lanes": Case(lambda: Net(lambda x: Summed.apply(x).sin() + Summed.apply(x).cos())),
    "sum_over_lanes_once": Case(Alike, lanes=LanePlan((LaneAxis(2, summed=("weight",)),))),
    "prepare_head": Case(Picked, options={"head_chunks": 2}),
    "split_vocabulary": Case(Words, gradients=False, options={"barriers": 1}),
    "chunk_head": Case(Total, options={"head_chunks": 2}),
    "begin_exchanges": Case(lambda: Net(Exchange.apply), options={"parts": "exchanges"}),
    "partition": Case(stages=2),
    "copy_given_results": Case(Labeled, outputs=("labels",)),
    "count_beside_loss": Case(
        Early,
        stages=2,
        loss_fn=lambda found, batch: (found["loss"], (batch["x"] > 0).sum()),
        outputs=("logits",),
    ),
    "untie": Case(Tied, stages=2),
    "split_backward": Case(stages=2),
    "join_exchanges": Case(lambda: Net(exchanged_often), options={"parts": "exchanges"}),
    "compute_once": Case(Autocast),
    "sink_cheap_values": Case(Masked, stages=2),
    "merge_equal": Case(lambda: Net(lambda x: x.tanh() * x.tanh())),
    "move_head_to_backward": Case(Total, options={"head_chunks": 2}),
    "recompute": Case(lambda: Net(F.gelu), options={"recompute": "norms"}),
    "repeat_in_kernels": Case(
        lambda: Net(lambda x: x * F.gelu(x, approximate="none").tanh()),
        options={"compiled": frozenset(Phase)},
    ),
    "mincut_saved_for_weight": Case(),
    "make_contiguous": Case(lambda: Net(lambda x: x[:1].expand(2, -1)), stages=2),
    "fuse_accumulation": Case(lambda: Net(bias=True)),
    "join_backward": Case(lambda: Net(F.gelu), joined=frozenset({0})),
    "simplify_views": Case(Residual),
    "accept_any_strides": Case(lambda: Net(lambda x: F.gelu(x.view(4, 2)).view(2, 4))),
    "use_inplace_ops": Case(),
    "accumulate_together": Case(lambda: Net(bias=True)),
    "insert_offload": Case(offloaded="model_tanh"),
}


def changed(name: str, case: Case) -> str:
    """The lines of the graph that the pass removes (-) and adds (+), with a line before and after."""
    example = {"x": torch.ones(2, WIDTH)}
    asked = (
        case.loss_fn,
        0.5,
        torch.device("cpu"),
        CaptureOptions(gradients=case.gradients, outputs=case.outputs),
    )
    graph = capture(case.model(), example, *asked).graph
    step = StepGraphs(graph, None, joined=case.joined, lanes=case.lanes)
    split_points = ["last"] if case.stages > 1 else None
    options = CutOptions(case.stages, 2, NodeSeconds(CPU), split_points, **{"barriers": None, **case.options})
    for each in itertools.chain(*PASSES):
        before = graph_text(step.graph)
        if each.name == "insert_offload":
            step.offloaded = {(0, Phase.B): [n for n in step.graph.nodes if n.name == case.offloaded]}
        run_passes((each,), step, options)
        if each.name == name:
            break
    diff = difflib.unified_diff(before.splitlines(), graph_text(step.graph).splitlines(), n=1, lineterm="")
    lines = ["…" if line.startswith("@@") else line for line in itertools.islice(diff, 3, None)]
    if len(lines) > MOST:
        lines[MOST:] = [f"… and {len(lines) - MOST} more"]
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize("name", CASES)
def test_a_pass_changes(name, request):
    lines, file = changed(name, CASES[name]), GOLDEN / f"{name}.txt"
    assert lines, "the pass leaves the model of its case as it is"
    if request.config.getoption("--update-golden"):
        file.write_text(lines)
    assert lines == file.read_text()


UNASKED = (
    "sum_over_lanes_once", "prepare_head", "split_vocabulary", "chunk_head", "begin_exchanges",
    "join_exchanges", "move_head_to_backward", "recompute", "repeat_in_kernels", "join_backward",
    "insert_offload",
)  # fmt: skip


@pytest.mark.parametrize("name", UNASKED)
def test_a_pass_changes_nothing_unasked(name):
    case = replace(CASES[name], options={}, offloaded="", joined=frozenset(), lanes=NO_LANES)
    assert changed(name, case) == ""


def test_the_example_of_contributing(monkeypatch):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    source, identity = (
        re.search(rf"^```python\n({begins}.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
        for begins in ('"""A sum', "def _difference")
    )
    (shown,) = re.findall(r"^```\n( F0 .*?)^```", text, re.MULTILINE | re.DOTALL)
    places = re.findall(r"^ .*\n(?=\+ .*subtract)", text, re.MULTILINE)
    assert len(places) == 2
    for place in places:
        assert place[1:] in Path(passes.__file__).read_text() + Path(__file__).read_text()
    defined: dict[str, Any] = {}
    exec(source, defined)
    example = Pass("subtract", lambda step, options: defined["subtract"](step.graph))
    longer = PASSES._replace(colored=(*PASSES.colored, example))
    monkeypatch.setattr(sys.modules[__name__], "PASSES", longer)
    case = Case(lambda: Net(lambda x: x.cos() + -x.sin()))
    assert changed("subtract", case).startswith(shown)

    monkeypatch.setattr(cut, "PASSES", longer)
    one = {"ranks": 1, "microbatches": 1, "schedule": "1f1b"}
    with pytest.raises(fxpipe.VerifyError, match="computes sub"):
        fxpipe.compile(case.model(), (torch.ones(2, WIDTH),), **one)
    rules = dict(vars(identities))
    exec(identity, rules)
    monkeypatch.setitem(identities.RULES, "aten.sub", rules["_difference"])
    pipe = fxpipe.compile(case.model(), (torch.ones(2, WIDTH),), **one)
    assert re.search(r"\bsub(_out|_)?\(model_cos, model_sin", pipe.artifact.programs[0])


def test_new_ops_are_named_after_modules():
    """Not by fx, after the op with its overload: ``clone_default_1``."""
    for file in GOLDEN.iterdir():
        for name in re.findall(r"^\+(?:[FBW]-?\d+)? +(\w+) = [\w.]+\(", file.read_text(), re.MULTILINE):
            assert re.match("(d_|bwd_)?(model|first|last|head)_|[a-z]+_now$", name), (file.stem, name)


def test_every_pass_has_its_golden_and_its_place_on_the_page():
    assert set(CASES) == set(PASS_NAMES)
    assert {file.stem for file in GOLDEN.iterdir()} == set(PASS_NAMES)
    _, page = (ROOT / "docs/architecture.md").read_text().split("\n### Passes", 1)
    assert re.findall(r"\*\*(\w+)\*\*", page.split("\n### ", 1)[0]) == [*PASS_NAMES]
