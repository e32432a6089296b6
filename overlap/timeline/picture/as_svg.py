"""A scene as SVG: it stands alone, with no font, style or script from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ...errors import printable
from .scene import FONT, INK, PAPER, Box, Scene

STRIPE = 4
"""Pixels from one stripe of waiting to the next; a stripe has one."""


def svg(scene: Scene) -> str:
    """Return the text of the file; equal scenes give equal texts."""
    return "\n".join([*_lines(scene), ""])


def _lines(scene: Scene) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{scene.width}" height="{scene.height}" '
        f'viewBox="0 0 {scene.width} {scene.height}" role="img" font-family="sans-serif" font-size="{FONT}">'
    )
    yield f"<title>{_text(scene.title)}</title>"
    yield (
        f'<defs><pattern id="stripes" width="{STRIPE}" height="{STRIPE}" patternUnits="userSpaceOnUse">'
        f'<rect width="1" height="{STRIPE}" fill="{PAPER}"/></pattern></defs>'
    )
    yield f'<rect width="{scene.width}" height="{scene.height}" fill="{PAPER}"/>'
    for box in scene.boxes:
        yield _box(box, box.colour)
        if box.striped:
            yield _box(box, "url(#stripes)")
    for label in scene.labels:
        bold = ' font-weight="bold"' if label.bold else ""
        yield f'<text x="{label.x}" y="{label.y}" fill="{INK}"{bold}>{_text(label.text)}</text>'
    yield "</svg>"


def _text(line: str) -> str:
    return escape(printable(line))  # XML has no place for control characters, not even escaped


def _box(box: Box, fill: str) -> str:
    return f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" fill="{fill}"/>'
