"""Trainers of other libraries: on ranks and in one process they have the numbers of the plain ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import forked
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zoo import in_double_precision

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pl = pytest.importorskip("lightning.pytorch")
import accelerate_worker  # noqa: E402 - these need them
import docs_worker  # noqa: E402
import lightning_worker  # noqa: E402
import trainers_worker as worker  # noqa: E402

import fxpipe  # noqa: E402
from fxpipe.errors import ArtifactError, CaptureError, OptionError  # noqa: E402
from fxpipe.integrations import trainer as trainer_module  # noqa: E402
from fxpipe.integrations.lightning import PipelineStrategy  # noqa: E402
from fxpipe.integrations.traced_step import TracedStep  # noqa: E402
from fxpipe.integrations.trainer import Trainer  # noqa: E402
from fxpipe.integrations.trainer_arguments import check_given, check_optimizer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("double")]

PLAIN = transformers.Trainer
NUMBERS = ("loss", "grad_norm", "learning_rate", "epoch", "train_loss", "eval_loss", "eval_right", "step")


def assert_same_log(found: list[dict[str, Any]], plain: list[dict[str, Any]], rel: float = 1e-10) -> None:
    assert len(found) == len(plain)
    for here, there in zip(found, plain, strict=True):
        names = [name for name in NUMBERS if name in there]
        assert [here[name] for name in names] == pytest.approx([there[name] for name in names], rel=rel)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The whole script with transformers' own Trainer, in this process."""
    directory = tmp_path_factory.mktemp("plain")
    with in_double_precision():
        trainer = worker.whole(PLAIN, directory, {})
        trainer.train()
        trainer.save_model(str(directory / "last"))
    return trainer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole script on two ranks."""
    directory = tmp_path_factory.mktemp("ranks")
    run = forked(2, worker.train_on_ranks, str(directory), dtype=torch.float64, logs=directory / "logs")
    assert run.code == 0, run
    return directory


@pytest.fixture(scope="module")
def told(directory: Path) -> list[dict[str, Any]]:
    return [json.loads((directory / f"told{rank}.json").read_text()) for rank in range(2)]


def test_ranks_have_the_numbers_of_one_process(plain, told):
    for of_rank in told:
        assert_same_log(of_rank["trained"], plain.state.log_history)
        assert 0 < of_rank["held"] < len([*plain.model.parameters()])


def test_a_run_goes_on_as_if_it_had_not_ended(told, directory):
    first, rest = told[0]["trained"], told[0]["resumed"]
    numbers = [{name: x[name] for name in NUMBERS[:3] if name in x} for x in first if x["step"] > 5]
    again = [{name: x[name] for name in NUMBERS[:3] if name in x} for x in rest if x["step"] > 5]
    assert numbers == again  # bit for bit
    assert len([x for x in numbers if "loss" in x]) == 3
    weights = [load_file(directory / name / "last" / "model.safetensors") for name in ("trained", "resumed")]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_the_best_weights_are_saved_as_from_pretrained_opens_them(plain, told, directory):
    assert told[0]["trained best"] == told[1]["trained best"] == str(directory / "trained" / "checkpoint-5")
    opened = worker.Tied.from_pretrained(directory / "trained" / "last")
    assert opened.head.weight is opened.table.weight
    assert opened.dtype == torch.float64
    torch.testing.assert_close(opened.state_dict(), plain.model.state_dict(), rtol=1e-10, atol=1e-12)
    assert told[0]["predicted"] == told[1]["predicted"]
    logits = plain.model(worker.Rows(3, seed=2)[:]["input_ids"])["logits"]
    torch.testing.assert_close(torch.tensor(told[0]["predicted"]), logits.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.variation
def test_the_examples_write_what_others_open(tmp_path):
    directory = tmp_path
    run = forked(2, worker.run_examples, str(directory), dtype=torch.float32, logs=directory / "logs")
    assert run.code == 0, run
    assert [*(directory / "build" / "lightning").rglob("*.ckpt")]
    opened = transformers.LlamaForCausalLM.from_pretrained(directory / "build" / "trainer" / "last")
    assert opened.config.num_hidden_layers == 2


def test_only_the_first_rank_writes(directory):
    files = {path.name for path in (directory / "trained" / "checkpoint-5").iterdir()}
    assert files >= {"config.json", "model.safetensors", "trainer_state.json", "rng_state.pth", "fxpipe"}
    assert not [name for name in files if name.startswith(("rng_state_", "optimizer", "scheduler"))]


def both(
    directory: Path, make: Any, more: dict[str, Any], options: dict[str, Any], **given: Any
) -> list[Any]:
    """The same run with transformers' Trainer, and with a pipeline of one rank."""
    given = {"train_dataset": worker.Rows(), "eval_dataset": worker.Rows(7, seed=1)} | given
    pipeline = {"schedule": "1f1b", "check": False} | options
    trainers = [
        PLAIN(make(), worker.arguments(directory / "plain", **more), **given),
        Trainer(make(), worker.arguments(directory / "here", **more), **given, pipeline=pipeline),
    ]
    for trainer in trainers:
        trainer.train()
    return trainers


