"""Names are data, wherever they enter: no name becomes code or markup, and each one works.

More examples than in a usual run: ``NAMES_EXAMPLES=500 pytest tests/test_names.py -k any_names``.
"""

import ast
import builtins
import copy
import os
import re
import shutil
import textwrap
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import fx, nn
from torch.nn import functional as F
from zoo import LENGTH, WIDTH, Chain, numbers, sequences

import fxpipe
from fxpipe.cli import main
from fxpipe.codegen import wrapping as layout
from fxpipe.codegen.expressions import variable
from fxpipe.errors import CaptureError, number_of, printable, shortened
from fxpipe.ir import names
from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.search.build import build
from fxpipe.viz import labels
from fxpipe.viz.explanation import explain
from fxpipe.viz.frontier_picture import FrontierPoint, frontier_svg

EXAMPLES = int(os.environ.get("NAMES_EXAMPLES", "3"))

CODE = "setattr(__import__('builtins'), 'fxpipe_canary', True)"
ALPHABETS = "_ __ ① ² ª ﬁ é 名前 مرحبا 😀 👩\u200d💻 a\u0301 \u202eabc \ufeff"
PYTHON = (
    "class lambda None print float torch rt batch batches params grads step key keyed saved saved0 loss count"
)
VALUES = (
    "saved0_m1 collective0_0 x_m1 x_s1 MESSAGES mm t log addmm d_ 0 1 -1 01 item inf nan device constant_0"
)
QUOTES = (
    r"""' " \" \ \\ C:\new \d+ \N{DASH} \u0041 \l \G ( ) [0] x[0:2] {} {0} {title} %s % ` # / a/b.py x:3"""
)
MARKUP = "<b> < > & &amp; ]]> <!-- [red] [/red] :smile: \x1b[31m"
NASTY = (
    *" ".join((ALPHABETS, PYTHON, VALUES, QUOTES, MARKUP)).split(" "),
    *("\n", "\r", "\t", "\0", "\f", "\x7f", "\x85", "\u2028", " ", "self ", '"""', "'''", "\ud800", "\udc80"),
    *("coding: utf-7", "# -*- coding: rot13 -*-", ", ", " = ", "a, b = c", "A" * 120, "x" * 300, "A, " * 80),
    *(
        f"\n{CODE}\n",
        f'"""\n{CODE}\n"""',
        f'"]; {CODE} #',
        f"']; {CODE} #",
        f"){CODE}",
        f"\n    {CODE}\n    #",
    ),
    *(f"\r    {CODE} #", f"\\\n{CODE}", f"\u2028{CODE}", "__metadata__"),
)


def encodable(name: str) -> str:
    """What Python takes for the name of a class."""
    return name.encode(errors="ignore").decode().replace("\0", "")


TEXT = st.one_of(
    st.sampled_from(NASTY),
    st.text(max_size=12),
    st.lists(st.sampled_from(NASTY), min_size=2, max_size=4).map("".join),
)
ATTRIBUTE = TEXT.map(lambda name: name.replace(".", "·")).filter(bool)  # torch wants no dot and no empty name
KEY = TEXT | st.integers(-3, 3) | st.none() | st.tuples(TEXT, st.integers(0, 2))

FORWARD = """
def forward(self, **batch):
    h = list(batch.values())[0]
    for layer in self._modules.values():
        h = layer(h)
    target = list(list(batch.values())[1].values())[0]
    return ((h - target) ** 2).mean()


def block(self, x):
    weight, bias = self._parameters.values()
    (scale,) = self._buffers.values()
    x = torch.softmax(x @ weight, 1) + bias + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
    scale.mul_(0.5)
    return x + scale
"""


def model_of(cls: str, modules: list[str], parameters: list[str], buffer: str, file: str) -> nn.Module:
    """Modules in a chain, each with two parameters and a buffer that its forward changes."""
    namespace = {"torch": torch}
    exec(compile(FORWARD, file, "exec"), namespace)
    model = type(cls, (nn.Module,), {"forward": namespace["forward"]})()
    block = type(cls, (nn.Module,), {"forward": namespace["block"]})
    for name in modules:
        layer = block()
        for parameter, shape in zip(parameters, ((WIDTH, WIDTH), (WIDTH,)), strict=True):
            layer.register_parameter(parameter, nn.Parameter(torch.randn(shape)))
        layer.register_buffer(buffer, torch.ones(WIDTH))
        model.add_module(name, layer)
    return model


