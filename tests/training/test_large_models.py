"""Models on the meta device: a rank reads, or initializes, the tensors that it holds and no others."""

import contextlib
import itertools
import math
import re
import types
from functools import partial
from unittest.mock import patch

import pytest
import torch
from marks import slow_except
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo import captured_once

import fxpipe
from fxpipe.api.rank_tensors import held_of
from fxpipe.errors import ArtifactError, RunError
from fxpipe.plan.rows import ShardName
from fxpipe.training.model.initialize import initialize_model
from fxpipe.training.model.model_state import ModelState
from fxpipe.training.model.state_dict import load_state_dict
from fxpipe.training.weights import pretrained
from fxpipe.training.weights.initial_values import initialize
from fxpipe.training.weights.pretrained import Pretrained
from fxpipe.training.weights.tensor_values import InMemory

WORDS, WIDTH = 24, 8


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x):
        return x * x.square().mean(-1, keepdim=True).rsqrt() * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """Its ``_init_weights`` writes tensors of a block's parts, as that of GPT-2 does."""

    def __init__(self, blocks=4, tied=False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.scale.copy_(torch.linspace(0.5, 1.5, WIDTH))

    def _init_weights(self, module):
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
        if isinstance(module, Block):
            nn.init.trunc_normal_(module.up.weight, std=0.1)
            nn.init.orthogonal_(module.down.weight)

    def forward(self, x, y):
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


TOKENS = torch.arange(12).reshape(2, 6)
BATCH = {"x": TOKENS, "y": TOKENS + 1}


def compiled(model, ranks=1, **options):
    options = {"schedule": "1f1b", "check": False, **options}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    own = [(name, type(t), t.shape, t.dtype, t.device.type, t.requires_grad) for name, t in tensors]
    with captured_once(type(model), len([*model.parameters()]), *own):
        return fxpipe.compile(
            model, {n: t[:1] for n, t in BATCH.items()}, ranks=ranks, microbatches=2, **options
        )


def on_meta(**options):
    with torch.device("meta"):
        return Words(**options)


def state_of(model, pipe, rank, lane=0):
    """The state of one rank, as torchrun's process would have it."""
    process = types.SimpleNamespace(
        rank=rank, ranks=pipe.plan.ranks, lane=lane, lanes=pipe.lanes, replica=0, replicas=1
    )
    held = held_of(model, pipe.plan, rank)
    return ModelState(pipe.plan, *held, torch.device("cpu"), process, lambda: model)


def held_values(state):
    return {name: state.value(name) for name in state.plan.tensors[state.process.rank].state}


def part_of(values, name):
    shard = ShardName(name)
    return shard.part_of(values[shard.tensor])


# -- files -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def spied_reads():
    """What is read of files for a block: (name, first row, last row)."""
    reads, opened = [], pretrained.open_tensors

    class Slice:
        def __init__(self, name, own):
            self.name, self.own = name, own

        def get_shape(self):
            return self.own.get_shape()

        def __getitem__(self, place):
            rows = place if isinstance(place, slice) else place[0]
            reads.append((self.name, rows.start, rows.stop))
            return self.own[place]

    @contextlib.contextmanager
    def spied(path, *known):
        with opened(path, *known) as file:
            yield types.SimpleNamespace(
                keys=file.keys, get_slice=lambda name: Slice(name, file.get_slice(name))
            )

    with patch.object(pretrained, "open_tensors", spied):
        yield reads


def bytes_read(reads, values):
    """Per tensor the bytes read, and the largest piece."""
    row = {name: math.prod(t.shape[1:]) * t.element_size() for name, t in values.items()}
    sizes = [(name, (end - begin) * row[name]) for name, begin, end in reads]
    return {n: sum(s for name, s in sizes if name == n) for n, _ in sizes}, max(s for _, s in sizes)


def test_a_rank_reads_its_rows_alone_in_pieces(tmp_path):
    torch.manual_seed(0)
    real = Words()
    values = {name: t.detach() for name, t in real.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    model = on_meta()
    pipe = compiled(model, 2, vocab_parallel=True)
    for rank in range(2):
        state = state_of(model, pipe, rank)
        with spied_reads() as reads, patch.object(pretrained, "PIECE", 100):
            load_state_dict(state, Pretrained(tmp_path), strict=True)
        for name, value in held_values(state).items():
            assert torch.equal(value, part_of({**values, "scale": real.scale}, name))
        held = [name for name in pipe.plan.tensors[rank].state if name != "scale"]
        found, largest = bytes_read(reads, values)
        assert {n: s for n, s in found.items() if s} == {
            ShardName(n).tensor: part_of(values, n).nbytes for n in held
        }
        assert {"embed.weight", "head.weight"} <= found.keys()
        assert largest <= 100


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "own"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_dtype_of_a_file_becomes_that_of_the_model(tmp_path, stored, own):
    stored, own = getattr(torch, stored), getattr(torch, own)
    values = {name: t.detach() for name, t in Words().to(stored).state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    pipe = compiled(on_meta().to(own))
    pipe.load_state_dict(tmp_path)
    for name, value in pipe.state_dict().items():
        assert value.dtype == own
        assert torch.equal(value, values[name].to(own))


@pytest.mark.slow
def test_tied_weights_of_files(tmp_path):
    values = {name: t.detach().clone() for name, t in Words(tied=True).state_dict().items()}
    pipe = compiled(on_meta(tied=True))
    save_file(values, tmp_path / "both.safetensors")
    save_file({n: t for n, t in values.items() if n != "embed.weight"}, tmp_path / "one.safetensors")
    for file in ("both", "one"):
        pipe.load_state_dict(tmp_path / f"{file}.safetensors")
        assert torch.equal(pipe.parameters["embed.weight"], values["head.weight"])
    values["head.weight"][WORDS - 1, WIDTH - 1] += 1
    save_file(values, tmp_path / "two.safetensors")
    with (
        patch.object(pretrained, "PIECE", 100),
        pytest.raises(ArtifactError, match="two values in"),
    ):
        pipe.load_state_dict(tmp_path / "two.safetensors")


BAD = {
    "another beginning": (
        lambda values: {f"model.{name}": t for name, t in values.items()},
        r"bad\.safetensors holds model\.blocks.*, which the model does not have\. The model's blocks",
    ),
    "missing": (
        lambda values: {name: t for name, t in values.items() if name != "head.weight"},
        r"head\.weight, of shape \(24, 8\), is missing in .*bad\.safetensors",
    ),
    "shape": (
        lambda values: {**values, "head.weight": values["head.weight"][1:].clone()},
        r"head\.weight, of shape \(24, 8\), has shape \(23, 8\) in .*bad\.safetensors",
    ),
    "dtype": (
        lambda values: {**values, "head.weight": values["head.weight"].to(torch.complex64)},
        r"head\.weight, of torch.float32, is of torch.complex64 in .*bad\.safetensors",
    ),
}


@pytest.mark.parametrize("name", slow_except(BAD, "another beginning"))
def test_files_that_do_not_fit(tmp_path, name):
    """Nothing of the model has changed."""
    change, message = BAD[name]
    values = {name: t.detach() for name, t in Words().state_dict().items()}
    save_file(change(values), tmp_path / "bad.safetensors")
    pipe = compiled(on_meta())
    with pytest.raises(ArtifactError, match=message):
        pipe.load_state_dict(tmp_path / "bad.safetensors")
    assert all(p.is_meta for p in pipe.parameters.values())


# -- initialization ----------------------------------------------------------------------------------------


def initialized(model, ranks, own=None, seed=0, **options):
    """The values of every rank."""
    pipe = compiled(model, ranks, **options)
    states = [state_of(model, pipe, rank) for rank in range(ranks)]
    for state in states:
        initialize_model(state, own, seed)
    return [held_values(state) for state in states]


@pytest.mark.slow
def test_initial_values_do_not_depend_on_the_partition():
    model = on_meta()
    (whole,) = initialized(model, 1)
    meshes = [{"ranks": 4}, {"ranks": 2, "vocab_parallel": True}, {"ranks": 2, "stages_per_rank": 2}]
    for mesh in meshes:
        schedule = "interleaved" if "stages_per_rank" in mesh else "1f1b"
        ranks = initialized(model, schedule=schedule, **mesh)
        assert {name.partition("[")[0] for held in ranks for name in held} == whole.keys()
        for held in ranks:
            for name, value in held.items():
                assert torch.equal(value, part_of(whole, name))
    assert all(p.is_meta for p in model.parameters())


def test_each_initial_value_alone_is_that_of_all_together():
    """Functions draw as often as values need: ``trunc_normal_`` does so, and not on the meta device."""
    model = on_meta()
    (whole,) = initialized(model, 1)
    for name, value in whole.items():
        alone = {name: torch.empty_like(value)}
        assert initialize(model, alone) == {name}
        assert torch.equal(alone[name], value)


@pytest.mark.variation
@pytest.mark.slow
def test_lanes_hold_shares_of_the_same_initial_values():
    (whole,) = initialized(on_meta(), 1)
    with fxpipe.local_lanes(2) as mesh:
        model = on_meta()
        parallelize_module(
            model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        )
        pipe = compiled(model, 2)
        pipe.initialize()
        assert all(torch.equal(tensor, whole[name]) for name, tensor in pipe.state_dict().items())
        for rank, lane in itertools.product(range(2), range(2)):
            state = state_of(model, pipe, rank, lane)
            initialize_model(state, None, 0)
            for name, value in held_values(state).items():
                assert torch.equal(value, pipe.plan.lanes.share(name, whole[name], lane))


@pytest.mark.slow
def test_initial_values_are_those_of_the_modules():
    model = on_meta(blocks=8)
    (values,) = initialized(model, 1)
    assert torch.equal(values["scale"], Words().scale)
    assert torch.equal(values["blocks.1.norm.weight"], torch.ones(WIDTH))
    assert 0.25 < values["embed.weight"].std() < 0.35  # _init_weights comes after reset_parameters
    down = values["blocks.7.down.weight"]
    assert torch.allclose(down @ down.T, torch.eye(WIDTH), atol=1e-5)
    assert values["head.weight"].abs().max() < WIDTH**-0.5
    ups = torch.stack([values[f"blocks.{k}.up.weight"] for k in range(8)])
    assert len(ups.unique()) == ups.numel()  # no two modules draw the same numbers
    (again,) = initialized(model, 1)
    (other,) = initialized(model, 1, seed=1)
    assert all(torch.equal(again[name], value) for name, value in values.items())
    assert not (other["embed.weight"] == values["embed.weight"]).any()


@pytest.mark.slow
def test_a_function_of_the_user_comes_last():
    def fn(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)
        if isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 100)
            assert not torch.equal(torch.randn(WIDTH), torch.randn(WIDTH))

    model = on_meta()
    embedding = model.embed.weight
    first, second = initialized(model, 2, own=fn)
    assert torch.equal(second["head.weight"], torch.full((WORDS, WIDTH), 0.25))
    assert first["embed.weight"].std() > 50
    assert model.embed.weight is embedding
    (whole,) = initialized(model, 1, own=fn)
    assert torch.equal(whole["embed.weight"], first["embed.weight"])


@pytest.mark.slow
def test_an_initialized_model_trains_as_one_that_was_loaded():
    model = on_meta(tied=True)
    pipe = compiled(model, 2)
    before = torch.get_rng_state()
    pipe.initialize(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    real = Words(tied=True)
    real.load_state_dict(pipe.state_dict())
    assert torch.equal(pipe.run_local(BATCH).loss, compiled(real, 2).run_local(BATCH).loss)


@pytest.mark.variation
@pytest.mark.slow
def test_tensors_with_values_keep_them():
    model = on_meta()
    model.head = nn.Linear(WIDTH, WORDS, bias=False)
    head = model.head.weight.detach().clone()
    pipe = compiled(model)
    pipe.initialize(lambda module: [nn.init.zeros_(p) for p in module.parameters(recurse=False)])
    assert torch.equal(model.head.weight, head)
    assert not pipe.parameters["embed.weight"].any()
    with pytest.raises(RunError, match="all have values"):
        compiled(Words()).initialize()


def raising(module):
    raise ValueError("no such layer")


def by_own_generator(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, generator=torch.Generator())


def by_another_rank(module):
    if isinstance(module, Words):
        module.head.weight.copy_(module.embed.weight)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            None,
            r"Nothing initializes blocks\.3\.norm\.weight: Norm has no reset_parameters.*initialize\(fn\)",
        ),
        (raising, r"raising of the module embed \(Embedding\) failed: ValueError: no such layer"),
        (by_own_generator, r"the module blocks\.0\.up \(Linear\).*generator of its own"),
        (by_another_rank, r"by_another_rank of the model \(Words\) failed.*rank holds"),
    ],
    ids=["None", "raising", "by_own_generator", "by_another_rank"],
)
def test_a_model_that_cannot_be_initialized(own, message):
    model = on_meta()
    if own is None:
        model.blocks[3].norm.reset_parameters = partial(int)
    pipe = compiled(model, 2)
    state = state_of(model, pipe, 1)
    with pytest.raises(RunError, match=re.compile(message, re.S)):
        initialize_model(state, own, 0)
    assert all(p.is_meta for p in state.parameters.values())


def test_without_a_model_there_is_nothing_to_ask():
    model = on_meta()
    pipe = compiled(model)
    state = ModelState(pipe.plan, *held_of(model, pipe.plan, None), torch.device("cpu"), None, lambda: None)
    with pytest.raises(RunError, match="has no model, or none any more"):
        initialize_model(state, None, 0)
    with pytest.raises(ArtifactError, match="keep the model until its weights are loaded"):
        load_state_dict(state, InMemory(Words().state_dict()), strict=True)
