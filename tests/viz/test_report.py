"""The report: its parts as data, the graph that a saved pipeline keeps, and the file of HTML."""

import base64
import json
import re
import zlib
from html import unescape
from pathlib import Path

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.cli import main
from fxpipe.errors import ArtifactError
from fxpipe.plan.saved.recorded import write_spans
from fxpipe.schedule.ops import OpKind
from fxpipe.schedule.units import bytes_text, seconds_text
from fxpipe.viz.report.data import report_data
from fxpipe.viz.report.graph_record import (
    FOR_WEIGHT,
    OFFLOADED,
    RECOMPUTED,
    SAVED,
    SENT,
    SHARDED,
    graph_record,
    read_graph,
)
from fxpipe.viz.report.page import SCRIPTS, page
from fxpipe.viz.report.program_lines import places
from fxpipe.viz.report.write import live_source, measured_step, saved_source

ROOT = Path(__file__).parents[2]
HOSTILE = "</script><img src=x onerror=hacked()><!--"


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.parts = nn.ModuleDict(
            {"inner": nn.Linear(width, 4 * width), HOSTILE: nn.Linear(4 * width, width)}
        )

    def forward(self, x):
        return x + self.parts[HOSTILE](torch.relu(self.parts["inner"](self.norm(x))))


def blocks(**options):
    model = nn.Sequential(*(Block(32) for _ in range(4)))
    options = {
        "schedule": "zb-h1",
        "ranks": 2,
        "microbatches": 4,
        "split_points": ["2"],
        "check": False,
    } | options
    return fxpipe.compile(
        model, (torch.zeros(32, 32),), loss_fn=lambda out, batch: out.pow(2).mean(), **options
    )


@pytest.fixture(scope="module")
def pipe():
    return blocks()


@pytest.fixture(scope="module")
def offloading():
    return blocks(microbatches=8, offload=fxpipe.Offload(1.0, bandwidth=1e12))


@pytest.fixture(scope="module")
def saved(pipe, tmp_path_factory):
    """Saved, with a measured step on two clocks that are an hour apart, in which all takes twice as long."""
    directory = tmp_path_factory.mktemp("report") / "pipe"
    pipe.save(directory)
    for rank, spans in enumerate(pipe.simulate().spans):
        write_spans(
            directory, rank, [(str(op), 2 * s + 3600 * rank, 2 * e + 3600 * rank) for op, s, e in spans]
        )
    return directory


@pytest.fixture(scope="module")
def data(saved):
    source = saved_source(saved)
    return report_data(source.plan, source.programs, source.graph, source.measured)


# The graph as data


def test_a_record_accounts_for_what_is_saved_and_sent(pipe, offloading):
    for each in (pipe, offloading):
        accounts(each)


def accounts(pipe):
    record = graph_record(pipe.graph, pipe.sections, pipe.plan)
    for stage, cost in enumerate(pipe.plan.costs.stages):
        kept = [k for k in record.kept if k.stage == stage]
        assert sum(k.bytes for k in kept) == cost.saved_activations
        assert {k.until for k in kept} == {"B", "W"}
    assert [(s.source, s.target, s.bytes) for s in record.sent] == [
        (f"{e.source.phase}{e.source.stage}", f"{e.target.phase}{e.target.stage}", e.bytes)
        for e in pipe.plan.costs.edges
    ]
    assert {s.shape for s in record.sent} == {"f32[32, 32]"}


def test_a_record_names_ops_modules_and_inputs(pipe):
    record = graph_record(pipe.graph, pipe.sections, pipe.plan)
    first = next(
        k
        for k, path in enumerate(record.path)
        if record.texts[path].startswith("0.parts.inner") and record.flops[k]
    )
    assert record.texts[record.target[first]] == "aten.addmm.default"
    assert record.texts[record.shape[first]] == "f32[32, 128]"
    assert (record.stage[first], record.phase[first]) == (0, 0)
    assert record.flops[first] == 2 * 32 * 32 * 128
    assert record.bytes[first] == 32 * 128 * 4
    assert {record.texts[k] for k in record.weights[first]} == {"0.parts.inner.bias"}
    assert "norm" in record.name[record.inputs[first][0]]


