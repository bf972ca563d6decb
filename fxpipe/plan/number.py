"""A number that tells data apart."""

from __future__ import annotations

import hashlib


def number(data: bytes) -> int:
    """An int64 that tells bytes apart."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)
