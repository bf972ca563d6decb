"""Edits of a checkpoint with checksums made anew: each is refused before anything changes, or is no change.

python tests/training/edits.py --edits 400
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run_worker as worker
import torch
from launch import forked
from run_worker import Options, Reader, pipeline

import fxpipe
from fxpipe.errors import ArtifactError

LIMIT = 20  # seconds after which a checkpoint is read without end
OTHERS = (
    None,
    True,
    -1,
    1.5,
    10**30,
    1e308,
    "x",
    "",
    [],
    {},
    [[]],
    {"float": "nan"},
    {"tensor": "groups.7"},
    {"x": 1},
)
Edit = Callable[[Path, random.Random], str]


# -- safetensors files, as bytes --------------------------------------------------------------------------


def _split(file: Path) -> tuple[dict[str, Any], bytes]:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _join(file: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


@contextlib.contextmanager
def _header(path: Path, draw: random.Random, name: str = "") -> Iterator[tuple[dict[str, Any], str]]:
    """The header of a file to edit, and one of its tensors; whose name ends with ``name``."""
    found = [
        (file, key)
        for file in _shards(path)
        for key in _split(file)[0]
        if key.endswith(name) and key[0] != "_"
    ]
    file, key = draw.choice(found)
    header, data = _split(file)
    yield header, key
    _join(file, header, data)


def other_dtype(path: Path, draw: random.Random) -> str:
    with _header(path, draw) as (header, key):
        size = {"F32": 4, "F64": 8, "I64": 8, "F16": 2, "I32": 4, "U8": 1}[header[key]["dtype"]]
        same = [
            d for d, n in {"F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I64": 8}.items() if n == size
        ]
        header[key]["dtype"] = draw.choice(
            [d for d in same if d != header[key]["dtype"]] + ["F99", "", None, 7]
        )
    return key


def other_shape(path: Path, draw: random.Random) -> str:
    with _header(path, draw) as (header, key):
        shape = header[key]["shape"]
        choices = [
            [*shape, 1],
            [1, *shape],
            [sum(shape)],
            shape[::-1],
            [-1],
            [10**30],
            [2**62, 4],
            "x",
            None,
            [1.5],
        ]
        header[key]["shape"] = draw.choice([c for c in choices if c != shape])
    return key


def other_offsets(path: Path, draw: random.Random) -> str:
    with _header(path, draw) as (header, key):
        begin, end = header[key]["data_offsets"]
        header[key]["data_offsets"] = draw.choice(
            [[end, begin], [begin, end + 4], [0, 10**18], [-4, 0], [], "x"]
        )
    return key


def no_tensor(path: Path, draw: random.Random) -> str:
    """It is taken out of header and data."""
    file = draw.choice([file for file in _shards(path) if len(_split(file)[0]) > 2])
    header, data = _split(file)
    key = draw.choice([key for key in header if key[0] != "_"])
    begin, end = header.pop(key)["data_offsets"]
    for name, entry in header.items():
        if name[0] != "_" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [n - (end - begin) for n in entry["data_offsets"]]
    if draw.random() < 0.5:
        info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        del info[key]
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
    _join(file, header, data[:begin] + data[end:])
    return key


def renamed(path: Path, draw: random.Random) -> str:
    with _header(path, draw) as (header, key):
        new = draw.choice(
            ["model.other", "optimizer.other.step", f"{key}.", "", "x", key.replace("model", "user")]
        )
        header[new] = header.pop(key)
        if draw.random() < 0.5:
            info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
            info[new] = info.pop(key)
            header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
    return f"{key} to {new}"


def other_rows(path: Path, draw: random.Random) -> str:
    with _header(path, draw) as (header, key):
        metadata = header["__metadata__"]
        info = json.loads(metadata["DCP_SHARDING_INFO"])
        if draw.random() < 0.3:
            text = draw.choice(["", "[]", "{", "null", '{"x": 1}', json.dumps({key: {"saved_offsets": "x"}})])
            metadata["DCP_SHARDING_INFO"] = text
            return text
        old = info[key]["saved_offsets"]
        new = [[1, *old[1:]], [-1, *old[1:]], [10**30, *old[1:]], [*old, 0], None, "x", [1.5], [True], {}]
        info[key]["saved_offsets"] = chosen = draw.choice([n for n in new if n != old])
        metadata["DCP_SHARDING_INFO"] = json.dumps(info)
    return f"{key} {chosen}"


def no_metadata(path: Path, draw: random.Random) -> str:
    with _header(path, draw) as (header, _):
        header.pop("__metadata__")
    return ""


def other_step(path: Path, draw: random.Random) -> str:
    """The number of updates of a parameter."""
    files = [
        (f, k)
        for f in _shards(path)
        for k in _split(f)[0]
        if k.startswith("optimizer.") and k.endswith(".step")
    ]
    file, key = draw.choice(files)
    header, data = _split(file)
    begin, end = header[key]["data_offsets"]
    value = draw.choice([float("nan"), float("inf"), -float("inf"), -1.0, 1.5])
    own = torch.tensor(value, dtype={4: torch.float32, 8: torch.float64}[end - begin]).numpy().tobytes()
    _join(file, header, data[:begin] + own + data[end:])
    return f"{key} {value}"


def broken_header(path: Path, draw: random.Random) -> str:
    file = draw.choice(_shards(path))
    header, data = _split(file)
    text = json.dumps(header).encode()
    broken = [
        text[:-1],
        b"",
        b"{}",
        b"[]",
        b"null",
        text.replace(b'"shape"', b'"form"'),
        b"\xff" * 9,
        text + b"}",
    ]
    _join(file, draw.choice(broken), data)
    return file.name


def cut(path: Path, draw: random.Random) -> str:
    file = draw.choice(_shards(path))
    data = file.read_bytes()
    file.write_bytes(data[: draw.choice([0, 4, 8, 100, len(data) // 2, len(data) - 1])])
    return file.name


def longer(path: Path, draw: random.Random) -> str:
    file = draw.choice(_shards(path))
    file.write_bytes(file.read_bytes() + bytes(draw.choice([1, 8, 4096])))
    return file.name


# -- state.json -------------------------------------------------------------------------------------------


def _places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    if at:
        yield at
    for key, held in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from _places(held, (*at, key))


def other_json(path: Path, draw: random.Random) -> str:
    file = path / "state.json"
    state = json.loads(file.read_text())
    *above, last = draw.choice([*_places(state)])
    holder = state
    for key in above:
        holder = holder[key]
    before = holder[last]
    others = [x for x in OTHERS if type(x) is not type(before)]
    if draw.random() < 0.2:
        del holder[last]
        what = "removed"
    elif isinstance(holder, dict) and draw.random() < 0.15:
        holder["another"] = draw.choice(OTHERS)
        what = f"beside it another, {holder['another']!r}"
    else:
        holder[last] = what = draw.choice(others)
    file.write_text(json.dumps(state))
    return f"{'.'.join(map(str, (*above, last)))}: {before!r:.40} -> {what!r}"


def of_an_earlier_version(path: Path, draw: random.Random) -> str:
    """Which did not list the tensors."""
    file = path / "state.json"
    state = json.loads(file.read_text())
    del state["tensors"], state["run"]
    file.write_text(json.dumps(state))
    return ""


def other_text(path: Path, draw: random.Random) -> str:
    file = path / "state.json"
    text = file.read_text()
    new = draw.choice(
        ["", "{", "null", "[]", "7", text[:-3], text + "}", "[" * 10**5, '{"format": NaN}', "\ufeff" + text]
    )
    file.write_text(new)
    return repr(new[:20])


# -- files ------------------------------------------------------------------------------------------------


def _any(path: Path, draw: random.Random) -> Path:
    return draw.choice([file for file in sorted(path.iterdir()) if file.name != "SHA256SUMS"])


def no_file(path: Path, draw: random.Random) -> str:
    file = _any(path, draw)
    file.unlink()
    return file.name


def a_pipe(path: Path, draw: random.Random) -> str:
    file = _any(path, draw)
    file.unlink()
    os.mkfifo(file)
    return file.name


def a_device(path: Path, draw: random.Random) -> str:
    file = _any(path, draw)
    file.unlink()
    file.symlink_to(draw.choice(["/dev/zero", "/dev/null", "/dev/random", "/nowhere"]))
    return file.name


def a_folder(path: Path, draw: random.Random) -> str:
    file = _any(path, draw)
    file.unlink()
    file.mkdir()
    return file.name


def a_link(path: Path, draw: random.Random) -> str:
    file = _any(path, draw)
    target = path.parent / "elsewhere"
    file.rename(target)
    file.symlink_to(target)
    return file.name


def swapped(path: Path, draw: random.Random) -> str:
    first, second = draw.sample(_shards(path), 2)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    return f"{first.name} {second.name}"


def twice(path: Path, draw: random.Random) -> str:
    """A file in the place of another, or beside all."""
    first, second = draw.sample(_shards(path), 2)
    target = draw.choice([second, path / "more.safetensors"])
    shutil.copy(first, target)
    return f"{first.name} as {target.name}"


def stray(path: Path, draw: random.Random) -> str:
    (path / "note.txt").write_text("mine")
    (path / draw.choice(["draft", "more", "x.tmp"])).mkdir()
    return ""


def of_another_step(path: Path, draw: random.Random) -> str:
    path.rename(path.with_name(draw.choice(["step-00000005", "step-00000003"])))
    return ""


EDITS: tuple[Edit, ...] = (
    other_dtype, other_shape, other_offsets, no_tensor, renamed, other_rows, no_metadata, other_step,
    broken_header, cut, longer, other_json, other_json, other_json, other_json, of_an_earlier_version,
    other_text, no_file, a_pipe, a_device, a_folder, a_link, swapped, twice, stray, of_another_step,
)  # fmt: skip


def make_sums(path: Path) -> None:
    """Of the files that are there, as far as they can be read."""
    names = [f.name for f in sorted(path.iterdir()) if f.suffix in (".json", ".safetensors")]
    lines = []
    for name in names:
        file = path / name
        data = file.read_bytes() if file.is_file() else b""
        lines.append(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
    (path / "SHA256SUMS").write_text("".join(lines))


# -- the run that is to take it ---------------------------------------------------------------------------


class Run:
    """One that can be put back to its beginning."""

    def __init__(self, steps: int = 6) -> None:
        self.pipe = pipeline(Reader(), Options(steps=steps, schedule="1f1b"), 1)
        groups = [{"params": "*.bias", "weight_decay": 0.0}]
        self.optimizer = self.pipe.optimizer(torch.optim.AdamW, groups=groups, lr=0.05, clip_grad_norm=0.5)
        self.rate = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5])
        self.begin = self.held()

    def held(self) -> dict[str, Any]:
        state = {"weights": self.pipe.state_dict(), "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy({**state, "rate": self.rate.state_dict(), "step": self.pipe.step_number})

    def put_back(self) -> None:
        begin = copy.deepcopy(self.begin)
        self.pipe.load_state_dict(begin["weights"])
        self.optimizer.load_state_dict(begin["optimizer"])
        self.rate.__dict__.update(begin["rate"])
        self.pipe.step_number = 0

    def resume(self, directory: Path) -> None:
        state = {"rate": self.rate}
        with fxpipe.Checkpointer(self.pipe, directory, optimizer=self.optimizer, state=state) as checkpoints:
            assert checkpoints.resume()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@dataclass(frozen=True)
class Outcome:
    """``kind``: refused, equal, other (contents), raw (an error of another kind), changed (before it)."""

    edit: str
    kind: str
    message: str


def outcome(
    run: Run, expected: dict[str, Any], checkpoint: Path, edit: Edit, draw: random.Random, folder: Path
) -> Outcome:
    """Of the run that resumes from an edited copy."""
    directory = folder / "checkpoints"
    path = directory / checkpoint.name
    shutil.copytree(checkpoint, path)
    what = f"{edit.__name__} {edit(path, draw)}"
    make_sums(next(directory.glob("step-*")))
    run.put_back()
    signal.alarm(LIMIT)
    try:
        run.resume(directory)
    except ArtifactError as error:
        kind, message = "refused" if same(run.held(), run.begin) else "changed", str(error)
    except Exception as error:  # noqa: BLE001 - it is reported
        kind, message = "raw", f"{type(error).__name__}: {error}"
    else:
        kind, message = "equal" if same(run.held(), expected) else "other", ""
    try:
        fxpipe.read_checkpoint(directory)
    except ArtifactError:
        pass
    except Exception as error:  # noqa: BLE001 - it is reported
        kind, message = "raw", f"read_checkpoint: {type(error).__name__}: {error}"
    signal.alarm(0)
    return Outcome(what, kind, message)


def outcomes(checkpoint: Path, numbers: range) -> Iterator[Outcome]:
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkpoint, Path(folder) / "whole" / checkpoint.name)
        run.resume(Path(folder) / "whole")
    expected = run.held()
    for number in numbers:
        edit = EDITS[number % len(EDITS)]
        with tempfile.TemporaryDirectory() as folder:
            yield outcome(run, expected, checkpoint, edit, random.Random(number), Path(folder))


def trained(directory: Path) -> Path:
    """A checkpoint of four ranks."""
    options = Options(steps=4, vocab_parallel=True)
    run = forked(4, worker.main, directory, options, dtype=torch.float32, logs=directory / "logs")
    assert run.code == 0, run
    return directory / "checkpoints" / "step-00000004"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--edits", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="the number of the first edit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = trained(Path(folder))
        found = list(outcomes(checkpoint, range(options.first, options.first + options.edits)))
    for one in found:
        if one.kind not in ("refused", "equal"):
            print(f"{one.kind}: {one.edit}: {one.message}")
    print(json.dumps(Counter(one.kind for one in found)))
    sys.exit(any(one.kind in ("raw", "changed") for one in found))


if __name__ == "__main__":
    main()