@pytest.mark.parametrize("bit", [RECOMPUTED, OFFLOADED])
def test_marks_of_options(pipe, offloading, bit):
    other = offloading if bit == OFFLOADED else blocks(recompute="full")
    plain, changed = (graph_record(p.graph, p.sections, p.plan) for p in (pipe, other))
    assert any(marks & bit for marks in changed.marks)
    assert not any(marks & bit for marks in plain.marks)
    marked = [k for k, marks in enumerate(changed.marks) if marks & bit]
    if bit == RECOMPUTED:
        assert {changed.phase[k] for k in marked} <= {1, 2}
        assert any(changed.flops[k] for k in marked)
    else:
        assert all(changed.marks[k] & SAVED for k in marked)


def test_marks_of_saved_and_sent_values(pipe):
    record = graph_record(pipe.graph, pipe.sections, pipe.plan)
    sent = {k for k, marks in enumerate(record.marks) if marks & SENT}
    assert sent == {s.op for s in record.sent}
    saved = {k for k, marks in enumerate(record.marks) if marks & SAVED}
    assert saved == {k.op for k in record.kept}
    assert any(marks & FOR_WEIGHT for marks in record.marks)
    assert not any(marks & SHARDED for marks in record.marks)


def test_a_saved_pipeline_keeps_its_graph(pipe, saved):
    assert read_graph(saved, 2) == graph_record(pipe.graph, pipe.sections, pipe.plan)


@pytest.mark.parametrize(
    ("field", "value"),
    [("format", 9), ("flops", [1]), ("path", 10**6), ("inputs", [[10**6]]), ("phase", 3), ("stage", 2)],
)
def test_a_damaged_graph(saved, tmp_path, field, value):
    found = json.loads((saved / "graph.json").read_text())
    if isinstance(found[field], list) and not isinstance(value, list):
        value = [value, *found[field][1:]]
    if field == "inputs":
        value = [*value, *found[field][1:]]
    (tmp_path / "graph.json").write_text(json.dumps(found | {field: value}))
    with pytest.raises(ArtifactError, match=r"graph.json is damaged"):
        read_graph(tmp_path, 2)


# Lines of programs


def test_lines_of_ops(pipe):
    program = pipe.artifact.programs[1]
    lines = program.splitlines()
    found = places(program)
    assert found.keys() == {"F1", "B1", "W1"}
    assert lines[found["F1"].line - 1] == "    def F1(m):"
    assert found["F1"].text.startswith("def F1(m):\n    ")
    assert lines[found["F1"].section - 1].startswith("def stage1_forward(")
    assert sorted(found["B1"].calls) == [0, 1, 2, 3]
    assert all(f"B1({m})" in lines[line - 1] for m, line in found["B1"].calls.items())


@pytest.mark.parametrize("program", ["", "def step(", "x = 1", "def other(): pass"])
def test_a_program_without_a_step_has_no_lines(program):
    assert places(program) == {}


# Parts of the report


def unfolded(columns):
    """(op, start, end) in ticks."""
    now, found = 0, []
    for kind, stage, m, gap, length in zip(
        columns["kind"],
        columns["stage"],
        columns["microbatch"],
        columns["gap"],
        columns["length"],
        strict=True,
    ):
        start = now + gap
        now = start + length
        found.append((f"{['F', 'B', 'W', 'BW'][int(kind)]}{stage}.{m}", start, now))
    return found


def test_columns_are_the_simulated_step(pipe, data):
    timeline = pipe.simulate()
    for own, columns in zip(timeline.spans, data["predicted"]["ranks"], strict=True):
        found = unfolded(columns)
        assert [name for name, *_ in found] == [str(span.op) for span in own]
        for (_, start, end), span in zip(found, own, strict=True):
            assert start * data["tick"] == pytest.approx(span.start, abs=2 * data["tick"])
            assert end * data["tick"] == pytest.approx(span.end, abs=2 * data["tick"])


def test_the_measured_step_is_beside_it(pipe, data):
    assert data["measured"]["seconds"] == pytest.approx(2 * pipe.simulate().seconds, rel=0.2)
    predicted, measured = (unfolded(data[k]["ranks"][1]) for k in ("predicted", "measured"))
    assert [name for name, *_ in predicted] == [name for name, *_ in measured]
    differences = {(d["stage"], d["kind"]): d["median"] / d["predicted"] for d in data["differences"]}
    assert differences.keys() == {(stage, kind) for stage in (0, 1) for kind in "FBW"}
    assert list(differences.values()) == pytest.approx([2.0] * 6)


