"""The certificate: what it accepts, and what it says of an edited program."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
import zoo
from torch import nn
from zoo import WIDTH, Case, Dropout, Shape, check_against_eager, compiled, numbers

import fxpipe
import fxpipe.ir.liveness
from fxpipe.certificate.check import check, check_artifact
from fxpipe.certificate.problems import Certificate, Line
from fxpipe.certificate.programs import evaluate
from fxpipe.certificate.reference import Reference, reference_of
from fxpipe.certificate.terms.difference import difference
from fxpipe.certificate.terms.identities import RULES
from fxpipe.certificate.terms.schemas import schema_of
from fxpipe.certificate.terms.sums import Addition, GradientSum
from fxpipe.certificate.terms.terms import Layout, Terms, canonical
from fxpipe.errors import ArtifactError, RunError
from fxpipe.plan.captured import CapturedStep
from fxpipe.plan.program.parse import parse

MICROBATCHES = 3


class WeightsAtTheBeginning(nn.Module):
    """The last stages have no W: the plan's numbers of ops are not those of the programs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(torch.tanh(layer(x)).exp())
        return (torch.tanh(x) - y).square().mean()


class Masked(nn.Module):
    """Both layers use one mask."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, y):
        mask = torch.arange(WIDTH) > 3
        for layer in self.layers:
            x = layer(x).exp() * mask
        return (x - y).square().mean()


class Unpacked(torch.autograd.Function):
    """Scales by four bits of a byte, and its gradient by four others."""

    @staticmethod
    def forward(ctx, x, packed):
        ctx.save_for_backward(packed)
        return x * ((packed >> 4) & 15)

    @staticmethod
    def backward(ctx, gradient):
        (packed,) = ctx.saved_tensors
        return gradient * (packed << 4 >> 2), None


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        packed = torch.arange(256, 256 - WIDTH, -1).to(torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)

    def forward(self, x, y):
        shifted = self.packed.clone()
        shifted <<= 3
        return (Unpacked.apply(self.layer(x), self.packed) + (shifted >> shifted % 5) - y).square().mean()


class InBfloat16(Masked):
    def forward(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, y)


CASES = {
    **zoo.CASES,
    "cast": Case(InBfloat16, numbers),
    "masked": Case(Masked, numbers),
    # As deep as the lines that are edited ask for.
    "noisy": Case(lambda: Dropout(6), numbers),
    "tied_head": Case(lambda: zoo.TiedHead(6), zoo.tokens),
    "sharded": zoo.CASES["tied_head"],
    "few_weights": Case(WeightsAtTheBeginning, numbers),
}
SHAPES = {
    "tied_head": Shape(2, "zb-h1"),
    "noisy": Shape(2, "gpipe", offload=True),
    "few_weights": Shape(2, "zb-v", offload=True),
    "batch_norm": Shape(2, "1f1b"),
    "tied_thrice": Shape(2, "gpipe"),
    "masked": Shape(2, "zb-h1"),
    "cast": Shape(2, "1f1b"),
    "sharded": Shape(2, "zb-h1", replicas=2, shard="parameters"),
}


@cache
def pipeline(name: str) -> fxpipe.Pipeline:
    """A pipeline that was accepted, and whose small values are offloaded, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fxpipe.ir.liveness, "SMALLEST", 1)
        return compiled(CASES[name], CASES[name].build(), MICROBATCHES, SHAPES[name])


class FusedAttention(nn.Module):
    """As F.scaled_dot_product_attention is on a GPU: its backward has None for tensors that are not there."""

    def __init__(self, op):
        super().__init__()
        self.op, self.inner = op, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, y):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
        return (self.op(q, k, v)[0].transpose(1, 2).flatten(2) - y).square().mean()


