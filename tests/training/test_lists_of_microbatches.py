"""Steps of microbatches with lengths of their own, against eager PyTorch."""

import base64
import json
import re
import zlib
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from operator import le
from threading import Thread
from typing import Any

import pytest
import torch
from launch import forked
from lengths_model import (
    LENGTH,
    LISTS,
    NUMBERS,
    WORDS,
    Words,
    counted,
    eager,
    microbatch,
    train,
    train_split,
    words,
)
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.certificate.check import check
from fxpipe.cli import main
from fxpipe.compiler.step_writer import with_writer
from fxpipe.plan.captured import CapturedStep
from fxpipe.schedule.ops import OpKind, order_text
from fxpipe.training.run.batch_orders import BatchOrders

pytestmark = pytest.mark.usefixtures("double_in_module")


@pytest.fixture(scope="module")
def pipe(double_in_module: None) -> fxpipe.Pipeline:
    return words()


def model_of(pipe: fxpipe.Pipeline) -> Words:
    model = Words()
    model.load_state_dict(pipe.state_dict())
    return model


def check_step(pipe: fxpipe.Pipeline, batch: list[dict[str, torch.Tensor]], given: object = None) -> None:
    model = model_of(pipe)
    result, loss = pipe.run_local(batch if given is None else given), eager(model, batch)
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(result.grads, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("lengths", [*LISTS, (16, 16, 16)])
def test_a_list_of_microbatches(pipe, lengths):
    check_step(pipe, [microbatch(length) for length in lengths])


@pytest.mark.parametrize("number", [1, 2, 5, 8])
def test_any_number_of_microbatches(pipe, number):
    microbatches = [microbatch(2 + 5 * k % 14) for k in range(number)]
    check_step(pipe, microbatches)
    check_step(pipe, microbatches, tuple(microbatches))  # as zip gives them


def test_one_batch_of_another_length(pipe):
    batch = microbatch(11, rows=6)
    check_step(pipe, [batch], batch)


def test_programs_hold_the_length_as_a_name(pipe):
    first, last = pipe.artifact.programs
    for text in ("def messages(sequence):", "((2, sequence, 8), (8 * sequence, 8, 1), torch.float64)"):
        assert text in first
        assert text in last
    assert "[2, sequence, 8]" in first
    assert 'sequence = rt.lengths("sequence")' in first
    assert "stage0_forward(params, buffers, batches[m], sequence[m])" in first


@pytest.mark.in_ci("replicas", "post")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"schedule": "zb-v", "recompute": "full"}, marks=pytest.mark.variation),
        {"schedule": "zb-h1", "microbatches": 4, "offload": True},
        {"replicas": 2, "shard": "gradients"},
        {"schedule": "zb", "validation": "post"},
        {"schedule": "zb-v", "ranks": 4, "vocab_parallel": "1-barrier"},
        {"replicas": 2, "vocab_parallel": "2-barrier", "recompute": "full"},
    ],
    ids=["V", "offload", "replicas", "post", "vocabulary", "vocabulary, recompute"],
)
def test_schedules_memory_and_replicas(options):
    pipe = words(**options)
    replicas, number = pipe.plan.replicas, pipe.plan.step.microbatches
    for each in (number, 5):
        check_step(pipe, [microbatch(2 + 5 * k % 14) for k in range(each * replicas)])


@pytest.mark.in_ci("options0")
@pytest.mark.parametrize("options", [{}, {"vocab_parallel": True, "schedule": "zb-h1"}])
def test_the_order_of_a_batch_is_the_captured_step(options):
    """The certificate of the programs with the step that is written for a batch, at the example's lengths."""
    lengths, pipe = [{"sequence": n} for n in (3, 2, 16)], words(**options)
    artifact = pipe.artifact
    step, timeline = artifact.write_step(lengths), pipe.simulate(lengths=lengths)
    assert timeline.schedule.name == f"{pipe.plan.schedule} by lengths"
    ops = map(str, timeline.schedule.order[0])
    # The B of a lookup is no section.
    assert [*step.ops[0]] == [op for op in ops if op in step.ops[0]]
    programs = [
        program[: program.index("def step(rt, batch):")] + text + "\n"
        for program, text in zip(artifact.programs, step.texts, strict=True)
    ]
    order = tuple(order_text(timeline.schedule.order).splitlines())
    plan = replace(artifact.plan, order=order, schedule=timeline.schedule.name)
    plan = replace(plan, prediction=replace(plan.prediction, peak_memory=(1e9, 1e9)))
    certificate = check(plan, programs, CapturedStep.from_json(artifact.captured, "captured"))
    assert certificate.holds, certificate.problems
    swapped = re.sub(r"F(\d)\(1\)", r"F\1(2)", programs[1], count=1)
    assert not check(plan, [programs[0], swapped], CapturedStep.from_json(artifact.captured, "x")).holds