def longest(rows: int = 2) -> dict[str, torch.Tensor]:
    return {name: x.repeat(rows, 1) for name, x in worker.Rows()[0].items()}


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "each microbatch's own mean": (worker.Means, {"eval_strategy": "epoch"}, {}, {}),
    "a mean over the labels of a step": (
        worker.Counts, {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 4}, {}, {},
    ),
    "more labels counted than the loss has": (
        worker.CountsAll, {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 4}, {}, {},
    ),
    "smoothed labels": (
        worker.Means,
        {"label_smoothing_factor": 0.1, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}, {}, {},
    ),
    "a callback between clipping and the update": (
        worker.Means, {"optim": "sgd", "learning_rate": 1.0}, {}, {"callbacks": [worker.Between()]},
    ),
    "smoothed labels, counted": (
        worker.CountsAll,
        {"label_smoothing_factor": 0.1, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}, {}, {},
    ),
    "microbatches of several lengths": (
        worker.Means, {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
        {"dimensions": {"sequence": worker.LENGTH}, "example": longest()}, {"data_collator": worker.trimmed},
    ),
    "microbatches of several lengths and rows": (
        worker.Means, {"max_steps": 3, "per_device_train_batch_size": 3},
        {"dimensions": {"rows": 3, "sequence": worker.LENGTH}, "example": longest(3)},
        {"data_collator": worker.trimmed},
    ),
    "a last row for which the model decides otherwise": (
        worker.OfOneRow, {"max_steps": 2, "per_device_train_batch_size": 4},
        {"dimensions": {"rows": 4, "sequence": worker.LENGTH}, "example": longest(4)},
        {"data_collator": worker.trimmed},
    ),
    "a stream, rates by a metric": (
        worker.Means,
        {
            "max_steps": 4, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps",
            "eval_steps": 2, "lr_scheduler_kwargs": {"patience": 0}, "max_grad_norm": 0.0,
        },
        {}, {"train_dataset": worker.Stream()},
    ),
    "autocast": (worker.Means, {"bf16": True, "gradient_accumulation_steps": 2, "max_steps": 2}, {}, {}),
}  # fmt: skip


LISTS = {"dimensions": {"rows": 2, "sequence": worker.LENGTH}, "example": longest(), "microbatches": 3}


@pytest.mark.variation
@pytest.mark.parametrize("make", [worker.Means, worker.Counts])
def test_a_collator_that_makes_lists(make, tmp_path):
    """Of microbatches in which rows are about equally long, beside one padded batch."""
    samples = {"train_dataset": worker.Uneven(), "eval_dataset": worker.Uneven(7, seed=1)}
    more = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "eval_strategy": "epoch"}
    made = partial(fxpipe.pad, tokens=2 * worker.LENGTH, mask=None)
    plain = PLAIN(
        make(), worker.arguments(tmp_path / "plain", **more), **samples, data_collator=worker.padded
    )
    here = Trainer(
        make(),
        worker.arguments(tmp_path / "here", **more),
        **samples,
        data_collator=made,
        pipeline={"schedule": "1f1b", "check": False} | LISTS,
    )
    for trainer in (plain, here):
        trainer.train()
    rel = 1e-6 if make is worker.Counts else 1e-10
    assert_same_log(here.state.log_history, plain.state.log_history, rel)
    torch.testing.assert_close(
        here.pipe.state_dict(), dict(plain.model.state_dict()), rtol=100 * rel, atol=rel
    )


