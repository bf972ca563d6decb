"""What notebooks show of a pipeline, a simulation, a result and a stage; and that of the examples."""

import ast
import base64
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest
import torch
from zoo import Case, Shape, TiedHead, compiled, tokens

import fxpipe
from fxpipe.viz import notebook

MICROBATCHES = 3
CASE = Case(lambda: TiedHead(6), tokens)  # of more gradients than are shown
NOTEBOOK = Path(__file__).parents[2] / "examples/first_minute.ipynb"


class Shown(HTMLParser):
    """The rows of all tables, and the pictures, of a piece of HTML whose elements are all closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.pictures: list[ET.Element] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag == "img":
            kind, _, data = dict(attributes)["src"].partition(",")
            assert kind == "data:image/svg+xml;base64"
            self.pictures.append(ET.fromstring(base64.b64decode(data)))
        elif tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


@pytest.fixture(scope="module")
def pipe() -> fxpipe.Pipeline:
    return compiled(CASE, CASE.build(), MICROBATCHES, Shape(2, "zb-h1", check=False))


def ops(picture: ET.Element) -> int:
    """The rectangles of ops, which have their numbers as texts."""
    return len([each for each in picture.iter() if each.get("class") == "n"])


def test_a_simulation_is_a_picture_with_a_style_of_its_own(pipe):
    timeline, steps = Shown(pipe.simulate()._repr_html_()), Shown(pipe.simulate_steps(3)._repr_html_())
    spans = sum(map(len, pipe.simulate().spans))
    assert (ops(timeline.pictures[0]), ops(steps.pictures[0])) == (spans, 2 * spans)
    assert "TiedHead" in "".join(timeline.pictures[0].itertext())


def test_a_pipeline_shows_its_step_and_the_memory_of_its_ranks(pipe):
    shown = Shown(pipe._repr_html_())
    assert len(shown.pictures) == 1
    assert [row[0] for row in shown.rows] == ["rank", "0", "1"]
    with mock.patch.object(notebook, "MOST_OPS", 3):
        assert Shown(pipe._repr_html_()).pictures == []
        assert "too many to show here" in pipe._repr_html_()


def test_a_result_shows_its_loss_and_the_norms_of_gradients(pipe):
    result = pipe.run_local(CASE.data(MICROBATCHES), measure_memory=True)
    html = result._repr_html_()
    assert f"loss {float(result.loss):.6g}<br>saved at most, by rank: " in html
    rows = {name: (shape, float(norm)) for name, shape, norm in Shown(html).rows[1:]}
    bias = result.grads["blocks.0.norm.bias"]
    assert rows["blocks.0.norm.bias"] == ("8", pytest.approx(float(bias.norm()), rel=1e-3))
    assert rows["embedding.weight"][0] == "11×8"
    assert f"… and {len(result.grads) - notebook.MOST_ROWS} more" in html


def test_a_stage_shows_its_costs_and_parameters(pipe):
    head, costs, names, *parameters = Shown(pipe.stages[1]._repr_html_()).rows
    assert len(head) == len(costs) == 5
    assert names == ["parameter", "shape"]
    assert [name for name, _ in parameters] == [*pipe.stages[1].parameters]
    assert ["head.weight", "11×8"] in parameters or ["embedding.weight", "11×8"] in parameters


def test_names_are_text(pipe):
    html = notebook.table_html([("<b>", "a"), ("<script>", "&")]) + notebook.lines_html(["<i>"])
    assert re.findall(r"<(?:b|script|i)>", html) == []
    assert Shown(html).rows == [["<b>", "a"], ["<script>", "&"]]


def test_the_notebook_of_the_examples_runs(tmp_path, monkeypatch):
    """As Jupyter runs it: the statements of a cell, and the value of its last expression is shown."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = json.loads(NOTEBOOK.read_text())
    assert (data["nbformat"], data["nbformat_minor"]) == (4, 5)
    cells = ["".join(cell["source"]) for cell in data["cells"] if cell["cell_type"] == "code"]
    names, shown = {"__name__": "__main__"}, list[object]()
    for cell in cells:
        *body, last = ast.parse(cell).body
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
        else:
            exec(compile(cell, "cell", "exec"), names)
    in_pictures = [type(each).__name__ for each in shown if hasattr(each, "_repr_html_")]
    assert in_pictures == ["Pipeline", "ShownResult", "ShownTimeline", "Stage", "ShownTimeline"]
    differences = [each for each in shown if isinstance(each, float)]
    assert len(differences) == 1
    assert differences[0] < 1e-6
    assert (tmp_path / "report.html").stat().st_size > 100_000
    assert all(cell.get("outputs", []) == [] for cell in data["cells"]), "the outputs are of no machine"
