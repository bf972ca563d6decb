"""The loss in what a model returns, and the outputs of a step that are asked for, against eager PyTorch."""

import collections
import dataclasses
import re
import typing
import warnings

import outputs_worker as worker
import pytest
import torch
import torch.nn.functional as F
from launch import forked
from marks import slow_except
from outputs_worker import MICROBATCHES, OUTPUTS, Answers, wanted
from safetensors.torch import load_file
from shapes import SHAPES
from torch import nn
from zoo import (
    EFFORT,
    LENGTH,
    WIDTH,
    WORDS,
    Chain,
    captured_once,
    cut,
    eager,
    numbers,
    relative_error,
    tokens,
    too_far,
)

import fxpipe
from fxpipe.errors import CaptureError, LimitError, OptionError, RunError, VocabularyError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]

LIMIT = 1e-12


@dataclasses.dataclass
class Found:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    losses: dict[str, torch.Tensor] | None = None


Pair = collections.namedtuple("Pair", "logits loss")


class Returns(Chain):
    """Its logits and its loss in some form."""

    def __init__(self, form: typing.Callable) -> None:
        super().__init__(6)
        self.form = form

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return self.form(x, F.mse_loss(x, y))


def compiled(model, *, example=None, ranks=2, microbatches=MICROBATCHES, schedule="1f1b", **options):
    torch.manual_seed(1)
    example = numbers(2) if example is None else example
    return fxpipe.compile(
        model, example, ranks=ranks, microbatches=microbatches, schedule=schedule, effort=EFFORT, **options
    )


def built(form=lambda logits, loss: (logits, loss)) -> nn.Module:
    torch.manual_seed(0)
    return Returns(form)


def data(microbatches=MICROBATCHES):
    torch.manual_seed(2)
    return numbers(2 * microbatches)


def different(found, expected):
    """The names of the outputs that are not as expected, of whatever dtype."""
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in expected.items()}
    return too_far(*({name: x.double() for name, x in values.items()} for values in (found, expected)))


def error_of(kind, function, *args, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# -- the loss ---------------------------------------------------------------------------------------------

FORMS = {
    "logits, loss": (lambda logits, loss: (logits, loss), lambda out: out[1]),
    "loss, logits": (lambda logits, loss: (loss, logits), lambda out: out[0]),
    "a list": (lambda logits, loss: [logits, loss], lambda out: out[1]),
    "logits, metric, loss": (lambda logits, loss: (logits, loss.detach() * 2, loss), lambda out: out[2]),
    "nested": (lambda logits, loss: ({"scale": logits.mean()}, loss), lambda out: out[1]),
    "mapping": (lambda logits, loss: {"ce": loss / 2, "loss": loss}, lambda out: out["loss"]),
    "dataclass": (lambda logits, loss: Found(logits, loss), lambda out: out.loss),
    "namedtuple": (lambda logits, loss: Pair(logits.mean(), loss), lambda out: out.loss),
}


@pytest.mark.in_ci("logits, metric, loss", "nested", "mapping")
@pytest.mark.parametrize("form", FORMS)
def test_the_loss_in_an_output(form):
    make, loss_of = FORMS[form]
    model, batch = built(make), data()
    result = compiled(model).run_local(batch)
    expected = eager(model, batch, MICROBATCHES, lambda output, _: loss_of(output))
    assert relative_error(result.loss, expected.loss) <= LIMIT
    assert too_far(result.grads, expected.grads) == {}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda logits, loss: (loss, logits, loss * 2), ["several scalars (at 0, 2)", "loss_fn"]),
        (lambda logits, loss: (logits, logits), ["returned tuple", "give loss_fn"]),
        (lambda logits, loss: (logits, loss.detach()), ["needs no gradient", "has at 1"]),
        (lambda logits, loss: {"ce": loss, "aux": loss}, ["with the scalars ce, aux", "give loss_fn"]),
        (lambda logits, loss: Found(logits, None, {"ce": loss}), ["with the scalars losses.ce"]),
        (lambda logits, loss: {"loss": None, "aux": loss}, ["with the scalars aux"]),
    ],
)
def test_outputs_without_one_loss(form, said):
    message = error_of(CaptureError, compiled, built(form))
    assert all(part in message for part in said), message


# -- outputs of a training step -----------------------------------------------------------------------------


@pytest.fixture
def small_values_are_offloaded_too(monkeypatch):
    monkeypatch.setattr("fxpipe.ir.liveness.SMALLEST", 1)