@pytest.mark.in_ci("zb-h1")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "zb-h1", "ranks": 4},
        {"schedule": "zb-h1", "ranks": 4, "vocab_parallel": "1-barrier"},
        {"schedule": "zb-v", "vocab_parallel": "1-barrier"},
    ],
    ids=["1f1b", "zb-h1", "vocabulary", "vocabulary, V"],
)
def test_a_step_holds_no_more_than_the_plan_predicts(options):
    """Also of shards of a vocabulary, and of microbatches as the example, which run the plan's own order."""
    pipe = words(microbatches=4, **options)
    most = pipe.plan.prediction.peak_memory
    for lengths in ((16,) * 4, (16, 2, 16, 3, 16, 16, 2), (2, 2, 16, 9), (15, 8, 14, 16, 8, 2)):
        result = pipe.run_local([microbatch(n) for n in lengths], measure_memory=True)
        simulated = pipe.simulate(lengths=lengths).peak_memory
        for measured, expected, limit in zip(result.peak_saved, simulated, most, strict=True):
            assert measured == pytest.approx(expected, rel=0.05)
            assert expected <= limit * (1 + 1e-9)


@pytest.mark.variation
def test_communicators_connect_for_short_microbatches_as_well():
    """What nccl does of a collective depends on its size."""
    pipe = words(vocab_parallel=True)
    (program, _), sizes = pipe._runner._local_programs, pipe.plan.step.halved_lengths
    gathered = [x.layout[0] for x in program.collectives(sizes) if x.verb == "all_gather"]
    assert sorted(gathered) == [(6 * n,) for n in (2, 4, 8, 16)]
    (alone,) = words(ranks=1)._runner._local_programs
    assert alone.collectives(sizes) == []


@pytest.mark.variation
def test_words_are_looked_up_when_their_sum_is_needed():
    """And not all at the start, where a rank would hold its parts of sums until the others have theirs."""
    pipe = words(vocab_parallel=True, schedule="zb-h1", ranks=4)
    for lengths in ([16, 9] * 6, [15, 8, 14, 16, 8, 2]):
        spans = pipe.simulate(lengths=lengths).spans[3]
        assert [span.op.stage for span in spans].index(7) <= 4
        assert sum((span.op.kind, span.op.stage) == (OpKind.F, 3) for span in spans) == len(lengths)


def test_a_pipeline_that_offloads(tmp_path):
    """Another order than the plan's holds no more than that; also of a loaded one."""
    pipe = words(schedule="zb-h1", microbatches=4, offload=True)
    pipe.save(tmp_path / "saved")
    for each in (pipe, fxpipe.load(tmp_path / "saved")):
        simulated, predicted = each.simulate(lengths=[16] * 4), each.plan.prediction
        assert simulated.seconds <= predicted.seconds  # another order than the family's may be faster
        assert [*map(le, simulated.peak_memory, predicted.peak_memory)] == [True, True]
        for lengths in ((5, 16, 2, 9), (16, 16, 3, 16, 16)):
            batch = [microbatch(n) for n in lengths]
            check_step(each, batch)
            peaks = each.run_local(batch, measure_memory=True).peak_saved
            assert all(map(le, peaks, [1.05 * x for x in each.plan.prediction.peak_memory]))


