"""A scene as PNG, with Pillow: an optional extra, because letters need a font and a rasteriser."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO

from ...errors import UsageError
from ...version import install_command
from .as_svg import STRIPE
from .scene import FONT, INK, PAPER, Scene

SCALE = 2
"""Dots a pixel, for screens and paper that have so many."""


def check_pillow() -> None:
    """Refuse to begin without the extra.

    Raises:
        UsageError: If Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise UsageError(f"--png: Pillow is not installed: {install_command('png')}; --svg needs nothing")


def png(scene: Scene) -> bytes:
    """Return the bytes of the file.

    Raises:
        UsageError: If Pillow is not installed.
    """
    check_pillow()
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (scene.width * SCALE, scene.height * SCALE), PAPER)
    pen = ImageDraw.Draw(image)
    for box in scene.boxes:
        low, high = box.y * SCALE, (box.y + box.height) * SCALE - 1
        pen.rectangle((box.x * SCALE, low, (box.x + box.width) * SCALE - 1, high), fill=box.colour)
        for x in range(-(-box.x // STRIPE) * STRIPE, box.x + box.width, STRIPE) if box.striped else ():
            pen.rectangle((x * SCALE, low, (x + 1) * SCALE - 1, high), fill=PAPER)
    font = ImageFont.load_default(FONT * SCALE)
    for label in scene.labels:
        place = label.x * SCALE, label.y * SCALE
        pen.text(place, label.text, fill=INK, font=font, anchor="ls")
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