def test_measured_times_are_judged_at_their_own_pace(pipe):
    plan = pipe.plan

    def slow(span):  # all ops take twice as long as predicted, and one four times
        times = 4 if (span.op.kind, span.op.stage) == (OpKind.B, 1) else 2
        return span._replace(end=span.start + times * (span.end - span.start))

    spans = [[slow(span) for span in row] for row in pipe.simulate().spans]
    rows = report_data(plan, ("",) * plan.ranks, None, spans)["differences"]
    assert (rows[0]["stage"], rows[0]["kind"]) == (1, "B")  # the largest difference
    assert [row["expected"] / row["predicted"] for row in rows] == pytest.approx([2.0] * 6)
    assert [row["median"] / row["expected"] for row in rows] == pytest.approx([2.0] + 5 * [1.0])


def test_messages_have_names_shapes_and_bytes(data):
    forward = next(edge for edge in data["edges"] if edge["source"] == "F0")
    ((name, shape, size, op),) = forward["values"]
    assert (shape, size, forward["from"], forward["to"]) == ("f32[32, 32]", 4096, 0, 1)
    assert data["graph"]["name"][op] == name
    assert data["links"]["messages"][0][:4] == [0, 1, 4, 4 * 4096]


def test_memory_has_weights_gradients_and_changes(pipe, data):
    weights = [
        sum(p.numel() for n, p in pipe.parameters.items() if int(n[0]) // 2 == rank) * 4 for rank in (0, 1)
    ]
    assert [held["weights"] for held in data["memory"]] == weights
    assert [held["gradients"] for held in data["memory"]] == weights
    peak, live = 0, 0
    for kind, size in zip(data["memory"][0]["held"], data["memory"][0]["bytes"], strict=True):
        live += size * (kind != "3")  # 3: messages, beside the simulated memory
        peak = max(peak, live)
    assert peak == pipe.simulate().peak_memory[0]


def test_the_head_has_the_numbers_of_repr(pipe, data):
    head, shown = data["head"], repr(pipe)
    (peak, rank), (total, fullest) = head["memory"], head["memory_with_adamw"]
    assert peak == 2 * data["memory"][rank]["weights"] + head["peak_memory"][rank]
    assert total == peak + 2 * data["memory"][rank]["weights"]  # AdamW has two values
    assert fullest == rank
    assert f"memory: at most {bytes_text(peak)}, on rank {rank} (" in shown
    assert f"with AdamW's state: at most {bytes_text(total)}, on rank {fullest}" in shown
    assert head["bounds"].startswith(f"{head['schedule']}: time {seconds_text(head['seconds'])}, lower bound")


def test_stages(pipe, data):
    flops = 3 * 2 * 32 * (32 * 128 + 128 * 32)  # F, B and W of the two products of a block
    for stage, cost in zip(data["stages"], pipe.plan.costs.stages, strict=True):
        assert stage["forward"] == cost.forward
        assert stage["parameters"] == 2 * (2 * 32 + 32 * 128 + 128 + 128 * 32 + 32)
        assert sum(stage["flops"]) == 2 * flops


def test_what_is_not_known_is_said(pipe, saved):
    source = live_source(pipe.plan, pipe.artifact.programs, pipe.graph, pipe.sections, None)
    assert source.measured is None
    assert any(
        "No recorded step" in line
        for line in report_data(pipe.plan, source.programs, source.graph)["unknown"]
    )
    bare = report_data(pipe.plan, ("", ""), None)
    assert [edge["values"] for edge in bare["edges"]] == [None, None]
    assert [stage["flops"] for stage in bare["stages"]] == [None, None]
    assert sum("No graph" in line or "programs" in line for line in bare["unknown"]) == 2


def test_a_step_of_another_order_is_left_out(pipe, tmp_path):
    for rank, spans in enumerate(pipe.simulate().spans):
        write_spans(tmp_path, rank, [(str(op), s, e) for op, s, e in spans[:: -1 if rank else 1]])
    with pytest.warns(UserWarning, match=r"measured1.json has other ops"):
        assert measured_step(pipe.plan, tmp_path) is None


def test_a_measured_step_has_the_ops_that_compute_nothing(tmp_path):
    """No gradient leaves the first stage, and the last one has no parameter: no B0, and no W1."""
    pipe = fxpipe.compile(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        (torch.ones(2, 8),),
        loss_fn=lambda out, batch: out.pow(2).mean(),
        **{"ranks": 2, "microbatches": 2, "schedule": "zb-h1", "split_points": ["1"]},
    )
    runtimes = pipe.run_local((torch.ones(4, 8),)).runtimes
    for rank, rt in enumerate(runtimes):
        write_spans(tmp_path, rank, rt.record.spans)
    measured = measured_step(pipe.plan, tmp_path)
    assert [[span.op for span in row] for row in measured] == [
        [span.op for span in row] for row in pipe.simulate().spans
    ]
    empty = [span for row in measured for span in row if str(span.op)[:2] in ("B0", "W1")]
    assert len(empty) == 4
    assert all(span.start == span.end for span in empty)
    found = report_data(pipe.plan, pipe.artifact.programs, None, measured)["differences"]
    assert {(row["stage"], row["kind"]) for row in found} == {(0, "F"), (0, "W"), (1, "F"), (1, "B")}


# The page


def test_the_page_has_the_data_and_no_markup_of_names(data):
    text = page(data)
    packed = re.search(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]+)</script>', text)
    assert json.loads(zlib.decompress(base64.b64decode(packed[1]))) == json.loads(json.dumps(data))
    assert HOSTILE in json.dumps(data, ensure_ascii=False)
    assert "hacked" not in text
    assert text.count("<script") == text.count("</script>") == 3 + len(SCRIPTS)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    assert len(text) < 300_000