@pytest.mark.variation
def test_lists_that_are_refused(small):
    made = {"train_dataset": worker.Uneven(), "data_collator": partial(fxpipe.pad, tokens=12, mask=None)}
    with pytest.raises(OptionError, match=r"makes lists of microbatches: give pipeline={'dimensions'"):
        small(**made).train()
    with pytest.raises(OptionError, match="pipeline has 'microbatches', which follows from"):
        small(pipeline={"microbatches": 4})
    trainer = small(pipeline=LISTS, **made, eval_dataset=worker.Uneven(3), compute_metrics=worker.accuracy)
    with pytest.raises(OptionError, match="which have no rows to predict"):
        trainer.evaluate()

    def halved(outputs, labels, num_items_in_batch=None):
        return worker.exact_loss(outputs, labels) / 2

    with pytest.raises(OptionError, match="no mean over microbatches of a list: a loss is a sum over labels"):
        small(pipeline=LISTS, **made, compute_loss_func=halved).train()


@pytest.mark.in_ci("a mean over the labels of a step", "smoothed labels, counted")
@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_rates_of_one_rank(case, tmp_path):
    make, more, options, given = CASES[case]
    plain, here = both(tmp_path, make, more, options, **given)
    rel = 1e-6 if issubclass(make, worker.Counts) else 1e-10  # its logits become float32
    assert_same_log(here.state.log_history, plain.state.log_history, rel)
    weights = here.pipe.state_dict()
    torch.testing.assert_close(weights, dict(plain.model.state_dict()), rtol=100 * rel, atol=rel)


@pytest.fixture
def small(tmp_path: Path) -> Any:
    def made(model: Any = None, pipeline: Any = None, more: Any = None, **given: Any) -> Any:
        args = worker.arguments(tmp_path / "run", **({"max_steps": 1, "warmup_steps": 0} | (more or {})))
        given = {"train_dataset": worker.Rows()} | given
        pipeline = {"schedule": "1f1b", "check": False} | (pipeline or {})
        return Trainer(model or worker.Means(), args, pipeline=pipeline, **given)

    return made


def test_an_evaluation_without_training(small):
    trainer = small(train_dataset=None, eval_dataset=worker.Rows(7, seed=1), compute_metrics=worker.accuracy)
    plain = PLAIN(
        worker.Means(), trainer.args, eval_dataset=worker.Rows(7, seed=1), compute_metrics=worker.accuracy
    )
    assert_same_log([trainer.evaluate() | {"step": 0}], [plain.evaluate() | {"step": 0}])
    unlabeled = [{"input_ids": row["input_ids"]} for row in worker.Rows(3)]
    logits = plain.predict(unlabeled).predictions
    assert trainer.predict(unlabeled).predictions == pytest.approx(logits)
    trainer.train_dataset = worker.Rows()
    with pytest.raises(OptionError, match="make another to train"):
        trainer.train()


@pytest.mark.variation
def test_weights_alone_are_resumed(small):
    first = small(more={"save_strategy": "steps", "save_steps": 1, "save_only_model": True}, figures=True)
    first.train()
    assert {"tokens/s", "predicted"} <= first.state.log_history[0].keys()
    path = Path(first.args.output_dir) / "checkpoint-1"
    second = small()
    plain = PLAIN(worker.Means(), second.args, train_dataset=worker.Rows())
    for trainer in (second, plain):
        trainer.train(resume_from_checkpoint=str(path))
    torch.testing.assert_close(second.pipe.state_dict(), dict(plain.model.state_dict()))
    with torch.device("meta"):
        model = worker.Means()
    third = small(model, weights=path, eval_dataset=worker.Rows(7, seed=1))
    third.train()
    same = worker.Means()
    same.load_state_dict(load_file(path / "model.safetensors"))
    fourth = small(same)
    fourth.train()
    fourth.train()  # once more, with the same optimizer
    assert fourth.state.global_step == 1
    third.train()
    torch.testing.assert_close(third.pipe.state_dict(), fourth.pipe.state_dict(), rtol=0, atol=0)
    assert third.evaluate()["eval_loss"] > 0  # by a pipeline of another size, on the same tensors
    with pytest.raises(ArtifactError, match="no checkpoint of the Trainer"):
        small().train(resume_from_checkpoint=str(path.parent))
    (path / "optimizer.pt").touch()
    with pytest.raises(ArtifactError, match=r"is of transformers\.Trainer, whose optimizer"):
        small().train(resume_from_checkpoint=str(path))


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 1, "max_steps": 4}])
def test_rows_of_several_shapes_have_a_remedy(small, more):
    """Also where each step has one shape."""
    with pytest.raises(OptionError, match=r"rows of 'input_ids' of the shapes \(2,\) and .*dimensions"):
        small(data_collator=worker.trimmed, more={"train_sampling_strategy": "sequential", **more}).train()