def test_a_rank_holds_what_leaves_until_it_is_gone(monkeypatch):
    """It is measured before the wait for its end, which is behind an op that may hold the most."""
    monkeypatch.setattr("fxpipe.ir.liveness.SMALLEST", 1)
    half = fxpipe.Offload(0.5, bandwidth=1e12)
    pipe = words(schedule="interleaved", microbatches=4, offload=half)
    for lengths in ((16,) * 4, (5, 16, 2, 9)):
        simulated = pipe.simulate(lengths=lengths)
        assert simulated.schedule.transfers
        peaks = pipe.run_local([microbatch(n) for n in lengths], measure_memory=True).peak_saved
        assert peaks == pytest.approx(simulated.peak_memory, rel=0.05)


def test_another_order_offloads_too():
    """Where it is faster: within less memory one microbatch would run after the other."""
    pipe = words(schedule="zb-h1", microbatches=4, offload=True)
    writer, lengths = pipe.artifact.write_step, (16, 15, 16, 14, 16)
    named = [{"sequence": n} for n in lengths]
    orders = replace(writer.orders, limits=tuple(0.9 * limit for limit in writer.orders.limits))
    timeline, without = orders.timeline(named), replace(orders, slots=()).timeline(named)
    assert timeline.schedule.transfers
    assert timeline.seconds < 0.7 * without.seconds
    assert [*map(le, timeline.peak_memory, orders.limits)] == [True, True]
    assert all(map(le, (pool.bytes for pool in orders.pools_of(timeline)), pipe.plan.pools))
    step = replace(writer, orders=orders)(named)
    assert "rt.offload(" in step.texts[0]
    pipe.artifact.__dict__["write_step"] = replace(writer, orders=orders)
    batch = [microbatch(n) for n in lengths]
    check_step(pipe, batch)
    peaks = pipe.run_local(batch, measure_memory=True).peak_saved
    assert peaks == pytest.approx(timeline.peak_memory, rel=0.05)
    # With a pool for less they offload nothing.
    assert not replace(orders, pools=(512, 512)).timeline(named).schedule.transfers


def test_a_microbatch_that_does_not_fit(pipe):
    """It is named with its length, and another batch has an order."""
    writer = pipe.artifact.write_step
    small = replace(writer, orders=replace(writer.orders, limits=(1e4, 1e6)))
    orders = BatchOrders(replace(pipe.artifact, write_step=small), None)
    message = "With sequence 15, microbatch 1 alone needs 11.* KiB .* on rank 0, and the limit is 9.77 KiB"
    remedy = ": give at most sequence 12, or compile with more memory_limit"
    with pytest.raises(fxpipe.BatchError, match=message + remedy):
        orders.of([([{"sequence": 2}, {"sequence": 15}], [16, 16])], pipe._runner._local_programs)
    assert orders.of([([{"sequence": 2}, {"sequence": 5}], [16, 16])], pipe._runner._local_programs)


def test_no_order_is_looked_for_when_the_script_has_ended(pipe, monkeypatch):
    """The interpreter waits for the thread that looks for orders of later batches."""
    monkeypatch.setattr("fxpipe.training.run.batch_orders.main_thread", Thread)  # one that does not run
    orders = BatchOrders(pipe.artifact, None)
    orders.prepare([([{"sequence": 2}, {"sequence": 5}], [16, 16])])
    with pytest.raises(CancelledError):
        next(iter(orders._begun.values())).result()


def test_a_word_without_a_row(pipe):
    """In one process too it is found before anything runs."""
    batch = [microbatch(5), microbatch(3)]
    batch[1]["ids"][0, 2] = WORDS
    with pytest.raises(fxpipe.BatchError, match="Microbatch 1, of sequence 3, has 16 in 'ids', which"):
        pipe.run_local(batch)


@pytest.mark.variation
def test_masks_that_are_causal_at_some_lengths_alone():
    """A window as wide as the shortest lists; in training and in evaluation."""

    class Windows(Words):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.mask.triu_(-3)

    pipe = fxpipe.compile(
        Windows(),
        microbatch(LENGTH),
        ranks=1,
        dimensions={"sequence": LENGTH},
        microbatches=2,
        evaluation=True,
    )
    batch, model = [microbatch(n) for n in (3, 16, 2)], Windows()
    model.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(pipe.run_local(batch).loss, eager(model, batch))
    torch.testing.assert_close(pipe.evaluate(batch), eager(model, batch))


