"""The width of a text in a picture, which a reader's own font decides."""

from __future__ import annotations

_EMS = {
    0.3: "'ijlIJ",
    0.35: " ,./:;\\|",
    0.4: "f-()[]t!",
    0.45: "r",
    0.5: '"*_`',
    0.55: "sz?c",
    0.6: "LFkvxy",
    0.65: "PTYoaeEhnuSbdgpq$0123456789{}",
    0.7: "KAVXZBRC",
    0.75: "UN",
    0.8: "HDG&OQ",
    0.85: "w#+<=>^~",
    0.9: "M",
    0.95: "%",
}
_OF_LETTER = {letter: ems for ems, letters in _EMS.items() for letter in letters}


def text_width(text: str, size: float) -> float:
    """The width in DejaVu Sans, the widest font that stands in for Helvetica, rounded up."""
    return size * sum(_OF_LETTER.get(letter, 1.0) for letter in text)
