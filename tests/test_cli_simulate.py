"""``fxpipe simulate``: its figures, and one line for bad input."""

import json

import pytest

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
    assert "zb-h1: 2 ranks, 4 microbatches" in out
    assert "0 3" in out
    assert "span bubble" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "nope"}, "unknown schedule 'nope'; known: gpipe, 1f1b, zb-h1"),
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
        ({"placement": "v", "stages_per_rank": "3"}, "in V placement has 2 stages per rank, not 3"),
    ],
)
def test_bad_input_gets_one_line(capsys, changes, message):
    try:
        code = main(arguments(**changes))
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
