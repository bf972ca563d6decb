"""Weights as Hugging Face keeps them: one safetensors file, or several with an index, beside a
config.json."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from fxpipe.errors import ArtifactError
from fxpipe.plan.files import open_tensors
from fxpipe.strict import MEBIBYTE, Misfit, parse_json, read_text, shown, structure

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Pretrained(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, or of a directory of them, each read when it is asked for."""

    def __init__(self, path: Path):
        """Raises ArtifactError if there is no such file, or one that cannot be read."""
        self._files = _files_of(path)
        self._open = ExitStack()
        opened = ((file, self._open.enter_context(open_tensors(file))) for file in set(self._files.values()))
        self._held = dict(opened)
        for name, file in self._files.items():
            if name not in self._held[file].keys():  # noqa: SIM118 - a safetensors file, not a dict
                raise ArtifactError(f"{file} does not hold {shown(name)}, which the index says it does.")

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._held[self._files[name]].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def close(self) -> None:
        self._open.close()


def _files_of(path: Path) -> dict[str, Path]:
    """Name -> the file that holds it."""
    if path.is_dir() and (path / INDEX).exists():
        return _indexed(path)
    file = path / WEIGHTS if path.is_dir() else path
    if not file.exists():
        raise ArtifactError(f"{path} is no safetensors file, and no directory with {WEIGHTS} or {INDEX}.")
    with open_tensors(file) as held:
        return dict.fromkeys(held.keys(), file)


def _indexed(path: Path) -> dict[str, Path]:
    try:
        data = parse_json(read_text(path / INDEX, 256 * MEBIBYTE))
        names: dict[str, str] = structure(
            data.get("weight_map") if isinstance(data, dict) else None, dict[str, str], "weight_map"
        )
        for file in names.values():
            if Path(file).name != file:
                raise Misfit(f"is {shown(file)} and must be a file of the same directory", "weight_map")
    except Misfit as error:
        raise ArtifactError(f"{path / INDEX}: {error}.") from error
    return {name: path / file for name, file in names.items()}


def export(state: Mapping[str, torch.Tensor], directory: Path, like: Path | None, largest: str) -> None:
    """Write to an empty directory; see ``Pipeline.export``."""
    try:
        from huggingface_hub import save_torch_state_dict
    except ImportError as error:
        raise ArtifactError("Exporting needs huggingface_hub: pip install huggingface_hub.") from error
    if like is not None and not (like / "config.json").exists():
        raise ArtifactError(f"{like} holds no config.json.")
    save_torch_state_dict(dict(state), directory, max_shard_size=largest, metadata={"format": "pt"})
    for file in sorted(like.iterdir()) if like is not None else ():
        if file.is_file() and not _holds_weights(file):
            shutil.copy2(file, directory / file.name)


def _holds_weights(file: Path) -> bool:
    return file.suffix in {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack"} or file.name.endswith(
        ".index.json"
    )
