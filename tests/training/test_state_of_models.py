"""Weights of Hugging Face models: on the meta device, and in and out of their files."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import captured_once

import fxpipe
from fxpipe.errors import ArtifactError

pytestmark = pytest.mark.slow


@pytest.mark.variation
def test_a_llama_on_the_meta_device():
    """Its rotary frequencies are buffers that its file does not hold."""
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=16,
    )  # fmt: skip
    real = LlamaForCausalLM(config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.arange(12).reshape(2, 6)
    batch = {"input_ids": tokens, "labels": tokens}
    example = {name: t[:1] for name, t in batch.items()}
    pipe = fxpipe.compile(model, example, ranks=2, microbatches=2, schedule="1f1b")
    pipe.load_state_dict(real.state_dict())
    plain = fxpipe.compile(real, example, ranks=2, microbatches=2, schedule="1f1b")
    assert torch.equal(pipe.run_local(batch).loss, plain.run_local(batch).loss)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A directory that ``from_pretrained`` opens, and its model; the output layer is tied to the table."""
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=16, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    directory = tmp_path_factory.mktemp("llama")
    model.save_pretrained(directory)
    return directory, model


def llama_pipeline(model: nn.Module, ranks: int = 2) -> fxpipe.Pipeline:
    tokens = {name: torch.arange(6).reshape(1, 6) for name in ("input_ids", "labels")}
    with captured_once("llama", model.device.type):
        return fxpipe.compile(model, tokens, ranks=ranks, microbatches=2, schedule="1f1b")


@pytest.mark.parametrize("largest", [pytest.param("5GB", marks=pytest.mark.variation), "4KB"])
def test_in_and_out_of_files_of_hugging_face(llama, tmp_path, largest):
    """One file or several; the model on the meta device takes them as well."""
    directory, model = llama
    with torch.device("meta"):
        blank = LlamaForCausalLM(model.config)
    pipe = llama_pipeline(blank)
    pipe.load_state_dict(directory)
    pipe.export(tmp_path / "out", like=directory, largest_file=largest)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) == 1) == (largest == "5GB")
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor)
    again = llama_pipeline(LlamaForCausalLM(model.config))
    again.load_state_dict(str(tmp_path / "out"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_files_that_are_refused(llama, tmp_path):
    directory, model = llama
    pipe = llama_pipeline(copy.deepcopy(model))
    with pytest.raises(ArtifactError, match=r"no directory with model\.safetensors"):
        pipe.load_state_dict(tmp_path)
    with pytest.raises(ArtifactError, match="not empty"):
        pipe.export(directory)
    with pytest.raises(ArtifactError, match=r"no config\.json"):
        pipe.export(tmp_path / "out", like=tmp_path)
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(ArtifactError, match="damaged or cut short"):
        pipe.load_state_dict(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text, message in [
        ('{"weight_map": {"a": "../b"}}', "must be a file of the same directory"),
        ('{"weight_map": 3}', "weight_map is 3"),
        ("{", "is not JSON"),
    ]:
        index.write_text(text)
        with pytest.raises(ArtifactError, match=message):
            pipe.load_state_dict(tmp_path)


def test_groups_as_in_the_docs_on_a_llama(llama):
    """Which has norms, and no biases."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    example = re.search(r"```python\n(opt = pipe\.optimizer\(\n.*?)```", page, re.S)
    assert example
    names = {"pipe": llama_pipeline(copy.deepcopy(llama[1]), ranks=1), "torch": torch}
    with pytest.warns(UserWarning, match=r"matches '\*\.bias'"):
        exec(example[1], names)
    plain, rest = names["opt"].param_groups
    assert len(plain["params"]) == sum("norm" in name for name, _ in llama[1].named_parameters())
    assert (plain["weight_decay"], rest["weight_decay"]) == (0.0, 0.1)


@pytest.mark.variation
def test_in_and_out_as_in_the_docs(llama, tmp_path, monkeypatch):
    """The block of docs/howto.md, on one rank, which needs no torchrun."""
    page = (Path(__file__).parents[2] / "docs" / "howto.md").read_text()
    example = re.search(r"```python\n(from transformers.*?)```", page, re.S)
    assert example
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrained").symlink_to(llama[0])
    tokens = torch.arange(32).reshape(16, 2)
    batch = {"input_ids": tokens, "labels": tokens}
    names = {
        "torch": torch,
        "fxpipe": fxpipe,
        "batch": batch,
        "example": {n: t[:1] for n, t in batch.items()},
    }
    exec(example[1].replace("ranks=4", "ranks=1"), names)
    torch.testing.assert_close(names["loss"], llama[1](**batch).loss.detach())
    trained = LlamaForCausalLM.from_pretrained("trained").state_dict()
    for name, value in llama[1].state_dict().items():
        assert torch.equal(trained[name], value), name