def eager(model: nn.Module, batch: dict, microbatches: int) -> tuple[torch.Tensor, dict, dict]:
    """Loss, gradients and buffers of a step without fxpipe."""
    model = copy.deepcopy(model)
    (x, x_value), (y, nested) = batch.items()
    (inner, y_value) = next(iter(nested.items()))
    losses = []
    for a, b in zip(x_value.chunk(microbatches), y_value.chunk(microbatches), strict=True):
        loss = model(**{x: a, y: {inner: b}})
        (loss / microbatches).backward()
        losses.append(loss.detach())
    grads = {name: p.grad for name, p in model.named_parameters()}
    return torch.stack(losses).mean(), grads, dict(model.named_buffers())


def check_step(pipe: fxpipe.Pipeline, model: nn.Module, batch: dict) -> None:
    """One step gives eager's loss, gradients and buffers."""
    loss, grads, buffers = eager(model, batch, 2)
    found = pipe.run_local(batch)
    torch.testing.assert_close(found.loss, loss)
    assert found.grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(found.grads[name], grad)
    for name, buffer in buffers.items():
        torch.testing.assert_close(pipe.buffers[name], buffer)


def check_pictures(files: list[Path]) -> None:
    for file in files:
        if file.suffix == ".svg":
            ET.parse(file)
    if shutil.which("dot"):  # which refuses sources that are not well formed
        assert {f.stem for f in files if f.suffix == ".svg"} >= {f.stem for f in files if f.suffix == ".dot"}


EVERYWHERE = {
    "cls": f'"""\n{CODE}\n"""',
    "modules": [f"\n    {CODE}\n    #", f'"]; {CODE} #', f"\r{CODE} #"],
    "tensors": [f'"]\n    {CODE}\n    #', f"\\\n{CODE}", f'", 0)\n    {CODE}\n    #'],
    "keys": [f'"]\n    {CODE}\n    #', f"\n    {CODE}"],
    "inner": 0,
    "file": f"x.py\n    {CODE}\n    #",
    "schedule": f'"""\n{CODE}\n"""',
}


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # a smaller example is not worth its time
)
@example(**EVERYWHERE)
@given(
    cls=TEXT.map(encodable),
    modules=st.lists(ATTRIBUTE, min_size=3, max_size=3, unique=True),
    tensors=st.lists(ATTRIBUTE, min_size=3, max_size=3, unique=True),
    keys=st.lists(TEXT, min_size=2, max_size=2, unique=True),
    inner=KEY,
    file=TEXT.map(encodable),
    schedule=TEXT,
)
def test_any_names(cls, modules, tensors, keys, inner, file, schedule):
    assume(not any(hasattr(nn.Module(), name) for name in (*modules, *tensors)))
    assume("self" not in keys)
    torch.manual_seed(0)
    model = model_of(cls, modules, tensors[:2], tensors[2], file)
    before = copy.deepcopy(model)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    batch, microbatch = {keys[0]: x, keys[1]: {inner: y}}, {keys[0]: x[:2], keys[1]: {inner: y[:2]}}
    options = {"schedule": replace(SCHEDULE, name=schedule), "split_points": [modules[1]]}
    builtins.fxpipe_canary = False
    if any(impossible(name) for name, _ in (*model.named_parameters(), *model.named_buffers())):
        with pytest.raises(CaptureError, match="No pipeline can hold"):
            fxpipe.compile(model, microbatch, ranks=2, microbatches=2, **options)
        return
    pipe = fxpipe.compile(model, microbatch, ranks=2, microbatches=2, **options)
    for program in pipe.artifact.programs:
        check_program(program)
    with TemporaryDirectory() as directory:
        saved, drawn = Path(directory) / "saved", Path(directory) / "drawn"
        pipe.save(saved)
        loaded = fxpipe.load(saved)
        check_step(pipe, before, batch)
        check_step(loaded, before, batch)
        check_pictures([*pipe.draw(drawn, expand=(1, "B")), *saved.iterdir()])
    with open(os.devnull, "w", encoding="utf-8") as sink:
        explain(loaded.plan, Console(file=sink))
    assert builtins.fxpipe_canary is False


SCHEDULE = build("zb-h1", ranks=2, microbatches=2, costs=chain([StageCost(1, 1, 1, 1, 1)] * 2))


