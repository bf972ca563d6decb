"""What is wrong gets one error of fxpipe's, which says what, where and what to do."""

import inspect
import json
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zoo import WIDTH, Chain, NoLoss, numbers, sequences

import fxpipe
from fxpipe.errors import (
    ArtifactError,
    BatchError,
    CaptureError,
    FxpipeError,
    OptionError,
    PartitionError,
    RunError,
)
from fxpipe.plan.saved import files


def compiled(model=None, example=None, *, ranks=2, microbatches=2, **options):
    model = Chain(4) if model is None else model
    example = numbers(2) if example is None else example
    return fxpipe.compile(model, example, ranks=ranks, microbatches=microbatches, **options)


def error_of(kind: type[FxpipeError], function, *args, **kwargs) -> str:
    with pytest.raises(FxpipeError) as caught:
        function(*args, **kwargs)
    assert type(caught.value) is kind
    return str(caught.value)


# -- models that cannot be traced ---------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def item(self, x):
        return x * x.abs().max().item()

    def mask(self, x):
        return x + x[x > 0].mean()

    def nonzero(self, x):
        return x + (x > 0).nonzero().shape[0]

    def to_numpy(self, x):
        return x * float(x.detach().numpy().mean())

    def unique(self, x):
        return x + x.detach().round().unique().numel()

    def forward(self, x):
        return getattr(self, self.how)(self.linear(x))


def line_of(how: str) -> str:
    """file:line of the first line of that method that depends on data."""
    lines, first = inspect.getsourcelines(getattr(Inner, how))
    marks = (".item()", "[x > 0]", "nonzero()", "numpy()", "unique()")
    offset = next(i for i, line in enumerate(lines) if any(mark in line for mark in marks))
    return f"{__file__}:{first + offset}"


@pytest.mark.parametrize("how", ["mask", "nonzero", "unique"])
@pytest.mark.slow
def test_shapes_that_depend_on_data(how):
    model = Chain(4)
    model.blocks[2] = Inner(how)
    message = error_of(CaptureError, compiled, model)
    assert "depend on data" in message
    assert "module 'blocks.2'" in message
    assert line_of(how) in message
    assert "torch.where" in message


def test_a_real_number_of_the_data():
    model = Chain(4)
    model.blocks[2] = Inner("item")
    message = error_of(CaptureError, compiled, model)
    assert "reads the number" in message
    assert "module 'blocks.2'" in message
    assert line_of("item") in message


def test_numpy_in_the_forward():
    model = Chain(4)
    model.blocks[2] = Inner("to_numpy")
    message = error_of(CaptureError, compiled, model)
    assert "module 'blocks.2'" in message
    assert line_of("to_numpy") in message


def test_an_exception_of_the_model_itself():
    class Fails(nn.Linear):
        def forward(self, x):
            raise ValueError("the width is wrong")

    model = Chain(4)
    model.blocks[1] = Fails(WIDTH, WIDTH)
    message = error_of(CaptureError, compiled, model)
    assert "module 'blocks.1'" in message
    assert "the width is wrong" in message


def test_a_parameter_written_in_the_forward():
    class Clamps(Chain):
        def forward(self, x, y):
            with torch.no_grad():
                self.blocks[2].inner.weight.clamp_(-1, 1)
            return super().forward(x, y)

    message = error_of(CaptureError, compiled, Clamps(4))
    assert "blocks.2.inner.weight" in message
    assert "buffer" in message


@pytest.mark.slow
def test_generator_of_the_models_own():
    class OwnGenerator(Chain):
        def between(self, x, i):
            return x + torch.rand(WIDTH, generator=torch.Generator().manual_seed(3))

    assert "enerator" in error_of(CaptureError, compiled, OwnGenerator(4))


def test_lazy_module_without_its_first_batch():
    model = Chain(4)
    model.blocks[2] = nn.LazyLinear(WIDTH)
    assert "blocks.2.weight" in error_of(CaptureError, compiled, model)


# -- losses --------------------------------------------------------------------------------------------------


def test_no_loss():
    assert "give loss_fn" in error_of(CaptureError, compiled, NoLoss(4))


def test_loss_is_no_scalar():
    message = error_of(CaptureError, compiled, NoLoss(4), loss_fn=lambda output, _: output["last"])
    assert "not a scalar" in message
    assert "loss_fn" in message
    assert f"(2, {WIDTH})" in message
    assert "mean()" in message


