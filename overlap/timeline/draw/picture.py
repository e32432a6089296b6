"""SVG of a timeline: the picture of the terminal as vectors, without a font, style or script from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ...errors import printable

if TYPE_CHECKING:
    from .view import TimelineView

_COLUMNS = 140
"""Columns of the picture: an axis of some 120 cells, of which each shows eighths."""

_FORMAT = """\
<svg viewBox="0 0 {{width}} {{height}}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>{title}</title>
<style>
.{{unique_id}}-matrix {{{{ font-family: monospace; font-size: {{char_height}}px; white-space: pre }}}}
.{{unique_id}}-title {{{{ display: none }}}}
{{styles}}
</style>
<defs>{{lines}}</defs>
<rect width="100%" height="100%" fill="#FFFFFF"/>
<g transform="translate({{terminal_x}}, {{terminal_y}})">
{{backgrounds}}
<g class="{{unique_id}}-matrix">
{{matrix}}
</g>
</g>
</svg>
"""


def svg(view: TimelineView) -> str:
    """Return the text of an SVG file; its title, which screen readers read aloud, is the verdict."""
    from io import StringIO

    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME

    console = Console(file=StringIO(), record=True, width=_COLUMNS, color_system="truecolor", force_jupyter=False)
    console.print(view)
    title = escape(printable(str(view.verdict))).replace("{", "{{").replace("}", "}}")
    form = _FORMAT.format(title=title)
    return console.export_svg(theme=DEFAULT_TERMINAL_THEME, code_format=form, unique_id="timeline")