def test_a_positional_table_that_is_too_short():
    """Refused before a step, which would fail amidst its messages."""
    model = Words()
    model.positions = torch.nn.Embedding(LENGTH - 1, 8)
    message = "takes row 15 of a table with 15 rows, in module 'positions' .*: give a shorter example"
    with pytest.raises(fxpipe.CaptureError, match=message):
        fxpipe.compile(model, microbatch(LENGTH), ranks=1, microbatches=1, dimensions={"sequence": LENGTH})


def test_lengths_at_which_a_model_fails_are_named():
    class Windows(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).unflatten(1, (-1, 12)).square().mean()

    with pytest.raises(fxpipe.SizeError, match="At microbatch 3, time 20, traced beside the example:"):
        fxpipe.compile(
            Windows(4, 4), (torch.randn(2, 24, 4),), ranks=1, microbatches=1, dimensions={"time": 24}
        )


def test_simulated_lengths_that_are_no_lengths(pipe):
    with pytest.raises(fxpipe.SizeError, match=r"lengths\[1\] is {'time': 3} and must give sequence"):
        pipe.simulate(lengths=[5, {"time": 3}])
    for wrong in ([], 5):
        with pytest.raises(fxpipe.SizeError, match="must give those of each microbatch"):
            pipe.simulate(lengths=wrong)
    with pytest.raises(fxpipe.SizeError, match=r"documents\[1\] is \[30, 3\], in a microbatch of 32 tokens"):
        pipe.simulate(lengths=[5, 16], documents=[[5], [30, 3]])
    with pytest.raises(fxpipe.SizeError, match="documents are of microbatches: give their lengths"):
        pipe.simulate(documents=[[5]])
    with pytest.raises(fxpipe.SizeError, match="leave out sizes and device"):
        pipe.simulate({"sequence": 8}, lengths=[5])
    with pytest.raises(fxpipe.SizeError, match=r"lengths\[0\] has sequence 17. .* from 2 to 16"):
        pipe.simulate(lengths=[17])


class Dropped(Words):
    """With dropout behind the embedding."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embed(ids), 0.5)
        return F.cross_entropy(self.head(self.blocks[0](x)).flatten(0, 1), labels.flatten())


def test_random_numbers_are_those_of_the_place_in_the_list():
    """Whichever order the microbatches are run in, as a loaded pipeline runs the plan's own."""
    torch.manual_seed(0)
    pipe = fxpipe.compile(Dropped(), microbatch(LENGTH), ranks=2, microbatches=4, dimensions={"sequence": 16})
    batch = [microbatch(n) for n in (3, 16, 8, 2)]
    found = pipe.run_local(batch, step=7)
    assert pipe.simulate(lengths=[3, 16, 8, 2]).schedule.name.endswith("by lengths")
    pipe.artifact.__dict__["write_step"] = None
    del pipe._runner.__dict__["_orders"]
    expected = pipe.run_local(batch, step=7)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.grads, expected.grads)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda: [], "The list has 0 microbatches: give one or more"),
        (
            lambda: [microbatch(5), microbatch(5), microbatch(17)],
            "Microbatch 2 has sequence 17 .* from 2 to 16",
        ),
        (lambda: [microbatch(5), microbatch(1), microbatch(5)], "Microbatch 1 has sequence 1 in 'ids'"),
        (
            lambda: [{**microbatch(5), "labels": microbatch(6)["labels"]}, microbatch(5), microbatch(5)],
            "Microbatch 0 has sequence 5 in 'ids' and 6 in 'labels'",
        ),
        (
            lambda: [microbatch(5, rows=3), microbatch(5), microbatch(5)],
            "Microbatch 0 has 3 rows in 'ids', and programs take 2. .* name the rows in dimensions=",
        ),
        (lambda: [microbatch(5), None], "Microbatch 1: A batch, or an example, is a mapping"),
        (lambda: [microbatch(5), {"x": torch.zeros(2, 5)}], "Microbatch 1: The batch has leaves x, but"),
        (lambda: microbatch(17, rows=6), "The batch has sequence 17"),
    ],
    ids=["empty", "longer", "one", "leaves", "rows", "none", "another leaf", "longer batch"],
)
def test_a_list_that_is_refused(pipe, batch, message):
    with pytest.raises(fxpipe.BatchError, match=message):
        pipe.run_local(batch())
    check_step(pipe, [microbatch(length) for length in (4, 6, 2)])