def test_loss_of_one_element_is_no_scalar_if_it_has_dimensions():
    """The model's output of shape (1, 1) is no loss by its looks alone; a loss_fn's is taken."""
    pipe = compiled(NoLoss(4), loss_fn=lambda output, _: output["last"].sum().reshape(1, 1))
    assert pipe.run_local(numbers(4)).loss.shape == ()


def test_loss_needs_no_gradient():
    message = error_of(CaptureError, compiled, NoLoss(4), loss_fn=lambda out, _: out["last"].detach().sum())
    assert "no gradient" in message
    assert "loss_fn" in message
    assert "detach()" in message


def test_all_parameters_frozen():
    message = error_of(CaptureError, compiled, Chain(4).requires_grad_(False))
    assert "no gradient" in message
    assert "frozen" in message


def test_loss_is_an_integer():
    message = error_of(CaptureError, compiled, NoLoss(4), loss_fn=lambda out, _: out["last"].argmax())
    assert "no gradient" in message


def test_loss_fn_returns_a_float():
    assert "float" in error_of(CaptureError, compiled, NoLoss(4), loss_fn=lambda *_: 1.0)


def test_loss_fn_returns_three_values():
    message = error_of(CaptureError, compiled, NoLoss(4), loss_fn=lambda out, _: (out["last"].sum(), 1, 2))
    assert "(sum, count)" in message


# -- options -------------------------------------------------------------------------------------------------


def test_unknown_schedule_lists_the_known_ones():
    message = error_of(OptionError, compiled, schedule="1f2b")
    assert "'1f2b'" in message
    for name in ("gpipe", "1f1b", "zb-h1", "auto"):
        assert name in message


def test_unknown_placement_lists_the_known_ones():
    message = error_of(OptionError, compiled, placement="w")
    assert "'w'" in message
    assert "'plain', 'v'" in message


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["ranks", "microbatches", "stages_per_rank"])
def test_numbers_below_one(name, value):
    message = error_of(OptionError, compiled, **{name: value})
    assert re.search(rf"{name} is {value} .*at least 1", message)


@pytest.mark.parametrize("value", [2.0, "2"])
@pytest.mark.parametrize("name", ["ranks", "microbatches"])
def test_numbers_that_are_none(name, value):
    message = error_of(OptionError, compiled, **{name: value})
    assert name in message
    assert repr(value) in message


@pytest.mark.parametrize("seed", ["a", 1.5, None, True, 2**63])
def test_seed_that_is_no_number(seed):
    assert f"seed is {seed!r}" in error_of(OptionError, compiled, seed=seed)


def test_split_point_that_is_no_module():
    message = error_of(PartitionError, compiled, split_points=["blocks.9"])
    assert "'blocks.9'" in message
    assert "blocks.0, blocks.1, blocks.2, blocks.3" in message


def test_split_point_that_never_runs():
    model = Chain(4)
    model.spare = nn.Linear(WIDTH, WIDTH)
    assert "'spare'" in error_of(PartitionError, compiled, model, split_points=["spare"])


@pytest.mark.parametrize("points", [[], ["blocks.1", "blocks.2"]])
def test_wrong_number_of_split_points(points):
    message = error_of(PartitionError, compiled, split_points=points)
    assert f"{len(points)} split point" in message
    assert "2 are needed" in message


def test_split_points_out_of_order():
    message = error_of(PartitionError, compiled, ranks=3, split_points=["blocks.2", "blocks.1"])
    assert "order" in message


def test_split_point_before_everything():
    assert "'blocks.0'" in error_of(PartitionError, compiled, split_points=["blocks.0"])


def test_split_points_given_as_one_string():
    message = error_of(OptionError, compiled, split_points="blocks.2")
    assert "blocks.2" in message
    assert "list" in message


def test_more_stages_than_can_be_cut():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, y):
            return F.mse_loss(self.linear(x), y)

    message = error_of(PartitionError, compiled, Small(), ranks=8, stages_per_rank=4)
    assert "32" in message
    assert "Use fewer ranks or fewer stages per rank" in message


def test_example_that_is_no_batch():
    assert "mapping" in error_of(BatchError, compiled, None, torch.randn(2, WIDTH))


def test_example_without_rows():
    assert "'x' of the example has no rows" in error_of(BatchError, compiled, None, numbers(0))