@pytest.mark.in_ci("four ranks", "V of three", "offload")
@pytest.mark.usefixtures("small_values_are_offloaded_too")
@pytest.mark.parametrize("shape", slow_except(SHAPES, "one rank", "V", "offload"))
def test_outputs_of_a_training_step(shape):
    """From the first stage, from the middle and from the last; the numbers of the step stay the same."""
    torch.manual_seed(0)
    model, batch, names = Answers(), data(), [*OUTPUTS]
    with captured_once("outputs of a step"):
        pipe = compiled(model, outputs=names, **SHAPES[shape])
    assert pipe.outputs == tuple(names)
    expected = eager(model, batch, MICROBATCHES, lambda output, _: output["loss"])
    result = pipe.run_local(batch, outputs=names)
    assert [*result.outputs] == names
    assert different(result.outputs, wanted(model, batch)) == {}
    assert not any(value.requires_grad for value in result.outputs.values())
    alone = pipe.run_local(batch)
    assert alone.outputs == {}
    for found in (result, alone):
        assert relative_error(found.loss, expected.loss) <= LIMIT
        assert too_far(found.grads, expected.grads) == {}


def test_only_the_outputs_that_are_asked_for_are_kept():
    torch.manual_seed(0)
    model, batch = Answers(), data()
    pipe = compiled(model, ranks=1, outputs=["logits", "hidden.0", "logits"])
    assert pipe.outputs == ("logits", "hidden.0")
    assert isinstance(pipe.step(batch), torch.Tensor)
    assert pipe.step(batch, outputs=[]).outputs == {}
    result = pipe.step(batch, outputs=["hidden.0"])
    assert [*result.outputs] == ["hidden.0"]
    assert pipe.runtime.collected.values == {}
    expected = wanted(model, batch)
    assert too_far(result.outputs, {"hidden.0": expected["hidden.0"]}) == {}
    assert relative_error(result.loss, expected["loss"].mean()) <= LIMIT


def test_an_output_of_one_tensor():
    torch.manual_seed(0)
    model, batch = Chain(4), data()
    logits = {}

    def loss_fn(output, microbatch):
        return F.mse_loss(output, microbatch["y"])

    class Plain(Chain):
        def forward(self, x, y):
            for block in self.blocks:
                x = block(x)
            return x

    model = Plain(4)
    pipe = compiled(model, loss_fn=loss_fn, outputs=["output"])
    logits["output"] = model(**batch)
    assert too_far(pipe.run_local(batch, outputs=["output"]).outputs, logits) == {}


def test_metrics_of_a_loss_fn():
    def loss_fn(output, microbatch):
        error = (output.logits - microbatch["y"]).abs()
        metrics = {"largest": error.max(), "right": (error < 0.5).sum(), "each": {"row": error.mean(-1)}}
        return error.square().sum(), (microbatch["y"] > 0).sum(), metrics

    model, batch = built(Found), data()
    names = ["largest", "right", "each.row", "loss", "count"]
    result = compiled(model, loss_fn=loss_fn, outputs=names).run_local(batch, outputs=names)
    parts = [loss_fn(model(**part), part) for part in cut(batch, MICROBATCHES)]
    expected = {
        "largest": torch.stack([p[2]["largest"] for p in parts]),
        "right": torch.stack([p[2]["right"] for p in parts]),
        "each.row": torch.cat([p[2]["each"]["row"] for p in parts]),
        "loss": torch.stack([p[0] for p in parts]),
        "count": torch.stack([p[1] for p in parts]),
    }
    assert different(result.outputs, expected) == {}
    assert relative_error(result.loss, expected["loss"].sum() / expected["count"].sum()) <= LIMIT


def test_metrics_beside_a_loss_change_nothing():
    def loss_fn(output, microbatch):
        return F.mse_loss(output.logits, microbatch["y"]), {"mean": output.logits.mean()}

    model, batch = built(Found), data()
    result = compiled(model, loss_fn=loss_fn).run_local(batch)
    expected = eager(model, batch, MICROBATCHES, lambda *given: loss_fn(*given)[0])
    assert too_far(result.grads, expected.grads) == {}


class Given(Chain):
    """Gives its inputs, a parameter, a buffer that it changes and one that it does not."""

    def __init__(self) -> None:
        super().__init__(4)
        self.scale = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x, y):
        self.seen = self.seen + x.sum()
        given = x
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(x * self.scale, y)
        return {"loss": loss, "x": given, "scale": self.scale, "seen": self.seen, "shift": self.shift}