def impossible(name: str) -> bool:
    """Of a parameter or buffer: no text, or the name of some rows of a table."""
    return any("\ud800" <= c <= "\udfff" for c in name) or bool(re.search(r"\[\d+:\d+\]\Z", name))


def check_program(program: str) -> None:
    """Nothing runs in it but what the compiler writes."""
    tree = ast.parse(program)
    assert [type(node) for node in tree.body[:2]] == [ast.Expr, ast.Import]
    assert {type(node) for node in tree.body[2:]} <= {ast.Assign, ast.FunctionDef}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)][1:]


# -- one place at a time ------------------------------------------------------------------------------------


def test_literals_give_back_every_character():
    for first in range(0, 0x110000, 0x1000):
        text = "".join(map(chr, range(first, first + 0x1000)))
        source = names.text_literal(text)
        assert source.isprintable()
        assert ast.literal_eval(source) == text


@given(TEXT)
def test_text_stays_in_its_place(text):
    assert ast.literal_eval(names.text_literal(text)) == text
    assert [node.value.value for node in ast.parse(names.text_literal(text)).body] == [text]
    assert ast.parse(names.comment(text)).body == []
    (node,) = ast.parse(names.docstring([text, "", text])).body
    assert node.value.value == f"{printable(text)}\n\n{printable(text)}\n"
    assert ET.fromstring(f"<a>{labels.dot_html(text)}</a>").text == (printable(text) or None)
    assert len(shortened(text, 60)) <= 60
    printable(text).encode()


@given(TEXT)
def test_identifiers(text):
    name = names.identifier(text)
    assert name.isidentifier()
    assert name.isascii()
    assert name == name.lower()
    graph = fx.Graph()
    once = graph.placeholder(name).name
    assert fx.Graph().placeholder(once).name == once


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("layers.0.mlp", "layers_0_mlp"),
        ("0.normLayer", "_0_norm_layer"),
        ("①", "unnamed"),
        ("_", "unnamed"),
        ("x" * 100 + ".mm", "x" * 77 + "_mm"),
    ],
)
def test_identifiers_resemble_the_text(text, name):
    assert names.identifier(text) == name


def test_a_variable_is_none_that_a_program_uses_otherwise():
    taken = ("rt", "batch", "saved", "saved0", "gradients12", "collective0_1", "loss", "_", "keyed", "x_s1")
    given = [name + "_" * k for name in (*taken, "x", "stage1_forward", "model_view") for k in range(3)]
    variables = [variable(name) for name in given]
    assert len(set(variables)) == len(given)
    assert not set(variables) & set(taken)
    assert variable("model_view") == "model_view"


@given(st.lists(TEXT, min_size=1, max_size=8), st.integers(1, 90))
def test_lines_break_at_commas_outside_of_texts(texts, length):
    name = "x" * length
    literals = [names.text_literal(text) for text in texts]
    for line in (
        f"{name}, params[{literals[0]}] = {name}({', '.join(literals)}, k=[{literals[0]}, {name}])",
        f"{', '.join(f'b[{text}]' for text in literals)} = {name}",
        f"{name} = {name}[{literals[0]}]",
        f"{name} = [{', '.join(literals)}, {name}]",
        f"{name}(a[{literals[-1]}])",
        f"del {name}, b[{literals[-1]}]",
    ):
        source = layout.wrapped(line)
        assert leaves(source) == leaves(line)
        longest = max(len(source_line) for source_line in source.splitlines())
        assert longest <= max(layout.WIDTH, 20 + max(map(len, literals)) + 2 * length)


def test_a_long_list_keeps_its_name_in_the_first_line():
    items = [f"{letter * 40}" for letter in "abc"]
    assert layout.wrapped(f"carry = [{', '.join(items)}]").split("\n")[0] == "carry = ["


def test_a_comment_stays_behind_the_first_line_of_its_statement():
    line = f"    h = mm({'x' * 60}, {'y' * 60})  # f32[2, 16]"
    first, *_ = layout.wrapped(line).splitlines()
    assert first == "    h = mm(  # f32[2, 16]"
    assert leaves(textwrap.dedent(layout.wrapped(line))) == leaves(line.strip())
    assert layout.wrapped(f"    h = mm(x, y)  # {'z' * 110}") == f"    h = mm(x, y)  # {'z' * 110}"


def leaves(source: str) -> list[str]:
    """All of a statement but its brackets: ``del (a, b)`` is ``del a, b``."""
    nodes = ast.walk(ast.parse(source))
    return [ast.dump(node) for node in nodes if isinstance(node, ast.Call | ast.Subscript | ast.Name)]


