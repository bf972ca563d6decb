"""A recorder of what a program has on the disk when it gives a name to what it wrote."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class RecordedDisk:
    """Records the calls that synchronize, rename and remove, and keeps the rule of what survives a power cut:

    - when a name without a dot at its front appears, each file and directory behind it is synchronized as it
      is then, and no file changes later;
    - the directory with the name is synchronized before anything else is removed.

    ``problems``: where the rule was broken.  ``appeared``: path -> the names behind it when it appeared.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.problems: list[str] = []
        self.appeared: dict[Path, dict[Path, Any]] = {}
        self._synchronized: dict[Path, Any] = {}
        self._renamed_in: set[Path] = set()
        for module, name, does in (
            (os, "fsync", self._fsync),
            (os, "rename", self._rename),
            (os, "replace", self._rename),
            (shutil, "rmtree", self._remove),
        ):
            patch.setattr(module, name, self._around(getattr(module, name), does))

    def _around(self, function: Callable[..., Any], does: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            after = does(*args)
            result = function(*args, **options)
            if after is not None:
                after()
            return result

        return called

    def _fsync(self, file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        self._synchronized[path] = _contents(path)
        self._renamed_in.discard(path)

    def _rename(self, source: Any, target: Any) -> Callable[[], None]:
        source, target = Path(source).resolve(), Path(target).resolve()
        is_visible = not target.name.startswith(".")
        behind = {path: _contents(path) for path in (source, *source.rglob("*"))}
        for path, contents in behind.items() if is_visible else ():
            if self._synchronized.get(path) != contents:
                self.problems.append(f"{path.name} is not synchronized when {target.name} appears")

        def after() -> None:
            moved = {target / path.relative_to(source): contents for path, contents in behind.items()}
            if is_visible:
                self.appeared[target] = moved
                self._renamed_in.add(target.parent)
            else:
                self.appeared.pop(source, None)

        return after

    def _remove(self, path: Any, *_: Any) -> None:
        if self._renamed_in and Path(path).exists():
            names = sorted(str(directory.name) for directory in self._renamed_in)
            self.problems.append(f"{Path(path).name} is removed before {names} are synchronized")

    def check(self) -> None:
        for target, behind in self.appeared.items():
            for path, contents in behind.items():
                if _contents(path) != contents:
                    self.problems.append(f"{path.name} changed after {target.name} appeared")
        for directory in self._renamed_in:
            self.problems.append(f"the names in {directory.name} are not synchronized")
        assert not self.problems, "\n".join(self.problems)
        assert self.appeared


def _contents(path: Path) -> Any:
    """What a synchronization writes: a file's bytes, or the names in a directory."""
    if path.is_dir():
        return sorted(os.listdir(path))
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
