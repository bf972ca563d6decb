"""What is given wrongly is named in the error, beside what is wanted: the message is all that a user sees."""

import copy
import logging
import pickle
import re
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import WIDTH, Chain, NoLoss, numbers

import fxpipe
from fxpipe.errors import (
    ArtifactError,
    BatchError,
    CaptureError,
    FxpipeError,
    LimitError,
    OptionError,
    RunError,
    ScheduleError,
    SizeError,
)
from fxpipe.runtime.job.tracebacks import brief, shorten


def compiled(model=None, example=None, **options):
    """One stage a rank, no search and no proof."""
    given = {"ranks": 2, "microbatches": 2, "schedule": "1f1b", "check": False, **options}
    model = Chain(2) if model is None else model
    return fxpipe.compile(model, numbers(2) if example is None else example, **given)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.second(self.first(x)), y)


ROWS = torch.zeros(2, WIDTH)
X = numbers(2)["x"]

EXAMPLES = {
    "a tuple that is too long": ((ROWS,) * 3, "too many positional arguments"),
    "a tuple that is too short": ((ROWS,), "missing a required argument: 'y'"),
    "nothing": ({}, r"missing a required argument: 'x'.*the example gives nothing"),
    "a name too many": ({"x": ROWS, "y": ROWS, "z": ROWS}, "unexpected keyword argument 'z'"),
    "a name too few": ({"x": ROWS}, r"The forward is Two\.forward\(x, y\).*gives x=\(2, 8\) float32\."),
    "no text as a name": ({3: ROWS}, "not all texts"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_that_does_not_fit_the_forward(name):
    example, wanted = EXAMPLES[name]
    with pytest.raises(CaptureError, match=wanted):
        compiled(Two(), example)


def test_what_the_loss_alone_needs_is_named():
    with pytest.raises(CaptureError, match="With a loss_fn, what the forward does not take is for that"):
        compiled(nn.Linear(WIDTH, WIDTH), (ROWS, ROWS))


def test_what_goes_to_the_loss_alone_is_named_where_the_forward_lacks_something():
    with pytest.raises(CaptureError, match=r"'input'.*the example gives nothing for it, and z for loss_fn"):
        compiled(nn.Linear(WIDTH, WIDTH), {"z": ROWS}, loss_fn=lambda o, b: o.sum())


@pytest.mark.usefixtures("double")
def test_what_torch_compile_has_wrapped_gets_the_arguments_of_its_forward():
    model = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    batch = {"input": torch.randn(4, WIDTH), "y": torch.randn(4, WIDTH)}
    example = {name: x[:2] for name, x in batch.items()}
    result = compiled(model, example, loss_fn=lambda o, b: (o - b["y"]).square().mean()).run_local(batch)
    expected = (model._orig_mod(batch["input"]) - batch["y"]).square().mean()
    torch.testing.assert_close(result.loss, expected.detach())


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_compilation_without_gradients_says_why_there_are_none(off):
    with off(), pytest.raises(CaptureError, match=r"Gradients are off, by torch\.no_grad\(\) or"):
        compiled()


def test_a_model_that_takes_anything_is_not_bound():
    class Hooked(Chain):
        pass

    model = Hooked(2)
    model.register_forward_pre_hook(lambda module, args: (*args, args[0]))  # gives what the example lacks
    assert compiled(model, (ROWS,)).run_local((torch.ones(4, WIDTH),)).loss.shape == ()


LOSSES = {
    "one argument": (
        lambda output: output,
        OptionError,
        r"loss_fn\(output\) must be a function \(output, mic",
    ),
    "three arguments": (lambda o, b, c: o, OptionError, "missing a required argument: 'c'"),
    "a text": ("mse", OptionError, "loss_fn is 'mse' and must be a function"),
    "a class": (nn.MSELoss, OptionError, "loss_fn is the class MSELoss"),
    "a mapping": (
        lambda o, b: {"loss": o["last"].sum()},
        CaptureError,
        r"returned dict with the scalars loss\. Let",
    ),
    "nothing": (lambda o, b: None, CaptureError, r"loss_fn returned NoneType\. Let it return a scalar"),
    "another output": (
        nn.MSELoss(),
        CaptureError,
        r"loss_fn cannot be traced.*\nIt gets the output, dict\(last=\(2, 8\) float32\), and the whole ",
    ),
    "a function of torch": (
        nn.functional.cross_entropy,
        CaptureError,
        r"take the labels out of it, as in loss_fn=lambda output, batch: cross_entropy\(output, batch\[",
    ),
    "a number": (lambda o, b: 3.0, CaptureError, r"returned a number.*the tensor itself, without \.item\(\)"),
    "a number of the data": (
        lambda o, b: o["last"].sum().item(),
        CaptureError,
        r"returned a number.*the tensor itself, without \.item\(\)",
    ),
    "a wrong attribute": (
        lambda o, b: o.logits,
        CaptureError,
        r"loss_fn cannot be traced, at .*test_weak_errors\.py:\d+: AttributeError",
    ),
}


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, batch):
        return output["last"].sum() * self.scale


def of_variable():
    weights = nn.Parameter(torch.ones(WIDTH))
    return lambda output, batch: (output["last"] * weights).sum()


TRAINED_LOSSES = {
    "a module": (Criterion(), r"loss function Criterion trains Criterion\.scale"),
    "a module in a lambda": (
        (lambda criterion: lambda output, batch: criterion(output, batch))(Criterion()),
        r"loss function .*<lambda> trains Criterion\.scale",
    ),
    "a variable": (of_variable(), "trains the variable 'weights' of of_variable"),
}


@pytest.mark.parametrize("name", TRAINED_LOSSES)
def test_a_loss_fn_that_trains(name):
    loss_fn, wanted = TRAINED_LOSSES[name]
    with pytest.raises(CaptureError, match=rf"{wanted}.*one nn\.Module, whose forward returns the loss"):
        compiled(NoLoss(2), loss_fn=loss_fn)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_fn_that_is_none(name):
    loss_fn, kind, wanted = LOSSES[name]
    with pytest.raises(kind, match=wanted):
        compiled(NoLoss(2), loss_fn=loss_fn)


def test_metrics_behind_a_sum_and_a_count():
    """``((sum, n), {…})`` is what ``(sum, n, {…})`` is."""
    batch = numbers(4)

    def nested(output, microbatch):
        return (output["last"].sum(), torch.tensor(4.0)), {"mean": output["last"].mean()}

    def flat(output, microbatch):
        return *nested(output, microbatch)[0], nested(output, microbatch)[1]

    model = NoLoss(2)
    losses = [compiled(model, loss_fn=f, outputs=["mean"]).run_local(batch).loss for f in (nested, flat)]
    assert torch.equal(*losses)


OPTIONS = {
    "schedule in capitals": ({"schedule": "ZB-H1"}, r"Unknown schedule 'ZB-H1'\. Did you mean 'zb-h1'\?"),
    "schedule with an underscore": ({"schedule": "zb_h1"}, r"Did you mean 'zb-h1'\?"),
    "1F1B": ({"schedule": "1F1B"}, r"Did you mean '1f1b'\?"),
    "no schedule at all": ({"schedule": 3}, "Unknown schedule 3. Known: auto, gpipe"),
    "placement": ({"placement": "w"}, "placement is 'w' and must be 'plain', 'v' or None"),
    "costs": ({"costs": "H1000"}, r"Did you mean 'H100 SXM'\?"),
    "costs of too few": ({"costs": ["H100"]}, "costs names 1 device for 2 ranks"),
    "effort": ({"effort": -1}, "effort is -1"),
    "vocab_parallel": ({"vocab_parallel": "3-barrier"}, "vocab_parallel is '3-barrier'"),
    "recompute": ({"recompute": "most"}, "recompute is 'most' and must be 'norms', 'full', 'auto' or False"),
    "grad_dtype": ({"grad_dtype": "float32"}, r"must be None \(the parameters' own\), torch.float32"),
    "offload": ({"offload": 2.0}, "offload is 2.0"),
    "offload without a limit": ({"offload": "auto"}, "give one"),
    "tier": ({"offload": fxpipe.Offload(tier="ram")}, "'ram' and must be 'host' or 'disk'"),
    "bandwidth": ({"offload": fxpipe.Offload(bandwidth="fast")}, "'fast' and must be bytes a second"),
    "ranks": ({"ranks": True}, "ranks is True and must be a whole number"),
    "replicas": ({"replicas": 0}, "replicas is 0"),
    "timeout": ({"timeout": -1}, "timeout=-1 is no time above 0"),
    "check": ({"check": "no"}, "check is 'no' and must be True or False"),
    "split_points": ({"split_points": "blocks.1"}, r"split_points is a list of names: give \['blocks.1'\]"),
    "split_points of numbers": ({"split_points": [1, 2]}, r"split_points is \[1, 2\]"),
    "outputs": ({"outputs": 3}, "outputs is 3 and must be a list of names"),
    "fixed": ({"fixed": "x"}, r"fixed is a list of names: give \['x'\]"),
    "limit": ({"memory_limit": "lots"}, "The memory limit is 'lots'"),
    "limit as a share": ({"memory_limit": 0.5}, "is 0.5, which is in bytes.*such as '16GiB'"),
    "limit of a list": ({"memory_limit": [1, 2]}, r"The memory limit is \[1, 2\]"),
    "evaluation of a forward": ({"gradients": False, "evaluation": True}, "leave out evaluation"),
    "more microbatches than a plan can have": ({"microbatches": 10**9}, "more than 1,000,000 forwards"),
    "more stages than a plan can have": (
        {"microbatches": 10**5, "stages_per_rank": 100},
        "more than 1,000,000 forwards",
    ),
    "a name": ({"microbatch": 4}, r"compile has no option 'microbatch'\. Did you mean 'microbatches'\?"),
    "print_after": ({"print_after": "unties"}, r"Did you mean 'untie'\?"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_with_a_value_that_it_cannot_have(name):
    options, wanted = OPTIONS[name]
    with pytest.raises(OptionError, match=wanted):
        compiled(**options)


def test_an_option_without_its_name():
    wanted = "takes model, example in this order, and options by name. Write the name of cross_entropy"
    with pytest.raises(OptionError, match=wanted):
        fxpipe.compile(nn.Linear(4, 4), torch.ones(4, 4), torch.nn.functional.cross_entropy, ranks=2)
    wanted = (
        r"takes pipe, directory in this order, and options by name \(optimizer=, .*\)\. Write the name of"
    )
    with pytest.raises(OptionError, match=wanted):
        fxpipe.Checkpointer(None, None, "checkpoints")


@pytest.fixture(scope="module")
def pipe():
    return compiled()


@pytest.fixture(scope="module")
def one():
    """Of one rank, which trains in this process."""
    return compiled(ranks=1)


PIPE = {
    "called": (lambda pipe, _: pipe(numbers(4)), RunError, r"pipe\.step\(batch\) trains under torchrun"),
    "torch.save": (
        lambda pipe, path: torch.save(pipe, path / "x"),
        RunError,
        r"pipe\.save\(path\) writes it",
    ),
    "pickle": (lambda pipe, _: pickle.dumps(pipe), RunError, "cannot be pickled or copied"),
    "deepcopy": (lambda pipe, _: copy.deepcopy(pipe), RunError, "cannot be pickled or copied"),
    "draw below a file": (
        lambda pipe, path: ((path / "f").touch(), pipe.draw(path / "f" / "x")),
        ArtifactError,
        "f/x cannot be written",
    ),
    "draw to nothing": (
        lambda pipe, _: pipe.draw(None),
        OptionError,
        "pipe.draw needs the path of a directory",
    ),
    "save to nothing": (lambda pipe, _: pipe.save(None), OptionError, "pipe.save needs the path"),
    "load nothing": (lambda *_: fxpipe.load(None), OptionError, "fxpipe.load needs the path.*got None"),
    "load what is not there": (lambda _, path: fxpipe.load(path / "x"), ArtifactError, "no such directory"),
    "a checkpoint of nothing": (lambda *_: fxpipe.read_checkpoint(3), OptionError, "read_checkpoint needs"),
    "state of nothing": (lambda pipe, _: pipe.load_state_dict(None), OptionError, "state is None"),
    "a parameter": (
        lambda pipe, _: pipe.parameter("blocks.0.inner.weigth"),
        RunError,
        r"no parameter 'blocks.0.inner.weigth'. Did you mean 'blocks.0.inner.weight'\?",
    ),
    "threads": (lambda pipe, _: pipe.run_local(numbers(4), threads=0), OptionError, "threads is 0"),
    "a batch": (lambda pipe, _: pipe.run_local("x"), BatchError, "A batch, or an example, is a mapping"),
    "a batch without values": (
        lambda pipe, _: pipe.run_local({name: x.to("meta") for name, x in numbers(4).items()}),
        BatchError,
        "'x' is a tensor on the meta device, without values",
    ),
    "a batch as long as the example": (
        lambda pipe, _: pipe.run_local(numbers(2)),
        BatchError,
        r"as long as the example, 2 rows of 'x'.*2 microbatches, which have 4\. Give the batch of a whole "
        "step; or compile with an example of 1 row, if this is one",
    ),
    "one leaf as long as the example": (
        lambda pipe, _: pipe.run_local({**numbers(4), "y": numbers(2)["y"]}),
        BatchError,
        "'y' has 2 rows, .*If all rows share this tensor, make it a buffer",
    ),
    "a sparse batch": (
        lambda pipe, _: pipe.run_local({name: x.to_sparse() for name, x in numbers(4).items()}),
        BatchError,
        "of layout torch.sparse_coo. Give a dense tensor",
    ),
    "draw to a picture": (
        lambda pipe, path: pipe.draw(path / "step.png"),
        OptionError,
        "writes several pictures into a directory, and .*step.png is the name of one",
    ),
    "draw no steps": (lambda pipe, path: pipe.draw(path, steps=0), OptionError, "steps is 0"),
    "draw a phase": (
        lambda pipe, path: pipe.draw(path, expand="B"),
        FxpipeError,
        r"There is no section 'B' to draw. There are: \(0, 'F'\)",
    ),
    "simulate no steps": (lambda pipe, _: pipe.simulate_steps(0), OptionError, "steps is 0"),
    "simulate a validation": (
        lambda pipe, _: pipe.simulate_steps(validation="pst"),
        OptionError,
        "validation is 'pst' and must be 'barrier' or 'post'. Did you mean 'post'",
    ),
    "report to nothing": (
        lambda pipe, _: pipe.report(None),
        OptionError,
        "pipe.report needs the path of a f",
    ),
    "trace to nothing": (
        lambda pipe, _: pipe.trace(None),
        OptionError,
        "pipe.trace needs the path of a file",
    ),
    "weights of torch.save": (
        lambda pipe, path: (torch.save({}, path / "x.pt"), pipe.load_state_dict(path / "x.pt")),
        ArtifactError,
        r"x\.pt is a file of torch\.save: give what it holds, torch\.load\('.*x\.pt'\)",
    ),
    "a limit in gigabytes": (
        lambda *_: compiled(memory_limit=80),
        LimitError,
        r"is 80 B, and .* A number is in bytes: write '16GiB'",
    ),
    "weights within a mapping": (
        lambda pipe, _: pipe.load_state_dict({"epoch": 3, "model": pipe.state_dict()}),
        OptionError,
        r"give the state dict in it, state\['model'\]",
    ),
    "weights of torch.compile": (
        lambda pipe, _: pipe.load_state_dict({f"_orig_mod.{n}": x for n, x in pipe.state_dict().items()}),
        ArtifactError,
        r"torch\.compile added to it; take that out: \{name\.replace\('_orig_mod\.', ''\)",
    ),
    "weights of a wrapper": (
        lambda pipe, _: pipe.load_state_dict({f"module.{n}": x for n, x in pipe.state_dict().items()}),
        ArtifactError,
        r"or rename them, \{name\.removeprefix\('module\.'\): x for",
    ),
    "a dimension that weights fix": (
        lambda *_: compiled(dimensions={"width": WIDTH}).simulate(sizes={"width": 16}),
        SizeError,
        r"with other lengths of width\. Leave what the model's weights or code fix out of dimensions",
    ),
    "checkpoints of a model": (
        lambda _, path: fxpipe.Checkpointer(nn.Linear(2, 2), path),
        OptionError,
        "keeps a pipeline, and got Linear",
    ),
    "checkpoints of torch's optimizer": (
        lambda pipe, path: fxpipe.Checkpointer(
            pipe, path, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters())
        ),
        OptionError,
        "what pipe.optimizer.* makes, and not SGD",
    ),
    "checkpoints of a list": (
        lambda pipe, path: fxpipe.Checkpointer(pipe, path, state=[1]),
        OptionError,
        "state maps names to objects",
    ),
    "checkpoints of a number": (
        lambda pipe, path: fxpipe.Checkpointer(pipe, path, state={"x": 3}),
        OptionError,
        r"state\['x'\] is 3 and must have the methods",
    ),
    "checkpoints of an optimizer of torch's": (
        lambda pipe, path: fxpipe.Checkpointer(
            pipe, path, state={"opt": torch.optim.SGD(nn.Linear(2, 2).parameters())}
        ),
        OptionError,
        r"state\['opt'\] is an optimizer, whose state is another on each rank: make it by pipe.optimizer",
    ),
    "half a step": (
        lambda pipe, path: fxpipe.Checkpointer(pipe, path, every=1.5),
        OptionError,
        "every is 1.5 and must be a whole number",
    ),
    "a number of checkpoints": (
        lambda pipe, path: fxpipe.Checkpointer(pipe, path, keep="3"),
        OptionError,
        "keep is '3' and must be a whole number",
    ),
    "a time that is none": (
        lambda *_: compiled(timeout=True),
        OptionError,
        "timeout=True is no time above 0",
    ),
    "a model that is a class": (lambda *_: compiled(Chain), CaptureError, "The model is the class Chain"),
    "a module that is not there": (
        lambda *_: compiled(outputs=["blocks.9"]),
        CaptureError,
        "no module 'blocks.9': 'blocks' has '0', '1'",
    ),
    "an output that is no loss": (
        lambda *_: compiled(nn.Linear(WIDTH, WIDTH), (ROWS,)),
        CaptureError,
        r"returned a tensor of shape \(2, 8\)",
    ),
    "a dimension that is a text": (
        lambda *_: compiled(dimensions={"width": "8"}),
        SizeError,
        "'width' is to be '8' long and must be a whole number",
    ),
    "a method of a model": (
        lambda pipe, _: pipe.train(),
        AttributeError,
        r"no 'train'\. It has no mode: pipe.step\(batch\) trains",
    ),
    "a misspelled method": (lambda pipe, _: pipe.stpe({}), AttributeError, r"'stpe'\. Did you mean 'step'\?"),
    "parameters as of a model": (
        lambda pipe, _: pipe.parameters(),
        TypeError,
        r"a dict.*take \.values\(\)",
    ),
    "an option that it does not have": (
        lambda pipe, path: fxpipe.Checkpointer(pipe, path, evry=3),
        OptionError,
        r"Checkpointer has no option 'evry'\. Did you mean 'every'\?",
    ),
    "a schedule that is no schedule": (
        lambda _, path: ((path / "s.txt").write_text("rank 0: F0.0"), compiled(schedule=path / "s.txt")),
        ScheduleError,
        "schedule file .*s.txt: 'rank' is no op",
    ),
}


@pytest.mark.parametrize("name", PIPE)
def test_a_pipeline_that_is_used_wrongly(pipe, name, tmp_path):
    function, kind, wanted = PIPE[name]
    with pytest.raises(kind, match=wanted):
        function(pipe, tmp_path)


OPTIMIZERS = {
    "an unknown option": (
        {"learning_rate": 3e-4},
        r"AdamW has no option 'learning_rate'\. It has lr, betas.*itself groups, clip",
    ),
    "an option that is nearly one": ({"wieght_decay": 0.1}, r"Did you mean 'weight_decay'\?"),
    "a value": ({"lr": -1.0}, r"AdamW cannot be made with lr=-1\.0: Invalid learning rate"),
    "a type": ({"lr": "a"}, "AdamW cannot be made with lr='a'"),
    "a group": (
        {"groups": [{"params": ["*"], "weight_decy": 3}]},
        r"no option 'weight_decy'\. Did you mean 'weight_decay'",
    ),
    "groups of numbers": ({"groups": [3]}, "groups is a list of mappings"),
    "a group of a number": ({"groups": [{"params": 3}]}, 'A group is a mapping with "params"'),
    "a norm that is none": ({"clip_grad_norm": True}, "clip_grad_norm is True and must be a number above 0"),
    "a mapping for groups": ({"groups": {"params": ["*"]}}, "groups is a list of mappings"),
    "master_weights": ({"master_weights": "yes"}, "master_weights is 'yes' and must be True or False"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_cannot_be_made(one, name):
    options, wanted = OPTIMIZERS[name]
    with pytest.raises(OptionError, match=wanted):
        one.optimizer(torch.optim.AdamW, **options)


@pytest.mark.parametrize("give", ["by position", "by name"])
def test_an_optimizer_with_parameters(one, give):
    parameters = list(one.parameters.values())
    args, options = ((parameters,), {}) if give == "by position" else ((), {"params": parameters})
    with pytest.raises(OptionError, match=r"leave out yours\. Other options for some of them: groups=\["):
        one.optimizer(torch.optim.AdamW, *args, **options)


def test_an_op_that_fails_in_a_step_is_told_with_the_line_of_the_model():
    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x, y):
            return nn.functional.cross_entropy(self.head(x), y)  # of this line

    batch = (torch.zeros(4, WIDTH), torch.tensor([0, 1, 2, 4]))
    pipe = compiled(Labelled(), tuple(t[:2] for t in batch), ranks=1)
    for step in (pipe.step, pipe.run_local):
        with pytest.raises(
            RunError,
            match=r"itself \(test_weak_errors\.py:(\d+)\), line \d+ of rank0\.py \(nll_loss_forward\): ",
        ) as told:
            step(batch)
        number = int(re.search(r"test_weak_errors\.py:(\d+)", str(told.value))[1])
        assert "# of this line" in Path(__file__).read_text().splitlines()[number - 1]


def test_numpy_in_a_forward():
    class Numbers(Chain):
        def forward(self, x, y):
            return super().forward(torch.from_numpy(x.numpy() + 1), y)

    with pytest.raises(
        CaptureError, match=r"keep it a tensor \(no \.item\(\), float\(\) or \.numpy\(\) there"
    ):
        compiled(Numbers(2))


def test_errors_print_under_a_public_name():
    import fxpipe.cli.run.run_command  # which imports all rooms

    def kinds(kind):
        return {kind}.union(*(kinds(each) for each in kind.__subclasses__()))

    names = {kind.__name__ for kind in kinds(FxpipeError) if kind.__module__ != "fxpipe.errors"}
    caught = {"NoAnswer", "KeepsState", "TooLarge", "_CommunicatesError"}
    assert names <= caught, "others take the place of these before a user sees them"
    public = {kind.__name__ for kind in kinds(FxpipeError)} - names
    assert public <= {*fxpipe.__all__}


def test_an_optimizer_that_there_is_and_a_state_that_is_none(one):
    with pytest.raises(OptionError, match="give the class SGD and its options"):
        one.optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    for state in (None, {"x": 1}):
        with pytest.raises(OptionError, match="what its state_dict"):
            one.optimizer(torch.optim.SGD).load_state_dict(state)


def test_loading_a_checkpoint(one, tmp_path):
    opt = one.optimizer(torch.optim.SGD, lr=0.1)
    one.step(numbers(4))
    opt.step()
    with fxpipe.Checkpointer(one, tmp_path / "run", optimizer=opt) as checkpoints:
        checkpoints.save()
    for path in (tmp_path / "run", next((tmp_path / "run").glob("step-*"))):
        with pytest.raises(
            ArtifactError, match=r"checkpoints of a run.*Checkpointer\(pipe, directory\)\.resume"
        ):
            fxpipe.load(path)
    one.save(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match="It is a saved pipeline"):
        fxpipe.read_checkpoint(tmp_path / "pipe")


def test_the_model_itself_has_a_name():
    class Fails(Chain):
        def forward(self, x, y):
            return super().forward(x.view(3, 5), y)

    with pytest.raises(
        CaptureError, match=r"in the model itself \(.*test_weak_errors\.py:\d+\): RuntimeError"
    ):
        compiled(Fails(2))


def test_a_device_that_is_not_here():
    class Moves(Chain):
        def forward(self, x, y):
            return super().forward(x.to("xpu"), y)

    with pytest.raises(CaptureError, match="device that torch does not find here, in the model itself"):
        compiled(Moves(2))


# -- tracebacks ----------------------------------------------------------------------------------------------


def test_an_error_shows_the_lines_of_the_user_alone(caplog):
    """It was 180 lines of torch's tracer, and more in the log of fake tensors."""

    class Views(Chain):
        def forward(self, x, y):
            return super().forward(x.view(3, 7), y)

    with pytest.raises(CaptureError) as caught:
        compiled(Views(2))
    text = "".join(traceback.format_exception(caught.value))
    assert len(text.splitlines()) <= 25
    assert {Path(file).name for file in re.findall(r'File "(.*?)"', text)} == {
        Path(__file__).name,
        "tracebacks.py",
    }
    assert "return super().forward(x.view(3, 7), y)" in text
    assert text.splitlines()[-2].startswith("fxpipe.errors.CaptureError: The model cannot be traced")
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_a_chain_keeps_the_users_errors():
    @brief
    def fails():
        try:
            raise KeyError("of the user")  # in a file of the user's
        except KeyError as error:
            raise RunError("of fxpipe") from error

    with pytest.raises(RunError) as caught:
        fails()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__.tb_frame.f_code.co_filename == __file__
    frames = [frame.path.name for frame in caught.traceback]
    assert frames == [Path(__file__).name, "tracebacks.py"]


def test_an_error_that_is_its_own_cause_ends():
    error = CaptureError("x")
    error.__cause__ = error
    shorten(error)
    assert error.__cause__ is None