@pytest.mark.parametrize(
    "op",
    [
        lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True),
        lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True),
        lambda q, k, v: torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, True
        ),
    ],
    ids=["flash", "cudnn", "efficient"],
)
def test_attention_of_a_gpu(op):
    with torch.device("meta"):
        model, x = FusedAttention(op).bfloat16(), torch.zeros(2, 4, WIDTH, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The programs cannot be checked")
        pipe = fxpipe.compile(model, {"x": x, "y": x}, ranks=1, microbatches=2, costs="H100")
    backward = re.search(r"attention_backward\(.*None", pipe.artifact.programs[0], re.DOTALL)
    assert backward is not None
    assert pipe.check().holds


def check_edited(name: str, rank: int, pattern: str, by: str, number: int = 0) -> tuple[int, Certificate]:
    """Edit the match of a pattern in a program: its line, and the certificate."""
    artifact = pipeline(name).artifact
    programs = [*artifact.programs]
    match = [*re.finditer(pattern, programs[rank], re.MULTILINE)][number]
    line = 1 + programs[rank].count("\n", 0, match.start())
    programs[rank] = programs[rank][: match.start()] + match.expand(by) + programs[rank][match.end() :]
    return line, check(artifact.plan, programs, CapturedStep.from_json(artifact.captured, ""))


def problems(name: str, rank: int, pattern: str, by: str, number: int = 0) -> tuple[int, list[str]]:
    line, found = check_edited(name, rank, pattern, by, number)
    assert not found.holds
    return line, [str(problem) for problem in found.problems]


@pytest.mark.in_ci("few_weights", "batch_norm", "masked", "cast", "sharded")
@pytest.mark.parametrize("name", SHAPES)
def test_programs_are_the_captured_step(name):
    pipe = pipeline(name)
    found = pipe.check()
    assert found.problems == found.otherwise == ()
    assert found.microbatches == MICROBATCHES
    assert found.gradients == len(list(CASES[name].build().parameters()))
    if not SHAPES[name].offload:  # offloads may end earlier than the plan assumes
        assert [rank.peak_bytes for rank in found.ranks] == list(pipe.plan.prediction.peak_memory)


def test_shifts_have_the_gradients_of_one_process():
    """And are proved: ``torch.ops.aten`` has shifts by names such as no program may use of values."""
    check_against_eager(Case(Shifted, numbers), MICROBATCHES, Shape(1, "1f1b"), 1e-6)


def test_integers_of_more_than_64_bits_are_no_arguments():
    assert canonical(2**63 - 1) == 2**63 - 1
    with pytest.raises(TypeError, match="more than 64 bits"):
        canonical(2**63)


def test_a_term_is_written_in_a_few_calls():
    terms = Terms(RULES)
    term = terms.input("batch", "x", None, True)
    for _ in range(60):
        term = terms.make("aten.atan2", {"self": term, "other": term})
    assert term.written() == "atan2(atan2(atan2(…, …), atan2(…, …)), atan2(atan2(…, …), atan2(…, …)))"


#: A function that is computed once a step, in the place of another one.
ONCE = r"^def step((?:.*\n)*?.*)rt\.once\(once_a_step\)"


def once(head: str, result: str, call: str) -> str:
    return rf"def {head}:\n    return {result}\n\n\ndef step\1rt.once({call})"


OTHER_MASK = (
    r'def other(once):\n    return {"model_gt": torch.ops.aten.bitwise_not.default(once["model_gt"])}\n\n\n'
    r"def step\1[once, rt.once(other, once), once][m], batches"
)
#: Model, rank, what is replaced (the first match, or that of a number), by what; what is said of it, "LINE"
#: for the line of the edit.
EDITS = {
    "its work in an assert": (
        ("tied_head", 0, r"^    (addmm_\(.*\))  #", r"    assert \1 is not None  #"),
        r"rank0.py:LINE: is outside of what is checked: an assert of what is more than looked at, addmm_",
    ),
    "a W is missing": (
        ("tied_head", 0, r"W0\(1\)$", "pass"),
        r"rank0.py:\d+: runs B0.2 where the plan has W0.1: W0.1 does not run: the gradients of .*, .* and "
        r"\d+ others are missing summands, as .* of microbatch 1",
    ),
    "a W runs twice": (
        ("tied_head", 1, r"^    (addmm_\(.*\).*\n)", r"    \1    \1"),
        r"rank1.py:\d+: the gradient of .* has .* 2 times, not 1",
    ),
    "a sum is not added to the gradient": (
        ("tied_head", 0, r"^    index_add_\(", "    torch.ops.aten.index_add.default("),
        r"rank0.py:LINE: reads the gradient of .*, which is not complete",
    ),
    "sums are not added to their gradients": (
        ("tied_head", 0, r"^    foreach_add_\(", "    torch.ops.aten._foreach_add.List("),
        r"rank0.py:\d+: reads the gradient of .*, which is not complete",
    ),
    "operands are exchanged": (
        ("tied_head", 0, r"\bmm\((.+), (params\[[^()\]]+\])\)", r"mm(\2, \1)"),
        r"rank0.py:\d+: mm\(.* has no shape",
    ),
    "a literal is another": (
        ("tied_head", 1, r"1e-05", "1e-06"),
        r"rank1.py:\d+: computes native_layer_norm\(.*1e-06\), where the captured step has .*1e-05",
    ),
    "another microbatch's batch": (
        ("tied_head", 0, r"batches\[m\]", "batches[m * m % 3]"),
        r"rank1.py:\d+: takes .* of another microbatch, .*: changes the loss",
    ),
    "something else than the batch": (
        ("tied_head", 0, r"rt.microbatches\(batch\)", "rt.microbatches(step)"),
        r"rank0.py:LINE: takes microbatches of something else than the step's batch",
    ),
    "a message is sent twice": (
        ("tied_head", 0, r"^( +rt.send\([^()]*\)$)", r"\1\n\1"),
        r"rank1.py:\d+: expects the gradient of embedding.weight, and rank0.py:\d+ sends another",
    ),
    "a message is not sent": (
        ("tied_head", 0, r"^ +rt.send\([^()]*\)$", ""),
        r"rank1.py:\d+: waits forever for message 0 of rank 0",
    ),
    "a message is read before it is there": (
        ("tied_head", 1, r"rt\.wait\((.*)\)", r"\1"),
        r"rank1.py:\d+: reads a message before it has waited for it",
    ),
    "a value is freed early": (
        ("tied_head", 0, r"^    del (\w+)$", r"    del \1, \1_", 1),
        r"rank0.py:LINE: fails: the variable \w+_ has no value there",
    ),
    "a gradient is not summed over the ranks": (
        ("tied_head", 0, r"rt.all_reduce_gradient\(.*\)", "pass"),
        r"rank1.py:\d+: waits forever for the gradient of embedding.weight of rank 0",
    ),
    "a mask is another": (
        ("masked", 0, r"gt_scalar\((.*), 3\)", r"gt_scalar(\1, 4)"),
        r"rank0.py:\d+: computes gt\(.*, 4\), where the captured step has gt\(.*, 3\)",
    ),
    "a mask is left out": (
        ("masked", 0, r"once\[(.*)\] = gt_scalar", r"_ = gt_scalar"),
        r"rank0.py:\d+: has no value of 'model_gt'",
    ),
    "once a step for one microbatch": (
        ("masked", 0, ONCE, once("first(batch)", '{"model_gt": batch["x"]}', "first, batches[0]")),
        r"rank0.py:\d+: computes 'model_gt' once a step, of which each microbatch has another",
    ),
    "once a step no tensors": (
        ("masked", 0, ONCE, once("nothing()", "[]", "nothing")),
        r"rank0.py:\d+: computes once a step what is no dict of tensors",
    ),
    "another mask for a later microbatch": (
        (
            "masked",
            0,
            r"^def step((?:.*\n)*?.*)once, batches",
            OTHER_MASK,
        ),
        r"rank\d.py:\d+: computes .*bitwise_not",
    ),
    "a cast before the warm-up": (
        (
            "cast",
            0,
            r"^(    for _ in rt\.warm_up.*\n)    (    once = rt\.once.*\n)",
            r"\2\1",
        ),
        r"rank0.py:\d+: has read parameters before its warm-up, which an update that is undone changes",
    ),
    "a section before the warm-up": (
        ("cast", 0, r"^(    for _ in rt\.warm_up.*\n(?:.*once.*\n)?)        F0\(0\)\n", r"    F0(0)\n\1"),
        r"rank0.py:\d+: (has read parameters before its warm-up|fails)",
    ),
    "a section replaces a mask": (
        ("masked", 0, r"^(def stage0_forward.*)$", r'\1\n    once["model_gt"] = params["layers.0.bias"]'),
        r"rank0.py:\d+: fails: TypeError: a program does not replace once",
    ),
    "an op writes over a mask": (
        (
            "masked",
            0,
            r'^    (.* = )mul_out\((\w+), once\["model_gt"\], out=.*$',
            r'    torch.ops.aten.logical_not_.default(once["model_gt"])\n\g<0>',
        ),
        r"rank0.py:LINE: writes to .*the whole step",
    ),
    "a pinned tensor": (
        ("noisy", 0, "pin_memory=False", "pin_memory=True"),
        r"rank0.py:LINE: computes .*True",
    ),
    "a key of another microbatch": (
        ("noisy", 0, r"rt\.key\(m\)", "rt.key(m * m % 3)"),
        r"rank0.py:LINE: takes key of another microbatch, where the captured step has key: changes the loss",
    ),
    "a random op at another position": (
        ("noisy", 0, r"keyed\(key, 0,", "keyed(key, 7,"),
        r"rank0.py:LINE: computes keyed\(key, 7, .* captured step has keyed\(key, 0, .* and 36 others",
    ),
    "an offload over another": (
        ("noisy", 0, r"offload_0\(1, \d+, (\d+)\)", r"offload_0(1, 0, \1)"),
        r"rank0.py:\d+: offloads \w+ over \w+",
    ),
    "an offload is not waited for": (
        ("noisy", 0, r"wait_offload_0\(0\); ", ""),
        r"rank0.py:\d+: moves \w+, which is leaving and has to be out",
    ),
    "a warm-up that would empty the batch": (
        ("tied_head", 0, r"rt\.warm_up\(saved0", "rt.warm_up(batches"),
        r"rank0.py:LINE: has a warm-up that makes other things than values by microbatch",
    ),
    "arguments of within are exchanged": (
        ("tied_thrice", 0, r"within\((\w+), (.*?)\)", r"within(\2, \1)"),
        r"rank0.py:\d+: fails: TypeError",
    ),
    "an offloaded value is read": (
        ("noisy", 0, r"rt.wait_reload\(.*\)", "pass"),
        r"rank0.py:\d+: reads \w+, which is offloaded",
    ),
    "a bucket is summed before its last gradient": (
        ("tied_head", 0, r"^    W0\(2\)\n    (rt\.reduce_gradients\(0\))", r"    \1\n    W0(2)\n    pass"),
        r"rank0.py:LINE: sums the gradient of .* before",
    ),
    "a bucket is never summed": (
        ("tied_head", 1, r"rt\.reduce_gradients\(0\)", "pass"),
        r"rank1.py:\d+: the gradients of .*, .* and \d+ others are not summed over the replicas",
    ),
    "a bucket is summed twice": (
        ("tied_head", 0, r"(rt\.reduce_gradients\(0\))", r"\1; \1"),
        r"rank0.py:LINE: sums the gradient of .* over the replicas again",
    ),
    "a bucket is summed behind the wait": (
        (
            "tied_head",
            0,
            r"^    (rt.reduce_gradients\(0\)); (rt.reduce_gradients\(1\))\n\n    rt.wait_gradients\(\)",
            r"    \1\n    rt.wait_gradients(); \2",
        ),
        r"rank0.py:\d+: does not wait for the sums over the replicas",
    ),
    "an op runs twice": (
        ("tied_head", 0, r"W0\(1\)$", "W0(1); W0(1)"),
        r"rank0.py:LINE: runs W0.1 where the plan has B0.2: has no value of 1: an op runs twice",
    ),
    "the program ends": (
        ("tied_head", 1, r"^    return rt.finish", r"    raise SystemExit(0)\n\g<0>"),
        r"rank1.py:LINE: is outside of what is checked: a raise",
    ),
    "the program does not finish": (
        ("tied_head", 1, r"^    return rt.finish\(\)", r"    pass"),
        r"rank1.py: does not end with `return rt.finish\(\)`",
    ),
    "the program returns something else": (
        ("tied_head", 0, r"^    return rt.finish\(\)", r"    rt.finish()\n    return 0"),
        r"rank0.py: does not end with `return rt.finish\(\)`",
    ),
    "a section keeps something in a list": (
        ("tied_head", 0, r"^def stage0_weight.*\n", r"SEEN = []\n\g<0>    SEEN.append(1)\n"),
        r"rank0.py:LINE: is outside of what is checked: a line at the top level that is no import",
    ),
    "a section keeps something in a dict": (
        ("tied_head", 0, r"^def stage0_weight.*\n", r"SEEN = {}\n\g<0>    SEEN[1] = 1\n"),
        r"rank0.py:LINE: is outside of what is checked: a line at the top level that is no import",
    ),
    "a section keeps something in a global": (
        ("tied_head", 0, r"^(def stage0_weight.*\n)", r"\1    global SEEN\n    SEEN = 1\n"),
        r"rank0.py:\d+: is outside of what is checked: a global",
    ),
    "a section keeps something in a function": (
        ("tied_head", 0, r"^(def stage0_weight.*\n)", r"\1    step.seen = 1\n"),
        r"rank0.py:\d+: is outside of what is checked: an assignment to an attribute",
    ),
    "a section keeps something in a default": (
        ("tied_head", 0, r"^(def stage0_weight.*)\):$", r"\1, seen=[]):"),
        r"rank0.py:LINE: is outside of what is checked: a parameter with a default",
    ),
    "a counter": (
        ("tied_head", 0, r"^def stage0_weight", r"COUNT = enumerate([])\n\g<0>"),
        r"rank0.py:LINE: is outside of what is checked: a call of enumerate",
    ),
    "parameters are read before they are gathered": (
        ("sharded", 0, r"rt\.wait_parameters\(0\)", "pass"),
        r"rank0.py:\d+: reads the parameter .* before its rows of other replicas are there",
    ),
    "parameters are waited for and not gathered": (
        ("sharded", 1, r"rt\.gather_parameters\(0\)", "pass"),
        r"rank1.py:\d+: waits for the parameters of bucket 0, which it does not gather",
    ),
    "a receive ahead of the verdict": (
        (
            "tied_head",
            0,
            r"^( +F0\(\d\))\n( +grads = rt.grads\n +)receive_B0\(0\); ",
            r"\1; receive_B0(0)\n\2",
        ),
        r"rank0.py:\d+: asks in its warm-up \(rank0.py:\d+\) for what rank1.py:\d+ sends behind its own",
    ),
    "a receive behind the verdict": (
        ("tied_head", 1, r"^ +receive_F1\(1\)\n( +grads = rt.grads\n)", r"\1    receive_F1(1)\n"),
        r"rank1.py:\d+: asks behind its warm-up .* for what rank0.py:\d+ sends in its own",
    ),
    "a result that a mask leaves out": (
        ("batch_norm", 0, r"grad_input=\w+", "grad_input=_"),
        r"rank0.py:\d+: writes to what is no tensor",
    ),
    "a buffer gets no new value": (
        ("batch_norm", 0, r"buffers\[\"layers.1.running_mean\"\], buffers", "_, buffers"),
        r"the buffer|gives the buffer 'layers.1.running_mean'|computes",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_told_with_its_line(edit):
    edited, expected = EDITS[edit]
    line, found = problems(*edited)
    assert any(re.search(expected.replace("LINE", str(line)), text) for text in found), found


def test_a_plan_that_takes_the_loss_for_another_is_told():
    """Means over replicas follow from it."""
    artifact = pipeline("tied_head").artifact
    plan = replace(artifact.plan, step=replace(artifact.plan.step, has_count=True))
    found = check_artifact(replace(artifact, plan=plan)).problems
    assert "the plan has a count beside the loss (step.has_count)" in str(found[0])


#: As above, of edits that have many consequences; where it is told, "LINE + 1" for a line behind the edit.
CAUSES = {
    "a literal": (
        ("tied_head", 1, "1e-05", "1e-06"),
        r"\d+: computes native_layer_norm.* changes the loss and",
    ),
    "an op of two names": (
        ("tied_head", 0, r"^(gelu = torch\.ops\.aten\.)\w+\.", r"\1sin."),
        "LINE: calls aten.sin.default gelu, and line",
    ),
    "a shape that a later op cannot take": (
        ("tied_head", 0, r"= reshape\((\w+), \[10, 8\]\)", r"= reshape(\1, [8, 10])"),
        r"LINE: computes reshape\(.*\[8, 10\]\), which the captured step does not have: rank0.py:",
    ),
    "the gradient of another parameter": (
        ("tied_head", 0, r'\(grads\["outer.weight"\], t', r'(grads["inner.weight"], t'),
        "LINE: adds .* to the gradient of .*, where the captured step adds it to that of .* 2 problems from",
    ),
    "a message of another layout": (
        ("tied_head", 0, r'^( *"blocks_2_add": )\(\(2, 5, 8\)', r"\1((2, 5, 9)"),
        "LINE: has the layout of blocks_2_add, and line ",
    ),
    "a variable that is needed": (
        ("tied_head", 0, r"^    (\w+ = gelu\((\w+)\).*)$", r"    \1\n    del \2"),
        r"LINE \+ 1: deletes \w+, and line .* fails: ",
    ),
    "an op later": (
        ("tied_head", 1, r"^    B1\(0\)\n    F1\(1\)\n    B1\(1\)\n", "    F1(1)\n    B1(1)\n    B1(0)\n"),
        "LINE: runs F1.1 where the plan has B1.0: ",
    ),
    "an op that others wait for": (
        ("tied_head", 1, r"B1\(0\)$", "pass"),
        r"LINE \+ 1: runs F1.1 where the plan has B1.0: ",
    ),
    "a message from itself": (("tied_head", 1, r"source=0", "source=1"), "LINE: receives from its own rank"),
}


@pytest.mark.parametrize("edit", CAUSES)
def test_an_edit_with_consequences_is_told_once_at_its_line(edit):
    edited, expected = CAUSES[edit]
    line, (first, *others) = problems(*edited)
    at = expected.replace(r"LINE \+ 1", str(line + 1)).replace("LINE", str(line))
    assert re.match(rf"rank{edited[1]}.py:{at}", first), (line, first)
    assert others == []


@pytest.mark.parametrize("call", [r"W0\(1\)$", r"rt\.reduce_gradients\(0\)"])
def test_what_a_missing_call_leaves_out_is_one_problem(call):
    _, found = problems("tied_head", 0, call, "pass")
    assert len(found) == 1, found


def test_a_value_in_the_place_of_another_is_told_where_it_is_used():
    """Also an input, which no line computes, and where a later rank gives the result."""
    line, found = problems("tied_head", 0, r'params\["norm.weight"\]', 'params["norm.bias"]')
    text = f"rank0.py:{line - 1}: takes blocks.0.norm.bias, where the captured step has blocks.0.norm.weight"
    assert any(each.startswith(text) for each in found), found


def test_items_of_a_list_are_compared_with_what_they_are_like():
    """Not with those at their places, of which one was left out."""
    terms = Terms(RULES)
    x = terms.input("batch", "x", None, True)
    sine, cosine, tangent = (terms.make(f"aten.{op}", {"self": x}) for op in ("sin", "cos", "tan"))
    expected = terms.make("aten.stack", {"tensors": (sine, cosine, tangent)})
    terms.captured, terms.line = len(terms.known), lambda: Line(0, 7)
    other = terms.make("aten.sin", {"self": terms.make("aten.neg", {"self": x})})
    for items, text in (
        ((cosine, tangent, other), "computes neg(x), where the captured step has x"),
        ((cosine, tangent, tangent), "takes tan(x), where the captured step has sin(x)"),
        (
            (cosine, sine, tangent),
            "computes stack([cos(x), sin(x), tan(x)]), where",
        ),
    ):
        actual = terms.make("aten.stack", {"tensors": items})
        assert difference(terms.captured, actual, expected).text.startswith(text)
    product = terms.make("aten.mm", {"self": sine, "mat2": cosine})
    terms.captured = len(terms.known)
    actual = terms.make("aten.mm", {"self": terms.make("aten.exp", {"self": cosine}), "mat2": sine})
    assert difference(terms.captured, actual, product).text.startswith(
        "computes mm(exp(cos(x)), sin(x)), where"
    )


def test_an_op_more_is_told_where_it_is():
    pattern, by = r"^( +)rt.send\((\w+), ", r"\1\2 = torch.ops.aten.add.Tensor(\2, 0.5)\n\g<0>"
    line, found = problems("tied_head", 0, pattern, by)
    assert all(each.startswith(f"rank0.py:{line}: computes add(blocks_2_add, 0.5)") for each in found), found


def test_a_cast_that_a_sum_may_leave_out_is_no_difference():
    """Gradients of bfloat16 products are added as products in float32."""
    line, found = problems("cast", 0, r"= exp_out\(", "= torch.ops.aten.exp2.out(")
    assert all(each.startswith(f"rank0.py:{line}: computes exp2(") for each in found), found


def test_memory_that_an_op_wrote_to_is_not_read_again():
    pattern = r"^    \w+ = add_out\(\w+, (\w+), out=\1\)$"
    line, found = problems("tied_head", 0, pattern, r"\g<0>\n    again = t(\1)")
    assert any(f"rank0.py:{line + 1}: reads " in text and "has overwritten" in text for text in found), found


@pytest.mark.parametrize(
    "op",
    ["add_out(\\2, \\3, out=t(\\3))", "torch.ops.aten.cumsum.out(\\3, 0, out=\\3)"],
    ids=["view", "other places"],
)
def test_an_op_does_not_write_to_what_it_reads_elsewhere(op):
    pattern = r"^    (\w+) = add_out\((\w+), (\w+), out=\3\)$"
    line, found = problems("tied_head", 0, pattern, rf"    \1 = {op}")
    assert any(re.search(f"rank0.py:{line}: writes to .* in the same memory", text) for text in found), found


class Widened(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH).bfloat16(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return (self.layer(x.bfloat16()).sigmoid() * self.scale).square().mean()


def test_an_op_in_place_has_the_dtype_that_is_there():
    """Its functional form gives a float32 of a bfloat16 and a float32."""
    artifact = fxpipe.compile(Widened(), (torch.ones(2, WIDTH),), ranks=1, microbatches=2).artifact
    by = r"\1 = torch.ops.aten.mul_.Tensor(torch.ops.aten.clone.default(\2), params["
    text, number = re.subn(r"(model_mul) = mul\((\w+), params\[", by, artifact.programs[0])
    assert number == 1
    (found, *_) = check_artifact(replace(artifact, programs=(text,))).problems
    assert re.search("writes model_mul to model_sigmoid, which has another shape or dtype", str(found))


@pytest.mark.parametrize(
    ("pattern", "by", "says"),
    [
        (r"(rt.send\(.*to=)1\)", r"\g<1>7)", "sends to rank 7 of 2 ranks"),
        (
            r"torch\.ops\.aten\.addmm\.default",
            "torch.ops.aten.addmm",
            "which overload .*aten.addmm: .*default",
        ),
    ],
)
def test_what_is_told_of_slips(pattern, by, says):
    _, found = problems("tied_head", 0, pattern, by)
    assert re.search(says, found[0]), found


@pytest.mark.parametrize(
    ("given", "use", "wrong"),
    [
        ("{'n': 0}", "q", "gives a section a dict, which is not checked: it can change from call to call"),
        ("{'n': 0}", "q['n'] = 1", "gives a section a dict, which is not checked"),
        ("enumerate([1])", "q", "is outside of what is checked: a call of enumerate"),
        ("(k for k in range(9))", "q", "is outside of what is checked: a generator"),
        ("[1].pop", "q", "is outside of what is checked: the attribute .pop"),
        ("lambda: m", "q()", "is outside of what is checked: a lambda"),
        ("{}.values()", "q", "is outside of what is checked: the method .values"),
        ("f'{batch!r}'", "q", "gives a section f'{batch!r}', which is not checked: the check follows"),
        ("rt", "q", "is outside of what is checked: rt as a value"),
        ("rt.finish", "q()", "gives a section a method, which is not checked"),
        ("MESSAGES", "q", "gives a section a mappingproxy, which is not checked"),
        ("1, 1.5, torch.float32, None, 'a', stage0_forward, torch.ops.aten.t.default", "q", ""),
    ],
)
def test_a_section_keeps_nothing_in_its_arguments(given, use, wrong):
    artifact = pipeline("tied_head").artifact
    text = artifact.programs[0].replace("stage0_weight(", "stage0_weight(q, ")
    text = re.sub(r"def stage0_weight.*\n", rf"\g<0>    {use}\n", text)
    text = re.sub(r"def step.*\n.*\n", rf"\g<0>    q = {given}\n", text)
    found = check_artifact(replace(artifact, programs=(text, *artifact.programs[1:]))).problems
    assert [wrong in str(each) for each in found[:1]] == [True] * bool(wrong), found


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("NOTE = [].append", "the attribute .append"),
        ("NOTES = {'f': lambda seen=[]: seen}", "a lambda"),
        ("def f(seen=([],)):\n    pass", "a parameter with a default"),
        ("def f(*, seen=map(int, [])):\n    pass", "a parameter with a default, or for any number"),
        ("VALUES = {}.values()", "the method .values"),
        ("NUMBERS = (n for n in [])", "a generator"),
        ("ERROR = ValueError([])", "a call of ValueError"),
        ("import math\nmath.seen = []", "an assignment to an attribute"),
        ("import operator\n", "imports operator, which the certificate does not run"),
        ("LISTS = [[1], (2, [3])]", "a line at the top level"),
        ("MESSAGES = {'a': [1]}", "a line at the top level"),
        ("import math\nNUMBERS, = (1,)", "a line at the top level"),
        ("NUMBERS = (1, (-0.0, 'a'), torch.float32, None, float('inf'))", ""),
    ],
)
def test_nothing_at_the_top_level_can_change(text, wrong):
    artifact = pipeline("tied_head").artifact
    programs = (f"{artifact.programs[0]}\n{text}\n", *artifact.programs[1:])
    found = check_artifact(replace(artifact, programs=programs)).problems
    assert [wrong in str(each) for each in found[:1]] == [True] * bool(wrong), found


@pytest.mark.parametrize(
    ("section", "use"),
    [
        ("same(q): return q", "a = [1]; b = same(a); b.append(2); a[1]"),
        ("two(): q = []; return q, q", "a, b = two(); a.append(1); b[0]"),
        ("put(q, r): q.append(r)", "a, b = [], [1]; put(a, b); b.append(2); a[0][1]"),
        ("both(q, r): q.append(1); return r", "both([], []); a = []; both(a, a)[0]"),
        ("last(q): return q.pop()", "a = [[1], [2]]; b = last(a); b[0]; a.pop()[0]; [] = a"),
    ],
)
def test_lists_that_are_one_stay_one(section, use):
    artifact = pipeline("tied_head").artifact
    text = re.sub(
        r"^def step.*\n.*\n",
        rf"def {section}\n\n\n\g<0>    {use}\n",
        artifact.programs[0],
        flags=re.MULTILINE,
    )
    found = check_artifact(replace(artifact, programs=(text, *artifact.programs[1:])))
    assert found.holds, found


def test_a_section_returns_a_dict_once():
    artifact = pipeline("tied_head").artifact
    by = r"def twice(): q = {}; return q, q\n\n\n\g<0>    twice()\n"
    text = re.sub(r"^def step.*\n.*\n", by, artifact.programs[0], flags=re.MULTILINE)
    found = check_artifact(replace(artifact, programs=(text, *artifact.programs[1:]))).problems
    assert "returns a dict twice, which is not checked" in str(found[0])


def test_a_program_reads_of_rt_what_programs_use():
    _, found = problems("tied_head", 0, r"^    return rt.finish", r"    rt.held\n\g<0>")
    assert "is outside of what is checked: a use of rt.held" in found[0]
    _, found = problems("tied_head", 0, r"^    return rt.finish", r"    rt.op(f'{rt.key(0)}')\n\g<0>")
    assert "begins an op whose name the certificate does not know" in found[0]


def test_values_that_a_program_can_tell_apart_are_different_arguments():
    values = [1, 1.0, True, "1", None, 0.0, -0.0, torch.float32, torch.device("cpu"), 1j, (1,), (1.0,)]
    assert len({canonical(value) for value in values}) == len(values)


@pytest.mark.parametrize(("other", "more"), [("0.0", 1), ("-0.0", 2), ("0", 2), ("False", 2)])
def test_a_section_runs_once_for_equal_numbers(other, more):
    artifact = pipeline("tied_head").artifact
    head = "def made(q):\n    return torch.ops.aten.full.default([], q)\n\n\n"
    by = rf"{head}\g<0>    made(0.0); made({other})\n"
    text = re.sub(r"^def step.*\n.*\n", by, artifact.programs[0], flags=re.MULTILINE)
    found = check_artifact(replace(artifact, programs=(text, *artifact.programs[1:])))
    assert found.problems == ()
    assert found.ranks[0].ops == pipeline("tied_head").check().ranks[0].ops + more


def test_arguments_that_say_what_is_so_anyway():
    artifact = pipeline("tied_head").artifact
    pattern, by = r"(addmm_\(grads.*)\)  # ", r"\1, beta=1, alpha=1)  # "
    text, number = re.subn(pattern, by, artifact.programs[0])
    assert number
    assert check_artifact(replace(artifact, programs=(text, *artifact.programs[1:]))).problems == ()


class Copied(nn.Module):
    """Copies of one value in one memory, which the product writes to."""

    def __init__(self):
        super().__init__()
        self.layer, self.scales = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        copies = self.layer(x).exp().unsqueeze(1).expand(-1, 4, -1).contiguous()
        return ((copies * self.scales).sin() + copies.sin()).mean()


def test_an_op_writes_to_a_copy_of_what_is_expanded():
    """In B, which gets it from F."""
    pipe = fxpipe.compile(Copied(), (torch.ones(2, WIDTH),), ranks=1, microbatches=2)
    assert "cos_out(model_clone, out=model_clone)" in pipe.artifact.programs[0]
    assert check_artifact(pipe.artifact).problems == ()


@pytest.mark.parametrize("view", ["{}", "torch.ops.aten.transpose.int({}, 0, 1)"])
def test_an_op_does_not_write_to_what_is_expanded(view):
    pattern = r"^    (\w+) = add_out\((\w+), (\w+), out=\3\)$"
    by = r"    first = torch.ops.aten.slice.Tensor(\3, -1, 0, 1)\n    \1 = add_out(\2, \2, out="
    sizes = re.search(r"# f32(\[.*\])", pipeline("tied_head").artifact.programs[0])[1]
    by += view.format(f"torch.ops.aten.expand.default(first, {sizes})") + ")"
    line, found = problems("tied_head", 0, pattern, by)
    text = f"rank0.py:{line + 1}: writes to .*, several of whose elements are one in memory"
    assert any(re.search(text, problem) for problem in found), found


@pytest.mark.parametrize("other", ["slice.Tensor(x, 1, 0, 1)", "_to_copy.default(x, dtype=torch.float64)"])
def test_an_op_writes_to_a_tensor_of_its_size(other):
    """torch would resize it, in memory that may be larger, or convert the result."""
    pattern = r"^    (\w+) = add_out\((\w+), (\w+), out=\3\)$"
    by = rf"    x = torch.ops.aten.clone.default(\3)\n    \1 = add_out(\2, \3, out=torch.ops.aten.{other})"
    line, found = problems("tied_head", 0, pattern, by)
    text = f"rank0.py:{line + 1}: writes .* to .*, which has another shape or dtype"
    assert any(re.search(text, problem) for problem in found), found


#: The same, of edits that change no result.
OTHERWISE = {
    "a value is kept": (
        ("tied_head", 0, r"saved0\.pop\(m\)", "[[[*layer] for layer in saved0[m][0]]]"),
        r"rank0.py:\d+: keeps \S+, which B0.0 is the last to read, until the end",
    ),
    "values are never freed": (
        ("tied_head", 0, r"saved0\.pop\(m\)", "[[[*layer] for layer in saved0[m][0]]]"),
        r"rank0.py:\d+: holds \d+ bytes before \S+, and the plan has \d+",
    ),
    "ops are exchanged": (
        (
            "tied_head",
            0,
            r"^    W0\(0\)\n(    receive_B0\(1\); F0\(2\)\n)",
            r"\1    W0(0)\n",
        ),
        r"rank0.py:\d+: runs F0.2 where the plan has W0.0",
    ),
    "a warm-up that would not free what it makes": (
        ("tied_head", 0, r"rt\.warm_up\(saved0, \w+\)", "rt.warm_up(saved0)"),
        r"rank0.py:LINE: has a warm-up that makes \d+ bytes more than it would free",
    ),
    "a section runs before its op": (
        ("tied_head", 0, r"^( +rt\.op\(f\"F0\.\{m\}\"\)\n)( +.* = stage0_forward\(.*\n)", r"\2\1"),
        r"rank0.py:\d+: runs stage0_forward of microbatch 1 in F0.0",
    ),
    "a section runs in the op before its own": (
        ("tied_head", 1, r"^( +rt\.op\(f\"B1\.\{m\}\"\)\n)( +.* = stage1_backward\(.*\n)", r"\2\1"),
        r"rank1.py:\d+: runs no section in B1.0",
    ),
    "an offload is waited for late": (
        ("noisy", 0, r"(wait_offload_0\(0\)); (F0\(2\))$", r"\2; \1"),
        r"rank0.py:\d+: calls rt.wait_offload .* more than the plan, first before BW0.0",
    ),
    "a message is kept": (
        (
            "tied_head",
            1,
            r"^( +)(blocks_2_add\[m\] = rt\.wait)",
            r"\1blocks_2_add[m, 0] = blocks_2_add[m]\n\1\2",
        ),
        r"rank1.py:\d+: keeps blocks_2_add, which B1.0 is the last to read, until the end",
    ),
}


def test_values_of_other_microbatches_are_one_cause_at_the_line_that_takes_them():
    """The batch of the next microbatch, and of the last one the first: other summands of all gradients."""
    line, found = problems(
        "tied_head",
        1,
        r"stage1_backward\(params, once, batches\[m\]",
        "stage1_backward(params, once, batches[(m + 1) % 3]",
    )
    assert [text.partition(":")[2].partition(" ")[0] for text in found] == [f"{line}:"], found
    assert "where the captured step has" in found[0]
    assert "changes the gradient of" in found[0]


def test_what_is_not_offloaded_is_told():
    artifact = pipeline("noisy").artifact
    text = re.sub(r"rt\.(wait_)?(offload|reload)\(.*\)$", "pass", artifact.programs[0], flags=re.MULTILINE)
    found = check_artifact(replace(artifact, programs=(text, *artifact.programs[1:])))
    assert found.holds
    told = [
        re.search(r"calls rt\.(\w+) (\d+) times fewer than the plan", str(each)) for each in found.otherwise
    ]
    verbs = ("offload", "reload", "wait_offload", "wait_reload")
    assert sorted(one.groups() for one in told if one) == [(verb, "6") for verb in verbs]


@pytest.mark.parametrize("edit", OTHERWISE)
def test_an_edit_that_changes_no_result_is_told(edit):
    edited, expected = OTHERWISE[edit]
    line, found = check_edited(*edited)
    assert found.holds
    texts = [str(problem) for problem in found.otherwise]
    assert any(re.search(expected.replace("LINE", str(line)), text) for text in texts), texts
    assert texts[0] in str(found)


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, left, right):
        return self.linear(left + right)


class Sides(nn.Module):
    """The second stage adds what the first one sends."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.added = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Added()

    def forward(self, x, y):
        return (self.added(self.left(x), self.right(x)) - y).square().mean()


def test_values_that_are_sent_in_each_others_place_are_told():
    pipe = fxpipe.compile(
        Sides(), numbers(2), ranks=2, microbatches=2, schedule="1f1b", split_points=["added"]
    )
    first, second = pipe.artifact.programs
    edited = re.sub(r"rt\.send\(\[(\w+), (\w+)\], ", r"rt.send([\2, \1], ", first)
    captured = CapturedStep.from_json(pipe.artifact.captured, "")
    assert check(pipe.plan, (first, second), captured).otherwise == ()
    found = check(pipe.plan, (edited, second), captured)
    assert found.holds
    assert re.search(r"rank0.py:\d+: sends left_addmm as right_addmm$", str(found.otherwise[0]))


class Shared(nn.Module):
    """One layer in all three stages, with others between."""

    def __init__(self):
        super().__init__()
        self.shared, self.others = linear(), nn.ModuleList([linear() for _ in range(2)])

    def forward(self, x):
        for other in self.others:
            x = other(torch.tanh(self.shared(x)))
        return self.shared(x).square().mean()


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def test_a_gradient_that_is_added_up_in_another_order_of_ranks_is_told():
    """It is the same sum, and rounds otherwise."""
    options = {"ranks": 3, "microbatches": 2, "schedule": "1f1b", "split_points": ["others.0", "others.1"]}
    pipe = fxpipe.compile(Shared(), {"x": torch.ones(2, WIDTH)}, **options)
    first, *rest = pipe.artifact.programs
    edited = first.replace("ranks=(0, 1, 2)", "ranks=(0, 2, 1)")
    assert edited != first
    found = check(pipe.plan, (edited, *rest), CapturedStep.from_json(pipe.artifact.captured, ""))
    assert found.holds
    text = r"rank0.py:\d+: adds up the gradient of shared.weight over ranks in another order than theirs"
    assert re.fullmatch(text, str(*found.otherwise))


@pytest.mark.parametrize("op", ["split.Tensor", "split_with_sizes.default", "unbind.int", "chunk.default"])
def test_views_in_a_list_are_in_the_memory_of_their_argument(op):
    packet, overload = op.split(".")
    assert schema_of(getattr(getattr(torch.ops.aten, packet), overload)).viewed == "self"


class Halves(nn.Module):
    """Both halves of a product are saved for the backward: the bytes of one storage."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 16) for _ in range(4))

    def forward(self, x, y):
        for layer in self.layers:
            left, right = layer(x).chunk(2, dim=-1)
            x = left * right
        return (x - y).square().mean()


def test_halves_of_a_storage_count_once():
    case = Case(Halves, numbers)
    pipe = compiled(case, case.build(), MICROBATCHES, Shape(2, "1f1b"))
    peaks = list(pipe.plan.prediction.peak_memory)
    assert [rank.peak_bytes for rank in pipe.check().ranks] == peaks
    measured = pipe.run_local(case.data(MICROBATCHES), measure_memory=True).peak_saved
    assert measured[0] == peaks[0]
    assert measured[1] == pytest.approx(peaks[1], abs=8 * MICROBATCHES + 4)  # and the losses


def test_each_summand_of_a_tied_weight_is_compared_with_its_own():
    """An edit of the last norm changes both gradients of the table; what each line computes is as it was."""
    _, found = problems("tied_head", 1, r"1e-05", "1e-06")
    assert not [text for text in found if re.search(r"computes (rows_added|mm)\(", text)], found


def test_messages_leave_no_gaps():
    """Ranks that wait read what nobody wrote."""
    artifact = pipeline("tied_head").artifact
    pattern = r'("blocks_2_add": \(\(.*?\), \()(\d+), '
    for by, holds in ((r"\g<1>\g<2>00, ", False), (r"\g<1>0, ", False), (r"\g<1>\g<2>, ", True)):
        programs = [re.sub(pattern, by, text) for text in artifact.programs]
        found = check(artifact.plan, programs, CapturedStep.from_json(artifact.captured, ""))
        assert found.holds is holds
        assert holds or "leave gaps or share elements" in str(found.problems[0])


def test_what_a_program_is_not_allowed():
    for text, wrong in (
        ("import os", "imports os"),
        ("open('x')", "a call of open"),
        ("import functools", "imports functools"),
        ("try:\n    pass\nexcept Exception:\n    pass", "a try"),
        ("with open('x'):\n    pass", "a with"),
        ("while True:\n    pass", "a while"),
        (
            "for _ in range(10):\n    pass",
            "a line at the top level that is no import, op, constant or function",
        ),
        ("class K:\n    pass", "a class"),
        ("step.__dict__", "the attribute .__dict__"),
        ("from os import path", "an import from os"),
        ("torch.set_default_dtype(torch.float64)", "a use of torch.set_default_dtype"),
        ("torch.cuda.synchronize()", "the attribute .synchronize"),
        ("step = isinstance(step, int)", "a call of isinstance"),
        ("step = 1", "no function step"),
        ("torch = 1", "another torch"),
        ("def f(x, x): pass", "another x"),
        ("def f(rt): pass", "another rt"),
        ("def f():\n    def g(): pass", "a function in a function"),
        ("def step(rt, batch, more): pass", "a step(rt, batch, more): it takes rt and the batch"),
    ):
        artifact = pipeline("tied_head").artifact
        programs = (f"{artifact.programs[0]}\n{text}\n", *artifact.programs[1:])
        found = check_artifact(replace(artifact, programs=programs)).problems
        lines = len(artifact.programs[0].splitlines())
        assert wrong in found[0].text, (text, found)
        assert found[0].line in (0, *range(lines + 2, lines + 4))
        assert "imports" in wrong or "no function" in wrong or found[0].text.startswith("is outside of what")
    assert torch.get_default_dtype() is torch.float32


def test_nothing_that_changes_a_container_is_shown():
    changed = [1], {1: 2}
    methods = {name for each in changed for name in dir(each) if not name.startswith("_")}
    assert len(methods) > 15
    harmless = {
        name for name in methods if not parse(f"def step(rt, batch):\n    print(batch.{name}())").outside
    }
    assert harmless <= {"copy", "count", "get", "index", "items", "keys", "values"}


def test_a_check_of_the_data_stands_in_a_function():
    by = r"from fxpipe.runtime.program.checks import expect\n\n\g<0>"
    text = re.sub(r"^def step", by, pipeline("tied_head").artifact.programs[0], flags=re.MULTILINE)
    text = re.sub(r"^    return rt", r"    expect(rt.key(0), [0])\n\g<0>", text, flags=re.MULTILINE)
    artifact = pipeline("tied_head").artifact
    (found, *_) = check_artifact(replace(artifact, programs=(text, *artifact.programs[1:]))).problems
    assert "fails: TypeError: expect stands in a function" in str(found)


def test_lines_outside_of_the_grammar_are_told_together():
    """Of all ranks."""
    artifact = pipeline("tied_head").artifact
    by = r"    with rt: pass\n    while 1: pass\n\g<0>"
    programs = [re.sub("^    return rt", by, text, flags=re.MULTILINE) for text in artifact.programs]
    found = check_artifact(replace(artifact, programs=tuple(programs))).problems
    assert [each.rank for each in found] == [0, 0, 1, 1]
    assert [each.text.rpartition(" ")[2] for each in found] == ["with", "while"] * 2


def test_no_program_runs_without_an_end(monkeypatch):
    assert evaluate.MOST_ROUNDS == 1_000_000
    monkeypatch.setattr(evaluate, "MOST_ROUNDS", 1_000)
    _, found = problems("tied_head", 0, r"^    return rt", r"    for i in range(10000): pass\n\g<0>")
    assert re.search("has loops of 1001 rounds, and 1000 are the most", found[0])
    _, found = problems(
        "tied_head", 0, r"^(    return rt)", r"    a = [1]\n    for i in a: a.append(i)\n\g<0>"
    )
    assert re.search("has loops of 1001 rounds", found[0])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("print(blocks_gelu, blocks_gelu.shape, blocks_gelu.dtype)", ""),
        ("print(f'{blocks_gelu.norm().item():.3f} {torch.abs(blocks_gelu) > 1}', end='')", ""),
        ("print('%.3f' % blocks_gelu.mean().item(), '{}'.format(blocks_gelu), str(1) + f'{2:3}')", ""),
        ("if str(blocks_gelu) == 'x': pass", ""),
        ("if blocks_gelu.isnan().any():\n        print(blocks_gelu)\n    else:\n        breakpoint()", ""),
        ("if blocks_gelu is blocks_gelu: blocks_gelu = None", "an if around more than print and breakpoint"),
        ("if blocks_gelu.sum() > 0: t(blocks_gelu)", "an if around more than print and breakpoint"),
        ("text = f'{blocks_gelu.norm().item():.3f}'; print(text, len(text), repr(blocks_gelu))", ""),
        ("assert f'{3:04d} {chr(97) if False else 1!r:>3}' == '0003   1'", ""),
        ("assert blocks_gelu.shape == (2, 5), blocks_gelu", ""),
        ("assert t(blocks_gelu) is not None", "an assert of what is more than looked at, t(blocks_gelu)"),
        ("print(t(blocks_gelu))", "a print of what is more than looked at, t(blocks_gelu)"),
        ("print(stage0_forward(params))", "a print of what is more than looked at, stage0_forward(params)"),
        ("print([].pop())", "a print of what is more than looked at, [].pop()"),
        ("print([blocks_gelu].sort())", "a print of what is more than looked at"),
        ("print(max([blocks_gelu], key=t))", "a print of what is more than looked at"),
        ("print(h := blocks_gelu)", "a print of what is more than looked at"),
        ("print(blocks_gelu.bernoulli())", "a print of what is more than looked at"),
        ("print(torch.rand_like(blocks_gelu))", "a print of what is more than looked at"),
        ("print(rt.gather(blocks_gelu))", "a print of what is more than looked at"),
        ("print(unknown)", "fails: the variable unknown has no value there"),
        ("print([x.shape for x in [blocks_gelu]], blocks_gelu._version)", "a print of what is more than"),
        ("print([x.shape for x in [blocks_gelu]], -blocks_gelu, not blocks_gelu.requires_grad)", ""),
        ("print(blocks_gelu.ndim, blocks_gelu.T.mean().shape, blocks_gelu.nbytes, blocks_gelu.grad_fn)", ""),
        ("print(float(blocks_gelu.sum()), len(blocks_gelu), torch.stack([blocks_gelu]), len(params))", ""),
        ("import math; print(math.sqrt(blocks_gelu.sum().item()), params.keys())", ""),
        ("print(blocks_gelu.numpy(), blocks_gelu.data_ptr(), blocks_gelu.is_contiguous())", ""),
        ("set()", "a call of set"),
        ("blocks_gelu = {1, 2}", "a set"),
        ("match blocks_gelu:\n        case list(): pass", "a match"),
        ("import typing; typing.Text(blocks_gelu)", "the method .Text"),
        ("for name in params: pass", "fails: TypeError: computes iter of params of blocks.0: the check"),
        (
            "torch.ops.aten._to_copy.default(blocks_gelu, device=torch.device('meta'))",
            "moves blocks_0_gelu to",
        ),
        ("text = '%s'; text %= blocks_gelu", "an assignment to what was there before"),
        ("text = '%s' % 1", "the operator '%s' % 1"),
        ("view = blocks_gelu.T", "the attribute .T"),
        (
            "text = f'{blocks_gelu:.3f}'; t(text)",
            "uses f'{blocks_gelu:.3f}' in an op: the check follows the ops",
        ),
        ("text = f'{blocks_gelu}'; print(text); t(text)", "uses a text in an op: the check follows the ops"),
        ("__builtins__['print'] = t", "__builtins__ as a value"),
        ("print(str({'a': [1, 2.5, None, torch.float32]}) + f'{7 % 4}', (2, 3), blocks_gelu.shape)", ""),
        (
            "torch.ops.aten._to_copy.default(blocks_gelu, device=torch.device('cuda:1'))",
            "fails: TypeError: names the device cuda:1: a rank has one",
        ),
        ("print = t", "another print"),
        ("len = t; print(len(blocks_gelu))", "a print of what is more than looked at, len(blocks_gelu)"),
        ("blocks_gelu = blocks_gelu * 2", "fails: TypeError: computes blocks_0_gelu * 2: the check"),
        ("blocks_gelu = blocks_gelu.float()", "the method .float"),
        ("blocks_gelu = blocks_gelu[0]", "fails: TypeError: computes item 0 of blocks_0_gelu: the check"),
        ("blocks_gelu = [blocks_gelu][blocks_gelu]", "fails: TypeError: computes hash of blocks_0_gelu"),
        ("blocks_gelu = 'a' + 'b'", "fails: TypeError: computes a + b: the check"),
        ("blocks_gelu += 1", "an assignment to what was there before"),
        ("torch.add(blocks_gelu, 1, out=blocks_gelu)", "a use of torch.add"),
        ("blocks_gelu.mul_(2)", "the method .mul_"),
        ("blocks_gelu.numpy()[0] = 1", "the method .numpy"),
        ("blocks_gelu.backward()", "the method .backward"),
        ("blocks_gelu.detach().zero_()", "the method .zero_"),
        ("blocks_gelu[0] = 1", "fails: TypeError: computes setitem of blocks_0_gelu: the check"),
        ("blocks_gelu.pop()", "fails: TypeError: reads .pop of blocks_0_gelu: the check"),
        ("breakpoint(); print(blocks_gelu.device, round(blocks_gelu.mean().item(), 3))", ""),
        ("if torch.is_grad_enabled(): pass", "an if of what is more than looked at"),
    ],
)
def test_what_a_program_does_with_a_tensor_outside_of_ops(text, wrong):
    """It may print what it computes, and nothing else."""
    line, found = check_edited("tied_head", 0, r"^    blocks_gelu = .*\n", rf"\g<0>    {text}\n")
    assert found.holds is not bool(wrong), found
    if wrong:
        at = rf"({line + 1}|{line + 2})"
        outside = "(is outside of what is checked: )?"
        assert re.match(f"rank0.py:{at}: {outside}{re.escape(wrong)}", str(found.problems[0]))


