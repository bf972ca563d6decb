"""What SVG pictures share: their frame, texts, and the width of a text, which a reader's own font decides."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from fxpipe.errors import printable

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


def frame(width: float, height: float, style: str) -> ET.Element:
    """An empty picture of so many pixels.  style: the CSS of its elements."""
    box = {"width": f"{width}", "height": f"{height}", "viewBox": f"0 0 {width} {height}"}
    svg = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **box})
    ET.SubElement(svg, "style").text = style
    ET.SubElement(svg, "rect", {"width": "100%", "height": "100%", "style": "fill:#fff"})
    return svg


def add_text(parent: ET.Element, x: float, y: float, text: str, look: str = "", style: str = "") -> None:
    attributes = {"x": f"{x:g}", "y": f"{y:g}"} | ({"class": look} if look else {})
    ET.SubElement(parent, "text", attributes | ({"style": style} if style else {})).text = printable(text)
