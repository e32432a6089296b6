"""Events of a list in a JSON text, packed or not, whole or cut off: read a piece at a time, into typed structs.

A piece ends where an event of the list ends: the text up to there, closed with a bracket, is a list exactly if the
place is between two events. Where no such place is found, events are parsed one by one, by Python's reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, ClassVar, Generic, TypeVar, cast

import msgspec

from ...errors import UsageError
from .packed import read_piece

PIECE_BYTES = 1 << 20
MAX_PIECE_BYTES = 256 << 20
"""Text without the end of an event in it: more than this is no trace."""
_MAX_CUTS_TRIED = 32  # places tried in a piece before it is decoded event by event
_TRAILER_BYTES = 16 << 20

OF_OBJECT, OF_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\['), re.compile(rb"\[")
"""Beginnings of lists of events: a field of an object, and the whole text."""
_BETWEEN = re.compile(r"[\s,]*")
_EVENT_END = re.compile(rb"\}\s*,\s*(?=\{)")
_LEAD = re.compile(rb"[ \r\n\t,]*")

Event = TypeVar("Event")


class EventReader(Generic[Event]):
    """Reader of the events of a text: iterate over it once; memory holds one piece of the text.

    Args:
        file: The text, at its beginning.
        kind: Type of an event.
        begin: Beginning of the list.

    Attributes:
        fields: Fields of the object that the list is in: those before it, and after the last event all.
        is_complete: Whether the list has ended; known after the last event.
    """

    is_strict: ClassVar[bool] = True  # whether an event of the wrong types ends the reading, with an error

    def __init__(self, file: BinaryIO, kind: object, begin: re.Pattern[bytes]) -> None:
        self._file, self._kind, self._begin, self._data = file, kind, begin, b""
        self._decode = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
        self._cut = False
        self.fields: dict[str, Any] = {}
        self.is_complete: bool = False

    def __iter__(self) -> Iterator[list[Event]]:
        match = None
        while match is None and self._read_more():
            match = self._begin.search(self._data)
        if match is None:
            raise UsageError("not a trace file: no list 'traceEvents' in it; name a file of export_chrome_trace")
        self.fields = _parse_object(self._data[: match.start()].rstrip().removesuffix(b",") + b"}")
        self._data, closed = self._data[match.end() :], False
        while not closed:
            if separators := cast("re.Match[bytes]", _LEAD.match(self._data)).end():
                self._data = self._data[separators:]
            if not self._data and not self._read_more():
                break
            if events := self._take_piece():
                yield events
                if len(self._data) < PIECE_BYTES:
                    self._read_more()
                continue
            before = len(self._data)
            events, closed = self._take_singly()
            yield events
            if not closed and not self._read_more() and len(self._data) == before:
                break
        self.is_complete = closed and not self._cut
        if closed:
            while len(self._data) < _TRAILER_BYTES and self._read_more():
                pass
            self.fields |= _parse_object(b"{" + self._data.lstrip(b" \r\n\t,"))

    def convert(self, items: list[object]) -> list[Event]:
        """Return events from parsed JSON."""
        return msgspec.convert([item for item in items if isinstance(item, dict)], list[self._kind])  # type: ignore[name-defined]

    def _read_more(self) -> bool:
        """Append a piece of the file, as long as the text so far or longer; return False at the end of the file."""
        piece, self._cut = read_piece(self._file, max(PIECE_BYTES, len(self._data)))
        self._data += piece
        if len(self._data) > MAX_PIECE_BYTES:
            raise UsageError(
                f"no event ends within {MAX_PIECE_BYTES >> 20} MiB: not a trace file, or damaged; record it again"
            )
        return bool(piece)

    def _take_piece(self) -> list[Event]:
        """Return the events of the text up to the last one that is followed by another; none if no end is found."""
        data, end = self._data, len(self._data)
        for _ in range(_MAX_CUTS_TRIED):
            end = data.rfind(b"}", 0, end)
            if end <= 0:
                break
            match = _EVENT_END.match(data, end)
            if match is None or not data.startswith((b"{", b'"'), match.end()):
                continue
            if b'"ph"' not in data[match.end() : match.end() + 40] and b'"ph"' in data[:4096]:
                continue
            try:
                events: list[Event] = self._decode(b"".join((b"[", memoryview(data)[: end + 1], b"]")))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                if self.is_strict and isinstance(error, msgspec.ValidationError):
                    raise
                continue
            self._data = data[match.end() :]
            return events
        return []

    def _take_singly(self) -> tuple[list[Event], bool]:
        """Return the complete events of the text, parsed one by one, and whether the list ends after them."""
        text, begin, decoder = self._data.decode("utf-8", "surrogateescape"), 0, json.JSONDecoder()
        items: list[object] = []
        closed = False
        while not closed:
            begin = cast("re.Match[str]", _BETWEEN.match(text, begin)).end()
            if closed := text[begin : begin + 1] == "]":
                begin += 1
                break
            try:
                item, begin = decoder.raw_decode(text, begin)
            except (ValueError, RecursionError):
                break
            items.append(item)
        self._data = text[begin:].encode("utf-8", "surrogateescape")
        return self.convert(items), closed


def _parse_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object; {} if the bytes are something else."""
    try:
        found = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