def test_outputs_that_are_inputs_parameters_and_buffers():
    torch.manual_seed(0)
    model, batch = Given(), data()
    names = ["x", "scale", "seen", "shift"]
    result = compiled(model, outputs=names).run_local(batch, outputs=names)
    assert torch.equal(result.outputs["x"], batch["x"])
    assert torch.equal(result.outputs["scale"], torch.full((MICROBATCHES,), 2.0))
    assert torch.equal(result.outputs["shift"], torch.ones(3 * MICROBATCHES))
    sums = torch.stack([part["x"].sum() for part in cut(batch, MICROBATCHES)]).cumsum(0)
    assert too_far({"seen": result.outputs["seen"]}, {"seen": sums}) == {}


def test_a_loss_that_is_an_input():
    class Weighs(Chain):
        def forward(self, x, y, weight):
            for block in self.blocks:
                x = block(x)
            return {"logits": x, "loss": weight}

    torch.manual_seed(0)
    model, batch = Weighs(4), data() | {"weight": torch.tensor(3.0)}
    example = {name: x[:2] if x.dim() else x for name, x in batch.items()}
    pipe = compiled(model, example=example, gradients=False, outputs=["logits"])
    result = pipe.run_local(batch, outputs=["logits"])
    assert result.loss == 3.0
    assert too_far(result.outputs, {"logits": model(**batch)["logits"]}) == {}


# -- the forward alone --------------------------------------------------------------------------------------


class Network(Chain):
    """A network as inference knows it: no labels."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return Found(x)


FORWARD = [name for name in SHAPES if name not in ("recompute", "offload")]


@pytest.mark.in_ci("V of three", "interleaved", "split points")
@pytest.mark.parametrize("shape", slow_except(FORWARD, "one rank", "two ranks", "V"))
def test_inference_without_labels_or_loss(shape):
    torch.manual_seed(0)
    model, batch = Network(6), {"x": data()["x"]}
    with captured_once("inference"):
        example = {"x": torch.randn(2, WIDTH)}
        pipe = compiled(model, example=example, gradients=False, outputs=["logits"], **SHAPES[shape])
    result = pipe.run_local(batch, outputs=["logits"])
    assert result.loss is None
    assert result.grads == {}
    logits = torch.cat([model(**part).logits for part in cut(batch, MICROBATCHES)])
    assert too_far(result.outputs, {"logits": logits}) == {}
    assert pipe.run_local(batch).outputs == {}


def test_inference_in_one_process():
    torch.manual_seed(0)
    model, batch = Network(6), {"x": data()["x"]}
    options = {"example": {"x": torch.randn(2, WIDTH)}, "ranks": 1, "gradients": False}
    pipe = compiled(model, outputs=["logits"], **options)
    for run in (pipe.step, pipe.evaluate):
        result = run(batch, outputs=["logits"])
        assert result.loss is None
        assert too_far(result.outputs, {"logits": model(**batch).logits}) == {}
        assert "has no loss: ask for outputs" in error_of(RunError, run, batch)
    message = error_of(CaptureError, compiled, model, **options)
    assert "give gradients=False and name its outputs" in message
    message = error_of(CaptureError, compiled, model, outputs=["logits", "loss"], **options)
    assert "No loss" in message


def test_evaluation_of_a_forward_with_a_loss():
    model, batch = built(), data()
    pipe = compiled(model, ranks=1, gradients=False, outputs=["0"])
    expected = [model(**part) for part in cut(batch, MICROBATCHES)]
    loss = torch.stack([loss for _, loss in expected]).mean()
    assert relative_error(pipe.evaluate(batch), loss) <= LIMIT
    result = pipe.evaluate(batch, outputs=["0"])
    assert relative_error(result.loss, loss) <= LIMIT
    assert too_far(result.outputs, {"0": torch.cat([logits for logits, _ in expected])}) == {}
    assert all(p.grad is None for p in model.parameters())


# -- saved pipelines, memory, vocabulary --------------------------------------------------------------------


def test_a_saved_pipeline_gives_its_outputs(tmp_path):
    torch.manual_seed(0)
    model, batch = Answers(), data()
    compiled(model, ranks=1, outputs=["logits", "loss"]).save(tmp_path / "saved")
    pipe = fxpipe.load(tmp_path / "saved")
    assert pipe.outputs == ("logits", "loss")
    expected = wanted(model, batch)
    found = pipe.step(batch, outputs=["loss", "logits"]).outputs
    assert too_far(found, {"loss": expected["loss"], "logits": expected["logits"]}) == {}


def test_any_name(tmp_path):
    """A key of the model's output can be any text."""
    names = ['we"ird\n', "λ", "loss_m0", "__metadata__", "a b.c", "\\"]
    model, batch = (
        built(lambda logits, loss: {"loss": loss} | {n: logits * k for k, n in enumerate(names)}),
        data(),
    )
    pipe = compiled(model, outputs=names)
    pipe.save(tmp_path / "saved")
    expected = {n: x for n, x in model(**batch).items() if n != "loss"}
    for found in (pipe, fxpipe.load(tmp_path / "saved")):
        assert different(found.run_local(batch, outputs=names).outputs, expected) == {}