def test_a_captured_step_that_is_no_step():
    text = pipeline("tied_head").artifact.captured
    for edit, wrong in (
        (('"format":1', '"format":2'), "format"),
        (("aten.mm.default", "aten.mmm.default"), "mmm"),
        (('"value":', '"valve":'), "valve"),
        (('"loss":', '"loss":9'), "no op computes"),
    ):
        with pytest.raises(ArtifactError, match=wrong):
            reference_of(CapturedStep.from_json(text.replace(*edit), "captured.json"), Terms(RULES))


def test_a_pipeline_of_an_earlier_version_cannot_be_checked():
    with pytest.raises(RunError, match="earlier version"):
        check_artifact(replace(pipeline("tied_head").artifact, captured=""))


def test_each_wrong_summand_is_compared_with_another_one():
    terms, layout = Terms(RULES), Layout((WIDTH,), torch.float32)
    ones, others = (
        [terms.make(op, {"self": terms.input("batch", name, layout, True)}) for name in "ab"]
        for op in ("aten.sin", "aten.cos")
    )
    reference, line = Reference(terms), Line(0, 7)
    added = {term: [Addition(m, line, line) for m in range(MICROBATCHES)] for term in others}
    due = GradientSum.of(terms, ones, torch.float32)
    assert not [*due.problems(reference, MICROBATCHES, "weight", added, None)]
    assert len(reference.causes) == 2
    assert [len(places) for places in reference.causes.values()] == [1, 1]
