"""Plans of older formats, as the newest."""

from __future__ import annotations

from typing import Any

FORMAT = 3
_OLDEST = 2

#: The objects of format 2 with fields that have other names since.
_RENAMED = {
    "vocabulary": {"lookups": "embedding_shards", "heads": "output_shards", "ahead": "barriers"},
    "tried": {"moved": "offloaded"},
}


def is_known(number: Any) -> bool:
    return type(number) is int and _OLDEST <= number <= FORMAT


def upgraded(plan: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a plan of a known format, as of the newest; its types are checked later."""
    if plan["format"] == FORMAT:
        return plan
    renamed = {key: _renamed(plan[key], names) for key, names in _RENAMED.items() if key in plan}
    return plan | renamed | {"format": FORMAT}


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(entry, names) for entry in value]
    return {names.get(key, key): entry for key, entry in value.items()} if isinstance(value, dict) else value
