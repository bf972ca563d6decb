"""Weights from checkpoints that torch.distributed.checkpoint wrote; its ``.metadata`` is not unpickled."""

import io
import itertools
import os
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import fxpipe
from fxpipe.errors import ArtifactError
from fxpipe.plan.spans import PartSpan
from fxpipe.training.weights.dcp_checkpoint import DistributedCheckpoint
from fxpipe.training.weights.tensor_values import are_equal

ROWS, WIDTH = 12, 6


def save(state, directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of one process
        dcp.save(state, checkpoint_id=directory)
    return directory


def values():
    torch.manual_seed(0)
    return {
        "table": torch.randn(ROWS, WIDTH),
        "turned": torch.randn(WIDTH, ROWS).t(),
        "half": torch.randn(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 2),
        "a.b": torch.randn(2, 3, 4),
    }


def edited(directory, change):
    """Rewrite the metadata."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))
    return directory


def chunked(directory, whole, cuts, name="table"):
    """A checkpoint of one tensor as ranks with shards of it write it; cuts: per dimension."""
    bounds = [list(itertools.pairwise([0, *own, n])) for own, n in zip(cuts, whole.shape, strict=True)]
    areas = [tuple(zip(*area, strict=True)) for area in itertools.product(*bounds)]
    places = {f"{name}.{k}": tuple(map(slice, *area)) for k, area in enumerate(areas)}
    save({key: whole[place].clone() for key, place in places.items()}, directory)

    def joined(metadata):
        own, first = metadata.storage_data, metadata.state_dict_metadata[f"{name}.0"]
        first.size, first.chunks, metadata.storage_data = whole.shape, [], {}
        for k, (begin, end) in enumerate(areas):
            sizes = torch.Size(e - b for b, e in zip(begin, end, strict=True))
            first.chunks.append(ChunkStorageMetadata(torch.Size(begin), sizes))
            at = MetadataIndex(f"{name}.{k}", [0] * whole.dim())
            metadata.storage_data[MetadataIndex(name, begin, k)] = own[at]
        metadata.state_dict_metadata, metadata.planner_data = {name: first}, {name: (name,)}

    return edited(directory, joined)


def read(checkpoint, name, spans=None):
    parts = list(checkpoint.parts(name, spans or {}))
    return torch.cat(parts) if parts[0].dim() else parts[0]


@pytest.mark.parametrize("nested", [(), ("model",), ("app", "state_dict")], ids=str)
def test_values_of_a_state_dict(tmp_path, nested):
    """Flat, as torchtitan writes it, or beside an optimizer's."""
    wanted = values()
    state = dict(wanted)
    for name in reversed(nested):
        state = {name: state}
    optimizer = {"state": {"table": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
    checkpoint = DistributedCheckpoint(save({**state, "optimizer": optimizer, "step": 3}, tmp_path / "saved"))
    assert set(checkpoint.names()) == set(wanted)
    for name, value in wanted.items():
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (tuple(value.shape), value.dtype)
        assert torch.equal(read(checkpoint, name), value)


@pytest.mark.parametrize("cuts", [([5], []), ([], [2]), ([3, 4, 9], [2, 5])], ids=str)
def test_sharded_chunks_are_joined(tmp_path, cuts):
    whole = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    checkpoint = DistributedCheckpoint(chunked(tmp_path, whole, cuts))
    by_torch = {"table": torch.zeros_like(whole)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(by_torch, checkpoint_id=tmp_path)
    assert torch.equal(by_torch["table"], whole)
    assert torch.equal(read(checkpoint, "table"), whole)
    rows, columns = PartSpan(4, 6, ROWS), PartSpan(1, 3, WIDTH)
    assert torch.equal(read(checkpoint, "table", {0: rows}), whole[4:10])
    assert torch.equal(read(checkpoint, "table", {0: rows, 1: columns}), whole[4:10, 1:4])


def test_chunks_of_other_ranks_are_not_read(tmp_path):
    whole = values()["table"]
    directory = chunked(tmp_path, whole, ([3, 4, 9], []))

    def elsewhere(metadata):
        for index, info in metadata.storage_data.items():
            if index.offset[0] != 4:
                info.relative_path = "missing.distcp"

    checkpoint = DistributedCheckpoint(edited(directory, elsewhere))
    assert torch.equal(read(checkpoint, "table", {0: PartSpan(5, 3, ROWS)}), whole[5:8])
    with pytest.raises(ArtifactError, match=r"missing\.distcp cannot be read"):
        read(checkpoint, "table")


def test_equal_values_in_other_chunks(tmp_path):
    whole = values()["table"]
    chunked(tmp_path / "one", whole, ([5], []))
    directory = chunked(tmp_path / "two", whole, ([2], []), "other")
    one = pickle.loads((tmp_path / "one" / ".metadata").read_bytes())
    os.rename(tmp_path / "one" / "__0_0.distcp", directory / "first.distcp")

    def both(metadata):
        for info in one.storage_data.values():
            info.relative_path = "first.distcp"
        for field in ("state_dict_metadata", "planner_data", "storage_data"):
            getattr(metadata, field).update(getattr(one, field))

    checkpoint = DistributedCheckpoint(edited(directory, both))
    assert are_equal(checkpoint, "table", "other")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


def test_a_pipeline_takes_them(tmp_path):
    batch = {"x": torch.ones(2, 4)}
    source, model = Net(), Net()
    optimizer = torch.optim.AdamW(source.parameters())
    source(**batch).backward()
    optimizer.step()
    pipe = fxpipe.compile(model, {"x": batch["x"][:1]}, ranks=2, microbatches=2, schedule="1f1b", check=False)
    save({"model": source.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved")
    pipe.load_state_dict(str(tmp_path / "saved"))
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    with pytest.raises(ArtifactError, match=r"pipe\.load_state_dict\(path\) reads it"):
        fxpipe.read_checkpoint(tmp_path / "saved")
    with pytest.raises(ArtifactError, match=r"pipe\.load_state_dict\(directory\)"):
        fxpipe.load(tmp_path / "saved")
    save({"nets": {"first": source.state_dict()}}, tmp_path / "other")
    with pytest.raises(ArtifactError, match=r"no state dict of a model.*its tensors are in 'nets/first'"):
        pipe.load_state_dict(tmp_path / "other")
    save({"a": {"model": source.state_dict()}, "b": {"model": source.state_dict()}}, tmp_path / "two")
    with pytest.raises(ArtifactError, match=r"several state dicts of a model.*'a/model', 'b/model'"):
        pipe.load_state_dict(tmp_path / "two")


# -- files that nobody should trust ------------------------------------------------------------------------

RAN = []


def run(what):
    RAN.append(what)


class Hostile:
    def __reduce__(self):
        return run, ("ran",)


def _set(metadata, **fields):
    (info,) = metadata.storage_data.values()
    vars(info).update(fields)


def _chunks(metadata, *chunks):
    """Of the table: offsets and sizes."""
    metadata.state_dict_metadata["table"].chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks
    ]


def _sized(metadata, *size):
    metadata.state_dict_metadata["table"].size = torch.Size(size)


HALF = [6, WIDTH]
METADATA = {
    "a function": (lambda m: setattr(m, "planner_data", Hostile()), r"run', which .* does not write"),
    "a class": (lambda m: setattr(m, "version", filesystem._StoragePrefix("a")), "_StoragePrefix"),
    "no metadata": (lambda m: {"table": 1}, "where a Metadata of"),
    "no record": (lambda m: setattr(m, "storage_data", {"table": "a"}), "where a MetadataIndex of"),
    "no mapping": (lambda m: setattr(m, "state_dict_metadata", [1]), "where a mapping must be"),
    "no name": (lambda m: vars(next(iter(m.storage_data))).update(fqn=[1]), "does not say where 'table' is"),
    "keys": (lambda m: setattr(m, "planner_data", {(1, 2): 3}), "other keys than text"),
    "above": (lambda m: _set(m, relative_path="../__0_0.distcp"), "must be a file of the same directory"),
    "absolute": (lambda m: _set(m, relative_path="/etc/passwd"), "must be a file of the same directory"),
    "dots": (lambda m: _set(m, relative_path=".."), "is not a regular file|cannot be read"),
    "the end": (lambda m: _set(m, length=1 << 50), "is cut short: it has"),
    "negative": (lambda m: _set(m, offset=-1), "whole numbers"),
    "large": (lambda m: _set(m, offset=1 << 90), "whole numbers"),
    "elsewhere": (lambda m: _set(m, offset=9, length=900), "is damaged from byte 9 on"),
    "compressed": (lambda m: _set(m, transform_descriptors=["zstd"]), "is compressed"),
    "beyond": (lambda m: _chunks(m, ([1, 0], [ROWS, WIDTH])), "beyond its shape"),
    "missing": (lambda m: _chunks(m, ([0, 0], HALF)), "lacks 36 of the 72 elements"),
    "overlap": (lambda m: _chunks(m, ([0, 0], HALF), ([5, 0], HALF)), "two parts .* that overlap"),
    "twice": (lambda m: _chunks(m, ([0, 0], HALF), ([0, 0], HALF)), "two parts .* that overlap"),
    "no place": (lambda m: _chunks(m, ([0, 0], HALF), ([6, 0], HALF)), r"does not say where .* \(6, 0\)"),
    "size": (lambda m: _sized(m, 1 << 40, 1 << 40), "lacks"),
    "dims": (lambda m: _sized(m, ROWS), "beyond its shape"),
    "shape": (
        lambda m: _chunks(m, ([0, 0], [6, 12])) or _sized(m, 6, 12),
        r"holds a tensor of \(12, 6\).*must be the part of table of \(6, 12\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_is_refused(tmp_path, name):
    change, message = METADATA[name]
    directory = edited(save({"table": values()["table"]}, tmp_path / "saved"), change)
    with pytest.raises(ArtifactError, match=message):
        read(DistributedCheckpoint(directory), "table")
    assert not RAN


BYTES = {
    "nothing": b"",
    "no pickle": b"\x00\x01\x02",
    "a call": b"cos\nsystem\n(S'true'\ntR.",
    "the memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "the stack": b"\x80\x02\x87.",
    "a mark": b"\x80\x02t.",
    "an attribute": b"\x80\x02K\x01Nb.",
    "a large text": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.",
    # A tuple of a tuple twice, and so on, as a key: its hash would take forever.
    "a hash": b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns.",
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_metadata(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(BYTES[name])
    with pytest.raises(ArtifactError, match=r"\.metadata .*torch\.distributed\.checkpoint\.load"):
        DistributedCheckpoint(tmp_path)


def test_data_that_is_refused(tmp_path):
    """torch.load gets a slice of a file, and takes tensors and plain values alone."""
    saved = save({"table": values()["table"]}, tmp_path / "saved")
    for data, message in [
        (Hostile(), "is damaged from byte 0 on"),
        ([1], "something else than table"),
        (torch.eye(3).to_sparse(), "something else than table"),
    ]:
        file = io.BytesIO()
        torch.save(data, file)
        (saved / "__0_0.distcp").write_bytes(file.getvalue())
        edited(saved, partial(_set, offset=0, length=len(file.getvalue())))
        with pytest.raises(ArtifactError, match=message):
            read(DistributedCheckpoint(saved), "table")
    assert not RAN
