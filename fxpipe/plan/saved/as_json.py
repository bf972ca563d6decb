"""Records that a saved pipeline keeps beside its plan, as JSON."""

from __future__ import annotations

import json
from typing import TypeVar

from fxpipe.errors import ArtifactError
from fxpipe.strict import parse_json, refused, structure, unstructure

_T = TypeVar("_T")


def to_json(record: object) -> str:
    return json.dumps(unstructure(record), separators=(",", ":"))


def from_json(text: str, kind: type[_T], where: str) -> _T:
    """The record of a text.  Raises ArtifactError, naming ``where`` and the field, for one that is none."""
    with refused(ArtifactError, f"{where} is damaged:", "Save the pipeline again."):
        return structure(parse_json(text), kind)