@pytest.mark.variation
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.variation), 2])
def test_outputs_of_a_list_are_those_of_each_microbatch(replicas):
    pipe = words(outputs=["head", "loss"], replicas=replicas)
    batch = [microbatch(length) for length in (5, 16, 2, 9)]
    result, model = pipe.run_local(batch, outputs=["head", "loss"]), model_of(pipe)
    assert result.outputs == {}
    assert "head: of 4 microbatches" in repr(result)
    for m, one in enumerate(batch):
        torch.testing.assert_close(result.listed["head"][m], model.logits(one["ids"]))
        torch.testing.assert_close(result.listed["loss"][m], model(**one))


def test_a_list_where_no_dimension_has_a_name():
    pipe = words(dimensions=None, ranks=1)
    with pytest.raises(fxpipe.BatchError, match=r"no dimension was named: give dimensions="):
        pipe.step([microbatch(LENGTH)] * 3)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("sequence[m])", "sequence[0])", "gives a section of microbatch 1 a length of 0"),
        ("[2, sequence, 8]", "[2, 16, 8]", "at sequence 2: "),
        ('layouts[m]["', 'layouts[1]["', "in the lengths of 1"),
        ("(2, sequence, 8), (8 * sequence", "(2, 16, 8), (128", "at sequence 2: "),
    ],
)
def test_an_edit_of_lengths_is_another_step(pipe, before, after, problem):
    """Of these the last three are the captured step where all microbatches are as long as the example."""
    artifact = pipe.artifact
    captured = CapturedStep.from_json(artifact.captured, "captured")
    programs = [text.replace(before, after) for text in artifact.programs]
    assert programs != [*artifact.programs]
    problems = check(artifact.plan, programs, captured).problems
    assert any(problem in each.text for each in problems), problems


def test_what_is_proved(pipe):
    certificate = pipe.check()
    assert certificate.holds
    assert certificate.lengths == ("sequence 16", "sequence 2", "sequence 15", "sequence 9")


def test_saved_and_loaded(pipe, tmp_path):
    pipe.save(tmp_path / "saved")
    loaded = fxpipe.load(tmp_path / "saved")
    assert loaded.lengths == pipe.lengths
    batch = [microbatch(length) for length in LISTS[0]]
    torch.testing.assert_close(loaded.run_local(batch).grads, pipe.run_local(batch).grads)
    assert loaded.simulate(lengths=[3, 9]).seconds == pipe.simulate(lengths=[3, 9]).seconds
    lengths = [{"sequence": n} for n in (16, 2, 9, 7)]
    loaded.save(tmp_path / "again")
    for each in (loaded, fxpipe.load(tmp_path / "again")):
        assert each.artifact.write_step(lengths) == pipe.artifact.write_step(lengths)
        check_step(each, [microbatch(n) for n in (16, 2, 9, 7)])


def test_saved_programs_that_were_edited(pipe, tmp_path):
    """An edited step runs, and takes the plan's number; other edits leave batches their own orders."""
    pipe.save(tmp_path / "saved")
    program, batch = tmp_path / "saved" / "rank1.py", [microbatch(n) for n in (5, 16, 2)]
    whole = program.read_text()
    program.write_text(whole.replace("import torch\n", "import torch  # edited\n", 1))
    with pytest.warns(UserWarning, match="was edited"):
        check_step(fxpipe.load(tmp_path / "saved"), batch[:2])
    program.write_text(whole.replace("def F1(m):", "def F1(m):  # edited"))
    with pytest.warns(UserWarning, match="was edited"):
        loaded = fxpipe.load(tmp_path / "saved")
    check_step(loaded, batch)
    with pytest.raises(fxpipe.BatchError, match=r"2 microbatches, .* whose step was edited"):
        loaded.run_local(batch[:2])