def test_rows_without_labels_have_a_remedy(small):
    unlabeled = [{"input_ids": row["input_ids"]} for row in worker.Rows()]
    with pytest.raises(CaptureError, match=r"no loss for input_ids.*, only logits: put labels into the rows"):
        small(train_dataset=unlabeled).train()


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


REFUSED = {
    "fp16=True": lambda small: small(more={"fp16": True}),
    "auto_find_batch_size=True": lambda small: small(more={"auto_find_batch_size": True}),
    "torch_compile=True": lambda small: small(more={"torch_compile": True}),
    "neftune_noise_alpha=5": lambda small: small(more={"neftune_noise_alpha": 5}),
    "train_sampling_strategy='batch_rebalance'": lambda small: small(
        more={"train_sampling_strategy": "batch_rebalance"}
    ),
    "pipeline has 'microbatches'": lambda small: small(pipeline={"microbatches": 4}),
    "pipeline has validation='post'": lambda small: small(pipeline={"validation": "post"}),
    "ranks=2 has 2 processes, and 1 were started": lambda small: small(pipeline={"ranks": 2}),
    "no model_init": lambda small: small(model_init=worker.Means),
    "optimizers= are made of a whole model": lambda small: small(
        optimizers=(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None)
    ),
    "optim='lomo' is made of the whole model": lambda small: check_optimizer(
        object, {"model": None}, transformers.training_args.OptimizerNames.LOMO
    ),
    "OwnLoss has a compute_loss of its own": lambda small: OwnLoss(worker.Means(), small().args),
    "a transformers whose Trainer has _clip_grad_norm": lambda small: check_given(
        Trainer, object, worker.Means(), {}, {}
    ),
    "makes a model for each trial": lambda small: small().hyperparameter_search(),
    "runs in steps of the pipeline alone": lambda small: small()._wrap_model(worker.Means())(),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_has_no_meaning_is_refused(text, small):
    with pytest.raises(OptionError, match=re.escape(text)):
        REFUSED[text](small)


def test_an_optimizer_of_the_whole_model_is_refused_before_anything_is_compiled(small):
    trainer = small(optimizer_cls_and_kwargs=(torch.optim.SGD, {"model": None}))
    with pytest.raises(OptionError, match="is made of the whole model"):
        trainer.train()
    assert trainer.pipe is None


class OwnOptimizer(Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters())
        return self.optimizer


class Halves(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **named):
        args.gradient_accumulation_steps = 2


def test_what_the_trainer_learns_in_a_run_is_refused(small):
    trainer = OwnOptimizer(worker.Means(), small().args, train_dataset=worker.Rows())
    with pytest.raises(OptionError, match="OwnOptimizer makes its optimizer of the whole model"):
        trainer.train()
    with pytest.raises(OptionError, match="was 4 when the pipeline was compiled, and is 2: make another"):
        small(more={"max_steps": 2}, callbacks=[Halves()]).train()


def test_processes_that_the_arguments_do_not_know(monkeypatch, small):
    """Each would train a copy of the model: accelerate joins processes on a CPU only if it is told to."""
    args = small().args
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"2 processes were started, and .*use_cpu=True"):
        Trainer(worker.Means(), args, train_dataset=worker.Rows())


def test_one_microbatch_is_warned_of(monkeypatch, small):
    monkeypatch.setattr(trainer_module.Sizes, "compile_first", lambda *args, **kwargs: None)
    trainer = small(more={"gradient_accumulation_steps": 1})
    trainer._options["ranks"] = 2
    with pytest.warns(UserWarning, match="ranks run one after the other"):
        trainer._compile()


def sides(number: int) -> list[str]:
    """A script of docs/trainers.md before it changes, and afterwards, on one rank."""
    diffs = [block.text for block in docs_worker.blocks("docs/trainers.md") if block.language == "diff"]
    lines = [line for line in diffs[number].splitlines() if line != "@@"]
    texts = ["\n".join(line[1:] for line in lines if line[0] in " " + sign) for sign in "-+"]
    return [text.replace("devices=4", "devices=1") for text in texts]