def test_leaves_of_one_name():
    class Both(Chain):
        def forward(self, a, **rest):
            return super().forward(a["x"] + rest["a.x"], a["y"])

    message = error_of(BatchError, compiled, Both(4), {"a": numbers(2), "a.x": torch.ones(2, WIDTH)})
    assert "'a.x'" in message


def test_model_partly_on_the_meta_device():
    model = Chain(4)
    model.blocks[1] = model.blocks[1].to("meta")
    pipe = compiled(model)
    message = error_of(RunError, pipe.run_local, numbers(4))
    assert "blocks.1" in message
    assert "meta" in message


# -- batches -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe():
    return compiled(microbatches=4)


def test_batch_not_divisible(pipe):
    message = error_of(BatchError, pipe.run_local, numbers(7))
    assert "'x' has 7 rows" in message
    assert "4 microbatches of 2: 8 are needed" in message


def test_an_example_that_is_the_whole_batch(pipe):
    message = error_of(BatchError, pipe.run_local, numbers(4))
    assert "If all batches have 4 rows, compile with an example of 1; else drop the last batch" in message


def test_batch_of_another_width(pipe):
    message = error_of(BatchError, pipe.run_local, {"x": torch.randn(8, 3), "y": torch.randn(8, WIDTH)})
    assert "'x' has shape (8, 3)" in message
    assert f"(8, {WIDTH})" in message


def test_batch_with_another_number_of_dimensions(pipe):
    message = error_of(BatchError, pipe.run_local, sequences(8))
    assert "'x' has shape (8, 5, 8)" in message


def test_batch_of_another_dtype(pipe):
    batch = numbers(8)
    message = error_of(BatchError, pipe.run_local, {**batch, "y": batch["y"].double()})
    assert "'y' has dtype torch.float64; the example has torch.float32" in message


@pytest.mark.parametrize("keys", [["x"], ["x", "y", "z"], []])
def test_batch_with_other_keys(pipe, keys):
    message = error_of(BatchError, pipe.run_local, {key: torch.randn(8, WIDTH) for key in keys})
    assert "x, y" in message
    assert "compiled for" in message


def test_batch_that_is_a_tensor(pipe):
    assert "mapping" in error_of(BatchError, pipe.run_local, torch.randn(8, WIDTH))


def test_batch_with_something_else_than_a_tensor(pipe):
    message = error_of(BatchError, pipe.run_local, {"x": [1.0] * 8, "y": torch.randn(8, WIDTH)})
    assert "x" in message


def test_batch_with_another_integer():
    class Scaled(Chain):
        def forward(self, x, y, times):
            return super().forward(x * times, y)

    pipe = compiled(Scaled(4), {**numbers(2), "times": 2})
    message = error_of(BatchError, pipe.run_local, {**numbers(4), "times": 3})
    assert "'times' is 3 and was 2" in message
    assert "compile again" in message


def test_pipeline_is_whole_after_a_refused_batch(pipe):
    batch = numbers(8)
    before = pipe.run_local(batch).loss
    error_of(BatchError, pipe.run_local, numbers(7))
    assert torch.equal(pipe.run_local(batch).loss, before)


def test_step_outside_torchrun(pipe):
    message = error_of(RunError, pipe.step, numbers(8))
    assert "2 ranks" in message
    assert "torchrun --nproc-per-node 2" in message
    assert "run_local" in message


def test_optimizer_outside_torchrun(pipe):
    assert "torchrun" in error_of(RunError, pipe.optimizer, torch.optim.SGD, lr=0.1)


# -- directories ---------------------------------------------------------------------------------------------


