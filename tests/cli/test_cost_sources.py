"""Where ``fxpipe simulate --costs`` takes costs from: a JSON file, a saved pipeline, a recorded run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file
from zoo import CASES, Shape, compiled

import fxpipe
from fxpipe.cli import main
from fxpipe.cli.sources import recorded_costs
from fxpipe.errors import ArtifactError, ScheduleError
from fxpipe.plan.saved.files import read_plan
from fxpipe.plan.saved.recorded import read_spans, write_spans
from fxpipe.schedule.costs import StageCost, chain
from fxpipe.schedule.formats.costs_file import read_costs
from fxpipe.strict import unstructure

STAGES = [{"forward": 1, "backward": 1.5, "weight": 0.5, "saved_activations": 64, "saved_for_weight": 32}] * 2
UNEVEN = chain([StageCost(1, 2, 3, 10, 5), StageCost(2, 1, 1, 20, 5)], seconds=0.25, bytes=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("pipelines") / "saved"
    case = CASES["tied_head"]
    compiled(case, case.build(), 4, Shape(2, "zb-h1")).save(directory)
    return directory


def figures(capsys, *arguments: object) -> dict:
    assert main(["simulate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments: object) -> str:
    assert main(["simulate", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


# -- files


def test_written_and_read(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps(unstructure(UNEVEN)))
    assert read_costs(tmp_path / "costs.json") == UNEVEN


def test_without_edges_the_stages_are_a_chain(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({"stages": STAGES}))
    assert read_costs(tmp_path / "costs.json", seconds=2) == chain([StageCost(1, 1.5, 0.5, 64, 32)] * 2, 2)


def test_simulated(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(unstructure(UNEVEN)))
    result = figures(capsys, "--costs", file, "--schedule", "1f1b", "--ranks", 2, "--microbatches", 3)
    assert result["busy"] == [18, 12]
    assert result["peak_memory"] == [20, 20]
    both = figures(capsys, "--costs", file, "--schedule", "1f1b", "--ranks", 1, "--microbatches", 3)
    assert both["placement"] == [0, 0]
    assert both["seconds"] == 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[]", "is [] and must be an object"),
        ('{"stages": []}', "stages is () and must be of 1 to "),
        ('{"stages": [{"forward": 1, "backward": 1}]}', "stages[0].weight is missing"),
        (
            '{"stages": [{"forward": 1, "backward": 1, "weight": 1, "save": 2}]}',
            "stages[0] has the unknown field 'save'",
        ),
        (
            '{"stages": [{"forward": 1, "backward": 1, "weight": "x"}]}',
            "stages[0].weight is 'x' and must be",
        ),
        (
            '{"stages": [{"forward": -1, "backward": 1, "weight": 1}]}',
            "stages[0].forward is -1.0 and must",
        ),
        ('{"stages": [{"forward": NaN, "backward": 1, "weight": 1}]}', "holds NaN, which is not a number"),
    ],
)
def test_files_that_hold_no_costs(tmp_path, text, message):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ScheduleError, match=re.escape(message)) as error:
        read_costs(tmp_path / "costs.json")
    assert str(tmp_path / "costs.json") in str(error.value)


def test_arguments_that_do_not_go_with_a_file(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(unstructure(UNEVEN)))
    asked = ("--costs", file, "--schedule", "1f1b", "--microbatches", 3)
    assert "required: --ranks" in refusal(capsys, *asked)
    assert "--costs and --forward do not go together" in refusal(capsys, *asked, "--ranks", 2, "--forward", 1)
    assert "2 stages: not as many for each of 3 ranks" in refusal(capsys, *asked, "--ranks", 3)
    three = refusal(capsys, *asked, "--ranks", 2, "--stages-per-rank", 3)
    assert "2 stages: 1 for each of 2 ranks, not 3" in three
    assert "nothing.json does not exist: --costs is a JSON file" in refusal(
        capsys, "--costs", "nothing.json", *asked[2:], "--ranks", 2
    )


# -- saved pipelines


def test_a_saved_pipeline_as_it_is(capsys, saved):
    result = figures(capsys, "--costs", saved)
    timeline = fxpipe.load(saved).simulate()
    assert result["schedule"] == "zb-h1"
    assert result["seconds"] == timeline.seconds
    assert result["peak_memory"] == list(timeline.peak_memory)


def test_a_saved_pipeline_with_another_schedule(capsys, saved):
    plan = read_plan(saved)
    result = figures(capsys, "--costs", saved, "--schedule", "1f1b", "--microbatches", 7)
    assert (result["schedule"], result["ranks"], result["microbatches"]) == ("1f1b", 2, 7)
    assert result["busy"] == pytest.approx([7 * cost.total for cost in plan.costs.stages])


def test_times_and_memory_in_seconds_and_bytes(capsys, saved):
    assert main(["simulate", "--costs", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "planned times" in out
    assert re.search(r"\bµs\b", out)
    assert "KiB" in out or " B " in out


# -- recorded runs


def test_medians_of_the_recorded_ops(saved):
    plan = read_plan(saved)
    spans = [
        [("F0.0", 0, 2), ("F0.1", 2, 6), ("F0.2", 6, 9), ("B0.0", 9, 10), ("W0.0", 10, 15)],
        [("F1.0", 0, 1), ("BW1.0", 1, 9)],
    ]
    first, second = recorded_costs(plan, spans).stages
    planned = plan.costs.stages
    assert first == replace(planned[0], forward=3, backward=1, weight=5)
    share = planned[1].backward / (planned[1].backward + planned[1].weight)
    assert (second.forward, second.backward) == (1, pytest.approx(8 * share))
    assert second.weight == pytest.approx(8 * (1 - share))
    with pytest.raises(ArtifactError, match=r"measured0\.json holds F1\.0, which rank 0 does not run"):
        recorded_costs(plan, spans[::-1])


def test_a_recorded_backward_that_the_plan_has_without_costs_is_that_of_the_inputs(saved):
    plan = read_plan(saved)
    stages = tuple(replace(cost, backward=0.0, weight=0.0) for cost in plan.costs.stages)
    plan = replace(plan, costs=replace(plan.costs, stages=stages))
    _, last = recorded_costs(plan, [[("F0.0", 0, 1)], [("BW1.0", 1, 9)]]).stages
    assert (last.backward, last.weight) == (8, 0)


def test_a_recorded_run_is_used(capsys, saved, tmp_path):
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    for file in saved.iterdir():
        (recorded / file.name).write_bytes(file.read_bytes())
    write_spans(recorded, 0, [("F0.0", 0, 1), ("B0.0", 1, 3), ("W0.0", 3, 4)])
    assert figures(capsys, "--costs", recorded)["seconds"] < 1, "one rank's record is none"
    write_spans(recorded, 1, [("F1.0", 0, 1), ("B1.0", 1, 3), ("W1.0", 3, 4)])
    assert read_spans(recorded, 2)[1] == (("F1.0", 0, 1), ("B1.0", 1, 3), ("W1.0", 3, 4))
    assert figures(capsys, "--costs", recorded)["busy"] == [16, 16]
    assert main(["simulate", "--costs", str(recorded)]) == 0
    assert "recorded times" in capsys.readouterr().out
    (recorded / "measured1.json").write_text("{")
    assert "measured1.json is damaged" in refusal(capsys, "--costs", recorded)


def test_fxpipe_run_records(capsys, tmp_path):
    case = CASES["tied_head"]
    compiled(case, case.build(), 4, Shape(1)).save(tmp_path / "alone")
    save_file(case.data(4), tmp_path / "data.safetensors")
    arguments = ["run", str(tmp_path / "alone"), "--data", str(tmp_path / "data.safetensors"), "--record"]
    assert main(arguments) == 0
    capsys.readouterr()
    plan = read_plan(tmp_path / "alone")
    (spans,) = read_spans(tmp_path / "alone", 1)
    assert [op for op, _, _ in spans] == plan.order[0].split()
    assert all(start <= end for _, start, end in spans)
    costs = recorded_costs(plan, [spans])
    assert figures(capsys, "--costs", tmp_path / "alone")["busy"] == [
        pytest.approx(4 * sum(stage.total for stage in costs.stages))
    ]