def test_the_page_changes_a_script_of_trainer_and_not_its_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = {"use_cpu": True, "max_steps": 2, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    monkeypatch.setattr(transformers, "TrainingArguments", partial(transformers.TrainingArguments, **more))
    logs = []
    for text in sides(0):
        names = {"model": worker.Counts(), "rows": worker.Rows(64), "others": worker.Rows(7, seed=1)}
        exec(text, names)
        logs.append(names["trainer"].state.log_history)
        assert (tmp_path / "trained" / "model.safetensors").exists()
    assert type(names["trainer"]) is Trainer
    assert_same_log(logs[1], logs[0], 1e-6)


def test_the_page_changes_a_script_of_lightning_and_not_its_numbers(tmp_path, monkeypatch):
    quiet = partial(pl.Trainer, default_root_dir=tmp_path, logger=False, **lightning_worker.QUIET)
    monkeypatch.setattr(pl, "Trainer", quiet)
    losses = []
    for text in sides(1):
        names = dict(zip(("train_loader", "val_loader"), lightning_worker.loaders(), strict=True))
        names |= {"L": pl, "module": lightning_worker.Net()}
        exec(text, names)
        losses.append(float(names["trainer"].callback_metrics["val_loss"]))
    assert isinstance(names["trainer"].strategy, PipelineStrategy)
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def logged(directory: Path) -> list[dict[str, float]]:
    lines = [line.split(",") for line in lightning_worker.numbers(directory).splitlines()]
    return [{n: float(x) for n, x in zip(lines[0], line, strict=True) if x} for line in lines[1:]]


def test_a_loss_that_is_logged_without_its_graph():
    """What is logged of the loss is the whole batch's, also where labels are ignored."""

    class Net(lightning_worker.Net):
        def training_step(self, batch, batch_idx):
            loss = self(batch[0]).square().mean()
            self.log_dict({"twice": 2 * loss, "same": loss.detach(), "itself": loss})
            return loss

    step = TracedStep(Net(), "training_step")
    step((torch.ones(2, 6),))
    assert step.logged().losses == (1, 2)


@pytest.fixture(scope="module")
def plain_lightning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lightning")
    with in_double_precision():
        lightning_worker.fit(directory, 2, devices=1)
    return directory


def test_lightning_on_ranks(plain_lightning, told, directory):
    found, plain = logged(directory / "lightning" / "trained"), logged(plain_lightning)
    assert [{*each} for each in found] == [{*each} for each in plain]
    for here, there in zip(found, plain, strict=True):
        assert here == pytest.approx(there, rel=1e-12)
    assert told[0]["lightning"] == told[1]["lightning"]
    first, second = told[0]["lightning"]
    assert first == second  # bit for bit


def test_plain_lightning_opens_a_checkpoint_of_ranks(plain_lightning, directory, tmp_path):
    kept = directory / "lightning" / "trained" / "kept" / "epoch=0-step=4.ckpt"
    lightning_worker.fit(tmp_path / "plain", 2, kept, devices=1)
    assert logged(tmp_path / "plain")[-1] == pytest.approx(logged(plain_lightning)[-1], rel=1e-12)
    own, strategy = plain_lightning / "kept" / "epoch=0-step=4.ckpt", PipelineStrategy(microbatches=2)
    options = {"devices": 1, "strategy": strategy, "precision": "64-true"}
    trainer = lightning_worker.fit(tmp_path / "here", 2, own, **options)
    assert logged(tmp_path / "here")[-1] == pytest.approx(logged(plain_lightning)[-1], rel=1e-12)
    module, (train, evaluated) = trainer.lightning_module, lightning_worker.loaders()
    found = trainer.test(module, evaluated, verbose=False)
    assert found[0]["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    with pytest.raises(OptionError, match=r"predict: call strategy\.pipe\.synchronize"):
        trainer.predict(module, evaluated)
    with pytest.raises(OptionError, match="is of one module"):
        trainer.fit(lightning_worker.Net(), train)


class Indexed(lightning_worker.Net):
    def training_step(self, batch, number):  # Lightning passes it by place
        if number % 2:
            self.log("odd", 1.0)
        return super().training_step(batch, number)


class Epochs(lightning_worker.Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.current_epoch


class Modules(lightning_worker.Net):
    def training_step(self, batch, batch_idx):
        self.log("metric", self.body)
        return super().training_step(batch, batch_idx)


class Closures(lightning_worker.Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class ByHand(lightning_worker.Net):
    automatic_optimization = False


class Backward(lightning_worker.Net):
    def backward(self, loss):
        (0.1 * loss).backward()


class NeverZeroes(lightning_worker.Net):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        pass


class Several(lightning_worker.Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    def training_step(self, batch, batch_idx, optimizer_idx=0):
        return super().training_step(batch, batch_idx)


RUNS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "The step uses number": (Indexed, {}, 8),
    "A step of Epochs uses self.current_epoch": (Epochs, {}, 8),
    "self.log('metric', …) in training_step takes a tensor or a number": (Modules, {}, 8),
    "automatic_optimization=False": (ByHand, {}, 8),
    "backward of the module would not run": (Backward, {}, 8),
    "accumulate_grad_batches: give larger batches": (lightning_worker.Net, {"accumulate_grad_batches": 2}, 8),
    "accumulate_grad_batches: give larger": (
        lightning_worker.Net,
        {"callbacks": [pl.callbacks.GradientAccumulationScheduler({1: 2})], "max_epochs": 2},
        8,
    ),
    "LBFGS runs the step several times for an update": (Closures, {}, 8),
    "4 microbatches cannot share a batch of 6 rows": (lightning_worker.Net, {}, 6),
    "a batch of [8, 8] rows, and its first one had [12, 12]: give it drop_last": (
        lightning_worker.Net,
        {},
        12,
    ),
}


@pytest.mark.parametrize("text", RUNS)
def test_what_a_strategy_does_not_do_is_refused(text):
    module, options, rows = RUNS[text]
    strategy = PipelineStrategy(microbatches=4, schedule="1f1b")
    quiet = {"logger": False, "enable_checkpointing": False, "max_epochs": 1} | lightning_worker.QUIET
    trainer = pl.Trainer(devices=1, strategy=strategy, **(quiet | options))
    with pytest.raises((OptionError, CaptureError), match=re.escape(text)) as raised:
        trainer.fit(module(), *lightning_worker.loaders(rows))
    assert "runs on the example without fxpipe" not in str(raised.value)  # it does, and that helps nobody


class HeadAlone(lightning_worker.Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.body[4].parameters(), lr=0.1)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_what_an_optimizer_updates_is_clipped_by_itself(algorithm):
    def trained(**options: Any) -> dict[str, torch.Tensor]:
        quiet = {"logger": False, "enable_checkpointing": False, "max_epochs": 1} | lightning_worker.QUIET
        trainer = pl.Trainer(
            devices=1, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm, **quiet, **options
        )
        trainer.fit(HeadAlone(), *lightning_worker.loaders())
        return dict(trainer.strategy.lightning_module_state_dict())

    torch.testing.assert_close(trained(strategy=PipelineStrategy(microbatches=4, schedule="1f1b")), trained())


class Annealed(lightning_worker.Net):
    weight = 1.0

    def on_train_batch_start(self, batch, batch_idx):
        self.weight = 1.0 + batch_idx

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.weight


def test_a_number_that_a_hook_sets_is_told():
    quiet = {"logger": False, "enable_checkpointing": False, "max_steps": 2} | lightning_worker.QUIET
    trainer = pl.Trainer(devices=1, strategy=PipelineStrategy(microbatches=4, schedule="1f1b"), **quiet)
    with pytest.warns(UserWarning, match=r"module.weight was 1.0 .* and is 2.0.* make it a buffer"):
        trainer.fit(Annealed(), lightning_worker.loaders()[0])


def test_a_module_zeroes_its_gradients_itself():
    """Or lets them add up."""
    states = []
    for options in ({}, {"strategy": PipelineStrategy(microbatches=4, schedule="1f1b")}):
        quiet = {"logger": False, "enable_checkpointing": False, "max_epochs": 1} | lightning_worker.QUIET
        module = NeverZeroes().double()
        x, y = lightning_worker.loaders()[0].dataset.tensors
        data = DataLoader(TensorDataset(x.double(), y), batch_size=8)
        pl.Trainer(devices=1, precision="64-true", **quiet, **options).fit(module, data)
        states.append(module.state_dict())
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-9, atol=1e-12)


def assert_accelerated(directory: Path, rel: float) -> None:
    told = [json.loads((directory / f"accelerate{rank}.json").read_text()) for rank in range(2)]
    plain, losses = accelerate_worker.model(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in accelerate_worker.loader():
        loss = accelerate_worker.loss_fn(plain(batch["input"].double()), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for rank, of_rank in enumerate(told):
        assert (of_rank["processes"], of_rank["first"]) == (2, rank == 0)
        assert of_rank["losses"] == pytest.approx(losses, rel=rel)
        assert "The backward has run" in of_rank["backward"]
        assert "wrapped in DistributedDataParallel" in of_rank["prepare"]


def test_an_accelerator_counts_and_prints_for_ranks(told, directory):
    assert_accelerated(directory, 1e-12)


@pytest.mark.variation
def test_accelerate_launch_starts_ranks(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += [accelerate_worker.__file__, str(tmp_path)]
    run = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert_accelerated(tmp_path, 1e-5)  # in float32