def tree(path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture
def saved(pipe, tmp_path):
    pipe.save(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_directory_that_is_not_empty(pipe, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    message = error_of(ArtifactError, pipe.save, tmp_path / "out")
    assert str(tmp_path / "out") in message
    assert "not empty" in message
    assert tree(tmp_path) == {"out/mine": b"precious"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_directory_that_is_a_file(pipe, tmp_path):
    (tmp_path / "out").write_text("precious")
    message = error_of(ArtifactError, pipe.save, tmp_path / "out")
    assert "is a file" in message
    assert tree(tmp_path) == {"out": b"precious"}


def test_directory_below_a_file(pipe, tmp_path):
    (tmp_path / "out").write_text("precious")
    message = error_of(ArtifactError, pipe.save, tmp_path / "out" / "pipe")
    assert "cannot be written" in message
    assert tree(tmp_path) == {"out": b"precious"}


def test_a_saved_pipeline_is_replaced_and_nothing_else(pipe, saved):
    """If the new one is not complete, the old one stays."""
    before = tree(saved.parent)
    assert "is not empty. Name a new directory, remove it first, or give overwrite=True" in error_of(
        ArtifactError, pipe.save, saved
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "MOST_PROGRAM_BYTES", 1)
        assert "would be larger" in error_of(ArtifactError, pipe.save, saved, overwrite=True)
    assert tree(saved.parent) == before
    (saved / "rank7.py").write_text("of more ranks")
    (saved / "rank0.py").write_text("edited")
    pipe.save(saved, overwrite=True)
    assert tree(saved.parent) == before
    (saved / "notes.txt").write_text("precious")
    message = error_of(ArtifactError, pipe.save, saved, overwrite=True)
    assert "holds 'notes.txt', which is not of a saved pipeline" in message
    assert (saved / "notes.txt").read_text() == "precious"


def test_empty_directory_is_taken(pipe, tmp_path):
    (tmp_path / "out").mkdir()
    pipe.save(tmp_path / "out")
    batch = numbers(8)
    assert torch.equal(fxpipe.load(tmp_path / "out").run_local(batch).loss, pipe.run_local(batch).loss)


def test_save_that_fails_half_way_leaves_nothing(tmp_path):
    model = Chain(4)
    model.blocks[3] = model.blocks[3].to("meta")
    pipe = compiled(model)
    message = error_of(RunError, pipe.save, tmp_path / "out")
    assert "meta" in message
    assert list(tmp_path.iterdir()) == []


def test_loading_what_is_not_there(tmp_path):
    message = error_of(ArtifactError, fxpipe.load, tmp_path / "nothing")
    assert f"{tmp_path / 'nothing'} holds no saved pipeline: there is no such directory" in message


def test_loading_another_format(saved):
    plan = json.loads((saved / "plan.json").read_text())
    (saved / "plan.json").write_text(json.dumps({**plan, "format": 999}))
    message = error_of(ArtifactError, fxpipe.load, saved)
    assert "format 999" in message
    assert "again" in message


def load_and_run(path):
    return fxpipe.load(path).run_local(numbers(8))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", ["plan.json", "rank0.safetensors", "rank1.safetensors"])
def test_files_cut_short(saved, name, share):
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: int(len(data) * share)])
    message = error_of(ArtifactError, load_and_run, saved)
    assert name in message
    assert "cut short" in message or "damaged" in message


PLACES = {
    "empty": lambda text: 0,
    "within a call": lambda text: text.index("(", text.index("def ")) + 1,
    "before step": lambda text: text.index("def step("),
    "last line": lambda text: text.index("    return rt.finish()"),
}


@pytest.mark.filterwarnings("ignore:.*was edited since it was saved")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["rank0.py", "rank1.py"])
def test_programs_cut_short(saved, name, place):
    text = (saved / name).read_text()
    (saved / name).write_text(text[: PLACES[place](text)])
    assert name in error_of(ArtifactError, load_and_run, saved)


@pytest.mark.parametrize(
    "name", ["plan.json", "rank0.py", "rank1.py", "rank0.safetensors", "rank1.safetensors"]
)
def test_files_missing(saved, name):
    (saved / name).unlink()
    assert name in error_of(ArtifactError, fxpipe.load, saved)


def test_weights_of_another_shape(saved):
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / "rank0.safetensors")
    save_file({n: t[:1].clone() for n, t in tensors.items()}, saved / "rank0.safetensors")
    assert "rank0.safetensors" in error_of(ArtifactError, load_and_run, saved)


@pytest.mark.parametrize("text", ["[]", "{}", "null", "7", '{"format": 1}'])
def test_plan_that_is_other_json(saved, text):
    (saved / "plan.json").write_text(text)
    assert "plan.json" in error_of(ArtifactError, fxpipe.load, saved)


def test_binary_plan(saved):
    (saved / "plan.json").write_bytes(bytes(range(128, 256)))
    assert "plan.json" in error_of(ArtifactError, fxpipe.load, saved)


@pytest.mark.filterwarnings("ignore:.*was edited since it was saved")
def test_edited_program_that_raises_names_rank_and_place(saved):
    program = saved / "rank1.py"
    program.write_text(
        program.read_text().replace("    return rt.finish()", "    1 / 0\n    return rt.finish()")
    )
    message = error_of(RunError, load_and_run, saved)
    assert "Rank 1" in message
    assert "ZeroDivisionError" in message