class Soft(nn.Module):
    def forward(self, x):
        return torch.softmax(x, 1)


class Logs(nn.Module):
    """A module and an op in it are called together as another op is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.log, self.second = nn.Linear(WIDTH, WIDTH), Soft(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return F.nll_loss(torch.log_softmax(self.second(self.log(self.first(x))), 1), y)


def test_an_op_is_not_hidden_by_a_value_of_its_name():
    torch.manual_seed(0)
    model = Logs()
    batch = {"x": torch.randn(4, WIDTH), "y": torch.arange(4)}
    pipe = fxpipe.compile(
        model, {k: v[:2] for k, v in batch.items()}, ranks=1, microbatches=2, schedule="1f1b"
    )
    assert "\n    log_softmax = softmax(" in pipe.artifact.programs[0]
    torch.testing.assert_close(pipe.run_local(batch).loss, model(**batch).detach())


class Held(nn.Module):
    """Its buffer is called as fxpipe calls the tensor that the forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("constant_0", torch.ones(2, WIDTH))

    def forward(self, x):
        return self.linear(x * self.constant_0 + torch.tensor([float(k) for k in range(WIDTH)])).mean()


def test_a_constant_and_a_buffer_of_one_name(tmp_path):
    model, x = Held(), torch.randn(4, WIDTH)
    pipe = fxpipe.compile(model, {"x": x[:2]}, ranks=1, microbatches=2, schedule="1f1b")
    pipe.save(tmp_path / "saved")
    loss = (model(x[:2]) + model(x[2:])).detach() / 2
    torch.testing.assert_close(fxpipe.load(tmp_path / "saved").run_local({"x": x}).loss, loss)


@pytest.mark.parametrize("name", ["\ud800", "a\udc80", "__metadata__", "weight[0:4]", "a\n[0:4]"])
def test_names_that_no_file_of_weights_can_hold(name):
    model = Chain(2)
    model.register_parameter(name, nn.Parameter(torch.zeros(1)))
    with pytest.raises(CaptureError, match=re.escape(f"parameter or buffer {name!r}")):
        fxpipe.compile(model, numbers(2), ranks=2, microbatches=2)


def test_names_are_no_markup_in_the_terminal(tmp_path, capsys, monkeypatch):
    name = "{0}[red]:smile:\x1b[2J{title}"
    monkeypatch.setenv("FORCE_COLOR", "1")
    model = Chain(2)
    model.__class__ = type(name, (Chain,), {})
    pipe = fxpipe.compile(model, numbers(2), ranks=2, microbatches=2, schedule="1f1b")
    pipe.save(tmp_path / "saved")
    assert main(["explain", str(tmp_path / "saved")]) == 0
    assert main(["simulate", "--costs", str(tmp_path / "saved")]) == 0
    assert main(["explain", str(tmp_path / name)]) == 2
    shown, errors = capsys.readouterr()
    assert shown.count("{0}[red]:smile:\\x1b[2J{title}") == 2
    assert errors.count("{0}[red]:smile:\\x1b[2J{title}") >= 2  # the bar, and the directory that is not there
    assert "\x1b[2J{" not in shown + errors


@pytest.mark.parametrize("name", ['"""', "\n", "<b>&\0", "[red]"])
@pytest.mark.slow
def test_names_of_schedules(name, tmp_path, capsys):
    model, batch = Chain(2), numbers(4)
    schedule = replace(SCHEDULE, name=name)
    pipe = fxpipe.compile(model, numbers(2), ranks=2, microbatches=2, schedule=schedule)
    check_program(pipe.artifact.programs[0])
    pipe.run_local(batch)
    check_pictures(pipe.draw(tmp_path / "drawn"))
    pipe.explain()
    assert printable(name) in capsys.readouterr().out.replace("\n", "\\n")
    assert printable(name) in "".join(
        ET.fromstring(frontier_svg([FrontierPoint(name, 1, 0.5)], name, "b")).itertext()
    )


@pytest.mark.variation
@pytest.mark.slow
def test_names_of_dimensions():
    name = "a, b = '\n\\"
    pipe = fxpipe.compile(
        Chain(2), sequences(3), ranks=2, microbatches=2, schedule="1f1b", dimensions={name: LENGTH}
    )
    assert pipe.simulate({name: LENGTH}).seconds == pytest.approx(pipe.simulate().seconds)
    assert {str(symbol) for symbol in pipe.stages[0].expressions.saved_activations.free_symbols} <= {
        name,
        "microbatch",
    }