def test_a_memory_limit_holds_the_outputs():
    """The smallest limit rises by the bytes of a batch's logits."""

    def smallest(*outputs: str) -> float:
        with pytest.raises(LimitError) as caught:
            compiled(built(), memory_limit=1, schedule="gpipe", split_points=["blocks.1"], outputs=outputs)
        return caught.value.smallest

    assert smallest("0") - smallest() == 2 * MICROBATCHES * WIDTH * 8


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids, labels):
        hidden = self.blocks(self.embedding(ids))
        logits = self.head(hidden)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        each = each.unflatten(0, (-1, LENGTH))
        return {"loss": each.mean(), "logits": logits, "hidden": hidden, "each": each}


@pytest.mark.in_ci("2-barrier")
@pytest.mark.parametrize("vocab_parallel", ["1-barrier", "2-barrier"])
def test_outputs_with_a_split_vocabulary(vocab_parallel):
    torch.manual_seed(0)
    model, names = Words(), ["hidden", "each", "loss"]
    example, batch = tokens(2), tokens(2 * MICROBATCHES)
    options = {"example": example, "vocab_parallel": vocab_parallel}
    result = compiled(model, outputs=names, **options).run_local(batch, outputs=names)
    parts = [model(**part) for part in cut(batch, MICROBATCHES)]
    expected = {name: torch.cat([part[name] for part in parts]) for name in ("hidden", "each")}
    expected["loss"] = torch.stack([part["loss"] for part in parts])
    assert too_far(result.outputs, expected) == {}
    message = error_of(VocabularyError, compiled, model, outputs=["logits"], **options)
    assert re.search("'logits' has an entry for each word.*without vocab_parallel", message)


def test_outputs_at_other_sizes_and_in_pictures(tmp_path):
    torch.manual_seed(0)
    model, batch = Network(6), {"x": torch.randn(3 * MICROBATCHES, WIDTH)}
    example = {"x": torch.randn(3, WIDTH)}
    options = {"gradients": False, "outputs": ["logits"], "costs": "measured", "dimensions": {"width": WIDTH}}
    with pytest.raises(fxpipe.SizeError):  # its weights have that width
        compiled(model, example=example, **options)
    pipe = compiled(model, example=example, **options | {"dimensions": {}})
    assert pipe.simulate({"microbatch": 30}).seconds > pipe.simulate().seconds
    assert too_far(pipe.run_local(batch, outputs=["logits"]).outputs, {"logits": model(**batch).logits}) == {}
    pictures = pipe.draw(tmp_path, expand=(1, "F"))
    assert any("logits" in picture.read_text() for picture in pictures if picture.suffix == ".dot")
    assert any("output" in picture.read_text() for picture in pictures if "stage1" in picture.name)


# -- what is refused ----------------------------------------------------------------------------------------


def test_unknown_outputs():
    model, batch = built(lambda logits, loss: Found(logits, loss, {"ce": loss})), data()
    message = error_of(CaptureError, compiled, model, outputs=["logit"])
    assert message.startswith(
        "There is no output 'logit'. Did you mean 'logits'? Known: logits, loss, losses.ce, "
    )
    assert "give ['logits']" in error_of(OptionError, compiled, model, outputs="logits")
    assert "is [0, 1] and must be a list of names" in error_of(OptionError, compiled, model, outputs=[0, 1])
    pipe = compiled(model, ranks=1, outputs=["logits"])
    message = error_of(RunError, pipe.step, batch, outputs=["losses.ce"])
    assert "It gives logits. Name it in outputs=[…] of fxpipe.compile" in message
    assert "It gives logits" in error_of(RunError, pipe.run_local, batch, outputs=["losses.ce"])
    assert "give ['logits']" in error_of(RunError, pipe.step, batch, outputs="logits")
    assert "a rank from 0 to 0" in error_of(RunError, pipe.step, batch, outputs=["logits"], outputs_on=1)
    assert "It gives none" in error_of(RunError, compiled(model, ranks=1).step, batch, outputs=["logits"])


