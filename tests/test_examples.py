"""The examples, each in a small size: what they print, what they write, and their numbers beside eager's."""

import sys
from pathlib import Path

import examples_worker
import pytest
import torch
from equality import assert_equals_eager
from launch import forked
from safetensors.torch import load_file

import fxpipe

sys.path.insert(0, str(examples_worker.EXAMPLES))

pytestmark = [pytest.mark.slow, pytest.mark.waits]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("examples")


#: Of the tests of these, others show what is special: of a batch that rows fill up one in this process, of
#: frozen parameters those of replicas.
VARIATIONS = ("train_vision.py", "train_lora.py")


@pytest.fixture(scope="module")
def printed(directory) -> str:
    small = {name: options for name, options in examples_worker.SMALL.items() if name not in VARIATIONS}
    ran = forked(4, examples_worker.run, str(directory), small, dtype=torch.float32, logs=directory / "logs")
    assert ran.code == 0, ran
    return ran.stdout[0]


@pytest.mark.variation
def test_text_is_trained_evaluated_and_kept(printed, directory):
    assert "step    2  loss" in printed
    assert fxpipe.read_checkpoint(directory / "build/text").step_number == 2


def test_losses_of_two_heads(printed):
    line = next(line for line in printed.splitlines() if "losses.second" in line).split()
    loss, following, second = (
        float(line[line.index(x) + 1]) for x in ("loss", "losses.next", "losses.second")
    )
    assert loss == pytest.approx(following + 0.3 * second, abs=2e-3)
    assert "stage 2 -> 3, F: " in printed


def test_samples_of_any_length_are_packed(printed):
    line = next(line for line in printed.splitlines() if "microbatches of" in line)
    lengths = [int(n) for n in line.partition("[")[2].partition("]")[0].split(",")]
    assert len({*lengths}) > 1
    assert 200 < max(lengths) <= 256
    assert 1024 < sum(lengths) <= 1536


@pytest.fixture(scope="module")
def variations(tmp_path_factory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("variations")
    small = {name: examples_worker.SMALL[name] for name in VARIATIONS}
    ran = forked(4, examples_worker.run, str(directory), small, dtype=torch.float32, logs=directory / "logs")
    assert ran.code == 0, ran
    return ran.stdout[0], directory


@pytest.mark.variation
def test_images_that_do_not_fill_a_batch(variations):
    assert "40 test images: loss" in variations[0]


@pytest.mark.variation
def test_groups_of_answers_are_rewarded(tmp_path):
    arguments = (str(tmp_path), {"train_grpo.py": ["--steps", "1", "--groups", "3"]})
    ran = forked(4, examples_worker.run, *arguments, dtype=torch.float32, logs=tmp_path / "logs")
    assert ran.code == 0, ran
    line = next(line for line in ran.stdout[0].splitlines() if "reward" in line)
    groups = [int(n) for n in line.partition("[")[2].partition("]")[0].split(",")]
    assert 1 <= len(groups) <= 3
    assert all(5 <= n <= 18 for n in groups)


@pytest.mark.variation
def test_adapters_alone_are_saved(variations):
    adapters = load_file(variations[1] / "build/adapters.safetensors")
    assert {name.rpartition(".")[2] for name in adapters} == {"lora_a", "lora_b"}
    assert len(adapters) == 2 * (2 * 4 + 1)
    assert all(tensor.any() for tensor in adapters.values())


@pytest.mark.variation
@pytest.mark.usefixtures("double")
def test_values_across_stages_equal_eager(monkeypatch):
    import train_mtp

    monkeypatch.setattr(train_mtp, "LENGTH", 5)
    monkeypatch.setattr(train_mtp, "VOCABULARY", 7)

    def batch(rows: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(train_mtp.VOCABULARY, (rows, train_mtp.LENGTH))
        return {"input_ids": ids, "labels": ids}

    options = {"ranks": 3, "schedule": "zb-h1", "steps": 1, "loss_fn": lambda output, _: output["loss"]}
    assert_equals_eager(lambda: train_mtp.Model(8, 2), batch, **options)


@pytest.mark.usefixtures("double")
def test_rows_that_fill_up_a_batch_do_not_count():
    import train_vision

    def in_double(part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: x.double() if x.is_floating_point() else x for name, x in part.items()}

    model = train_vision.Network(width=4, blocks=2)
    options = {"ranks": 2, "microbatches": 3, "schedule": "zb-h1", "loss_fn": train_vision.loss_fn}
    pipe = fxpipe.compile(
        model, in_double(train_vision.images(2, 0)), evaluation=True, outputs=["right"], **options
    )
    part = in_double(train_vision.images(3, 1))
    result = pipe.evaluation.run_local(train_vision.filled_up(part, 6), outputs=["right"])
    total, count, metrics = train_vision.loss_fn(model.eval()(**part), part)
    assert torch.allclose(result.loss, total / count, rtol=1e-12)
    assert result.outputs["right"].sum() == metrics["right"]


def test_a_schedule_of_ones_own(monkeypatch, tmp_path, capsys):
    import custom_schedule

    options = ["--microbatches", "3", "--width", "8", "--build", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["custom_schedule.py", *options])
    custom_schedule.main()
    _, *rows, pictures = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["patient.txt", "1f1b", "zb-h1", "auto"]
    assert len({row.split()[-1] for row in rows}) == 1
    assert "timeline.svg" in pictures
