"""The call that a rank makes, as text at the head of all that ranks exchange outside of messages.

Ranks that make different calls would take each other's data for something else, and a collective of two sizes
ends the process inside of the backend.  So each exchange begins with one collective of a fixed size, whose
head is the call: all ranks see all calls before anything else travels.
"""

from __future__ import annotations

import torch

CALL = 16
"""The words of the call."""
SPACE = 80
"""The words behind it."""


def with_call(call: str, words: torch.Tensor) -> torch.Tensor:
    """``words``, at most SPACE on the CPU, behind the text of a call, which is cut where it is too long."""
    row = torch.zeros(CALL + SPACE, dtype=torch.int64, device="cpu")
    text = call.encode(errors="backslashreplace")[: CALL * row.element_size()]
    row.view(torch.uint8)[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    row[CALL : CALL + len(words)] = words
    return row


def different_calls(table: torch.Tensor) -> str | None:
    """The first call that is not rank 0's, as a message; None if all ranks make the same.

    table: a row ``with_call`` of each rank.
    """
    calls = table[:, :CALL]
    # By words, not by texts: where the cut is within a character, texts of different words may be the same.
    rank = next((rank for rank, call in enumerate(calls) if not torch.equal(call, calls[0])), None)
    if rank is None:
        return None
    return (
        f"Rank {rank} calls {_text(calls[rank])}, and rank 0 calls {_text(calls[0])}. All ranks must make "
        "the same calls in the same order: put none of them under a condition that differs between ranks."
    )


def _text(call: torch.Tensor) -> str:
    return call.contiguous().numpy().tobytes().rstrip(b"\0").decode(errors="replace")