class Words(nn.Module):
    """A small language model whose parts have the given names."""

    def __init__(self, table: str, body: str, head: str) -> None:
        super().__init__()
        self.add_module(table, nn.Embedding(16, WIDTH))
        self.add_module(body, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)))
        self.add_module(head, nn.Linear(WIDTH, 16, bias=False))

    def forward(self, x, y):
        table, body, head = self._modules.values()
        return F.cross_entropy(head(body(table(x))).flatten(0, 1), y.flatten())


@pytest.mark.parametrize(
    "options", [{"vocab_parallel": True}, {"recompute": "full"}, {"offload": True}, {"stages_per_rank": 2}]
)
def test_names_with_options(options, tmp_path):
    torch.manual_seed(0)
    model = Words('\nEmb_X"', f"\n    {CODE}", "C:\\new, a = (\n")
    batch = {"x": torch.randint(16, (4, 3)), "y": torch.randint(16, (4, 3))}
    builtins.fxpipe_canary = False
    schedule = "interleaved" if "stages_per_rank" in options else "1f1b"
    microbatch = {name: tensor[:2] for name, tensor in batch.items()}
    pipe = fxpipe.compile(model, microbatch, ranks=2, microbatches=2, schedule=schedule, **options)
    pipe.save(tmp_path / "saved")
    loss = model(**batch)
    loss.backward()
    for found in (pipe.run_local(batch), fxpipe.load(tmp_path / "saved").run_local(batch)):
        torch.testing.assert_close(found.loss, loss.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found.grads[name], parameter.grad)
    last = [section.phase for section in pipe.sections if section.stage == 0][-1]
    check_pictures([*(tmp_path / "saved").iterdir(), *pipe.draw(tmp_path / "drawn", expand=(0, last))])
    assert builtins.fxpipe_canary is False


class Op(nn.Module):
    """An op of the test's own; with its name that of a value is as a program's own ones are."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = getattr(torch.ops.fxpipe_names, op).default
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.op(x.detach()) + x) * self.op(x.detach())


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.saved, self.gradients, self.saved0, self.x = Op("for_weight"), Op("m1"), Op("m0"), Op("s1")
        self.collective0 = Op("_0")

    def forward(self, x, y):
        for module in (self.saved, self.gradients, self.saved0, self.x, self.collective0):
            x = module(x)
        return F.mse_loss(x, y)


@pytest.fixture
def own_ops():
    library = torch.library.Library("fxpipe_names", "DEF")
    for name in ("for_weight", "m0", "m1", "s1", "_0"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, torch.sin, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_values_that_are_called_like_a_programs_own(own_ops, stages_per_rank):
    torch.manual_seed(0)
    model, batch = Own(), numbers(4)
    schedule = {1: "zb-h1", 2: "interleaved"}[stages_per_rank]
    pipe = fxpipe.compile(model, numbers(2), ranks=2, microbatches=2, schedule=schedule)
    assert "    saved_for_weight_ = for_weight(" in pipe.artifact.programs[0]
    loss = model(**batch)
    loss.backward()
    found = pipe.run_local(batch)
    torch.testing.assert_close(found.loss, loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad)


@pytest.mark.skipif(not shutil.which("dot"), reason="dot is not installed")
def test_pictures_show_names_as_they_are(tmp_path):
    model = Words("\\N&amp;", "<b>\\l\n", "{x|y} [%s]")
    example = {"x": torch.zeros(2, 3, dtype=torch.int64), "y": torch.zeros(2, 3, dtype=torch.int64)}
    pipe = fxpipe.compile(model, example, ranks=1, microbatches=2, schedule="1f1b")
    svgs = [file for file in pipe.draw(tmp_path, expand=(0, "F")) if file.suffix == ".svg"]
    for svg in svgs[:2]:
        shown = "".join(ET.parse(svg).getroot().itertext()).replace("\xa0", " ")
        assert all(name in shown for name in ("\\N&amp;", "<b>\\l\\n", "{x|y} [%s]"))


def test_a_number_agrees_with_its_noun():
    assert [number_of(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [number_of(2, thing) for thing in ("microbatch", "process")] == ["2 microbatches", "2 processes"]