def test_a_saved_pipeline_of_an_earlier_version(pipe, tmp_path):
    """Without what steps are written from it takes the plan's number of microbatches."""
    pipe.save(tmp_path / "saved")
    (tmp_path / "saved" / "steps.json").unlink()
    sums = tmp_path / "saved" / "rank0.sha256"
    sums.write_text("".join(x for x in sums.read_text().splitlines(True) if "steps.json" not in x))
    loaded = fxpipe.load(tmp_path / "saved")
    check_step(loaded, [microbatch(n) for n in (5, 16, 2)])
    with pytest.raises(fxpipe.BatchError, match="that an earlier version saved"):
        loaded.run_local([microbatch(5)] * 2)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"format":1', '"format":2', "does not fit plan.json"),
        ('"stage":1', '"stage":7', "does not fit plan.json"),
        ('"edges":[', '"edges":[],"edges":[', "is damaged: has the key 'edges' twice"),
        ('"lists_in"', '"lists"', r"is damaged: parts.calls\[0\].lists_in is missing"),
        ('"before":[', '"before":[{"once":null,"counts":null},', "does not fit plan.json"),
    ],
)
def test_damaged_parts_of_steps(pipe, tmp_path, before, after, message):
    text = pipe.artifact.steps
    assert before in text
    artifact = replace(pipe.artifact, steps=text.replace(before, after))
    with pytest.raises(fxpipe.ArtifactError, match=f"steps.json {message}"):
        with_writer(artifact, "steps.json")


def data_of(page: str) -> dict[str, Any]:
    packed = re.search('id="data">([^<]*)<', page)
    assert packed is not None
    return json.loads(zlib.decompress(base64.b64decode(packed[1])))


