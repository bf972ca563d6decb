"""``fxpipe simulate``: its figures, and one line for bad input."""

import itertools
import json

import pytest
from rich.text import Text

from fxpipe.cli import main

GOOD = {
    "--schedule": "zb-h1",
    "--ranks": "8",
    "--microbatches": "24",
    "--forward": "18.522",
    "--backward-input": "18.086",
    "--backward-weight": "9.337",
    "--comm": "0.601",
}


def arguments(**changes: str) -> list[str]:
    options = {**GOOD, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
    return ["simulate", *(word for option in options.items() for word in option)]


def figures(capsys, **changes: str) -> dict:
    assert main([*arguments(**changes), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json(capsys):
    result = figures(capsys)
    assert round(result["span_bubble"], 4) == 0.1585
    assert round(result["makespan_bubble"], 4) == 0.1585
    assert result["seconds"] == pytest.approx(1310.405)
    assert result["peak_memory"] == [8] * 8
    assert result["placement"] == list(range(8))
    assert result["busy"] == pytest.approx([1102.68] * 8)
    assert result["lower_bound"] < result["seconds"]
    assert (result["schedule"], result["ranks"], result["microbatches"]) == ("zb-h1", 8, 24)


def test_what_each_rank_does_with_its_time(capsys):
    result = figures(
        capsys, schedule="1f1b", ranks="2", microbatches="2", forward="1", backward_input="1",
        backward_weight="1", comm="0.25",
    )  # fmt: skip
    assert result["seconds"] == 9.5
    assert result["busy"] == [6, 6]
    assert result["idle"] == [3.5, 3.5]
    assert result["exposed_communication"] == [0.5, 0.25]
    assert result["memory"][1] == [[1.25, 1], [4.25, 0], [4.25, 1], [7.25, 0]]
    assert result["critical_path"] == [
        ["F0.0", 0, 1],
        ["F1.0", 1.25, 2.25],
        ["BW1.0", 2.25, 4.25],
        ["F1.1", 4.25, 5.25],
        ["BW1.1", 5.25, 7.25],
        ["BW0.1", 7.5, 9.5],
    ]


def test_chunks_cost_their_share_of_a_rank(capsys):
    result = figures(capsys, stages_per_rank="2", placement="v")
    assert round(result["span_bubble"], 4) == 0.0703
    assert result["peak_memory"] == [8] * 8
    assert result["busy"] == pytest.approx([1102.68] * 8)


def test_weight_memory(capsys):
    assert figures(capsys, schedule="1f1b", weight_memory="0.5")["peak_memory"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert figures(capsys, weight_memory="0")["peak_memory"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert figures(capsys, weight_memory="0.5")["peak_memory"] == [8, 7.5, 7, 6.5, 6, 5.5, 5, 4.5]


def test_table(capsys):
    assert main(arguments(ranks="2", microbatches="4", stages_per_rank="2", placement="v")) == 0
    out = capsys.readouterr().out
    assert "zb-h1: 2 ranks, 4 stages, 4 microbatches; F 18.522, B 18.086, W 9.337, transfer 0.601" in out
    assert "0 3" in out
    assert "exposed communication" in out
    assert "span bubble" in out
    assert "critical path: " in out


@pytest.mark.parametrize("terminal", ["", "1"])
def test_the_timeline_without_colors(capsys, monkeypatch, terminal):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", terminal)
    unit = {"forward": "1", "backward_input": "1", "backward_weight": "1", "comm": "0"}
    assert main(arguments(ranks="2", microbatches="2", **unit)) == 0
    assert Text.from_ansi(capsys.readouterr().out).plain.splitlines()[1:3] == [
        "0 F0··F1··    B0··W0··B1··W1··",
        "1     F0··B0··F1··B1··W0··W1··",
    ]


@pytest.mark.slow
def test_a_family_comes_with_its_own_chunks_and_placement(capsys):
    result = figures(capsys, schedule="zb-v")
    assert result["placement"] == [*range(8), *reversed(range(8))]
    assert max(result["peak_memory"]) <= 8


@pytest.mark.slow
def test_memory_limit(capsys):
    limited = figures(capsys, schedule="zb", memory_limit="5.5")
    assert max(limited["peak_memory"]) <= 5.5
    assert limited["seconds"] > figures(capsys, schedule="zb")["seconds"]


@pytest.mark.slow
def test_auto_is_the_fastest(capsys):
    some = {"ranks": "4", "microbatches": "8", "memory_limit": "4"}
    auto = figures(capsys, schedule="auto", **some)
    assert max(auto["peak_memory"]) <= 4
    assert auto["seconds"] <= figures(capsys, schedule="zb-v", **some)["seconds"]
    assert auto["seconds"] <= figures(capsys, schedule="zb-h1", **some)["seconds"]


@pytest.mark.variation
@pytest.mark.slow
def test_the_exact_answer_beside(capsys):
    pytest.importorskip("ortools")
    unit = {"forward": "10", "backward_input": "12", "backward_weight": "6", "comm": "1"}
    small = arguments(ranks="4", microbatches="6", schedule="1f1b", **unit)
    assert main([*small, "--exact", "30", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["seconds"], result["exact"]["seconds"]) == (264, 228)
    assert result["exact"]["proven"]
    assert max(result["exact"]["peak_memory"]) <= 4
    assert main([*small, "--exact"]) == 0
    assert "exact: 228 (proven optimal), span bubble 26.32%" in capsys.readouterr().out


def test_draw(capsys, tmp_path):
    assert main([*arguments(), "--draw", str(tmp_path / "step.svg")]) == 0
    assert f"drawn: {tmp_path / 'step.svg'}" in capsys.readouterr().out
    picture = (tmp_path / "step.svg").read_text()
    assert picture.startswith("<svg")
    assert "F 18.522, B 18.086, W 9.337, transfer 0.601: zb-h1, 8 ranks, 24 microbatches" in picture


def test_a_schedule_file(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0I0,0I1,0W0,0W1\n,1F0,1B0,1F1,1B1\n")
    times = ["--forward", "1", "--backward-input", "1", "--backward-weight", "1"]
    assert main(["simulate", "--schedule-file", str(file), *times, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schedule"], result["ranks"], result["microbatches"]) == ("mine", 2, 2)
    assert result["seconds"] == 10
    assert result["peak_memory"] == [2, 1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--schedule", "1f1b"], "--schedule and --schedule-file exclude each other: give one of them"),
        (["--ranks", "3"], "schedule mine has 2 ranks, but the arguments or costs have 3"),
        (["--microbatches", "3"], "schedule mine has 1 microbatch, but the arguments or costs have 3"),
        (
            ["--memory-limit", "0.5"],
            "schedule mine needs 1 on rank 0, above the memory limit of 0.5: raise the limit, or offload",
        ),
    ],
)
def test_a_schedule_file_that_is_not_what_was_asked_for(capsys, tmp_path, more, message):
    file = tmp_path / "mine.txt"
    file.write_text("F0.0 BW0.0\nF1.0 BW1.0\n")
    times = ["--forward", "1", "--backward-input", "1", "--backward-weight", "1"]
    assert main(["simulate", "--schedule-file", str(file), *times, *more]) == 2
    assert capsys.readouterr().err == f"fxpipe: error: {message}\n"


def test_what_is_missing_is_named(capsys):
    assert main(["simulate", "--schedule", "1f1b", "--ranks", "2", "--forward", "1"]) == 2
    assert capsys.readouterr().err == (
        "fxpipe: error: these arguments are required: --microbatches, --backward-input, --backward-weight\n"
    )
    times = ["--forward", "1", "--backward-input", "1", "--backward-weight", "1"]
    assert (
        main(["simulate", "--schedule", "1f1b", "--ranks", "2", "--microbatches", "1000000000", *times]) == 2
    )
    assert "--ranks times --microbatches is more than 1,000,000" in capsys.readouterr().err
    assert main(["simulate", "--ranks", "2", "--microbatches", "2", *times]) == 2
    assert capsys.readouterr().err == "fxpipe: error: --schedule NAME or --schedule-file FILE is required\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "nope"}, "Unknown schedule 'nope'. Known: auto, gpipe, 1f1b, "),
        ({"ranks": "0"}, "argument --ranks: 0 must be at least 1"),
        ({"microbatches": "0"}, "argument --microbatches: 0 must be at least 1"),
        ({"microbatches": "2.5"}, "argument --microbatches: '2.5' is not a whole number"),
        ({"stages_per_rank": "-1"}, "argument --stages-per-rank: -1 must be at least 1"),
        ({"forward": "0"}, "argument --forward: 0 must be above 0"),
        ({"backward_input": "-1"}, "argument --backward-input: -1 must be finite and not negative"),
        ({"backward_weight": "nan"}, "argument --backward-weight: nan must be finite and not negative"),
        ({"backward_weight": "x"}, "argument --backward-weight: 'x' is not a number"),
        ({"comm": "-0.1"}, "argument --comm: -0.1 must be finite and not negative"),
        ({"weight_memory": "1.5"}, "argument --weight-memory: 1.5 must be from 0 to 1"),
        ({"placement": "w"}, "argument --placement: invalid choice"),
        ({"memory_limit": "0"}, "argument --memory-limit: 0 must be above 0"),
        ({"memory_limit": "0.5"}, "schedule zb-h1"),
        ({"schedule": "zb-v", "memory_limit": "0.5"}, "the limit is 0.5"),
        ({"schedule": "auto", "memory_limit": "0.5"}, "limit"),
        ({"schedule": "zb-v", "stages_per_rank": "3"}, "schedule zb-v"),
        (
            {"draw": "/no/such/place.svg"},
            "/no/such/place.svg cannot be written: there is no directory /no/such",
        ),
    ],
)
def test_bad_input_gets_one_line(capsys, changes, message):
    code = main(arguments(**changes))
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


VOCABULARY = "--ranks 4 --microbatches 12 --forward 1 --backward-input 1 --backward-weight 1 --comm 0.02"


@pytest.mark.in_ci("1f1b-1", "1f1b-2", "zb-h1-1", "interleaved-1")
@pytest.mark.parametrize(
    ("schedule", "barriers"),
    [
        *itertools.product(("1f1b", "zb-h1", "interleaved"), (1, 2)),
        pytest.param("zb-v", 2, marks=pytest.mark.slow),
        pytest.param("v-half", 1, marks=pytest.mark.slow),
    ],
)
def test_an_output_layer_spread_over_the_ranks(schedule, barriers, capsys):
    """At most one microbatch more for each barrier, and a bubble of the size that there is without."""
    arguments = f"simulate --schedule {schedule} {VOCABULARY} --json".split()
    assert main(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--vocab-time", "0.9", "--vocab-barriers", str(barriers)]) == 0
    spread = json.loads(capsys.readouterr().out)
    assert spread["busy"] == pytest.approx([12 * 3.9] * 4)
    assert max(spread["peak_memory"]) <= max(plain["peak_memory"]) + barriers
    assert spread["makespan_bubble"] <= plain["makespan_bubble"] + 0.01


def test_barriers_without_a_vocabulary(capsys):
    assert main(f"simulate --schedule 1f1b {VOCABULARY} --vocab-barriers 2".split()) == 2
    assert "--vocab-barriers needs --vocab-time" in capsys.readouterr().err


EVEN = {"forward": "1", "backward_input": "1", "backward_weight": "0.7", "comm": "0.05", "ranks": "4"}


def test_many_steps(capsys, tmp_path):
    times = {
        **EVEN,
        "schedule": "zb-2p",
        "microbatches": "8",
        "update": "1",
        "verdict": "0.1",
        "effort": "0.1",
    }
    found = figures(capsys, **times)
    barrier, post = found["steps"]["barrier"], found["steps"]["post"]
    assert barrier["period"] == pytest.approx(found["seconds"] + 1 + 0.1)
    assert (barrier["updates"], barrier["messages"]) == pytest.approx((1, 0.1))
    assert post["period"] == pytest.approx(max(found["busy"]) / (1 - found["span_bubble"]) + 1)  # the span
    assert (post["updates"], post["messages"]) == pytest.approx((1, 0))
    file = tmp_path / "two.svg"
    assert main(arguments(**times, validation="post", steps="2", draw=str(file))) == 0
    assert "many steps: " in capsys.readouterr().out
    assert "2 steps of many with post-validation" in file.read_text()


@pytest.mark.slow
def test_a_search_for_many_steps(capsys):
    asked = {
        **EVEN,
        "schedule": "auto",
        "microbatches": "8",
        "memory_limit": "4",
        "effort": "0.5",
        "update": "1",
    }
    found = [figures(capsys, **asked, validation=name) for name in ("barrier", "post")]
    one, many = (each["steps"]["post"]["period"] for each in found)
    assert many < one
    assert found[0]["seconds"] <= found[1]["seconds"]