def test_the_live_report_of_the_site_is_as_reports_are_now(data):
    live = (ROOT / "docs/live_report.html").read_text(encoding="utf-8")
    packed = re.search(r'id="data">([A-Za-z0-9+/=]+)<', live)[1]
    shown = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert shown.keys() == data.keys()
    assert shown["head"].keys() == data["head"].keys()
    ours = page(shown)  # all but the data, which another zlib may have packed
    assert live.replace(packed, "") == ours.replace(re.search(r'id="data">(.*?)<', ours)[1], ""), (
        "python benchmarks/live_report.py"
    )


def test_all_kinds_of_memory_have_a_color(data):
    text = page(data)
    kinds = re.search(r"const STANDING = (\[.*?\]);", text)[1]
    for kind in json.loads(kinds):
        assert re.search(rf"--{kind}: #[0-9a-f]{{6}};", text), kind


def test_a_hostile_model_name_is_text(data):
    hostile = data | {"head": data["head"] | {"model": HOSTILE}}
    title = re.search(r"<title>(.*)</title>", page(hostile))[1]
    assert "<" not in title
    assert unescape(title) == f"{HOSTILE}, zb-h1"


def test_by_the_command_line_and_by_the_pipeline(pipe, saved, tmp_path, capsys):
    assert main(["report", str(saved)]) == 0
    assert capsys.readouterr().out == f"{saved / 'report.html'}\n"
    assert main(["report", str(saved), "-o", str(tmp_path / "no" / "report.html")]) == 2
    assert "cannot be written: there is no directory" in capsys.readouterr().err
    assert pipe.report(tmp_path / "own.html") == tmp_path / "own.html"
    loaded = fxpipe.load(saved)
    loaded.report(tmp_path / "loaded.html")
    assert (tmp_path / "loaded.html").read_text() == (saved / "report.html").read_text()


def test_the_update_of_the_optimizer_and_its_state(pipe):
    data = report_data(pipe.plan, pipe.artifact.programs, None)
    steps = pipe.simulate_steps()
    for rank, (start, length) in enumerate(data["predicted"]["updates"]):
        update = steps.steps[0].updates[rank]
        assert start * data["tick"] == pytest.approx(update.start, rel=1e-4)
        assert length * data["tick"] == pytest.approx(update.end - update.start, rel=1e-3)
        assert start >= max(pipe.simulate().spans[rank][-1].end / data["tick"], 1) * 0.999
    states = [held["optimizer"] for held in data["memory"]]
    assert states == [2 * held["gradients"] for held in data["memory"]]  # two values of the weights' dtype