def test_the_command_shows_the_order_of_a_batch(pipe, tmp_path, capsys):
    pipe.save(tmp_path / "saved")
    (tmp_path / "lengths").write_text("3\n9\n16\n")
    saved = ["simulate", "--costs", str(tmp_path / "saved")]
    assert main([*saved, "--lengths", str(tmp_path / "lengths"), "--json"]) == 0
    found, expected = json.loads(capsys.readouterr().out), pipe.simulate(lengths=[3, 9, 16])
    assert found["seconds"] == expected.seconds
    assert found["lower_bound_within_memory"] == found["lower_bound"] <= expected.seconds
    assert found["peak_memory"] == [*expected.peak_memory]
    assert main([*saved, "--lengths", "3,9,16,2"]) == 0
    assert "1f1b by lengths: 2 ranks, 4 microbatches" in capsys.readouterr().out
    samples = [*saved, "--lengths", "3,2,9,4,4", "--tokens", "8"]
    assert main(samples) == 0
    out = capsys.readouterr().out
    assert "\n5 samples of 2 to 9 tokens, 4.4 on average\n" in out
    assert re.search(r"padded to the longest +3 +41% .* longest sample", out)
    assert re.search(r"packed to 16 .* tokens", out)
    assert main([*samples, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Rows of 9, 8 and 5 tokens, two in a microbatch.
    assert found["lengths"] == [9, 5]
    longest, _, packed, _ = found["ways"]
    assert longest["seconds"] == pipe.simulate(lengths=[9] * 3).seconds
    assert packed["seconds"] == found["seconds"] == pipe.simulate(lengths=[9, 5]).seconds
    assert packed["tokens_per_second"] == pytest.approx(22 / found["seconds"])
    explain = ["explain", str(tmp_path / "saved")]
    lengths = [3, 2, 9, 4, 4]
    assert main([*explain, "--lengths", "3,2,9,4,4", "--tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ways"] == found["ways"]
    assert main([*explain, "--lengths", "3,2,9,4,4"]) == 0
    out = capsys.readouterr().out
    assert "\nMicrobatches have sequence from 2 to 16.\n" in out
    assert re.search(r"padded to the longest +3 +41% .* longest sample", out)
    assert main([*explain, "--tokens", "8"]) != 0
    assert "--tokens needs --lengths" in capsys.readouterr().err
    report = ["report", str(tmp_path / "saved"), "-o", str(tmp_path / "report.html")]
    assert main([*report, "--lengths", "3,2,9,4,4", "--tokens", "8"]) == 0
    page = data_of((tmp_path / "report.html").read_text())["lengths"]
    assert page["bars"] == [[n, lengths.count(n), n * lengths.count(n)] for n in range(1, 10)]
    assert page["ways"] == [
        {**way, "first": first}
        for way, first in zip(
            found["ways"],
            ([[2, 9]] * 3, [[2, 16], [2, 4], [2, 2]], [[2, 9], [2, 5]], [[2, 16]]),
            strict=True,
        )
    ]
    capsys.readouterr()
    assert main([*saved, "--lengths", "lognormal:mean=6,sigma=1", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "4 steps drawn from lognormal:mean=6,sigma=1, seed 3: each of 6 samples of " in out
    for wrong, message in (
        (["--tokens", "3", "--schedule", "1f1b"], "--tokens needs --lengths"),
        (["--samples", "3", "--schedule", "1f1b"], "--samples needs --lengths"),
        (["--lengths", "99", "--tokens", "9"], "A sample has 99 tokens, and the example 16"),
        (["--lengths", "3,x"], "'3,x' is no list of lengths"),
        (["--lengths", "3", "--schedule", "1f1b"], "--lengths and --schedule exclude each other"),
        (["--lengths", "99"], "lengths[0] has sequence 99"),
    ):
        assert main([*saved, *wrong]) != 0
        assert message in capsys.readouterr().err


def test_figures_count_the_tokens_of_lists():
    pipe = words(ranks=1)
    for lengths in ((5, 16, 2), (9, 3)):
        pipe.step([microbatch(n) for n in lengths])
    found = pipe.figures()
    assert found["tokens/s"] == pytest.approx(2 * (23 + 12) / 2 / found["seconds"])


def test_evaluation():
    pipe = words(ranks=1, evaluation=True)
    batch = [microbatch(length) for length in LISTS[0]]
    torch.testing.assert_close(pipe.evaluate(batch), eager(model_of(pipe), batch))


class Total(Words):
    """Its loss divides by the number of labels of the batch, as Hugging Face's do."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(ids).tanh()).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / total


def test_a_number_of_labels_of_the_whole_batch():
    """Each microbatch has its share, whatever their number, also of a batch that makes fewer."""
    model, dimensions = Total(), {"sequence": LENGTH}
    example = {**microbatch(LENGTH), "total": torch.tensor(1)}
    shape = {"ranks": 1, "microbatches": 3, "dimensions": dimensions, "evaluation": True}
    pipe = fxpipe.compile(model, example, **shape)
    for lengths in ((4, 9), (5, 16, 2, 7, 7)):
        parts = [microbatch(length) for length in lengths]
        batch = [{**one, "total": sum(counted(parts))} for one in parts]
        result, loss = pipe.run_local(batch), sum(model(**one) for one in batch)
        torch.testing.assert_close(result.loss, loss)
        trained = {name: p for name, p in model.named_parameters() if name in result.grads}
        grads = torch.autograd.grad(loss, [*trained.values()])
        torch.testing.assert_close(result.grads, dict(zip(trained, grads, strict=True)))
    for rows in (5, 6, 1):
        short = {**microbatch(LENGTH, rows), "total": torch.tensor(80)}
        torch.testing.assert_close(pipe.evaluate(short), model(**short).detach())


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = self.last(self.first(x).tanh())
        return F.mse_loss(output, y) + 0.1 * output.abs().mean()


@pytest.mark.parametrize("mean", ["batch", "microbatch"])
def test_the_mean_over_elements_of_all_microbatches(mean):
    def part(length: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(2, length, 4), "y": torch.randn(2, length, 4)}

    model = Regression()
    options = {"ranks": 1, "microbatches": 3, "dimensions": {"time": 12}, "mean": mean}
    pipe = fxpipe.compile(model, part(12), **options)
    batch = [part(length) for length in (3, 12, 6)]
    shares = [3, 12, 6] if mean == "batch" else [1, 1, 1]
    loss = sum(model(**one) * share for one, share in zip(batch, shares, strict=True)) / sum(shares)
    grads = dict(
        zip(pipe.run_local(batch).grads, torch.autograd.grad(loss, [*model.parameters()]), strict=True)
    )
    result = pipe.run_local(batch)
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(result.grads, grads)


@pytest.mark.variation
@pytest.mark.slow
def test_ranks_share_a_vocabulary_at_any_length(tmp_path):
    run = forked(2, train_split, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    for rank in range(2):
        assert max(map(abs, json.loads((tmp_path / f"{rank}.json").read_text()))) < 1e-12


@pytest.mark.slow
def test_ranks_agree_on_lengths_before_a_step(tmp_path):
    run = forked(2, train, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    (differences, refused, *outputs), (others, theirs, *_) = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)
    )
    assert max(map(abs, [*differences, *others])) < 1e-12
    for ours in (refused, theirs):
        assert len(ours) == 10 * len(NUMBERS)
        none, longer, another, one, fewer, no_labels, larger, other_rows, word, label = ours[10:20]
        assert none.startswith("The list has 0 microbatches")
        assert longer.startswith("Microbatch 4 has sequence 17")
        assert another.startswith("Rank 1 has rows 1, sequence 3 in microbatch 4, and rank 0 has rows 1, ")
        assert "Microbatch 4 has sequence 1 " in one
        assert fewer.startswith("Rank 1 has 4 microbatches, and rank 0 has 5.")
        assert "Microbatch 0: The batch has leaves ids, but the pipeline was compiled for" in no_labels
        assert "Microbatch 4 has rows 3 in 'ids'. The programs take rows from 1 to 2 with seq" in larger
        assert other_rows.startswith("Rank 1 has rows 2, sequence 4 in microbatch 4")
        assert word.startswith(
            "Microbatch 4, of rows 1, sequence 4, has 16 in 'ids', which is read as one of 16 rows or classes"
        )
        assert label.startswith("Microbatch 4, of rows 1, sequence 4, has -1 in 'labels'")
    assert max(outputs[0]) < 1e-12
    assert refused[13].startswith("Rank 1 refuses the batch of step 2")


class NextWords(nn.Module):
    """Reads words as rows and, by one place later, as labels, one of which has no class."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.function = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS), function

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.function(self.head(self.embed(words[:, :-1])), labels)


def padded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    following = F.pad(labels, (0, 1), value=3)[:, 1:-1].contiguous()
    return F.cross_entropy(logits.reshape(-1, WORDS), following.view(-1), ignore_index=3 - WORDS)


def taken(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[:, 1:, None]).mean()


def raised(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None]).mean()


def indexed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -logits[:, :, :2].square().mean() + torch.linspace(0, 1, WORDS)[labels[:, 1:]].mean()


@pytest.mark.in_ci("taken-15--1", "raised--16-17")
@pytest.mark.parametrize(
    ("function", "accepted", "refused"),
    [
        (padded, 3 - WORDS, -1),
        (taken, WORDS - 1, -1),
        (raised, -WORDS, WORDS + 1),
        (indexed, -WORDS, -WORDS - 1),
    ],
)
def test_words_and_labels_that_no_table_has(function, accepted, refused):
    """Those that the model does not read may be anything."""
    words = torch.randint(0, WORDS, (2, LENGTH))
    pipe = fxpipe.compile(
        NextWords(function), (words, words), ranks=1, microbatches=2, dimensions={"time": LENGTH}
    )
    first, last = words[:, :7].clone(), words[:, :7].clone()
    first[:, 0], last[:, -1] = 10 * WORDS, -10 * WORDS
    first[0, 3] = accepted
    assert pipe.step([(last, first), (words, words)]).isfinite()
    for wrong in (refused, WORDS):
        other = first.clone()
        other[1, -1] = wrong
        with pytest.raises(fxpipe.BatchError, match=rf"^Microbatch 1, of time 7, has {wrong} in '1', "):
            pipe.step([(words, words), (last, other)])
    other = last.clone()
    other[1, 0] = -1
    with pytest.raises(fxpipe.BatchError, match=r"^Microbatch 1, of time 7, has -1 in '0', which is"):
        pipe.step([(words, words), (other, first)])
    assert pipe.step([(last, first)]).isfinite()