def test_one_name_of_two_outputs():
    def loss_fn(output, microbatch):
        return output.loss, {"logits": output.logits.sum()}

    message = error_of(CaptureError, compiled, built(Found), loss_fn=loss_fn, outputs=["logits"])
    assert "two outputs called 'logits'" in message


def test_metrics_that_are_no_tensors():
    def loss_fn(output, microbatch):
        return output.loss, {"rows": 2, "mean": output.logits.mean()}

    message = error_of(CaptureError, compiled, built(Found), loss_fn=loss_fn, outputs=["rows"])
    assert message == "There is no output 'rows'. Known: logits, loss, mean, and the paths of modules."


class Counted(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), count

    def forward(self, x):
        return self.layer(x).square().sum(), self.count(x)


def positive(x):
    return (x > 0).sum()


@pytest.mark.parametrize(
    ("count", "loss_fn", "has_count", "warns"),
    [
        (positive, None, False, True),
        (positive, lambda output, _: output, True, False),
        (positive, lambda output, _: output[0], False, False),
        (lambda x: (x > 0).any(), None, False, False),
        (lambda x: (x > 0).sum(0), None, False, False),
    ],
)
def test_a_forward_that_returns_a_sum_and_a_count(count, loss_fn, has_count, warns):
    """Without ``loss_fn`` the gradients are those of sums, which no count divides."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pipe = fxpipe.compile(
            Counted(count), {"x": torch.ones(2, 4)}, loss_fn=loss_fn, ranks=1, microbatches=2, schedule="1f1b"
        )
    assert any("a sum and its count, give loss_fn=" in str(each.message) for each in found) == warns
    assert pipe.plan.step.has_count == has_count


def test_a_loss_fn_of_four_values():
    def loss_fn(output, microbatch):
        return output.loss, 1, 2, 3

    message = error_of(CaptureError, compiled, built(Found), loss_fn=loss_fn)
    assert "loss_fn returned 4 values: return the loss, or (sum, count)" in message


# -- under torchrun -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_outputs_under_torchrun(tmp_path):
    """On the ranks that compute them, on one rank, on all; the same bits as in one process."""
    ranks = 4
    run = forked(ranks, worker.main, tmp_path, dtype=torch.float64, logs=tmp_path / "logs")
    assert run.code == 0, run
    batch, names = worker.batch_of(2 * MICROBATCHES), [*OUTPUTS]
    pipe = worker.compiled(worker.build(), ranks, outputs=names)
    result = pipe.run_local(batch, outputs=names)
    assert different(result.outputs, wanted(worker.build(), batch)) == {}
    expected = result.outputs | {"loss of all": result.loss}
    owners = {output.name: output.rank for output in pipe.plan.step.outputs}
    assert len(set(owners.values())) > 1
    everyone = dict.fromkeys(["loss of all"], range(ranks))
    for case, places in {
        "here": everyone | {name: [owner] for name, owner in owners.items()},
        "on the last": everyone | {name: [ranks - 1] for name in names},
        "on all": dict.fromkeys(expected, range(ranks)),
        "loaded": everyone | {name: [0] for name in names[:2]},
    }.items():
        check_found(tmp_path, case, ranks, expected, places)
    names.remove("loss")
    pipe = worker.compiled(worker.build(), ranks, outputs=names, gradients=False, schedule="zb-v")
    result = pipe.run_local({"x": batch["x"]}, outputs=names)
    check_found(tmp_path, "inference", ranks, result.outputs, dict.fromkeys(names, range(ranks)))


def check_found(directory, case, ranks, expected, places) -> None:
    """places: the ranks that have each output, and no other rank has it."""
    for rank in range(ranks):
        found = load_file(directory / f"{case}.{rank}.safetensors")
        assert found.keys() == {name for name, ranks in places.items() if rank in ranks}, (case, rank)
        other = [name for name, x in found.items() if not torch.equal(x, expected[name])]
        assert other == [], (case, rank)
        assert all(x.dtype == expected[name].dtype for name, x in found.items())
