"""What is complete of a JSON document that was cut off: its first array of objects, as far as it goes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from .events import Json

_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def complete_part(text: str) -> Json | None:
    """Return the document with the events that are whole; None if not even its beginning is.

    An array that only lacks its end, as tools leave it that append events to a file, is whole.
    """
    match = _BEGIN.search(text)
    start = match.end() if match else len(text) - len(text.lstrip()) + 1
    if match is None and not text.lstrip().startswith("["):
        return None
    header: Json = {}
    if match:
        try:
            header = json.loads(text[: match.start()].rstrip().removesuffix(",") + "}")
        except ValueError:
            return None
    events: list[Json] = []
    decoder, at = json.JSONDecoder(), start
    while True:
        at = cast("re.Match[str]", _BETWEEN.match(text, at)).end()
        try:
            event, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        events.append(event)
    if not events:
        return None
    return {**cast("Mapping[str, Json]", header), "traceEvents": cast("Sequence[Json]", events)}
